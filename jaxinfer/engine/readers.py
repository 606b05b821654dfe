"""Whoever waits for results: each runs rounds until its own have come, and finds what others' rounds brought."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.jobs import Job
from jaxinfer.outputs import Delta
from jaxinfer.request import Request
from jaxinfer.scoring_plan import TokenPair
from jaxinfer.scoring_run import Scored


class EngineReaders(EngineCore):
    """The loops behind streams and scoring. They take the lock for a round at a time, so that others get theirs."""

    def _run_pairs(self, pairs: Sequence[TokenPair]) -> Iterator[Scored]:
        """What `scoring_run.run_pairs` does, in rounds of this engine."""
        with self._lock:
            job = self._scorer.add(pairs, self._live()[1])
        try:
            while True:
                with self._lock:
                    if not job.scored and not job.done:  # or another thread's rounds have brought something
                        self._advance()
                    done, scored = job.done, list(job.scored)
                    job.scored.clear()
                yield from scored
                if done:
                    return
        finally:
            with self._lock:
                self._scorer.remove(job)

    def _advance_for(self, jobs: Sequence[Job]) -> None:
        """One round, unless another thread has brought news for these jobs meanwhile."""
        with self._lock:
            if not any(job.mailbox for job in jobs) and not all(job.finished for job in jobs):
                self._advance()

    def _take_mail(self, jobs: Sequence[Job]) -> list[Delta]:
        with self._lock:
            mail = []
            for job in jobs:
                while job.mailbox:
                    mail.append(job.mailbox.popleft())
            return mail

    def _follow(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        """Queues requests and yields their news as it comes."""
        with self._lock:
            jobs = self._open(requests, interactive=True)
        try:
            while True:
                finished = all(job.finished for job in jobs)
                yield from self._take_mail(jobs)
                if finished:
                    return
                self._advance_for(jobs)
        finally:
            self._abandon(jobs)

    async def _follow_async(self, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
        """`_follow`, with all that takes the lock done in threads: another reader's round may have it."""
        jobs: list[Job] = []

        def begin() -> None:
            with self._lock:
                jobs.extend(self._open(requests, interactive=True))

        def following() -> tuple[list[Delta], bool]:
            self._advance_for(jobs)
            with self._lock:
                return self._take_mail(jobs), all(job.finished for job in jobs)

        finished = False
        try:
            await asyncio.to_thread(begin)
            while not finished:
                mail, finished = await asyncio.to_thread(following)
                for delta in mail:
                    yield delta
        finally:
            if not finished:
                await asyncio.to_thread(self._abandon, jobs)

    def _abandon(self, jobs: Sequence[Job]) -> None:
        """Ends what its reader has no use for any more."""
        with self._lock:
            for job in jobs:
                if not job.finished:
                    self._end_job(job, "abort", None)
