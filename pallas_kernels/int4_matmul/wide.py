"""Fused INT4 dequantise-and-multiply for Hopper, for more rows than `mosaic.py` is good for: 17 tokens to a prompt.

The product is computed as out^T = W x^T with `wgmma`: 64 output features of a warpgroup, dequantised in registers, are
its large operand, 8 to 256 tokens in shared memory the small one. A word of the mosaic layout is exactly what a thread
has to hold of the large operand for 16 inputs, in an order of the inputs of its own (see `packing.to_mosaic`), so x is
brought into the same order before (`wide_arrange`), or comes as it is and words are read in its order (`wide_natural`).

One warpgroup fetches (`wide_fetch`), a stage of 128 inputs at a time, x for all blocks of the cluster at once. The
others multiply: of the words of a stage each makes 8 or 16 products in two batches, and unpacks one batch while the
tensor cores work on the one before. Then they write what they have (`wide_results`).

The weights are rounded to bfloat16 before they are multiplied, as a dequantised model's are: scale x (code - zero) is
two instructions for two weights, and no group's sums have to be kept apart. Scales and minima of more bits than
bfloat16 has enter as a sum of two.

docs/kernels.md has the layout, the reasons and the measurements.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.mosaic import Arguments, arguments_of
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.wide_arrange import arrange
from pallas_kernels.int4_matmul.wide_fetch import after, fetch, next_empty
from pallas_kernels.int4_matmul.wide_join import join, open_inbox
from pallas_kernels.int4_matmul.wide_natural import words_in_order
from pallas_kernels.int4_matmul.wide_norm import arrange_normalised
from pallas_kernels.int4_matmul.wide_plan import BOX, PRODUCERS, Part, WidePlan, WideSchedule
from pallas_kernels.int4_matmul.wide_results import gated, store, store_lines, store_ordered
from pallas_kernels.int4_matmul.wide_warp import WideWarp, boxes_of
from pallas_kernels.int4_matmul.wide_weights import RowPair
from pallas_kernels.token_order import STAGE, image_shape

REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Of each fetching and each multiplying thread, by the number of multiplying warpgroups."""

TURNS = 8
"""The first of the barriers (of the sixteen that a block has) at which warpgroups wait for their turn."""


