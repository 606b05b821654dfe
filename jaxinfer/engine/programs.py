"""The engine's compiled programs: made ahead of time in a few sizes, counted, and looked up by size."""

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from checkpoints.progress import progress_bar
from jaxinfer import steps
from jaxinfer.config import ModelConfig
from jaxinfer.engine.host_store import MOVES, gather_pages, page_shapes, scatter_pages
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.rows import blank_state, copy_pages, decode_rows, start_rows
from jaxinfer.engine.settings import Settings
from jaxinfer.model import Model
from jaxinfer.scoring_run import prefill_targets
from jaxinfer.tiers import KVCache, Tier
from pallas_kernels.dispatch import KERNELS_VARIABLE

log = logging.getLogger("jaxinfer")

_SHARED: dict[tuple[object, ...], Callable[..., Any]] = {}
"""Programs of all engines of this process: a second engine of one model and one size compiles nothing. They hold no
weights and no cache."""

FULL_CALL = 4096
"""Tokens that keep a device busy: several rows of longer pieces in one call would bring nothing but programs."""
COPIES = 16
"""Pages that one call of the copying program copies, padding included."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What distinguishes one program from another; fields that a kind does not use keep their defaults."""

    kind: Literal[
        "prefill",
        "prefill_scored",
        "score",
        "start",
        "decode",
        "copy",
        "move",
        "blank",
        "gather",
        "scatter",
        "seat",
        "catch_up",
        "draft",
    ]
    rows: int = 0
    length: int = 0
    """Tokens of a row, of prefill and of a draft's."""
    width: int = 0
    """Pages of a row, of decode and scoring."""
    from_empty: bool = False
    num_ordered: int = 0
    """Tokens that a prefill computes of those that its rows have room for, if that is not all."""
    of_output: bool = False
    """Prefill of generated tokens, where prompts have weights of their own."""
    layout: SamplerLayout | None = None
    num_logprobs: int = 0
    """Of scored prefill."""
    num_drafted: int = 0
    """Tokens that a step of decoding drafts."""
    num_places: int = 0
    """Room for scored tokens, and how many the head takes at a time, of scoring."""
    head_rows: int = 0
    tiers: tuple[Tier, Tier] | None = None
    """From where pages move, and to where."""


