"""Carries out plans with a draft: decode chunks that speculate, and the draft's own prefill before they do.

A draft with a cache of its own has pages of the target's numbers in it. It sees a sequence's tokens only when a chunk
is about to draft for it: while drafting is off, prompts cost it nothing. Which pages it has filled is remembered by
page, so that a cached prefix, or the prompt that several completions share, is computed by the draft once too.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.drafting_programs import DraftingPrograms
from jaxinfer.engine.drafting_rows import DraftingState
from jaxinfer.engine.programs import Size
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.sequence import Plan
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Settings
from jaxinfer.engine.work import Result, Work
from jaxinfer.loop import DecodedChunk
from jaxinfer.model import Model
from jaxinfer.request import Request
from jaxinfer.sampling_state import SamplingState
from jaxinfer.speculative.loop import Method, StepCounts
from jaxinfer.speculative.speculation import Speculation

FIRST_RUNS, TIMED_RUNS = 2, 8
"""Of the draft's passes when they are timed."""


class DraftingRunner(Runner):
    """A `Runner` whose decode chunks verify what a draft proposes, as many tokens a step as the plan says."""

    def __init__(self, model: Model, settings: Settings, speculation: Speculation) -> None:
        self.model, self.settings = model, settings
        self.draft, self.draft_params = speculation.draft, speculation.draft.params
        self.method = Method(model.config, self.draft.proposer(model), speculation.acceptance)
        self.drafting = self._new_drafting()
        self.filled: set[int] = set()
        """Pages that hold the draft's keys and values of all their tokens. Pages that the pool gives away leave it."""
        slots = settings.rules.max_sequences
        self._unseen = [0] * slots
        """Most tokens that a slot's sequence has and the draft has not seen, at first with those in filled pages."""
        self._is_new = [False] * slots
        """Whether the draft has seen nothing of a slot's sequence but what was in its pages before."""
        self._num_noted = [0] * slots
        """Leading pages of a slot's sequence that are known to be filled."""
        super().__init__(model, settings)

    def reset(self) -> None:
        super().reset()
        self.drafting = self._new_drafting()
        self.filled.clear()

    def free(self) -> None:
        super().free()
        for leaf in jax.tree.leaves(self.drafting):
            if not leaf.is_deleted():
                leaf.delete()

    def read(self, work: Work, requests: Mapping[Track, Request]) -> list[Result]:
        results = super().read(work, requests)
        if work.counts is not None:
            work.counts = jax.device_get(work.counts)
        return results

    def _new_programs(self) -> DraftingPrograms:
        return DraftingPrograms(
            self.model, self.settings, self.cache, self.drafting, self.method, self.draft, self.draft_params
        )

    def _new_drafting(self) -> DraftingState:
        settings, model = self.settings, self.model
        slots, page_size = settings.rules.max_sequences, settings.rules.page_size
        return DraftingState(
            history=jnp.zeros((slots, settings.max_context + 1), jnp.int32),
            hidden=jnp.zeros((slots, model.config.hidden_size), model.dtype),
            coupled=jnp.zeros(slots, bool),
            alone=jnp.zeros(slots, bool),
            draft=self.draft.create_state(model, settings.num_pages, page_size, slots),
        )

    def _start(self, logits: jax.Array, started: list[tuple[int, Track]], requests: Mapping[Track, Request]) -> Work:
        """Also tells the draft's state whose slots these are now."""
        rows = logits.shape[0]
        tracks = [sequence for _, sequence in started]
        slots = np.full(rows, self.settings.rules.max_sequences, np.int32)
        history = np.zeros((rows, self.settings.max_context + 1), np.int32)
        coupled = np.zeros(rows, bool)
        for row, sequence in enumerate(tracks):
            slots[row] = sequence.slot
            history[row, : len(sequence.tokens)] = sequence.tokens
            coupled[row] = requests[sequence].params.seed is not None
            self._unseen[sequence.slot] = len(sequence.tokens) if self.draft.has_own_cache else 0
            self._is_new[sequence.slot], self._num_noted[sequence.slot] = True, 0
        self.drafting = self.programs.get(Size("seat", rows=rows))(self.drafting, slots, history, coupled)
        return super()._start(logits, started, requests)

    def _decode(self, plan: Plan) -> Iterator[Work]:
        if plan.chunk.num_drafted and self.draft.has_own_cache:
            yield from self._catch_up(plan.decode)
        yield from super()._decode(plan)
        if self.draft.has_own_cache and not plan.chunk.num_drafted:
            for sequence in plan.decode:
                self._unseen[sequence.slot] += plan.chunk.num_steps

    def _run_chunk(
        self, program: Callable[..., Any], slots: np.ndarray, table: np.ndarray
    ) -> tuple[DecodedChunk, StepCounts | None]:
        self.cache, self.state, self.drafting, chunk, counts = program(
            self.model.params, self.draft_params, self.cache, self.state, self.drafting, slots, table
        )
        for leaf in jax.tree.leaves(counts):
            leaf.copy_to_host_async()
        return chunk, counts

    def time_draft(self) -> dict[int, float]:
        """Seconds in which the draft's passes propose one token, by rows of the program.

        Runs follow each other without a wait, as a chunk's steps do, and the first ones do not count: a run alone is
        mostly what the host needs to start it. The rows are empty: what is timed is the reading of the draft's weights,
        and not its attention. Empty for a draft that runs no model.
        """
        seconds = {}
        longest = self.settings.spare_tokens
        sampling = self._blank(self.settings.layouts[0]).sampling
        for rows in self.settings.decode_rows if self.draft.draws and longest else ():
            width = self.settings.widths_of(rows)[0]
            program = self.programs.get(Size("draft", rows, width=width, num_drafted=longest))
            slots, table = self.tables.chosen((), rows, width)
            state = dataclasses.replace(self.state, sampling=sampling)
            for count in (FIRST_RUNS, TIMED_RUNS):
                start = time.perf_counter()
                for _ in range(count):
                    self.cache, self.drafting, _ = program(
                        self.draft_params, self.cache, state, self.drafting, slots, table
                    )
                jax.block_until_ready(self.cache)
                seconds[rows] = (time.perf_counter() - start) / (count * longest)
        return seconds

    # --- The draft's own cache

    def _catch_up(self, sequences: Sequence[Track]) -> Iterator[Work]:
        """Shows the draft what it has not seen of some sequences, and notes which pages it has filled."""
        page_size = self.settings.rules.page_size
        behind = [sequence for sequence in sequences if self._unseen[sequence.slot]]
        while behind:
            group, later, shared = [], [], set[int]()
            for sequence in sorted(behind, key=self._left, reverse=True):
                empty = set(sequence.pages[: sequence.num_certain // page_size]) - self.filled
                # Whoever shares pages that this group fills comes after it, and finds them filled.
                if len(group) < self.settings.prefill_rows[-1] and shared.isdisjoint(empty):
                    group.append(sequence)
                    shared |= empty
                else:
                    later.append(sequence)
            yield from self._show(group)
            behind = later
        for sequence in sequences:
            # Of what the host knows, the newest token is not in the cache, and the one before it may not have been
            # through the draft yet: a step that accepts all it drafted leaves the last of them to the next.
            noted, full = self._num_noted[sequence.slot], max(sequence.num_certain - 1, 0) // page_size
            if full > noted:
                self.filled.update(sequence.pages[noted:full])
                self._num_noted[sequence.slot] = full

    def _known(self, sequence: Track) -> int:
        """Leading tokens whose pages the draft has filled."""
        pages = sequence.pages[: sequence.num_certain // self.settings.rules.page_size]
        count = next((count for count, page in enumerate(pages) if page not in self.filled), len(pages))
        return count * self.settings.rules.page_size

    def _left(self, sequence: Track) -> int:
        """Most tokens that the draft has to see before it can draft."""
        known = self._known(sequence) if self._is_new[sequence.slot] else 0
        return max(self._unseen[sequence.slot] - known, 0)

    def _show(self, group: Sequence[Track]) -> Iterator[Work]:
        """Runs the draft over all unseen tokens of some sequences, in pieces as long as their prefill's."""
        left = max(map(self._left, group))
        from_empty = all(self._is_new[sequence.slot] and not self._known(sequence) for sequence in group)
        while left > 0:
            size = self._piece(len(group), left, from_empty)
            slots, table = self.tables.chosen(group, size.rows, self.settings.page_widths[-1])
            known = np.zeros(size.rows, np.int32)
            known[: len(group)] = [self._known(sequence) for sequence in group]
            now = time.perf_counter()
            seen = self._run_catch_up(size, slots, table, known)
            padded = [*group, *[None] * (size.rows - len(group))]
            yield Work("draft", seen, padded, min(left, size.length) * len(group), now)
            left, from_empty = left - size.length, False
        for sequence in group:
            self._unseen[sequence.slot], self._is_new[sequence.slot] = 0, False
            self.filled.update(sequence.pages[: sequence.num_certain // self.settings.rules.page_size])

    def _run_catch_up(self, size: Size, slots: np.ndarray, table: np.ndarray, known: np.ndarray) -> jax.Array:
        state = dataclasses.replace(self.state, sampling=SamplingState())
        self.drafting, seen = self.programs.get(size)(self.draft_params, state, self.drafting, slots, table, known)
        return seen

    def _rehearse(self, size: Size) -> None:
        super()._rehearse(size)
        if size.kind == "catch_up":
            slots, table = self.tables.chosen((), size.rows, self.settings.page_widths[-1])
            self._run_catch_up(size, slots, table, np.zeros(size.rows, np.int32))

    def _piece(self, count: int, left: int, from_empty: bool) -> Size:
        """The program that takes `count` sequences furthest, without more padding than needed."""
        sizes = self.programs.prefill_sizes()
        rows = min(rows for rows, _ in sizes if rows >= count)
        lengths = [length for size, length in sizes if size == rows]
        length = next((length for length in lengths if length >= left), lengths[-1])
        return Size("catch_up", rows, length, from_empty=from_empty)
