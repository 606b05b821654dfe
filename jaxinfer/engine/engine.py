"""The engine: takes requests at any time, and works on all of them at once."""

import os
import time
import typing
from collections.abc import AsyncGenerator, Generator, Iterable

import jax

from checkpoints.progress import BEFORE_TOKENS, is_watched, progress_bar
from jaxinfer.engine.drafting_runner import DraftingRunner
from jaxinfer.engine.errors import RequestTooLong, UnknownRequest
from jaxinfer.engine.jobs import Callback, check_submission
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.readers import EngineReaders
from jaxinfer.engine.snapshot import snapshot
from jaxinfer.engine.timeline import plot_timeline
from jaxinfer.outputs import Delta, RequestOutput
from jaxinfer.request import Prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import Score, encode_pairs, scored_pairs

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure


class Engine(EngineReaders):
    """Continuous batching on one device: prefill and decode as two kinds of work over one pool of cache pages.

    `generate` and `stream` are those of the functional front door, with the same results; `submit`, `step` and `abort`
    are for those who drive it themselves; `stream_async` for an event loop. All may be used at once and from several
    threads. Use it as a context manager, or `close` it: the pool takes most of the device's free memory.
    """

    def __repr__(self) -> str:
        if self._model is None:
            return "Engine(closed)"
        return f"Engine({self._model.name!r}, {self.settings.num_pages} pages, {len(self._jobs)} unfinished requests)"

    # --- Driving it oneself

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its last news not handed out by `step` yet."""
        return bool(self._jobs or self._news)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        callback: Callback | None = None,
        arrived: float | None = None,
    ) -> str:
        """Queues a request and returns its id, which every `Delta` of it carries. Nothing runs before `step`.

        `callback` is called with each delta of the request, which `step` returns all the same. If it raises, this
        request ends with finish reason "error" and the exception as `stop_reason`. Raises ValueError for a bad prompt
        or parameter, RequestTooLong, DuplicateRequest for an id that is in use, EngineClosed. Latencies are measured
        from `arrived`, a value of `time.perf_counter()`; by default from now.
        """
        check_submission(request_id, callback, arrived)
        with self._lock:
            requests = self._checked([prompt], params)
            job = self._enqueue(requests, request_id, interactive=True, callback=callback)
            for clock in job.clocks:
                clock.submitted = clock.submitted if arrived is None else arrived
            return job.request_id

    def step(self) -> list[Delta]:
        """Dispatches the next round of work, reads what came back, and returns the news of submitted requests.

        Returns an empty list while results are still on their way; `while engine.has_work: engine.step()`. An exception
        (an interrupt, memory running out) leaves the engine usable: unfinished requests are computed again.
        """
        with self._lock:
            if self._model is not None or not self._news:  # what `close` ended is news too
                self._advance()
            news, self._news = self._news, []
            return news

    def abort(self, request_id: str) -> None:
        """Ends a request: its last delta has finish reason "abort", its memory is free for the next round.

        Raises UnknownRequest if no unfinished request has this id.
        """
        with self._lock:
            self._live()
            if not isinstance(request_id, str) or request_id not in self._jobs:
                raise UnknownRequest(f"no unfinished request has the id {request_id!r}; it may have ended already")
            self._end_job(self._jobs[request_id], "abort", None)

    # --- Batches and streams

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """As `jaxinfer.generate`, and with the same tokens: one RequestOutput a prompt, in order.

        Prompts go first while nobody else reads along. `progress` shows a bar with the rates of prefill and decoding;
        by default on a terminal and in a notebook. If it is interrupted, its requests are aborted.
        """
        shown = is_watched() if progress is None else progress
        with self._lock:
            jobs = self._open(self._checked(prompts, params), interactive=False, num_kept=0)
        before = (self._meter.prompt_tokens, self._meter.output_tokens)
        start = time.perf_counter()
        options = {"unit": "request", "desc": "Generating", "postfix": BEFORE_TOKENS, "leave": False}
        try:
            with progress_bar(total=len(jobs), shown=shown, **options) as bar:
                unfinished = list(jobs)
                while unfinished:
                    with self._lock:
                        if not all(job.finished for job in unfinished):  # by another thread's rounds, or by `close`
                            self._advance()
                    seconds = time.perf_counter() - start
                    prefill = (self._meter.prompt_tokens - before[0]) / seconds
                    decode = (self._meter.output_tokens - before[1]) / seconds
                    bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
                    still = [job for job in unfinished if job.num_unfinished]
                    bar.update(len(unfinished) - len(still))
                    unfinished = still
        finally:
            self._abandon(jobs)
        return [job.output() for job in jobs]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Generator[Delta, None, None]:
        """As `jaxinfer.stream`: yields a `Delta` whenever a completion has new tokens. Closing it aborts the rest.

        Arguments are checked when this is called; requests are queued when the first delta is asked for.
        """
        with self._lock:
            return self._follow(self._checked(prompts, params))

    def stream_async(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """`stream` for an event loop, which goes on while the device works; any number may run at once."""
        return self._follow_async(self._checked(prompts, params))  # without the lock: a round may have it

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        continuations: Prompt | Iterable[Prompt],
        *,
        progress: bool | None = None,
    ) -> list[Score]:
        """As `jaxinfer.score`, and with the same results, beside whatever else the engine is doing.

        What prompts have in common is computed once and stays in the prefix cache: for the next call, and for requests
        that begin the same. Other requests go first: a round scores as many tokens as their prompts have left of what
        it may compute, so nobody's text waits longer than for a prompt. Programs for scoring are compiled when they are
        first needed, not by `warmup`. Raises RequestTooLong for a pair that the pool cannot hold, EngineClosed, also if
        the engine is closed meanwhile, and ValueError for a model with a tiered cache.
        """
        shown = is_watched() if progress is None else progress
        with self._lock:
            model, _ = self._live()
        if self.settings.tiers is not None:
            raise ValueError(
                "score does not work with a tiered cache; load the model with another kv_dtype, such as 'int8'"
            )
        pairs = encode_pairs(model, prompts, continuations)
        for index, pair in enumerate(pairs):
            if pair.num_inputs > self.settings.max_context:
                raise RequestTooLong(
                    f"pair {index} has {pair.num_inputs + 1} tokens, more than max_context={self.settings.max_context} "
                    "and one; shorten it, or raise max_context or num_pages"
                )
        scores = dict(scored_pairs(model, pairs, progress=shown, run=self._run_pairs))
        return [scores[index] for index in range(len(pairs))]

    # --- Compilation, metrics, memory

    def warmup(self, *, progress: bool | None = None, threads: int | None = None) -> None:
        """Compiles every program that the configuration can need, in threads (default: one a core).

        On a GPU each then runs on empty rows, seconds in all: what a program's first runs put off is done by then. The
        host memory of `host_pages` is pinned, which takes a second for each GB.
        Afterwards nothing compiles while serving, unless a request needs a part of the sampler, or more listed
        logprobs, that no example in `EngineConfig.sampling` has: `metrics().compilations_after_warmup` tells.
        """
        shown = is_watched() if progress is None else progress
        with self._lock:
            runner = self._live()[1]
            new = runner.programs.warmup(progress=shown, threads=threads or os.cpu_count())
            try:
                if jax.default_backend() != "cpu":
                    runner.rehearse(new)
                if self._drafting is not None and isinstance(runner, DraftingRunner):
                    self._drafting.pass_seconds = runner.time_draft()
                runner.prepare_host()
            except BaseException:
                self._interrupted = True  # a program that was stopped may have taken the cache
                raise

    def metrics(self) -> EngineMetrics:
        """What the engine does now and did since it was made or `reset_metrics` was called."""
        with self._lock:
            _, runner = self._live()
            return snapshot(self._meter, self._scheduler, runner, self._preemptions_before, self._drafting)

    def reset_metrics(self) -> None:
        """Counts and remembers anew from here; compilations, preemptions and moves between pool and host go on."""
        with self._lock:
            self._meter.reset()
            self._scheduler.num_looked_up = self._scheduler.num_reused = 0
            if self._drafting is not None:
                self._drafting.reset()

    def plot_timeline(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """A figure of the prefill and decode programs since the metrics were reset; see `timeline.plot_timeline`."""
        return plot_timeline(tuple(self._meter.spans), path)

    def close(self) -> None:
        """Frees the pool and forgets the model. Unfinished requests end with "abort"; closing twice is fine.

        From a callback it is done when the round has ended.
        """
        with self._lock:
            self._close_asked = self._in_round
            if self._runner is None or self._in_round:
                return
            runner, self._runner = self._runner, None  # the callbacks of what ends here find it closed
            for job in list(self._jobs.values()):
                self._end_job(job, "abort", "the engine was closed")
            for works in self._in_flight:
                jax.block_until_ready([work.outputs for work in works])
            self._in_flight.clear()
            runner.free()
            self._model = self._drafting = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        try:
            super()._advance()
        finally:
            if self._close_asked and not self._in_round:
                self.close()
