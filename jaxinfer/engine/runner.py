"""Carries out the scheduler's plans on the device: dispatches programs, never waits, and reads results when asked."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import kv_cache
from jaxinfer.engine.calls import Call, calls_for
from jaxinfer.engine.first_rows import first_rows
from jaxinfer.engine.host_pages import Move
from jaxinfer.engine.host_store import HostStore
from jaxinfer.engine.layout import Layouts, SamplerLayout
from jaxinfer.engine.page_table import PageTables
from jaxinfer.engine.pages import SCRATCH_PAGE
from jaxinfer.engine.programs import COPIES, Programs, Size
from jaxinfer.engine.sequence import Booking, Fork, Plan
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Settings
from jaxinfer.engine.work import Result, Work, wait
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState
from jaxinfer.model import Model
from jaxinfer.request import Request
from jaxinfer.sampling_state import SamplingState
from jaxinfer.speculative.loop import StepCounts
from jaxinfer.tiers import KVCache


class Runner:
    """Everything of an engine that lives on the device, and the host's copy of the page tables."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.cache: KVCache = self._new_cache()
        self.programs = self._new_programs()
        self.store: HostStore | None = None
        if settings.host_pages:
            gather, scatter = (functools.partial(self.programs.get, Size(kind)) for kind in ("gather", "scatter"))
            self.store = HostStore(gather, scatter)
        self.layouts = Layouts(settings.layouts)
        self.layout = self.layouts.known[0]
        self.state: DecodeState = self._blank(self.layout)
        self.tables = self._new_tables()

    def reset(self) -> None:
        """Makes a new cache and state. What an interrupted call had been given may be gone."""
        self.free()
        self.cache, self.state = self._new_cache(), self._blank(self.layout)
        self.tables.forget()

    def free(self) -> None:
        """Gives the device's memory back now, whoever still holds this object."""
        for leaf in jax.tree.leaves((self.cache, self.state)):
            if not leaf.is_deleted():
                leaf.delete()
        if self.store is not None:
            self.store.clear()

    def move(self, moves: Sequence[Move]) -> None:
        """Starts moves of pages between device and host. What is dispatched later finds them done."""
        if moves and self.store is not None:
            assert isinstance(self.cache, PagedKVCache)
            self.cache = self.store.carry_out(self.cache, moves)

    def prepare_host(self) -> None:
        """Has the host's memory, if any is wanted, and takes the time of moves to it and back."""
        if self.store is not None:
            assert isinstance(self.cache, PagedKVCache)
            self.store.allocate(self.cache, self.settings.host_pages)
            self.cache = self.store.measure(self.cache)

    def dispatch(self, plan: Plan, requests: Mapping[Track, Request], needs: Iterable[SamplerLayout]) -> list[Work]:
        """Starts a round of work. `needs` are the layouts of everybody who has a slot now."""
        if not plan.has_work:
            return []
        self._use_layout(self.layouts.choose(needs))
        self.tables.update(self._concerned(plan))
        works: list[Work] = []
        forks: dict[Track, list[Track]] = {}
        for fork in plan.forks:
            forks.setdefault(fork.parent, []).append(fork.child)
        for call in calls_for(plan.pieces, requests, self.programs):
            works += self._prefill(call, requests, forks)
        self._copy(plan.forks)
        if plan.decode:
            works += self._decode(plan)
        return works

    def read(self, work: Work, requests: Mapping[Track, Request]) -> list[Result]:
        """Waits for a program and hands out what it gave each sequence."""
        return wait(work, requests)

    def rehearse(self, sizes: Iterable[Size]) -> None:
        """Runs programs on empty rows, each twice, and waits for them.

        What a GPU puts off until a program runs is done then, and not while somebody waits: its code is loaded in the
        first run, the graphs of its kernels are built in the second. Whoever has a slot notices nothing.
        """
        kept = self.state, self.layout
        try:
            for size in sizes:
                for _ in range(2):
                    self._rehearse(size)
        finally:
            jax.block_until_ready((self.cache, self.state))
            self.state, self.layout = kept
        gc.collect()  # tracing has left a million objects, which the first rounds would look through

    # --- Memory

    def _new_programs(self) -> Programs:
        return Programs(self.model, self.settings, self.cache)

    def _new_tables(self) -> Any:
        return PageTables(self.settings.rules.max_sequences, self.settings.page_widths[-1])

    def _new_cache(self) -> KVCache:
        rules = self.settings.rules
        return kv_cache.create(self.model.config, self.settings.num_pages, rules.page_size, self.model.cache_dtype)

    def _rehearse(self, size: Size) -> None:
        """One run without a sequence: of its results only the cache is kept, in which it wrote to the scratch page."""
        program, rows = self.programs.get(size), size.rows
        if size.layout is not None:
            self.state, self.layout = self._blank(size.layout), size.layout
        if size.kind == "decode":
            self._run_chunk(program, *self.tables.chosen((), rows, size.width))
        elif size.kind == "start":
            self._start(jnp.zeros((rows, self.model.config.vocab_size), jnp.float32), [], {})
        elif size.kind in ("prefill", "prefill_scored"):
            tokens, nothing = np.zeros((rows, size.length), np.int32), np.zeros(rows, np.int32)
            targets = (tokens,) if size.kind == "prefill_scored" else ()
            _, table = self.tables.chosen((), rows, self.settings.page_widths[-1])
            params = self.model.params if size.of_output else self.model.prompt_params
            arguments = (params, self.cache, tokens, nothing, nothing, table, *targets)
            options = {"order": _order(nothing, size)} if size.num_ordered else {}
            *_, self.cache = program(*arguments, context_lengths=nothing, **options)
        elif size.kind == "copy":
            scratch = np.full(COPIES, SCRATCH_PAGE, np.int32)
            self.cache = program(self.cache, scratch, scratch)

    def _blank(self, layout: SamplerLayout) -> DecodeState:
        return self.programs.get(Size("blank", layout=layout))()

    def _use_layout(self, layout: SamplerLayout) -> None:
        """Adds the parts of the sampling state that are needed now, without effect on others, and drops the rest."""
        if layout == self.layout:
            return
        blank, old = self._blank(layout), self.state.sampling
        parts = {}
        for field in dataclasses.fields(SamplingState):
            fresh, kept = getattr(blank.sampling, field.name), getattr(old, field.name)
            if fresh is not None and kept is not None:
                fresh = jax.tree.map(_fit_columns, kept, fresh)
            parts[field.name] = fresh
        self.state, self.layout = dataclasses.replace(self.state, sampling=SamplingState(**parts)), layout

    def _concerned(self, plan: Plan) -> Iterator[Track]:
        yield from (piece.sequence for piece in plan.pieces)
        yield from (fork.child for fork in plan.forks)
        yield from plan.decode

    # --- Prefill

    def _prefill(
        self, call: Call, requests: Mapping[Track, Request], forks: Mapping[Track, list[Track]]
    ) -> Iterator[Work]:
        """One prefill program, and the first tokens of the sequences that it completes."""
        rows, length = call.size.rows, call.size.length
        tokens = np.zeros((rows, length), np.int32)
        targets = np.zeros((rows, length), np.int32)
        lengths, starts, contexts = (np.zeros(rows, np.int32) for _ in range(3))
        _, table = self.tables.chosen([piece.sequence for piece in call.pieces], rows, self.settings.page_widths[-1])
        for row, piece in enumerate(call.pieces):
            sequence, end = piece.sequence, piece.start + piece.length
            tokens[row, : piece.length] = sequence.tokens[piece.start : end]
            lengths[row], starts[row] = piece.length, piece.start
            contexts[row] = sequence.num_prompt + max(sequence.max_tokens - 1, 0)
            if call.size.kind == "prefill_scored":
                following = sequence.tokens[piece.start + 1 : end + 1]
                targets[row, : len(following)] = following
        now = time.perf_counter()
        program = self.programs.get(call.size)
        params = self.model.params if call.size.of_output else self.model.prompt_params
        arguments = (params, self.cache, tokens, lengths, starts, table)
        tracks = [piece.sequence for piece in call.pieces]
        padded = [*tracks, *[None] * (rows - len(tracks))]
        num_tokens = int(lengths.sum())
        if call.size.kind == "prefill_scored":
            logits, scores, self.cache = program(*arguments, targets, context_lengths=contexts)
            (piece,) = call.pieces
            piece.sequence.booked.appendleft(Booking(0, 0.0))  # read before the token that this piece may give
            yield Work("prefill", scores, padded, num_tokens, now, piece)
        else:
            options = {"order": _order(lengths, call.size)} if call.size.num_ordered else {}
            logits, self.cache = program(*arguments, context_lengths=contexts, **options)
            yield Work("prefill", logits, padded, num_tokens, now)
        started: list[tuple[int, Track]] = []
        for row, piece in enumerate(call.pieces):
            if piece.last:
                started += [(row, sequence) for sequence in (piece.sequence, *forks.get(piece.sequence, ()))]
        for first in range(0, len(started), rows):
            yield self._start(logits, started[first : first + rows], requests)

    def _start(self, logits: jax.Array, started: list[tuple[int, Track]], requests: Mapping[Track, Request]) -> Work:
        """Samples the next token of each (row of logits, sequence) and puts the sequence in its slot."""
        rows = logits.shape[0]
        padding = rows - len(started)
        tracks = [sequence for _, sequence in started]
        beginning = first_rows(self.model.config, tracks, requests, rows=rows, layout=self.layout)
        sources = np.array([*(row for row, _ in started), *[0] * padding], np.int32)
        slots, _ = self.tables.chosen(tracks, rows, 0)
        now = time.perf_counter()
        program = self.programs.get(Size("start", rows=rows, layout=self.layout))
        self.state, chunk = program(logits, self.state, beginning, sources, slots)
        return Work("first", on_its_way(chunk), [*tracks, *[None] * padding], len(tracks), now)

    def _copy(self, forks: Sequence[Fork]) -> None:
        copies = [pair for fork in forks for pair in fork.copies.values()]
        for first in range(0, len(copies), COPIES):
            some = copies[first : first + COPIES]
            some += [(SCRATCH_PAGE, SCRATCH_PAGE)] * (COPIES - len(some))
            sources, targets = np.array(some, np.int32).T.copy()
            self.cache = self.programs.get(Size("copy"))(self.cache, sources, targets)

    # --- Decode

    def _decode(self, plan: Plan) -> Iterator[Work]:
        """One decode chunk, of the smallest number of rows and width of page table that hold everybody."""
        count = next(size for size in self.settings.decode_rows if size >= len(plan.decode))
        size = Size(
            "decode",
            count,
            width=self.tables.width_for(plan.decode, self.settings.widths_of(count)),
            layout=self.layout,
            num_drafted=plan.chunk.num_drafted,
        )
        # A kernel begins with the first rows: so none of the long ones is still being read when all others have been.
        rows = sorted(plan.decode, key=self._length, reverse=True)
        slots, table = self.tables.chosen(rows, size.rows, size.width)
        now = time.perf_counter()
        outputs, counts = self._run_chunk(self.programs.get(size), slots, table)
        padded = [*rows, *[None] * (size.rows - len(rows))]
        num_tokens = len(plan.decode) * plan.chunk.most
        yield Work("decode", on_its_way(outputs), padded, num_tokens, now, chunk=plan.chunk, counts=counts)

    def _length(self, sequence: Track) -> int:
        """What decoding it reads, to tell the long from the short."""
        return len(sequence.pages)

    def _run_chunk(
        self, program: Callable[..., Any], slots: np.ndarray, table: Any
    ) -> tuple[DecodedChunk, StepCounts | None]:
        self.cache, self.state, chunk = program(self.model.params, self.cache, self.state, slots, table)
        return chunk, None


def _order(lengths: np.ndarray, size: Size) -> np.ndarray:
    """Flat places of the rows' tokens, then as much of their padding as the program computes: int32 [num_ordered]."""
    is_padding = np.arange(size.length)[None, :] >= lengths[:, None]
    return np.argsort(is_padding.reshape(-1), kind="stable")[: size.num_ordered].astype(np.int32)


def on_its_way[Tree](outputs: Tree) -> Tree:
    """Starts the transfer to the host, so that reading finds it there."""
    for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()
    return outputs


def _fit_columns(kept: jax.Array, fresh: jax.Array) -> jax.Array:
    """Lists of another width: the places behind the shorter are unused in both."""
    if kept.shape == fresh.shape:
        return kept
    width = min(kept.shape[1], fresh.shape[1])
    return jnp.asarray(fresh).at[:, :width].set(kept[:, :width])
