"""The affine map that every projection is."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.residual import Pending, Residual, settled
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs, Weight
from pallas_kernels.byte_matmul import byte_matmul
from pallas_kernels.int4_matmul import (
    Ordered,
    Packed,
    fused_refusal,
    int4_matmul,
    int4_matmul_fused,
    int4_matmul_of_sum,
    int4_slices,
    product_order,
    slices_refusal,
)
from pallas_kernels.token_order import TokenOrder


def linear(
    x: Float[Array, "*batch in_features"],
    weight: Weight,
    bias: Float[Array, " out_features"] | None = None,
    *,
    out_dtype: jnp.dtype | type | None = None,
) -> Float[Array, "*batch out_features"]:
    """x W^T + b. Weights lie as checkpoints store them, [out_features, in_features]: loading never transposes.

    Sums are float32 whatever the operands (cuBLAS and Eigen both accumulate so); the result has `out_dtype`, by
    default x's dtype.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    if isinstance(weight, Packed):
        y = int4_matmul(x, weight, out_dtype=dtype)
    elif isinstance(weight, PermutedInputs):
        permuted = x.at[..., weight.permutation].get(mode="promise_in_bounds", unique_indices=True)
        y = int4_matmul(permuted, weight.weight, out_dtype=dtype)
    elif isinstance(weight, StackedOutputs):
        y = jnp.concatenate([linear(x, part, out_dtype=dtype) for part in weight.parts], axis=-1)
    elif isinstance(weight, ScaledCodes | BlockCodes):
        codes, scales = jnp.asarray(weight.codes), jnp.asarray(weight.scales)
        block = weight.block if isinstance(weight, BlockCodes) else None
        y = byte_matmul(x, codes, scales, block=block, out_dtype=dtype)
    elif _one_row(x):
        y = _row_sums(x.reshape(-1), weight).astype(dtype).reshape(*x.shape[:-1], weight.shape[0])
    else:
        y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    if bias is not None:
        y = y + jnp.expand_dims(bias, tuple(range(x.ndim - 1))).astype(y.dtype)
    return y


def norm_linear(
    x: Float[Array, "*batch in_features"],
    norm: Float[Array, " in_features"] | None,
    eps: float,
    weight: Weight,
    bias: Float[Array, " out_features"] | None = None,
) -> Float[Array, "*batch out_features"]:
    """`linear` of the RMS-normalised x, or of x itself where the family has no norm here.

    The INT4 kernels normalise x themselves for few rows, and for many while they bring it into their order. For one row
    of other weights on a GPU the scale, one number, is applied to the sums instead: the normalised row is never
    written, which is a kernel less where a kernel takes little more than its launch.
    """
    if norm is None:
        return linear(x, weight, bias)
    if isinstance(weight, Packed) and bias is None and fused_refusal(x, weight, norm_eps=eps) is None:
        return int4_matmul_fused(x, weight, norm=norm, norm_eps=eps)
    if not _one_row(x):
        return linear(rms_norm(x, norm, eps), weight, bias)
    x32 = x.astype(jnp.float32).reshape(-1)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32) + jnp.float32(eps))
    weighted = x32 * norm.astype(jnp.float32)
    if isinstance(weight, jax.Array):
        sums = _row_sums(weighted, weight)
    else:
        sums = linear(weighted.astype(x.dtype), weight, out_dtype=jnp.float32)
    y = (sums * scale).astype(x.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def norm_linear_of(
    x: Residual,
    norm: Float[Array, " in_features"] | None,
    eps: float,
    weight: Weight,
    bias: Float[Array, " out_features"] | None = None,
) -> tuple[Float[Array, "*batch out_features"], Float[Array, "*batch in_features"]]:
    """`norm_linear` of a residual stream, and the stream settled: the INT4 kernels for many rows do both at once."""
    if isinstance(x, Pending) and isinstance(weight, Packed) and norm is not None and bias is None:
        return int4_matmul_of_sum(x.x, x.partial, weight, norm=norm, norm_eps=eps)
    x = settled(x)
    return norm_linear(x, norm, eps, weight, bias), x


def add_order(like: Float[Array, "*batch in_features"], weight: Weight) -> TokenOrder | None:
    """The order in which `add_linear` takes an x like this best, from whoever can write it so; None: as it is."""
    if not isinstance(weight, Packed) or fused_refusal(like, weight, residual=True) is None:
        return None
    return product_order(math.prod(like.shape[:-1]), like.dtype, weight)


def add_linear(
    residual: Float[Array, "*batch out_features"], x: Float[Array, "*batch in_features"] | Ordered, weight: Weight
) -> Residual:
    """residual + `linear`(x, weight): the INT4 kernel for few rows adds it itself, those for many leave it pending.

    They take x in the order of `add_order` too.
    """
    if isinstance(x, Ordered):
        assert isinstance(weight, Packed)
        return Pending(residual, int4_slices(x, weight))
    if isinstance(weight, Packed):
        if fused_refusal(x, weight, residual=True) is None:
            return int4_matmul_fused(x, weight, residual=residual)
        if slices_refusal(x, weight) is None:
            return Pending(residual, int4_slices(x, weight))
    return residual + linear(x, weight)


def _one_row(x: jax.Array) -> bool:
    return x.size == x.shape[-1] and jax.default_backend() == "gpu"


def _row_sums(x: Float[Array, " in_features"], weight: Float[Array, "out in_features"]) -> Float[Array, " out"]:
    """W x as a reduction over the weight's rows, in float32.

    XLA's row reduction reads memory faster than the GEMMs it has for one row, and takes what follows, such as the
    residual, into the same kernel.
    """
    return jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32)[None, :], axis=1)
