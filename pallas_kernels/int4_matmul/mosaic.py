"""Fused INT4 dequantise-and-multiply for Hopper, for the few rows of a decode step.

The product is computed as out^T = W x^T: 16 output features are the large operand of an `mma`, 8 tokens the small
one. A warp owns 128 or 256 inputs for the whole kernel and keeps their x in registers, in fragment order; a block's
warps own neighbouring inputs and walk through strips of 16 output features. Weights and scales travel several strips
ahead, by asynchronous copies into a ring that each warp has for itself (stream.py) or by bulk copies into one that four
warps share (bulk_stream.py): the loop needs no barrier of the whole block for them. After every few strips the warps'
sums are added in shared memory in a fixed order, so results are reproducible. Blocks that share an output feature write
float32 partial sums, which XLA adds inside whatever comes next, or are a cluster that adds them, and a residual, itself
(joined.py); sixteen warps of 256 inputs need neither for up to 4096 inputs.

Scale, zero point or minimum enter once a group:

    sum_k x_k w_k = scale * sum_k x_k (c + code_k) + bias * sum_k x_k

in float32; what c is, and how the sums are made, is in operands.py, lifted.py and columns.py. sum_k x_k is computed
once for the whole kernel.

docs/kernels.md has the layout, the reasons and the measurements.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul import apart, joined, once
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.bulk_stream import BulkStream
from pallas_kernels.int4_matmul.cluster_warp import ClusterWarp
from pallas_kernels.int4_matmul.columns import Columns
from pallas_kernels.int4_matmul.lifted import Lifted
from pallas_kernels.int4_matmul.operands import Digits, Halves, Tokens
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PART, PLAIN, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.row import Row
from pallas_kernels.int4_matmul.rows import Bytes, RowStream
from pallas_kernels.int4_matmul.stream import Stream, Weights, arrays_of
from pallas_kernels.int4_matmul.strip import (
    Arguments,
    Operand,
    arguments_of,
    factors_of,
    pieces_of,
    put,
    store,
    totals_of,
)

MOST_JOINED = 8
"""Blocks of a cluster that every card runs."""


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One warp's work: the instructions are emitted through `w`, a ClusterWarp (or its NumPy twin in the tests)."""
    schedule = plan.schedule
    zero, other_buffer = w.integer(0), w.integer(plan.buffer_bytes)
    way = RowStream if plan.in_rows is not None else BulkStream if schedule.bulk else Stream
    stream = way(w, plan, a.weights, slice_, block)
    stream.begin()
    if schedule.joined:
        joined.open_inbox(w, plan, slice_, stream.count)
    x = operand(w, plan, a, stream)
    stream.open()
    stream.fill()
    w.warp_barrier()
    x.prepare(None if a.weights.book is None else Book(w, a.weights.book, as_bytes=schedule.digits))
    stream.spare_is_free()
    if schedule.joined:
        w.cluster_wait()

    def turn(index: Any, carry: Any) -> Any:
        place, buffer, end, *slots = carry
        places = stream.arrived(index, slots)
        pieces = pieces_of(w, plan, places)
        totals = totals_of(w, plan, x, pieces, lambda i: factors_of(w, plan, a, x.code_bias, places, i))
        slots = stream.read(slots)
        put(w, plan, x, totals, buffer + place * plan.strip_bytes)

        done, following = place + 1, index + 1
        full = end <= following

        def add() -> None:
            w.block_barrier()
            if schedule.joined:
                return joined.send(w, plan, slice_, following - done, done, buffer)
            store(w, plan, a, slice_, stream.first_strip + (following - done) // plan.strip_parts, done, buffer)

        w.when(full, add)
        return (
            w.select(full, zero, done),
            w.select(full, other_buffer - buffer, buffer),
            w.select(full, at_most(end + schedule.strips), end),
            *slots,
        )

    def at_most(index: Any) -> Any:
        return w.select(index < stream.count, index, stream.count)

    # The first sums are added at once: the instructions for it come from memory while weights are waited for anyway.
    # Not those of a few strips only, of which the last are there by then.
    at_once = schedule.scaled and plan.most_strips > schedule.strips
    end = w.integer(plan.strip_parts) if at_once else at_most(w.integer(schedule.strips))
    w.loop(stream.count, (zero, zero, end, *stream.first()), turn)
    if schedule.joined:
        joined.finish(w, plan, a, slice_, stream.first_strip, stream.count)


def operand(w: Any, plan: Plan, a: Arguments, stream: Stream | BulkStream) -> Operand:
    """The warp's share of x, on its way."""
    if plan.schedule.scaled and Columns.serves(plan):
        rows = [Row(w, plan, a.x, a.norm, stream.first_tile, stream.spare, row) for row in range(plan.rows)]
        return Columns(w, plan, rows, stream.spare)
    if not plan.schedule.scaled:
        way = Digits if plan.schedule.digits else Halves
        return way(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))
    way = Lifted if plan.in_rows is None else Bytes
    if Row.serves(plan):
        return way(w, plan, Row(w, plan, a.x, a.norm, stream.first_tile, stream.spare))
    return way(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))


