"""Products of many rows whose slices are added where their sum is read: in the norm before the next product.

x + `sum_slices` is what a decoder layer's branch makes of x. XLA would add it in a kernel of its own; the kernel that
normalises the sum, and brings it into the next product's order, does so on its way.
"""

import math

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import wide, wide_tuning
from pallas_kernels.int4_matmul.api import Backend, fused_refusal, int4_matmul, int4_matmul_fused, refusals_of
from pallas_kernels.int4_matmul.mlp import gated_mlp_refusal, gated_slices, int4_gated_mlp
from pallas_kernels.int4_matmul.packing_int8 import Packed


def sum_slices(partial: Float[Array, "slices *rows features"], dtype: DTypeLike) -> Float[Array, "*rows features"]:
    """Their sum in a dtype: what `int4_matmul` returns."""
    return wide.added(partial, dtype)


def int4_slices(
    x: Float[Array, "*rows in_features"], w: Packed, *, backend: Backend | None = None
) -> Float[Array, "slices *rows out_features"]:
    """`int4_matmul` as the slices that a kernel left: float32, or one in x's dtype."""
    rows = math.prod(x.shape[:-1])
    if slices_refusal(x, w, backend=backend) is not None:
        return int4_matmul(x, w, backend=backend)[None]
    flat = dispatch.in_memory(x.reshape(rows, -1))
    schedule = wide_tuning.wide_schedule(rows, w, jax.devices()[0].device_kind)
    partial, _ = wide.product(flat, w, schedule=schedule, out_dtype=x.dtype)
    return partial.reshape(-1, *x.shape[:-1], partial.shape[-1])


def slices_refusal(x: Float[Array, "*rows in_features"], w: Packed, *, backend: Backend | None = None) -> str | None:
    """Why no kernel leaves slices; None if one does."""
    rows = math.prod(x.shape[:-1])
    choices = dispatch.choose("int4_matmul", refusals_of(rows, x.dtype, x.dtype, w), backend)
    chosen = next(choice.backend for choice in choices if choice.taken)
    if chosen != "mosaic":
        return f"the {chosen} backend leaves no slices"
    if not wide_tuning.WIDE_ROWS <= rows < wide_tuning.DEQUANTIZED_ROWS:
        return f"it is for {wide_tuning.WIDE_ROWS} to {wide_tuning.DEQUANTIZED_ROWS - 1} rows"
    return None


def int4_matmul_of_sum(
    x: Float[Array, "*rows in_features"],
    partial: Float[Array, "slices *rows in_features"],
    w: Packed,
    *,
    norm: Float32[Array, " in_features"],
    norm_eps: float = 1e-6,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*rows out_features"], Float[Array, "*rows in_features"]]:
    """`int4_matmul` of the RMS-normalised y = x + `sum_slices`(partial), in x's dtype; and y."""
    _check(partial, x)
    options = {"norm_eps": norm_eps, "backend": backend}
    refused = slices_refusal(x, w, backend=backend) or fused_refusal(x, w, **options)
    if refused is not None:
        y = x + wide.added(partial, x.dtype)
        return int4_matmul_fused(y, w, norm=norm, **options), y
    rows = math.prod(x.shape[:-1])
    arrays = dispatch.in_memory((x.reshape(rows, -1), norm, partial.reshape(len(partial), rows, -1)))
    schedule = wide_tuning.wide_schedule(rows, w, jax.devices()[0].device_kind)
    options = {"schedule": schedule, "out_dtype": x.dtype, "norm_eps": norm_eps}
    slices, y = wide.product(arrays[0], w, *arrays[1:], **options)
    return wide.added(slices, x.dtype).reshape(*x.shape[:-1], -1), y.reshape(x.shape)


def int4_gated_mlp_of_sum(
    x: Float[Array, "*rows in_features"],
    partial: Float[Array, "slices *rows in_features"] | None,
    gate_up: Packed,
    down: Packed,
    *,
    norm: Float32[Array, " in_features"] | None = None,
    norm_eps: float = 1e-6,
    backend: Backend | None = None,
) -> tuple[Float[Array, "left *rows out_features"], Float[Array, "*rows in_features"]]:
    """`int4_gated_mlp` of y, as the slices that a kernel left; and y, which is x, or x + `sum_slices`(partial)."""
    if partial is not None:
        _check(partial, x)
    if partial is not None and norm is None:
        x, partial = x + wide.added(partial, x.dtype), None
    if gated_mlp_refusal(x, gate_up, down, backend=backend) is not None:
        y = x if partial is None else x + wide.added(partial, x.dtype)
        return int4_gated_mlp(y, gate_up, down, norm=norm, norm_eps=norm_eps, backend=backend)[None], y
    return gated_slices(x, partial, gate_up, down, norm, norm_eps)


def _check(partial: jax.Array, x: jax.Array) -> None:
    if not len(partial) or partial.shape[1:] != x.shape:
        raise ValueError(f"partial has shape {partial.shape}; expected slices of x's: [slices, *{x.shape}]")
