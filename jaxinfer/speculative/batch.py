"""Runs one batch of requests with a draft: as `jaxinfer.batch.Batch`, but rows move on by several tokens a step."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import PAGE_SIZE, Batch, Limits
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState, first_token
from jaxinfer.model import Model
from jaxinfer.outputs import Delta
from jaxinfer.request import Request
from jaxinfer.speculative.loop import Method, SpeculativeState, StepCounts, catch_up, spec_chunk, steps_of
from jaxinfer.speculative.proposer import Wanted
from jaxinfer.speculative.speculation import Speculation


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A chunk that was dispatched and not read yet."""

    chunk: DecodedChunk
    counts: StepCounts
    num_drafted: int
    num_steps: int
    dispatched_at: float


class SpeculativeBatch(Batch):
    """A batch whose rows have room for the drafted tokens behind their last."""

    def __init__(self, model: Model, requests: Sequence[Request], limits: Limits, speculation: Speculation) -> None:
        draft = speculation.draft
        super().__init__(model, requests, limits, spare_tokens=draft.k)
        self.speculation = speculation
        self.method = Method(model.config, draft.proposer(model), speculation.acceptance)
        self.draft_params = draft.params
        most = max(request.max_tokens for request in requests)
        self.controller = speculation.policy.begin(draft.k, self.size, most)
        drawn = draft.draws and any(request.params.seed is None and not request.params.greedy for request in requests)
        self.with_logits = drawn or (draft.draws and speculation.acceptance.needs_logits)
        self.unseen = int(self.lengths.max()) if draft.has_own_cache else 0
        """Most tokens that a row may have and the draft has not seen."""
        self.in_flight: collections.deque[InFlight] = collections.deque()
        self.rate = 1.0
        """Tokens that running rows gained a step, lately."""
        self.compiled_at = 0.0
        """When a call last returned that had a program compiled."""

    def run(self) -> Iterator[Delta]:
        """Generates everything, yielding news of each request as soon as the host has it."""
        logits = self._prefill()
        decode, self.variant = self._initial_state()
        decode, first = first_token(logits, decode, variant=self.variant)
        state = self._speculative_state(decode)
        self.speculative_state = self._catch_up(state, from_empty=True)
        if max(request.max_tokens for request in self.requests) > 1:
            self.in_flight.append(self._dispatch_next())  # it runs while the first tokens are read
        yield from self._read(first)
        read_at = time.perf_counter()
        while any(not request.finished for request in self.requests):
            while len(self.in_flight) < 2 and (not self.in_flight or self._is_more_expected()):
                self.in_flight.append(self._dispatch_next())
            entry = self.in_flight.popleft()
            counts, gained = jax.device_get((entry.counts, entry.chunk.counts))
            now = time.perf_counter()
            since = max(read_at, entry.dispatched_at)
            read_at = now
            self._take_counts(entry, counts, int(gained.sum()), now - since, compiled=since < self.compiled_at)
            yield from self._read(entry.chunk)
        self.speculation.warn_of_plans(self.model)

    def _speculative_state(self, decode: DecodeState) -> SpeculativeState:
        """The state of all rows when they have their first tokens."""
        coupled = np.ones(self.size, bool)
        coupled[: len(self.requests)] = [request.params.seed is not None for request in self.requests]
        history = np.zeros((self.size, self.page_table.shape[1] * PAGE_SIZE + 1), np.int32)
        for row, request in enumerate(self.requests):
            history[row, : len(request.prompt)] = request.prompt
        history, coupled = jax.device_put((history, coupled), may_alias=False)  # the state is donated
        hidden = jnp.zeros((self.size, self.model.config.hidden_size), self.model.dtype)
        assert isinstance(self.cache, PagedKVCache)
        draft = self.speculation.draft.create_state(self.model, self.cache.num_pages, PAGE_SIZE, self.size)
        return SpeculativeState(decode, history, hidden, coupled, jnp.zeros(self.size, bool), draft)

    def _is_more_expected(self) -> bool:
        """Whether some row is likely to go on after what is in flight: a chunk of idle rows takes as long as any."""
        steps = sum(entry.num_steps for entry in self.in_flight)
        return any(
            not request.finished and len(request.token_ids) + steps * self.rate < request.max_tokens
            for request in self.requests
        )

    def _dispatch_next(self) -> InFlight:
        """Starts a chunk behind those in flight."""
        running = [request for request in self.requests if not request.finished]
        # The first tokens exist, though the host may not have read them yet.
        known = [max(1, len(request.token_ids)) for request in running]
        context = max(len(request.prompt) + count for request, count in zip(running, known, strict=True))
        num_drafted = self.controller.choose(context)
        num_compiled = spec_chunk.num_compiled + catch_up.num_compiled
        if num_drafted and self.unseen:
            self.speculative_state = self._catch_up(self.speculative_state, from_empty=False)
        num_steps = steps_of(self.limits.decode_chunk, num_drafted)
        most = sum(entry.num_steps * (entry.num_drafted + 1) for entry in self.in_flight)
        most += num_steps * (num_drafted + 1)
        reach = max(
            len(request.prompt) + min(count + most, request.max_tokens) - 1
            for request, count in zip(running, known, strict=True)
        )
        active = np.zeros(self.size, bool)
        active[: len(self.requests)] = [not request.finished for request in self.requests]
        self.cache, self.speculative_state, chunk, counts = spec_chunk(
            self.model.params,
            self.draft_params,
            self.cache,
            self.speculative_state,
            jnp.asarray(active),
            self._decode_table(reach + num_drafted),
            method=self.method,
            wanted=Wanted(num_drafted, self.variant, self.with_logits and num_drafted > 0),
            num_steps=num_steps,
        )
        if num_drafted == 0 and self.speculation.draft.has_own_cache:
            self.unseen += num_steps
        if spec_chunk.num_compiled + catch_up.num_compiled > num_compiled:
            self.compiled_at = time.perf_counter()
        return InFlight(chunk, counts, num_drafted, num_steps, time.perf_counter())

    def _catch_up(self, state: SpeculativeState, *, from_empty: bool) -> SpeculativeState:
        """Runs the draft over all tokens that it has not seen; a draft without a cache has seen all."""
        smallest, most = 64, max(64, self.limits.prefill_tokens // self.size)
        chunk = smallest
        while chunk < min(self.unseen, self.limits.prefill_chunk, most // 2 + 1):
            chunk *= 2
        nothing = jnp.zeros(self.size, jnp.int32)
        while self.unseen > 0:
            reach = self.page_table.shape[1] * PAGE_SIZE
            state = catch_up(
                self.draft_params,
                state,
                self._table(chunk if from_empty else reach),
                nothing,
                proposer=self.method.proposer,
                chunk=chunk,
                from_empty=from_empty,
            )
            self.unseen, from_empty = self.unseen - chunk, False
        self.unseen = 0
        return state

    def _take_counts(self, entry: InFlight, counts: StepCounts, tokens: int, seconds: float, *, compiled: bool) -> None:
        """Takes in what a chunk did. With `compiled` the host compiled something meanwhile and was late to see its end:
        the policy, which goes by medians, can do with that time, the report leaves it out."""
        proposed, accepted = np.asarray(counts.proposed), np.asarray(counts.accepted)
        running = accepted >= 0
        if running.any():
            self.rate = float(np.mean(accepted[running]) + 1.0)
            self.controller.observe(entry.num_drafted, proposed, accepted, seconds / entry.num_steps)
        with self.speculation.lock:
            self.speculation.report.add(entry.num_drafted, proposed, accepted, tokens, None if compiled else seconds)
