"""Fused INT4 dequantise-and-multiply for Hopper, for more rows than `mosaic.py` is good for: 17 tokens to a prompt.

The product is computed as out^T = W x^T with `wgmma`: 64 output features of a warpgroup, dequantised in registers, are
its large operand, 8 to 256 tokens in shared memory the small one. A word of the mosaic layout is exactly what a thread
has to hold of the large operand for 16 inputs, in an order of the inputs of its own (see `packing.to_mosaic`), so x is
brought into the same order before (`wide_arrange`).

One warpgroup fetches: the weights by asynchronous copies, x, which lies as shared memory wants it, by one bulk copy a
stage, for all blocks of the cluster at once. The others multiply: of the words of a stage (128 inputs) each makes 8 or
16 products in two batches, and unpacks one batch while the tensor cores work on the other.

The weights are rounded to bfloat16 before they are multiplied, as a dequantised model's are: scale x (code - zero) is
two instructions for two weights, and no group's sums have to be kept apart. Scales and minima of more bits than
bfloat16 has enter as a sum of two.

docs/kernels.md has the layout, the reasons and the measurements.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.mosaic import Arguments, arguments_of
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.wide_arrange import arrange
from pallas_kernels.int4_matmul.wide_plan import (
    BOX,
    BOX_BYTES,
    LINE,
    LINES,
    PRODUCERS,
    STAGE,
    UNIT_BYTES,
    WidePlan,
    WideSchedule,
)
from pallas_kernels.int4_matmul.wide_warp import WideWarp, boxes_of
from pallas_kernels.int4_matmul.wide_weights import RowPair

REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Of each fetching and each multiplying thread, by the number of multiplying warpgroups."""

TURNS = 8
"""The first of the barriers (of the sixteen that a block has) at which warpgroups wait for their turn."""


class Part:
    """The part of the product that a block works on: some features of some tokens over some of the stages."""

    def __init__(self, plan: WidePlan, index: Any, rank: Any):
        """The blocks of a cluster have neighbouring features, or slices of the inputs of the same."""
        schedule = plan.schedule
        self.token_tile, rest = index % plan.token_tiles, index // plan.token_tiles
        self.slice, features = rest % schedule.slices, rest // schedule.slices
        if schedule.added > 1:
            first, self.first_strip = self.slice * schedule.added + rank, features * plan.block_strips
        else:
            first, self.first_strip = self.slice, (features * schedule.cluster + rank) * plan.block_strips
        self.first_step = first * plan.steps // plan.all_slices
        self.count = (first + 1) * plan.steps // plan.all_slices - self.first_step


