"""The affine map that every projection is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "*batch in_features"],
    weight: Float[Array, "out_features in_features"],
    bias: Float[Array, " out_features"] | None = None,
    *,
    out_dtype: jnp.dtype | type | None = None,
) -> Float[Array, "*batch out_features"]:
    """x W^T + b. Weights lie as checkpoints store them, [out_features, in_features]: loading never transposes.

    Sums are float32 whatever the operands (cuBLAS and Eigen both accumulate so); the result has `out_dtype`, by
    default x's dtype.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    if bias is not None:
        y = y + jnp.expand_dims(bias, tuple(range(x.ndim - 1))).astype(y.dtype)
    return y