class Programs:
    """Compiled programs of one model by size. What is missing is compiled when it is asked for, and counted."""

    def __init__(self, model: Model, settings: Settings, cache: KVCache) -> None:
        self.config: ModelConfig = model.config
        self.settings = settings
        self._params, self._prompt_params = shapes_of(model.params), shapes_of(model.prompt_params)
        self._cache = shapes_of(cache)
        kernels = os.environ.get(KERNELS_VARIABLE)
        # Of the settings these shape programs beside what a `Size` says.
        rules = settings.rules
        limits = (rules.max_sequences, rules.decode_chunk, settings.page_widths[-1], settings.tiers)
        self._key: tuple[object, ...] = (
            model.config,
            *shapes_key((self._params, self._prompt_params, self._cache)),
            kernels,
            limits,
        )
        self._compiled: dict[Size, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.num_compiled = 0
        self.num_after_warmup = 0
        self.is_warm = False
        self.seconds_compiling = 0.0

    def get(self, size: Size) -> Callable[..., Any]:
        """The program of that size."""
        return self._compiled.get(size) or self._compile(size)

    def warmup(self, *, progress: bool, threads: int | None) -> list[Size]:
        """Compiles what the settings can need, several at a time: XLA compiles outside Python's lock.

        Returns what is new to this process, and so has never run.
        """
        sizes = [size for size in self.expected() if size not in self._compiled]
        new = [size for size in sizes if self._key_of(size) not in _SHARED]
        with (
            concurrent.futures.ThreadPoolExecutor(threads) as pool,
            progress_bar(total=len(sizes), unit="program", desc="Compiling", shown=progress, leave=False) as bar,
        ):
            jobs = [pool.submit(self._compile, size) for size in sizes]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
                    bar.update()
            finally:
                for job in jobs:
                    job.cancel()
        self.is_warm = True
        return new

    def expected(self) -> Iterable[Size]:
        """Sizes that the settings can need, the slowest to compile first."""
        settings = self.settings
        for layout in settings.layouts:
            for rows in settings.decode_rows:
                for width in settings.widths_of(rows):
                    for drafted in settings.drafted:
                        yield Size("decode", rows=rows, width=width, layout=layout, num_drafted=drafted)
        begun = (True, False) if settings.continues else (True,)
        ordered = {room.rows: room.tokens for room in settings.packed}
        for rows, length in self.prefill_sizes():
            num_ordered = ordered.get(rows, 0)
            for from_empty in (False,) if settings.packed else begun:
                yield Size("prefill", rows, length, from_empty=from_empty, num_ordered=num_ordered)
            if settings.rules.two_weights and settings.rereads:
                yield Size("prefill", rows, length, num_ordered=num_ordered, of_output=True)
        scored = self.scored_sizes() if settings.scored else []
        for rows, length in scored:
            for count in settings.scored:
                for from_empty in begun:
                    yield Size("prefill_scored", rows, length, from_empty=from_empty, num_logprobs=count)
        for layout in settings.layouts:
            for rows in sorted({rows for rows, _ in (*self.prefill_sizes(), *scored)}):
                yield Size("start", rows=rows, layout=layout)
            yield Size("blank", layout=layout)
        yield Size("copy")
        if settings.host_pages:
            yield from (Size("gather"), Size("scatter"))

    def prefill_sizes(self) -> list[tuple[int, int]]:
        """(rows, length) of prefill programs: a single row of any length, several while they make a call fuller."""
        rules = self.settings.rules
        if self.settings.packed:
            return [(room.rows, room.tile) for room in self.settings.packed]
        return [
            (rows, length)
            for rows in self.settings.prefill_rows
            for length in rules.prefill_lengths
            if rows == self.settings.prefill_rows[0] or rows * length <= min(rules.max_prefill_tokens, FULL_CALL)
        ]

    def scored_sizes(self) -> list[tuple[int, int]]:
        """(rows, length) of prefill programs that score their only piece, ascending by length."""
        if self.settings.packed:
            return [(1, room.tokens) for room in self.settings.packed]
        return [(self.settings.prefill_rows[0], length) for length in self.settings.rules.prefill_lengths]

    def _key_of(self, size: Size) -> tuple[object, ...]:
        """What tells this program apart from all others of the process."""
        return (*self._key, size)

    def _compile(self, size: Size) -> Callable[..., Any]:
        key = self._key_of(size)
        compiled = _SHARED.get(key)
        if compiled is not None:
            self._compiled[size] = compiled
            return compiled
        start = time.perf_counter()
        compiled = self._lower(size).compile()
        with self._lock:
            self._compiled[size] = _SHARED[key] = compiled
            self.num_compiled += 1
            self.num_after_warmup += self.is_warm
            self.seconds_compiling += time.perf_counter() - start
        if self.is_warm:
            log.info("compiled after warm-up: %s; name its sampling in EngineConfig.sampling", size)
        return compiled

    def _lower(self, size: Size) -> Any:
        config, settings = self.config, self.settings
        rows = size.rows
        if size.kind == "copy":
            return copy_pages.lower(self._cache, ints(COPIES), ints(COPIES))
        if size.kind == "gather":
            return gather_pages.lower(self._cache, ints(MOVES))
        if size.kind == "scatter":
            return scatter_pages.lower(self._cache, [page_shapes(self._cache)] * MOVES, ints(MOVES))
        if size.kind in ("prefill", "prefill_scored"):
            table = self._table(rows, settings.page_widths[-1])
            batch = (ints(rows, size.length), ints(rows), ints(rows), table)
            options = {"config": config, "context_lengths": ints(rows), "from_empty": size.from_empty}
            if size.kind == "prefill":
                if size.num_ordered:
                    options["order"] = ints(size.num_ordered)
                params = self._params if size.of_output else self._prompt_params
                return steps.outermost_prefill.lower(params, self._cache, *batch, **options)
            return steps.outermost_prefill_scored.lower(
                self._prompt_params,
                self._cache,
                *batch,
                ints(rows, size.length),
                num_logprobs=size.num_logprobs,
                **options,
            )
        if size.kind == "score":
            batch = (ints(rows, size.length), ints(rows), ints(rows), ints(rows, size.width), ints(rows))
            targets = (ints(size.num_places), ints(size.num_places), ints())
            options = {"config": config, "head_rows": size.head_rows, "from_empty": size.from_empty}
            return prefill_targets.lower(self._params, self._cache, *batch, *targets, **options)
        assert size.layout is not None
        blank = {"vocab_size": config.vocab_size, "layout": size.layout}
        if size.kind == "blank":
            return blank_state.lower(num_slots=settings.rules.max_sequences, **blank)
        state = state_shapes(settings.rules.max_sequences, **blank)
        variant = size.layout.variant
        if size.kind == "start":
            logits = jax.ShapeDtypeStruct((rows, config.vocab_size), jnp.float32)
            started = state_shapes(rows, **blank)
            return start_rows.lower(logits, state, started, ints(rows), ints(rows), variant=variant)
        return decode_rows.lower(
            self._params,
            self._cache,
            state,
            ints(rows),
            self._table(rows, size.width),
            config=config,
            variant=variant,
            num_steps=settings.rules.decode_chunk,
        )

    def _table(self, rows: int, width: int) -> Any:
        """A page table without its contents."""
        return ints(rows, width)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def shapes_of(tree: Any) -> Any:
    """A pytree without its contents."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def shapes_key(tree: Any) -> tuple[object, object]:
    """What tells pytrees of shapes apart, hashable."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def state_shapes(num_slots: int, *, vocab_size: int, layout: SamplerLayout) -> Any:
    """A `DecodeState` without its contents."""
    return jax.eval_shape(lambda: blank_state(num_slots=num_slots, vocab_size=vocab_size, layout=layout))
