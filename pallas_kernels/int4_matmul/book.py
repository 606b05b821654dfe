"""A code book of sixteen numbers in registers, in which `prmt` looks codes up four at a time."""

from typing import Any

ENTRIES = 16
IN_PLACE = 0x32103210
"""For byte i of a result i: with 4 added, `prmt` takes it from its second word."""


class Book:
    """The numbers of a code book in units of `unit`, the smallest of them that is not zero.

    In that unit the numbers of FP4 are integers whatever factor a file has multiplied them by, as IQ4_NL's are: both
    are exact as bfloat16 and as bytes. NF4's are rounded to bfloat16, as weights in bfloat16 are.
    """

    def __init__(self, w: Any, array: Any, *, as_bytes: bool = False):
        """`array`: float32 [16] in global memory. `as_bytes`: for `code_bytes`, else for `numbers`."""
        self.w = w
        entries = w.first_numbers(array, ENTRIES)
        infinity = w.number(float("inf"))
        unit = infinity
        for entry in entries:
            magnitude = w.select(entry < 0.0, entry * -1.0, entry)
            smaller = (w.number(0.0) < magnitude) & (magnitude < unit)
            unit = w.select(smaller, magnitude, unit)
        self.unit = w.select(unit < infinity, unit, w.number(1.0))
        inverse = w.reciprocal(self.unit)
        numbers = [entry * inverse for entry in entries]
        # Each plane has a byte of every entry, four a word.
        if as_bytes:
            numbers = [w.rounded(number) for number in numbers]
            halves = [w.pick_bytes(numbers[i], numbers[i + 1], 0x0040) for i in range(0, ENTRIES, 2)]
            self._planes = [[w.pick_bytes(halves[i], halves[i + 1], 0x5410) for i in range(0, ENTRIES // 2, 2)]]
        else:
            halves = [w.pair(numbers[i], numbers[i + 1]) for i in range(0, ENTRIES, 2)]
            self._planes = [
                [w.pick_bytes(halves[i], halves[i + 1], selector) for i in range(0, ENTRIES // 2, 2)]
                for selector in (0x6420, 0x7531)
            ]

    def _found(self, codes: Any, which_eight: Any) -> list[Any]:
        """From each plane the bytes of four codes, `codes` without their highest bits, which `which_eight` has."""
        pick = self.w.pick_bytes
        return [pick(pick(*plane[:2], codes), pick(*plane[2:], codes), which_eight) for plane in self._planes]

    def numbers(self, word: Any) -> list[Any]:
        """Eight codes -> four words of two bfloat16 each, in the order of `Int4Warp.codes`."""
        w = self.w
        among_eight = w.masked(word, 0x77777777)
        # Codes come in the order 0, 1, 4, 5 (bytes 0 and 2 of the word), then 2, 3, 6, 7.
        which_eight = w.masked(word, 0x44444444, shift=1, ones=0x32321010)
        numbers = []
        for order in (0x0020, 0x0031):
            low, high = self._found(*(w.pick_bytes(words, words, order) for words in (among_eight, which_eight)))
            numbers += [w.pick_bytes(low, high, selector) for selector in (0x6240, 0x7351)]
        return numbers

    def code_bytes(self, word: Any) -> list[Any]:
        """Eight codes -> two words of four signed bytes, in the order of `Int4Warp.code_bytes`."""
        w = self.w
        among_eight = w.masked(word, 0x77777777)
        which_eight = w.masked(word, 0x44444444, shift=1, ones=IN_PLACE)
        (first,) = self._found(among_eight, which_eight)
        (second,) = self._found(*(w.pick_bytes(words, words, 0x0032) for words in (among_eight, which_eight)))
        return [w.pick_bytes(first, second, selector) for selector in (0x6420, 0x7531)]
