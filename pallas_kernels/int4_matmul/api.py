"""The matrix product with packed weights of 4 or 8 bits: validates, picks a backend, says why."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import (
    mosaic,
    reference,
    triton_matmul,
    tuning,
    wide,
    wide_dequantize,
    wide_norm,
    wide_tuning,
)
from pallas_kernels.int4_matmul.packing import STRIP, PackedInt4, to_mosaic, to_triton
from pallas_kernels.int4_matmul.packing_int8 import Packed, PackedInt8, int8_to_mosaic, int8_to_triton
from pallas_kernels.int4_matmul.plan import PART, Fusion, Plan

Backend = Literal["mosaic", "triton", "reference"]
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
REPACK: dict[tuple[type[Packed], str], Callable[[Any], Any]] = {
    (PackedInt4, "mosaic"): to_mosaic,
    (PackedInt4, "triton"): to_triton,
    (PackedInt8, "mosaic"): int8_to_mosaic,
    (PackedInt8, "triton"): int8_to_triton,
}
_as_program = functools.cache(jax.jit)
"""On a device, repacking is one program a shape: its forty steps would be compiled for every shape one by one."""


@overload
def int4_matmul(
    x: jax.Array,
    w: Packed,
    *,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: Literal[False] = False,
) -> jax.Array: ...
@overload
def int4_matmul(
    x: jax.Array,
    w: Packed,
    *,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: Literal[True],
) -> list[dispatch.Choice]: ...
def int4_matmul(
    x: Float[Array, "*rows in_features"],
    w: Packed,
    *,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: bool = False,
) -> Float[Array, "*rows out_features"] | list[dispatch.Choice]:
    """x times the transposed weight, the weight staying packed in memory where a kernel can read it so.

    Args:
      x: activations, any number of leading dimensions.
      w: a weight [out_features, in_features] of 4 bits, or of 8 (`PackedInt8`). Each kernel reads its own layout (see
        `to_kernel_layout`), the reference any.
      out_dtype: by default x's dtype. Sums are float32 in any case.
      backend: forces one; else the environment variable JAXINFER_KERNELS, else the first that supports the call.
        "mosaic" is Hopper's: a fused kernel for few rows (bfloat16 x of 3 to 16 rows may be multiplied lifted by 2^48:
        2^79 and more overflows, and below 2^-41 bits are lost), another for many, which rounds the weights to bfloat16,
        and for thousands, where that one was not measured faster, cuBLAS after a kernel that unpacks the weight.
        "triton" takes any number of rows on NVIDIA cards from Ampere on, where jax-triton is installed. "reference"
        dequantises the weight to x's dtype and multiplies through XLA: the CPU's path.
      explain: return the list of `Choice` and compute nothing.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a call that the forced backend does not take.
    """
    out_features, in_features = w.shape
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {x.shape}; a weight of {in_features} in_features needs [..., {in_features}]")
    rows = math.prod(x.shape[:-1])
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.dtype not in FLOATS or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} and results {dtype}; x needs bfloat16, float16 or float32, results floats")
    refusals = refusals_of(rows, x.dtype, dtype, w)
    choices = dispatch.choose("int4_matmul", refusals, backend)
    if explain:
        return choices
    chosen = next(choice.backend for choice in choices if choice.taken)
    product = {"mosaic": _mosaic, "triton": triton_matmul.int4_matmul, "reference": reference.int4_matmul}[chosen]
    return product(x.reshape(rows, in_features), w, out_dtype=dtype).reshape(*x.shape[:-1], out_features)


def int4_matmul_fused(
    x: Float[Array, "*rows in_features"],
    w: Packed,
    *,
    norm: Float32[Array, " in_features"] | None = None,
    norm_eps: float = 1e-6,
    gated: bool = False,
    residual: Float[Array, "*rows out_features"] | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*rows results"]:
    """`int4_matmul` with what surrounds it in a decoder layer, in one kernel where `fused_refusal` is None.

    Args:
      x, w, out_dtype, backend: as in `int4_matmul`.
      norm: weights of an RMS norm that x goes through first, with `norm_eps`.
      gated: the first half of the weight's outputs is a gate, and the result silu(gate) * second half.
      residual: is added to the result.

    Returns:
      [*rows, out_features], or half as many where `gated`. In the kernel everything between x and the
      result is float32, but x times the norm's weights, which is rounded to bfloat16.

    Raises:
      ValueError: as `int4_matmul`; and a norm, a residual or a gate that does not fit.
    """
    out_features, in_features = w.shape
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {x.shape}; a weight of {in_features} in_features needs [..., {in_features}]")
    if norm is not None and norm.shape != (in_features,):
        raise ValueError(f"norm has shape {norm.shape}; x of {in_features} features needs ({in_features},)")
    if gated and out_features % 2:
        raise ValueError(f"a gate and its other half are an even number of out_features, not {out_features}")
    results = (*x.shape[:-1], out_features // 2 if gated else out_features)
    if residual is not None and residual.shape != results:
        raise ValueError(f"residual has shape {residual.shape}; the result has {results}")
    rows = math.prod(x.shape[:-1])
    fusion = Fusion(None if norm is None else norm_eps, gated, residual is not None)
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if fused_refusal(x, w, norm_eps=fusion.norm_eps, gated=gated, residual=fusion.residual, backend=backend) is None:
        flat = None if residual is None else residual.reshape(rows, -1).astype(dtype)  # as the kernel reads it
        arrays = dispatch.in_memory((x.reshape(rows, in_features), norm, flat))
        plan = _fused_plan(rows, w, fusion)
        if plan is None:
            schedule = wide_tuning.wide_schedule(rows, w, jax.devices()[0].device_kind)
            options = {"schedule": schedule, "out_dtype": dtype, "norm_eps": norm_eps}
            out = wide.int4_matmul(*arrays[:1], w, *arrays[1:2], **options)
        else:
            options = {"schedule": plan.schedule, "out_dtype": dtype, "fusion": fusion}
            out = mosaic.int4_matmul(arrays[0], w, *arrays[1:], **options)
        return out.reshape(*x.shape[:-1], out.shape[-1])
    x32 = x.astype(jnp.float32)
    if norm is not None:
        root = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.float32(norm_eps))
        x32 = x32 * root * jnp.expand_dims(norm, tuple(range(x.ndim - 1)))
    # Where nothing follows, a float32 result would be written and read once more, to be rounded.
    of_product = jnp.float32 if gated or residual is not None else dtype
    out = int4_matmul(x32.astype(x.dtype), w, out_dtype=of_product, backend=backend)
    if gated:
        gate, other = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * other
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)


def fused_refusal(
    x: Float[Array, "*rows in_features"],
    w: Packed,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: bool = False,
    backend: Backend | None = None,
) -> str | None:
    """Why no kernel does such a product with its surroundings in one; None if one does."""
    rows = math.prod(x.shape[:-1])
    choices = dispatch.choose("int4_matmul", refusals_of(rows, x.dtype, jnp.dtype(x.dtype), w), backend)
    for choice in choices:
        if choice.taken and choice.backend != "mosaic":
            return f"the {choice.backend} backend has no fused product"
    if gated and w.shape[0] % (2 * STRIP):
        return f"gate and other half need a multiple of {STRIP} outputs each, not {w.shape[0]} together"
    plan = _fused_plan(rows, w, Fusion(norm_eps, gated, residual))
    if plan is None:
        return _wide_refusal(rows, w, Fusion(norm_eps, gated, residual))
    return f"{w.shape[1]} inputs are more than a block has" if plan.partials > 1 else None


def _wide_refusal(rows: int, w: Packed, fusion: Fusion) -> str | None:
    """The same for many rows, where the kernel that brings x into order can normalise it."""
    if fusion.gated or fusion.residual or fusion.norm_eps is None:
        return f"with a gate or a residual it is for up to {tuning.FUSED_MAX_ROWS} rows"
    if not wide_tuning.WIDE_ROWS <= rows < wide_tuning.DEQUANTIZED_ROWS:
        most = f"{wide_tuning.WIDE_ROWS} to {wide_tuning.DEQUANTIZED_ROWS - 1}"
        return f"with a norm it is for up to {tuning.FUSED_MAX_ROWS} rows, and for {most}"
    most = wide_norm.MOST_INPUTS
    return f"a norm is for up to {most} inputs, not {w.shape[1]}" if w.shape[1] > most else None


def _fused_plan(rows: int, w: Packed, fusion: Fusion) -> Plan | None:
    """Of the kernel for few rows, where it takes in the surroundings of so many."""
    device_kind = jax.devices()[0].device_kind
    if rows > tuning.FUSED_MAX_ROWS:
        return tuning.once_for(rows, w, device_kind, fusion)
    return tuning.plan_for(rows, w, device_kind, fusion)


@overload
def to_kernel_layout(weight: PackedInt4) -> PackedInt4: ...
@overload
def to_kernel_layout(weight: PackedInt8) -> PackedInt8: ...
def to_kernel_layout(weight: Packed) -> Packed:
    """Repacks a canonical weight for the kernel that will read it in this process; for the reference it stays as it is.

    Raises:
      ValueError: the environment variable JAXINFER_KERNELS names a kernel that cannot read this weight here.
    """
    refusals: dict[str, str | None] = {}
    for layout in ("mosaic", "triton"):
        repacked = dataclasses.replace(weight, layout=layout)
        refusals[layout] = refusals_of(1, jnp.bfloat16, jnp.bfloat16, repacked)[layout]
    choices = dispatch.choose("int4_matmul", refusals | {"reference": None})
    chosen = next(choice.backend for choice in choices if choice.taken)
    if chosen == "reference":
        return weight
    repack = REPACK[type(weight), chosen]
    return repack(weight) if isinstance(weight.codes, np.ndarray) else _as_program(repack)(weight)


def refusals_of(rows: int, dtype: DTypeLike, out_dtype: DTypeLike, w: Packed) -> dict[str, str | None]:
    """Each backend's reason not to take a call, in order of preference."""
    return {
        "mosaic": mosaic_refusal(rows, dtype, out_dtype, w),
        "triton": triton_matmul.refusal(rows, dtype, out_dtype, w),
        "reference": None,
    }


