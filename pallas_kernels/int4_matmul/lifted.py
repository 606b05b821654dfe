"""The small operand in bfloat16 as it is, but for a power of two, and codes left what they are.

The lowest eight bits of a bfloat16 number are worth 2^-133 each: they are all of a subnormal and the least of the
smallest normal ones. Tensor cores multiply such numbers exactly and at full speed. So a word of eight codes becomes
four registers of the large operand by three masks and a permutation: the low four bits of a half are a code of row r of
a strip, and the low eight bits that code and 16 times one of row r + 8. Row r's part of the sums of row r + 8 is taken
off afterwards, once a group and not once a word. x is lifted by 2^48 so that products are no subnormals: one
instruction for two numbers, which rounds nothing.

Products are exact and summed in float32; sums are short of a few bits: a tensor core aligns what it adds by the
exponents as they are written, 2^-126 for a subnormal, up to 2^7 times what it is worth.

x may be 2^79 at most (a larger one gives infinity or NaN); of tokens whose inputs are all below 2^-41 sums lose more.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.operands import Sums, Tokens, added, segments_of, summed
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import Row

LIFT = 0x57805780
"""Two bfloat16, 2^48."""
UNIT = 2.0 ** (133 - 48)
"""Of codes times the lifted x."""
ONES = 0x00010001
"""Two codes of 1."""
LOWER, BOTH = 0x000F000F, 0x00FF00FF
"""Of a word's pairs of codes: row r's, and row r + 8's over them."""
UPPER_BYTES = 0x4341
"""A word's bytes 1 and 3, each with a zero above it."""
CHAIN = 4
"""Products that wait for each other, of the sums of x, which all else waits for."""


class Lifted:
    """x in bfloat16, for linear codes of 4 bits."""

    code_bias = 0.0

    def __init__(self, w: Any, plan: Plan, tokens: Tokens | Row):
        self.w, self.plan, self._tokens = w, plan, tokens
        self._segments = segments_of(plan)

    def prepare(self, book: Book | None = None) -> None:
        """Sums of x: `of_tokens[segment][token block]` are those of this lane's two tokens."""
        assert book is None, "codes are their own numbers here"
        w = self.w
        lift = w.integer(LIFT)
        self._words = [
            [[[w.multiply_pairs(word, lift) for word in words] for words in step] for step in tile]
            for tile in self._tokens.words()
        ]
        ones = [w.integer(ONES)] * 4
        self.of_tokens = []
        for steps in self._segments:
            chains = [
                summed(w, self.plan, self._words, steps[i : i + CHAIN], lambda t, s: ones)
                for i in range(0, len(steps), CHAIN)
            ]
            self.of_tokens.append([[*total[:2], *total[:2]] for total in functools.reduce(added, chains)])

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment."""
        w, steps, results = self.w, self._segments[segment], []
        sixteenth = w.number(1 / 16)
        sums = summed(w, self.plan, self._words, steps, lambda t, s: self._operand(pieces[t][s]))
        for lower, other, *both in sums:
            upper = [w.fma(b, sixteenth, a * (-1 / 16)) for a, b in zip((lower, other), both, strict=True)]
            results.append([lower, other, *upper])
        return results

    def _operand(self, word: Any) -> Sequence[Any]:
        """Rows r and r + 8 of eight inputs, twice; of the second, row r's codes are in it too."""
        w = self.w
        upper = w.pick_bytes(word, w.integer(0), UPPER_BYTES)
        return w.masked(word, LOWER), w.masked(word, BOTH), w.masked(upper, LOWER), upper

    def finished(self, totals: Sums) -> Sums:
        """Back to the scale of x."""
        return [[total * UNIT for total in block] for block in totals]
