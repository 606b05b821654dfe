"""The small operand for one or two tokens: the digits of x are columns of a single mma of bytes, codes are as they lie.

x is a 22-bit integer relative to the largest of the warp's inputs of that token, as three signed bytes. Tokens are so
few that a token's digits can be columns of the small operand, of whose eight the rest would be for nothing: one
`mma.m16n8k32` multiplies 32 inputs by all of them, where operands.py's `Digits` takes three. Of the large operand a
word of eight codes is two registers: its lower four bits a byte are codes of row r, and the word as it is has 16 times
the code of row r + 8 on top of them. So unpacking is one instruction for eight codes; row r's part of the sums of row
r + 8 is taken off once a group. Sums are exact in 32 bits.

Values of x are rounded to 2^-21 of the largest (of those that the warp holds for the same token): bfloat16 numbers
down to 2^-13 of it are exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.operands import BYTES_OF_ONE, MAGIC, MAGIC_NUMBER, Sums, segments_of
from pallas_kernels.int4_matmul.packing import COLUMNS
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import ROUND, Row

DIGITS = 3
COLUMNS_OF_TOKEN = 4
"""Of the small operand's eight; the last of four repeats the one before, for nothing."""
MOST_TOKENS = 2
STEPS = 2
"""Steps of 16 inputs that an mma of bytes takes."""
LOWER = 0x0F0F0F0F


class Columns:
    """x in columns of bytes, for linear codes of 4 bits; `rows` are the tokens.

    From `buffer` on a warp has `bytes_of(plan)` of shared memory.
    """

    code_bias = 0.0

    def __init__(self, w: Any, plan: Plan, rows: Sequence[Row], buffer: Any):
        self.w, self.plan, self._rows, self._buffer = w, plan, rows, buffer
        self._segments = segments_of(plan)

    @staticmethod
    def serves(plan: Plan) -> bool:
        """Whether a plan for a scaled x can take this instead."""
        fits = Columns.bytes_of(plan) <= plan.slot_bytes and plan.segment % (16 * STEPS) == 0
        return plan.rows <= MOST_TOKENS and plan.in_rows is None and plan.bits == 4 and fits

    @staticmethod
    def plane_of(plan: Plan) -> int:
        """Bytes of one digit of all the warp's inputs of a token."""
        rounds = -(-plan.warp_columns // ROUND)
        return rounds * ROUND if rounds > 1 else plan.warp_columns

    @staticmethod
    def bytes_of(plan: Plan) -> int:
        return plan.rows * DIGITS * Columns.plane_of(plan)

    def prepare(self, book: Book | None = None) -> None:
        """Normalises x, takes it apart, and brings it into the order of an mma's small operand."""
        assert book is None, "codes are their own numbers here"
        w, plan = self.w, self.plan
        plane, back = self.plane_of(plan), []
        for token, row in enumerate(self._rows):
            words = row.numbers()
            bits = w.largest(words)
            for mask in row.masks:
                other = w.shuffle_xor(bits, mask)
                bits = w.select(bits < other, other, bits)
            # Half of what `Digits` has: the digits' signs need room.
            factor = w.factor_to_integers(bits) * 0.5
            back.append(w.factor_from_integers(bits) * 2.0)
            for first in range(0, len(words), 4):
                halves = [w.digits(words[first + i : first + i + 2], factor, balanced=True) for i in (0, 2)]
                for digit in range(DIGITS):  # the highest first
                    place = (token * DIGITS + DIGITS - 1 - digit) * plane + first // 4 * ROUND
                    w.shared_store_words(self._buffer + row.place, [half[digit] for half in halves], place)
        w.warp_barrier()
        self._words = self._read(plane)
        # What a lane's two columns of a result are worth: the two higher digits, or the lowest and nothing.
        quad = w.lane % 4
        mine = back[0] if len(back) < 2 else w.select(quad < 2, *back)
        high = quad % 2 < 1
        self._worth = [w.select(high, w.number(a), w.number(b)) * mine for a, b in ((65536.0, 1.0), (256.0, 0.0))]
        ones = [w.integer(BYTES_OF_ONE)] * (2 * STEPS)
        self.of_tokens = []
        for steps in self._segments:
            first, second = (w.as_number(word) - MAGIC_NUMBER for word in self._multiplied(steps, lambda _: ones)[:2])
            self.of_tokens.append([[first, second, first * 16.0, second * 16.0]])

    def _read(self, plane: int) -> list[Any]:
        """This lane's column, a word for each step."""
        w, plan = self.w, self.plan
        group, quad = w.lane // 4, w.lane % 4
        token, column = group // COLUMNS_OF_TOKEN, group % COLUMNS_OF_TOKEN
        token = w.select(token < plan.rows, token, w.integer(plan.rows - 1))
        column = w.select(column < DIGITS, column, w.integer(DIGITS - 1))
        start = self._buffer + (token * DIGITS + column) * plane + quad * plan.lane_columns
        return [word for first in plan.run_columns for word in w.shared_words(start, first, STEPS)]

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment, by digit, in units of the token's factor; row r + 8's 16 times."""
        w = self.w

        def codes(pair: list[tuple[int, int]]) -> list[Any]:
            return [word for t, s in pair for word in (w.masked(pieces[t][s], LOWER), pieces[t][s])]

        sums = [w.as_number(word) for word in self._multiplied(self._segments[segment], codes)]
        return [[*(number - MAGIC_NUMBER for number in sums[:2]), sums[2] - sums[0], sums[3] - sums[1]]]

    def _multiplied(self, steps: list[tuple[int, int]], operand: Callable[[list[tuple[int, int]]], Any]) -> Any:
        """Integers on top of MAGIC, by element of an mma's result; `operand` gives that of two steps."""
        total = [self.w.integer(MAGIC)] * 4
        for i in range(0, len(steps), STEPS):
            pair = steps[i : i + STEPS]
            digits = [self._words[t * (COLUMNS // 16) + s] for t, s in pair]
            total = self.w.mma_bytes(total, operand(pair), digits, signed=(False, True))
        return total

    def finished(self, totals: Sums) -> Sums:
        """The digits put together again, at the scale of x."""
        w, sums = self.w, []
        for e, unit in ((0, 1.0), (2, 1 / 16)):
            total = w.fma(totals[0][e], self._worth[0], totals[0][e + 1] * self._worth[1])
            total = (total + w.shuffle_xor(total, 1)) * unit
            sums += [total, w.shuffle_xor(total, 2) if self.plan.rows > 1 else total]
        return [sums]
