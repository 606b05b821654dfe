"""The speculative loop on the device: draft, verify, accept, roll back, for a static number of steps in one program.

A step drafts k tokens a row, runs the target over the newest token and the drafted ones at once, keeps what acceptance
keeps and moves each row on by its own number of tokens. Rolling back is moving on by less: what rejected tokens left in
the pages lies behind every row's end, is never read, and is written over by the next step. With k = 0 a step is one of
plain decoding.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState
from jaxinfer.program import Program, program
from jaxinfer.sampling_logprobs import TokenLogprobs
from jaxinfer.speculative.acceptance import DRAFT_STREAM, Acceptance, Proposal, Verdict, judge, stream_keys
from jaxinfer.speculative.proposer import Proposer, Rows, Wanted, idle_safe

# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@flax.struct.dataclass
class SpeculativeState:
    """Where each row stands, with what drafts need beyond `DecodeState`."""

    decode: DecodeState
    history: Int32[Array, "batch room"]
    """Every row's tokens. The newest may be missing: a step puts it in before it drafts."""
    hidden: Float[Array, "batch hidden"]
    coupled: Bool[Array, " batch"]
    """Rows that must have the sampler's own tokens (those with a seed)."""
    alone: Bool[Array, " batch"]
    """Rows that take their next step without drafted tokens: in the last one logits were not finite, and NaN keys and
    values of a drafted token reach the tokens before it too, since 0 * NaN is NaN."""
    draft: Any


@typing.no_type_check
@flax.struct.dataclass
class StepCounts:
    """What became of the proposals, for each step and row; -1 where the row was idle."""

    proposed: Int32[Array | np.ndarray, "steps batch"]
    accepted: Int32[Array | np.ndarray, "steps batch"]
    """Leading tokens that acceptance kept, those after a stop included."""


@dataclasses.dataclass(frozen=True)
class Method:
    """The parts of a program that speculates, all static."""

    config: ModelConfig
    """The target's."""
    proposer: Proposer
    acceptance: Acceptance