# Jitted, so that a model's equal products share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("schedule", "out_dtype", "fusion"))
def int4_matmul(
    x: jax.Array,
    weight: Packed,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    schedule: Schedule,
    out_dtype: jnp.dtype,
    fusion: Fusion = PLAIN,
) -> jax.Array:
    """x [rows, in_features] bf16 times a weight of the mosaic layout -> [rows, results].

    `norm` float32 [in_features] and `residual` [rows, results] in `out_dtype` are given where `fusion` has them.
    """
    arrays = [array for array in (norm, residual) if array is not None]
    partial = partial_sums(x, weight, *arrays, schedule=schedule, out_dtype=out_dtype, fusion=fusion)
    # Written as a chain of additions, XLA makes it part of the next elementwise operation.
    return functools.reduce(operator.add, list(partial)).astype(out_dtype)


def partial_sums(
    x: jax.Array,
    weight: Packed,
    *arrays: jax.Array,
    schedule: Schedule,
    out_dtype: jnp.dtype,
    fusion: Fusion = PLAIN,
    program: Callable[[Any, Plan, Arguments, Any, Any], None] | None = None,
) -> jax.Array:
    """The same before the last addition: [slices, rows, results], float32 unless one is left.

    `program` is what each warp does, by default the product; benchmarks pass one that only reads the weights.
    """
    plan = Plan.of(x.shape[0], weight, schedule, fusion)
    if plan.slices > 1 and (fusion.norm_eps is not None or fusion.gated or (fusion.residual and not schedule.joined)):
        raise ValueError(f"a fused product needs all inputs in one block, not {plan.slices} slices of them")
    if schedule.joined and not 1 < plan.slices <= MOST_JOINED:
        raise ValueError(f"a cluster joins 2 to {MOST_JOINED} slices, not {plan.slices}")
    if schedule.bulk and not plan.even:
        raise ValueError(f"bulk copies need whole groups of at most {PART} inputs for every warp of {schedule}")
    apart.check(plan)
    if schedule.once and not plan.whole:
        raise ValueError(f"a block for each strip needs whole parts of {PART} inputs for every warp of {schedule}")
    if program is None:
        program = once.multiply if schedule.once else apart.multiply if schedule.apart else multiply
    dtype = jnp.dtype(jnp.float32) if plan.partials > 1 else jnp.dtype(out_dtype)
    operands = [*arrays_of(weight), *arrays, x]
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *given, x_ref, out, shared, slice_, block = values
            rest = given[len(given) - len(arrays) :]
            arguments = arguments_of(
                weight,
                weights=Weights.of(weight, given[: len(given) - len(arrays)]),
                x=x_ref,
                norm=None if fusion.norm_eps is None else rest[0],
                residual=rest[-1] if fusion.residual else None,
                out=out,
                out_dtype=str(dtype),
            )
            w = ClusterWarp(shared)
            program(w, plan, arguments, w.scalar(slice_), w.scalar(block))

        take_turn()
        emit(*refs, jax.lax.axis_index("slice"), jax.lax.axis_index("block"))

    threads = {"num_threads": plan.threads // 128, "thread_name": "warpgroup"} if plan.threads > 128 else {}
    # Blocks of a cluster have a name of their own, and are neighbours.
    grid: dict[str, Any] = {
        "grid": (plan.slices, plan.blocks_per_slice * schedule.tiles),
        "grid_names": ("slice", "block"),
    }
    if schedule.joined:
        grid = {
            "grid": grid["grid"][1:],
            "grid_names": ("block",),
            "cluster": (plan.slices,),
            "cluster_names": ("slice",),
        }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.partials, plan.all_rows, plan.results), dtype),
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="int4_matmul",
        **grid,
        **threads,
    )(*operands)
