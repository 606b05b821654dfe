"""Reads GGUF files, single or split: a tensor at a time, decoded in bounded pieces."""

import mmap
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, check_regular
from checkpoints.formats import ggml_codes
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.ggml import dequantize
from checkpoints.gguf_header import Header, TensorEntry, parse_header
from checkpoints.positioned import read_at
from checkpoints.tensors import TensorInfo

_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at once: 1 MB of float32, which stays in a core's cache; larger pieces are slower."""

_FLOATS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class _Part:
    """One file: its header, and its bytes by plain reads.

    Mapped memory would count as this process's, and to touch a page of a file that has been cut since would end it.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            check_regular(path)
            self._file = path.open("rb", buffering=0)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be opened: {e.strerror}") from e
        self.close = weakref.finalize(self, self._file.close)  # at the latest when this object goes
        self._size = os.fstat(self._file.fileno()).st_size
        if self._size < 24:
            raise CheckpointError(f"{path}: not a GGUF file: it has {self._size} bytes, a header alone has 24")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            self.header: Header = parse_header(mapped, str(path))

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the bytes from `start` on. Several threads may call it at once."""
        view, done = memoryview(out.reshape(-1).view(np.uint8)), 0
        if self._file.closed:
            raise CheckpointError(f"{self.path}: the file has been closed; open it again to read more")
        try:
            while done < len(view):
                count = read_at(self._file, view[done:], start + done)
                if not count:
                    raise CheckpointError(
                        f"{self.path} has {os.fstat(self._file.fileno()).st_size} of the {self._size} bytes that it "
                        "had when it was opened; download it again, and replace a file that is in use by renaming "
                        "another one to it"
                    )
                done += count
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be read: {e.strerror}") from e


