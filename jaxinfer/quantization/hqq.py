"""Half-quadratic quantisation: a floating zero for each group, fitted without data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. The loss is a norm with an
exponent below 1, which lets a few outliers be wrong; it is minimised by turns: in the error that is excused, which has
a closed form (shrinkage), and in the zero, which is a mean.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxinfer.quantization.rtn import ROWS_AT_ONCE, groups_of
from pallas_kernels.int4_matmul import PackedInt4, from_codes

NORM, BETA, BETA_GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20


@functools.partial(jax.jit, static_argnames=("bits", "group_size"))
def half_quadratic(weight: Float[Array, "out in"], *, bits: int, group_size: int) -> PackedInt4:
    """Quantises a weight to codes of `bits` bits (2 to 4), float16 scales and minima: value = scale * code + minimum.

    The scale is that of the group's range; of all zeros met on the way the one with the least mean absolute error is
    kept. Codes of 2 and 3 bits take the room of 4. Deterministic.
    """
    out_features, in_features = weight.shape
    quantize_row = functools.partial(_quantize_groups, bits=bits)
    codes, scales, minimums = jax.lax.map(quantize_row, groups_of(weight, group_size), batch_size=ROWS_AT_ONCE)
    return from_codes(codes.reshape(out_features, -1)[:, :in_features], scales, minimums, group_size=group_size)


def shrink(error: Float[Array, "*shape"], beta: Float[Array, ""]) -> Float[Array, "*shape"]:
    """The part of an error that a norm of exponent `NORM` excuses: the generalised soft threshold."""
    size = jnp.abs(error)
    threshold = jnp.where(size > 0, size ** (NORM - 1.0), jnp.inf) / beta
    return jnp.sign(error) * jnp.maximum(size - threshold, 0.0)


def _quantize_groups(
    weight: Float[Array, "groups group_size"], *, bits: int
) -> tuple[UInt8[Array, "groups group_size"], Float[Array, " groups"], Float[Array, " groups"]]:
    """Codes, float16 scales and float16 minima of one row's groups."""
    largest = 2.0**bits - 1
    low, high = jnp.min(weight, axis=1, keepdims=True), jnp.max(weight, axis=1, keepdims=True)
    scale = ((high - low) / largest).astype(jnp.float16).astype(jnp.float32)
    scale = jnp.where(scale == 0.0, 1.0, scale)

    def encode(minimum: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes and values, with the minimum as it is stored."""
        minimum = minimum.astype(jnp.float16).astype(jnp.float32)
        codes = jnp.clip(jnp.round((weight - minimum) / scale), 0.0, largest)
        return codes, scale * codes + minimum

    def improve(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        minimum, beta, best, least = state
        codes, values = encode(minimum)
        mean_error = jnp.mean(jnp.abs(values - weight), axis=1, keepdims=True)
        better = mean_error < least
        best, least = jnp.where(better, minimum, best), jnp.where(better, mean_error, least)
        # In units of the scale: in those of the weights, as in the authors' code, errors of a thousandth are so far
        # below the threshold that none is ever excused. This way every error measure is smaller (test_quantization).
        excused = shrink((weight - values) / scale, beta) * scale
        minimum = jnp.mean(weight - excused - scale * codes, axis=1, keepdims=True)
        return minimum, beta * BETA_GROWTH, best, least

    start = (low, jnp.float32(BETA), low, jnp.full_like(low, jnp.inf))
    minimum, _, best, least = jax.lax.fori_loop(0, ITERATIONS, improve, start)
    _, values = encode(minimum)
    best = jnp.where(jnp.mean(jnp.abs(values - weight), axis=1, keepdims=True) < least, minimum, best)
    codes, _ = encode(best)
    return codes.astype(jnp.uint8), scale[:, 0].astype(jnp.float16), best[:, 0].astype(jnp.float16)
