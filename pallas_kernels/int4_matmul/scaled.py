"""x in float16: each token of a warp's x scaled by a power of two, for codes that float16 holds (rows.py).

x is scaled so that the largest magnitude of the warp's inputs of a token lies between 2^14 and 2^15: bfloat16 numbers
down to 2^-28 of it are exact, smaller ones are rounded to 2^-39 of it.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.operands import Tokens
from pallas_kernels.int4_matmul.row import Row

type Back = list[list[Any]]
"""[token block][token of this lane's results]: the factors back from float16."""


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
