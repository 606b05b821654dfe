"""From codes to bfloat16 weights in registers, for the kernels for many rows."""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.code_words import bytes_to_pairs
from pallas_kernels.int4_matmul.mosaic import Arguments

NONE, EIGHT = 0x43004300, 0x43084308  # two bfloat16 of 128, of 128 + 8
MINUS_128, OF_384 = 0xC300C300 - (1 << 32), 0x43C043C0

# Row r's zero point twice, each in a word's half, of the 16 bits that are those of rows r and r + 8: with the upper
# byte of 128, or with none.
ZERO_AFTER_128, ZERO_ALONE = (0x5050, 0x5151), (0x4040, 0x4141)


class RowPair:
    """Scales and offsets of a lane's two rows, r and r + 8, for inputs that share them."""

    def __init__(
        self,
        w: Any,
        a: Arguments,
        scale: Callable[[int], Any],
        offset: Callable[[int], Any],
        book: Book | None,
        factor: Any = None,
    ):
        """`scale(place)` and `offset(place)` read the word `place` bytes from the first row's number on.

        Zero points are two bytes: their word is those 16 bits. `factor` (float32) multiplies the scales.
        """
        self.w, self.kind, self.bits, self.book = w, a.kind, a.bits, book
        self.scale = numbers(w, a.scale_dtype, scale, factor)
        self.zero = self._zeros(offset)
        if self.kind == "minimum":
            assert a.offset_dtype is not None
            self.minimum = numbers(w, a.offset_dtype, offset)

    def _zeros(self, offset: Callable[[int], Any]) -> list[Any] | None:
        """For each row what to subtract from the numbers of `_codes`; None: nothing."""
        w = self.w
        if self.kind == "zero_point":
            both = offset(0)
            if self.bits == 4:
                return [w.permute(both, NONE, selector) for selector in ZERO_AFTER_128]
            return [self._less_128(w.permute(both, 0, selector)) for selector in ZERO_ALONE]
        if self.kind == "minimum":
            return [w.integer(NONE if self.bits == 4 else MINUS_128)] * 2
        return [w.integer(EIGHT)] * 2 if self.kind == "symmetric" and self.bits == 4 else None

    def _less_128(self, word: Any) -> Any:
        """The byte in each half of a word, less 128, as bfloat16."""
        w = self.w
        rest, highest = (w.masked(word, mask, ones=NONE) for mask in (0x007F007F, 0x00800080))
        return w.add_pairs(w.subtract_pairs(rest, w.integer(OF_384)), highest)

    def weights(self, words: Sequence[Any]) -> list[Any]:
        """The eight weights of a word (of 8 bits: of two), two a word: of row r, of row r + 8, of r, of r + 8."""
        return [self._weight(code, i % 2) for i, code in enumerate(self._codes(words))]

    def _codes(self, words: Sequence[Any]) -> Sequence[Any]:
        """Pairs of 128 + code, of the code book's numbers, or of a code of 8 bits less 128."""
        if self.bits == 8:
            upper, lower = (bytes_to_pairs(self.w, word) for word in words)
            return upper[0], lower[0], upper[1], lower[1]
        return self.w.codes(words[0]) if self.book is None else self.book.numbers(words[0])

    def _weight(self, code: Any, row: int) -> Any:
        w = self.w
        high, low = self.scale[row]
        number = code if self.zero is None else w.subtract_pairs(code, self.zero[row])
        if self.kind != "minimum":
            return (
                w.multiply_pairs(number, high)
                if low is None
                else w.fma_pairs(number, high, w.multiply_pairs(number, low))
            )
        minimum, rest = self.minimum[row]
        weight = w.fma_pairs(number, high, minimum)
        if low is not None:
            rest = w.multiply_pairs(number, low) if rest is None else w.fma_pairs(number, low, rest)
        return weight if rest is None else w.add_pairs(weight, rest)


def numbers(w: Any, dtype: str, read: Callable[[int], Any], factor: Any = None) -> list[tuple[Any, Any]]:
    """Two neighbouring numbers, each as (number, rest): bfloat16 in both halves of a word; no rest for bfloat16.

    Those that are multiplied by a factor have a rest.
    """
    if dtype == "float32":
        both = [w.as_float(read(place)) for place in (0, 4)]
    else:
        word = read(0)
        if dtype == "bfloat16":
            twice = [w.permute(word, 0, selector) for selector in (0x1010, 0x3232)]
            if factor is None:
                return [(number, None) for number in twice]
            both = [w.low_number(number) for number in twice]
        else:
            both = [w.half_number(word, 0), w.half_number(word, 1)]
    split = []
    for number in both if factor is None else [number * factor for number in both]:
        high = w.twice(number)
        split.append((high, w.twice(number - w.low_number(high))))
    return split