def steps_of(decode_chunk: int, num_drafted: int) -> int:
    """Steps of a chunk that drafts so many tokens a step, where a plain one has `decode_chunk`.

    A chunk runs to its end when the last row is done: with drafts it has about as many tokens, not as many steps.
    """
    return max(1, decode_chunk // min(num_drafted + 1, 4))


@program(
    static_argnames=("method", "wanted", "num_steps"),
    donate_argnames=("cache", "state"),
    rows=lambda params, draft_params, cache, state, *_: state.decode.tokens.shape[0],
)
def spec_chunk(
    params: Params,
    draft_params: Any,
    cache: PagedKVCache,
    state: SpeculativeState,
    active: Bool[Array, " batch"],
    page_table: Int32[Array, "batch pages"],
    *,
    method: Method,
    wanted: Wanted,
    num_steps: int,
) -> tuple[PagedKVCache, SpeculativeState, DecodedChunk, StepCounts]:
    """`spec_steps` as a program of its own. Rows not `active` are done at once."""
    decode = dataclasses.replace(state.decode, done=state.decode.done | ~active)
    state = dataclasses.replace(state, decode=decode)
    return spec_steps(params, draft_params, cache, state, page_table, method=method, wanted=wanted, num_steps=num_steps)


def spec_steps(
    params: Params,
    draft_params: Any,
    cache: PagedKVCache,
    state: SpeculativeState,
    page_table: Int32[Array, "batch pages"],
    *,
    method: Method,
    wanted: Wanted,
    num_steps: int,
) -> tuple[PagedKVCache, SpeculativeState, DecodedChunk, StepCounts]:
    """Runs `num_steps` steps of 1 to `wanted.num_drafted` + 1 tokens a row, for use inside a jitted program.

    Each row needs room in its pages for `num_drafted` tokens beyond the last it can gain. Rows that are done write
    nothing and gain nothing.
    """
    config, proposer, num_drafted = method.config, method.proposer, wanted.num_drafted
    state = dataclasses.replace(state, history=_with_newest(state.history, state.decode))

    def step(carry: tuple[PagedKVCache, SpeculativeState, jax.Array], _: None):
        cache, before, numbers = carry
        state = _with_small(before, numbers)
        decode = state.decode
        positions = jnp.where(decode.done, jnp.int32(-1), decode.positions)
        tokens, proposal, draft_state = decode.tokens[:, None], None, state.draft
        if num_drafted:
            rows = rows_of(state, page_table, wanted.with_logits)
            with jax.named_scope("draft"):
                proposal, draft_state, cache = proposer.propose(draft_params, state.draft, cache, rows, wanted)
                proposal = _without_others(proposal, decode.tokens, state.alone)
            tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
        with jax.named_scope("verify"):
            hidden, new_cache = decoder.forward(
                params,
                tokens,
                idle_safe(positions, num_drafted + 1),
                cache,
                page_table,
                config=config,
                stage="decode",
                context_lengths=decode.context_lengths,
            )
            assert new_cache is not None
            logits = decoder.logits(params, hidden, config)
        with jax.named_scope("accept"):
            verdict = judge(
                logits,
                _no_proposal(decode) if proposal is None else proposal,
                decode.sampling,
                wanted.variant,
                decode.num_generated,
                decode.max_tokens,
                state.coupled,
                method.acceptance,
            )
            lengths = jnp.zeros_like(positions) if proposal is None else proposal.lengths
            state, gained, failed = _advance(state, verdict, hidden, lengths)
            state = dataclasses.replace(state, draft=proposer.settle(draft_state, state.decode.positions))
        running = ~decode.done
        proposed, accepted = jnp.where(running, lengths, -1), jnp.where(running, verdict.num_accepted, -1)
        # One array a step: each of its own would be a kernel of its own, and a copy.
        numbers = [*_small(state)[0], gained, failed, proposed, accepted, *jnp.unstack(verdict.tokens, axis=1)]
        numbers = jax.lax.optimization_barrier(_in_columns(numbers))
        # Backwards, since XLA would make a copy of what needs no kernel, on another stream and outside of the graph.
        return (new_cache, _with_small_of(state, before), numbers), (numbers[:, ::-1], verdict.logprobs)

    small = _small(state)[0]
    width = len(small) + 4 + num_drafted + 1
    numbers = jnp.pad(_in_columns(small), ((0, 0), (0, width - len(small))))
    (cache, state, last), (numbers, logprobs) = jax.lax.scan(step, (cache, state, numbers), None, length=num_steps)
    state, numbers = _with_small(state, last), numbers[:, :, ::-1][:, :, len(small) :]
    gained, failed, proposed, accepted = (numbers[:, :, place] for place in range(4))
    tokens, logprobs = _by_row(gained, (numbers[:, :, 4:], logprobs))
    totals = jnp.sum(gained, axis=0, dtype=jnp.int32)
    chunk = DecodedChunk(tokens, totals, jnp.any(failed > 0, axis=0), logprobs)
    return cache, state, chunk, StepCounts(proposed, accepted)


def _small(state: SpeculativeState) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], SpeculativeState]]:
    """What changes in every step and is one number or truth a row, and the state with others in their place."""
    decode = state.decode
    leaves, structure = jax.tree.flatten(state.draft)
    small = (jnp.dtype(jnp.int32), jnp.dtype(bool))
    places = [i for i, leaf in enumerate(leaves) if leaf.shape == decode.tokens.shape and leaf.dtype in small]
    own = [decode.tokens, decode.positions, decode.num_generated, decode.done, state.alone]

    def replaced(others: Sequence[jax.Array]) -> SpeculativeState:
        tokens, positions, num_generated, done, alone, *of_draft = others
        changed = dict(zip(places, of_draft, strict=True))
        draft = jax.tree.unflatten(structure, [changed.get(i, leaf) for i, leaf in enumerate(leaves)])
        moved = dataclasses.replace(decode, tokens=tokens, positions=positions, num_generated=num_generated, done=done)
        return dataclasses.replace(state, decode=moved, alone=alone, draft=draft)

    return own + [leaves[i] for i in places], replaced


def _with_small(state: SpeculativeState, numbers: Int32[Array, "batch columns"]) -> SpeculativeState:
    """The state with its small parts as `_in_columns` has them."""
    small, replaced = _small(state)
    return replaced([numbers[:, i].astype(part.dtype) for i, part in enumerate(small)])


def _with_small_of(state: SpeculativeState, other: SpeculativeState) -> SpeculativeState:
    return _small(state)[1](_small(other)[0])


def _in_columns(parts: Sequence[jax.Array]) -> Int32[Array, "batch columns"]:
    return jnp.stack([part.astype(jnp.int32) for part in parts], axis=1)


def show_draft(
    draft_params: Any,
    state: SpeculativeState,
    page_table: Int32[Array, "batch pages"],
    known: Int32[Array, " batch"],
    *,
    proposer: Proposer,
    chunk: int,
    from_empty: bool = False,
) -> SpeculativeState:
    """Shows the draft up to `chunk` tokens of each row that it has not seen: its prefill, and what plain steps left.

    Arguments are those of `Proposer.catch_up`. For use inside a jitted program; `catch_up` is one of its own.
    """
    state = dataclasses.replace(state, history=_with_newest(state.history, state.decode))
    rows = rows_of(state, page_table, with_logits=False)
    draft = proposer.catch_up(draft_params, state.draft, rows, known, chunk, from_empty)
    return dataclasses.replace(state, draft=draft)


catch_up = Program(show_draft, static_argnames=("proposer", "chunk", "from_empty"), donate_argnames="state")


