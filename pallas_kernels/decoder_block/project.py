"""The block's first product: the residual stream of the new tokens, normalised, times the rows of q, k and v."""

import functools
from typing import Any

from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul.operands import Halves, normalised, squares_stored
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.plan import PART, PIECE_BYTES
from pallas_kernels.int4_matmul.plan import Plan as ProductPlan
from pallas_kernels.int4_matmul.stream import Places, Stream, Weights
from pallas_kernels.int4_matmul.strip import Arguments, factors_of, pieces_of, totals_of


class Strips(Stream):
    """Strips that a warp fetches all at once, from anywhere in the weight."""

    def __init__(
        self, m: Any, plan: ProductPlan, weights: Weights, first_tile: Any, strips: list[Any], start: int = 0
    ) -> None:
        """`strips`: which they are; those past the weight's last are not fetched. Rings are from byte `start` on."""
        count = m.integer(len(strips))
        self._begin(m, plan, weights, first_tile, m.integer(0), count, m.warp * plan.ring_bytes + start)
        self._strips = strips

    def fill(self) -> None:
        for i, strip in enumerate(self._strips):
            self._fetch(strip, strip < self.plan.strips, self.w.integer(i * self.plan.slot_bytes))


class SummedRows:
    """A warp's inputs of the new tokens: x plus the slices, normalised, in the order of an mma's small operand.

    A lane has four neighbouring inputs of each 128. Shared memory (the attention's, `w`) brings them into order.
    """

    def __init__(self, w: Any, m: Any, plan: BlockPlan, x: Any, partial: Any, norm: Any):
        """Starts the reads. x [tokens, hidden] bf16, partial [slices, tokens, hidden] and norm [hidden] float32.

        The norm's weights come by an asynchronous copy: of loads ptxas would wait for them with x.
        """
        self.w, self.m, self.plan = w, m, plan
        product = plan.qkv
        self._tokens = range(product.rows)
        self._column = m.warp * product.warp_columns + m.lane * 4
        self._parts = range(0, product.warp_columns, PART)
        self._norm = m.warp * product.norm_bytes + (m.lane * 16 + product.norm_start)
        for start in range(0, product.norm_bytes, PIECE_BYTES):
            m.copy_async(self._norm, norm, self._column * 4, m.lane < 32, to=start, source=start)
        self._buffer = w.warp * (product.rows * self.plan.x_bytes) + self.plan.x_start
        hidden = product.in_features
        self._x = [[m.load_words(x, self._column, 2, None, t * hidden + p) for p in self._parts] for t in self._tokens]
        self._slices = [
            [
                [m.load_four(partial, self._column, None, (s * product.rows + t) * hidden + p) for p in self._parts]
                for t in self._tokens
            ]
            for s in range(self.plan.slices)
        ]

    def add(self, y: Any, writes: Any) -> None:
        """Adds the slices, in order; where `writes`, the sums go to y [tokens, hidden]. The norm must be there."""
        # All warps do, but ptxas may not put what waits for x in front of what is asked for before.
        body, zeros = functools.partial(self._add, y, writes), [self.m.number(0.0) for _ in self._tokens]
        self._squares = self.w.when(self.m.warp < WARPS, zeros, body)
        self.m.warp_barrier()

    def _add(self, y: Any, writes: Any) -> list[Any]:
        """Returns each token's sum of squares in this lane."""
        w, m, product, of_tokens = self.w, self.m, self.plan.qkv, []
        for t in self._tokens:
            squares = m.number(0.0)
            for p, start in enumerate(self._parts):
                words = list(self._x[t][p])
                if self._slices:
                    words = self._sum(words, [of_slice[t][p] for of_slice in self._slices])
                m.store_words(y, self._column + (t * product.in_features + start), words, writes)
                weights = [m.as_number(word) for word in m.shared_words(self._norm, 4 * start)]
                words, square = normalised(m, words, weights)
                squares = squares + square
                w.shared_store(self._buffer + w.lane * 8 + (t * self.plan.x_bytes + 2 * start), words)
            of_tokens.append(squares)
        return of_tokens

    def store_squares(self) -> None:
        """The warp's, to shared memory: late, as five shuffles wait for each other."""
        for t, squares in enumerate(self._squares):
            squares_stored(self.m, self.plan.qkv, squares, (1, 2, 4, 8, 16), self.m.lane < 1, self.m.integer(4 * t))

    def _sum(self, words: list[Any], slices: list[Any]) -> list[Any]:
        m, sums = self.m, slices[0]
        for more in slices[1:]:
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        numbers = [number for word in words for number in m.numbers_of(word)]
        sums = [a + b for a, b in zip(numbers, sums, strict=True)]
        return [m.pair(*sums[i : i + 2]) for i in (0, 2)]

    def words(self) -> list[list[list[Any]]]:
        """[tile][step][token block], as `Tokens` has them."""
        return in_order(self.w, self.plan.qkv, self._buffer, self.plan.x_bytes)


