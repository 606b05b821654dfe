"""Products whose slices are added where their sum is read: in the norm before the next product.

x + `sum_slices` is what a decoder layer's branch makes of x. XLA would add it in a kernel of its own. For many rows the
kernel that normalises the sum, and brings it into the next product's order, does so on its way; for few rows of a small
matrix the product's kernel itself.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import once_of_sum, tuning, wide, wide_tuning
from pallas_kernels.int4_matmul.api import Backend, fused_refusal, int4_matmul, int4_matmul_fused, refusals_of
from pallas_kernels.int4_matmul.mlp import gated_mlp_refusal, gated_slices, int4_gated_mlp
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Fusion, Plan
from pallas_kernels.int4_matmul.wide_plan import WidePlan
from pallas_kernels.token_order import STAGE, TokenOrder


def sum_slices(partial: Float[Array, "slices *rows features"], dtype: DTypeLike) -> Float[Array, "*rows features"]:
    """Their sum in a dtype: what `int4_matmul` returns."""
    return wide.added(partial, dtype)


@dataclasses.dataclass(frozen=True)
class Ordered:
    """x of `shape` [*rows, in_features], bfloat16, as whoever computed it wrote it in the order of a product.

    `image` is int32, see `product_order` and `token_order.ordered`. Where `wide_tuning.NATURAL` has x as it is, the
    products of rows and of an image differ in the last bits: other inputs are in a step of 16.
    """

    image: jax.Array
    shape: tuple[int, ...]


def product_order(rows: int, dtype: DTypeLike, w: Packed, *, backend: Backend | None = None) -> TokenOrder | None:
    """The order in which `int4_slices` takes so many rows if they are `Ordered`; None if it takes none."""
    if _slices_refusal(rows, dtype, w, backend) is not None or w.shape[1] % STAGE:
        return None
    return WidePlan.of(rows, w, wide_tuning.wide_schedule(rows, w, jax.devices()[0].device_kind)).token_order


def int4_slices(
    x: Float[Array, "*rows in_features"] | Ordered, w: Packed, *, backend: Backend | None = None
) -> Float[Array, "slices *rows out_features"]:
    """`int4_matmul` as the slices that a kernel left: float32, or one in x's dtype."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(x, Ordered) and slices_refusal(x, w, backend=backend) is not None:
        return int4_matmul(x, w, backend=backend)[None]
    natural = not isinstance(x, Ordered)
    schedule = wide_tuning.wide_schedule(rows, w, jax.devices()[0].device_kind, natural=natural)
    if isinstance(x, Ordered):
        options = {"rows": rows, "schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16)}
        partial = wide.product_of_image(x.image, w, **options)
    else:
        flat = dispatch.in_memory(x.reshape(rows, -1))
        partial, _ = wide.product(flat, w, schedule=schedule, out_dtype=x.dtype)
    return partial.reshape(-1, *x.shape[:-1], partial.shape[-1])


def slices_refusal(x: Float[Array, "*rows in_features"], w: Packed, *, backend: Backend | None = None) -> str | None:
    """Why no kernel leaves slices; None if one does."""
    return _slices_refusal(math.prod(x.shape[:-1]), x.dtype, w, backend)


def _slices_refusal(rows: int, dtype: DTypeLike, w: Packed, backend: Backend | None) -> str | None:
    choices = dispatch.choose("int4_matmul", refusals_of(rows, dtype, dtype, w), backend)
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
    few = _once_of_sum(x, w, norm_eps, backend)
    if few is not None:
        rows = math.prod(x.shape[:-1])
        sums = partial.reshape(len(partial), rows, -1).astype(jnp.float32)
        arrays = dispatch.in_memory((x.reshape(rows, -1), sums, norm))
        how = {"schedule": few.schedule, "out_dtype": x.dtype, "norm_eps": norm_eps}
        out, y = once_of_sum.int4_matmul_of_sum(*arrays[:2], w, arrays[2], **how)
        return out.reshape(*x.shape[:-1], -1), y.reshape(x.shape)
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


def _once_of_sum(x: jax.Array, w: Packed, norm_eps: float, backend: Backend | None) -> Plan | None:
    """The plan of the kernel for few rows that adds slices itself, if it takes the call."""
    rows = math.prod(x.shape[:-1])
    if fused_refusal(x, w, norm_eps=norm_eps, backend=backend) is not None or rows > once_of_sum.MOST_ROWS:
        return None
    plan = tuning.plan_for(rows, w, jax.devices()[0].device_kind, Fusion(norm_eps=norm_eps))
    return plan if once_of_sum.refusal(plan) is None else None


def int4_gated_mlp_of_sum(
    x: Float[Array, "*rows in_features"],
    partial: Float[Array, "slices *rows in_features"] | None,
    gate_up: Packed,
    down: Packed,
    *,
    norm: Float32[Array, " in_features"] | None = None,
    norm_eps: float = 1e-6,
    ahead: Sequence[jax.Array] = (),
    backend: Backend | None = None,
) -> tuple[Float[Array, "left *rows out_features"], Float[Array, "*rows in_features"]]:
    """`int4_gated_mlp` of y, as the slices that a kernel left; and y, which is x, or x + `sum_slices`(partial).

    `ahead`: weights that are read next. A kernel that leaves memory idle brings them into the L2 cache.
    """
    if partial is not None:
        _check(partial, x)
    if partial is not None and norm is None:
        x, partial = x + wide.added(partial, x.dtype), None
    if gated_mlp_refusal(x, gate_up, down, backend=backend) is not None:
        y = x if partial is None else x + wide.added(partial, x.dtype)
        return int4_gated_mlp(y, gate_up, down, norm=norm, norm_eps=norm_eps, backend=backend)[None], y
    return gated_slices(x, partial, gate_up, down, norm, norm_eps, ahead)


def _check(partial: jax.Array, x: jax.Array) -> None:
    if not len(partial) or partial.shape[1:] != x.shape:
        raise ValueError(f"partial has shape {partial.shape}; expected slices of x's: [slices, *{x.shape}]")
