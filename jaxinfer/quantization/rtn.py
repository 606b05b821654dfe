"""Round to nearest, each group's range clipped for the least error."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.int4_matmul import Packed, from_codes, from_int8_codes

CLIP_RATIOS = tuple(1.0 - 0.02 * i for i in range(26))
"""Shares of a group's range that are tried, from all of it to half: a smaller range has smaller steps and cuts
outliers off."""

ERROR_EXPONENT = 2.4
"""Of the error that clipping minimises, as in GPTQ's search. With 2, the mean square, too many large weights are cut
off: SmolLM2-135M loses more by it with 3 and with 4 bits (`benchmarks.clipping`, docs/quantization.md)."""

ROWS_AT_ONCE = 64

type GroupErrors = Callable[[jax.Array], jax.Array]
"""From the errors of one row's weights, [groups, group_size], how bad each group is, [groups]."""


@functools.partial(jax.jit, static_argnames=("bits", "group_size", "symmetric", "ratios", "exponent"))
def round_to_nearest(
    weight: Float[Array, "out in"],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    moments: Float[Array, "in in"] | None = None,
    ratios: tuple[float, ...] = CLIP_RATIOS,
    exponent: float = ERROR_EXPONENT,
) -> Packed:
    """Quantises a weight to codes of `bits` bits (2 to 4, 8) with float16 scales and, unless `symmetric`, zero points.

    For every group the one of `ratios` with the least sum of errors to the power of `exponent` is taken,
    computed in float32 with the scale as it is stored. With the second moments of the weight's inputs, E[x x^T], it is
    the ratio with the least mean square of what the group's errors add to the output. Codes of 2 and 3 bits take the
    room of 4. Deterministic.
    """
    out_features, in_features = weight.shape
    errors: GroupErrors = functools.partial(_power_errors, exponent=exponent)
    if moments is not None:
        errors = functools.partial(_output_errors, moments=_moments_of_groups(moments, group_size))
    quantize_row = functools.partial(
        _quantize_groups, bits=bits, symmetric=symmetric, group_errors=errors, ratios=ratios
    )
    grouped = groups_of(weight, group_size)
    codes, scales, zeros = jax.lax.map(quantize_row, grouped, batch_size=ROWS_AT_ONCE)
    codes = codes.reshape(out_features, -1)[:, :in_features]
    offsets = None if symmetric else zeros
    if bits == 8:
        return from_int8_codes(codes, scales, offsets, group_size=group_size)
    if symmetric:
        codes = codes + jnp.uint8(8 - 2 ** (bits - 1))
    return from_codes(codes, scales, offsets, group_size=group_size)


def groups_of(weight: Float[Array, "out in"], group_size: int) -> Float[Array, "out groups group_size"]:
    """The weight in float32 by groups; the last is filled up with its own last input, which changes no range."""
    out_features, in_features = weight.shape
    group_size = min(group_size, in_features)
    padded = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -in_features % group_size)), mode="edge")
    return padded.reshape(out_features, -1, group_size)


def _moments_of_groups(moments: Float[Array, "in in"], group_size: int) -> Float[Array, "groups group_size group_size"]:
    """The blocks on the diagonal; inputs that fill up the last group are always 0."""
    in_features = moments.shape[0]
    group_size = min(group_size, in_features)
    missing = -in_features % group_size
    padded = jnp.pad(moments.astype(jnp.float32), ((0, missing), (0, missing)))
    groups = padded.shape[0] // group_size
    blocks = padded.reshape(groups, group_size, groups, group_size)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=0, axis2=2), -1, 0)


def _power_errors(error: Float[Array, "groups group_size"], *, exponent: float) -> Float[Array, " groups"]:
    return jnp.sum(jnp.abs(error) ** exponent, axis=1)


def _output_errors(
    error: Float[Array, "groups group_size"], moments: Float[Array, "groups group_size group_size"]
) -> Float[Array, " groups"]:
    return jnp.einsum("gi,gij,gj->g", error, moments, error, precision=jax.lax.Precision.HIGHEST)


def _quantize_groups(
    weight: Float[Array, "groups group_size"],
    *,
    bits: int,
    symmetric: bool,
    group_errors: GroupErrors,
    ratios: tuple[float, ...],
) -> tuple[UInt8[Array, "groups group_size"], Float[Array, " groups"], UInt8[Array, " groups"]]:
    """Codes, float16 scales and zeros of one row's groups."""
    largest = 2.0**bits - 1
    if symmetric:
        # Codes reach one further below zero than above; the range is set by the shorter side.
        high = jnp.max(jnp.abs(weight), axis=1)
        span, low = high * (largest / (2.0 ** (bits - 1) - 1)), -high
    else:
        low = jnp.minimum(jnp.min(weight, axis=1), 0.0)  # zero points are codes: zero has to be in the range
        span = jnp.maximum(jnp.max(weight, axis=1), 0.0) - low

    def quantized(ratio: Float[Array, "..."]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes, scales and zeros with this share of the range, one for all groups or one for each."""
        scale = (span * ratio / largest).astype(jnp.float16).astype(jnp.float32)
        scale = jnp.where(scale == 0.0, 1.0, scale)
        if symmetric:
            zero = jnp.full_like(scale, 2.0 ** (bits - 1))
        else:
            zero = jnp.clip(jnp.round(-low * ratio / scale), 0.0, largest)
        codes = jnp.clip(jnp.round(weight / scale[:, None]) + zero[:, None], 0.0, largest)
        return codes, scale, zero

    def error(ratio: Float[Array, ""]) -> Float[Array, " groups"]:
        codes, scale, zero = quantized(ratio)
        return group_errors(scale[:, None] * (codes - zero[:, None]) - weight)

    tried = jnp.asarray(ratios, jnp.float32)
    best = jnp.argmin(jax.lax.map(error, tried), axis=0)
    codes, scale, zero = quantized(tried[best])
    return codes.astype(jnp.uint8), scale.astype(jnp.float16), zero.astype(jnp.uint8)
