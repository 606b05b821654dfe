"""The engine's inside: unfinished requests, and the round that works on them."""

import collections
import itertools
import logging
import reprlib
import time
import typing
from collections.abc import Sequence

from jaxinfer.batch import cache_tokens
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.drafting import Drafting
from jaxinfer.engine.drafting_runner import DraftingRunner
from jaxinfer.engine.errors import DuplicateRequest, EngineClosed, EngineError
from jaxinfer.engine.host_pages import HostPool
from jaxinfer.engine.jobs import Callback, Job, check_room
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.lock import FairLock
from jaxinfer.engine.metrics import Clock, Meter
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.scoring import Scorer
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Settings, settle
from jaxinfer.engine.tiered_runner import TieredRunner
from jaxinfer.engine.tiered_scheduler import TieredScheduler
from jaxinfer.engine.tiering import check as check_tiers
from jaxinfer.engine.work import Result, Work
from jaxinfer.generation import requests_for
from jaxinfer.model import Model, check_loaded
from jaxinfer.outputs import Delta, FinishReason
from jaxinfer.request import Request
from jaxinfer.scoring_plan import length_class
from jaxinfer.speculative.proposer import Draft
from jaxinfer.speculative.speculation import Speculation, as_speculation

log = logging.getLogger("jaxinfer")


