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

    def fill(self) -> None:
        """One warp asks for them; a barrier of the cluster has to come before `arrived`."""
        w, plan, own = self.w, self.plan, self.plan.gate_up
        barriers = plan.barriers
        if self._norm is not None:
            nbytes = 4 * own.in_features
            _expect(w, barriers.norm, nbytes)
            w.copy_to_cluster(
                w.integer(own.norm_start), self._norm, w.integer(0), nbytes, _at(w, barriers.norm), 1, w.lane < 1
            )
        rows = _rows(own, self._weights, own.groups, own.column_tiles * own.tile_bytes)
        half = plan.strips // 2
        _expect(w, barriers.gates, sum(plan.strips * nbytes for _, nbytes in rows))
        place = 0
        for array, nbytes in rows:
            offset = (self._first + w.lane * (own.strips // 2)) * nbytes
            to = w.lane * (half * nbytes) + place
            w.copy_to_cluster(to, array, offset, half * nbytes, _at(w, barriers.gates), 1, w.lane < 2)
            place += plan.strips * nbytes

    def arrived(self) -> list[Places]:
        """Where a warp's inputs of each strip are, when all are there."""
        w, plan, own = self.w, self.plan, self.plan.gate_up
        w.barrier_wait(_at(w, plan.barriers.gates), w.integer(0))
        sizes = [nbytes for _, nbytes in _rows(own, self._weights, own.groups, own.column_tiles * own.tile_bytes)]
        mine = [own.words_bytes, own.scales_bytes, own.slot_bytes - own.offsets_start]
        return _places(w, range(plan.strips), plan.strips, sizes, 0, [w.warp * nbytes for nbytes in mine])


class DownWeights:
    """A block's strips of the second product, of the cluster's features. A warp has some, if there are enough."""

    def __init__(self, w: Any, plan: GatedPlan, weights: Weights, block: Any):
        self.w, self.plan, self._weights = w, plan, weights
        self._cluster, self._first = block // plan.cluster, block % plan.cluster * plan.down_strips
        each = plan.down.schedule.strips
        self.mine = w.warp * each < plan.down_strips
        self._place = w.select(self.mine, w.warp, w.integer(0)) * each
        self.first_strip = self._first + self._place

    def fill(self) -> None:
        """As of `GateWeights`."""
        w, plan = self.w, self.plan
        rows = self._of_cluster()
        _expect(w, plan.barriers.down, sum(plan.down_strips * nbytes for _, nbytes in rows))
        place = plan.down_start
        for array, nbytes in rows:
            for first in range(0, plan.down_strips, 32):
                strip = w.lane + first
                offset = ((self._first + strip) * plan.clusters + self._cluster) * nbytes
                inside = strip < plan.down_strips
                w.copy_to_cluster(strip * nbytes + place, array, offset, nbytes, _at(w, plan.barriers.down), 1, inside)
            place += plan.down_strips * nbytes

    def arrived(self) -> list[Places]:
        """Where the warp's strips are, when they are there."""
        w, plan = self.w, self.plan
        w.barrier_wait(_at(w, plan.barriers.down), w.integer(0))
        sizes = [nbytes for _, nbytes in self._of_cluster()]
        places = [self._place * nbytes for nbytes in sizes]
        return _places(w, range(plan.down.schedule.strips), plan.down_strips, sizes, plan.down_start, places)

    def _of_cluster(self) -> list[tuple[Any, int]]:
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


def _expect(w: Any, barrier: int, nbytes: int) -> None:
    w.barrier_init(_at(w, barrier), 1, w.lane < 1)
    w.barriers_ready()
    w.expect_bytes(_at(w, barrier), nbytes, w.lane < 1)
    w.warp_barrier()


def _at(w: Any, barrier: int) -> Any:
    return w.integer(barrier)
