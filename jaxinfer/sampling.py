"""Sampling on the device: one token for each row from its logits, each row under its own options.

The order is that of vLLM's V1 engine: log-probabilities are read from the raw logits; then padding ids are
masked; before `min_tokens` end-of-text and stop ids are masked; `logit_bias` is added; repetition, frequency
and presence penalties are applied; greedy rows take the most probable token; the others divide by the
temperature, filter by min-p, top-k and top-p, and draw. All of it in float32, since 16-bit noise ties and
draws masked tokens.

The logits are read twice, or once where every row is greedy: at 256 rows of 128,256 a pass is 131 MB.
"""

import dataclasses
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxinfer.sampling_filters import keep_mask
from jaxinfer.sampling_logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling_params import GREEDY_BELOW
from jaxinfer.sampling_state import Penalties, SamplerVariant, SamplingState

BLOCK = 128
"""Tokens of a block of `draw`: a factor of the vocabulary of most families, which then needs no padding."""


@typing.no_type_check
@flax.struct.dataclass
class SamplerOutput:
    """One step's tokens."""

    tokens: Int32[Array, " batch"]
    valid: Bool[Array, " batch"]
    """False: the row's logits held NaN or +inf, or left nothing to draw. Its token is some id without
    meaning; end that row, and only that, with an error."""
    logprobs: TokenLogprobs | None
    """None if the variant reports none."""


def sample(
    logits: Float32[Array, "batch vocab"],
    state: SamplingState,
    variant: SamplerVariant,
    num_generated: Int32[Array, " batch"],
) -> tuple[SamplerOutput, SamplingState]:
    """Chooses the next token of every row; pure, of fixed shapes, for use inside a jitted loop.

    `variant` is static, and `state` was built for it. `num_generated` is the number of tokens that a row has
    generated so far; with the row's seed it determines the noise, so a row's tokens do not depend on its
    place in the batch, on its neighbours, or on how steps are grouped into programs. The state returned
    counts the new tokens.
    """
    processed = processed_logits(logits, state, variant, num_generated)
    largest, tokens = largest_of(processed)
    valid = jnp.isfinite(largest)
    if processed is not logits:  # what was masked counts too
        valid &= jnp.max(logits, axis=1) < jnp.inf
    if not variant.greedy:
        drawn = draw(draw_logits(processed, state, variant, largest), _built(state.keys), num_generated)
        tokens = jnp.where(_built(state.temperature) < GREEDY_BELOW, tokens, drawn)
    logprobs = None
    if variant.num_logprobs is not None:
        logprobs = token_logprobs(logits, tokens, variant.num_logprobs, variant.num_tokens)
    return SamplerOutput(tokens, valid, logprobs), count_tokens(state, tokens)


def largest_of(
    logits: Float32[Array, "batch vocab"],
) -> tuple[Float32[Array, " batch"], Int32[Array, " batch"]]:
    """Each row's largest logit, NaN if any is, and where it comes first: `jnp.argmax`, whose reduction has both.

    Reading the logit at the place that it returns is a kernel of its own.
    """

    def better(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (number, place), (known, known_place) = one, other
        is_better = (number > known) | (number != number)
        is_first = is_better | ((number == known) & (place < known_place))
        return jnp.where(is_better, number, known), jnp.where(is_first, place, known_place)

    places = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return lax.reduce((logits, places), (np.float32(-np.inf), np.int32(0)), better, (1,))


def processed_logits(
    logits: Float32[Array, "batch vocab"],
    state: SamplingState,
    variant: SamplerVariant,
    num_generated: Int32[Array, " batch"],
) -> Float32[Array, "batch vocab"]:
    """Logits after everything that also concerns greedy rows: masks, bias and penalties."""
    vocab = logits.shape[1]
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    if variant.num_tokens < vocab:
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(ids < variant.num_tokens, logits, -jnp.inf)
    if variant.min_tokens:
        minimum = _built(state.min_tokens)
        early = num_generated < minimum.count
        masked_ids = jnp.where(early[:, None], minimum.ids, vocab)
        logits = logits.at[rows, masked_ids].set(-jnp.inf, mode="drop")
    if variant.logit_bias:
        bias = _built(state.logit_bias)
        logits = logits.at[rows, bias.ids].add(bias.values, mode="drop")
    if variant.penalties:
        logits = _penalised(logits, _built(state.penalties))
    return logits


def _penalised(logits: Float32[Array, "batch vocab"], penalties: Penalties) -> Float32[Array, "batch vocab"]:
    generated = penalties.output_counts > 0
    factor = jnp.where(penalties.prompt_mask | generated, penalties.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / factor, logits * factor)
    logits -= penalties.frequency[:, None] * penalties.output_counts.astype(jnp.float32)
    return logits - jnp.where(generated, penalties.presence[:, None], 0.0)


def draw_logits(
    processed: Float32[Array, "batch vocab"],
    state: SamplingState,
    variant: SamplerVariant,
    largest: Float32[Array, " batch"] | None = None,
) -> Float32[Array, "batch vocab"]:
    """Log-probabilities that tokens are drawn with, up to a constant for each row: the largest is 0. -inf for filtered
    tokens. `largest` is each row's largest of `processed`, where it is known already.

    For rows that are not greedy, `softmax` of this is the exact distribution of `sample`, which is what
    speculative acceptance compares; greedy rows are treated as temperature 1.
    """
    temperature = _built(state.temperature)
    temperature = jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)
    # The maximum goes first: dividing by a small temperature then overflows only where the probability is 0.
    largest = jnp.max(processed, axis=1) if largest is None else largest
    scaled = (processed - largest[:, None]) / temperature[:, None]
    if variant.top_k or variant.top_p or variant.min_p:
        keep = keep_mask(
            processed,
            jnp.exp(scaled),
            _built(state.top_k) if variant.top_k else None,
            _built(state.top_p) if variant.top_p else None,
            _built(state.min_p) if variant.min_p else None,
        )
        scaled = jnp.where(keep, scaled, -jnp.inf)
    return scaled


