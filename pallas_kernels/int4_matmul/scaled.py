"""The small operand in float16: each token of a warp's x scaled by a power of two, and codes left what they are.

A float16 number whose exponent field is zero is its lowest bits times 2^-24, which tensor cores multiply exactly and at
full speed. So a word of eight codes becomes four registers of the large operand by three masks and a permutation: the
low four bits of a half are a code of row r of a strip, x 2^-24, and the low eight bits that code and 16 times one of
row r + 8. Row r's part of the sums of row r + 8 is taken off afterwards, once a group and not once a word. Products are
exact and summed in float32; the units go back in with the token's factor.
Sums are short of a few bits: a tensor core aligns what it adds by the exponents as they are written, and these codes'
are 2^-14, up to 2^10 times what they are worth. Results in float32 are within 4e-6 of float64's (measured).

x is scaled so that the largest magnitude of the warp's inputs of a token lies between 2^14 and 2^15: bfloat16 numbers
down to 2^-28 of it are exact, smaller ones are rounded to 2^-39 of it.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.operands import Sums, Tokens, segments_of
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import Row

UNITS = 2.0**24, 2.0**20
"""Of the two rows' codes."""
ONES = 0x00010001, 0x00100010
"""Two codes of 1, in the two rows' units."""
LOWER, BOTH = 0x000F000F, 0x00FF00FF
"""Of a word's pairs of codes: row r's, and row r + 8's over them."""
UPPER_BYTES = 0x4341
"""A word's bytes 1 and 3, each with a zero above it."""

type Back = list[list[Any]]
"""[token block][token of this lane's results]: the factors back from float16."""


class Scaled:
    """x in float16, for linear codes of 4 bits."""

    code_bias = 0.0

    def __init__(self, w: Any, plan: Plan, tokens: Tokens | Row):
        self.w, self.plan, self._tokens = w, plan, tokens
        self._segments = segments_of(plan)

    def prepare(self, book: Book | None = None) -> None:
        """Sums of x: `of_tokens[segment][token block]` are those of this lane's two tokens, in the two rows' units."""
        assert book is None, "codes are their own numbers here"
        w, tokens = self.w, self._tokens
        self._words, self._back = scaled_row(tokens) if isinstance(tokens, Row) else scaled_tokens(tokens)
        ones = [w.integer(pair) for pair in ONES] * 2
        self.of_tokens = [self._multiplied(segment, lambda t, s: ones) for segment in self._segments]

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment, in units of the token's factor and the row's."""
        sums = self._multiplied(self._segments[segment], lambda t, s: self._operand(pieces[t][s]))
        return [[*total[:2], total[2] - total[0], total[3] - total[1]] for total in sums]

    def _operand(self, word: Any) -> Sequence[Any]:
        """Rows r and r + 8 of eight inputs, twice; of the second, row r's codes are in it too."""
        w = self.w
        upper = w.pick_bytes(word, w.integer(0), UPPER_BYTES)
        return w.masked(word, LOWER), w.masked(word, BOTH), w.masked(upper, LOWER), upper

    def _multiplied(self, steps: list[tuple[int, int]], operand: Any) -> Sums:
        totals = [[self.w.number(0.0)] * 4 for _ in range(self.plan.token_blocks)]
        for t, s in steps:
            codes = operand(t, s)
            totals = [self.w.mma(p, codes, words, "f16") for p, words in zip(totals, self._words[t][s], strict=True)]
        return totals

    def finished(self, totals: Sums) -> Sums:
        """Back to the scale of x: two factors, since their product can be too large for float32."""
        return [
            [total * UNITS[e // 2] * factor[e % 2] for e, total in enumerate(block)]
            for block, factor in zip(totals, self._back, strict=True)
        ]


def scaled_words(w: Any, words: Sequence[Any], masks: Sequence[int]) -> tuple[list[Any], Any]:
    """Pairs of bfloat16 as pairs of float16, times a power of two, and the factor back.

    The largest magnitude is that of all lanes whose numbers differ in the bits `masks`.
    """
    bits = w.largest(words)
    for mask in masks:
        other = w.shuffle_xor(bits, mask)
        bits = w.select(bits < other, other, bits)
    factor = w.factor_to_halves(bits)
    halves = [w.half_pair(*(number * factor for number in w.numbers_of(word))) for word in words]
    return halves, w.factor_from_halves(bits)


def scaled_tokens(tokens: Tokens) -> tuple[list[list[list[Any]]], Back]:
    """`Tokens.words()` in float16, and the factors back."""
    w, words = tokens.w, tokens.words()
    back = []
    for b in range(tokens.plan.token_blocks):
        flat = [word for tile in words for step in tile for word in step[b]]
        halves, factor = scaled_words(w, flat, (1, 2))
        pairs = iter(zip(halves[::2], halves[1::2], strict=True))
        for tile in words:
            for step in tile:
                step[b] = list(next(pairs))
        # A result's two tokens are 2 quad and 2 quad + 1; a loaded word's is the lane's group.
        mine = w.lane % 4 * 8
        back.append([w.shuffle(factor, mine + 4 * i) for i in range(2)])
    return words, back


def scaled_row(row: Row) -> tuple[list[list[list[Any]]], Back]:
    """The same of a single token."""
    halves, back = scaled_words(row.w, row.numbers(), row.masks)
    return row.in_order(halves), [[back, back]]
