"""Host arrays of linear weights while they are filled: rows of several tensors, one below the other."""

import math

import ml_dtypes
import numpy as np

from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.names_gguf import unpermute_rows
from jaxinfer.layers.weights import PermutedInputs, ScaledCodes
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, from_codes, from_int8_codes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at an address that a CPU device needs: `device_put` copies an array that lies elsewhere."""
    alignment = 64
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


class PackedRun:
    """Room for `rows` rows of codes of 4 or 8 bits of one kind: that of `first`, a row or more of the first tensor.

    Codes of 4 bits are one a byte for a few rows at a time only.
    """

    def __init__(self, rows: int, in_features: int, first: Codes, permutation: np.ndarray | None) -> None:
        self._in_features = in_features
        self._kind = _kind(first, permutation)
        self._first, self._permutation = first, permutation
        self._codes = aligned_empty((rows, -(-in_features * first.bits // 8)), np.dtype(np.uint8))
        groups = first.scales.shape[1]
        self._scales = aligned_empty((rows, groups), first.scales.dtype)
        self._offsets = None if first.offsets is None else aligned_empty((rows, groups), first.offsets.dtype)
        self._filled = 0

    def takes(self, first: Codes, permutation: np.ndarray | None) -> bool:
        """Whether rows of that kind can follow those that are there."""
        return _kind(first, permutation) == self._kind

    def append(self, tensor: QuantizedTensor, start: int, stop: int, unpermute_heads: int | None) -> None:
        """Adds rows start:stop of a tensor, in the order in which the model wants them."""
        begin, end = self._filled, self._filled + stop - start
        for first, last in tensor.chunks(start, stop):
            rows = tensor.rows(first, last)
            packed = packed_rows(rows)
            here = slice(begin + first - start, begin + last - start)
            self._codes[here], self._scales[here] = packed.codes, packed.scales
            if self._offsets is not None:
                self._offsets[here] = packed.offsets
        if unpermute_heads is not None:
            for array in (self._codes, self._scales, self._offsets):
                if array is not None:
                    array[begin:end] = unpermute_rows(array[begin:end], unpermute_heads)
        self._filled = end

    def finish(self) -> Packed | PermutedInputs:
        """The weight of the rows that were added."""
        n = self._filled
        offsets = None if self._offsets is None else self._offsets[:n]
        size = min(self._first.group_size, self._in_features)
        shape = (n, self._in_features)
        if self._first.bits == 8:
            weight = PackedInt8(self._codes[:n], self._scales[:n], offsets, shape, size)
        else:
            weight = PackedInt4(self._codes[:n], self._scales[:n], offsets, self._first.book, shape, size)
        return weight if self._permutation is None else PermutedInputs(weight, self._permutation)


class ScaledRun:
    """Room for `rows` rows of 8-bit codes with one scale an output, of one kind: that of `first`."""

    def __init__(self, rows: int, in_features: int, first: Codes) -> None:
        dtype = scaled_dtype(first)
        assert dtype is not None
        self._kind = _kind(first, None)
        self._codes = aligned_empty((rows, in_features), dtype)
        self._scales = aligned_empty((rows,), np.dtype(np.float32))
        self._filled = 0

    def takes(self, first: Codes, permutation: np.ndarray | None) -> bool:
        """Whether rows of that kind can follow those that are there."""
        return _kind(first, permutation) == self._kind

    def append(self, tensor: QuantizedTensor, start: int, stop: int, unpermute_heads: int | None) -> None:
        """Adds rows start:stop of a tensor, in the order in which the model wants them."""
        begin, end = self._filled, self._filled + stop - start
        for first, last in tensor.chunks(start, stop):
            rows = tensor.rows(first, last)
            here = slice(begin + first - start, begin + last - start)
            codes = rows.codes if rows.book is not None else rows.codes - np.uint8(128)
            self._codes[here], self._scales[here] = codes.view(self._codes.dtype), rows.scales[:, 0]
        if unpermute_heads is not None:
            for array in (self._codes, self._scales):
                array[begin:end] = unpermute_rows(array[begin:end], unpermute_heads)
        self._filled = end

    def finish(self) -> ScaledCodes:
        """The weight of the rows that were added."""
        return ScaledCodes(self._codes[: self._filled], self._scales[: self._filled])


class DenseRun:
    """Room for `rows` rows of decoded weights."""

    def __init__(self, rows: int, in_features: int, dtype: np.dtype) -> None:
        self._values = aligned_empty((rows, in_features), dtype)
        self._filled = 0

    def next_rows(self, count: int) -> np.ndarray:
        """The next rows, to be written into."""
        self._filled += count
        return self._values[self._filled - count : self._filled]

    def finish(self) -> np.ndarray:
        """The rows that were written."""
        return self._values[: self._filled]


def packed_rows(rows: Codes) -> Packed:
    """Some rows as a canonical weight. Codes of 8 bits have no book."""
    if rows.bits == 8:
        return from_int8_codes(rows.codes, rows.scales, rows.offsets, group_size=rows.group_size)
    return from_codes(rows.codes, rows.scales, rows.offsets, group_size=rows.group_size, book=rows.book)


def scaled_dtype(codes: Codes) -> np.dtype | None:
    """What 8-bit codes with one scale an output are, int8 or float8_e4m3fn; None for codes of another kind."""
    if codes.bits != 8 or codes.scales.shape[1] != 1 or codes.offsets is not None:
        return None
    if codes.book is None:
        return np.dtype(np.int8)
    return np.dtype(ml_dtypes.float8_e4m3fn) if codes.book.tobytes() == _E4M3 else None


_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).tobytes()


def _kind(codes: Codes, permutation: np.ndarray | None) -> tuple[object, ...]:
    """What rows must have in common to be one packed weight."""
    return (
        codes.bits,
        codes.group_size,
        codes.scales.dtype,
        codes.scales.shape[1],
        None if codes.offsets is None else codes.offsets.dtype,
        None if codes.book is None else codes.book.tobytes(),
        None if permutation is None else permutation.tobytes(),
    )
