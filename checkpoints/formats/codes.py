"""What every format comes to: small unsigned codes, a scale for each group of inputs, and what a code means.

A linear weight is [out, in]; its groups run along the inputs and the last may be shorter. A format's module turns the
tensors of a file into a `QuantizedTensor`, which hands out `Codes` a few rows at a time, so that nobody needs the
whole weight with one code a byte.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

ELEMENTS_AT_ONCE = 1 << 19
"""Codes that are one a byte at the same time: decoded to float32 they are 2 MB, which stays in a core's cache.

Smaller pieces leave several threads waiting for Python.
"""

THREADS = min(4, os.cpu_count() or 1)
"""That decode pieces of a tensor side by side: NumPy works without Python's lock, and each takes a MB or two."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """Some rows of a weight: `codes` uint8 [rows, in], one a byte, below 2**bits; `scales` [rows, groups].

    Input `i` is of group `i // group_size`. The value of a code is

    - `scale * (code - 2**(bits - 1))` if there is neither offset nor book,
    - `scale * (code - offset)` if `offsets` [rows, groups] are uint8,
    - `scale * code + offset` if they are floating,
    - `scale * book[code]` if there is a book, float32 [2**bits].

    Formats of 2 and 3 bits are in the lower codes of 4 bits, those of 5 to 7 in those of 8; codes that are symmetric
    about zero are moved to the middle. Scales keep the precision that the file has.
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    book: np.ndarray | None
    bits: Literal[4, 8]
    group_size: int

    def values(self) -> np.ndarray:
        """The weights, float32 [rows, in]: every step in float32."""
        values = self.codes.astype(np.float32) if self.book is None else self.book[self.codes]
        rows, in_features = values.shape
        whole = in_features % self.group_size == 0
        target = values.reshape(rows, -1, self.group_size) if whole and rows else values

        def spread(per_group: np.ndarray) -> np.ndarray:
            """[rows, groups] in float32, in a shape that broadcasts to `target`."""
            per_group = per_group.astype(np.float32)
            if target.ndim == 3:
                return per_group[:, :, None]
            return np.repeat(per_group, self.group_size, axis=1)[:, :in_features]

        with np.errstate(over="ignore", invalid="ignore"):  # a scale may be inf or NaN; that is data, not a fault
            if self.offsets is None and self.book is None:
                target -= np.float32(2 ** (self.bits - 1))
            elif self.offsets is not None and self.offsets.dtype == np.uint8:
                target -= spread(self.offsets)
            target *= spread(self.scales)
            if self.offsets is not None and self.offsets.dtype != np.uint8:
                target += spread(self.offsets)
        return values


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight [out, in] in the packing of its file. `rows(start, stop)` decodes a range of output features.

    `block_rows` rows, counted from the first, have the same scales: 1 unless the format scales blocks.

    `permutation` int32 [in], where there is one, says which input each column of the codes belongs to: the weight's
    column `permutation[j]` is column `j` of the codes. Act-order leaves the members of a group scattered; sorted so,
    they are neighbours again.
    """

    shape: tuple[int, int]
    rows: Callable[[int, int], Codes]
    permutation: np.ndarray | None = None
    block_rows: int = 1

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that together are start:stop, each small enough to be decoded at once."""
        # Multiples of 64 rows: formats that pack along the outputs are cut between words, and read in whole lines.
        step = max(64, ELEMENTS_AT_ONCE // max(1, self.shape[1]) // 64 * 64)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def each_chunk(self, start: int, stop: int, take: Callable[[int, int], None]) -> None:
        """Calls `take` with the ranges of `chunks`, by several threads at once and in any order."""
        chunks = list(self.chunks(start, stop))
        if len(chunks) < 2:
            for first, last in chunks:
                take(first, last)
            return
        with concurrent.futures.ThreadPoolExecutor(THREADS, "decoding") as pool:
            for done in [pool.submit(take, first, last) for first, last in chunks]:
                done.result()

    def read_into(self, out: np.ndarray, start: int, stop: int) -> None:
        """Decodes rows start:stop into `out` [stop - start, in], of any floating dtype, rounding once.

        Raises OverflowError for values that float16 cannot hold.
        """
        inverse = None if self.permutation is None else np.argsort(self.permutation)

        def take(first: int, last: int) -> None:
            values = self.rows(first, last).values()
            target = out[first - start : last - start]
            with np.errstate(over="ignore"):
                rounded = values.astype(out.dtype, copy=False)
            if out.dtype == np.float16 and bool((np.isinf(rounded) & np.isfinite(values)).any()):
                raise OverflowError("values beyond float16's 65504")
            target[...] = rounded if inverse is None else np.take(rounded, inverse, axis=1)

        self.each_chunk(start, stop, take)
