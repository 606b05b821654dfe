"""x plus the slices that the product before it left, added once for a cluster of blocks.

Every block needs all of the sum. Reading all slices in every block would be most of what it reads, and from lines that
all blocks ask for at once. So each warp of a cluster adds up its own few inputs, and sends them to all blocks of the
cluster while the weights are on their way.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from pallas_kernels.int4_matmul.shared_rows import Rows, row_bytes

FOUR = 4
"""Inputs of a token that a lane has."""
LANES_BYTES = 32 * 4 * FOUR
"""Of a warp's numbers of a slice."""


@dataclasses.dataclass(frozen=True)
class SumPlan:
    """`features` inputs of `rows` tokens, for clusters of `cluster` blocks of `warps` warps.

    The sums go to byte `start` of each block's shared memory on; `barrier` is where their bytes are counted, and
    `fetched` where a `FetchedSum` has what it adds.
    """

    rows: int
    features: int
    slices: int
    cluster: int
    warps: int
    start: int
    barrier: int
    fetched: int | None = None

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

    @property
    def turns(self) -> int:
        """Slices of the same four inputs that a lane has."""
        return -(-self.slices // self.sharers)

    @property
    def fetched_bytes(self) -> int:
        """Of a warp, where it fetches what it adds into shared memory: a lane's slices, then the inputs."""
        return self.rows * (self.turns * LANES_BYTES + max(16, 2 * self.of_warp))

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
        """Opens the inbox; all warps' `cluster_arrive` and `cluster_wait` come before `send`."""
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
        self._ask(x, addend.partial)

    def _ask(self, x: Any, partial: Any) -> None:
        self._numbers = [self._of_row(x, partial, row) for row in range(self.plan.rows)]

    def _came(self) -> None:
        """Waits for what was asked for."""

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
        self._came()
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
            for first in range(0, plan.cluster, plan.sharers):
                block = self._sharer + first
                there = None if first + plan.sharers <= plan.cluster else block < plan.cluster
                block = block if there is None else w.select(there, block, w.integer(0))
                w.send_words(place, pairs, block, plan.barrier, there)
            w.store_words(self._total, self._column + row * plan.features, pairs, self._writes)

    def arrived(self) -> Rows:
        """Waits for the inputs that this warp multiplies."""
        self.w.wait_sent(self.plan.barrier)
        return self.plan.rows_in_shared


class FetchedSum(ClusterSum):
    """What is added comes by asynchronous copies into shared memory, `plan.fetched` on.

    A warp has six counters of loads, of which ptxas gives one to all loads that are used behind a branch: what is added
    would be waited for together with all weights. `later`: groups of copies that follow.
    """

    def __init__(self, w: Any, addend: Addend, x: Any, block: Any, *, later: int):
        super().__init__(w, addend, x, block)
        self._later = later

    def _ask(self, x: Any, partial: Any) -> None:
        w, plan = self.w, self.plan
        assert plan.fetched is not None
        start = w.warp * plan.fetched_bytes + plan.fetched
        own, mine = start + w.lane * 16, w.lane < plan.fours
        inputs = start + w.lane % plan.fours * 8
        per_row, true = plan.turns * LANES_BYTES, w.lane < 32
        for row in range(plan.rows):
            place = self._column + row * plan.features
            to = row * per_row
            for turn in range(plan.turns):
                first = turn * plan.sharers
                offset = (self._sharer + first) * (plan.rows * plan.features) + place
                inside = None if first + plan.sharers <= plan.slices else self._sharer + first < plan.slices
                offset = offset if inside is None else w.select(inside, offset, place)
                w.copy_async(own, partial, offset * 4, true, to=to + turn * LANES_BYTES, inside=inside)
            w.copy_async(inputs, x, place * 2, mine, to=self._inputs(row), nbytes=8)
        w.copy_commit()
        self._own, self._words = own, inputs

    def _inputs(self, row: int) -> int:
        return self.plan.rows * self.plan.turns * LANES_BYTES + row * max(16, 2 * self.plan.of_warp)

    def _came(self) -> None:
        w, plan = self.w, self.plan
        w.copy_wait(self._later)
        w.warp_barrier()
        self._numbers = []
        for row in range(plan.rows):
            places = [(row * plan.turns + turn) * LANES_BYTES for turn in range(plan.turns)]
            slices = [tuple(map(w.as_number, w.shared_words(self._own, place))) for place in places]
            self._numbers.append((w.shared_words(self._words, self._inputs(row), 2), slices))
