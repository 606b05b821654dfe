"""Products of weights of a byte a code, as XLA computes them.

With a scale for each output the codes, which bfloat16 holds exactly, go into one product, and its float32 sums are
scaled; XLA converts the codes on their way into it. With a scale for each block (8-bit floats) there is a product for
each column of blocks, for up to `FEW_ROWS` rows of x, whose sums are scaled and added. For more, and where blocks do
not divide the weight, the weight is decoded into a temporary of x's dtype, one weight at a time, for the GEMM that XLA
has for it: XLA's GEMMs do not take the scales in.

One row of x on a GPU is a reduction over the weight's rows in either case, which reads a byte a weight; for a small
model's head with a scale for each output it is the product of the row taken twice.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

FEW_ROWS = 64
"""Sums of all columns of 128 inputs, written and read, are rows / 16 bytes a weight; decoding to 16 bits costs 4."""

SHORT_ROW, HEAD_OUTPUTS = 1024, 65536
"""Inputs up to which, and outputs from which, XLA's product of a row taken twice is faster than its reduction over the
weight's rows. A layer's products are smaller, and reductions take in what surrounds them.

On an H200, 151936 x 1024 of int8: 41.5 microseconds to 46.1; 14336 x 4096: 18.8 to 18.2.
"""

type Block = tuple[int, int]
"""Outputs and inputs of a block."""


def byte_matmul(
    x: Float[Array, "rows in"],
    codes: Num[Array, "out in"],
    scales: Float32[Array, "..."],
    *,
    block: Block | None,
    out_dtype: DTypeLike,
) -> Float[Array, "rows out"]:
    """x times the transposed weight, sums in float32; `scales` are [out], or those of `block`s."""
    one_row = x.shape[0] == 1 and jax.default_backend() == "gpu"
    if block is None:
        if one_row and not (codes.shape[1] <= SHORT_ROW and codes.shape[0] >= HEAD_OUTPUTS):
            sums = _row_sums(x[0], codes.astype(jnp.float32))[None, :]
        else:
            rows = jnp.broadcast_to(x, (2, x.shape[1])) if one_row else x
            sums = _product(rows, codes.astype(x.dtype))[: x.shape[0]]
        return (sums * scales[None, :]).astype(out_dtype)
    if one_row:
        return _row_sums(x[0], decode_blocks(codes, scales, block, jnp.float32)).astype(out_dtype)[None, :]
    if x.shape[0] <= FEW_ROWS and divides(codes.shape, block):
        return _product_by_columns(x, codes, scales, block).astype(out_dtype)
    return _product(x, decode_blocks(codes, scales, block, x.dtype), out_dtype)


def decode_blocks(
    codes: Float[Array, "out in"], scales: Float32[Array, "_ _"], block: Block, dtype: DTypeLike
) -> Float[Array, "out in"]:
    """The values code * scale, computed in float32 and rounded once to `dtype`."""
    (out_features, in_features), (rows, columns) = codes.shape, block
    # The scale of each weight; XLA reads it where it is used.
    spread = jnp.broadcast_to(scales[:, None, :, None], (scales.shape[0], rows, scales.shape[1], columns))
    spread = spread.reshape(scales.shape[0] * rows, -1)[:out_features, :in_features]
    return (codes.astype(jnp.float32) * spread).astype(dtype)


def divides(shape: tuple[int, ...], block: Block) -> bool:
    """Whether all blocks of a weight are whole ones."""
    return all(size % step == 0 for size, step in zip(shape, block, strict=True))


def _product(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "rows out"]:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.dtype(out_dtype))


def _row_sums(x: Float[Array, " in"], weight: Float32[Array, "out in"]) -> Float32[Array, " out"]:
    """W x as a reduction over the weight's rows."""
    return jnp.sum(weight * x.astype(jnp.float32)[None, :], axis=1)


def _product_by_columns(
    x: Float[Array, "rows in"], codes: Float[Array, "out in"], scales: Float32[Array, "_ _"], block: Block
) -> Float32[Array, "rows out"]:
    """x W^T from the sums of each column of blocks, which must be whole."""
    (out_features, in_features), (rows, columns) = codes.shape, block
    parts = codes.astype(x.dtype).reshape(out_features, -1, columns)
    inputs = x.reshape(-1, in_features // columns, columns)
    sums = jax.lax.dot_general(
        inputs, parts, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32
    )  # [columns of blocks, x's rows, out]
    scaled = sums.reshape(*sums.shape[:2], -1, rows) * scales.T[:, None, :, None]
    return jnp.sum(scaled, axis=0).reshape(-1, out_features)