def mosaic_refusal(rows: int, dtype: DTypeLike, out_dtype: DTypeLike, w: Packed) -> str | None:
    """Why the Mosaic kernel does not take this call; None if it does."""
    if dtype != jnp.bfloat16:
        return f"it needs bfloat16 activations, not {jnp.dtype(dtype)}"
    if rows < 1:
        return "it takes one row or more, not none"
    if w.layout != "mosaic":
        return f"it reads weights of the mosaic layout, not {w.layout}; repack with to_kernel_layout once, at load"
    if w.num_groups > 1 and w.group_size not in (16, 32, 64) and w.group_size % PART:
        return f"it takes groups of 16, 32, 64 or a multiple of {PART}, or one group, not {w.group_size}"
    if w.shape[1] % 8:
        return f"it needs in_features divisible by 8, not {w.shape[1]}"
    for name, kind in (("scales", w.scales.dtype), ("results", jnp.dtype(out_dtype))):
        if kind not in FLOATS:
            return f"it has {name} of bfloat16, float16 or float32, not {kind}"
    if w.kind == "minimum" and w.offsets.dtype not in FLOATS:
        return f"it has minima of bfloat16, float16 or float32, not {w.offsets.dtype}"
    return dispatch.hopper_refusal()


def _mosaic(x: jax.Array, w: Packed, *, out_dtype: jnp.dtype) -> jax.Array:
    x = dispatch.in_memory(x)
    rows, device_kind = x.shape[0], jax.devices()[0].device_kind
    small = tuning.once_for(rows, w, device_kind)
    if small is not None or rows < wide_tuning.WIDE_ROWS:
        schedule = (small or tuning.plan_for(rows, w, device_kind)).schedule
        return mosaic.int4_matmul(x, w, schedule=schedule, out_dtype=out_dtype)
    if rows < wide_tuning.DEQUANTIZED_ROWS or wide_tuning.natural_taken(rows, w, device_kind):
        schedule = wide_tuning.wide_schedule(rows, w, device_kind, natural=True)
        return wide.int4_matmul(x, w, schedule=schedule, out_dtype=out_dtype)
    return wide_dequantize.int4_matmul(x, w, out_dtype=out_dtype)
