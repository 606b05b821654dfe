"""How a warp's weights of both products come to it: all asked for at once, each lane its own.

A packed weight lies in the order in which lanes multiply it. Those of the first product go straight into registers,
those of the second wait in shared memory: loads of both would be waited for together.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.operands import bias_of
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, Plan
from pallas_kernels.int4_matmul.strip import Arguments, Factors

WORDS = 256
"""16-bit elements of a tile."""


class RowFactors:
    """Scales and offsets of a lane's two rows of some strips, by segment of the warp's inputs from `first_tile` on."""

    def __init__(self, w: Any, plan: Plan, a: Arguments, strips: Sequence[Any], first_tile: Any):
        """Starts the loads."""
        self._w, self._plan, self._a = w, plan, a
        group = first_tile // (plan.segment // 64) if plan.segment > 64 else first_tile * (64 // plan.segment)
        places = [(strip * plan.groups + group) * STRIP + w.lane // 4 * 2 for strip in strips]

        def pairs(array: Any, dtype: str) -> list[list[Any]]:
            return [[w.load_pair(array, place, dtype, i * STRIP) for i in range(plan.segments)] for place in places]

        self._scales = pairs(a.weights.scales, a.scale_dtype)
        self._offsets = None if a.offset_dtype is None else pairs(a.weights.offsets, a.offset_dtype)

    def of(self, strip: int, code_bias: float) -> list[Factors]:
        """What has come; codes are `code_bias` + code where they are multiplied."""
        w, a, factors = self._w, self._a, []
        for segment, pair in enumerate(self._scales[strip]):
            scale, offset = w.pair_numbers(pair, a.scale_dtype), None
            if self._offsets is not None:
                offset = w.pair_numbers(self._offsets[strip][segment], a.offset_dtype)
            factors.append((scale, bias_of(w, self._plan, a.kind, code_bias, scale, offset)))
        return factors


class GateWeights:
    """A block's strips: gates of some features, then as many others of the same features; a warp has its inputs.

    All lanes have words of all strips. Of each `sharers` strips, a lane has scales and offsets of one.
    """

    def __init__(self, w: Any, plan: GatedPlan, a: Arguments, block: Any, sharers: int):
        """Starts the loads."""
        own, half = plan.gate_up, plan.strips // 2
        first_strip, first_tile, skipped = block * half, w.warp * own.warp_tiles, own.strips // 2 - half
        words = (first_strip * own.column_tiles + first_tile) * WORDS + w.lane * 8
        share, mine = w.lane % sharers, []
        for start in range(0, plan.strips, sharers):
            strip = share + start
            mine.append(first_strip + w.select(strip < half, strip, strip + skipped))
        self._factors = RowFactors(w, own, a, mine, first_tile)
        strips = [strip if strip < half else strip + skipped for strip in range(plan.strips)]
        self.words = [
            [
                w.load_words(a.weights.words, words, 4, None, (strip * own.column_tiles + tile) * WORDS)
                for tile in range(own.warp_tiles)
            ]
            for strip in strips
        ]
        self._count = len(mine)

    def factors(self, code_bias: float) -> list[list[Factors]]:
        return [self._factors.of(i, code_bias) for i in range(self._count)]


class DownWeights:
    """A warp's strips of the second product, of the cluster's features; all warps have some, or the last have none."""

    def __init__(self, w: Any, plan: GatedPlan, a: Arguments, block: Any):
        """Starts the copies, a group."""
        self._w, self._plan, own = w, plan, plan.down
        self._each = each = own.schedule.strips
        self.mine = w.warp * each < plan.down_strips
        place = w.select(self.mine, w.warp, w.integer(0)) * each
        self.first_strip = block % plan.cluster * plan.down_strips + place
        first_tile = block // plan.cluster * own.tiles_each
        strips = [self.first_strip + i for i in range(each)]
        self._factors = RowFactors(w, own, a, strips, first_tile)
        self._start = w.warp * plan.later_bytes + (w.lane * 16 + plan.later_start)
        all_lanes = w.lane < 32
        for i, strip in enumerate(strips):
            words = (strip * own.column_tiles + first_tile) * PIECE_BYTES + w.lane * 16
            for tile in range(own.warp_tiles):
                to, source = (i * own.warp_tiles + tile) * PIECE_BYTES, tile * PIECE_BYTES
                w.copy_async(self._start, a.weights.words, words, all_lanes, to=to, source=source)
        w.copy_commit()

    def read(self, code_bias: float) -> list[tuple[list[Sequence[Any]], list[Factors]]]:
        """Each strip's words by tile, and factors by segment, when they have come."""
        w, tiles = self._w, self._plan.down.warp_tiles
        w.copy_wait(0)
        return [
            (
                [w.shared_words(self._start, (i * tiles + tile) * PIECE_BYTES) for tile in range(tiles)],
                self._factors.of(i, code_bias),
            )
            for i in range(self._each)
        ]
