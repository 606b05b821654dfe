"""The jitted programs of an engine with a draft, on chosen rows ("slots") of one large state, as in `rows`."""

import dataclasses
import functools
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer.decoder import Params
from jaxinfer.engine.rows import put_slots, take_slots
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState
from jaxinfer.program import program
from jaxinfer.speculative.loop import Method, SpeculativeState, StepCounts, rows_of, show_draft, spec_steps
from jaxinfer.speculative.proposer import Proposer, Wanted


@typing.no_type_check  # JAX rebuilds pytrees around placeholders, as in `lower`
@flax.struct.dataclass
class DraftingState:
    """What slots have with a draft beside their `DecodeState`; see `SpeculativeState`."""

    history: Int32[Array, "slots room"]
    hidden: Float[Array, "slots hidden"]
    coupled: Bool[Array, " slots"]
    alone: Bool[Array, " slots"]
    draft: Any
    """The draft's state: its pages, and leaves indexed by slot."""


def _is_pages(node: object) -> bool:
    return isinstance(node, PagedKVCache)


def take(state: DecodeState, drafting: DraftingState, slots: Int32[Array, " rows"]) -> SpeculativeState:
    """The sequences in `slots`, with all of the draft's pages."""

    def row(whole: Any) -> Any:
        return whole if _is_pages(whole) else whole.at[slots].get(mode="clip")

    parts = jax.tree.map(row, drafting, is_leaf=_is_pages)
    rest = (parts.history, parts.hidden, parts.coupled, parts.alone, parts.draft)
    return SpeculativeState(take_slots(state, slots), *rest)


def put_draft(drafting: DraftingState, part: SpeculativeState, slots: Int32[Array, " rows"]) -> DraftingState:
    """`take` undone for everything but the `DecodeState`."""

    def put(whole: Any, new: Any) -> Any:
        return new if _is_pages(whole) else whole.at[slots].set(new, mode="drop")

    parts = DraftingState(part.history, part.hidden, part.coupled, part.alone, part.draft)
    return jax.tree.map(put, drafting, parts, is_leaf=_is_pages)


@functools.partial(jax.jit, donate_argnames="drafting")
def seat_rows(
    drafting: DraftingState,
    slots: Int32[Array, " rows"],
    history: Int32[Array, "rows room"],
    coupled: Bool[Array, " rows"],
) -> DraftingState:
    """Prepares slots for new sequences, whose tokens are given; the draft has seen none of them."""

    def blank(whole: Any) -> Any:
        return whole if _is_pages(whole) else whole.at[slots].set(jnp.zeros((), whole.dtype), mode="drop")

    drafting = jax.tree.map(blank, drafting, is_leaf=_is_pages)
    return dataclasses.replace(
        drafting,
        history=drafting.history.at[slots].set(history, mode="drop"),
        coupled=drafting.coupled.at[slots].set(coupled, mode="drop"),
    )


@program(static_argnames=("proposer", "chunk", "from_empty"), donate_argnames="drafting")
def catch_up_rows(
    draft_params: Any,
    state: DecodeState,
    drafting: DraftingState,
    slots: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages"],
    known: Int32[Array, " rows"],
    *,
    proposer: Proposer,
    chunk: int,
    from_empty: bool,
) -> tuple[DraftingState, Int32[Array, " rows"]]:
    """`show_draft` for the sequences in `slots`. The second result is there to see that the program has ended."""
    part = show_draft(
        draft_params,
        take(state, drafting, slots),
        page_table,
        known,
        proposer=proposer,
        chunk=chunk,
        from_empty=from_empty,
    )
    return put_draft(drafting, part, slots), part.decode.positions


@program(
    static_argnames=("proposer", "wanted"),
    donate_argnames=("cache", "drafting"),
    rows=lambda draft_params, cache, state, drafting, slots, *_: slots.shape[0],
)
def draft_rows(
    draft_params: Any,
    cache: PagedKVCache,
    state: DecodeState,
    drafting: DraftingState,
    slots: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages"],
    *,
    proposer: Proposer,
    wanted: Wanted,
) -> tuple[PagedKVCache, DraftingState, Int32[Array, "rows drafted"]]:
    """A step's proposal alone, to time it."""
    part = take(state, drafting, slots)
    proposal, draft, cache = proposer.propose(
        draft_params, part.draft, cache, rows_of(part, page_table, wanted.with_logits), wanted
    )
    return cache, put_draft(drafting, dataclasses.replace(part, draft=draft), slots), proposal.tokens


@program(
    static_argnames=("method", "wanted", "num_steps"),
    donate_argnames=("cache", "state", "drafting"),
    rows=lambda params, draft_params, cache, state, drafting, slots, *_: slots.shape[0],
)
def speculate_rows(
    params: Params,
    draft_params: Any,
    cache: PagedKVCache,
    state: DecodeState,
    drafting: DraftingState,
    slots: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages"],
    *,
    method: Method,
    wanted: Wanted,
    num_steps: int,
) -> tuple[PagedKVCache, DecodeState, DraftingState, DecodedChunk, StepCounts]:
    """`spec_steps` for the sequences in `slots`; the others stay as they are."""
    cache, part, chunk, counts = spec_steps(
        params,
        draft_params,
        cache,
        take(state, drafting, slots),
        page_table,
        method=method,
        wanted=wanted,
        num_steps=num_steps,
    )
    return cache, put_slots(state, part.decode, slots), put_draft(drafting, part, slots), chunk, counts
