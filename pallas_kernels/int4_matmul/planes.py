"""One or two tokens' x as planes of digits, for a warp that multiplies many strips with it.

x is a 22-bit integer relative to the largest of the warp's inputs, much as in operands.py's `Digits`, but its three
bytes are all signed, and are columns of the small operand: one `mma` of bytes multiplies them all. Codes are bytes as
they lie in a word: a whole word, which is the lower rows' codes and sixteen times the upper rows', and the latter
alone. Sums of both are exact, so that their difference is what the lower rows give: one instruction for eight codes and
no shift, where bfloat16 takes seven. Lanes that hold the same token's sums part the strips among themselves.
"""

import math
from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.operands import MAGIC, MAGIC_NUMBER, normalised, segments_of
from pallas_kernels.int4_matmul.packing import COLUMNS
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.shared_rows import Rows
from pallas_kernels.int4_matmul.strip import Factors

DIGITS = 3
COLUMNS_OF_TOKEN = 4
"""Of the small operand's eight; the last of four repeats the one before, for nothing."""
MOST_TOKENS = 2
UPPER = 0xF0F0F0F0
FOUR = 4
"""Inputs of a token that a lane has."""
MASKS = (1, 2, 4, 8, 16)


class Inputs:
    """A warp's 128 inputs of one token, four neighbouring ones a lane, on their way into registers."""

    def __init__(self, w: Any, plan: Plan, x: Any, first_tile: Any, row: int):
        """x: bfloat16 [rows, in_features] in global memory, or `Rows` of shared memory."""
        self._w = w
        column = first_tile * COLUMNS + w.lane * FOUR
        if isinstance(x, Rows):
            self._words = x.read(w, w.integer(row), column, 0, 2)
        else:
            self._words = w.load_words(x, column + row * plan.in_features, 2, None)

    def normalised(self, norm: Any) -> tuple[Sequence[Any], Any]:
        """Two words, and the sum of their squares; or times the norm's weights, which lie in shared memory from byte
        `norm` on, and the sum of the squares before."""
        if norm is None:
            return self._words, None
        weights = self._w.shared_words(norm + self._w.lane * (4 * FOUR))
        return normalised(self._w, self._words, [self._w.as_number(word) for word in weights])


