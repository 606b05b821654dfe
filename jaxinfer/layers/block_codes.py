"""Products of 8-bit floats that have a scale for each block, as XLA computes them.

For one row on a GPU a reduction over the weight's rows, which reads a byte a weight. For up to `FEW_ROWS` the codes go
into a product for each column of blocks, which bfloat16 holds exactly, and the float32 sums are scaled and added; XLA
converts the codes on their way into it. For more, and where blocks do not divide the weight, the weight is decoded into
a temporary of x's dtype, one weight at a time, for the GEMM that XLA has for it: XLA's GEMMs do not take the scales in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxinfer.layers.weights import BlockCodes

FEW_ROWS = 64
"""Sums of all columns of 128 inputs, written and read, are rows / 16 bytes a weight; decoding to 16 bits costs 4."""


def decoded(weight: BlockCodes, dtype: jnp.dtype | type) -> Float[Array, "out in"]:
    """The values code * scale, computed in float32 and rounded once to `dtype`."""
    return (jnp.asarray(weight.codes).astype(jnp.float32) * _spread(weight)).astype(dtype)


def row_product(x: Float[Array, " in"], weight: BlockCodes) -> Float32[Array, " out"]:
    """W x as a reduction over the weight's rows."""
    return jnp.sum(decoded(weight, jnp.float32) * x.astype(jnp.float32)[None, :], axis=1)


def divides(weight: BlockCodes) -> bool:
    """Whether all blocks are whole ones."""
    return all(size % step == 0 for size, step in zip(weight.shape, weight.block, strict=True))


def product_by_columns(x: Float[Array, "*batch in"], weight: BlockCodes) -> Float32[Array, "*batch out"]:
    """x W^T from the sums of each column of blocks, which must be whole."""
    out_features, in_features = weight.shape
    rows, columns = weight.block
    scales = jnp.asarray(weight.scales)
    codes = jnp.asarray(weight.codes).astype(x.dtype).reshape(out_features, -1, columns)
    inputs = x.reshape(-1, in_features // columns, columns)
    sums = jax.lax.dot_general(
        inputs, codes, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32
    )  # [columns of blocks, x's rows, out]
    scaled = sums.reshape(*sums.shape[:2], -1, rows) * scales.T[:, None, :, None]
    return jnp.sum(scaled, axis=0).reshape(*x.shape[:-1], out_features)


def _spread(weight: BlockCodes) -> Float32[Array, "out in"]:
    """The scale of each weight; XLA reads it where it is used."""
    out_features, in_features = weight.shape
    scales, (rows, columns) = jnp.asarray(weight.scales), weight.block
    blocks = jnp.broadcast_to(scales[:, None, :, None], (scales.shape[0], rows, scales.shape[1], columns))
    return blocks.reshape(scales.shape[0] * rows, -1)[:out_features, :in_features]