def in_order(w: Any, plan: ProductPlan, address: Any, row_bytes: int) -> list[list[list[Any]]]:
    """A warp's inputs of tokens whose rows are in shared memory from `address` on: [tile][step][token block].

    In place of tokens that do not exist it reads one that does: nobody stores their sums.
    """
    run, steps = steps_per_run(plan.group_size), []
    address = address + w.lane // 4 % plan.rows * row_bytes + w.lane % 4 * (2 * plan.lane_columns)
    for first in plan.run_columns:
        words = w.shared_load(address + 2 * first, 2 * run, "i32")
        steps += [[words[2 * i : 2 * i + 2]] for i in range(run)]
    per_tile = COLUMNS // 16
    return [steps[t : t + per_tile] for t in range(0, len(steps), per_tile)]


def fetched(m: Any, plan: ProductPlan, a: Arguments, x: Halves, places: Places) -> tuple[Any, Any]:
    """A strip's words and factors, in registers."""
    factors = [factors_of(m, plan, a, x.code_bias, places, segment) for segment in range(plan.segments)]
    return pieces_of(m, plan, places), factors


def strips_of(m: Any, plan: BlockPlan, kv_head: Any, split: Any) -> list[Any]:
    """The rows of q, k and v that a block has, in strips of the whole weight."""
    attention, count = plan.decode.attention, plan.qkv.schedule.strips
    per_head, strips = plan.head_strips, []
    for i in range(count):
        local = split * count + i  # of the cluster's
        head, inside = local // per_head, local % per_head
        query = kv_head * attention.group + head
        other = (
            kv_head
            + attention.q_heads
            + m.select(head < attention.group + 1, m.integer(0), m.integer(1)) * (attention.kv_heads)
        )
        strips.append(m.select(head < attention.group, query, other) * per_head + inside)
    return strips


def project(m: Any, plan: BlockPlan, a: Arguments, stream: Strips, x: SummedRows) -> None:
    """Leaves every warp's sums of the block's strips, and of squares, in shared memory, each strip when it is there."""
    product, operand = plan.qkv, Halves(m, plan.qkv, x)
    operand.prepare()
    sums = m.warp * product.sums_bytes + m.lane // 4 * 4 + product.sums_start
    behind = product.schedule.strips + plan.o.schedule.strips
    for i, places in enumerate(stream.places()):
        m.copy_wait(behind - 1 - i)
        m.warp_barrier()
        pieces, factors = fetched(m, product, a, operand, places)
        (total,) = totals_of(m, product, operand, pieces, factors.__getitem__)
        for e in range(4):  # columns of tokens that do not exist repeat those that do: lanes write the same
            if e % 2 < product.rows:
                m.shared_store(
                    sums, total[e], None, i * product.strip_bytes + e % 2 * product.token_bytes + e // 2 * 32
                )
    x.store_squares()


def send_heads(w: Any, m: Any, plan: BlockPlan, split: Any) -> None:
    """Adds the warps' sums and sends the results, rounded, to all blocks: a thread four of them, to one."""
    product, attention = plan.qkv, plan.decode.attention
    strips, tokens, pieces = product.schedule.strips, product.rows, STRIP // 4
    total = pieces * strips * tokens * BLOCKS
    for start in range(0, total, plan.threads):
        index = m.thread + start
        piece, strip, token = index % pieces, index // pieces % strips, index // (pieces * strips) % tokens
        block = index // (pieces * strips * tokens)
        address = strip * product.strip_bytes + token * product.token_bytes + piece * 16
        sums = [m.number(0.0)] * 4
        squares = m.number(0.0)
        for warp in range(WARPS):
            words = m.shared_words(address, product.sums_start + warp * product.sums_bytes)
            sums = [a + m.as_number(word) for a, word in zip(sums, words, strict=True)]
            squares = squares + m.shared_number(token * 4, product.squares_start + warp * product.squares_bytes)
        assert product.fusion.norm_eps is not None
        root = m.rsqrt(squares * (1.0 / product.in_features) + product.fusion.norm_eps)
        sums = [number * root for number in sums]
        words = [m.pair(*sums[i : i + 2]) for i in (0, 2)]
        local = split * strips + strip
        head = local // plan.head_strips
        # As `NewTokens` numbers them.
        other = (head - attention.group) * tokens + token + tokens * attention.group
        number = m.select(head < attention.group, token * attention.group + head, other)
        place = number * (2 * attention.head_dim) + local % plan.head_strips * (2 * STRIP) + piece * 8 + plan.new_start
        w.send(place, [m.as_number(word) for word in words], index < total, block, plan.new_barrier)