class Planes:
    """`rows` are the tokens. A warp has `bytes_of(plan)` of shared memory from `buffer` on."""

    code_bias = 0.0

    def __init__(self, w: Any, plan: Plan, rows: Sequence[Inputs], buffer: Any):
        self.w, self.plan, self._rows, self._buffer = w, plan, rows, buffer
        self.sharers = self.sharers_of(plan)
        self._segments = segments_of(plan)

    @staticmethod
    def sharers_of(plan: Plan) -> int:
        """Lanes with the same row and token, each of which has another strip's sums: 2 or 4."""
        return math.gcd(plan.schedule.strips, 4 // plan.rows)

    @staticmethod
    def bytes_of(plan: Plan) -> int:
        return plan.rows * DIGITS * plan.warp_columns

    def prepare(self, norm: Any, token_bytes: int) -> None:
        """Normalises, takes x apart, and stores it in the order of an mma's small operand.

        `norm`: where the warp's weights of the norm are in shared memory, or None. Sums of squares go to the plan's
        place for them, those of a token `token_bytes` behind those of the one before.
        """
        w, plan, of_tokens, lanes = self.w, self.plan, [], self.plan.segment // FOUR
        for token, row in enumerate(self._rows):
            words, square = row.normalised(norm)
            bits, total = w.largest(words), sum_of(w, words)
            for mask in MASKS:
                other = w.shuffle_xor(bits, mask)
                bits = w.select(bits < other, other, bits)
                if mask < lanes:
                    total = total + w.shuffle_xor(total, mask)
                if square is not None:
                    square = square + w.shuffle_xor(square, mask)
            if square is not None:
                place = w.warp * plan.squares_bytes + token * token_bytes
                w.shared_store(place, square, w.lane < 1, plan.squares_start)
            # Half of what `Digits` has: the digits' signs need room.
            factor, back = w.factor_to_integers(bits) * 0.5, w.factor_from_integers(bits) * 2.0
            total = total * factor
            sums = [total if lanes > 31 else w.shuffle(total, w.integer(i * lanes)) for i in range(plan.segments)]
            of_tokens.append([back, *sums])
            for digit, word in enumerate(w.digits(words, factor, balanced=True)):
                place = (token * DIGITS + DIGITS - 1 - digit) * plan.warp_columns  # the highest first
                w.shared_store(self._buffer + w.lane * FOUR, w.as_number(word), None, place)
        first = w.lane % 4 < 2
        own = of_tokens[0]
        if plan.rows > 1:
            own = [w.select(first, one, other) for one, other in zip(*of_tokens, strict=True)]
        self._back, *self._sums = own
        w.warp_barrier()

    def read(self) -> None:
        """Reads what `prepare` has stored."""
        w, plan, plane = self.w, self.plan, self.plan.warp_columns
        group, quad = w.lane // 4, w.lane % 4
        token, column = group // COLUMNS_OF_TOKEN, group % COLUMNS_OF_TOKEN
        token = w.select(token < plan.rows, token, w.integer(plan.rows - 1))
        column = w.select(column < DIGITS, column, w.integer(DIGITS - 1))
        start = self._buffer + (token * DIGITS + column) * plane + quad * 8
        # A step's word by step; two steps are neighbours.
        self._words = [word for first in range(0, plane, 32) for word in w.shared_words(start, first, 2)]
        # What a lane's two columns of a result are worth: the two higher digits, or the lowest and nothing.
        high = quad % 2 < 1
        self._worth = [w.select(high, w.number(a), w.number(b)) for a, b in ((65536.0, 1.0), (256.0, 0.0))]

    def totals(self, strips: Sequence[Any], factors: Sequence[Sequence[Factors]]) -> list[list[Any]]:
        """The warp's sums of each of the lane's strips, of its token: of row lane // 4, and of the one 8 later.

        `strips`: words of all strips by tile. Of each `sharers` the lane has number lane % sharers; the token is
        lane % 4 // 2. `factors`: of the lane's strips, by segment.
        """
        w, totals = self.w, [[self.w.number(0.0)] * 2 for _ in factors]
        for i, steps in enumerate(self._segments):
            products = [self._multiplied(steps, pieces) for pieces in strips]
            for j, of_strip in enumerate(factors):
                (scale, bias), total = of_strip[i], totals[j]
                lower, upper = self._own(products[j * self.sharers : (j + 1) * self.sharers])
                if bias is not None:
                    total = [w.fma(one, self._sums[i], number) for one, number in zip(bias, total, strict=True)]
                totals[j] = [w.fma(scale[0], lower, total[0]), w.fma(scale[1] * (1 / 16), upper, total[1])]
        return [[number * self._back for number in total] for total in totals]

    def _own(self, products: Sequence[Any]) -> list[Any]:
        """The lane's of two or four strips' sums, in units of the token's factor."""
        w = self.w
        if len(products) > 2:  # one token's: lanes 2 and 3 of four have the same numbers as 0 and 1
            lower = w.lane % 4 < 2
            pairs = zip(products[:2], products[2:], strict=True)
            products = [[w.select(lower, a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        first, second = ([self._worthy(product, upper) for upper in (False, True)] for product in products)
        even = w.lane % 2 < 1
        other = [w.shuffle_xor(w.select(even, b, a), 1) for a, b in zip(first, second, strict=True)]
        return [w.select(even, a, b) + more for a, b, more in zip(first, second, other, strict=True)]

    def _worthy(self, total: Sequence[Any], upper: bool) -> Any:
        """What the lane's two columns of digits give, of one of its rows."""
        w, above = self.w, total[2:]
        words = above if upper else [a - b for a, b in zip(total[:2], above, strict=True)]
        numbers = [w.as_number(word) - MAGIC_NUMBER for word in words]
        return w.fma(numbers[0], self._worth[0], numbers[1] * self._worth[1])

    def _multiplied(self, steps: list[tuple[int, int]], pieces: Sequence[Any]) -> Any:
        """Integers by element of an mma's result: of whole words on top of twice MAGIC, and of the upper rows' codes,
        sixteen times what they are, on top of MAGIC."""
        w = self.w
        total = [w.integer(2 * MAGIC - (1 << 32))] * 2 + [w.integer(MAGIC)] * 2
        for i in range(0, len(steps), 2):
            pair = steps[i : i + 2]
            codes = [word for t, s in pair for word in (pieces[t][s], w.masked(pieces[t][s], UPPER))]
            digits = [self._words[t * (COLUMNS // 16) + s] for t, s in pair]
            total = w.mma_bytes(total, codes, digits, signed=(False, True))
        return total


def sum_of(w: Any, words: Sequence[Any]) -> Any:
    """The sum of bfloat16 numbers, two in a word, in float32."""
    numbers = [number for word in words for number in w.numbers_of(word)]
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]
