"""A store tensor by tensor, under the canonical names, like any checkpoint: to quantise it anew or to convert it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.fp8 import numbers
from checkpoints.names import TensorSource
from checkpoints.tensors import TensorInfo
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.store.reader import Store, rounded
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, unpack_codes


class StoredTensors:
    """The tensors of a store, decoded (`read`, `read_into`) or as codes (`quantized`).

    q, k and v are one weight in a store; it is kept in host memory until a tensor of another one is asked for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[str, tuple[str, str, int]] = {}
        self._last: tuple[tuple[str, str], Any] | None = None
        infos: dict[str, TensorInfo] = {}
        for piece, specs in store.specs():
            for field, spec in specs.items():
                start = 0
                for name, rows in zip(spec.sources, spec.rows, strict=True):
                    self._places[name] = piece, field, start
                    part, _, _ = self._part(name)
                    arrays = jax.tree.leaves(part)
                    num_bytes = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in arrays)
                    shape = (rows,) if spec.columns is None else (rows, spec.columns)
                    infos[name] = TensorInfo(name, shape, _kind(part), num_bytes * rows // part.shape[0])
                    start += rows
        self.tensors: Mapping[str, TensorInfo] = infos

    @property
    def sources(self) -> dict[str, TensorSource]:
        """Where each canonical tensor is: under its own name."""
        return {name: TensorSource(name) for name in self.tensors}

    def code_bits(self, name: str) -> int | None:
        """The width of a weight's codes, 4 or 8; None for a tensor that is not quantised."""
        part, _, _ = self._part(name)
        codes = part.weight if isinstance(part, PermutedInputs) else part
        if isinstance(codes, Packed):
            return codes.bits
        return 8 if isinstance(part, ScaledCodes | BlockCodes) else None

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The codes of a weight, None for a tensor that is not quantised."""
        if self.code_bits(name) is None:
            return None
        part, start = self._host(name)
        permutation = np.asarray(part.permutation) if isinstance(part, PermutedInputs) else None
        codes = part.weight if isinstance(part, PermutedInputs) else part
        shape = (self.tensors[name].shape[0], codes.shape[1])
        block_rows = codes.block[0] if isinstance(codes, BlockCodes) and start % codes.block[0] == 0 else 1
        return QuantizedTensor(shape, functools.partial(_rows, codes, start), permutation, block_rows)

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Reads a tensor, or a range of its rows, decoded, into `out` of any floating dtype."""
        tensor, first = self.quantized(name), 0 if rows is None else rows.start
        if tensor is None:
            values, start = self._host(name)
            out[...] = rounded(values[start + first : start + first + len(out)], out.dtype, name)
            return
        try:
            tensor.read_into(out, first, first + len(out))
        except OverflowError:
            raise CheckpointError(f"{name} has values beyond float16's 65504; use bfloat16 or float32") from None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A fresh array of a tensor, or of a range of its rows: float32 if it is quantised, else as it is stored."""
        part, _, _ = self._part(name)
        shape = self.tensors[name].shape
        count = shape[0] if rows is None else rows.stop - rows.start
        dtype = np.dtype(part.dtype) if isinstance(part, jax.ShapeDtypeStruct) else np.dtype(np.float32)
        out = np.empty((count, *shape[1:]), dtype)
        self.read_into(name, out, rows)
        return out

    def release(self, name: str) -> None:
        """Does nothing: the next tensor is often of the same weight."""

    def without_data(self) -> "StoredTensors":
        """The same tensors with codes and scales that read as zeros: nothing is read to tell of what kind they are."""
        return _Outline(self._store)

    def close(self) -> None:
        self._last = None

    def _part(self, name: str) -> tuple[Any, int, int]:
        """The abstract part of a weight that a tensor is in, the tensor's first row in it, and the part's index."""
        piece, field, start = self._places[name]
        weight = self._store.manifest.weights[piece][field].weight
        if not isinstance(weight, StackedOutputs):
            return weight, start, 0
        index = 0
        while start >= weight.parts[index].shape[0]:
            start -= weight.parts[index].shape[0]
            index += 1
        return weight.parts[index], start, index

    def _host(self, name: str) -> tuple[Any, int]:
        """The part that a tensor is in, of NumPy arrays, and the tensor's first row in it."""
        piece, field, _ = self._places[name]
        if self._last is None or self._last[0] != (piece, field):
            self._last = None
            self._last = (piece, field), self._store.host_weight(piece, field)
        weight, (_, start, index) = self._last[1], self._part(name)
        return (weight.parts[index] if isinstance(weight, StackedOutputs) else weight), start


class _Outline(StoredTensors):
    """Memory that is never written to is never taken, so the zeros cost nothing."""

    def _host(self, name: str) -> tuple[Any, int]:
        part, start, _ = self._part(name)
        return _zeros(part), start


def _zeros(part: Any) -> Any:
    """A weight of the same kind whose codes, scales and offsets are zeros, in the canonical layout."""
    if isinstance(part, PermutedInputs):
        return PermutedInputs(_zeros(part.weight), np.zeros(part.permutation.shape, np.int32))
    if not isinstance(part, Packed):
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), part)
    out_features, in_features = part.shape
    groups = (out_features, part.num_groups)
    return dataclasses.replace(
        part,
        codes=np.zeros((out_features, -(-in_features * part.bits // 8)), np.uint8),
        scales=np.zeros(groups, part.scales.dtype),
        offsets=None if part.offsets is None else np.zeros(groups, part.offsets.dtype),
        layout="canonical",
        **({} if part.book is None else {"book": np.zeros(part.book.shape, part.book.dtype)}),
    )


def _rows(weight: Any, first: int, start: int, stop: int) -> Codes:
    """Some rows of a weight of NumPy arrays, counted from `first`."""
    rows = slice(first + start, first + stop)
    if isinstance(weight, ScaledCodes):
        codes, scales = np.asarray(weight.codes[rows]).view(np.uint8), np.asarray(weight.scales[rows])[:, None]
        if weight.codes.dtype == np.int8:
            return Codes(codes + np.uint8(128), scales, None, None, 8, weight.shape[1])
        return Codes(codes, scales, None, numbers(weight.codes.dtype), 8, weight.shape[1])
    if isinstance(weight, BlockCodes):
        block_rows, block_columns = weight.block
        scales = np.asarray(weight.scales)[np.arange(rows.start, rows.stop) // block_rows]
        codes = np.asarray(weight.codes[rows]).view(np.uint8)
        return Codes(codes, scales, None, numbers(weight.codes.dtype), 8, block_columns)
    offsets = None if weight.offsets is None else weight.offsets[rows]
    if isinstance(weight, PackedInt8):
        return Codes(weight.codes[rows], weight.scales[rows], offsets, None, 8, weight.group_size)
    shape = (stop - start, weight.shape[1])
    part = PackedInt4(weight.codes[rows], weight.scales[rows], offsets, weight.book, shape, weight.group_size)
    book = None if weight.book is None else weight.book.astype(np.float32)
    return Codes(unpack_codes(part), part.scales, offsets, book, 4, weight.group_size)


def _kind(part: Any) -> str:
    """What a table of tensors calls it."""
    if isinstance(part, PermutedInputs):
        return _kind(part.weight) + ", inputs in another order"
    if isinstance(part, Packed):
        return f"int{part.bits}, groups of {part.group_size}"
    if isinstance(part, BlockCodes):
        return f"{part.codes.dtype} codes, blocks of {part.block[0]} x {part.block[1]}"
    return f"{part.codes.dtype} codes" if isinstance(part, ScaledCodes) else str(part.dtype)
