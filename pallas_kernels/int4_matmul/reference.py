"""The matrix product with packed weights in plain jax.numpy: the definition, the test oracle and the CPU path."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.int4_matmul.packing import by_row, unpack_codes
from pallas_kernels.int4_matmul.packing_int8 import Packed, PackedInt8, unpack_int8_codes


def dequantize(weight: Packed, dtype: DTypeLike = jnp.float32) -> Float[Array, "out in"]:
    """The weight's values [out_features, in_features], computed in float32 and rounded once to `dtype`."""
    _, in_features = weight.shape

    def spread(values):
        values = by_row(jnp.asarray(values), weight)
        return jnp.repeat(values.astype(jnp.float32), weight.group_size, axis=1)[:, :in_features]

    codes = jnp.asarray(unpack_int8_codes(weight) if isinstance(weight, PackedInt8) else unpack_codes(weight))
    scales = spread(weight.scales)
    match weight.kind:
        case "symmetric":
            values = scales * (codes.astype(jnp.float32) - 2.0 ** (weight.bits - 1))
        case "zero_point":
            values = scales * (codes.astype(jnp.float32) - spread(weight.offsets))
        case "minimum":
            values = scales * codes.astype(jnp.float32) + spread(weight.offsets)
        case "code_book":
            values = scales * jnp.asarray(weight.book).astype(jnp.float32)[codes]
    return values.astype(dtype)


def int4_matmul(x: Float[Array, "rows in"], weight: Packed, *, out_dtype: DTypeLike) -> Float[Array, "rows out"]:
    """x times the transposed weight, with the weight dequantised to x's dtype and float32 sums."""
    values = dequantize(weight, x.dtype)
    product = lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.astype(out_dtype)