class GGUFFile:
    """A GGUF model opened for reading (the `Checkpoint` protocol, plus `metadata` and packed access).

    `path` may be any part of a split model; all parts are opened, and `metadata` is that of the first, as
    Python scalars, strings and lists. Raises CheckpointError if a file is missing, damaged or not supported.
    """

    metadata: dict[str, Any]
    paths: tuple[Path, ...]

    def __init__(self, path: str | os.PathLike[str]):
        self._parts = _open_parts(Path(path))
        self.paths = tuple(part.path for part in self._parts)
        self.metadata = self._parts[0].header.metadata
        self._entries: dict[str, tuple[_Part, TensorEntry]] = {}
        for part in self._parts:
            for name, entry in part.header.entries.items():
                if name in self._entries:
                    raise CheckpointError(f"{part.path}: tensor {name!r} is in another part of the model too")
                self._entries[name] = (part, entry)
        expected = self.metadata.get("split.tensors.count", len(self._entries))
        if len(self._parts) > 1 and expected != len(self._entries):
            raise CheckpointError(
                f"{self.paths[0]}: the parts hold {len(self._entries)} tensors but split.tensors.count is "
                f"{expected}; they are not parts of one model"
            )
        self._tensors = MappingProxyType({name: entry.info for name, (_, entry) in self._entries.items()})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns a fresh array of the tensor, or of a contiguous range of its first axis.

        Quantised types become float32; the others keep their dtype. Raises CheckpointError for an unknown
        name or a range outside the tensor.
        """
        _, entry = self._find(name)
        shape, _, _ = _locate(entry, rows)
        out = np.empty(shape, np.float32 if entry.type.plain is None else entry.type.plain)
        self.read_into(name, out, rows)
        return out

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Reads a tensor, or a range of its first axis, into `out`, rounding to its dtype piece by piece.

        `out` is C-contiguous, of the range's shape, and float32, bfloat16, float16 or float64 (for integer
        tensors: of the same dtype), else ValueError. Raises CheckpointError for an unknown name, a range
        outside the tensor, or values that float16 cannot hold.
        """
        part, entry = self._find(name)
        shape, start, stop = _locate(entry, rows)
        plain = entry.type.plain
        integer = plain is not None and plain not in _FLOATS
        allowed = (plain,) if integer else _FLOATS
        if out.shape != shape or not out.flags.c_contiguous or out.dtype not in allowed:
            raise ValueError(
                f"{name} ({entry.type.name}) reads into a C-contiguous array of "
                f"{plain if integer else 'a floating dtype'} and shape {shape}, got {out.dtype} {out.shape}"
            )
        if out.dtype == plain:
            part.read(start, out)
            return
        target, what = out.reshape(-1), f"{part.path}: tensor {name!r}"
        block_elements, block_bytes = entry.type.block_elements, entry.type.block_bytes
        chunk = _CHUNK_ELEMENTS // block_elements
        num_blocks = (stop - start) // block_bytes
        packed = np.empty(min(chunk, num_blocks) * block_bytes, np.uint8)
        scratch = None if plain is not None or out.dtype == np.float32 else np.empty(_CHUNK_ELEMENTS, np.float32)
        for first in range(0, num_blocks, chunk):
            packed = packed[: (num_blocks - first) * block_bytes]
            part.read(start + first * block_bytes, packed)
            piece = target[first * block_elements : (first + chunk) * block_elements]
            if plain is not None:
                values = packed.view(plain)
            else:
                values = dequantize(packed, entry.type.name, piece if scratch is None else scratch[: len(piece)])
            if values is not piece:
                _convert(values, piece, what)

    def read_blocks(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns the stored bytes of a tensor, or of a range of its first axis: uint8 [..., bytes_per_row].

        The shape is the tensor's with its last axis packed; `tensors[name].dtype` names the type, and
        `formats.ggml.unpack` takes the bytes apart.
        """
        part, entry = self._find(name)
        shape, start, stop = _locate(entry, rows)
        packed = np.empty(stop - start, np.uint8)
        part.read(start, packed)
        return packed.reshape(*shape[:-1], shape[-1] // entry.type.block_elements * entry.type.block_bytes)

    def code_bits(self, name: str) -> int | None:
        """The width of a tensor's codes, 4 or 8; None for one that is not a quantised matrix."""
        info = self._find(name)[1].info
        return ggml_codes.CODE_BITS.get(info.dtype) if len(info.shape) == 2 else None

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The codes of a matrix, taken from the file a few rows at a time; None for one that is not quantised."""
        if self.code_bits(name) is None:
            return None
        info = self.tensors[name]

        def rows(start: int, stop: int) -> Codes:
            return ggml_codes.unpack(self.read_blocks(name, slice(start, stop)), info.dtype)

        return QuantizedTensor((info.shape[0], info.shape[1]), rows)

    def release(self, name: str) -> None:
        """Does nothing: nothing of a tensor is kept."""

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[_Part, TensorEntry]:
        if name not in self._entries:
            raise CheckpointError(f"{self.paths[0]}: there is no tensor {name!r} among its {len(self._entries)}")
        return self._entries[name]


def _convert(values: np.ndarray, out: np.ndarray, what: str) -> None:
    try:
        with np.errstate(over="raise", invalid="ignore"):
            np.copyto(out, values, casting="unsafe")
    except FloatingPointError:
        raise CheckpointError(f"{what} has numbers too big for {out.dtype}; read it as bfloat16 or float32") from None


def _locate(entry: TensorEntry, rows: slice | None) -> tuple[tuple[int, ...], int, int]:
    """Shape of a range of the first axis, file position of its first byte, and of the byte after its last."""
    shape, type_ = entry.info.shape, entry.type
    start, stop = 0, shape[0]
    if rows is not None:
        start = 0 if rows.start is None else rows.start
        stop = shape[0] if rows.stop is None else rows.stop
        if rows.step not in (None, 1) or not 0 <= start <= stop <= shape[0]:
            raise CheckpointError(f"tensor {entry.info.name!r} has {shape[0]} rows, which do not contain {rows}")
    elements_per_row = int(np.prod(shape[1:], dtype=np.int64))
    if start * elements_per_row % type_.block_elements or stop * elements_per_row % type_.block_elements:
        raise CheckpointError(
            f"tensor {entry.info.name!r} cannot be cut at {rows}: "
            f"its {type_.name} blocks have {type_.block_elements} elements"
        )
    bytes_per_row = elements_per_row * type_.block_bytes
    first = entry.offset + start * bytes_per_row // type_.block_elements
    last = entry.offset + stop * bytes_per_row // type_.block_elements
    return (stop - start, *shape[1:]), first, last


def whole_models(paths: Iterable[Path]) -> list[Path]:
    """One path for each model among GGUF files, sorted: parts of a split model count as one, under their first part."""
    models: dict[str, Path] = {}
    for path in sorted(paths):
        match = _SPLIT_NAME.fullmatch(path.name)
        models.setdefault(path.name if match is None else f"{match['prefix']}-of-{match['count']}", path)
    return sorted(models.values())


def _open_parts(path: Path) -> list[_Part]:
    """Opens the file, and if it is part of a split model, all the others, in order."""
    opened = _Part(path)
    count = opened.header.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return [opened]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts of a model; rename it back, to end in -NNNNN-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{match['prefix']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the {count} parts of this model are missing: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}; put them into the same folder"
        )
    parts = [opened if p == path else _Part(p) for p in paths]
    for number, part in enumerate(parts):
        found = (part.header.metadata.get("split.no"), part.header.metadata.get("split.count"))
        if found != (number, count):
            raise CheckpointError(
                f"{part.path}: split.no and split.count are {found}, expected {(number, count)}; "
                "it belongs to another model"
            )
    return parts
