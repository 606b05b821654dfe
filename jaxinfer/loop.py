"""The decode loop on the device: sample, append, repeat, for a static number of steps in one program.

A chunk is a loop with a static trip count (one that asks the device whether to go on costs twice as much for each
kernel); rows that have finished are masked. The host dispatches the next chunk before it reads the
last, so it never stands between two steps.
"""

import dataclasses
import functools
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.program import program
from jaxinfer.sampling import sample
from jaxinfer.sampling_logprobs import TokenLogprobs
from jaxinfer.sampling_state import SamplerVariant, SamplingState
from jaxinfer.tiers import KVCache, PageTable

# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@flax.struct.dataclass
class DecodeState:
    """Where each row stands. A row that is `done` changes nothing any more."""

    tokens: Int32[Array, " batch"]
    """The newest token, sampled but not yet in the cache."""
    positions: Int32[Array, " batch"]
    """Where that token will go."""
    num_generated: Int32[Array, " batch"]
    max_tokens: Int32[Array, " batch"]
    stop_ids: Int32[Array, "batch num_stops"]
    """Ids that end the row; unused places are -1."""
    context_lengths: Int32[Array, " batch"]
    done: Bool[Array, " batch"]
    sampling: SamplingState


@typing.no_type_check
@flax.struct.dataclass
class DecodedChunk:
    """What a chunk generated. Row b's tokens are the first `counts[b]` of column b."""

    tokens: Int32[Array | np.ndarray, "steps batch"]
    counts: Int32[Array | np.ndarray, " batch"]
    failed: Bool[Array | np.ndarray, " batch"]
    """The row ended because its logits were not finite; it has no token for that step."""
    logprobs: TokenLogprobs | None


@functools.partial(jax.jit, static_argnames="variant", donate_argnames="state")
def first_token(
    logits: Float32[Array, "batch vocab"], state: DecodeState, *, variant: SamplerVariant
) -> tuple[DecodeState, DecodedChunk]:
    """Samples the first token of each row from prefill's logits; a chunk of one step."""
    return sample_first(logits, state, variant)


def sample_first(
    logits: Float32[Array, "batch vocab"], state: DecodeState, variant: SamplerVariant
) -> tuple[DecodeState, DecodedChunk]:
    """`first_token` for use inside a jitted program."""
    state, step = _sample_step(logits, state, variant)
    tokens, counted, failed, logprobs = jax.tree.map(lambda leaf: leaf[None], step)
    return state, DecodedChunk(tokens, counted[0].astype(jnp.int32), failed[0], logprobs)


@program(
    static_argnames=("config", "variant", "num_steps"),
    donate_argnames=("cache", "state"),
    rows=lambda params, cache, state, *_: state.tokens.shape[0],
)
def decode_chunk(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    active: Bool[Array, " batch"],
    page_table: PageTable,
    *,
    config: ModelConfig,
    variant: SamplerVariant,
    num_steps: int,
) -> tuple[KVCache, DecodeState, DecodedChunk]:
    """Runs `num_steps` decode steps. Rows not `active` (the host ended them: a stop string, say) are done at once."""
    state = dataclasses.replace(state, done=state.done | ~active)
    return decode_steps(params, cache, state, page_table, config=config, variant=variant, num_steps=num_steps)


def decode_steps[Cache: KVCache](
    params: Params,
    cache: Cache,
    state: DecodeState,
    page_table: PageTable,
    *,
    config: ModelConfig,
    variant: SamplerVariant,
    num_steps: int,
) -> tuple[Cache, DecodeState, DecodedChunk]:
    """The loop itself, for use inside a jitted program. Rows that are `done` write nothing and gain nothing."""

    def step(carry: tuple[Cache, DecodeState], _: None):
        cache, state = carry
        positions = jnp.where(state.done, jnp.int32(-1), state.positions)
        hidden, new_cache = decoder.forward(
            params,
            state.tokens[:, None],
            positions[:, None],
            cache,
            page_table,
            config=config,
            stage="decode",
            context_lengths=state.context_lengths,
        )
        assert new_cache is not None
        logits = decoder.logits(params, hidden[:, 0], config)
        state = dataclasses.replace(state, positions=jnp.where(state.done, state.positions, state.positions + 1))
        state, outputs = _sample_step(logits, state, variant)
        return (new_cache, state), outputs

    (cache, state), outputs = jax.lax.scan(step, (cache, state), None, length=num_steps)
    tokens, counted, failed, logprobs = outputs
    counts = jnp.sum(counted, axis=0, dtype=jnp.int32)
    return cache, state, DecodedChunk(tokens, counts, jnp.any(failed, axis=0), logprobs)


def compile_chunk(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    active: jax.Array,
    page_table: PageTable,
    *,
    config: ModelConfig,
    variant: SamplerVariant,
    num_steps: int,
) -> None:
    """Compiles `decode_chunk` for arguments like these, of which only shapes and types count; a call then finds it."""
    changing = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (cache, state, active, page_table)
    )
    decode_chunk.lower(params, *changing, config=config, variant=variant, num_steps=num_steps).compile()


def _sample_step(
    logits: Float32[Array, "batch vocab"], state: DecodeState, variant: SamplerVariant
) -> tuple[DecodeState, tuple[jax.Array, jax.Array, jax.Array, TokenLogprobs | None]]:
    """Samples a token for each row that is not done, and finds out which rows it ends.

    Returns the new state and (tokens, whether the row gained one, whether it failed, logprobs).
    """
    running = ~state.done
    output, sampling = sample(logits, state.sampling, variant, state.num_generated)
    gained = running & output.valid
    failed = running & ~output.valid
    tokens = jnp.where(gained, output.tokens, state.tokens)
    num_generated = state.num_generated + gained.astype(jnp.int32)
    stopped = jnp.any(tokens[:, None] == state.stop_ids, axis=1)
    done = state.done | failed | (gained & (stopped | (num_generated >= state.max_tokens)))
    state = dataclasses.replace(state, tokens=tokens, num_generated=num_generated, done=done, sampling=sampling)
    return state, (tokens, gained, failed, output.logprobs)
