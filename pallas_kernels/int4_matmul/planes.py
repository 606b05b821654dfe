"""One or two tokens' x as planes of digits, for a warp that multiplies many strips with it.

x is a 22-bit integer relative to the largest of the warp's inputs, much as in operands.py's `Digits`, but its three
bytes are all signed, and are columns of the small operand: one `mma` of bytes multiplies them all. Codes are bytes as
they lie in a word, those of the strip's last eight rows times sixteen: two instructions for eight codes and no shift,
where bfloat16 takes seven.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.int4_matmul.operands import BYTES_OF_ONE, MAGIC, MAGIC_NUMBER, Sums, segments_of
from pallas_kernels.int4_matmul.packing import COLUMNS
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import Row

DIGITS = 3
COLUMNS_OF_TOKEN = 4
"""Of the small operand's eight; the last of four repeats the one before, for nothing."""
MOST_TOKENS = 2
LOWER, UPPER = 0x0F0F0F0F, 0xF0F0F0F0


class Planes:
    """`rows` are the tokens. A warp has `bytes_of(plan)` of shared memory from `buffer` on."""

    code_bias = 0.0

    def __init__(self, w: Any, plan: Plan, rows: Sequence[Row], buffer: Any):
        self.w, self.plan, self._rows, self._buffer = w, plan, rows, buffer
        self._segments = segments_of(plan)

    @staticmethod
    def bytes_of(plan: Plan) -> int:
        return plan.rows * DIGITS * plan.warp_columns

    def prepare(self) -> None:
        """Normalises, takes x apart, and brings it into the order of an mma's small operand."""
        w, plan = self.w, self.plan
        plane, self._back = plan.warp_columns, []
        for token, row in enumerate(self._rows):
            words = row.numbers()
            bits = w.largest(words)
            for mask in row.masks:
                other = w.shuffle_xor(bits, mask)
                bits = w.select(bits < other, other, bits)
            # Half of what `Digits` has: the digits' signs need room.
            factor = w.factor_to_integers(bits) * 0.5
            self._back.append(w.factor_from_integers(bits) * 2.0)
            halves = [w.digits(words[i : i + 2], factor, balanced=True) for i in (0, 2)]
            for digit in range(DIGITS):  # the highest first
                place = (token * DIGITS + DIGITS - 1 - digit) * plane
                w.shared_store_words(self._buffer + row.place, [half[digit] for half in halves], place)
        w.warp_barrier()
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
        ones = [w.integer(BYTES_OF_ONE)] * 4
        self.of_tokens = [self._by_token(self._multiplied(steps, lambda pair: ones)) for steps in self._segments]

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment, in units of the token's factor."""

        def codes(pair: list[tuple[int, int]]) -> list[Any]:
            return [self.w.masked(pieces[t][s], mask) for t, s in pair for mask in (LOWER, UPPER)]

        return self._by_token(self._multiplied(self._segments[segment], codes), upper=1 / 16)

    def _multiplied(self, steps: list[tuple[int, int]], operand: Callable[[list[tuple[int, int]]], Any]) -> Any:
        """Integers on top of MAGIC, by element of an mma's result; `operand` gives that of two steps."""
        total = [self.w.integer(MAGIC)] * 4
        for i in range(0, len(steps), 2):
            pair = steps[i : i + 2]
            digits = [self._words[t * (COLUMNS // 16) + s] for t, s in pair]
            total = self.w.mma_bytes(total, operand(pair), digits, signed=(False, True))
        return total

    def _by_token(self, total: Sequence[Any], upper: float = 1.0) -> Sums:
        """The digits put together again; `upper`: what the sums of the upper eight rows are worth."""
        w, sums = self.w, []
        for e, unit in ((0, 1.0), (2, upper)):
            numbers = [w.as_number(total[e + i]) - MAGIC_NUMBER for i in range(2)]
            one = w.fma(numbers[0], self._worth[0], numbers[1] * self._worth[1])
            one = one + w.shuffle_xor(one, 1)
            if unit != 1.0:
                one = one * unit
            sums += [one, w.shuffle_xor(one, 2) if self.plan.rows > 1 else one]
        return [sums]

    def finished(self, totals: Sums) -> Sums:
        """Back to the scale of x."""
        return [[total * self._back[min(e % 2, self.plan.rows - 1)] for e, total in enumerate(totals[0])]]
