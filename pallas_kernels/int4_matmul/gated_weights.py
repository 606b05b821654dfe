"""How a block's weights of both products come into shared memory: all at once, by bulk copies.

A strip of gate or of up is as long as the inputs, so that a block's lie in two pieces; of its strips of down it takes
the cluster's inputs. A few lanes ask for everything: asynchronous copies of 16 bytes keep all warps busy, at 35 bytes a
clock, and x would wait behind them.
"""

from typing import Any

from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.stream import Places, Weights


class GateWeights:
    """A block's strips: gates of some features, then as many others of the same features. And the norm's weights."""

    def __init__(self, w: Any, plan: GatedPlan, weights: Weights, norm: Any, block: Any):
        self.w, self.plan, self._weights, self._norm = w, plan, weights, norm
        self._first = block * (plan.strips // 2)

    def expect(self) -> None:
        """Opens the barriers, before `fill`, with a barrier of the block between."""
        w, plan = self.w, self.plan
        if self._norm is not None:
            w.expect_sent(plan.barriers.norm, 4 * plan.gate_up.in_features)
        w.expect_sent(plan.barriers.gates, sum(plan.strips * nbytes for _, nbytes in self._rows()))

    def fill(self) -> None:
        """Asks for the block's strips, a warp for each piece: half of an array's, or the norm's weights."""
        w, plan, own = self.w, self.plan, self.plan.gate_up
        half, copies, place = plan.strips // 2, [], 0
        for array, nbytes in self._rows():
            for part in range(2):
                offset = (self._first + part * (own.strips // 2)) * nbytes
                copies.append((place, array, offset, half * nbytes, plan.barriers.gates))
                place += half * nbytes
        if self._norm is not None:
            copies.append((own.norm_start, self._norm, w.integer(0), 4 * own.in_features, plan.barriers.norm))
        for i, (to, array, offset, nbytes, barrier) in enumerate(copies):

            def copy(
                to: int = to, array: Any = array, offset: Any = offset, size: int = nbytes, at: int = barrier
            ) -> None:
                w.copy_to_cluster(w.integer(to), array, offset, size, w.integer(at), 1, w.lane < 1)

            turn = i % plan.warps
            w.when((w.integer(turn - 1) < w.warp) & (w.warp < turn + 1), copy)

    def arrived(self) -> list[Places]:
        """Where a warp's inputs of each strip are, when all are there."""
        w, plan, own = self.w, self.plan, self.plan.gate_up
        w.barrier_wait(w.integer(plan.barriers.gates), w.integer(0))
        sizes = [nbytes for _, nbytes in self._rows()]
        mine = [own.words_bytes, own.scales_bytes, own.slot_bytes - own.offsets_start]
        return _places(w, range(plan.strips), plan.strips, sizes, 0, [w.warp * nbytes for nbytes in mine])

    def _rows(self) -> list[tuple[Any, int]]:
        own = self.plan.gate_up
        return _rows(own, self._weights, own.groups, own.column_tiles * own.tile_bytes)


class DownWeights:
    """A block's strips of the second product, of the cluster's features. A warp has some, if there are enough."""

    def __init__(self, w: Any, plan: GatedPlan, weights: Weights, block: Any):
        self.w, self.plan, self._weights = w, plan, weights
        self._cluster, each = block // plan.cluster, plan.down.schedule.strips
        self.mine = w.warp * each < plan.down_strips
        self._place = w.select(self.mine, w.warp, w.integer(0)) * each
        self.first_strip = block % plan.cluster * plan.down_strips + self._place

    def expect(self) -> None:
        """As of `GateWeights`."""
        rows = self._rows()
        self.w.expect_sent(self.plan.barriers.down, sum(self.plan.down_strips * nbytes for _, nbytes in rows))

    def fill(self) -> None:
        """Asks for the warp's strips."""
        w, plan = self.w, self.plan
        barrier, begin = w.integer(plan.barriers.down), plan.down_start
        for array, nbytes in self._rows():
            for strip in range(plan.down.schedule.strips):
                offset = ((self.first_strip + strip) * plan.clusters + self._cluster) * nbytes
                to = (self._place + strip) * nbytes + begin
                w.copy_to_cluster(to, array, offset, nbytes, barrier, 1, self.mine & (w.lane < 1))
            begin += plan.down_strips * nbytes

    def arrived(self) -> list[Places]:
        """Where the warp's strips are, when they are there."""
        w, plan = self.w, self.plan
        w.barrier_wait(w.integer(plan.barriers.down), w.integer(0))
        sizes = [nbytes for _, nbytes in self._rows()]
        places = [self._place * nbytes for nbytes in sizes]
        return _places(w, range(plan.down.schedule.strips), plan.down_strips, sizes, plan.down_start, places)

    def _rows(self) -> list[tuple[Any, int]]:
        own = self.plan.down
        return _rows(own, self._weights, own.warp_columns // own.segment, own.words_bytes)


def _rows(plan: Plan, weights: Weights, groups: int, words: int) -> list[tuple[Any, int]]:
    """Words, scales and offsets, and the bytes of a strip's."""
    rows = [(weights.words, words), (weights.scales, groups * STRIP * plan.scale_bytes)]
    return rows + ([(weights.offsets, groups * STRIP * plan.offset_bytes)] if plan.offset_bytes else [])


def _places(w: Any, which: range, strips: int, sizes: list[int], start: int, inside: list[Any]) -> list[Places]:
    """Of some of `strips` strips that lie one behind the other in each array, at `inside` each."""
    places = []
    for strip in which:
        found, begin = [], start
        for nbytes, place in zip(sizes, inside, strict=False):
            found.append(place + (strip * nbytes + begin))
            begin += strips * nbytes
        places.append(Places(*found, *[w.integer(0)] * (3 - len(found))))
    return places