def multiply(w: Any, plan: WidePlan, a: Arguments, cluster: Any, rank: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests).

    `rank` is the block's place in its cluster; `a.x` is what `arrange` returns.
    """
    schedule = plan.schedule
    leader = w.thread < 1
    for stage in range(schedule.stages):
        w.barrier_init(w.integer(plan.full_barriers + 8 * stage), PRODUCERS + 1, leader)
        w.barrier_init(w.integer(plan.empty_barriers + 8 * stage), plan.consumer_warps * schedule.cluster, leader)
    w.barriers_ready()
    together = w.cluster_barrier if plan.cluster_blocks > 1 else w.block_barrier
    together()
    parts = (plan.parts + (plan.clusters - 1) - cluster) // plan.clusters

    def part(i: Any) -> Part:
        return Part(plan, cluster + i * plan.clusters, rank)

    def produce() -> None:
        if schedule.warpgroups in REGISTERS:
            w.set_registers(REGISTERS[schedule.warpgroups][0], more=False)
        start = (w.integer(0), w.integer(1))  # the first time round, every slot is empty
        if schedule.added > 1:
            fetch(w, plan, a, part(w.integer(0)), rank, start)
            w.cluster_barrier()
            w.cluster_barrier()
        else:
            w.loop(parts, start, lambda i, carry: fetch(w, plan, a, part(i), rank, carry))

    def consume() -> None:
        if schedule.warpgroups in REGISTERS:
            w.set_registers(REGISTERS[schedule.warpgroups][1], more=True)
        book = None if a.weights.book is None else Book(w, a.weights.book)
        start = (w.integer(0), w.integer(0))
        if plan.takes_turns:
            w.when(w.integer(plan.consumer_warps - 4) <= w.warp, lambda: w.give_turn(w.integer(TURNS)))
        if schedule.added > 1:
            only = part(w.integer(0))
            add_in_cluster(w, plan, a, only, rank, multiply_part(w, plan, a, only, book, start)[1])
        else:
            w.loop(parts, start, functools.partial(one_slice, book))

    def one_slice(book: Book | None, i: Any, carry: Any) -> Any:
        now = part(i)
        carry, sums = multiply_part(w, plan, a, now, book, carry)
        write = store_lines if plan.by_lines and a.out_dtype != "float32" else store
        for strip, values in sums:
            write(w, plan, a, now, strip, values)
        return carry

    w.when(w.warp < plan.consumer_warps, consume)
    w.when(w.integer(plan.consumer_warps) <= w.warp, produce)
    if schedule.cluster > 1:
        w.cluster_barrier()  # a block may not end while others still report to its barriers


def after(w: Any, plan: WidePlan, slot: Any, parity: Any) -> tuple[Any, Any]:
    """The slot that follows, and the parity of its phase."""
    last = w.integer(plan.schedule.stages - 1) <= slot
    return w.select(last, w.integer(0), slot + 1), w.select(last, w.integer(1) - parity, parity)


def place_of(group: Any, quad: Any) -> Any:
    """Where in 512 bytes of words those lie that are of lane 4 group + quad when they are packed.

    Those of a group are written, and those of a quad are read, at a time: neither meet in a bank.
    """
    return (group + quad * 2) % 8 * 16 + quad * 128


def fetch(w: Any, plan: WidePlan, a: Arguments, part: Part, rank: Any, carry: Any) -> Any:
    """The fetching warps' work for one part."""
    schedule = plan.schedule
    thread = w.thread - 32 * plan.consumer_warps
    leader = thread < 1
    ragged = plan.strips % (plan.block_strips * schedule.cluster) != 0
    share = plan.x_bytes // schedule.cluster
    mine = rank * share if schedule.cluster > 1 else w.integer(0)

    def both(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a & b

    def tokens(step: Any, base: Any, full: Any) -> None:
        """This block's share: both halves of the stage, one, or half of the tokens of one."""
        for i in range(plan.boxes // schedule.cluster):
            box = rank + i if schedule.cluster > 1 else w.integer(i)
            half, first = box % 2, box // 2 * plan.box_tokens
            place = base + half * (plan.x_bytes // 2) + first * BOX_BYTES
            token = part.token_tile * schedule.tokens + first
            w.copy_box(place, a.x, step * STAGE + half * BOX, token, full, schedule.cluster, leader)

    def words(step: Any, base: Any) -> None:
        chunks = plan.words_bytes // 16  # of a strip
        piece, strip = thread % chunks, part.first_strip + thread // chunks
        tile = step * (STAGE // COLUMNS) + piece // (plan.tile_bytes // 16)
        whole = None if plan.column_tiles % (STAGE // COLUMNS) == 0 else tile < plan.column_tiles
        offset = strip * (plan.column_tiles * plan.tile_bytes) + step * plan.words_bytes + piece * 16
        to = thread // 32 * 512 + place_of(thread % 32 // 4, thread % 4) if schedule.plain else thread * 16
        for i in range(0, plan.block_strips, PRODUCERS // chunks):
            inside = both(whole, strip + i < plan.strips if ragged else None)
            source, place = offset + i * plan.column_tiles * plan.tile_bytes, plan.x_bytes + plan.words_bytes * i
            w.copy_or_clear(base + to, a.weights.words, source, inside, None, place)

    def rows(array: Any, itemsize: int, start: int, step: Any, base: Any) -> None:
        chunks = plan.segments * itemsize  # of a strip
        first_group = step * STAGE // plan.group_size
        for first in range(0, plan.block_strips * chunks, PRODUCERS):
            chunk = thread + first
            strip, piece = part.first_strip + chunk // chunks, chunk % chunks
            inside = strip < plan.strips if ragged else None
            if plan.segments > 1:
                inside = both(inside, first_group + piece // itemsize < plan.groups)
            some = None
            if first + PRODUCERS > plan.block_strips * chunks:
                some = chunk < plan.block_strips * chunks
            offset = (strip * plan.groups + first_group) * (STRIP * itemsize) + piece * 16
            w.copy_or_clear(base + thread * 16, array, offset, inside, some, start + first * 16)

    def stage(index: Any, carry: Any) -> Any:
        slot, parity = carry
        step, base = part.first_step + index, slot * plan.stage_bytes
        full = slot * 8 + plan.full_barriers
        w.barrier_wait(slot * 8 + plan.empty_barriers, parity)
        w.expect_bytes(full, plan.x_bytes, leader)
        if schedule.plain:
            tokens(step, base, full)
        else:
            source = (part.token_tile * plan.steps + step) * plan.x_bytes + mine
            w.copy_to_cluster(base + mine, a.x, source, share, full, schedule.cluster, leader)
        words(step, base)
        rows(a.weights.scales, plan.scale_bytes, plan.scales_start, step, base)
        if plan.offset_bytes:
            rows(a.weights.offsets, plan.offset_bytes, plan.offsets_start, step, base)
        w.arrive_when_copied(full)
        return after(w, plan, slot, parity)

    return w.loop(part.count, carry, stage)


def multiply_part(
    w: Any, plan: WidePlan, a: Arguments, part: Part, book: Book | None, carry: Any
) -> tuple[Any, list[tuple[Any, Any]]]:
    """A multiplying warp's work for one part: slot and parity, and its strips with their sums, see `store`."""
    schedule = plan.schedule
    sums, tiles = schedule.tokens // 2, range(schedule.tiles)
    # The warpgroup's tiles of 64 features follow each other; this warp has a strip of each.
    strip = w.warp // 4 * (4 * schedule.tiles) + w.warp % 4
    pieces = range(0, plan.tile_bytes, PIECE_BYTES)
    batches = range(0, STAGE // 16, schedule.batch if schedule.plain else 4)
    warpgroup = w.warp // 4
    turn = warpgroup + TURNS
    next_turn = w.select(turn < TURNS + schedule.warpgroups - 1, turn + 1, w.integer(TURNS))

    # Two batches a stage, so that one is unpacked while the other is multiplied. Each has products of all tiles: where
    # a loop goes round with some sums finished and others not, ptxas makes every product wait for the one before.
    def release(slot: Any, now: Any) -> None:
        w.warp_barrier()
        barrier = slot * 8 + plan.empty_barriers
        w.arrive_in(barrier, w.lane if schedule.cluster > 1 else None, (w.lane < schedule.cluster) & now)

    def segment(base: Any, tile: int, index: int) -> RowPair:
        row = (strip + 4 * tile) * (plan.segments * STRIP) + index * STRIP + w.lane // 4 * 2

        def scale(place: int) -> Any:
            return w.shared_word(base + row * plan.scale_bytes, plan.scales_start + place)

        def offset(place: int) -> Any:
            read = w.shared_half if plan.offset_bytes == 1 else w.shared_word
            return read(base + row * plan.offset_bytes, plan.offsets_start + place)

        return RowPair(w, a, scale, offset, book)

    def words_of(base: Any, tile: int, column_tile: int) -> list[list[Any]]:
        """A lane's words of 16 inputs each: one, or two of codes of 8 bits."""
        address = base + strip * plan.words_bytes + w.lane * 16
        place = plan.x_bytes + 4 * plan.words_bytes * tile + plan.tile_bytes * column_tile
        words = [word for first in pieces for word in w.shared_words(address, place + first)]
        return [words[i : i + len(pieces)] for i in range(0, len(words), len(pieces))]

    group, half, run, per_step = w.lane // 4, w.lane % 4 // 2, steps_per_run(plan.group_size), len(pieces)
    quads = [half, half + 2] if run == 1 else list(range(4))
    lanes = [place_of(group, quad) + (half * (4 * per_step) if run == 2 else 0) for quad in quads]
    selector = w.lane % 2 * 0x1111 + 0x6240

    def halves_of(base: Any, tile: int, step: int) -> list[list[Any]]:
        """The same of one step, for inputs in their own order: of every eight a lane needs 2 quad and 2 quad + 1.

        As packed, lane `quad` has all of the eight, in two words. So each word is put together from halves of two.
        """
        address = base + strip * plan.words_bytes
        unit, within = divmod(step, 4 // per_step)
        start = plan.x_bytes + 4 * plan.words_bytes * tile + 512 * unit
        start += 8 * (within // 2) if run == 2 else 4 * per_step * within
        pair = lanes[step % 2 * 2 :][:2] if run == 2 else lanes
        return [[w.shared_word(address + lane, start + 4 * which) for lane in pair] for which in range(per_step)]

    def batch_of(base: Any, first_step: int) -> list[tuple[int, int, Any]]:
        """Tile, step and words (or what they are put together from) of a batch."""
        steps = range(first_step, first_step + batches.step)
        if schedule.plain:
            return [(u, s, halves_of(base, u, s)) for u in tiles for s in steps]
        return [
            (u, s, words) for u in tiles for s, words in zip(steps, words_of(base, u, first_step // 4), strict=True)
        ]

    def weights_of(tile: int, step: int, words: list[Any], segments: list[list[RowPair]]) -> list[Any]:
        if schedule.plain:
            words = [w.pick_bytes(*pair, selector) for pair in words]
        return segments[tile][step * 16 // plan.segment].weights(words)

    def stage(index: Any, carry: Any, last: bool = False) -> Any:
        slot, parity, before, *flat = carry
        acc = [flat[sums * u : sums * (u + 1)] for u in tiles]
        base = slot * plan.stage_bytes
        w.barrier_wait(slot * 8 + plan.full_barriers, parity)
        loaded = [] if schedule.plain else [batch_of(base, first_step) for first_step in batches]
        segments = [[segment(base, u, i) for i in range(plan.segments)] for u in tiles]
        matrix = w.swizzled_matrix(base) if schedule.plain else w.token_matrix(base, schedule.tokens)
        following = batch_of(base, 0) if schedule.plain else loaded[0]
        for batch, first_step in enumerate(batches):
            now = following
            if batch + 1 < len(batches):
                following = loaded[batch + 1] if loaded else batch_of(base, first_step + batches.step)
            operands = [word for u, s, words in now for word in weights_of(u, s, words, segments)]
            if plan.takes_turns:
                w.wait_turn(turn)
            operands = w.wgmma_fence(operands)
            for i, (u, s, _) in enumerate(now):
                advance = s // 4 * plan.x_bytes // 2 + s % 4 * 32 if schedule.plain else s * 32 * schedule.tokens
                acc[u] = w.wgmma(acc[u], operands[4 * i : 4 * i + 4], matrix, advance)
            w.wgmma_commit()
            if plan.takes_turns:
                w.give_turn(next_turn)
            # The batch before has been read. Behind the products: where ptxas sees a wait only before the next ones,
            # it makes them wait for each other too.
            if not last or batch + 1 < len(batches):
                w.wgmma_wait(schedule.pending)
            if batch == schedule.pending - 1:
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
    return (slot, parity), [(strip + 4 * u, flat[sums * u : sums * (u + 1)]) for u in tiles]


def add_in_cluster(w: Any, plan: WidePlan, a: Arguments, part: Part, rank: Any, tiles: list[tuple[Any, Any]]) -> None:
    """Adds what the blocks of the cluster have, slice by slice, and writes it.

    A unit is what a warp has of 8 tokens: 4 sums a lane. Each goes to the block that adds it, into the shared memory
    where the stages were, [unit of the block, slice, lane, 16 bytes].
    """
    slices, token_blocks = plan.schedule.added, plan.schedule.tokens // 8
    place = rank * UNIT_BYTES + w.lane * 16
    w.cluster_barrier()  # nobody reads stages any more
    for strip, sums in tiles:
        for block in range(token_blocks):
            unit = strip * token_blocks + block
            w.send(unit // slices * (slices * UNIT_BYTES) + place, sums[4 * block : 4 * block + 4], unit % slices)
    w.cluster_barrier()

    def add(i: Any, carry: Any) -> Any:
        slot = i * plan.consumer_warps + w.warp
        address = slot * (slices * UNIT_BYTES) + w.lane * 16
        total = [w.as_float(word) for word in w.shared_words(address)]
        for other in range(1, slices):
            words = w.shared_words(address, other * UNIT_BYTES)
            total = [value + w.as_float(word) for value, word in zip(total, words, strict=True)]
        unit = slot * slices + rank
        store(w, plan, a, part, unit // token_blocks, total, unit % token_blocks * 8)
        return carry

    units = (w.integer(plan.units + slices - 1) - rank) // slices  # units of this block
    w.loop((units + (plan.consumer_warps - 1) - w.warp) // plan.consumer_warps, (), add)


def store(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any, first_token: Any = 0) -> None:
    """Writes sums of one strip: [token block of 8][row r, token; the next token; row r + 8, ...]."""
    tokens = plan.schedule.tokens
    feature = (part.first_strip + strip) * STRIP + w.lane // 4
    token = part.token_tile * tokens + w.lane % 4 * 2 + first_token
    offset = (part.slice * plan.rows + token) * plan.out_features + feature
    for i, value in enumerate(sums):
        next_token, next_feature = 8 * (i // 4) + i % 2, 8 * (i // 2 % 2)
        inside = feature + next_feature < plan.out_features
        if plan.rows % tokens:
            inside = inside & (token + next_token < plan.rows)
        w.store_at(a.out, offset, next_token * plan.out_features + next_feature, value, a.out_dtype, inside)


def store_lines(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """The same through shared memory, where a warpgroup's 64 features of a token become 128 neighbouring bytes."""
    tokens = plan.schedule.tokens
    buffer = w.warp // 4 * plan.lines_bytes + plan.lines_start
    # Rows of 8 x 8 matrices are tokens: lanes 0-7 point to those of the strip's first 8 features, 8-15 to the others.
    mine = buffer + w.lane % 8 * LINE + w.lane // 8 % 2 * 16 + w.warp % 4 * (2 * STRIP)
    thread = w.thread % 128
    feature = (part.first_strip + strip - w.warp % 4) * STRIP + thread % 8 * 8
    for first in range(0, tokens, LINES):
        count = min(LINES, tokens - first)
        for block in range(count // 8):
            values = sums[(first + 8 * block) // 2 :][:4]
            words = [w.pack(values[i], values[i + 1], a.out_dtype) for i in (0, 2)]
            w.store_transposed(mine, block * 8 * LINE, words)
        w.warpgroup_barrier()
        for piece in range(0, count * 8, 128):
            within = thread // 8 + piece // 8
            token = part.token_tile * tokens + first + within
            inside = (feature < plan.out_features) & (token < plan.rows) & (within < count)
            # Past the last token there are lines of other tokens, or of none: read, but not written.
            words = w.shared_words(buffer + thread // 8 * LINE + thread % 8 * 16, piece // 8 * LINE)
            w.store_words(a.out, token * plan.out_features + feature, words, inside)
        w.warpgroup_barrier()


# Jitted, so that a model's equal products share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("schedule", "out_dtype"))
def int4_matmul(x: jax.Array, weight: Packed, *, schedule: WideSchedule, out_dtype: jnp.dtype) -> jax.Array:
    """x [rows, in_features] bf16 times a weight of the mosaic layout -> [rows, out_features]."""
    partial = partial_sums(x, weight, schedule=schedule, out_dtype=out_dtype)
    # Written as a chain of additions, XLA makes it part of the next elementwise operation.
    return functools.reduce(operator.add, list(partial)).astype(out_dtype)


def partial_sums(x: jax.Array, weight: Packed, *, schedule: WideSchedule, out_dtype: jnp.dtype) -> jax.Array:
    """The same before the last addition: [slices, rows, out_features], float32 unless there is only one slice."""
    plan = WidePlan.of(x.shape[0], weight, schedule)
    dtype = jnp.dtype(jnp.float32) if schedule.slices > 1 else jnp.dtype(out_dtype)
    arrays = [*arrays_of(weight), x if schedule.plain else arrange(x, plan)]
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            *inputs, image, out, shared, cluster, rank = values
            arguments = arguments_of(
                weight,
                weights=Weights.of(weight, inputs),
                x=boxes_of(ctx, image, (plan.box_tokens, BOX)) if schedule.plain else image,
                out=out,
                out_dtype=str(dtype),
            )
            w = WideWarp(shared)
            multiply(w, plan, arguments, w.scalar(cluster), w.scalar(rank))

        # The next kernel may be brought onto the card already; it waits for this one's end, as this one does before.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        emit(*refs, lax.axis_index("cluster"), lax.axis_index("rank") if plan.cluster_blocks > 1 else jnp.int32(0))

    clusters = {"cluster": (plan.cluster_blocks,), "cluster_names": ("rank",)} if plan.cluster_blocks > 1 else {}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((schedule.slices, plan.rows, plan.out_features), dtype),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        num_threads=schedule.warpgroups + PRODUCERS // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="int4_matmul_wide",
        **clusters,
    )(*arrays)
