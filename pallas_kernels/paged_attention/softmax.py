"""One warp's online softmax over tiles of keys, in tensor-core fragments.

Fragments. mma.m16n8k16 adds A[16, 16] B[16, 8]. Lane 4 g + q holds, as pairs (words) along k, A rows g and g + 8 and B
column g, both at k = 2q, 2q+1 and 2q+8, 2q+9; of the sums, rows g and g + 8, columns 2q and 2q+1. Any order of k is
right as long as A and B agree, and any order of rows is right if the result is read in the same order. The kernel
picks orders that make every global read 16 consecutive bytes:

    S[row, key] = Q K^T   A = query rows (heads x tokens), B = keys. k runs over head_dim so that lane q of key g
                          reads 8 consecutive elements (two k-steps).
    O[d, row] = V^T P^T   A = values, B = probabilities. The sums of S are B's fragment already. Lane g reads 8
                          consecutive elements of keys 2q, 2q+1, 2q+8, 2q+9 and pairs them by key with byte permutes.

Query rows sit in shared memory in fragment order. docs/kernels_attention.md has the diagram, `fragments.py` what
differs where pages hold codes: those become float16, exactly, and the scales stay out of the products. A key's scale
multiplies its logits. A value's goes into the exponent: weights are exp2(logit + log2(scale) - maximum), so the largest
is always near the top of float16's range, whatever the scales are, and the sum divides it out again.
"""

import math
from typing import Any

import jax

from pallas_kernels.paged_attention.formats import SMALLEST_SCALE
from pallas_kernels.paged_attention.fragments import key_fragments, value_fragments
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tiles import Tiles

LOG2_E = math.log2(math.e)
# The running maximum starts here and not at -inf, so that a row with no visible key yet never computes inf - inf.
LOWEST = -1e30
# float16 weights go up to 2**HEADROOM: full precision down to 2**-22 of the largest, gone below 2**-33.
HEADROOM = 8


