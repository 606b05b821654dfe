"""The INT4 product of a small matrix (once.py) of a sum: x and the slices that the product before it left."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import once
from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.cluster_sum import Addend, SumPlan
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.strip import arguments_of

CLUSTER = 4
"""Blocks: as there are two of them a multiprocessor, clusters of four find room on any number of multiprocessors."""
MOST_ROWS = 8
"""What each lane asks for at once, it has registers for."""


@dataclasses.dataclass(frozen=True)
class OfSumPlan:
    """A product, and its sum behind it in shared memory."""

    product: Plan
    cluster: int
    slices: int

    @property
    def sum(self) -> SumPlan:
        rows, features, start = self.product.rows, self.product.in_features, self.product.shared_bytes
        barrier = start + SumPlan.nbytes(rows, features)
        shape = (rows, features, self.slices, self.cluster, self.product.schedule.warps)
        return SumPlan(*shape, start=start, barrier=barrier)

    @property
    def shared_bytes(self) -> int:
        return self.sum.barrier + 8


def refusal(plan: Plan, cluster: int = CLUSTER) -> str | None:
    """Why a product of few rows is not one of a sum as well; None if it is."""
    if not plan.schedule.once or plan.schedule.tiles > 1:
        return "only blocks that fetch all at once add slices"
    if plan.rows > MOST_ROWS:
        return f"it is for up to {MOST_ROWS} rows"
    if plan.blocks_per_slice % cluster:
        return f"{plan.blocks_per_slice} blocks are no clusters of {cluster}"
    return SumPlan.refusal(plan.in_features, cluster, plan.schedule.warps)


@functools.partial(jax.jit, static_argnames=("schedule", "out_dtype", "norm_eps", "cluster"))
def int4_matmul_of_sum(
    x: jax.Array,
    partial: jax.Array,
    weight: Packed,
    norm: jax.Array,
    *,
    schedule: Schedule,
    out_dtype: jnp.dtype,
    norm_eps: float,
    cluster: int = CLUSTER,
) -> tuple[jax.Array, jax.Array]:
    """The product [rows, out_features] of the RMS-normalised y, x plus the sum of `partial`; and y.

    x is bfloat16 [rows, in_features] and `partial` float32 [slices, rows, in_features]; y is rounded once.
    """
    product = Plan.of(x.shape[0], weight, schedule, Fusion(norm_eps=norm_eps))
    refused = refusal(product, cluster)
    if refused is not None:
        raise ValueError(f"a product of a sum: {refused}")
    plan, arrays = OfSumPlan(product, cluster, len(partial)), arrays_of(weight)

    def program(w: Any, references: Any, block: Any) -> None:
        x_ref, partial_ref, norm_ref, out, total = references[len(arrays) :]
        arguments = arguments_of(
            weight,
            weights=Weights.of(weight, references[: len(arrays)]),
            x=x_ref,
            norm=norm_ref,
            out=out,
            out_dtype=str(out_dtype),
        )
        once.multiply(w, product, arguments, w.integer(0), block, Addend(plan.sum, partial_ref, total))

    out, total = run_blocks(
        program,
        [*arrays, x, partial, norm],
        [jax.ShapeDtypeStruct((product.rows, product.results), out_dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)],
        blocks=product.blocks_per_slice,
        cluster=cluster,
        warps=schedule.warps,
        name="int4_matmul_of_sum",
        shared_floats=plan.shared_bytes // 4,
    )
    return out, total
