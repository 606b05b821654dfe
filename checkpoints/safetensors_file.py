"""One safetensors file, read without trusting a byte of it.

The file is a u64 header length (little-endian), a JSON header `{name: {dtype, shape, data_offsets}}`, and the
tensors back to back: https://github.com/safetensors/safetensors#format. The reader is ours for two reasons.
Tensors go by plain reads into memory that the caller owns: a memory map keeps every page that was touched, so
the peak would be the whole file. And every size is checked before anything is allocated for it.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, check_regular
from checkpoints.tensors import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_RANK = 64  # NumPy's limit
MAX_SIZE = 2**56  # keeps every product of sizes that is used inside a signed 64-bit integer
CHUNK_BYTES = 16 * 2**20  # temporary memory while converting

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The format's dtype names. Types of less than a byte (F4, F6) are refused by name."""

_FLOATS = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith(("F", "BF")))

show = reprlib.Repr(maxstring=160, maxother=80, maxlist=8, maxdict=4, maxlevel=3).repr
"""`repr`, cut to a length that fits a message: names and values come from the file and may be of any size."""


class SafetensorsFile:
    """The tensors of one file. `tensors` is in file order, so reading in that order reads the disk forwards.

    Each read opens the file anew: reads are thread-safe and no descriptor stays open.
    """

    def __init__(self, path: Path) -> None:
        """Reads and checks the header; raises CheckpointError for a file that is not sound."""
        self.path = path
        with _open(path) as file:
            header, self._data_start, data_bytes = _read_header(file, path)
        offsets: dict[str, int] = {}
        infos: dict[str, TensorInfo] = {}
        for name, value in header.items():
            infos[name], offsets[name] = _parse_tensor(name, value, path)
        order = sorted(infos, key=lambda name: (offsets[name], infos[name].nbytes))
        self.tensors: Mapping[str, TensorInfo] = {name: infos[name] for name in order}
        self._offsets = offsets
        self._check_layout(data_bytes)

    def _check_layout(self, data_bytes: int) -> None:
        """The format allows neither overlaps nor holes: the tensors fill the file's data exactly."""
        ends = {name: self._offsets[name] + info.nbytes for name, info in self.tensors.items()}
        end = max(ends.values(), default=0)
        if end > data_bytes:
            raise CheckpointError(f"{self.path} is truncated: {data_bytes} of {end} bytes are there; download it again")
        position = 0
        for name in self.tensors:
            if self._offsets[name] != position:
                problem = "overlaps another" if self._offsets[name] < position else "leaves a hole before it"
                raise CheckpointError(f"{self.path}: tensor {show(name)} {problem}; the file is damaged")
            position = ends[name]
        if position != data_bytes:
            raise CheckpointError(
                f"{self.path} has {data_bytes - position} bytes after its last tensor; the file is damaged"
            )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns a fresh array of a tensor, or of `rows` (start:stop) of its first axis, in its dtype."""
        shape, position = self._select(name, rows)
        out = np.empty(shape, DTYPES[self.tensors[name].dtype])
        with _open(self.path) as file:
            self._fill(out, file, position, name)
        return out

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Reads a tensor, or only `rows` of it, into `out`: of the same shape, C-contiguous, writable.

        A floating-point tensor is converted to whatever floating-point dtype `out` has, with at most 16 MiB
        of temporary memory; any other needs its own dtype. Values too large for float16 are an error.
        """
        shape, position = self._select(name, rows)
        dtype = DTYPES[self.tensors[name].dtype]
        if out.shape != shape:
            raise ValueError(f"{name}: the rows to read have shape {shape}, the array to read into {out.shape}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"{name}: the array to read into must be C-contiguous and writable")
        if out.dtype != dtype and not (dtype in _FLOATS and out.dtype in _FLOATS):
            raise ValueError(
                f"{self.path}: {name} is {dtype} in the file and cannot be read into an array of {out.dtype}"
            )
        with _open(self.path) as file:
            if out.dtype == dtype:
                self._fill(out, file, position, name)
                return
            flat = out.reshape(-1)
            buffer = np.empty(min(flat.size, CHUNK_BYTES // dtype.itemsize), dtype)
            for start in range(0, flat.size, max(1, buffer.size)):
                target = flat[start : start + buffer.size]
                chunk = buffer[: target.size]
                self._fill(chunk, file, position + start * dtype.itemsize, name)
                self._convert(chunk, target, name)

    def _select(self, name: str, rows: slice | None) -> tuple[tuple[int, ...], int]:
        """Returns the shape of a tensor's rows and their position in the file, in bytes."""
        shape = self.tensors[name].shape
        start = 0
        if rows is not None:
            # A slice that reaches past the end is refused: clamping would return fewer rows than asked for.
            start = rows.start if rows.start is not None else 0
            stop = rows.stop if rows.stop is not None else shape[0] if shape else 0
            if not shape or rows.step not in (None, 1) or not 0 <= start <= stop <= shape[0]:
                raise ValueError(f"{name} has shape {shape}, which has no rows {start}:{stop} (step {rows.step or 1})")
            shape = (stop - start, *shape[1:])
        row_bytes = math.prod(shape[1:]) * DTYPES[self.tensors[name].dtype].itemsize
        return shape, self._data_start + self._offsets[name] + start * row_bytes

    def _fill(self, out: np.ndarray, file: FileIO, position: int, name: str) -> None:
        """Fills a contiguous array with the bytes at `position`."""
        view = memoryview(out.reshape(-1).view(np.uint8))
        try:
            file.seek(position)
            while view:  # one read returns at most 2 GiB on Linux
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{self.path} ends inside tensor {show(name)}; it changed while open")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def _convert(self, source: np.ndarray, out: np.ndarray, name: str) -> None:
        with np.errstate(over="ignore"):
            np.copyto(out, source, casting="unsafe")
        if out.dtype == np.float16 and bool((np.isinf(out) & np.isfinite(source)).any()):
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} has values beyond float16's 65504; use bfloat16 or float32"
            )


def _open(path: Path) -> FileIO:
    """Opens unbuffered, so that bytes go from the system straight into the caller's array."""
    try:
        check_regular(path)
        return FileIO(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error


def _read_header(file: FileIO, path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header, where the data begins, and how many bytes of data there are."""
    try:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} has {size} bytes, too few for its header: "
                "it is truncated or no safetensors file; download it again"
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} has a header of {length} bytes; the format allows {MAX_HEADER_BYTES}")
        raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = _decode_header(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header ({error}); download it again") from error
    return header, 8 + length, size - 8 - length


def _decode_header(raw: bytes) -> dict[str, Any]:
    header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    if not isinstance(header, dict):
        raise ValueError("not a JSON object")
    for name in header:
        name.encode("utf-8")  # JSON can spell half a surrogate pair, which could not be printed
    header.pop("__metadata__", None)
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _parse_tensor(name: str, value: Any, path: Path) -> tuple[TensorInfo, int]:
    """Returns a tensor's description and its offset from the start of the data, in bytes."""
    where = f"{path}: tensor {show(name)}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} has no description in the header; the file is damaged")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {show(dtype)}; supported are {', '.join(DTYPES)}")
    shape = _parse_sizes(value.get("shape"))
    if shape is None or len(shape) > MAX_RANK or math.prod(size for size in shape if size) > MAX_SIZE:
        raise CheckpointError(f"{where} has the impossible shape {show(value.get('shape'))}; the file is damaged")
    offsets = _parse_sizes(value.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has bad data_offsets {show(value.get('data_offsets'))}; the file is damaged")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where} of shape {show(list(shape))} and dtype {dtype} takes {nbytes} bytes, "
            f"but its data_offsets span {offsets[1] - offsets[0]}; the file is damaged"
        )
    return TensorInfo(name, shape, dtype, nbytes), offsets[0]


def _parse_sizes(value: Any) -> tuple[int, ...] | None:
    """A list of sizes; `type` and not `isinstance`, because JSON's `true` is an int to Python."""
    if isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_SIZE for size in value):
        return tuple(value)
    return None
