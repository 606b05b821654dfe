"""How a warp's weights of both products come into its registers: all asked for at once, each lane its own.

A packed weight lies in the order in which lanes multiply it, so that nothing needs to go through shared memory.
Asynchronous copies into it keep all warps busy at 35 bytes a clock, and x waits behind them; bulk copies come later.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.operands import bias_of
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.strip import Arguments, Factors

type Strip = tuple[list[Sequence[Any]], list[Factors]]
"""Words by tile, and factors by segment."""
WORDS = 256
"""16-bit elements of a tile."""


class Weights:
    """A warp's `count` strips, from tile `first_tile` on; those from number `half` on lie `skipped` strips further."""

    def __init__(
        self, w: Any, plan: Plan, a: Arguments, first_strip: Any, first_tile: Any, count: int, half: int, skipped: int
    ):
        """Starts the loads."""
        self._w, self._plan, self._a = w, plan, a
        strips = [strip if strip < half else strip + skipped for strip in range(count)]
        words = (first_strip * plan.column_tiles + first_tile) * WORDS + w.lane * 8
        self._words = [
            [
                w.load_words(a.weights.words, words, 4, None, (strip * plan.column_tiles + tile) * WORDS)
                for tile in range(plan.warp_tiles)
            ]
            for strip in strips
        ]
        group = first_tile // (plan.segment // 64) if plan.segment > 64 else first_tile * (64 // plan.segment)
        place = (first_strip * plan.groups + group) * STRIP + w.lane // 4 * 2
        places = [[(strip * plan.groups + i) * STRIP for i in range(plan.segments)] for strip in strips]

        def pairs(array: Any, dtype: str) -> list[list[Any]]:
            return [[w.load_pair(array, place, dtype, constant) for constant in row] for row in places]

        self._scales = pairs(a.weights.scales, a.scale_dtype)
        self._offsets = None if a.offset_dtype is None else pairs(a.weights.offsets, a.offset_dtype)

    def strips(self, code_bias: float) -> list[Strip]:
        """What has come; codes are `code_bias` + code where they are multiplied."""
        return [(self._words[i], self._factors(i, code_bias)) for i in range(len(self._words))]

    def _factors(self, strip: int, code_bias: float) -> list[Factors]:
        w, a, factors = self._w, self._a, []
        for segment, pair in enumerate(self._scales[strip]):
            scale, offset = w.pair_numbers(pair, a.scale_dtype), None
            if self._offsets is not None:
                offset = w.pair_numbers(self._offsets[strip][segment], a.offset_dtype)
            factors.append((scale, bias_of(w, self._plan, a.kind, code_bias, scale, offset)))
        return factors


def gate_weights(w: Any, plan: GatedPlan, a: Arguments, block: Any) -> Weights:
    """A block's strips: gates of some features, then as many others of the same features; a warp has its inputs."""
    own, half = plan.gate_up, plan.strips // 2
    first_tile = w.warp * own.warp_tiles
    return Weights(w, own, a, block * half, first_tile, plan.strips, half, own.strips // 2 - half)


class DownWeights(Weights):
    """A warp's strips of the second product, of the cluster's features; all warps have some, or the last have none."""

    def __init__(self, w: Any, plan: GatedPlan, a: Arguments, block: Any):
        own, each = plan.down, plan.down.schedule.strips
        self.mine = w.warp * each < plan.down_strips
        place = w.select(self.mine, w.warp, w.integer(0)) * each
        self.first_strip = block % plan.cluster * plan.down_strips + place
        super().__init__(w, own, a, self.first_strip, block // plan.cluster * own.tiles_each, each, each, 0)
