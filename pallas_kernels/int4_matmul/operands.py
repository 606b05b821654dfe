"""The small operand of the Hopper INT4 kernel: one warp's share of x, in registers for the whole kernel.

Two ways to multiply it with codes, behind the same few methods:

- `Halves`: x as it is, bfloat16, and codes turned into bfloat16 128 + code (0x4300 | code): four `lop3` and three
  shifts for each word of eight codes, all of which go to the pipe that takes one instruction every second clock.
- `Digits`: x as 23-bit integers relative to the largest of the warp's inputs, cut into three bytes, and codes left what
  they are, bytes from 0 to 15: two `and` and one shift a word, twice the inputs for each `mma`, exact sums in 32
  bits. That takes half as many registers again for x, and so serves 8 tokens.

Values of x are rounded to 2^-22 of the largest (of those that the warp holds for the same token): bfloat16 numbers down
to 2^-14 of it are exact.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.code_words import bytes_to_pairs
from pallas_kernels.int4_matmul.packing import COLUMNS, Kind, steps_per_run
from pallas_kernels.int4_matmul.plan import Plan

ONES = 0x3F803F80  # two bfloat16
BYTES_OF_ONE = 0x01010101
MAGIC = 0x4B400000
"""Bits of the float32 number 1.5 x 2^23: adding an integer of up to 22 bits to the bits adds it to the number."""
MAGIC_NUMBER = 12582912.0

type Sums = Sequence[Sequence[Any]]
"""[token block][element of an mma's result]"""


class Halves:
    """x in bfloat16."""

    def __init__(self, w: Any, plan: Plan, tokens: Any):
        """`tokens`: `Tokens`, or a `Row`."""
        self.w, self.plan = w, plan
        self.code_bias = 128.0 if plan.bits == 4 else -128.0
        self._book: Book | None = None
        self._tokens = tokens
        self._segments = segments_of(plan)
        # Where little is to be done, what counts is how long the last of it takes: short chains of products.
        # Of many tokens there are as many chains anyway, and no registers for more.
        short = plan.schedule.once and plan.token_blocks <= 2
        self._chain = 2 if short else len(self._segments[0])

    def prepare(self, book: Book | None = None) -> None:
        """Sums of x: `of_tokens[segment][token block]` are those of this lane's two tokens."""
        w, self._book, self._words = self.w, book, self._tokens.words()
        self.of_tokens = [
            [[*total[:2], *total[:2]] for total in self._multiplied(segment, lambda t, s: [w.integer(ONES)] * 4)]
            for segment in self._segments
        ]

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times `code_bias` + code, or the code book's number, over the inputs of a segment."""
        return self._multiplied(self._segments[segment], lambda t, s: self._operand(pieces[t], s))

    def _operand(self, words: Sequence[Any], step: int) -> Sequence[Any]:
        if self.plan.bits == 8:
            upper, lower = (bytes_to_pairs(self.w, word) for word in words[2 * step : 2 * step + 2])
            return upper[0], lower[0], upper[1], lower[1]
        return (self.w.codes if self._book is None else self._book.numbers)(words[step])

    def _multiplied(self, steps: list[tuple[int, int]], operand: Any) -> Sums:
        chains = [
            summed(self.w, self.plan, self._words, steps[i : i + self._chain], operand)
            for i in range(0, len(steps), self._chain)
        ]
        return functools.reduce(added, chains)

    def finished(self, totals: Sums) -> Sums:
        if self._book is None:
            return totals
        return [[total * self._book.unit for total in block] for block in totals]


def summed(
    w: Any, plan: Plan, words: Sequence[Any], steps: list[tuple[int, int]], operand: Any, kind: str = "bf16"
) -> Sums:
    """Sums over some steps: words [tile][step][token block] of x times what operand(tile, step) gives of the codes."""
    totals = [[w.number(0.0)] * 4 for _ in range(plan.token_blocks)]
    for t, s in steps:
        codes = operand(t, s)
        totals = [w.mma(p, codes, of_block, kind) for p, of_block in zip(totals, words[t][s], strict=True)]
    return totals


def added(a: Sums, b: Sums) -> Sums:
    return [[x + y for x, y in zip(*blocks, strict=True)] for blocks in zip(a, b, strict=True)]


class Digits:
    """x as three bytes, x = factor (65536 b2 + 256 b1 + b0), with b2 signed and a factor for each token.

    Codes of 8 bits are stored less 128, signed: of up to 255 the sums of 128 inputs would not fit.
    """

    def __init__(self, w: Any, plan: Plan, tokens: "Tokens"):
        self.w, self.plan = w, plan
        self.code_bias = 0.0 if plan.bits == 4 else -128.0
        self._book: Book | None = None
        self._tokens = tokens
        self._segments = segments_of(plan)

    def prepare(self, book: Book | None = None) -> None:
        w, self._book, self._words = self.w, book, self._tokens.words()
        largest = [self._largest(b) for b in range(self.plan.token_blocks)]
        factors = [w.factor_to_integers(bits) for bits in largest]
        # [tile][step][token block]: three words of four bytes.
        self._digits = [
            [[w.digits(words, f) for words, f in zip(step, factors, strict=True)] for step in tile]
            for tile in self._words
        ]
        # A result's two tokens are 2 quad and 2 quad + 1; a loaded word's is the lane's group.
        mine = w.lane % 4 * 8
        back = [w.factor_from_integers(bits) for bits in largest]
        self._back = [[w.shuffle(factor, mine + 4 * i) for i in range(2)] for factor in back]
        ones = [w.integer(BYTES_OF_ONE)] * 2
        self.of_tokens = [
            [[*total[:2], *total[:2]] for total in self._multiplied(segment, lambda t, s: ones)]
            for segment in self._segments
        ]

    def _largest(self, block: int) -> Any:
        """Bits of the largest magnitude among this lane's token's inputs, in the warp."""
        w = self.w
        bits = w.largest([word for tile in self._words for step in tile for word in step[block]])
        for mask in (1, 2):
            other = w.shuffle_xor(bits, mask)
            bits = w.select(bits < other, other, bits)
        return bits

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment, in units of the token's factor."""
        return self._multiplied(self._segments[segment], lambda t, s: self._operand(pieces[t], s))

    def _operand(self, words: Sequence[Any], step: int) -> Sequence[Any]:
        if self.plan.bits == 8:
            return words[2 * step : 2 * step + 2]
        return (self.w.code_bytes if self._book is None else self._book.code_bytes)(words[step])

    def _multiplied(self, steps: list[tuple[int, int]], operand: Any) -> Sums:
        w, blocks = self.w, range(self.plan.token_blocks)
        signed = self.plan.bits == 8 or self._book is not None
        chains = [[[w.integer(MAGIC)] * 4 for _ in range(3)] for _ in blocks]
        pair = 2 if len(steps) > 1 else 1
        for i in range(0, len(steps), pair):
            taken = steps[i : i + pair]
            codes = [word for t, s in taken for word in operand(t, s)]
            for b in blocks:
                digits = [self._digits[t][s][b] for t, s in taken]
                chains[b] = [
                    w.mma_bytes(chain, codes, [words[d] for words in digits], signed=(signed, d == 2))
                    for d, chain in enumerate(chains[b])
                ]
        return [[self._number(chain, e) for e in range(4)] for chain in chains]

    def _number(self, chain: Sequence[Any], element: int) -> Any:
        low, middle, high = (self.w.as_number(words[element]) - MAGIC_NUMBER for words in chain)
        return self.w.fma(high, self.w.number(65536.0), self.w.fma(middle, self.w.number(256.0), low))

    def finished(self, totals: Sums) -> Sums:
        """Back to the scale of x."""
        back = self._back
        if self._book is not None:
            back = [[factor * self._book.unit for factor in factors] for factors in back]
        return [
            [total * factors[e % 2] for e, total in enumerate(block)]
            for block, factors in zip(totals, back, strict=True)
        ]


def segments_of(plan: Plan) -> list[list[tuple[int, int]]]:
    """The (tile, step) of each segment's steps of 16 inputs."""
    steps = [(t, s) for t in range(plan.warp_tiles) for s in range(COLUMNS // 16)]
    per_segment = plan.segment // 16
    return [steps[i : i + per_segment] for i in range(0, len(steps), per_segment)]


def bias_of(
    w: Any, plan: Plan, kind: Kind, code_bias: float, scale: Sequence[Any], offset: Sequence[Any] | None
) -> Sequence[Any] | None:
    """What to add for each unit of x: the value of a weight is scale (code_bias + code) + bias. None: nothing."""
    if kind == "code_book":
        return None
    if offset is None:
        middle = 2.0 ** (plan.bits - 1) + code_bias
        return [s * -middle for s in scale] if middle else None
    if kind == "zero_point":
        return [s * (o * -1.0 - code_bias) for s, o in zip(scale, offset, strict=True)]
    return [w.fma(s, w.number(-code_bias), o) for s, o in zip(scale, offset, strict=True)] if code_bias else offset


class Tokens:
    """The warp's x on its way into registers: asked for at once, normalised when it is needed.

    In place of tokens that do not exist it holds the last one again: nobody stores their sums.
    """

    def __init__(self, w: Any, plan: Plan, x: Any, norm: Any, first_tile: Any, first_row: Any = None):
        """`norm`: float32 [in_features], or None; unused where the kernel has its weights in shared memory.

        `first_row`: of the block's tokens; None: the first of all.
        """
        self.w, self.plan = w, plan
        self._group, self._quad = w.lane // 4, w.lane % 4
        self._run = steps_per_run(plan.group_size)
        self._column = first_tile * COLUMNS + self._quad * plan.lane_columns
        rows = []
        for b in range(plan.token_blocks):
            row = self._group + 8 * b
            if 8 * b + 8 > plan.rows:
                row = w.select(row < plan.rows, row, w.integer(plan.rows - 1))
            rows.append(row if first_row is None else row + first_row)
        # [run][token block], two words for each of the run's steps of 16 inputs.
        self._runs = [[self._read(x, row, first) for row in rows] for first in plan.run_columns]
        self._norm = None
        if norm is not None and not plan.norm_bytes:
            self._norm = [
                [w.load_four(norm, self._column, self._inside(first), first + 4 * i) for i in range(self._run)]
                for first in plan.run_columns
            ]

    def _read(self, x: Any, row: Any, first: int) -> Sequence[Any]:
        """The words of a token's run."""
        offset = row * self.plan.in_features + self._column
        return self.w.load_words(x, offset, 2 * self._run, self._inside(first), first)

    def read_norm(self, start: Any) -> None:
        """Reads the norm's weights of the warp's inputs from shared memory, `start` on."""
        w, start = self.w, start + self._quad * (4 * self.plan.lane_columns)
        self._norm = [
            [tuple(map(w.as_number, w.shared_words(start, 4 * first + 16 * i))) for i in range(self._run)]
            for first in self.plan.run_columns
        ]

    def words(self) -> list[list[list[Any]]]:
        """[tile][step][token block], two words a lane in the order of an mma's small operand."""
        runs = self._runs if self._norm is None else self._normalised()
        steps = [[words[2 * i : 2 * i + 2] for words in blocks] for blocks in runs for i in range(self._run)]
        per_tile = COLUMNS // 16
        return [steps[t : t + per_tile] for t in range(0, len(steps), per_tile)]

    def _inside(self, first: int) -> Any:
        return self._column + first < self.plan.in_features if self.plan.ragged else None

    def _normalised(self) -> list[list[list[Any]]]:
        """x times the norm's weights, in bfloat16; what it is to be divided by goes to shared memory, squared."""
        w, plan = self.w, self.plan
        squares = [w.number(0.0)] * plan.token_blocks
        runs = []
        assert self._norm is not None
        for blocks, weights in zip(self._runs, self._norm, strict=True):
            flat, scaled = [number for four in weights for number in four], []
            for b, words in enumerate(blocks):
                products, square = normalised(w, words, flat)
                squares[b] = squares[b] + square
                scaled.append(products)
            runs.append(scaled)
        for b, square in enumerate(squares):
            squares_stored(w, plan, square, (1, 2), self._quad < 1, self._group * 4 + 32 * b)
        return runs


def normalised(w: Any, words: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], Any]:
    """Pairs of bfloat16 times a norm's weights, rounded again, and the sum of their squares before."""
    numbers = [number for word in words for number in w.numbers_of(word)]
    square = w.number(0.0)
    for number in numbers:
        square = w.fma(number, number, square)
    products = [number * weight for number, weight in zip(numbers, weights, strict=True)]
    return [w.pair(*products[i : i + 2]) for i in range(0, len(products), 2)], square


def squares_stored(w: Any, plan: Plan, square: Any, masks: Sequence[int], one: Any, place: Any) -> None:
    """Stores the warp's sum of squares of a token, over the lanes that differ in the bits `masks`, by lane `one`."""
    for mask in masks:
        square = square + w.shuffle_xor(square, mask)
    w.shared_store(w.warp * plan.squares_bytes + place, square, one, plan.squares_start)
