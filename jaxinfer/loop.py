"""The decode loop on the device: sample, append, repeat, for a static number of steps in one program.

A chunk is a `fori_loop` with a static trip count (a `while_loop` that asks the device whether to go on costs twice as
much for each kernel); rows that have finished are masked. The host dispatches the next chunk before it reads the
last, so it never stands between two steps.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.sampling import SamplerVariant, SamplingState, sample
from jaxinfer.sampling_logprobs import TokenLogprobs


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


@flax.struct.dataclass
class DecodedChunk:
    """What a chunk generated. Row b's tokens are the first `counts[b]` of column b."""

    tokens: Int32[Array, "steps batch"]
    counts: Int32[Array, " batch"]
    done: Bool[Array, " batch"]
    failed: Bool[Array, " batch"]
    """The row ended because its logits were not finite; it has no token for that step."""
    logprobs: TokenLogprobs | None


@functools.partial(jax.jit, static_argnames="variant", donate_argnames="state")
def first_token(
    logits: Float32[Array, "batch vocab"], state: DecodeState, *, variant: SamplerVariant
) -> tuple[DecodeState, DecodedChunk]:
    """Samples the first token of each row from prefill's logits; a chunk of one step."""
    state, step = _sample_step(logits, state, variant)
    tokens, counted, failed, logprobs = jax.tree.map(lambda leaf: leaf[None], step)
    return state, DecodedChunk(tokens, counted[0].astype(jnp.int32), state.done, failed[0], logprobs)


@functools.partial(jax.jit, static_argnames=("config", "variant", "num_steps"), donate_argnames=("cache", "state"))
def decode_chunk(
    params: Params,
    cache: PagedKVCache,
    state: DecodeState,
    active: Bool[Array, " batch"],
    page_table: Int32[Array, "batch pages"],
    *,
    config: ModelConfig,
    variant: SamplerVariant,
    num_steps: int,
) -> tuple[PagedKVCache, DecodeState, DecodedChunk]:
    """Runs `num_steps` decode steps. Rows not `active` (ended by the host: a stop string, say) are done from the start."""
    state = state.replace(done=state.done | ~active)

    def step(cache: PagedKVCache, state: DecodeState):
        positions = jnp.where(state.done, jnp.int32(-1), state.positions)
        hidden, cache_or_none = decoder.forward(
            params,
            state.tokens[:, None],
            positions[:, None],
            cache,
            page_table,
            config=config,
            context_lengths=state.context_lengths,
        )
        assert cache_or_none is not None
        logits = decoder.logits(params, hidden[:, 0], config)
        state = state.replace(positions=jnp.where(state.done, state.positions, state.positions + 1))
        state, outputs = _sample_step(logits, state, variant)
        return cache_or_none, state, outputs

    outputs_shape = jax.eval_shape(step, cache, state)[2]
    buffers = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), outputs_shape)

    def body(index, carry):
        cache, state, buffers = carry
        cache, state, outputs = step(cache, state)
        buffers = jax.tree.map(lambda buffer, leaf: buffer.at[index].set(leaf), buffers, outputs)
        return cache, state, buffers

    cache, state, buffers = jax.lax.fori_loop(0, num_steps, body, (cache, state, buffers))
    tokens, counted, failed, logprobs = buffers
    counts = jnp.sum(counted, axis=0, dtype=jnp.int32)
    return cache, state, DecodedChunk(tokens, counts, state.done, jnp.any(failed, axis=0), logprobs)


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
    state = state.replace(tokens=tokens, num_generated=num_generated, done=done, sampling=sampling)
    return state, (tokens, gained, failed, output.logprobs)
