"""Scoring inside the engine: runs of a scoring plan, computed between rounds, over the engine's pages and prefix cache.

`jaxinfer.scoring_plan` says what is to be computed: a forest of runs of tokens, shared prefixes once. Here each run
finds in the prefix cache what is known of its text, whoever computed it, and computes the rest. It owns pages only
while its calls are dispatched; afterwards the cache keeps those of contexts for the runs that follow, later calls and
other requests, and gives them up when somebody needs the room: a run whose prefix is gone computes it again.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Hashable, Sequence

import jax
import numpy as np

from jaxinfer.batch import Limits
from jaxinfer.engine.metrics import Meter
from jaxinfer.engine.pages import OutOfPages
from jaxinfer.engine.prefix_cache import Cursor
from jaxinfer.engine.programs import Size
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import MAX_SKIPS, Scheduler
from jaxinfer.engine.sequence import Plan, Status
from jaxinfer.scoring_plan import Run, Targets, TokenPair, build_forest, length_class, rows_for
from jaxinfer.scoring_run import Scored, call_arguments, calls_for, read_call, row_tokens


@dataclasses.dataclass(eq=False)
class ScoringJob:
    """Pairs being scored. Whoever asked for them takes `scored` away."""

    ready: collections.deque[Run]
    """Runs whose parents have been computed, in order."""
    scored: collections.deque[Scored] = dataclasses.field(default_factory=collections.deque)
    unread: list[Run] = dataclasses.field(default_factory=list)
    """Pieces of runs taken from `ready` whose scores are still to come."""
    taken: list[Run] = dataclasses.field(default_factory=list)
    """Runs taken from `ready` whose children are not there yet."""

    @property
    def done(self) -> bool:
        return not self.ready and not self.unread

    def queue_children(self) -> None:
        """What was taken has been computed, or will be: the runs that follow it are next."""
        self.ready.extendleft(reversed([child for run in self.taken for child in run.children]))
        self.taken.clear()


@dataclasses.dataclass(frozen=True)
class Placed:
    """A run with its pages: `pieces` to compute one after the other, each no longer than a call takes. A piece has the
    text before it as its parent."""

    run: Run
    tokens: list[int]
    """From the text's first to the run's last."""
    pages: list[int]
    pieces: list[Run]
    cursor: Cursor | None
    num_kept: int
    """Leading tokens worth keeping: of a context, in whole pages."""


@dataclasses.dataclass(frozen=True)
class ScoringCall:
    """One dispatched program."""

    job: ScoringJob
    runs: list[Run]
    logprobs: jax.Array
    best: jax.Array
    num_rows: int
    dispatched: float


class Scorer:
    """All scoring jobs of an engine, and their calls on the device. The scheduler's requests go first."""

    def __init__(self, longest_run: int) -> None:
        self._longest_run = longest_run
        """Tokens of a row of one call at most, a number of pages."""
        self._jobs: collections.deque[ScoringJob] = collections.deque()
        self._in_flight: collections.deque[ScoringCall] = collections.deque()
        self._num_new = 0
        """Calls in flight that were dispatched in this round."""
        self._skipped = 0

    def add(self, pairs: Sequence[TokenPair], runner: Runner) -> ScoringJob:
        """Queues pairs, which must fit."""
        page_size = runner.settings.rules.page_size
        forest = build_forest(rows_for(pairs), runner.model.config, page_size, self._longest_run)
        job = ScoringJob(collections.deque(forest))
        self._jobs.append(job)
        return job

    def remove(self, job: ScoringJob) -> None:
        """Forgets a job, done or not; what it has on the device runs to its end."""
        self._jobs = collections.deque(one for one in self._jobs if one is not job)  # twice there after an interrupt

    def recover(self) -> None:
        """After an exception in a round: what was on its way is computed again."""
        self._in_flight.clear()
        self._num_new = 0
        self._jobs = collections.deque(dict.fromkeys(self._jobs))
        for job in self._jobs:
            job.queue_children()
            job.ready.extendleft(reversed(job.unread))
            job.unread.clear()

    def dispatch(self, scheduler: Scheduler, runner: Runner, plan: Plan) -> None:
        """Starts a round's calls, of as many tokens as the plan has left of what a round may compute."""
        self._num_new = 0
        job = next((job for job in self._jobs if job.ready), None)
        if job is None:
            return
        rules = runner.settings.rules
        bound = rules.max_prefill_tokens
        reading = any(one.interactive and one.status is Status.DECODING for one in scheduler.running)
        if reading and rules.policy == "separate":
            bound = max(min(bound, scheduler.stall_tokens), rules.prefill_lengths[0])
        budget = bound - sum(rules.padded(piece.length) for piece in plan.pieces)
        if budget < rules.prefill_lengths[0]:
            self._skipped += 1
            if self._skipped <= MAX_SKIPS:
                return
            budget = bound
        self._skipped = 0
        whole = min(budget, Limits.default().prefill_tokens)
        limits = Limits(prefill_chunk=self._longest_run, prefill_tokens=whole, decode_chunk=1)
        while budget > 0 and job.ready:
            batch, cost = self._take(job, scheduler, runner, budget)
            if not batch:
                break
            budget -= cost
            if scheduler.prefixes is not None:
                runner.move(scheduler.prefixes.take_moves())
            self._compute(job, batch, runner, limits)
            job.queue_children()
            self._keep(batch, scheduler)
        self._jobs.append(job)  # everybody's turn
        self._jobs.remove(job)

    def read(self, scheduler: Scheduler, runner: Runner, meter: Meter) -> None:
        """Waits for the calls of earlier rounds and files their scores."""
        while len(self._in_flight) > self._num_new:
            call = self._in_flight.popleft()
            scored = read_call(call.runs, call.logprobs, call.best)
            meter.add_program("prefill", call.dispatched, len(call.runs), call.num_rows, scored.num_computed)
            self._distrust(call.runs, scored, scheduler, runner)
            call.job.scored.append(scored)
            for run in call.runs:
                call.job.unread.remove(run)
        self._num_new = 0

    @staticmethod
    def _distrust(runs: Sequence[Run], scored: Scored, scheduler: Scheduler, runner: Runner) -> None:
        """Removes from the cache what runs whose logits were not finite may have left there."""
        first = 0
        for run in runs:
            mine = scored.logprobs[first : first + len(run.targets.slots)]
            first += len(mine)
            if scheduler.prefixes is not None and np.isnan(mine).any():
                pages, _ = scheduler.prefixes.match(_tokens(run), run.end, _salt(run, runner))
                scheduler.prefixes.forget(pages)

    def _take(self, job: ScoringJob, scheduler: Scheduler, runner: Runner, budget: int) -> tuple[list[Placed], int]:
        """Takes ready runs, with pages, until they cost `budget` tokens; none while others have all the pages."""
        gpu = jax.default_backend() == "gpu"
        batch: list[Placed] = []
        spent = 0
        while job.ready:
            placed = self._place(job.ready[0], scheduler, runner)
            if placed is None:
                break
            cost = sum(row_tokens(len(piece.tokens), piece.start, gpu=gpu) for piece in placed.pieces)
            if batch and spent + cost > budget:
                scheduler.pool.release(placed.pages)
                break
            spent += cost
            batch.append(placed)
            job.taken.append(placed.run)  # in this order an interrupt loses no run; one may be computed twice then
            job.unread += placed.pieces
            job.ready.popleft()
        return batch, spent

    def _place(self, run: Run, scheduler: Scheduler, runner: Runner) -> Placed | None:
        """Finds what is known of a run's text and gives it pages for the rest; None if there are not enough."""
        prefixes, pool = scheduler.prefixes, scheduler.pool
        size = runner.settings.rules.page_size
        tokens = _tokens(run)
        places = run.targets.places
        first = run.start + int(places.min()) if len(places) else run.end
        """The first token whose logits are wanted."""
        known: list[int] = []
        cursor = None
        num_kept = 0
        if prefixes is not None:
            known, cursor = prefixes.match(tokens, first, _salt(run, runner))
            num_kept = (run.end if run.children else min(first + 1, run.end)) // size * size
        start = len(known) * size
        bounds = [*range(start, run.end, self._longest_run), run.end]
        num_pages = -(-run.end // size)  # also of what is not kept: a kernel's attention reads what it has just written
        pool.share(known)
        try:
            pages = known + pool.allocate(num_pages - len(known))
        except OutOfPages:
            pool.release(known)
            return None
        pieces = _pieces(run, tokens, bounds, pages) if start < run.end else []
        if prefixes is None and not len(places):
            pieces = []  # without a cache nobody could read it
        return Placed(run, tokens, pages, pieces, cursor, num_kept)

    def _compute(self, job: ScoringJob, batch: Sequence[Placed], runner: Runner, limits: Limits) -> None:
        """Dispatches a batch: first pieces together, then second ones, which read what the first wrote."""
        longest = max(len(placed.pieces) for placed in batch)
        for turn in range(longest):
            stage = [placed.pieces[turn] for placed in batch if turn < len(placed.pieces)]
            for runs, size in calls_for(stage, limits):
                self._call(job, runs, size, runner)

    def _call(self, job: ScoringJob, runs: list[Run], size: int, runner: Runner) -> None:
        longest = max(1, *(len(run.pages) for run in runs))
        width = next(width for width in runner.settings.page_widths if width >= longest)
        arrays, options = call_arguments(runner.model, runs, size, width)
        rows, num_places = arrays[0].shape[0], arrays[5].shape[0]
        program = runner.programs.get(
            Size(
                "score",
                rows,
                size,
                width,
                from_empty=options["from_empty"],
                num_places=num_places,
                head_rows=options["head_rows"],
            )
        )
        now = time.perf_counter()
        logprobs, best, runner.cache = program(runner.model.params, runner.cache, *arrays)
        for array in (logprobs, best):
            array.copy_to_host_async()
        self._in_flight.append(ScoringCall(job, runs, logprobs, best, rows, now))
        self._num_new += 1

    @staticmethod
    def _keep(batch: Sequence[Placed], scheduler: Scheduler) -> None:
        """Tells the cache what has been computed, and gives the pages back: work dispatched from now on comes later."""
        for placed in batch:
            if scheduler.prefixes is not None and placed.cursor is not None:
                scheduler.prefixes.extend(placed.cursor, placed.tokens, placed.pages, placed.num_kept)
            scheduler.pool.release(placed.pages)


def _tokens(run: Run) -> list[int]:
    """A run's text from its first token on."""
    parts: list[list[int]] = []
    step: Run | None = run
    while step is not None:
        parts.append(step.tokens.tolist())
        step = step.parent
    return [token for part in reversed(parts) for token in part]


def _pieces(run: Run, tokens: list[int], bounds: Sequence[int], pages: list[int]) -> list[Run]:
    """A run's tokens between each two bounds."""
    targets = Targets(run.targets.places + run.start, run.targets.tokens, run.targets.slots)
    whole = np.array(tokens, np.int32)

    def piece(low: int, high: int, parent: Run | None) -> Run:
        return Run(whole[low:high], low, run.context_length, targets.between(low, high), parent, pages=pages)

    return [piece(low, high, piece(0, low, None) if low else None) for low, high in itertools.pairwise(bounds)]


def _salt(run: Run, runner: Runner) -> Hashable:
    salt = length_class(runner.model.config, run.context_length)
    return (salt, "scored") if runner.settings.rules.two_weights else salt  # scores are those of decoding's weights