class Softmax:
    """One warp's online softmax: per query row a maximum and a sum, per row and element a sum of weighted values.

    Maximum and sum belong to row g (and g + 8) in the lanes of group g, the sum still spread over the four lanes.
    Weighted values are fragments of O[d, row]: [half][m-tile] four floats. Logits are multiplied by log2(e), for exp2.
    Sums count in units of exp2(maximum - `headroom`).
    """

    def __init__(self, w: Any, plan: Plan, position: Any, first_row: Any, last_stored: Any = None):
        """`position` is the place of the first query token, `last_stored` that of the last key in the pages, by default
        the query's own."""
        self.w, self.plan = w, plan
        self.headroom = HEADROOM if plan.quantised else 0
        self.group, self.quad = w.lane // 4, w.lane % 4
        tokens = [(first_row + self.group + 8 * half) // plan.group for half in range(plan.halves)]
        self.positions = [position + token for token in tokens]
        self.last_keys = self.positions if last_stored is None else [last_stored] * plan.halves

    def initial(self) -> Any:
        zero, lowest = self.w.const(0.0), self.w.const(LOWEST)
        m_tiles = self.plan.head_dim // 16
        return (
            [lowest] * self.plan.halves,
            [zero] * self.plan.halves,
            [[(zero,) * 4] * m_tiles for _ in range(self.plan.halves)],
        )

    def over(self, tiles: Tiles, buffers: list[Any], state: Any) -> Any:
        """The state after all of the warp's tiles, the first `depth` of which are in `buffers` already."""
        w, plan = self.w, self.plan
        pages = [tiles.page(w.const(plan.depth + j, "i32")) for j in range(plan.depth)]
        carry, structure = jax.tree.flatten((state, buffers, pages))

        def body(i: Any, carry: Any) -> Any:
            state, buffers, pages = jax.tree.unflatten(structure, carry)
            buffers, pages = list(buffers), list(pages)
            for j in range(plan.depth):
                here = i * plan.depth + j
                if j == 0:
                    state = self.update(state, buffers[j], tiles.first_key(here), self.last_keys)
                else:
                    state = self.update_if(here < tiles.count, state, buffers[j], tiles.first_key(here))
                ahead = here + plan.depth
                late = None
                if plan.late_values:
                    # Holds of any two equal halves, those of NaN too; ptxas does not know it.
                    late = w.pack_bf16(state[1][0], state[1][0]) < 0x7FFFFFFF
                buffers[j] = tiles.read(ahead, pages[j], late)
                pages[j] = tiles.page(ahead + plan.depth)
            return jax.tree.flatten((state, buffers, pages))[0]

        carry = w.loop((tiles.count + (plan.depth - 1)) // plan.depth, carry, body)
        return jax.tree.unflatten(structure, carry)[0]

    def update_if(self, condition: Any, state: Any, buffer: Any, first_key: Any) -> Any:
        flat, structure = jax.tree.flatten(state)
        updated = self.w.when(
            condition, flat, lambda: jax.tree.flatten(self.update(state, buffer, first_key, self.last_keys))[0]
        )
        return jax.tree.unflatten(structure, updated)

    def update(self, state: Any, buffer: Any, first_key: Any, last_keys: list[Any]) -> Any:
        """The state after one more tile, the first key of which is at `first_key`; rows see up to their last key."""
        w, plan = self.w, self.plan
        keys, values, k_scales, v_scales = buffer
        maxima, sums, outs = (list(part) for part in state)
        if plan.quantised:
            # A row without scale was never written, or is past the length: its weight is zero.
            v_scales = [w.maximum(scale, w.const(SMALLEST_SCALE)) for scale in v_scales]
            exponents = [w.log2(scale) for scale in v_scales]
            inverses = [w.reciprocal(scale) for scale in v_scales]
        else:
            exponents, inverses = [], []
        scores = self.scores(keys)
        weights = []
        for half in range(plan.halves):
            logits = []
            for n in range(2):
                for column in range(2):
                    score, i = scores[half][n][column], 2 * n + column
                    logit = self.logit(score * k_scales[i]) + exponents[i] if plan.quantised else self.logit(score)
                    key = first_key + self.quad * 2 + (8 * n + column)
                    visible = key <= last_keys[half]
                    if plan.window is not None:
                        visible = visible & (key > self.positions[half] - plan.window)
                    logits.append(w.select(visible, logit, w.const(-math.inf)))
            peak = w.maximum(w.maximum(logits[0], logits[1]), w.maximum(logits[2], logits[3]))
            for mask in (1, 2):
                peak = w.maximum(peak, w.shuffle_xor(peak, mask))
            peak = w.maximum(peak, maxima[half])
            top = peak - self.headroom if self.headroom else peak
            p = [w.exp2(x - top) for x in logits]
            decay = w.exp2(maxima[half] - peak)
            maxima[half] = peak
            shares = [a * b for a, b in zip(p, inverses, strict=True)] if plan.quantised else p
            sums[half] = sums[half] * decay + ((shares[0] + shares[1]) + (shares[2] + shares[3]))
            pack = w.pack_f16 if plan.quantised else w.pack_bf16
            weights.append((pack(p[0], p[1]), pack(p[2], p[3])))
            # Statistics live with row g, sums of O with rows 2q and 2q+1.
            even, odd = w.shuffle(decay, self.quad * 8), w.shuffle(decay, self.quad * 8 + 4)
            outs[half] = [(o[0] * even, o[1] * odd, o[2] * even, o[3] * odd) for o in outs[half]]
        for m_tile, a in value_fragments(w, plan, values):
            for half in range(plan.halves):
                outs[half][m_tile] = w.mma(outs[half][m_tile], a, weights[half], self.kind)
        return maxima, sums, outs

    @property
    def kind(self) -> str:
        return "f16" if self.plan.quantised else "bf16"

    def scores(self, keys: Any) -> list[list[Any]]:
        """S of the query rows x 8 keys of each of `keys`: [half][n-tile] two floats.

        Two sums per n-tile halve the chain of dependent mma.
        """
        w, plan = self.w, self.plan
        zero = w.const(0.0)
        sums = [[[(zero,) * 4, (zero,) * 4] for _ in keys] for _ in range(plan.row_tiles)]
        steps = zip(*(key_fragments(w, plan, chunks) for chunks in keys), strict=True)
        for step, fragments in enumerate(steps):
            for tile, of_tile in enumerate(sums):
                address = w.lane * 16 + (step * 512 + tile * 32 * plan.head_dim)
                query = w.shared_load(address, 4, "i32")
                for n, b in enumerate(fragments):
                    of_tile[n][step % 2] = w.mma(of_tile[n][step % 2], query, b, self.kind)
        scores = []
        for half in range(plan.halves):
            first = 2 * (half % 2)
            scores.append([[even[first + i] + odd[first + i] for i in range(2)] for even, odd in sums[half // 2]])
        return scores

    def logit(self, score: Any) -> Any:
        w, plan = self.w, self.plan
        if plan.softcap is None:
            return score * (plan.scale * LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1); tanh.approx is off by 5e-4 of the cap
        growth = w.exp2(score * (2.0 * LOG2_E * plan.scale / plan.softcap))
        return (1.0 - w.reciprocal(growth + 1.0) * 2.0) * (plan.softcap * LOG2_E)

    def store_partial(self, state: Any, rows: int | None = None) -> None:
        """Writes this warp's partial result to its place in shared memory: that of the first `rows` rows, or of all."""
        w, plan = self.w, self.plan
        maxima, sums, outs = state
        part = w.warp * plan.part_bytes + plan.parts_start
        for half in range(plan.halves):
            total = sums[half]
            for mask in (1, 2):
                total = total + w.shuffle_xor(total, mask)
            # The result's own scale: a sum of 1 is exp2(maximum).
            reference = maxima[half] - self.headroom if self.headroom else maxima[half]
            w.shared_store(part + (self.group + 8 * half) * 8, [reference, total], self.quad < 1)
            m_tile = 0
            for start, elements in plan.value_runs:
                for column in range(2):
                    query = self.quad * 2 + (column + 8 * half)
                    d = self.group * elements + start
                    address = part + (8 * plan.block_rows) + query * plan.row_stride + d * 4
                    inside = None if rows is None else query < rows
                    run = []
                    for tile in outs[half][m_tile : m_tile + elements // 2]:
                        run += [tile[column], tile[column + 2]]
                    for at in range(0, len(run), 4):
                        w.shared_store(address + 4 * at, run[at : at + 4], inside)
                m_tile += elements // 2