def multiply(w: Any, plan: WidePlan, a: Arguments, cluster: Any, rank: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests).

    `rank` is the block's place in its cluster; `a.x` is what `arrange` returns, or x as it is by `boxes_of`.
    """
    schedule = plan.schedule
    registers = REGISTERS.get(schedule.warpgroups)
    leader = w.thread < 1
    for stage in range(schedule.stages):
        w.barrier_init(w.integer(plan.full_barriers + 8 * stage), PRODUCERS + 1, leader)
        w.barrier_init(w.integer(plan.empty_barriers + 8 * stage), plan.consumer_warps * plan.readers, leader)
    if schedule.joined:
        open_inbox(w, plan)
    w.barriers_ready()
    (w.cluster_barrier if schedule.cluster > 1 else w.block_barrier)()
    parts = (plan.parts + (plan.clusters - 1) - cluster) // plan.clusters

    def part(i: Any) -> Part:
        return Part(w, plan, cluster + i * plan.clusters, rank)

    def produce() -> None:
        if registers is not None:
            w.set_registers(registers[0], more=False)
        start = (w.integer(0), w.integer(1))  # the first time round, every slot is empty
        last = w.loop(parts, start, lambda i, carry: fetch(w, plan, a, part(i), rank, carry))
        if plan.readers > 1:
            # A block may not end while others still report to its barriers. Waiting here leaves out the fence of a
            # barrier of the cluster, which would wait for the results too.
            w.loop(w.integer(schedule.stages), last, lambda i, carry: next_empty(w, plan, *carry))

    def consume() -> None:
        if registers is not None:
            w.set_registers(registers[1], more=True)
        book = None if a.weights.book is None else Book(w, a.weights.book)
        start = (w.integer(0), w.integer(0))
        if plan.turns:
            w.when(w.integer(plan.consumer_warps - 4) <= w.warp, lambda: w.give_turn(w.integer(TURNS)))
        w.loop(parts, start, functools.partial(one_part, book))

    def one_part(book: Book | None, i: Any, carry: Any) -> Any:
        now = part(i)
        carry, sums = multiply_part(w, plan, a, now, book, carry)
        if schedule.joined:
            sums = join(w, plan, sums, rank)
        if plan.halves:
            sums = [(w.warp // 4 * 2 + w.warp % 4, sums[0][1])]  # from the warpgroup's first strip of results on
        elif plan.gated:
            (_, gates), (_, others) = sums
            sums = [(w.warp, [gated(w, *pair) for pair in zip(gates, others, strict=True)])]
        write = store_lines if plan.by_lines and a.out_dtype != "float32" else store
        if plan.result_order is not None:
            write = store_ordered
        for strip, values in sums:
            write(w, plan, a, now, strip, values)
        return carry

    w.when(w.warp < plan.consumer_warps, consume)
    w.when(w.integer(plan.consumer_warps) <= w.warp, produce)


def multiply_part(
    w: Any, plan: WidePlan, a: Arguments, part: Part, book: Book | None, carry: Any
) -> tuple[Any, list[tuple[Any, Any]]]:
    """A multiplying warp's work for one part: slot and parity, and its strips with their sums, see `store`."""
    schedule = plan.schedule
    sums, tiles = schedule.tokens // 2, range(schedule.tiles)
    # The warpgroup's tiles of 64 features follow each other; this warp has a strip of each.
    strip = w.warp // 4 * (4 * schedule.tiles) + w.warp % 4
    batches, steps = STAGE // COLUMNS, COLUMNS // 16
    products = [(u, i) for u in tiles for i in range(steps)]
    turn = w.warp // 4 + TURNS
    next_turn = w.select(turn < TURNS + schedule.warpgroups - 1, turn + 1, w.integer(TURNS))

    def grouped(flat: Sequence[Any]) -> list[Any]:
        return [flat[sums * u : sums * (u + 1)] for u in tiles]

    def release(slot: Any, now: Any) -> None:
        w.warp_barrier()
        barrier = slot * 8 + plan.empty_barriers
        w.arrive_in(barrier, w.lane if plan.readers > 1 else None, (w.lane < plan.readers) & now)

    def segment(base: Any, tile: int, index: int) -> RowPair:
        row = (strip + 4 * tile) * (plan.segments * STRIP) + index * STRIP + w.lane // 4 * 2

        def scale(place: int) -> Any:
            return w.shared_word(base + row * plan.scale_bytes, plan.scales_start + place)

        def offset(place: int) -> Any:
            read = w.shared_half if plan.offset_bytes == 1 else w.shared_word
            return read(base + row * plan.offset_bytes, plan.offsets_start + place)

        return RowPair(w, a, scale, offset, book)

    def words(base: Any, tile: int, batch: int) -> list[list[Any]]:
        """A lane's of each step of 16 inputs: one, or two of codes of 8 bits."""
        address = base + strip * plan.words_bytes + w.lane * 16

        def read(piece: int) -> Sequence[Any]:
            if schedule.natural:
                return words_in_order(w, base + strip * plan.words_bytes, piece)
            return w.shared_words(address, piece)

        place = plan.x_bytes + 4 * plan.words_bytes * tile + plan.tile_bytes * batch
        pieces = range(place, place + plan.tile_bytes, PIECE_BYTES)
        some = [word for piece in pieces for word in read(piece)]
        return [some[i : i + len(pieces)] for i in range(0, len(some), len(pieces))]

    # A batch is unpacked while the one before is multiplied. Each has products of all tiles: where a loop goes round
    # with some sums finished and others not, ptxas makes every product wait for the one before.
    def stage(index: Any, carry: Any, last: bool = False) -> Any:
        slot, parity, before, *flat = carry
        acc = grouped(flat)
        base = slot * plan.stage_bytes
        w.barrier_wait(slot * 8 + plan.full_barriers, parity)

        # In turns words are read late: ptxas would unpack the second batch's between this turn's products.
        early = [] if plan.turns else [[words(base, u, b) for u in tiles] for b in range(batches)]
        segments = [[segment(base, u, i) for i in range(plan.segments)] for u in tiles]
        matrix = w.swizzled_matrix(base) if schedule.natural else w.token_matrix(base, schedule.tokens)
        for b in range(batches):
            operands = []
            for u in tiles:
                for i, word in enumerate(early[b][u] if early else words(base, u, b)):
                    operands += segments[u][(b * COLUMNS + i * 16) // plan.segment].weights(word)
            if plan.turns:
                w.wait_turn(turn)
            operands = w.wgmma_fence(operands)
            for place, (u, i) in enumerate(products):
                first = (b * steps + i) * 32 * schedule.tokens
                if schedule.natural:
                    first = b * plan.x_bytes // batches + i * 32
                acc[u] = w.wgmma(acc[u], operands[4 * place : 4 * place + 4], matrix, first)
            w.wgmma_commit()
            if plan.turns:
                w.give_turn(next_turn)
            # The batch before has been read. Behind the products: where ptxas sees a wait only before the next ones,
            # it makes them wait for each other too.
            if not last or b + 1 < batches:
                w.wgmma_wait(1)
            if b == 0:
                release(before, w.integer(0) < index)
        return (*after(w, plan, slot, parity), slot, *(value for tile in acc for value in tile))

    slot, parity = carry
    start = (slot, parity, slot, *[w.number(0.0)] * (sums * schedule.tiles))
    # The last stage is no part of the loop: with products still under way where the loop ends, ptxas reads sums before
    # the wait that follows it.
    end = part.count - 1
    slot, parity, before, *flat = stage(end, w.loop(end, start, stage), last=True)
    flat = w.wgmma_wait(0, flat)
    release(before, w.lane < 32)
    if book is not None:
        flat = [value * book.unit for value in flat]
    return (slot, parity), [(strip + 4 * u, values) for u, values in enumerate(grouped(flat))]


def int4_matmul(
    x: jax.Array,
    weight: Packed,
    norm: jax.Array | None = None,
    *,
    schedule: WideSchedule,
    out_dtype: jnp.dtype,
    norm_eps: float = 0.0,
) -> jax.Array:
    """x [rows, in_features] bf16 times a weight of the mosaic layout -> [rows, out_features].

    `norm` float32 [in_features]: x goes through an RMS norm first.
    """
    partial, _ = product(x, weight, norm, schedule=schedule, out_dtype=out_dtype, norm_eps=norm_eps)
    return added(partial, out_dtype)


def added(partial: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The sum of slices. Written as a chain of additions, XLA makes it part of the next elementwise operation."""
    return functools.reduce(operator.add, list(partial)).astype(dtype)


# Jitted, so that a model's equal products share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("schedule", "out_dtype", "norm_eps"))
def product(
    x: jax.Array,
    weight: Packed,
    norm: jax.Array | None = None,
    before: jax.Array | None = None,
    *,
    schedule: WideSchedule,
    out_dtype: jnp.dtype,
    norm_eps: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`int4_matmul` of y, as slices [slices, rows, out_features] of float32 or one of `out_dtype`; and y.

    y is x, or where there is `before` x and the sum of its slices, those of the product before; then there is a norm.
    """
    plan = WidePlan.of(x.shape[0], weight, schedule)
    image, y = brought(x, plan, norm, norm_eps, before)
    return launch(image, weight, plan, out_dtype), y


@functools.partial(jax.jit, static_argnames=("rows", "schedule", "out_dtype"))
def product_of_image(
    image: jax.Array, weight: Packed, *, rows: int, schedule: WideSchedule, out_dtype: jnp.dtype
) -> jax.Array:
    """`product` of an x of so many rows that is in the plan's order already."""
    return launch(image, weight, WidePlan.of(rows, weight, schedule), out_dtype)


@functools.partial(jax.jit, static_argnames=("schedules", "norm_eps"))
def gated_mlp(
    x: jax.Array,
    gate_up: Packed,
    down: Packed,
    norm: jax.Array | None = None,
    before: jax.Array | None = None,
    *,
    schedules: tuple[WideSchedule, WideSchedule],
    norm_eps: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """(silu(y Wg^T) * (y Wu^T)) Wd^T, as slices of float32 or one of bfloat16, for x [rows, in_features] bf16; and y.

    `gate_up` holds the rows of Wg, then those of Wu; `norm` and `before` as in `product`. What is between the products
    is rounded to bfloat16 once, and written by the first kernel in the order in which the second takes it.
    """
    rows, dtype = x.shape[0], jnp.dtype(jnp.bfloat16)
    second = WidePlan.of(rows, down, schedules[1])
    first = WidePlan.of(rows, gate_up, schedules[0])
    first = dataclasses.replace(first, gated=True, result_order=second.token_order)
    image, y = brought(x, first, norm, norm_eps, before)
    return launch(launch(image, gate_up, first, dtype), down, second, dtype), y


def brought(
    x: jax.Array, plan: WidePlan, norm: jax.Array | None, norm_eps: float, before: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """y, see `product`, in the plan's order; and y."""
    if plan.schedule.natural:
        if norm is not None:
            raise ValueError("a schedule for x as it is takes no norm; use one whose `natural` is false")
        return x, x
    if norm is None:
        return arrange(x, plan), x
    return arrange_normalised(x, plan, norm, norm_eps, before)


def launch(image: jax.Array, weight: Packed, plan: WidePlan, out_dtype: jnp.dtype) -> jax.Array:
    """Runs the kernel on x as the plan takes it: [slices, rows, results], or an image of `plan.result_order`."""
    schedule = plan.schedule
    dtype = jnp.dtype(jnp.float32) if schedule.slices > 1 else jnp.dtype(out_dtype)
    arrays = [*arrays_of(weight), image]
    out_type = jax.ShapeDtypeStruct((schedule.slices, plan.rows, plan.results), dtype)
    if plan.result_order is not None:
        out_type = jax.ShapeDtypeStruct(image_shape(plan.rows, plan.results, plan.result_order), jnp.int32)
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            *inputs, x_ref, out, shared, cluster, rank = values
            arguments = arguments_of(
                weight,
                weights=Weights.of(weight, inputs),
                x=boxes_of(ctx, x_ref, (plan.box_tokens, BOX)) if schedule.natural else x_ref,
                out=out,
                out_dtype=str(dtype),
            )
            w = WideWarp(shared)
            multiply(w, plan, arguments, w.scalar(cluster), w.scalar(rank))

        take_turn()
        emit(*refs, lax.axis_index("cluster"), lax.axis_index("rank") if schedule.cluster > 1 else jnp.int32(0))

    clusters = {"cluster": (schedule.cluster,), "cluster_names": ("rank",)} if schedule.cluster > 1 else {}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(plan.clusters,),
        grid_names=("cluster",),
        num_threads=schedule.warpgroups + PRODUCERS // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="int4_matmul_wide",
        **clusters,
    )(*arrays)