def draw(
    log_weights: Float32[Array, "batch vocab"], keys: UInt32[Array, "batch 2"], num_generated: Int32[Array, " batch"]
) -> Int32[Array, " batch"]:
    """Draws a token of each row with probabilities proportional to `exp(log_weights)`, of which the largest is near 1.

    First a block of tokens with the probability of the block, then a token within it, each by the largest sum of
    log-weight and Gumbel noise: the same distribution as one draw among all tokens, for a hundredth of the noise, which
    takes a GPU several times as long as reading the logits. A weight below 1e-38 is none.
    """
    batch, vocab = log_weights.shape
    num_blocks = -(-vocab // BLOCK)
    padding = ((0, 0), (0, num_blocks * BLOCK - vocab))
    blocks = jnp.pad(log_weights, padding, constant_values=-jnp.inf).reshape(batch, num_blocks, BLOCK)
    noise = gumbel(keys, num_generated, num_blocks + BLOCK)
    block = jnp.argmax(jnp.log(jnp.sum(jnp.exp(blocks), axis=2)) + noise[:, :num_blocks], axis=1).astype(jnp.int32)
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + jnp.argmax(chosen + noise[:, num_blocks:], axis=1).astype(jnp.int32)
    return jnp.minimum(token, vocab - 1)  # which only a row without valid weights exceeds


def gumbel(
    keys: UInt32[Array, "batch 2"], num_generated: Int32[Array, " batch"], count: int
) -> Float32[Array, "batch count"]:
    """Standard Gumbel noise, always finite; depends on nothing but a row's key, its step, the place and `count`.

    `-log(-log1p(-u))` with u from 32 random bits: the largest noise, which decides a draw, comes from the
    smallest u, where float32 is dense. `jax.random.gumbel` has 23 bits there, and with 150,000 tokens that
    ties often.
    """

    def bits(key: UInt32[Array, "2"], step: Int32[Array, ""]) -> UInt32[Array, " count"]:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), step)
        return jax.random.bits(folded, (count,), jnp.uint32)

    uniform = (jax.vmap(bits)(keys, num_generated).astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1.0 - 2.0**-24)  # rounding to 1 would make the noise -inf
    return -jnp.log(-jnp.log1p(-uniform))


def count_tokens(state: SamplingState, tokens: Int32[Array, " batch"]) -> SamplingState:
    """Adds one generated token for each row to what the penalties count."""
    if state.penalties is None:
        return state
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    counts = state.penalties.output_counts.at[rows, tokens].add(1)
    return dataclasses.replace(state, penalties=dataclasses.replace(state.penalties, output_counts=counts))


def _built[T](part: T | None) -> T:
    if part is None:
        raise ValueError("the sampling state lacks a part that its variant uses; build both with build_sampling_state")
    return part
