"""From codes to bfloat16 weights in registers, for the kernels for many rows."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.int4_matmul.packing import Kind

EIGHT = 0x43084308  # two bfloat16 of 128 + 8
NONE = 0x43004300  # two of 128


class RowPair:
    """Scales and offsets of a lane's two rows, r and r + 8, for inputs that share them."""

    def __init__(
        self,
        w: Any,
        kind: Kind,
        scale_dtype: str,
        scale: Callable[[int], Any],
        offset_dtype: str | None,
        offset: Callable[[int], Any],
    ):
        """`scale(place)` and `offset(place)` read the word `place` bytes from the first row's number on.

        Zero points are two bytes: their word is those 16 bits.
        """
        self.w, self.kind = w, kind
        self.scale = numbers(w, scale_dtype, scale)
        if kind == "symmetric":
            self.zero = [w.integer(EIGHT)] * 2
        elif kind == "zero_point":
            both = offset(0)
            self.zero = [w.permute(both, NONE, selector) for selector in (0x5050, 0x5151)]
        else:
            assert offset_dtype is not None
            self.zero = [w.integer(NONE)] * 2
            self.minimum = numbers(w, offset_dtype, offset)

    def weights(self, word: Any) -> list[Any]:
        """A word's eight weights, two a word: of row r, of row r + 8, of r, of r + 8."""
        return [self._weight(code, i % 2) for i, code in enumerate(self.w.codes(word))]

    def _weight(self, code: Any, row: int) -> Any:
        """`code`: two bfloat16 of 128 + code."""
        w = self.w
        high, low = self.scale[row]
        number = w.subtract_pairs(code, self.zero[row])
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


def numbers(w: Any, dtype: str, read: Callable[[int], Any]) -> list[tuple[Any, Any]]:
    """Two neighbouring numbers, each as (number, rest): bfloat16 in both halves of a word; no rest for bfloat16."""
    if dtype == "bfloat16":
        word = read(0)
        return [(w.permute(word, 0, selector), None) for selector in (0x1010, 0x3232)]
    if dtype == "float16":
        word = read(0)
        both = [w.half_number(word, 0), w.half_number(word, 1)]
    else:
        both = [w.as_float(read(place)) for place in (0, 4)]
    split = []
    for number in both:
        high = w.twice(number)
        split.append((high, w.twice(number - w.low_number(high))))
    return split
