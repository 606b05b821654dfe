"""RMS normalisation (https://arxiv.org/abs/1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch features"], weight: Float[Array, " features"], eps: float
) -> Float[Array, "*batch features"]:
    """Divides by the root of the mean square over the last axis and multiplies by `weight`; result in x's dtype.

    Computed in float32 throughout: in bfloat16 the mean of squares of a wide vector loses its low bits. A family that
    stores weight - 1 (Gemma) has the 1 added when its weights are loaded.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.float32(eps))
    broadcast_weight = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * scale * broadcast_weight).astype(x.dtype)
