"""A decoder's gated feed-forward block of packed weights on Hopper: three kernels for many rows, one for few."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import gated_once, gated_plan, tuning, wide, wide_tuning
from pallas_kernels.int4_matmul.api import Backend, int4_matmul, int4_matmul_fused, refusals_of
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Fusion
from pallas_kernels.int4_matmul.wide_norm import MOST_INPUTS
from pallas_kernels.token_order import STAGE

MOST_NUMBERS = 1 << 30
"""Of x, and of what is between the products: kernels count its bytes in 32 bits."""


def int4_gated_mlp(
    x: Float[Array, "*rows in_features"],
    gate_up: Packed,
    down: Packed,
    *,
    norm: Float32[Array, " in_features"] | None = None,
    norm_eps: float = 1e-6,
    backend: Backend | None = None,
) -> Float[Array, "*rows out_features"]:
    """(silu(x Wg^T) * (x Wu^T)) Wd^T in x's dtype: `gate_up` holds the rows of Wg, then those of Wu, `down` is Wd.

    x goes through an RMS norm first where there are weights of one. Where `gated_mlp_refusal` is None, what is between
    the products is rounded once, and never leaves the order in which the second kernel takes it; else these are calls
    of `int4_matmul_fused` and `int4_matmul`.
    """
    if gated_mlp_refusal(x, gate_up, down, backend=backend) is not None:
        hidden = int4_matmul_fused(x, gate_up, norm=norm, norm_eps=norm_eps, gated=True, backend=backend)
        return int4_matmul(hidden, down, backend=backend)
    partial, _ = gated_slices(x, None, gate_up, down, norm, norm_eps)
    return wide.added(partial, x.dtype)


def gated_slices(
    x: Float[Array, "*rows in_features"],
    before: Float[Array, "slices *rows in_features"] | None,
    gate_up: Packed,
    down: Packed,
    norm: Float32[Array, " in_features"] | None,
    norm_eps: float,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Float[Array, "left *rows out_features"], Float[Array, "*rows in_features"]]:
    """The kernels' `int4_gated_mlp` of y, as the slices that they leave; and y.

    y is x, or where there is `before` and a norm x and the sum of those slices. The kernel for few rows brings `ahead`,
    what kernels behind it read, into the L2 cache.
    """
    rows = math.prod(x.shape[:-1])
    before = None if before is None else before.reshape(len(before), rows, -1)
    flat, norm, before = dispatch.in_memory((x.reshape(rows, x.shape[-1]), norm, before))
    shape = gated_plan.shape_for(rows, gate_up, down)
    if shape is not None:
        before = None if before is None else before.astype(jnp.float32)  # as the kernel reads it
        options = {"clusters": shape[0], "cluster": shape[1], "norm_eps": norm_eps}
        slices, y = gated_once.gated_mlp(flat, before, gate_up, down, norm, ahead, **options)
        return slices.reshape(-1, *x.shape[:-1], slices.shape[-1]), y.reshape(x.shape)
    schedules = wide_tuning.gated_schedules(rows, gate_up, down, jax.devices()[0].device_kind)
    slices, y = wide.gated_mlp(flat, gate_up, down, norm, before, schedules=schedules, norm_eps=norm_eps)
    return slices.reshape(-1, *x.shape[:-1], slices.shape[-1]), y.reshape(x.shape)


def gated_mlp_refusal(
    x: Float[Array, "*rows in_features"], gate_up: Packed, down: Packed, *, backend: Backend | None = None
) -> str | None:
    """Why no kernels do a gated block as a whole; None if some do."""
    rows = math.prod(x.shape[:-1])
    refusal = gated_shapes_refusal(rows, gate_up, down)
    if refusal is not None:
        return refusal
    for weight in (gate_up, down):
        choices = dispatch.choose("int4_matmul", refusals_of(rows, x.dtype, x.dtype, weight), backend)
        chosen = next(choice.backend for choice in choices if choice.taken)
        if chosen != "mosaic":
            return f"the {chosen} backend has no gated block"
    return None


def gated_shapes_refusal(rows: int, gate_up: Packed, down: Packed) -> str | None:
    """What of `gated_mlp_refusal` depends on shapes alone, whatever the device."""
    inputs, results = gate_up.shape[1], gate_up.shape[0] // 2
    if gated_plan.shape_for(rows, gate_up, down) is not None:
        return None
    if gate_up.shape[0] != 2 * down.shape[1]:
        return f"gate and up have {gate_up.shape[0]} outputs, not twice the {down.shape[1]} inputs of down"
    if results % STAGE:
        return f"it needs a multiple of {STAGE} hidden features, not {results}"
    if inputs > MOST_INPUTS:
        return f"it takes up to {MOST_INPUTS} inputs, not {inputs}"
    if rows < wide_tuning.GATED_ROWS:
        return f"it is for {wide_tuning.GATED_ROWS} rows and more"
    if tuning.once_for(rows, gate_up, fusion=Fusion(gated=True)) and tuning.once_for(rows, down):
        return f"a kernel for each product is faster for {rows} rows of weights this small"
    if rows * max(inputs, results) >= MOST_NUMBERS:
        return f"it is for less than {MOST_NUMBERS} numbers between the products"
    return None
