"""How the Hopper INT4 kernel's weights travel from global to shared memory, several units ahead of their use.

Each warp has a ring of `plan.slots` units for itself and fills it by itself: weights need no barrier between warps. A
unit in the ring is the words [tile, strip, 512 bytes], then the scales and the offsets, [segment, unit_rows] each.
"""

import dataclasses
from typing import Any

from pallas_kernels.int4_matmul.plan import COLUMNS, PIECE_BYTES, Plan


@dataclasses.dataclass(frozen=True)
class Weights:
    """The packed weight's arrays in global memory; offsets may be None."""

    words: Any
    scales: Any
    offsets: Any


class Stream:
    """The units of one warp: `count` of them from `first_unit` on, its inputs from tile `first_tile` on."""

    def __init__(self, w: Any, plan: Plan, weights: Weights, first_unit: Any, count: Any, first_tile: Any):
        self.w, self.plan, self.weights = w, plan, weights
        self.first_unit, self.count, self.first_tile = first_unit, count, first_tile

    def begin(self) -> None:
        """Prepares the ring."""

    def start(self, index: Any, slot: Any) -> None:
        """Starts the copies of unit `index`, if there is one."""
        raise NotImplementedError

    def wait(self, slot: Any, parity: Any) -> None:
        """Waits for the oldest unit started, in `slot`; `parity` is that of how often the slot was used before."""
        raise NotImplementedError

    def after(self, slot: Any) -> Any:
        following = slot + 1
        return self.w.select(following < self.plan.slots, following, self.w.integer(0))

    def address(self, slot: Any) -> Any:
        """Where the unit in `slot` begins in shared memory."""
        return self.w.warp * self.plan.ring_bytes + slot * self.plan.unit_bytes

    def words_offset(self, unit: Any, t: int) -> Any:
        """Where the unit's words of the warp's tile t begin, in bytes.

        Strips of a tile are neighbours in memory, then tiles along the inputs, then rows of tiles. Past the last input
        the last tile is read again: x is zero there.
        """
        tile, strip = self.first_tile + t, unit * self.plan.schedule.strips
        tile = self.w.select(tile < self.plan.column_tiles, tile, self.w.integer(self.plan.column_tiles - 1))
        return (strip // 4 * self.plan.column_tiles + tile) * (4 * PIECE_BYTES) + strip % 4 * PIECE_BYTES

    def rows_offset(self, unit: Any, segment: Any, itemsize: int) -> Any:
        """Where the unit's scales (or offsets) for the warp's segment begin, in bytes."""
        plan = self.plan
        if plan.groups == 1:
            return unit * (plan.unit_rows * itemsize)
        group = (self.first_tile * COLUMNS + segment * plan.segment) // plan.group_size
        group = self.w.select(group < plan.groups, group, self.w.integer(plan.groups - 1))
        return (group * plan.padded_features + unit * plan.unit_rows) * itemsize

    def rows(self) -> list[tuple[Any, int, int]]:
        """(array, bytes of a number, place in the unit) of scales and offsets."""
        plan = self.plan
        scales = (self.weights.scales, plan.scale_bytes, plan.words_bytes)
        offsets = (self.weights.offsets, plan.offset_bytes, plan.words_bytes + plan.scales_bytes)
        return [scales, offsets] if plan.offset_bytes else [scales]


class AsyncStream(Stream):
    """Each lane copies 16 bytes at a time, and reads its own words back."""

    def start(self, index: Any, slot: Any) -> None:
        w, plan = self.w, self.plan
        unit, left, address = self.first_unit + index, index < self.count, self.address(slot)
        for t in range(plan.warp_tiles):
            offset = self.words_offset(unit, t) + w.lane * 16
            for j in range(plan.schedule.strips):
                to = (t * plan.schedule.strips + j) * PIECE_BYTES
                w.copy_async(address + w.lane * 16, self.weights.words, offset, left, to=to, source=j * PIECE_BYTES)
        for array, itemsize, place in self.rows():
            per_segment = plan.unit_rows * itemsize // 16
            chunks = plan.segments * per_segment
            for base in range(0, chunks, 32):
                chunk = w.lane + base
                offset = self.rows_offset(unit, chunk // per_segment, itemsize) + chunk % per_segment * 16
                w.copy_async(address + chunk * 16, array, offset, left & (chunk < chunks), to=place)
        w.copy_commit()

    def wait(self, slot: Any, parity: Any) -> None:
        del slot, parity
        self.w.copy_wait(self.plan.schedule.depth)
        self.w.warp_barrier()


class BulkStream(Stream):
    """One lane orders contiguous pieces from the copy engine; a barrier for each slot counts the bytes that arrive."""

    def barrier(self, slot: Any) -> Any:
        return (self.w.warp * self.plan.slots + slot) * 8 + self.plan.barriers_start

    def begin(self) -> None:
        one = self.w.one_lane()
        for slot in range(self.plan.slots):
            self.w.arrival_init(self.barrier(self.w.integer(slot)), one)
        self.w.arrival_init_fence()
        self.w.warp_barrier()

    def start(self, index: Any, slot: Any) -> None:
        self.w.when(index < self.count, lambda: self._order(self.first_unit + index, slot))

    def _order(self, unit: Any, slot: Any) -> None:
        w, plan, one = self.w, self.plan, self.w.one_lane()
        address, barrier = self.address(slot), self.barrier(slot)
        w.arrival_expect(barrier, plan.unit_bytes, one)
        piece = plan.schedule.strips * PIECE_BYTES
        for t in range(plan.warp_tiles):
            offset = self.words_offset(unit, t)
            w.copy_bulk(address + t * piece, self.weights.words, offset, piece, barrier, one)
        for array, itemsize, place in self.rows():
            size = plan.unit_rows * itemsize
            for segment in range(plan.segments):
                offset = self.rows_offset(unit, w.integer(segment), itemsize)
                w.copy_bulk(address + (place + segment * size), array, offset, size, barrier, one)

    def wait(self, slot: Any, parity: Any) -> None:
        self.w.arrival_wait(self.barrier(slot), parity)


def stream_of(w: Any, plan: Plan, weights: Weights, slice_: Any, block: Any) -> Stream:
    """The stream of one warp of a block; the blocks of a slice share its units evenly."""
    first_unit = block * plan.units // plan.blocks_per_slice
    count = (block + 1) * plan.units // plan.blocks_per_slice - first_unit
    first_tile = (slice_ * plan.schedule.warps + w.warp) * plan.warp_tiles
    kind = BulkStream if plan.schedule.bulk else AsyncStream
    return kind(w, plan, weights, first_unit, count, first_tile)
