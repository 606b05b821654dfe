"""Fused INT4 dequantise-and-multiply for Hopper, for the few rows of a decode step.

The product is computed as out^T = W x^T: 16 output features are the large operand of an `mma`, 8 tokens the small
one. A warp owns 128 or 256 inputs for the whole kernel and keeps their x in registers, in fragment order; a block's
warps own neighbouring inputs and walk through strips of 16 output features. Weights and scales travel several strips
ahead, by asynchronous copies into a ring that each warp has for itself (stream.py) or by bulk copies into one that four
warps share (bulk_stream.py): the loop needs no barrier of the whole block for them. After every few strips the warps'
sums are added in shared memory in a fixed order, so results are reproducible. Blocks that share an output feature write
float32 partial sums, which XLA adds inside whatever comes next; sixteen warps of 256 inputs need none for up to 4096
inputs.

Scale, zero point or minimum enter once a group:

    sum_k x_k w_k = scale * sum_k x_k (c + code_k) + bias * sum_k x_k

in float32; what c is, and how the sums are made, is in operands.py and scaled.py. sum_k x_k is computed once for the
whole kernel.

docs/kernels.md has the layout, the reasons and the measurements.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.bulk_stream import BulkStream
from pallas_kernels.int4_matmul.operands import Digits, Halves, Tokens, bias_of
from pallas_kernels.int4_matmul.packing import STRIP, Kind
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PART, PIECE_BYTES, PLAIN, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.scaled import Row, Scaled
from pallas_kernels.int4_matmul.stream import Places, Stream, Weights, arrays_of
from pallas_kernels.int4_matmul.wide_warp import WideWarp


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; `out` is [slices, rows, results]."""

    weights: Weights
    x: Any
    out: Any
    scale_dtype: str
    offset_dtype: str | None
    out_dtype: str
    kind: Kind
    bits: int
    norm: Any = None
    residual: Any = None


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One warp's work: the instructions are emitted through `w`, a WideWarp (or its NumPy twin in the tests)."""
    schedule = plan.schedule
    group, quad = w.lane // 4, w.lane % 4
    zero, other_buffer = w.integer(0), w.integer(plan.buffer_bytes)
    stream = (BulkStream if schedule.bulk else Stream)(w, plan, a.weights, slice_, block)
    # x first: it waits for all weights that were asked for before it.
    x = operand(w, plan, a, stream)
    stream.open()  # without a barrier, ptxas would move the loads of x to where it is used, behind all weights
    stream.fill()
    w.warp_barrier()
    x.prepare(None if a.weights.book is None else Book(w, a.weights.book, as_bytes=schedule.digits))
    stream.spare_is_free()
    nothing = [w.number(0.0)] * 4

    def turn(index: Any, carry: Any) -> Any:
        place, buffer, end, *slots = carry
        places = stream.arrived(index, slots)
        pieces = [words_of(places.words + w.lane * 16, t * plan.tile_bytes) for t in range(plan.warp_tiles)]
        totals = [nothing] * plan.token_blocks
        for i in range(plan.segments):
            products = x.product(pieces, i)
            scale, offset = scale_and_offset(places, i)
            bias = bias_of(w, plan, a.kind, x.code_bias, scale, offset)
            if bias is not None:
                totals = [
                    [w.fma(bias[e // 2], of_tokens[e], total[e]) for e in range(4)]
                    for total, of_tokens in zip(totals, x.of_tokens[i], strict=True)
                ]
            totals = [
                [w.fma(scale[e // 2], product[e], total[e]) for e in range(4)]
                for total, product in zip(totals, products, strict=True)
            ]
        slots = stream.read(slots)
        sums = buffer + place * plan.strip_bytes + (w.warp * plan.sums_bytes + plan.sums_start)
        sums = sums + quad * (2 * plan.token_bytes) + group * 4
        for b, total in enumerate(x.finished(totals)):
            for e in range(4):
                inside = None if 8 * b + 8 <= plan.rows else quad * 2 + (8 * b + e % 2) < plan.rows
                w.shared_store(sums, total[e], inside, (8 * b + e % 2) * plan.token_bytes + 32 * (e // 2))

        done, following = place + 1, index + 1
        full = end <= following

        def add() -> None:
            w.block_barrier()
            store(stream.first_strip + (following - done) // plan.strip_parts, done, buffer)

        w.when(full, add)
        return (
            w.select(full, zero, done),
            w.select(full, other_buffer - buffer, buffer),
            w.select(full, at_most(end + schedule.strips), end),
            *slots,
        )

    def words_of(address: Any, place: int) -> list[Any]:
        """A lane's words of a tile: 4, or 8 of codes of 8 bits."""
        places = range(place, place + plan.tile_bytes, PIECE_BYTES)
        return [word for piece in places for word in w.shared_words(address, piece)]

    def at_most(index: Any) -> Any:
        return w.select(index < stream.count, index, stream.count)

    def scale_and_offset(places: Places, segment: int) -> tuple[Any, Any]:
        """Two each, of this lane's two rows."""
        place = segment * STRIP * plan.scale_bytes
        scale = w.shared_pair(places.scales + group * (2 * plan.scale_bytes), a.scale_dtype, place)
        if a.offset_dtype is None:
            return scale, None
        place = segment * STRIP * plan.offset_bytes
        return scale, w.shared_pair(places.offsets + group * (2 * plan.offset_bytes), a.offset_dtype, place)

    def store(first_strip: Any, strips: Any, buffer: Any) -> None:
        """Adds the warps' sums of some strips, in order, and writes what becomes of them."""
        for base in range(0, schedule.strips // plan.strip_parts * plan.rows * STRIP, plan.threads):
            index = w.thread + base
            row, token, strip = index % STRIP, index // STRIP % plan.rows, index // (STRIP * plan.rows)
            feature = (first_strip + strip) * STRIP + row
            inside = (strip * plan.strip_parts < strips) & (feature < plan.results)
            address = strip * (plan.strip_parts * plan.strip_bytes) + token * plan.token_bytes + row * 4
            address = w.select(inside, buffer + address, zero)
            totals = [total_of(address, plan.sums_start + part * plan.strip_bytes) for part in range(plan.strip_parts)]
            if plan.fusion.norm_eps is not None:
                root = inverse_root(token, plan.fusion.norm_eps)
                totals = [total * root for total in totals]
            total = totals[0]
            if plan.fusion.gated:
                total = total * w.sigmoid(total) * totals[1]
            place = (slice_ * plan.rows + token) * plan.results + feature
            if plan.fusion.residual:
                total = total + w.load_number(a.residual, place, a.out_dtype, inside)
            w.store_number(a.out, place, total, a.out_dtype, inside)

    def total_of(address: Any, start: int) -> Any:
        total = w.shared_number(address, start)
        for other in range(1, schedule.warps):
            total = total + w.shared_number(address, start + other * plan.sums_bytes)
        return total

    def inverse_root(token: Any, eps: float) -> Any:
        """Of the mean square of a token's x."""
        total = w.shared_number(token * 4, plan.squares_start)
        for other in range(1, schedule.warps):
            total = total + w.shared_number(token * 4, plan.squares_start + other * plan.squares_bytes)
        return w.rsqrt(total * (1.0 / plan.in_features) + eps)

    # The first sums are added at once: the instructions for it come from memory while weights are waited for anyway.
    end = w.integer(plan.strip_parts) if schedule.scaled else at_most(w.integer(schedule.strips))
    w.loop(stream.count, (zero, zero, end, *stream.first()), turn)


def operand(w: Any, plan: Plan, a: Arguments, stream: Stream | BulkStream) -> Halves | Digits | Scaled:
    """The warp's share of x, on its way."""
    if not plan.schedule.scaled:
        way = Digits if plan.schedule.digits else Halves
        return way(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))
    if Row.serves(plan):
        return Scaled(w, plan, Row(w, plan, a.x, a.norm, stream.first_tile, stream.spare))
    return Scaled(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))


def arguments_of(weight: Packed, *, out_dtype: str, **arrays: Any) -> Arguments:
    """The kernel's arguments, for the arrays (or references) of a weight, of x and of the result."""
    return Arguments(
        **arrays,
        scale_dtype=str(weight.scales.dtype),
        offset_dtype=None if weight.offsets is None else str(weight.offsets.dtype),
        out_dtype=out_dtype,
        kind=weight.kind,
        bits=weight.bits,
    )


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
    program: Callable[[Any, Plan, Arguments, Any, Any], None] = multiply,
) -> jax.Array:
    """The same before the last addition: [slices, rows, results], float32 unless there is only one slice.

    `program` is what each warp does; benchmarks pass one that reads the weights and nothing else.
    """
    plan = Plan.of(x.shape[0], weight, schedule, fusion)
    if fusion != PLAIN and plan.slices > 1:
        raise ValueError(f"a fused product needs all inputs in one block, not {plan.slices} slices of them")
    if schedule.bulk and not plan.even:
        raise ValueError(f"bulk copies need whole groups of at most {PART} inputs for every warp of {schedule}")
    dtype = jnp.dtype(jnp.float32) if plan.slices > 1 else jnp.dtype(out_dtype)
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
            w = WideWarp(shared)
            program(w, plan, arguments, w.scalar(slice_), w.scalar(block))

        take_turn()
        emit(*refs, jax.lax.axis_index("slice"), jax.lax.axis_index("block"))

    threads = {"num_threads": schedule.warps // 4, "thread_name": "warpgroup"} if schedule.warps > 4 else {}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.slices, plan.rows, plan.results), dtype),
        grid=(plan.slices, plan.blocks_per_slice),
        grid_names=("slice", "block"),
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="int4_matmul",
        **threads,
    )(*operands)