class EngineCore:
    """State of an engine and what changes it. Every method but `__init__` expects the caller to hold `_lock`."""

    def __init__(
        self, model: Model, config: EngineConfig | None = None, *, draft: Draft | Speculation | None = None
    ) -> None:
        """Allocates the pool. `draft` turns on speculative decoding, as in `jaxinfer.generate`: same results.

        Raises ValueError for a configuration that does not fit the model or the device, and for a draft that does not
        fit the model.
        """
        check_loaded(model)
        if not isinstance(config, EngineConfig | None):
            raise ValueError(f"config={reprlib.repr(config)}; expected a jaxinfer.EngineConfig")
        self.config = EngineConfig() if config is None else config
        speculation = None if draft is None else as_speculation(draft)
        check_tiers(self.config, model.kv_dtype, drafts=speculation is not None)
        if speculation is not None:
            speculation.draft.check(model, 0)
        self.settings: Settings = settle(self.config, model, speculation)
        self._model: Model | None = model
        self._runner: Runner | None = self._new_runner(model, speculation)
        self._drafting = None if speculation is None else Drafting(speculation, self.settings, model)
        self._lock = FairLock()
        self._meter = Meter()
        self._jobs: dict[str, Job] = {}
        """Unfinished requests, in order of arrival."""
        self._owners: dict[Track, tuple[Job, int]] = {}
        self._requests: dict[Track, Request] = {}
        self._layouts: dict[SamplerLayout, SamplerLayout] = {}
        """One object for all requests of equal needs, which are then told apart without a comparison."""
        self._needs: list[SamplerLayout] = []
        """Layouts of everybody who has a slot, and the number of the scheduler's changes that they were found at."""
        self._needed_at = -1
        self._news: list[Delta] = []
        self._numbers = itertools.count()
        self._groups = itertools.count()
        self._in_round = self._interrupted = self._close_asked = False
        self._in_flight: collections.deque[list[Work]] = collections.deque()
        self._preemptions_before = 0
        self._scheduler = self._new_scheduler()
        longest, page_size = self.settings.rules.prefill_lengths[-1], self.settings.rules.page_size
        self._scorer = Scorer(max(longest // page_size, 1) * page_size)
        log.info("engine for %s: %s", model.name, self.settings)

    # --- Requests

    def _live(self) -> tuple[Model, Runner]:
        if self._model is None or self._runner is None:
            raise EngineClosed("the engine is closed; make a new one")
        return self._model, self._runner

    def _new_runner(self, model: Model, speculation: Speculation | None) -> Runner:
        if speculation is not None:
            return DraftingRunner(model, self.settings, speculation)
        return (Runner if self.settings.tiers is None else TieredRunner)(model, self.settings)

    def _new_scheduler(self) -> Scheduler:
        tiers = self.settings.tiers
        if tiers is not None:
            return TieredScheduler(self.settings.rules, tiers.rules, tiers.pools)
        pool = PagePool(self.settings.num_pages)
        if isinstance(self._runner, DraftingRunner):
            pool.on_allocate = self._runner.filled.difference_update
        prefixes = None
        if self.settings.prefix_cache:
            prefixes = PrefixCache(pool, self.settings.rules.page_size, HostPool(self.settings.host_pages))
            prefixes.is_worth_restoring = self._is_worth_restoring
        return Scheduler(self.settings.rules, pool, prefixes)

    def _checked(self, prompts: typing.Any, params: typing.Any) -> list[Request]:
        """Requests of all prompts, every one of which can run. Raises before anything is queued."""
        model, _ = self._live()
        requests = requests_for(model, prompts, params)
        check_room(requests, self.settings, min(model.config.max_position_embeddings, self.config.max_context or 2**31))
        if self._drafting is not None:
            for request in requests:
                self._drafting.speculation.draft.check(model, cache_tokens(request))
        return requests

    def _open(self, requests: Sequence[Request], *, interactive: bool, num_kept: int | None = None) -> list[Job]:
        """Queues checked requests, one job a prompt, with a mailbox each that keeps the last `num_kept` deltas."""
        jobs = list[Job]()
        try:
            for _, samples in itertools.groupby(requests, key=lambda request: request.prompt_index):
                mailbox = collections.deque[Delta](maxlen=num_kept)
                jobs.append(self._enqueue(list(samples), None, interactive=interactive, mailbox=mailbox))
        except BaseException:  # nobody would read the others' news
            for job in jobs:
                del self._jobs[job.request_id]
            self._interrupted = True
            raise
        return jobs

    def _enqueue(
        self,
        requests: list[Request],
        request_id: str | None,
        *,
        interactive: bool,
        callback: Callback | None = None,
        mailbox: collections.deque[Delta] | None = None,
    ) -> Job:
        model, _ = self._live()
        if request_id is None:
            request_id = next(name for n in self._numbers if (name := f"request-{n}") not in self._jobs)
        if request_id in self._jobs:
            raise DuplicateRequest(f"request id {request_id!r} belongs to an unfinished request; choose another")
        layout = SamplerLayout.required(requests[0].params, model.config)
        layout = self._layouts.setdefault(layout, layout)
        clocks = [Clock(time.perf_counter()) for _ in requests]
        job = Job(request_id, requests, layout, clocks, interactive, callback, mailbox)
        for request in requests:
            request.request_id = request_id
        try:
            self._jobs[request_id] = job
            self._add_tracks(job)
        except BaseException:  # nobody has its id
            self._jobs.pop(request_id, None)
            self._interrupted = True
            raise
        self._meter.submitted += len(requests)
        return job

    def _add_tracks(self, job: Job) -> None:
        """Hands a job's unfinished completions to the scheduler, with what they have said so far."""
        model, _ = self._live()
        group = next(self._groups)
        job.tracks = []
        for index, request in enumerate(job.requests):
            if request.finished:
                continue
            scored = request.params.prompt_logprobs is not None and index == 0
            track = Track(
                tokens=[*request.prompt, *request.token_ids],
                num_prompt=len(request.prompt),
                max_tokens=request.max_tokens,
                group=group,
                salt=length_class(model.config, len(request.prompt) + request.max_tokens - 1),
                interactive=job.interactive,
                reuses=not scored or bool(request.token_ids),
            )
            job.tracks.append(track)
            self._owners[track], self._requests[track] = (job, index), request
            self._scheduler.add(track)

    # --- The round

    def _advance(self) -> None:
        """One round: plan, dispatch, read what came before. The device always has something left to do meanwhile."""
        _, runner = self._live()
        if self._in_round:
            raise EngineError("a callback asked the engine for a round; callbacks run in the middle of one")
        if self._interrupted:
            self._recover()
        self._in_round, scheduler = True, self._scheduler
        try:
            self._set_stall_bound()
            if self._drafting is not None:
                scheduler.chunk = self._drafting.plan(scheduler.running, scheduler.waiting)
            plan = scheduler.plan()
            if scheduler.prefixes is not None:
                runner.move(scheduler.prefixes.take_moves())
            if self._drafting is not None and plan.decode:
                self._drafting.dispatched()
            if self._needed_at != scheduler.num_changes:
                self._needed_at = scheduler.num_changes
                needs = (self._owners[track][0].layout for track in scheduler.running)
                self._needs = list({id(layout): layout for layout in needs}.values())
            num_compiled = runner.programs.num_compiled
            works = runner.dispatch(plan, self._requests, self._needs)
            for work in works:
                work.num_compiled = num_compiled
            self._scorer.dispatch(scheduler, runner, plan)
            # A round's decode chunk is read in the next round, first tokens before it at once: they are on their way.
            later = works if not plan.decode else works[-1:]
            now = works[: len(works) - len(later)]
            if works:
                self._in_flight.append(later)
            for _ in range(len(self._in_flight) - bool(works)):
                self._read(self._in_flight.popleft(), runner)
            self._scorer.read(scheduler, runner, self._meter)
            self._read(now, runner)
        except BaseException:
            self._interrupted = True
            raise
        finally:
            self._in_round = False

    def _read(self, works: Sequence[Work], runner: Runner) -> None:
        """Waits for programs and hands out their results."""
        for work in works:
            results = runner.read(work, self._requests)
            if work.kind == "first":
                self._meter.has_read()
            else:
                seconds = self._meter.add_program(
                    work.kind, work.dispatched, work.num_rows, len(work.rows), work.num_tokens
                )
                if self._drafting is not None:
                    compiled = runner.programs.num_compiled > work.num_compiled
                    self._drafting.observe(work, seconds, compiled=compiled)
            for result in results:
                self._take(result)

    def _take(self, result: Result) -> None:
        track = result.sequence
        owner = self._owners.get(track)
        if owner is None:  # it ended while this was on its way
            self._scheduler.read(track, [])
            return
        job, index = owner
        request = job.requests[index]
        if result.prompt_tables:
            request.prompt_tables += result.prompt_tables
        taken, text = request.add(result.tokens, result.tables, result.failed)
        self._scheduler.read(track, result.tokens[:taken])
        if request.finish_reason is not None:
            self._scheduler.finish(track, trusted=not result.failed)
            del self._owners[track], self._requests[track]
        elif not taken:
            return
        if taken:
            self._meter.add_tokens(job.clocks[index], taken)
        if request.finish_reason is None and not job.is_heard:
            request.num_sure = len(request.token_ids)
            return
        self._deliver(job, index, request.delta(result.tokens[:taken], text, result.tables[:taken]))

    def _deliver(self, job: Job, index: int, delta: Delta) -> None:
        """Files the news of one completion, and calls the callback, whose failure ends this request only."""
        request, box = job.requests[index], self._news if job.mailbox is None else job.mailbox
        num_tokens, is_end = len(request.token_ids), delta.finish_reason is not None
        # No interrupt comes in between: news is told once, and what was not told is computed again.
        request.num_sure, request.end_is_sure = num_tokens, is_end
        box.append(delta)
        if delta.finish_reason is not None:
            self._meter.add_finished(job.clocks[index], delta.finish_reason)
            job.num_unfinished -= 1
            if job.finished:
                self._jobs.pop(job.request_id, None)
        if job.callback is not None:
            try:
                job.callback(delta)
            except Exception as error:  # whatever a caller's function raises is that caller's misfortune
                said = _described(error)
                log.warning("the callback of request %r raised %s; the request ends", job.request_id, said)
                job.callback = None
                self._end_job(job, "error", f"the request's callback raised {said}")

    def _end_job(self, job: Job, reason: FinishReason, detail: str | None) -> None:
        """Ends every unfinished completion of a request from outside."""
        try:
            for track in job.tracks:
                owner = self._owners.pop(track, None)
                if owner is None:
                    continue
                del self._requests[track]
                self._scheduler.finish(track)
                self._deliver(job, owner[1], job.requests[owner[1]].end(reason, detail))
        except BaseException:
            self._interrupted = True
            raise

    def _set_stall_bound(self) -> None:
        if self.config.decode_stall_ms is not None and self._meter.prefill_rate is not None:
            self._scheduler.stall_tokens = int(self.config.decode_stall_ms * 1e-3 * self._meter.prefill_rate)

    def _is_worth_restoring(self, num_pages: int) -> bool:
        """Whether copying pages from the host is faster than computing their tokens; if that is not known, it is.

        What follows them is computed in any case: their tokens cost what they add to that, as in large programs.
        """
        _, runner = self._live()
        seconds = None if runner.store is None else runner.store.seconds_for(num_pages)
        rate = self._meter.full_prefill_rate
        return seconds is None or rate is None or seconds < num_pages * self.settings.rules.page_size / rate

    def _recover(self) -> None:
        """After an exception in a round: new memory, and everybody's tokens computed again up to where they were."""
        _, runner = self._live()
        self._in_flight.clear()
        self._owners.clear()
        self._requests.clear()
        before, self._scheduler, self._needed_at = self._scheduler, self._new_scheduler(), -1
        self._preemptions_before += before.num_preemptions
        self._scheduler.num_looked_up, self._scheduler.num_reused = before.num_looked_up, before.num_reused
        runner.reset()
        self._scorer.recover()
        for job in list(self._jobs.values()):
            for request in job.requests:
                request.rewind()
            job.num_unfinished = sum(not request.finished for request in job.requests)
            if job.finished:
                del self._jobs[job.request_id]
            else:
                self._add_tracks(job)
        self._interrupted = False


def _described(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # that caller's misfortune too
        return type(error).__name__
