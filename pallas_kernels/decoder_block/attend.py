"""The block's attention: the new tokens' heads from the cluster's blocks, the merge, and the product with o."""

import dataclasses
import functools
from typing import Any

from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.decoder_block.project import Strips, fetched, in_order
from pallas_kernels.int4_matmul import strip
from pallas_kernels.int4_matmul.operands import Halves
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan as ProductPlan
from pallas_kernels.int4_matmul.stream import Places
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
    """Adds up the warps' partial results and sends them to all blocks of the cluster: a thread a few elements."""
    attention = plan.decode.attention
    each = plan.elements_each(2)
    pieces, tasks = attention.head_dim // each, attention.rows * attention.head_dim // each
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
            offset = query * attention.row_stride + piece * (4 * each) + 8 * attention.block_rows
            parts.append((statistics, w.shared_load(part + offset, each, "f32")))
        maximum, total, out = combine(w, parts)
        of_row = split * (8 * attention.rows) + query * 8 + plan.statistics_start
        of_task = split * plan.sums_bytes + task * (4 * each) + plan.sums_start
        w.send(of_row, [maximum, total], (index < tasks) & (piece < BLOCKS), piece % BLOCKS, plan.sums_barrier)
        for i in range(BLOCKS // shares):
            w.send(of_task, out, valid, share * (BLOCKS // shares) + i, plan.sums_barrier)


def merge_sums(w: Any, plan: BlockPlan) -> None:
    """The attended heads, from what all blocks have sent, rounded, as rows of tokens: a thread a few elements.

    Threads that have none left do the same as others, and write the same.
    """
    attention = plan.decode.attention
    each = plan.elements_each(1)
    pieces, tasks = attention.head_dim // each, attention.rows * attention.head_dim // each
    for start in range(0, tasks, plan.threads):
        task = (w.thread + start) % tasks
        query, parts = task // pieces, []
        for block in range(BLOCKS):
            statistics = w.shared_load(query * 8 + (plan.statistics_start + block * 8 * attention.rows), 2, "f32")
            sums = w.shared_load(task * (4 * each) + (plan.sums_start + block * plan.sums_bytes), each, "f32")
            parts.append((statistics, sums))
        _, total, out = combine(w, parts)
        inverse = w.select(total > 0.0, w.reciprocal(total), w.const(0.0))  # zero: an idle row
        out = [x * inverse for x in out]
        if each == 1:  # the neighbour has the pair's other element
            other, first = w.shuffle_xor(out[0], 1), w.lane % 2 < 1
            out = [w.select(first, out[0], other), w.select(first, other, out[0])]
        words = [w.pack_bf16(*out[i : i + 2]) for i in range(0, len(out), 2)]
        # Query rows are (token, head of the group): one token's heads are neighbours, as o takes them.
        w.shared_store(task // (len(out) // each) * (2 * len(out)) + plan.heads_start, words)


class Heads:
    """The attended heads as the inputs of o."""

    def __init__(self, w: Any, plan: BlockPlan):
        self.w, self.plan = w, plan

    def words(self) -> list[list[list[Any]]]:
        start = self.w.const(self.plan.heads_start, "i32")
        return in_order(self.w, self.plan.o, start, self.plan.heads_bytes)


class Unpacked(Halves):
    """Multiplies codes that are bfloat16 already, less what they are to be relative to."""

    def __init__(self, w: Any, plan: ProductPlan, tokens: Any):
        super().__init__(w, plan, tokens)
        self.code_bias = 0.0

    def _operand(self, words: Any, step: int) -> Any:
        return words[step]


class Output:
    """A warp's share of the product with o: all inputs of the cluster's heads, strips of the block's outputs."""

    def __init__(self, w: Any, m: Any, plan: BlockPlan, a: strip.Arguments, kv_head: Any, split: Any):
        self.w, self.m, self.plan, self._a, self._kv_head = w, m, plan, a, kv_head
        product = plan.o
        first = split * WARPS + m.warp
        self._strips = [first + i * (BLOCKS * WARPS) for i in range(product.schedule.strips)]
        first_tile = kv_head * product.warp_tiles
        self._stream = Strips(m, product, a.weights, first_tile, self._strips, plan.o_start)
        self._x = Unpacked(m, product, Heads(w, plan))

    def fill(self) -> None:
        self._stream.fill()

    def read(self) -> None:
        """Takes the weights into registers, as numbers; their copies must have been waited for."""
        m, product, self._fetched = self.m, self.plan.o, []
        for places in self._stream.places():
            pieces, factors = fetched(m, product, self._a, self._x, places)
            if self._a.kind != "minimum":
                factors = [(scale, None) for scale, _ in factors]  # it is in the numbers
            less = [self._less(places, segment) for segment in range(product.segments)]
            words = [word for piece in pieces for word in piece]
            # All warps do. Without the branch, ptxas would do it where the numbers are used.
            given = [word for word in words for _ in range(4)]
            numbers = self.w.when(m.warp < WARPS, given, functools.partial(self._numbers, words, less))
            of_words = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
            steps = len(pieces[0])
            self._fetched.append(([of_words[i : i + steps] for i in range(0, len(of_words), steps)], factors))

    def _less(self, places: Places, segment: int) -> list[Any]:
        """What is to be added to a segment's 128 + code, in pairs, for this lane's two rows."""
        m, product, a = self.m, self.plan.o, self._a
        if a.kind != "zero_point":
            return [m.twice(m.number(-136.0 if a.kind == "symmetric" else -128.0))] * 2
        assert a.offset_dtype is not None
        address = places.offsets + m.lane // 4 * (2 * product.offset_bytes)
        zeros = m.shared_pair(address, a.offset_dtype, segment * STRIP * product.offset_bytes)
        return [m.twice(zero * -1.0 - 128.0) for zero in zeros]

    def _numbers(self, words: list[Any], less: list[list[Any]]) -> list[Any]:
        """Four words of pairs for each word of codes; the second and the fourth are of the lane's second row."""
        m, steps, numbers = self.m, self.plan.o.segment // 16, []
        for i, word in enumerate(words):
            of_segment = less[i // steps]
            numbers += [m.add_pairs(pair, of_segment[j % 2]) for j, pair in enumerate(m.codes(word))]
        return numbers

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
