"""Host arrays of linear weights while they are filled: rows of several tensors, one below the other."""

import math

import ml_dtypes
import numpy as np

from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.fp8 import numbers
from checkpoints.names_gguf import unpermute_rows
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, from_codes, from_int8_codes, is_whole

type Kind = tuple[object, ...]
"""What rows must have in common to be one packed weight."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at an address that a CPU device needs: `device_put` copies an array that lies elsewhere."""
    alignment = 64
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


class PackedRun:
    """Room for `rows` rows of codes of 4 or 8 bits of one kind: that of `first`, a row or more of the first tensor.

    Codes of 4 bits are one a byte for a few rows at a time only. `kind` is that of `kind_of`.
    """

    def __init__(self, kind: Kind, rows: int, in_features: int, first: Codes, permutation: np.ndarray | None) -> None:
        self.kind, self.num_rows = kind, 0
        self._in_features = in_features
        self._first, self._permutation = first, permutation
        self._codes = aligned_empty((rows, -(-in_features * first.bits // 8)), np.dtype(np.uint8))
        groups = first.scales.shape[1]
        self._scales = aligned_empty((rows, groups), first.scales.dtype)
        self._offsets = None if first.offsets is None else aligned_empty((rows, groups), first.offsets.dtype)

    def append(self, tensor: QuantizedTensor, start: int, stop: int, unpermute_heads: int | None) -> None:
        """Adds rows start:stop of a tensor, in the order in which the model wants them."""
        begin, end = self.num_rows, self.num_rows + stop - start

        def take(first: int, last: int) -> None:
            rows = tensor.rows(first, last)
            packed = packed_rows(rows)
            here = slice(begin + first - start, begin + last - start)
            self._codes[here], self._scales[here] = packed.codes, packed.scales
            if self._offsets is not None:
                self._offsets[here] = packed.offsets

        tensor.each_chunk(start, stop, take)
        if unpermute_heads is not None:
            for array in (self._codes, self._scales, self._offsets):
                if array is not None:
                    array[begin:end] = unpermute_rows(array[begin:end], unpermute_heads)
        self.num_rows = end

    def finish(self) -> Packed | PermutedInputs:
        """The weight of the rows that were added."""
        n = self.num_rows
        offsets = None if self._offsets is None else self._offsets[:n]
        size = min(self._first.group_size, self._in_features)
        shape = (n, self._in_features)
        if self._first.bits == 8:
            weight = PackedInt8(self._codes[:n], self._scales[:n], offsets, shape, size)
        else:
            book = self._first.book
            weight = PackedInt4(self._codes[:n], self._scales[:n], offsets, book, shape, size, whole=is_whole(book))
        return weight if self._permutation is None else PermutedInputs(weight, self._permutation)


class ScaledRun:
    """Room for `rows` rows of 8-bit codes with one scale an output, of one kind: that of `first`."""

    def __init__(self, kind: Kind, rows: int, in_features: int, first: Codes) -> None:
        self.kind, self.num_rows = kind, 0
        dtype = scaled_dtype(first)
        assert dtype is not None
        self._codes = aligned_empty((rows, in_features), dtype)
        self._scales = aligned_empty((rows,), np.dtype(np.float32))

    def append(self, tensor: QuantizedTensor, start: int, stop: int, unpermute_heads: int | None) -> None:
        """Adds rows start:stop of a tensor, in the order in which the model wants them."""
        begin, end = self.num_rows, self.num_rows + stop - start

        def take(first: int, last: int) -> None:
            rows = tensor.rows(first, last)
            here = slice(begin + first - start, begin + last - start)
            codes = rows.codes if rows.book is not None else rows.codes - np.uint8(128)
            self._codes[here], self._scales[here] = codes.view(self._codes.dtype), rows.scales[:, 0]

        tensor.each_chunk(start, stop, take)
        if unpermute_heads is not None:
            for array in (self._codes, self._scales):
                array[begin:end] = unpermute_rows(array[begin:end], unpermute_heads)
        self.num_rows = end

    def finish(self) -> ScaledCodes:
        """The weight of the rows that were added."""
        return ScaledCodes(self._codes[: self.num_rows], self._scales[: self.num_rows])


class BlockRun:
    """Room for `rows` rows of 8-bit floats with a scale for each block of `block_rows` of them, of one kind."""

    def __init__(self, kind: Kind, rows: int, in_features: int, first: Codes, block_rows: int) -> None:
        self.kind, self.num_rows = kind, 0
        dtype = float8_of(first)
        assert dtype is not None
        self._block = (block_rows, min(first.group_size, in_features))
        self._codes = aligned_empty((rows, in_features), dtype)
        self._scales = aligned_empty((-(-rows // block_rows), first.scales.shape[1]), np.dtype(np.float32))

    def append(self, tensor: QuantizedTensor, start: int, stop: int, unpermute_heads: int | None) -> None:
        """Adds rows start:stop of a tensor, in the order in which the model wants them; a block begins with them."""
        block_rows, begin, end = self._block[0], self.num_rows, self.num_rows + stop - start
        assert begin % block_rows == 0

        def take(first: int, last: int) -> None:
            rows = tensor.rows(first, last)
            place = begin + first - start
            self._codes[place : place + last - first] = rows.codes.view(self._codes.dtype)
            skipped = -place % block_rows  # to the next block that begins here
            scales = rows.scales[skipped::block_rows]
            block = -(-place // block_rows)
            self._scales[block : block + len(scales)] = scales

        tensor.each_chunk(start, stop, take)
        if unpermute_heads is not None:
            for array in (self._codes, self._scales):
                array[begin:end] = unpermute_rows(array[begin:end], unpermute_heads)
        self.num_rows = end

    def finish(self) -> BlockCodes:
        """The weight of the rows that were added."""
        blocks = -(-self.num_rows // self._block[0])
        return BlockCodes(self._codes[: self.num_rows], self._scales[:blocks], self._block)


class DenseRun:
    """Room for `rows` rows of decoded weights."""

    def __init__(self, rows: int, in_features: int, dtype: np.dtype) -> None:
        self._values = aligned_empty((rows, in_features), dtype)
        self.num_rows = 0

    def next_rows(self, count: int) -> np.ndarray:
        """The next rows, to be written into."""
        self.num_rows += count
        return self._values[self.num_rows - count : self.num_rows]

    def finish(self) -> np.ndarray:
        """The rows that were written."""
        return self._values[: self.num_rows]


def packed_rows(rows: Codes) -> Packed:
    """Some rows as a canonical weight. Codes of 8 bits have no book."""
    if rows.bits == 8:
        return from_int8_codes(rows.codes, rows.scales, rows.offsets, group_size=rows.group_size)
    return from_codes(rows.codes, rows.scales, rows.offsets, group_size=rows.group_size, book=rows.book)


def scaled_dtype(codes: Codes) -> np.dtype | None:
    """What 8-bit codes with one scale an output are, int8 or a float8; None for codes of another kind."""
    if codes.bits != 8 or codes.scales.shape[1] != 1 or codes.offsets is not None:
        return None
    return np.dtype(np.int8) if codes.book is None else float8_of(codes)


def float8_of(codes: Codes) -> np.dtype | None:
    """The type whose numbers an 8-bit code book is, as all of them are; None for other codes."""
    return None if codes.bits != 8 or codes.book is None else FLOAT8[codes.book.tobytes()]


FLOAT8 = {numbers(dtype).tobytes(): np.dtype(dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}


def kind_of(codes: Codes, permutation: np.ndarray | None, block_rows: int) -> Kind:
    """Of rows of which `block_rows` together have the same scales."""
    return (
        block_rows,
        codes.bits,
        codes.group_size,
        codes.scales.dtype,
        codes.scales.shape[1],
        None if codes.offsets is None else codes.offsets.dtype,
        None if codes.book is None else codes.book.tobytes(),
        None if permutation is None else permutation.tobytes(),
    )
