"""What the fetching warps of the kernel for many rows do: x by bulk copies, the rest by asynchronous ones."""

from typing import Any

from pallas_kernels.int4_matmul.mosaic import Arguments
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.wide_natural import fetch_tokens
from pallas_kernels.int4_matmul.wide_plan import PRODUCERS, Part, WidePlan
from pallas_kernels.token_order import STAGE


def fetch(w: Any, plan: WidePlan, a: Arguments, part: Part, rank: Any, carry: Any) -> Any:
    """The fetching warps' work for one part."""
    schedule = plan.schedule
    thread = w.thread - 32 * plan.consumer_warps
    leader = thread < 1
    ragged = plan.result_strips % (plan.part_strips * plan.readers) != 0
    share = plan.x_bytes // plan.readers
    mine = rank * share if plan.readers > 1 else w.integer(0)

    def both(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a & b

    def words(step: Any, base: Any) -> None:
        chunks = plan.words_bytes // 16  # of a strip
        piece, strip = thread % chunks, part.first_strip + thread // chunks
        tile = step * (STAGE // COLUMNS) + piece // (plan.tile_bytes // 16)
        whole = None if plan.column_tiles % (STAGE // COLUMNS) == 0 else tile < plan.column_tiles
        offset = strip * (plan.column_tiles * plan.tile_bytes) + step * plan.words_bytes + piece * 16
        for i in range(0, plan.block_strips, PRODUCERS // chunks):
            result, of_weight = plan.strip_of(i)
            inside = both(whole, strip + result < plan.result_strips if ragged else None)
            source = offset + of_weight * plan.column_tiles * plan.tile_bytes
            place = plan.x_bytes + plan.words_bytes * i
            w.copy_or_clear(base + thread * 16, a.weights.words, source, inside, None, place)

    def rows(array: Any, itemsize: int, start: int, step: Any, base: Any) -> None:
        chunks = plan.segments * itemsize  # of a strip
        first_group = step * STAGE // plan.group_size
        for first in range(0, plan.block_strips * chunks, PRODUCERS):
            chunk = thread + first
            result, of_weight = plan.strip_of(chunk // chunks)
            strip, piece = part.first_strip + of_weight, chunk % chunks
            inside = part.first_strip + result < plan.result_strips if ragged else None
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
        following = next_empty(w, plan, slot, parity)
        w.expect_bytes(full, plan.x_bytes, leader)
        if schedule.natural:
            fetch_tokens(w, plan, a.x, part, rank, step, base, full, leader)
        else:
            source = (part.token_tile * plan.steps + step) * plan.x_bytes + mine
            w.copy_to_cluster(base + mine, a.x, source, share, full, plan.readers, leader)
        words(step, base)
        rows(a.weights.scales, plan.scale_bytes, plan.scales_start, step, base)
        if plan.offset_bytes:
            rows(a.weights.offsets, plan.offset_bytes, plan.offsets_start, step, base)
        w.arrive_when_copied(full)
        return following

    return w.loop(part.count, carry, stage)


def next_empty(w: Any, plan: WidePlan, slot: Any, parity: Any) -> tuple[Any, Any]:
    """Waits until the cluster has read what was in a slot; the slot that follows, and its parity."""
    w.barrier_wait(slot * 8 + plan.empty_barriers, parity)
    return after(w, plan, slot, parity)


def after(w: Any, plan: WidePlan, slot: Any, parity: Any) -> tuple[Any, Any]:
    """The slot that follows, and the parity of its phase."""
    last = w.integer(plan.schedule.stages - 1) <= slot
    return w.select(last, w.integer(0), slot + 1), w.select(last, w.integer(1) - parity, parity)
