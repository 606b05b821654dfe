"""The block's attention: the new tokens' heads from the cluster's blocks, the merge, and the product with o."""

import dataclasses
from typing import Any

from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.decoder_block.project import Strips, fetched, in_order
from pallas_kernels.int4_matmul import strip
from pallas_kernels.int4_matmul.operands import Halves
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.strip import totals_of
from pallas_kernels.paged_attention.merge import Place, clamp, combine
from pallas_kernels.paged_attention.new_token import Arguments, Head, NewTokens


class Tables:
    """The norms' weights and the angles of the new tokens, in shared memory of the products."""

    def __init__(self, m: Any, plan: BlockPlan, args: Arguments):
        self.m, self._args, self._tables, start = m, args, [], plan.tables_start
        for i, (name, nbytes) in enumerate(plan.tables):
            self._tables.append((getattr(args, name), i % WARPS, start, nbytes))
            args = dataclasses.replace(args, **{name: start})
            start += nbytes
        self.places = args
        """The arguments, with bytes of shared memory for the tables."""

    def fetch(self) -> None:
        """Starts their copies: a warp has a table."""
        m = self.m
        for array, warp, start, nbytes in self._tables:
            mine = (m.warp < warp + 1) & (m.integer(warp - 1) < m.warp)
            for first in range(0, nbytes, 512):
                inside = mine & (m.lane < (nbytes - first) // 16)
                m.copy_async(m.lane * 16 + start, array, m.lane * 16, inside, to=first, source=first)


class SentTokens(NewTokens):
    """New tokens whose heads are in shared memory, as are the tables."""

    def __init__(self, w: Any, m: Any, plan: BlockPlan, args: Arguments, place: Place):
        """`args`: `Tables.places`. The cluster's blocks have sent their heads."""
        self._m, self._heads_start = m, plan.new_start
        super().__init__(w, plan.decode, args, place)

    def _words(self, offset: Any, valid: Any) -> list[Any]:
        del offset, valid  # which are those of a row of projections
        return []

    def _table(self, table: int, offset: Any, count: int, valid: Any) -> list[Any]:
        m = self._m
        place = m.select(valid, offset * 4, m.integer(0)) + table
        return [m.as_number(word) for word in m.shared_words(place, 0, count)]

    def _stage_head(self, head: Head) -> None:
        w, row = self.w, 2 * self.plan.attention.head_dim
        number = clamp(w, head.number, self.heads)
        for quad in head.quads:
            inside = quad.piece < self.pieces
            place = w.select(inside, number * row + quad.piece * 8, w.const(0, "i32")) + self._heads_start
            words = w.shared_load(place, 2, "i32")
            quad.words = [w.select(inside, word, w.const(0, "i32")) for word in words]  # as the norm's sums need it
        super()._stage_head(head)


def send_sums(w: Any, plan: BlockPlan, split: Any) -> None:
    """Adds up the warps' partial results and sends them to all blocks of the cluster: a thread four elements."""
    attention = plan.decode.attention
    pieces, tasks = attention.head_dim // 4, attention.rows * attention.head_dim // 4
    # With few rows several threads do the same and send to other blocks.
    shares = next(shares for shares in (4, 2, 1) if shares * tasks <= plan.threads or shares == 1)
    for start in range(0, shares * tasks, plan.threads):
        index = w.thread + start
        valid, task, share = index < shares * tasks, index % tasks, index // tasks
        query, piece = task // pieces, task % pieces
        parts = []
        for warp in range(attention.warps):
            part = w.const(attention.parts_start + warp * attention.part_bytes, "i32")
            statistics = w.shared_load(part + query * 8, 2, "f32")
            offset = query * attention.row_stride + piece * 16 + 8 * attention.block_rows
            parts.append((statistics, w.shared_load(part + offset, 4, "f32")))
        maximum, total, out = combine(w, parts)
        of_row = split * (8 * attention.rows) + query * 8 + plan.statistics_start
        of_task = split * plan.sums_bytes + task * 16 + plan.sums_start
        for i in range(BLOCKS // shares):
            block = share * (BLOCKS // shares) + i
            w.send(of_task, out, valid, block, plan.sums_barrier)
            w.send(of_row, [maximum, total], valid & (piece < 1), block, plan.sums_barrier)


def merge_sums(w: Any, plan: BlockPlan) -> None:
    """The attended heads, from what all blocks have sent, rounded, as rows of tokens."""
    attention = plan.decode.attention
    pieces, tasks = attention.head_dim // 4, attention.rows * attention.head_dim // 4
    for start in range(0, tasks, plan.threads):
        index = w.thread + start
        task = index % tasks
        query = task // pieces
        parts = []
        for block in range(BLOCKS):
            statistics = w.shared_load(query * 8 + (plan.statistics_start + block * 8 * attention.rows), 2, "f32")
            sums = w.shared_load(task * 16 + (plan.sums_start + block * plan.sums_bytes), 4, "f32")
            parts.append((statistics, sums))
        _, total, out = combine(w, parts)
        inverse = w.select(total > 0.0, w.reciprocal(total), w.const(0.0))  # zero: an idle row
        out = [x * inverse for x in out]
        words = [w.pack_bf16(out[0], out[1]), w.pack_bf16(out[2], out[3])]
        # Query rows are (token, head of the group): one token's heads are neighbours, as o takes them.
        w.shared_store(task * 8 + plan.heads_start, words, index < tasks)


class Heads:
    """The attended heads as the inputs of o."""

    def __init__(self, w: Any, plan: BlockPlan):
        self.w, self.plan = w, plan

    def words(self) -> list[list[list[Any]]]:
        start = self.w.const(self.plan.heads_start, "i32")
        return in_order(self.w, self.plan.o, start, self.plan.heads_bytes)


class Output:
    """A warp's share of the product with o: all inputs of the cluster's heads, strips of the block's outputs."""

    def __init__(self, w: Any, m: Any, plan: BlockPlan, a: strip.Arguments, kv_head: Any, split: Any):
        self.m, self.plan, self._a, self._kv_head = m, plan, a, kv_head
        product = plan.o
        first = split * WARPS + m.warp
        self._strips = [first + i * (BLOCKS * WARPS) for i in range(product.schedule.strips)]
        first_tile = kv_head * product.warp_tiles
        self._stream = Strips(m, product, a.weights, first_tile, self._strips, plan.o_start)
        self._x = Halves(m, product, Heads(w, plan))

    def fill(self) -> None:
        self._stream.fill()

    def read(self) -> None:
        """Takes the weights into registers; their copies must have been waited for."""
        places = self._stream.places()
        self._fetched = [fetched(self.m, self.plan.o, self._a, self._x, of_strip) for of_strip in places]

    def multiply(self) -> None:
        """Writes the cluster's slice of the block's outputs."""
        m, product = self.m, self.plan.o
        self._x.prepare()
        for number, (pieces, factors) in zip(self._strips, self._fetched, strict=True):
            (total,) = totals_of(m, product, self._x, pieces, factors.__getitem__)
            for e, sum_ in enumerate(total):
                token, feature = m.lane % 4 * 2 + e % 2, number * STRIP + m.lane // 4 + 8 * (e // 2)
                place = (self._kv_head * product.rows + token) * product.out_features + feature
                inside = (token < product.rows) & (feature < product.out_features)
                m.store_number(self._a.out, place, sum_, "float32", inside)
