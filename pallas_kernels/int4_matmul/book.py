"""A code book of sixteen numbers in registers: eight words, in which `prmt` looks codes up four bytes at a time."""

from typing import Any

ENTRIES = 16


class Book:
    """The numbers of a code book in units of `unit`, the smallest of them that is not zero, rounded to bfloat16.

    In that unit the numbers of FP4 are integers whatever factor a file has multiplied them by, as IQ4_NL's are, so
    they are exact; NF4's are rounded, as weights in bfloat16 are.
    """

    def __init__(self, w: Any, array: Any):
        """`array`: float32 [16] in global memory."""
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
        pairs = [w.pair(entries[i] * inverse, entries[i + 1] * inverse) for i in range(0, ENTRIES, 2)]
        # Bytes of four entries a word: the lower ones of their bfloat16, the upper ones.
        self._planes = [
            [w.pick_bytes(pairs[i], pairs[i + 1], selector) for i in range(0, ENTRIES // 2, 2)]
            for selector in (0x6420, 0x7531)
        ]

    def numbers(self, word: Any) -> list[Any]:
        """Eight codes -> four words of two bfloat16 each, in the order of `Int4Warp.codes`."""
        w = self.w
        among_eight = w.masked(word, 0x77777777)
        # For byte i of a result, i or, where the code is 8 or more, 4 + i. Codes come in the order 0, 1, 4, 5 (bytes 0
        # and 2 of the word), then 2, 3, 6, 7.
        which_eight = w.masked(word, 0x44444444, shift=1, ones=0x32321010)
        numbers = []
        for order in (0x0020, 0x0031):
            codes, which = (w.pick_bytes(words, words, order) for words in (among_eight, which_eight))
            low, high = (
                w.pick_bytes(w.pick_bytes(plane[0], plane[1], codes), w.pick_bytes(plane[2], plane[3], codes), which)
                for plane in self._planes
            )
            numbers += [w.pick_bytes(low, high, selector) for selector in (0x6240, 0x7351)]
        return numbers
