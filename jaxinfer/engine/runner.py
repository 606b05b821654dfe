"""Carries out the scheduler's plans on the device: dispatches programs, never waits, and reads results when asked."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import kv_cache
from jaxinfer.engine.config import Settings
from jaxinfer.engine.host_pages import Move
from jaxinfer.engine.host_store import HostStore
from jaxinfer.engine.layout import Layouts, SamplerLayout, listed
from jaxinfer.engine.pages import SCRATCH_PAGE
from jaxinfer.engine.programs import COPIES, Programs, Size
from jaxinfer.engine.rows import STOP_PLACES
from jaxinfer.engine.sequence import Booking, Chunk, Fork, Piece, Plan
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.loop import DecodedChunk, DecodeState
from jaxinfer.model import Model
from jaxinfer.request import Request
from jaxinfer.sampling_logprobs import Logprob, TokenLogprobs, logprob_tables
from jaxinfer.sampling_state import SamplingState, build_sampling_state
from jaxinfer.speculative.loop import StepCounts


@dataclasses.dataclass
class Work:
    """One dispatched program whose end is to be seen. `outputs` are on the device until it is read."""

    kind: Literal["prefill", "draft", "first", "decode"]
    """"draft": a draft's own prefill, and its catching up after plain steps."""
    outputs: Any
    """Prefill: its logits, to see that it has ended, or the scores of a prompt. Draft: something to see that it has
    ended. Otherwise a `DecodedChunk`."""
    rows: Sequence[Track | None]
    """The sequence of each row, None for padding."""
    num_tokens: int
    """Tokens computed in real rows, at most."""
    dispatched: float
    piece: Piece | None = None
    """The piece whose prompt tokens `outputs` scores."""
    chunk: Chunk | None = None
    """What a decode chunk does."""
    counts: StepCounts | None = None
    """Of a decode chunk with a draft: what became of the proposals; on the device until the work is read."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a program gave one sequence."""

    sequence: Track
    tokens: list[int]
    tables: list[dict[int, Logprob]]
    failed: bool
    prompt_tables: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Call:
    """Pieces that one prefill program computes."""

    pieces: tuple[Piece, ...]
    size: Size


