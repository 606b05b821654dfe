"""x plus the slices that the product before it left, added once for a cluster of blocks, or in each block.

Every block needs all of the sum. Where there are many slices, reading all of them in every block would be most of what
it reads: then each warp of a cluster adds up its own few inputs, and sends them to all blocks of the cluster while the
weights are on their way. Where there are few, each warp adds up the inputs that it multiplies itself.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from pallas_kernels.int4_matmul.shared_rows import Rows, row_bytes

FOUR = 4
"""Inputs of a token that a lane has."""


@dataclasses.dataclass(frozen=True)
class SumPlan:
    """`features` inputs of `rows` tokens, for clusters of `cluster` blocks of `warps` warps (1: each block for itself).

    The sums go to byte `start` of each block's shared memory on; `barrier` is where their bytes are counted.
    """

    rows: int
    features: int
    slices: int
    cluster: int
    warps: int
    start: int
    barrier: int

    @property
    def of_warp(self) -> int:
        """Inputs of a warp."""
        return self.features // (self.cluster * self.warps)

    @property
    def fours(self) -> int:
        return self.of_warp // FOUR

    @property
    def sharers(self) -> int:
        """Lanes that share the slices of the same four inputs, and afterwards the blocks that want them."""
        return 32 // self.fours

    @property
    def rows_in_shared(self) -> Rows:
        return Rows.at(self.start, self.features)

    @staticmethod
    def nbytes(rows: int, features: int) -> int:
        """Of shared memory."""
        return rows * row_bytes(features)

    @staticmethod
    def refusal(features: int, cluster: int, warps: int) -> str | None:
        """Why the inputs cannot be shared out so; None if they can."""
        unit = FOUR * cluster * warps
        if features % unit or 32 % (features // unit):
            return f"{features} inputs are not a power of two (up to 32) times {unit}"
        return None


class Addend(NamedTuple):
    """What is to be added to x: `partial` float32 [slices, rows, features]; the sum goes to `total`, as x is."""

    plan: SumPlan
    partial: Any
    total: Any

    def expect(self, w: Any, warp: int = 0) -> None:
        """Opens the inbox, if one is needed; all warps' `cluster_arrive` and `cluster_wait` come before `send`."""
        if self.plan.cluster > 1:
            w.expect_sent(self.plan.barrier, 2 * self.plan.rows * self.plan.features, warp)


class ClusterSum:
    """The sum of one cluster, as its warps see it. `block` counts all blocks, those of a cluster one by one."""

    def __init__(self, w: Any, addend: Addend, x: Any, block: Any):
        """Asks for this warp's numbers. x is bfloat16 [rows, features]."""
        self.w, self.plan, self._total = w, addend.plan, addend.total
        plan = self.plan
        self._sharer = w.lane // plan.fours
        self._column = (block % plan.cluster * plan.warps + w.warp) * plan.of_warp + w.lane % plan.fours * FOUR
        self._writes = (block < plan.cluster) & (self._sharer < 1)
        self._numbers = [self._of_row(x, addend.partial, row) for row in range(plan.rows)]

    def _of_row(self, x: Any, partial: Any, row: int) -> tuple[Any, list[Any]]:
        """Words of x, and four numbers of each of the lane's slices."""
        w, plan = self.w, self.plan
        place, slices = self._column + row * plan.features, []
        for first in range(0, plan.slices, plan.sharers):
            inside = None if first + plan.sharers <= plan.slices else self._sharer + first < plan.slices
            offset = (self._sharer + first) * (plan.rows * plan.features) + place
            slices.append(w.load_four(partial, offset if inside is None else w.select(inside, offset, place), inside))
        return w.load_words(x, place, 2, None), slices

    def send(self) -> None:
        """Adds up, in an order that is always the same, and sends; the first cluster writes the sum."""
        w, plan = self.w, self.plan
        for row, (words, slices) in enumerate(self._numbers):
            total = list(slices[0])
            for more in slices[1:]:
                total = [a + b for a, b in zip(total, more, strict=True)]
            for bit in range(int(math.log2(plan.sharers))):
                total = [a + w.shuffle_xor(a, plan.fours << bit) for a in total]
            numbers = [number for word in words for number in w.numbers_of(word)]
            sums = [a + b for a, b in zip(numbers, total, strict=True)]
            pairs = [w.pair(*sums[i : i + 2]) for i in (0, 2)]
            rows = plan.rows_in_shared
            place = self._column * 2 + (rows.start + row * rows.stride)
            if plan.cluster == 1:
                w.shared_store_words(place, pairs)
            for first in range(0, plan.cluster if plan.cluster > 1 else 0, plan.sharers):
                block = self._sharer + first
                there = None if first + plan.sharers <= plan.cluster else block < plan.cluster
                block = block if there is None else w.select(there, block, w.integer(0))
                w.send_words(place, pairs, block, plan.barrier, there)
            w.store_words(self._total, self._column + row * plan.features, pairs, self._writes)

    def arrived(self) -> Rows:
        """Waits for the inputs that this warp multiplies."""
        if self.plan.cluster > 1:
            self.w.wait_sent(self.plan.barrier)
        else:
            self.w.warp_barrier()
        return self.plan.rows_in_shared
