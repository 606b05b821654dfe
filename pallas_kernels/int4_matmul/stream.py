"""How the Hopper INT4 kernel's weights travel from global to shared memory, several strips ahead of their use.

A stage of the ring holds what a block needs of one strip: the words [tile, 512 bytes], the scales and the offsets
[group, 16]. Each of the three is one piece in global memory, so one thread asks for it by a bulk copy, and an mbarrier
for each stage says when all have arrived. A stage is free once all warps have passed the block barrier that follows
their last read of it; the same barrier is behind the addition of the warps' sums, so it costs nothing more.
"""

import dataclasses
from typing import Any

from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.plan import BARRIER_BYTES, PIECE_BYTES, Plan


@dataclasses.dataclass(frozen=True)
class Weights:
    """The packed weight's arrays in global memory; offsets may be None."""

    words: Any
    scales: Any
    offsets: Any


class Stream:
    """The strips of one block: `count` of them from `first_strip` on, this warp's inputs from tile `first_tile` on."""

    def __init__(self, w: Any, plan: Plan, weights: Weights, slice_: Any, block: Any):
        """The blocks of a slice share its strips evenly."""
        self.w, self.plan, self.weights = w, plan, weights
        self.first_strip = block * plan.strips // plan.blocks_per_slice
        self.count = (block + 1) * plan.strips // plan.blocks_per_slice - self.first_strip
        self._slice_tile = slice_ * plan.slice_tiles
        self.first_tile = self._slice_tile + w.warp * plan.warp_tiles
        self._first_group = self._slice_tile * COLUMNS // plan.group_size
        tiles, groups = plan.slice_tiles, plan.slice_groups
        if plan.slices > 1:
            left = plan.column_tiles - self._slice_tile
            tiles = w.select(left < tiles, left, w.integer(tiles))
            left = plan.groups - self._first_group
            groups = w.select(left < groups, left, w.integer(groups))
        elif plan.ragged:
            tiles, groups = w.integer(plan.column_tiles), w.integer(plan.groups)
        else:
            tiles, groups = w.integer(tiles), w.integer(groups)
        self._tiles, self._groups = tiles, groups
        self._local_groups = self._outside_the_loop()

    def open(self) -> None:
        """Prepares the barriers and asks for the first strips. Others may wait after the next block barrier."""
        w, plan = self.w, self.plan

        def first() -> None:
            for stage in range(plan.schedule.depth):
                w.arrival_init(w.integer(stage * BARRIER_BYTES))
            w.arrival_fence()
            for stage in range(plan.schedule.depth):
                self._ask(w.integer(stage), w.integer(stage))

        w.one_thread(first)

    def refill(self, first: Any, strips: Any) -> None:
        """All warps have read `strips` strips from `first` on: asks for those that take their stages."""
        w, depth = self.w, self.plan.schedule.depth

        def again() -> None:
            for j in range(self.plan.schedule.strips):
                index = first + j

                def ask(index: Any = index) -> None:
                    self._ask(index + depth, index % depth)

                w.when(w.integer(j) < strips, ask)

        w.one_thread(again)

    def _ask(self, index: Any, stage: Any) -> None:
        """Starts the copies of strip `index`, if there is one."""
        w, plan = self.w, self.plan
        arrived = stage * BARRIER_BYTES
        place = stage * plan.stage_bytes + plan.ring_start
        strip = self.first_strip + index
        pieces = [(self.weights.words, plan.column_tiles, self._slice_tile, self._tiles, PIECE_BYTES, 0)]
        rows = [(self.weights.scales, plan.scale_bytes, plan.words_bytes)]
        if plan.offset_bytes:
            rows.append((self.weights.offsets, plan.offset_bytes, plan.offsets_start))
        pieces += [(a, plan.groups, self._first_group, self._groups, STRIP * size, to) for a, size, to in rows]

        def ask() -> None:
            total = sum((number * size for _, _, _, number, size, _ in pieces), w.integer(0))
            w.arrival_expect(arrived, total)
            for array, per_strip, first, number, size, to in pieces:
                w.bulk_copy(place + to, array, (strip * per_strip + first) * size, number * size, arrived)

        w.when(index < self.count, ask)

    def wait(self, stage: Any, parity: Any) -> None:
        """Waits for the strip in `stage`; `parity` is that of the times the stage has been used before."""
        self.w.arrival_wait(stage * BARRIER_BYTES, parity)

    def words(self, stage: Any) -> list[Any]:
        """Four words for each of the warp's tiles."""
        w, plan = self.w, self.plan
        base = stage * plan.stage_bytes + w.warp * (plan.warp_tiles * PIECE_BYTES) + w.lane * 16
        return [w.shared_words(base, plan.ring_start + t * PIECE_BYTES) for t in range(plan.warp_tiles)]

    def pair(self, stage: Any, segment: int, dtype: str, *, offsets: bool = False) -> Any:
        """Scales or offsets of this lane's two rows for a segment of the warp's inputs."""
        w, plan = self.w, self.plan
        itemsize = plan.offset_bytes if offsets else plan.scale_bytes
        start = plan.ring_start + (plan.offsets_start if offsets else plan.words_bytes)
        row = w.lane // 4 * (2 * itemsize) + stage * plan.stage_bytes
        if self._local_groups is not None:
            return w.shared_pair(row + self._local_groups[segment] * (STRIP * itemsize), dtype, start)
        group = w.warp * plan.segments
        if not plan.ragged:
            return w.shared_pair(row + group * (STRIP * itemsize), dtype, start + segment * STRIP * itemsize)
        # Past the last input the last group is read again: its scales are numbers.
        group = group + segment
        group = w.select(group < self._groups, group, self._groups - 1)
        return w.shared_pair(row + group * (STRIP * itemsize), dtype, start)

    def _outside_the_loop(self) -> list[Any] | None:
        """Each segment's group within the slice, where segments and groups are not the same thing."""
        w, plan = self.w, self.plan
        if plan.segment == plan.group_size:
            return None
        groups = []
        for segment in range(plan.segments):
            column = self.first_tile * COLUMNS + segment * plan.segment
            group = column // plan.group_size - self._first_group
            groups.append(w.select(group < self._groups, group, self._groups - 1))
        return groups
