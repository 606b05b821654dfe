"""The product with packed weights on Triton: for the cards before Hopper, and for what Mosaic's does not take.

Up to `FUSED_ROWS` rows go through a fused kernel: W x^T on tensor cores, weights as the large operand, unpacked in
registers between shared memory and the product; float32 rows, up to four, through one without tensor cores. More rows
go through a kernel that writes the weight out, and XLA's matrix product.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import triton_backend
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.triton_layout import STRIP, WORD
from pallas_kernels.int4_matmul.triton_tuning import Schedule, schedule_for

FUSED_ROWS = 256
"""Beyond this many rows, reading the weight once for every 64 or 128 costs more than writing it out once."""
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def refusal(rows: int, dtype: DTypeLike, out_dtype: DTypeLike, w: Packed) -> str | None:
    """Why the Triton kernels do not take this call; None if they do."""
    if w.layout != "triton":
        return f"it reads weights of the triton layout, not {w.layout}; repack with to_kernel_layout once, at load"
    reason = weight_refusal(w)
    if reason is not None:
        return reason
    if rows < 1:
        return "it takes at least one row"
    for name, kind in (("activations", jnp.dtype(dtype)), ("results", jnp.dtype(out_dtype))):
        if kind not in FLOATS:
            return f"it has {name} of bfloat16, float16 or float32, not {kind}"
    return triton_backend.refusal()


def weight_refusal(w: Packed) -> str | None:
    """Why no weight of this kind can have the triton layout; None if it can."""
    if w.num_groups > 1 and w.group_size != 16 and w.group_size % 32:
        return f"it takes groups of 16 or a multiple of 32, or one group, not {w.group_size}"
    if w.scales.dtype not in FLOATS or (w.kind == "minimum" and w.offsets.dtype not in FLOATS):
        return f"it has scales and minima of bfloat16, float16 or float32, not {w.scales.dtype}"
    return None


def int4_matmul(x: jax.Array, w: Packed, *, out_dtype: jnp.dtype, schedule: Schedule | None = None) -> jax.Array:
    """x [rows, in_features] times a weight of the triton layout -> [rows, out_features]."""
    rows, tiles = x.shape[0], w.codes.shape[1]
    if rows > FUSED_ROWS and schedule is None:
        return _dequantize_and_multiply(x, w, out_dtype=out_dtype)
    if schedule is None:
        schedule = schedule_for(
            rows,
            w.shape[0],
            tiles,
            exact=x.dtype == jnp.float32,
            book=w.book is not None,
            multiprocessors=triton_backend.multiprocessors(),
            capability=triton_backend.capability(),
            wide=_wide(x, w),
        )
    return _fused(x, w, schedule=schedule, out_dtype=out_dtype)


def _wide(x: jax.Array, w: Packed) -> bool:
    """Whether blocks of more than 64 rows were timed for such a product."""
    whole = segments(w.group_size, w.num_groups, w.codes.shape[3], WORD // w.bits) == 1
    return x.dtype == jnp.bfloat16 and w.bits == 4 and w.kind == "zero_point" and whole


# Jitted, so that a model's equal products share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("schedule", "out_dtype"))
def _fused(x: jax.Array, w: Packed, *, schedule: Schedule, out_dtype: jnp.dtype) -> jax.Array:
    from pallas_kernels.int4_matmul import triton_kernels

    rows, out_features = x.shape[0], w.shape[0]
    partial = jax.ShapeDtypeStruct(
        (schedule.splits, rows, out_features), jnp.float32 if schedule.splits > 1 else out_dtype
    )
    columns = -(-out_features // schedule.block_n)
    if schedule.kernel == "gemv":
        kernel, grid, constants = triton_kernels.int4_matmul_gemv, (columns, schedule.splits), {}
    else:
        kernel = triton_kernels.int4_matmul_dot
        here = w.kind == "zero_point" and schedule.rescaled and schedule.block_n < 32 * schedule.warps
        constants = {"BLOCK_M": schedule.block_m, "RESCALED": schedule.rescaled, "OFFSETS_HERE": here}
        grid = (-(-rows // schedule.block_m), columns, schedule.splits)
    (sums,) = triton_backend.call(
        kernel,
        x,
        *_arrays(w),
        out_type=[partial],
        grid=grid,
        num_warps=schedule.warps,
        num_stages=schedule.stages,
        M=rows,
        BLOCK_N=schedule.block_n,
        SPLITS=schedule.splits,
        STAGES=schedule.stages,
        **constants,
        **_constants(w),
    )
    # Written as a chain of additions, XLA makes it part of the next elementwise operation.
    return functools.reduce(operator.add, list(sums)).astype(out_dtype)


@functools.partial(jax.jit, static_argnames="out_dtype")
def _dequantize_and_multiply(x: jax.Array, w: Packed, *, out_dtype: jnp.dtype) -> jax.Array:
    values = dequantize(w, x.dtype)
    product = lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.astype(out_dtype)


def dequantize(w: Packed, dtype: DTypeLike) -> jax.Array:
    """The weight's values [out_features, in_features], computed in float32 and rounded once to `dtype`."""
    from pallas_kernels.int4_matmul import triton_kernels

    strips, tiles, _, _ = w.codes.shape
    (values,) = triton_backend.call(
        triton_kernels.int4_dequantize,
        *_arrays(w),
        out_type=[jax.ShapeDtypeStruct(w.shape, dtype)],
        grid=(tiles, strips),
        num_warps=4,
        num_stages=1,
        **_constants(w),
    )
    return values


def _arrays(w: Packed) -> tuple[Any, Any, Any, Any]:
    """Codes, scales, offsets and code book; what a weight lacks is represented by its scales, and never read."""
    book = w.scales if w.book is None else w.book.astype(jnp.float32)
    return w.codes, w.scales, w.scales if w.offsets is None else w.offsets, book


def _constants(w: Packed) -> dict[str, Any]:
    """The kernels' constants that the weight decides."""
    out_features, in_features = w.shape
    strips, tiles, _, width = w.codes.shape
    return {
        "K": in_features,
        "N": out_features,
        "PADDED": strips * STRIP,
        "TILES": tiles,
        "WIDTH": width,
        "GROUP": w.group_size,
        "GROUPS": w.num_groups,
        "SEGMENTS": segments(w.group_size, w.num_groups, width, WORD // w.bits),
        "BITS": w.bits,
        "KIND": w.kind,
        "ASM": True,
    }


def segments(group_size: int, num_groups: int, width: int, codes: int) -> int:
    """Parts of a tile of `codes` times `width` inputs, each of which shares a scale: 1, 2 or 4."""
    if num_groups == 1 or group_size % (codes * width) == 0:
        return 1
    return 2 if group_size % (codes // 2 * width) == 0 else 4
