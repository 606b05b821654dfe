"""GPTQ: inputs are rounded one after the other, and those that follow make up for each one's error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022. Inputs of
the largest second moment come first ("act-order"), while there are most others left to make up for them. Groups are
those of neighbouring inputs all the same, their scales chosen beforehand, so that the product needs no permutation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxinfer.layers.weights import ScaledCodes
from jaxinfer.quantization.awq import clip_and_round
from jaxinfer.quantization.moments import better_rows
from jaxinfer.quantization.scaled import scale_outputs
from pallas_kernels.int4_matmul import Packed, from_codes, from_int8_codes

BLOCK = 128
"""Inputs rounded before their errors are passed on to all later ones, in one product."""

DAMPING = 0.01
"""Share of the mean second moment that is added to all of them: a matrix of few samples has no inverse."""


@functools.partial(jax.jit, static_argnames=("bits", "group_size", "symmetric", "damping"))
def compensated_rounding(
    weight: Float[Array, "out in"],
    moments: Float[Array, "in in"],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    damping: float = DAMPING,
) -> Packed:
    """Quantises a weight to codes of `bits` bits (2 to 4, 8) on the scales and zeros that `clip_and_round` chooses.

    Rows that come out worse than `clip_and_round`'s are taken from there. Deterministic.
    """
    weight = weight.astype(jnp.float32)
    start = clip_and_round(weight, moments, bits=bits, group_size=group_size, symmetric=symmetric)
    # A symmetric grid's codes of fewer bits lie around 8, the middle of those of 4 bits.
    middle = 2 ** (start.bits - 1)
    lowest = middle - 2 ** (bits - 1) if start.offsets is None else 0
    scales = start.scales.astype(jnp.float32)
    zeros = jnp.full_like(scales, middle) if start.offsets is None else start.offsets.astype(jnp.float32)
    codes = codes_in_order(weight, Grid(scales, zeros, group_size, lowest, lowest + 2**bits - 1), moments, damping)
    pack = from_int8_codes if bits == 8 else from_codes
    compensated = pack(codes, start.scales, start.offsets, group_size=group_size)
    return better_rows(compensated, start, weight, moments)


@functools.partial(jax.jit, static_argnames="damping")
def compensated_int8(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], *, damping: float = DAMPING
) -> ScaledCodes:
    """Quantises a weight to int8 on the scales of `scale_outputs`; rows that come out worse than its are taken from
    there. Deterministic."""
    weight = weight.astype(jnp.float32)
    start = scale_outputs(weight, dtype="int8")
    scales = start.scales[:, None]
    grid = Grid(scales, jnp.full_like(scales, 128.0), weight.shape[1], 1, 255)
    codes = codes_in_order(weight, grid, moments, damping).astype(jnp.int32) - 128
    return better_rows(ScaledCodes(codes.astype(jnp.int8), start.scales), start, weight, moments)


class Grid(NamedTuple):
    """The values that codes stand for: scale * (code - zero), codes from `lowest` to `highest`."""

    scales: Float[Array, "out groups"]
    zeros: Float[Array, "out groups"]
    group_size: int
    lowest: int
    highest: int


def error_propagation(
    moments: Float[Array, "in in"], order: Int32[Array, " in"], damping: float
) -> Float[Array, "in in"]:
    """The upper triangle U with U^T U = (M + damping * mean(diagonal))^-1, M the moments with inputs in `order`.

    M = R R^T with R upper is a Cholesky factorisation from the last input to the first, and U is R's inverse: so the
    inverse of M, which has twice M's loss of digits, is never formed. Inputs that are always 0 get a diagonal of 1.
    """
    size = moments.shape[0]
    diagonal = jnp.diagonal(moments)
    fill = damping * jnp.mean(diagonal) + (diagonal == 0.0).astype(jnp.float32)
    ordered = (moments + jnp.diag(fill))[order][:, order]
    lower = jnp.linalg.cholesky(ordered[::-1, ::-1], symmetrize_input=False)
    upper = lower[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(size, dtype=jnp.float32), lower=False)


def codes_in_order(
    weight: Float[Array, "out in"], grid: Grid, moments: Float[Array, "in in"], damping: float
) -> UInt8[Array, "out in"]:
    """Codes on a grid, inputs rounded in the order of their second moments, the largest first."""
    out_features, in_features = weight.shape
    order = jnp.argsort(-jnp.diagonal(moments), stable=True).astype(jnp.int32)
    propagation = error_propagation(moments, order, damping)
    groups = order // grid.group_size
    block = min(BLOCK, in_features)
    missing = -in_features % block
    # Inputs that fill up the last block come last, are 0 and pass nothing on.
    remaining = jnp.pad(weight[:, order], ((0, 0), (0, missing)))
    groups = jnp.pad(groups, (0, missing))
    propagation = jnp.pad(propagation, ((0, missing), (0, missing)))
    propagation = propagation + jnp.diag((jnp.arange(in_features + missing) >= in_features).astype(jnp.float32))
    scales, zeros = grid.scales, grid.zeros

    def one_block(remaining: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = jax.lax.dynamic_slice_in_dim(remaining, first, block, axis=1)
        triangle = jax.lax.dynamic_slice(propagation, (first, first), (block, block))
        own_groups = jax.lax.dynamic_slice_in_dim(groups, first, block)

        def one_input(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            own, codes, errors = state
            column = jax.lax.dynamic_index_in_dim(own, index, axis=1, keepdims=False)
            scale, zero = scales[:, own_groups[index]], zeros[:, own_groups[index]]
            code = jnp.clip(jnp.round(column / scale + zero), grid.lowest, grid.highest)
            error = (column - scale * (code - zero)) / triangle[index, index]
            own = own - error[:, None] * triangle[index][None, :]  # rounded ones change too, and are not read again
            codes = jax.lax.dynamic_update_index_in_dim(codes, code.astype(jnp.uint8), index, axis=1)
            errors = jax.lax.dynamic_update_index_in_dim(errors, error, index, axis=1)
            return own, codes, errors

        empty = jnp.zeros((out_features, block), jnp.uint8), jnp.zeros((out_features, block), jnp.float32)
        _, codes, errors = jax.lax.fori_loop(0, block, one_input, (own, *empty))
        rows = jax.lax.dynamic_slice_in_dim(propagation, first, block, axis=0)
        remaining = remaining - jnp.matmul(errors, rows, precision=jax.lax.Precision.HIGHEST)
        return remaining, codes

    starts = jnp.arange(0, in_features + missing, block, dtype=jnp.int32)
    _, codes = jax.lax.scan(one_block, remaining, starts)
    codes = jnp.moveaxis(codes, 0, 1).reshape(out_features, -1)[:, :in_features]
    return codes[:, jnp.argsort(order)]