class Runner:
    """Everything of an engine that lives on the device, and the host's copy of the page tables."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.cache = self._new_cache()
        self.programs = self._new_programs()
        self.store: HostStore | None = None
        if settings.host_pages:
            gather, scatter = (functools.partial(self.programs.get, Size(kind)) for kind in ("gather", "scatter"))
            self.store = HostStore(gather, scatter)
        self.layouts = Layouts(settings.layouts)
        self.layout = self.layouts.known[0]
        self.state: DecodeState = self._blank(self.layout)
        slots = settings.rules.max_sequences
        self._table = np.full((slots, settings.page_widths[-1]), SCRATCH_PAGE, np.int32)
        self._tabled: list[tuple[Track | None, int, int]] = [(None, 0, 0)] * slots
        """Whose pages a row of the table holds, which version of them, and how many."""

    def reset(self) -> None:
        """Makes a new cache and state. What an interrupted call had been given may be gone."""
        self.free()
        self.cache, self.state = self._new_cache(), self._blank(self.layout)
        self._tabled = [(None, 0, 0)] * len(self._tabled)

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
            self.cache = self.store.carry_out(self.cache, moves)

    def dispatch(self, plan: Plan, requests: Mapping[Track, Request], needs: Iterable[SamplerLayout]) -> list[Work]:
        """Starts a round of work. `needs` are the layouts of everybody who has a slot now."""
        if not plan.has_work:
            return []
        self._use_layout(self.layouts.choose(needs))
        for sequence in self._concerned(plan):
            self._table_pages(sequence)
        works: list[Work] = []
        forks: dict[Track, list[Track]] = {}
        for fork in plan.forks:
            forks.setdefault(fork.parent, []).append(fork.child)
        for call in self._calls(plan.pieces, requests):
            works += self._prefill(call, requests, forks)
        self._copy(plan.forks)
        if plan.decode:
            works += self._decode(plan)
        return works

    def read(self, work: Work, requests: Mapping[Track, Request]) -> Iterator[Result]:
        """Waits for a program and hands out what it gave each sequence."""
        if work.kind in ("prefill", "draft"):
            if work.piece is None:
                jax.block_until_ready(work.outputs)
                return
            scores: TokenLogprobs = jax.device_get(work.outputs)
            sequence, start = work.piece.sequence, work.piece.start
            count = requests[sequence].params.prompt_logprobs if sequence in requests else None
            targets = sequence.tokens[start + 1 : start + 1 + work.piece.length][: sequence.num_prompt - 1 - start]
            tables = [] if count is None else logprob_tables(targets, _row(scores, 0, axis=0), count)
            yield Result(sequence, [], [], False, tables)
            return
        chunk: DecodedChunk = jax.device_get(work.outputs)
        work.outputs = chunk
        columns, counts, failed = chunk.tokens.T.tolist(), chunk.counts.tolist(), chunk.failed.tolist()
        for row, sequence in enumerate(work.rows):
            if sequence is None:
                continue
            tokens, tables = columns[row][: counts[row]], []
            wanted = requests[sequence].params.logprobs if sequence in requests else None
            if wanted is not None and chunk.logprobs is not None:
                tables = logprob_tables(tokens, _row(chunk.logprobs, row, axis=1), wanted)
            yield Result(sequence, tokens, tables, failed[row])

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

    # --- Memory

    def _new_programs(self) -> Programs:
        return Programs(self.model, self.settings, self.cache)

    def _new_cache(self) -> kv_cache.PagedKVCache:
        rules = self.settings.rules
        return kv_cache.create(self.model.config, self.settings.num_pages, rules.page_size, self.model.cache_dtype)

    def _rehearse(self, size: Size) -> None:
        """One run without a sequence: of its results only the cache is kept, in which it wrote to the scratch page."""
        program, rows = self.programs.get(size), size.rows
        if size.layout is not None:
            self.state, self.layout = self._blank(size.layout), size.layout
        if size.kind == "decode":
            self._run_chunk(program, *self._chosen((), rows, size.width))
        elif size.kind == "start":
            self._start(jnp.zeros((rows, self.model.config.vocab_size), jnp.float32), [], {})
        elif size.kind in ("prefill", "prefill_scored"):
            tokens, nothing = np.zeros((rows, size.length), np.int32), np.zeros(rows, np.int32)
            targets = (tokens,) if size.kind == "prefill_scored" else ()
            _, table = self._chosen((), rows, self._table.shape[1])
            arguments = (self.model.prompt_params, self.cache, tokens, nothing, nothing, table, *targets)
            *_, self.cache = program(*arguments, context_lengths=nothing)
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

    def _table_pages(self, sequence: Track) -> None:
        """Brings a sequence's row of the page table up to date."""
        owner, version, count = self._tabled[sequence.slot]
        if owner is not sequence or version != sequence.pages_version:
            count = 0
            self._table[sequence.slot] = SCRATCH_PAGE
        if len(sequence.pages) > count:
            self._table[sequence.slot, count : len(sequence.pages)] = sequence.pages[count:]
        self._tabled[sequence.slot] = (sequence, sequence.pages_version, len(sequence.pages))

    # --- Prefill

    def _calls(self, pieces: Sequence[Piece], requests: Mapping[Track, Request]) -> Iterator[Call]:
        """Groups pieces into calls. Those that begin a sequence come first: others may read the pages they write."""
        yield from self._grouped([piece for piece in pieces if piece.start == 0], requests)
        yield from self._grouped([piece for piece in pieces if piece.start > 0 and not piece.after_pieces], requests)
        for piece in pieces:
            if piece.after_pieces:
                yield from self._grouped([piece], requests)

    def _grouped(self, pieces: Sequence[Piece], requests: Mapping[Track, Request]) -> Iterator[Call]:
        """Pieces of one padded length share calls; a call may be up to half empty. Scored ones go alone."""
        by_length: dict[int, list[Piece]] = {}
        for piece in pieces:
            length, from_empty = self.settings.rules.padded(piece.length), piece.start == 0
            if self._is_scored(piece, requests):
                count = listed(requests[piece.sequence].params.prompt_logprobs or 0, self.model.config)
                rows = self.settings.prefill_rows[0]
                size = Size("prefill_scored", rows, length, from_empty=from_empty, num_logprobs=count)
                yield Call((piece,), size)
            else:
                by_length.setdefault(length, []).append(piece)
        sizes = self.programs.prefill_sizes()
        for length, alike in by_length.items():
            choices = [rows for rows, size in sizes if size == length]
            while alike:
                rows = next((n for n in reversed(choices) if 2 * len(alike) > n), choices[0])
                size = Size("prefill", rows, length, from_empty=alike[0].start == 0)
                yield Call(tuple(alike[:rows]), size)
                alike = alike[rows:]

    def _is_scored(self, piece: Piece, requests: Mapping[Track, Request]) -> bool:
        """Whether a piece's prompt tokens must be scored: of one completion a prompt, and once."""
        request = requests[piece.sequence]
        if request.params.prompt_logprobs is None or request.sample_index > 0:
            return False
        if piece.start == 0 and len(request.prompt_tables) < len(request.prompt) - 1:
            request.prompt_tables.clear()  # of a run that was preempted half-way
        return piece.start < len(request.prompt) - 1 and piece.sequence.num_generated == 0

    def _prefill(
        self, call: Call, requests: Mapping[Track, Request], forks: Mapping[Track, list[Track]]
    ) -> Iterator[Work]:
        """One prefill program, and the first tokens of the sequences that it completes."""
        rows, length = call.size.rows, call.size.length
        tokens = np.zeros((rows, length), np.int32)
        targets = np.zeros((rows, length), np.int32)
        lengths, starts, contexts = (np.zeros(rows, np.int32) for _ in range(3))
        table = np.full((rows, self._table.shape[1]), SCRATCH_PAGE, np.int32)
        for row, piece in enumerate(call.pieces):
            sequence, end = piece.sequence, piece.start + piece.length
            tokens[row, : piece.length] = sequence.tokens[piece.start : end]
            lengths[row], starts[row] = piece.length, piece.start
            table[row] = self._table[sequence.slot]
            contexts[row] = sequence.num_prompt + max(sequence.max_tokens - 1, 0)
            if call.size.kind == "prefill_scored":
                following = sequence.tokens[piece.start + 1 : end + 1]
                targets[row, : len(following)] = following
        now = time.perf_counter()
        program = self.programs.get(call.size)
        arguments = (self.model.prompt_params, self.cache, tokens, lengths, starts, table)
        tracks = [piece.sequence for piece in call.pieces]
        padded = [*tracks, *[None] * (rows - len(tracks))]
        num_tokens = int(lengths.sum())
        if call.size.kind == "prefill_scored":
            logits, scores, self.cache = program(*arguments, targets, context_lengths=contexts)
            (piece,) = call.pieces
            piece.sequence.booked.appendleft(Booking(0, 0.0))  # read before the token that this piece may give
            yield Work("prefill", scores, padded, num_tokens, now, piece)
        else:
            logits, self.cache = program(*arguments, context_lengths=contexts)
            yield Work("prefill", logits, padded, num_tokens, now)
        started: list[tuple[int, Track]] = []
        for row, piece in enumerate(call.pieces):
            if piece.last:
                started += [(row, sequence) for sequence in (piece.sequence, *forks.get(piece.sequence, ()))]
        for first in range(0, len(started), rows):
            yield self._start(logits, started[first : first + rows], requests)

    def _start(self, logits: jax.Array, started: list[tuple[int, Track]], requests: Mapping[Track, Request]) -> Work:
        """Samples the next token of each (row of logits, sequence) and puts the sequence in its slot."""
        rows, settings = logits.shape[0], self.settings
        padding = rows - len(started)
        tracks = [sequence for _, sequence in started]
        mine = [requests[sequence] for sequence in tracks]
        sampling, _ = build_sampling_state(
            [request.params for request in mine],
            [request.prompt for request in mine],
            vocab_size=self.model.config.vocab_size,
            num_tokens=self.model.config.num_tokens,
            eos_token_ids=self.model.config.eos_token_ids,
            batch_size=rows,
            seeds=[request.seed for request in mine],
            sample_indices=[request.sample_index for request in mine],
            output_token_ids=[sequence.tokens[sequence.num_prompt :] for sequence in tracks],
            variant=self.layout.variant,
            places=self.layout.places,
        )

        def ints(values: Iterable[int], fill: int = 0) -> np.ndarray:
            return np.array([*values, *[fill] * padding], np.int32)

        stop_ids = np.full((rows, STOP_PLACES), -1, np.int32)
        for row, request in enumerate(mine):
            listed = sorted(request.stop_ids)[:STOP_PLACES]
            stop_ids[row, : len(listed)] = listed
        arrays: dict[str, Any] = {
            "tokens": ints([0] * len(tracks)),
            "positions": ints(len(sequence.tokens) for sequence in tracks),
            "num_generated": ints(sequence.num_generated for sequence in tracks),
            "max_tokens": ints(sequence.max_tokens for sequence in tracks),
            "stop_ids": stop_ids,
            "context_lengths": ints(sequence.num_prompt + max(sequence.max_tokens - 1, 0) for sequence in tracks),
            "done": np.arange(rows) >= len(tracks),
        }
        now = time.perf_counter()
        program = self.programs.get(Size("start", rows=rows, layout=self.layout))
        self.state, chunk = program(
            logits,
            self.state,
            DecodeState(sampling=sampling, **arrays),
            ints(row for row, _ in started),
            ints((sequence.slot for sequence in tracks), settings.rules.max_sequences),
        )
        return Work("first", on_its_way(chunk), [*tracks, *[None] * padding], len(tracks), now)

    def _copy(self, forks: Sequence[Fork]) -> None:
        copies = [fork.copy for fork in forks if fork.copy is not None]
        for first in range(0, len(copies), COPIES):
            some = copies[first : first + COPIES]
            some += [(SCRATCH_PAGE, SCRATCH_PAGE)] * (COPIES - len(some))
            sources, targets = np.array(some, np.int32).T.copy()
            self.cache = self.programs.get(Size("copy"))(self.cache, sources, targets)

    # --- Decode

    def _decode(self, plan: Plan) -> Iterator[Work]:
        """One decode chunk, of the smallest number of rows and width of page table that hold everybody."""
        size = Size(
            "decode",
            next(size for size in self.settings.decode_rows if size >= len(plan.decode)),
            width=self._width(plan.decode),
            layout=self.layout,
            num_drafted=plan.chunk.num_drafted,
        )
        slots, table = self._chosen(plan.decode, size.rows, size.width)
        now = time.perf_counter()
        outputs, counts = self._run_chunk(self.programs.get(size), slots, table)
        padded = [*plan.decode, *[None] * (size.rows - len(plan.decode))]
        num_tokens = len(plan.decode) * plan.chunk.most
        yield Work("decode", on_its_way(outputs), padded, num_tokens, now, chunk=plan.chunk, counts=counts)

    def _run_chunk(
        self, program: Callable[..., Any], slots: np.ndarray, table: np.ndarray
    ) -> tuple[DecodedChunk, StepCounts | None]:
        self.cache, self.state, chunk = program(self.model.params, self.cache, self.state, slots, table)
        return chunk, None

    def _width(self, sequences: Iterable[Track]) -> int:
        """The narrowest page table that programs exist for and that holds everybody."""
        longest = max(len(sequence.pages) for sequence in sequences)
        return next(size for size in self.settings.page_widths if size >= longest)

    def _chosen(self, sequences: Sequence[Track], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots int32 [rows] and page table int32 [rows, width] of some sequences, padded."""
        slots = np.full(rows, self.settings.rules.max_sequences, np.int32)
        slots[: len(sequences)] = [sequence.slot for sequence in sequences]
        table = np.full((rows, width), SCRATCH_PAGE, np.int32)
        table[: len(sequences)] = self._table[slots[: len(sequences)], :width]
        return slots, table


def on_its_way[Tree](outputs: Tree) -> Tree:
    """Starts the transfer to the host, so that reading finds it there."""
    for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()
    return outputs


def _row(scores: TokenLogprobs, row: int, axis: int) -> TokenLogprobs:
    return jax.tree.map(lambda leaf: leaf.take(row, axis=axis), scores)


def _fit_columns(kept: jax.Array, fresh: jax.Array) -> jax.Array:
    """Lists of another width: the places behind the shorter are unused in both."""
    if kept.shape == fresh.shape:
        return kept
    width = min(kept.shape[1], fresh.shape[1])
    return jnp.asarray(fresh).at[:, :width].set(kept[:, :width])
