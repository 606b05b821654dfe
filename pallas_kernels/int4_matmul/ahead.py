"""What a kernel for few rows asks the L2 cache to have of the next product's weight.

Memory idles while a kernel ends, and while the next one waits for its x. So once a block has asked for its own last
strip, it asks L2 for what blocks of the next product will read first. That has no effect on any result.
"""

import dataclasses
from typing import Any

from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.stream import Weights


@dataclasses.dataclass(frozen=True)
class Next:
    """The next product's plan, and the first strips of each of its blocks that L2 should have.

    `at_once`: they are asked for behind the strips that are asked for early, not behind a block's last one.
    """

    plan: Plan
    strips: int
    at_once: bool = False

    @property
    def strip_bytes(self) -> int:
        """A block's codes of a strip."""
        return self.plan.schedule.warps * self.plan.words_bytes


@dataclasses.dataclass(frozen=True)
class Ahead:
    """`Next` and its codes in global memory."""

    next: Next
    words: Any

    def after(self, w: Any, plan: Plan, stream: Any, slice_: Any, block: Any, index: Any) -> None:
        """In a block's turn `index`: asks for its share, if this is the turn that asks for its last strip."""
        depth = w.integer(plan.schedule.depth)
        last = w.select(depth < stream.count, stream.count - depth, w.integer(0))
        w.when((index < last + 1) & (last < index + 1), lambda: self.ask(w, plan, slice_, block))

    def ask(self, w: Any, plan: Plan, slice_: Any, block: Any) -> None:
        """Asks for this block's share."""
        first, blocks = slice_ * plan.blocks_per_slice + block, plan.slices * plan.blocks_per_slice
        others = self.next.plan.slices * self.next.plan.blocks_per_slice
        for base in range(0, others, blocks):
            self._ask_for(w, plan.schedule.warps, first + base, first + base < others)

    def _ask_for(self, w: Any, warps: int, other: Any, inside: Any) -> None:
        """The first strips of the next product's block `other`, a piece of each by every warp's first lane."""
        plan = self.next.plan
        slice_, block = other // plan.blocks_per_slice, other % plan.blocks_per_slice
        first = block * plan.result_strips // plan.blocks_per_slice
        piece = self.next.strip_bytes // warps
        stride = plan.column_tiles * plan.tile_bytes
        for strip in range(self.next.strips):
            strip = strip // plan.strip_parts + strip % plan.strip_parts * plan.result_strips
            place = (first + strip) * stride + slice_ * self.next.strip_bytes + w.warp * piece
            w.prefetch(self.words, place, piece, inside & (w.lane < 1))


TEAM = 4
"""Warps whose words, scales and offsets of a strip are contiguous each, and asked for by one of them."""


def hint(w: Any, plan: Plan, weights: Weights, slice_: Any, stream: Any, strip: int) -> None:
    """Asks L2 for a block's words, scales and offsets of strip `strip` of its own. Needs `plan.even`."""
    team = slice_ * (plan.schedule.warps // TEAM) + w.warp // TEAM
    one = (w.warp % TEAM < 1) & (w.lane < 1) & (w.integer(strip) < stream.count)
    place = stream.first_strip + strip // plan.strip_parts + strip % plan.strip_parts * plan.result_strips
    arrays = [(weights.words, plan.column_tiles * plan.tile_bytes, plan.words_bytes)]
    for array, itemsize in ((weights.scales, plan.scale_bytes), (weights.offsets, plan.offset_bytes)):
        if itemsize:
            size = STRIP * itemsize
            arrays.append((array, plan.groups * size, plan.segments * size))
    if plan.schedule.pace:
        one = w.lane < 1
        inside = one & (w.integer(strip) < stream.count)
        for array, stride, nbytes in arrays:
            w.prefetch(array, place * stride + (slice_ * plan.schedule.warps + w.warp) * nbytes, nbytes, inside)
        return
    for array, stride, nbytes in arrays:
        w.prefetch(array, place * stride + team * (TEAM * nbytes), TEAM * nbytes, one)
