"""The matrix product with weights of a byte a code: validates, picks a backend, says why."""

import dataclasses
import math
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels import dispatch
from pallas_kernels.byte_matmul import reference
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.packing_rows import ByteRows
from pallas_kernels.int4_matmul.plan import PART, Schedule
from pallas_kernels.int4_matmul.rows import KINDS

Backend = Literal["mosaic", "reference"]
MOST_ROWS = 64
"""Of x in the kernel's registers."""
IN_BLOCKS, INT8 = range(2, MOST_ROWS + 1), range(12, 33)
"""With how many rows it is taken unless another is asked for: codes in blocks, and int8 with a scale for each output.

On an H200, K4096 N14336, e4m3 in blocks, microseconds of the kernel (XLA): 1 row 20.2 (19.2), 2 rows 20.4 (24.3), 8
rows 20.9 (31.7), 16 rows 23.3 (39.4), 32 rows 25.9 (58.4), 64 rows 45.2 (95.0); int8: 1 row 20.9 (18.2), 2 rows 21.0
(18.8), 8 rows 20.6 (19.2), 12 rows 22.6 (24.9), 16 rows 22.8 (25.6), 24 rows 23.9 (29.8), 32 rows 27.2 (30.4), 64 rows
43.3 (38.4); e4m3 with a scale for each output: 8 rows 20.3 (18.9), 16 rows 22.2 (21.3), so never.
"""
LONG_ROW = 4096
"""Inputs from which int8 is taken: of 1024, a draft's head, the kernel was slower for one row and for two."""
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
CODES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@overload
def byte_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    block: reference.Block | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: Literal[False] = False,
) -> jax.Array: ...
@overload
def byte_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    block: reference.Block | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: Literal[True],
) -> list[dispatch.Choice]: ...
def byte_matmul(
    x: Float[Array, "*rows in_features"],
    codes: Num[Array, "_ _"],
    scales: Float32[Array, "..."],
    *,
    block: reference.Block | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    explain: bool = False,
) -> Float[Array, "*rows out_features"] | list[dispatch.Choice]:
    """x times the transposed weight, whose value at [n, k] is codes[n, k] * scales[n].

    Where there are blocks it is codes[n, k] * scales[n // block[0], k // block[1]].

    Args:
      x: activations, any number of leading dimensions.
      codes: [out_features, in_features] of int8, float8_e4m3fn or float8_e5m2, as files have them: no kernel needs them
        in another order.
      scales: [out_features], or [ceil(out_features / block[0]), ceil(in_features / block[1])].
      block: outputs and inputs that share a scale, such as (128, 128).
      out_dtype: by default x's dtype. Sums are float32 in any case.
      backend: forces one; else the environment variable JAXINFER_KERNELS may name one, else the first that supports the
        call. "mosaic" is Hopper's, for few rows: it reads a byte a weight. "reference" is XLA's, which for one row
        reads no more; with blocks it also writes and reads sums of each column of them, and for many rows decodes the
        weight into a temporary.
      explain: return the list of `Choice` and compute nothing.

    Raises:
      ValueError: shapes that do not fit, or a call that the forced backend does not take.
    """
    if codes.ndim != 2 or codes.dtype not in CODES:
        wanted = ", ".join(str(jnp.dtype(kind)) for kind in CODES)
        raise ValueError(
            f"codes are {codes.dtype}{list(codes.shape)}; expected [out_features, in_features] of {wanted}"
        )
    out_features, in_features = codes.shape
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {x.shape}; a weight of {in_features} in_features needs [..., {in_features}]")
    if not jnp.issubdtype(x.dtype, jnp.floating) or scales.dtype != jnp.float32:
        raise ValueError(f"x is {x.dtype} and scales are {scales.dtype}; expected floating activations, float32 scales")
    if block is not None and not (len(block) == 2 and all(isinstance(size, int) and size >= 1 for size in block)):
        raise ValueError(f"block={block}; expected outputs and inputs that share a scale, such as (128, 128)")
    steps = (1, in_features) if block is None else block
    expected = tuple(-(-size // step) for size, step in zip(codes.shape, steps, strict=True))
    wanted = expected[:1] if block is None else expected
    if scales.shape != wanted:
        kind = "with a scale an output" if block is None else f"in blocks of {block}"
        raise ValueError(f"scales have shape {scales.shape}; {codes.shape} {kind} need {wanted}")
    rows = math.prod(x.shape[:-1])
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype is {dtype}; it needs floats")
    refusals = {"mosaic": mosaic_refusal(rows, x.dtype, dtype, codes, block), "reference": None}
    if backend is None and not _faster(rows, codes, block):
        refusals["mosaic"] = refusals["mosaic"] or f"it is not known to be faster than XLA with {rows} rows"
    choices = dispatch.choose("byte_matmul", refusals, backend, or_last=True)
    if explain:
        return choices
    if not rows:
        return jnp.zeros((*x.shape[:-1], out_features), dtype)
    flat = x.reshape(rows, in_features)
    if choices[0].taken:
        weight = ByteRows(codes, scales.reshape(expected), None, (out_features, in_features), steps[1])
        schedule = schedule_for(rows, weight, jax.devices()[0].device_kind)
        out = mosaic.int4_matmul(dispatch.in_memory(flat), weight, schedule=schedule, out_dtype=dtype)
    else:
        out = reference.byte_matmul(flat, codes, scales, block=block, out_dtype=dtype)
    return out.reshape(*x.shape[:-1], out_features)


def _faster(rows: int, codes: jax.Array, block: reference.Block | None) -> bool:
    """Whether the kernel has been measured to be faster than XLA."""
    if block is not None:
        return rows in IN_BLOCKS
    return codes.dtype == jnp.int8 and codes.shape[1] >= LONG_ROW and rows in INT8


def schedule_for(rows: int, weight: ByteRows, device_kind: str) -> Schedule:
    """That of the few-row kernel for 8-bit codes in groups, multiplied in float16 (`rows.py`)."""
    return dataclasses.replace(tuning.plan_for(rows, weight, device_kind).schedule, scaled=True)


def mosaic_refusal(
    rows: int, dtype: DTypeLike, out_dtype: DTypeLike, codes: jax.Array, block: reference.Block | None
) -> str | None:
    """Why the Mosaic kernel does not take this call; None if it does."""
    if dtype != jnp.bfloat16:
        return f"it needs bfloat16 activations, not {jnp.dtype(dtype)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, not {rows}"
    if str(codes.dtype) not in KINDS:
        return f"it has codes of {' or '.join(KINDS)}, not {codes.dtype}"
    if block is not None and (block[0] % STRIP or block[1] % PART):
        return f"it takes blocks of a multiple of {STRIP} outputs and of {PART} inputs, not {block[0]} x {block[1]}"
    outputs, inputs = (STRIP, COLUMNS) if block is None else block
    if not reference.divides(codes.shape, (outputs, inputs)):
        return f"pieces of {outputs} outputs and {inputs} inputs do not divide {codes.shape}"
    if jnp.dtype(out_dtype) not in FLOATS:
        return f"it has results of bfloat16, float16 or float32, not {jnp.dtype(out_dtype)}"
    if codes.size >= 1 << 32:
        return f"it counts bytes in 32 bits, and the weight has {codes.size}"
    return dispatch.hopper_refusal()