def rows_of(state: SpeculativeState, page_table: Int32[Array, "batch pages"], with_logits: bool) -> Rows:
    """What drafts see of a batch."""
    decode = state.decode
    keys = decode.sampling.keys
    if with_logits and keys is not None:
        keys = jnp.where(state.coupled[:, None], keys, stream_keys(keys, DRAFT_STREAM))
    return Rows(
        history=state.history,
        positions=jnp.where(decode.done, jnp.int32(-1), decode.positions),
        hidden=state.hidden,
        num_generated=decode.num_generated,
        context_lengths=decode.context_lengths,
        page_table=page_table,
        sampling=decode.sampling,
        noise_keys=keys,
    )


def _no_proposal(decode: DecodeState) -> Proposal:
    batch = decode.tokens.shape[0]
    return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))


def _without_others(proposal: Proposal, newest: Int32[Array, " batch"], alone: Bool[Array, " batch"]) -> Proposal:
    """The proposal, empty for rows that are `alone`. What does not count is the newest token once more, which hurts
    nobody that it does not hurt anyway."""
    lengths = jnp.where(alone, 0, proposal.lengths)
    places = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)[None, :]
    tokens = jnp.where(places < lengths[:, None], proposal.tokens, newest[:, None])
    return dataclasses.replace(proposal, tokens=tokens, lengths=lengths)


def _with_newest(history: Int32[Array, "batch room"], decode: DecodeState) -> Int32[Array, "batch room"]:
    rows = jnp.arange(history.shape[0], dtype=jnp.int32)
    return history.at[rows, decode.positions].set(decode.tokens, mode="drop")


def _advance(
    state: SpeculativeState,
    verdict: Verdict,
    hidden: Float[Array, "batch width hidden"],
    proposed: Int32[Array, " batch"],
) -> tuple[SpeculativeState, Int32[Array, " batch"], Bool[Array, " batch"]]:
    """Moves each row on; returns the state, the number of tokens that each row gained, and which rows failed.

    A row fails when its logits are not finite with nothing drafted behind them.
    """
    decode = state.decode
    batch, width = verdict.tokens.shape
    running = ~decode.done
    offered = verdict.num_accepted + verdict.valid.astype(jnp.int32)
    places = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_stop = jnp.any(verdict.tokens[:, :, None] == decode.stop_ids[:, None, :], axis=2)
    before_stop = jnp.sum(jnp.cumprod((~is_stop).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    room = decode.max_tokens - decode.num_generated
    gained = jnp.where(running, jnp.minimum(jnp.minimum(offered, before_stop + 1), room), 0)
    ended = (before_stop < gained) | (gained >= room)
    failed = running & ~verdict.valid & (gained == verdict.num_accepted) & ~ended
    alone = failed & (verdict.num_accepted < proposed)
    failed &= ~alone
    last = jnp.maximum(gained - 1, 0)[:, None]
    grew = gained > 0
    newest = jnp.take_along_axis(verdict.tokens, last, axis=1)[:, 0]
    new_places = decode.positions[:, None] + 1 + places
    taken = places < gained[:, None]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    history = state.history.at[rows, jnp.where(taken, new_places, state.history.shape[1])].set(
        verdict.tokens, mode="drop"
    )
    sampling = decode.sampling
    if sampling.penalties is not None:
        counts = sampling.penalties.output_counts
        counts = counts.at[rows, jnp.where(taken, verdict.tokens, counts.shape[1])].add(1, mode="drop")
        sampling = sampling.with_output_counts(counts)
    decode = dataclasses.replace(
        decode,
        tokens=jnp.where(grew, newest, decode.tokens),
        positions=decode.positions + gained,
        num_generated=decode.num_generated + gained,
        done=decode.done | failed | (running & ended),
        sampling=sampling,
    )
    own_hidden = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
    own_hidden = jnp.where(grew[:, None], own_hidden, state.hidden)
    return dataclasses.replace(state, decode=decode, history=history, hidden=own_hidden, alone=alone), gained, failed


def _by_row(
    gained: Int32[Array, "steps batch"], leaves: tuple[jax.Array, TokenLogprobs | None]
) -> tuple[jax.Array, TokenLogprobs | None]:
    """Leaves [steps, batch, width, ...] as [steps * width, batch, ...]: row b's entries first, without gaps."""
    steps, batch = gained.shape
    before = jnp.cumsum(gained, axis=0, dtype=jnp.int32) - gained

    def pack(leaf: jax.Array) -> jax.Array:
        width = leaf.shape[2]
        places = jnp.arange(width, dtype=jnp.int32)[None, None, :]
        targets = jnp.where(places < gained[:, :, None], before[:, :, None] + places, steps * width)
        rows = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[None, :, None], targets.shape)
        empty = jnp.zeros((steps * width, batch, *leaf.shape[3:]), leaf.dtype)
        return empty.at[targets, rows].set(leaf, mode="drop")

    return jax.tree.map(pack, leaves)
