"""The prefill kernel's multiplying warpgroups: softmax(Q K^T) V for 64 query rows each, over tiles of keys.

Sums of `wgmma` lie so in the 128 threads: lane 4 g + q of warp n holds rows 16 n + g and 16 n + g + 8, of every 8
columns 8 j the columns 8 j + 2 q and 8 j + 2 q + 1, in the order [j][row g, row g + 8][column]. Weights rounded to
bfloat16 are, pair by pair, the left operand of the second product as they lie.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.paged_prefill.parts import Arguments, Part, after
from pallas_kernels.paged_prefill.plan import PrefillPlan

LOG2_E = math.log2(math.e)
FAR = 1e30
"""Minus the maximum of nothing: finite, so that a row with no visible key yet never computes inf - inf."""
SLACK = 8.0
"""Powers of two."""


class Attend:
    """One warp's work on one part.

    The state of its two rows is (minus the reference logit, sum of weights, weighted values). Logits count powers of
    two.
    """

    def __init__(self, w: Any, plan: PrefillPlan, part: Part):
        self.w, self.plan, self.part = w, plan, part
        self.warpgroup = w.warp // 4
        self.quad = w.lane % 4
        first = part.first_row + w.warp * 16 + w.lane // 4
        self.rows = [first, first + 8]
        self.positions = [part.start + row // plan.group for row in self.rows]
        self.queries: list[Any] = []
        # With a soft-cap, logits are brought to powers of two before the maximum is taken.
        self.factor = 1.0 if plan.softcap is not None else plan.scale * LOG2_E

    def take_queries(self) -> None:
        """The left operands of Q K^T, one for each 16 elements: words of this lane, or descriptors."""
        w, plan = self.w, self.plan
        start = self.warpgroup * plan.query_bytes
        steps = [(slab, step) for slab in range(plan.slabs) for step in range(0, plan.swizzle, 32)]
        if not plan.queries_in_registers:
            matrix = w.matrix(start, 16, 8 * plan.swizzle, plan.swizzle)
            self.queries = [w.ahead(matrix, slab * 64 * plan.swizzle + step) for slab, step in steps]
            return
        line = (w.warp % 4 * 16 + w.lane // 4) * plan.swizzle
        swizzled = line // 128 % (plan.swizzle // 16)
        for slab, step in steps:
            words = []
            for half in range(2):  # the first and the last 8 elements, of rows g and g + 8
                address = start + line + w.either(swizzled, w.integer(step // 16 + half)) * 16 + self.quad * 4
                words += [w.shared_word(address, (slab * 64 + 8 * i) * plan.swizzle) for i in range(2)]
            self.queries.append(w.wgmma_fence(words))
        self.release("queries_empty", w.integer(0))

    def scores(self, slot: Any) -> Any:
        """Starts Q K^T of a tile."""
        w, plan = self.w, self.plan
        keys = w.matrix(slot * plan.tile_bytes + plan.keys_start, 16, 8 * plan.swizzle, plan.swizzle)
        sums = None
        for index, queries in enumerate(self.queries):
            slab, step = divmod(32 * index, plan.swizzle)
            right = w.ahead(keys, slab * plan.keys * plan.swizzle + step)
            sums = w.product(sums, queries, right, plan.keys, transposed=False)
        w.wgmma_commit()
        return sums

    def add_values(self, sums: Any, weights: Any, slot: Any) -> Any:
        """Starts sums + P V of a tile."""
        w, plan = self.w, self.plan
        start = slot * plan.tile_bytes + plan.values_start
        values = w.matrix(start, plan.keys * plan.swizzle, 8 * plan.swizzle, plan.swizzle)
        for step in range(plan.keys // 16):
            right = w.ahead(values, step * 16 * plan.swizzle)
            sums = w.product(sums, weights[4 * step : 4 * step + 4], right, plan.head_dim, transposed=True)
        w.wgmma_commit()
        return sums

    def capped(self, scores: Sequence[Any]) -> list[Any]:
        """softcap * tanh(score * scale / softcap) * log2(e), tanh x as 1 - 2 / (exp(2 x) + 1)."""
        w, plan = self.w, self.plan
        if plan.softcap is None:
            return list(scores)
        inner, outer = w.number(2 * LOG2_E * plan.scale / plan.softcap), plan.softcap * LOG2_E
        return [
            w.fma(w.reciprocal(w.exp2(score * inner) + 1.0), w.number(-2.0 * outer), w.number(outer))
            for score in scores
        ]

    def masked(self, scores: Sequence[Any], tile: Any) -> Sequence[Any]:
        """Scores of keys that a row must not see become -inf."""
        w, plan, part = self.w, self.plan, self.part
        lowest = w.number(-math.inf)

        def mask() -> list[Any]:
            # Counted from the lane's first key of the tile.
            origin = tile * plan.keys + self.quad * 2
            ends = [w.minimum(position + 1, part.length) - origin for position in self.positions]
            visible = []
            for i, score in enumerate(scores):
                key, row = w.integer(8 * (i // 4) + i % 2), i // 2 % 2
                seen = key < ends[row]
                if plan.window is not None:
                    seen = seen & (self.positions[row] - origin - plan.window < key)
                visible.append(w.select(seen, score, lowest))
            return visible

        needed = part.masked_from <= tile
        if plan.window is not None:
            needed = w.any(needed, tile < part.masked_before)
        return w.choose(needed, scores, mask)

    def weights(self, scores: Sequence[Any], tile: Any, lows: Any, sums: Any) -> tuple[Any, Any, Any, Any]:
        """Online softmax: the tile's weights, the new state, and what the old weighted values decay by.

        The reference that logits are taken from follows the maximum only when that has left it by `SLACK`: weights of
        up to 2^SLACK are as exact, and values in sums seldom have to be multiplied.
        """
        w, factor = self.w, self.w.number(self.factor)
        scores = self.masked(self.capped(scores), tile)
        before, lows = lows, []
        for row in range(2):
            peak = tree(w.maximum, [score for i, score in enumerate(scores) if i // 2 % 2 == row])
            for mask in (1, 2):
                peak = w.maximum(peak, w.shuffle_xor(peak, mask))
            low = peak * -self.factor
            lows.append(w.select(low < before[row] - SLACK, low, before[row]))
        decays = [w.exp2(low - old) for low, old in zip(lows, before, strict=True)]
        weights = [w.exp2(w.fma(score, factor, lows[i // 2 % 2])) for i, score in enumerate(scores)]
        totals = []
        for row in range(2):
            added = tree(lambda x, y: x + y, [x for i, x in enumerate(weights) if i // 2 % 2 == row])
            totals.append(w.fma(sums[row], decays[row], added))
        return weights, lows, totals, decays

    def decayed(self, values: Sequence[Any], decays: Sequence[Any]) -> Sequence[Any]:
        """Weighted values after the reference has moved, in any row of this warp."""
        needed = self.w.any_lane(self.w.any(decays[0] < 1, decays[1] < 1))
        return self.w.choose(needed, values, lambda: [x * decays[i // 2 % 2] for i, x in enumerate(values)])

    def release(self, kind: str, slot: Any) -> None:
        """This warp reads that stage no more."""
        self.w.warp_barrier()
        self.w.arrive_in(slot * 8 + self.plan.barriers[kind], None, self.w.lane < 1)

    def wait(self, kind: str, slot: Any, parity: Any) -> None:
        self.w.barrier_wait(slot * 8 + self.plan.barriers[kind], parity)

    def pack(self, weights: Sequence[Any]) -> list[Any]:
        return [self.w.pack(weights[i], weights[i + 1], "bfloat16") for i in range(0, len(weights), 2)]

    def run(self, a: Arguments, carry: Any) -> Any:
        """The whole part. `carry`: stage, parity of its phase, parity of the queries' phase."""
        w, plan, part = self.w, self.plan, self.part
        slot, parity, query_parity = carry
        self.wait("queries_full", w.integer(0), query_parity)
        if not plan.queries_in_registers:
            w.copies_to_products()
        self.take_queries()
        self.wait("keys_full", slot, parity)
        w.wgmma_fence(())
        scores = self.scores(slot)
        scores = w.wgmma_wait(0, scores)
        self.release("keys_empty", slot)
        zero = w.number(0.0)
        weights, lows, sums, _ = self.weights(scores, part.last_tile, [w.number(FAR)] * 2, [zero] * 2)
        words = self.pack(weights)
        values = [zero] * (plan.head_dim // 2)

        def turn(i: Any, carry: Any) -> Any:
            slot, parity, before, before_parity, *flat = carry
            lows, sums = flat[:2], flat[2:4]
            words, values = flat[4 : 4 + len(weights) // 2], flat[4 + len(weights) // 2 :]
            tile = part.last_tile - 1 - i
            self.wait("keys_full", slot, parity)
            w.wgmma_fence(())
            # This tile's scores and the last one's values: while the softmax waits for the first, and works on them,
            # the tensor cores have the second, and the other warpgroup's.
            scores = self.scores(slot)
            self.wait("values_full", before, before_parity)
            words, values = w.wgmma_fence(words), w.wgmma_fence(values)
            values = self.add_values(values, words, before)
            scores = w.wgmma_wait(1, scores)
            self.release("keys_empty", slot)
            new, lows, sums, decays = self.weights(scores, tile, lows, sums)
            w.hold_back(sums[0] + sums[1], w.integer(plan.barriers_start))
            values = w.wgmma_wait(0, values)
            self.release("values_empty", before)
            values = self.decayed(values, decays)
            return *after(w, plan, slot, parity), slot, parity, *lows, *sums, *self.pack(new), *values

        start = (*after(w, plan, slot, parity), slot, parity, *lows, *sums, *words, *values)
        slot, parity, before, before_parity, *flat = w.loop(part.count - 1, start, turn)
        if not plan.queries_in_registers:
            self.release("queries_empty", w.integer(0))
        lows, sums = flat[:2], flat[2:4]
        words, values = flat[4 : 4 + len(weights) // 2], flat[4 + len(weights) // 2 :]
        self.wait("values_full", before, before_parity)
        words, values = w.wgmma_fence(words), w.wgmma_fence(values)
        values = w.wgmma_wait(0, self.add_values(values, words, before))
        self.release("values_empty", before)
        self.store(a, lows, sums, values)
        return slot, parity, w.integer(1) - query_parity

    def store(self, a: Arguments, lows: Any, sums: Any, values: Any) -> None:
        w, plan, part = self.w, self.plan, self.part
        for index, row in enumerate(self.rows):
            token, head = row // plan.group, part.kv_head * plan.group + row % plan.group
            inside = token < plan.tokens
            total, low, kept = sums[index], lows[index], w.number(1.0)
            for mask in (1, 2):
                total = total + w.shuffle_xor(total, mask)
            if plan.sinks:
                sink = w.as_float(w.load_integer(a.sinks, head, inside)) * LOG2_E
                low = w.minimum(low, w.number(0.0) - sink)
                kept = w.exp2(low - lows[index])
                total = w.fma(total, kept, w.exp2(sink + low))
            # Padding may see nothing.
            share = w.select(total > 0, w.reciprocal(total) * kept, w.number(0.0))
            place = (part.row * plan.tokens + token) * plan.q_heads + head
            offset = place * plan.head_dim + self.quad * 2
            for column in range(0, plan.head_dim, 8):
                pair = (values[column // 2 + 2 * index + i] * share for i in range(2))
                w.store_pair(a.out, offset, column, w.pack(*pair, "bfloat16"), inside)
            if a.lse is not None:
                lse = (w.log2(total) - low) * math.log(2)
                w.store_number(a.lse, place, lse, "float32", inside & (self.quad < 1))


def tree(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    """All of them combined, in pairs, pairs of pairs and so on: few wait for each other."""
    while len(values) > 1:
        values = [combine(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]
