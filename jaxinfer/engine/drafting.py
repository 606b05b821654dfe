"""How many tokens an engine drafts from chunk to chunk, and what becomes of them. Plain Python."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.drafting_metrics import SpeculationMetrics
from jaxinfer.engine.sequence import Chunk
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Settings
from jaxinfer.engine.work import Work
from jaxinfer.model import Model
from jaxinfer.speculative.loop import steps_of
from jaxinfer.speculative.policy import Controller
from jaxinfer.speculative.report import SpeculationReport
from jaxinfer.speculative.speculation import Speculation

JUDGED_BEFORE_WARNING = 500
"""Drafted tokens that are judged before the engine says what a draft quantised apart from its target was accepted
with."""
SMOOTHING = 0.8
"""What a chunk leaves of the tokens per step that were expected before it."""


class Drafting:
    """The policy at work: a controller for each number of rows that decode programs have, since what pays for four
    readers loses for a hundred."""

    def __init__(self, speculation: Speculation, settings: Settings, target: Model) -> None:
        self.speculation, self._settings, self._target = speculation, settings, target
        self.report = SpeculationReport()
        """Since the metrics were reset; the speculation's own report goes on."""
        self.catch_up_seconds = 0.0
        self.draft_seconds = 0.0
        """What the draft's passes took, as far as `pass_seconds` knows."""
        self.pass_seconds: dict[int, float] = {}
        """Seconds that drafting one token takes, by rows of the program; empty if it was not timed."""
        params = speculation.draft.params
        self._runs_nothing = isinstance(params, tuple) and not params
        self._controllers: dict[int, Controller] = {}
        self._rates: dict[int, float] = {0: 1.0}
        """Tokens that a step is expected to give, by drafted length."""
        self._chosen: tuple[int, int] | None = None
        """The rows and the length of a chunk that was planned and may still be put off."""

    def reset(self) -> None:
        """Counts anew."""
        self.report, self.catch_up_seconds, self.draft_seconds = SpeculationReport(), 0.0, 0.0

    def metrics(self) -> SpeculationMetrics:
        """What was counted since the last reset."""
        known = self.pass_seconds or self._runs_nothing
        return SpeculationMetrics.of(self.report, self.draft_seconds if known else None, self.catch_up_seconds)

    def plan(self, running: Sequence[Track], waiting: Sequence[Track] = ()) -> Chunk:
        """What the next decode chunk does, if it comes, for the sequences that are ready for it now, or if none is, for
        those whose prompts may end in this round."""
        ready = [sequence for sequence in running if sequence.wants_decode]
        rows = self._rows(len(ready))
        if self._chosen is None or self._chosen[0] != rows:
            concerned = ready or [*running, *waiting[:1]]
            context = max((len(sequence.tokens) for sequence in concerned), default=0)
            self._chosen = rows, self._controller(rows).choose(context)
        length = self._chosen[1]
        steps = steps_of(self._settings.rules.decode_chunk, length)
        return Chunk(steps, length, self._rates.get(length, 1.0))

    def dispatched(self) -> None:
        """The chunk that was planned has come."""
        self._chosen = None

    def observe(self, work: Work, seconds: float, *, compiled: bool) -> None:
        """Takes in what a program did and how long it took. With `compiled` something was compiled meanwhile: no figure
        counts that time, and the policy, which goes by medians, can do with it."""
        timed = None if compiled else seconds
        if work.kind == "draft":
            self.catch_up_seconds += timed or 0.0
        if work.counts is None or work.chunk is None:
            return
        drafted = work.chunk.num_drafted
        proposed, accepted = np.asarray(work.counts.proposed), np.asarray(work.counts.accepted)
        running = accepted >= 0
        if not running.any():
            return
        rate = float(np.mean(accepted[running]) + 1.0)
        self._rates[drafted] = SMOOTHING * self._rates.get(drafted, rate) + (1 - SMOOTHING) * rate
        self._controller(len(work.rows)).observe(drafted, proposed, accepted, seconds / work.chunk.num_steps)
        if timed is not None:
            self.draft_seconds += self.pass_seconds.get(len(work.rows), 0.0) * drafted * work.chunk.num_steps
        tokens = int(work.outputs.counts.sum())
        self.report.add(drafted, proposed, accepted, tokens, timed)
        with self.speculation.lock:
            self.speculation.report.add(drafted, proposed, accepted, tokens, timed)
        if sum(self.report.judged) >= JUDGED_BEFORE_WARNING:
            self.speculation.warn_of_plans(self._target)

    def _rows(self, count: int) -> int:
        sizes = self._settings.decode_rows
        return next((size for size in sizes if size >= count), sizes[-1])

    def _controller(self, rows: int) -> Controller:
        if rows not in self._controllers:
            k = self.speculation.draft.k
            self._controllers[rows] = self.speculation.policy.begin(k, rows, self._settings.max_context)
        return self._controllers[rows]
