"""Rotary position embeddings: frequencies of every scaling rule, cos and sin tables, and the rotation itself.

Angles are computed in fixed-point turns, not in float32 radians. At position 131071 a float32 product is off
by up to 0.008 rad, and a bfloat16 one is noise from position 256 on; the fixed-point product drops whole
turns exactly, is good to 1e-6 rad there, and spares the GPU the slow path of sin and cos for large arguments.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxinfer.config import RopeConfig

_LOW_BITS = 8
"""Bits of a frequency after the first 32. With 8, positions may go to 2 ** 24, and 2 ** 17 is good to 4e-7 rad."""

MAX_POSITIONS = 1 << (32 - _LOW_BITS)


def inverse_frequencies(rope: RopeConfig, context_length: int) -> Float32[np.ndarray, " half"]:
    """Radians per token of each rotated pair, for a sequence that reaches `context_length` tokens.

    The length matters to `dynamic` and `longrope` only. Rules as in transformers' `ROPE_INIT_FUNCTIONS`.
    """
    return _frequencies(rope, context_length).astype(np.float32)


def rope_tables(
    rope: RopeConfig,
    positions: Int32[Array, "batch tokens"],
    context_lengths: Int32[Array, " batch"],
) -> tuple[Float32[Array, "batch tokens half"], Float32[Array, "batch tokens half"]]:
    """Cos and sin of every token's angles, times the attention factor, in float32 whatever the model's dtype.

    `positions` are from 0 to `MAX_POSITIONS` - 1, 16,777,215. `context_lengths` is the longest length
    each row will reach, the same in every step of its life: keys already in the cache were rotated for it.
    It chooses between the short and long factors of `longrope` and sets the base of `dynamic`; the other
    kinds do not depend on it.
    """
    with jax.named_scope("rope_tables"):
        high, low = _row_turns(rope, context_lengths)
        unsigned = positions.astype(jnp.uint32)[:, :, None]
        turns = unsigned * high[:, None, :] + ((unsigned * low[:, None, :]) >> _LOW_BITS)
        # As a signed number the fraction is between -1/2 and 1/2 turn.
        angles = jax.lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
        return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(
    x: Float[Array, "batch tokens heads head_dim"],
    cos: Float32[Array, "batch tokens half"],
    sin: Float32[Array, "batch tokens half"],
    rotary_dim: int,
    interleaved: bool,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotates the first `rotary_dim` dimensions of each head, in float32, and returns the dtype of `x`.

    Pair i is dimensions (i, i + rotary_dim / 2), or (2i, 2i + 1) if `interleaved`.
    """
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = x[..., :rotary_dim].astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    join = jnp.stack if interleaved else jnp.concatenate
    rotated = join(pair, axis=-1).reshape(rotated.shape).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., rotary_dim:]], axis=-1)


def _row_turns(
    rope: RopeConfig, context_lengths: Int32[Array, " batch"]
) -> tuple[UInt32[Array, "rows half"], UInt32[Array, "rows half"]]:
    """Turns per token as 32 and `_LOW_BITS` fraction bits in two words, for each row or once for all rows."""
    if rope.kind == "longrope":
        original = rope.original_max_position_embeddings
        short, long = (_fixed_point(_frequencies(rope, length)) for length in (original, original + 1))
        is_long = (context_lengths > original)[:, None]
        high, low = (
            jnp.where(is_long, jnp.asarray(b)[None, :], jnp.asarray(a)[None, :])
            for a, b in zip(short, long, strict=True)
        )
        return high, low
    if rope.kind == "dynamic":
        # The base depends on a traced length, so these have float32's 24 bits, all in the high word.
        exponents = np.arange(0, rope.rotary_dim, 2) / (rope.rotary_dim - 2)
        lengths = jnp.maximum(context_lengths, rope.original_max_position_embeddings).astype(jnp.float32)
        growth = lengths * (rope.factor / rope.original_max_position_embeddings) - (rope.factor - 1)
        turns = _frequencies(rope, rope.original_max_position_embeddings) / (2 * math.pi)
        shrink = jnp.exp(-jnp.log(growth)[:, None] * jnp.asarray(exponents, jnp.float32)[None, :])
        high = (jnp.asarray(turns * 2**32, jnp.float32)[None, :] * shrink).astype(jnp.uint32)
        return high, jnp.zeros_like(high)
    high, low = _fixed_point(_frequencies(rope, rope.original_max_position_embeddings))
    return jnp.asarray(high)[None, :], jnp.asarray(low)[None, :]


def _fixed_point(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 radians per token to turns per token: 32 fraction bits, and the `_LOW_BITS` after them."""
    turns = np.round(frequencies / (2 * math.pi) * 2.0 ** (32 + _LOW_BITS)).astype(np.uint64)
    high, low = np.divmod(turns, np.uint64(1 << _LOW_BITS))
    return high.astype(np.uint32), low.astype(np.uint32)


def _frequencies(rope: RopeConfig, context_length: int) -> np.ndarray:
    """`inverse_frequencies` in float64."""
    dim, original = rope.rotary_dim, rope.original_max_position_embeddings
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies = rope.theta**-exponents
    match rope.kind:
        case "default":
            pass
        case "linear":
            frequencies = frequencies / rope.factor
        case "dynamic":
            growth = rope.factor * max(context_length, original) / original - (rope.factor - 1)
            frequencies = (rope.theta * growth ** (dim / (dim - 2))) ** -exponents
        case "longrope":
            divisors = rope.long_factor if context_length > original else rope.short_factor
            frequencies = frequencies / np.array(divisors, dtype=np.float64)
        case "yarn":
            kept = _yarn_kept(rope)
            frequencies = frequencies * kept + frequencies / rope.factor * (1 - kept)
        case "llama3":
            # Turns in the original context: many are kept, few are stretched, a smooth blend between.
            turns = original * frequencies / (2 * math.pi)
            kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            frequencies = frequencies * kept + frequencies / rope.factor * (1 - kept)
    if rope.frequency_divisors:
        frequencies = frequencies / np.array(rope.frequency_divisors, dtype=np.float64)
    return frequencies


def _yarn_kept(rope: RopeConfig) -> np.ndarray:
    """The share of each frequency that YaRN leaves alone, the rest it interpolates (arXiv 2309.00071)."""
    dim = rope.rotary_dim

    def dimension_that_turns(times: float) -> float:
        wavelength_ratio = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
