"""Parses the header of a GGUF file (versions 2 and 3): metadata and tensor table, from untrusted bytes.

Layout: magic, version, counts, key-value pairs, tensor table, padding, data. Format document:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is checked against the bytes that are
there before anything of that size is made, so a damaged file costs an error and no memory.
"""

import dataclasses
import math
import mmap
import struct
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.ggml import GGML_TYPES, UNSUPPORTED_TYPES, GGMLType
from checkpoints.tensors import TensorInfo

# A header holds the tokenizer: 256k tokens with merges and scores are about 20 MB. Parsed lists take up to
# eight times the bytes in the file, so this also bounds memory.
_MAX_HEADER_BYTES = 1 << 27
_MAX_NAME_BYTES = 1024
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MIN_KEY_VALUE_BYTES = 13  # length, a one-byte key, type, a one-byte value
_MIN_TENSOR_BYTES = 33  # length, a one-byte name, dimension count, one dimension, type, offset

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor and where its bytes are: `offset` counts from the start of the file."""

    info: TensorInfo
    type: GGMLType
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    version: int
    metadata: dict[str, Any]
    """Values as Python scalars, strings and (nested) lists."""
    entries: dict[str, TensorEntry]


def parse_header(data: bytes | mmap.mmap, path: str) -> Header:
    """Parses the header at the start of `data`, the whole file. `path` is for messages.

    Raises CheckpointError for anything that is not a well-formed GGUF file of version 2 or 3, or whose
    tensors do not lie inside it.
    """
    cursor = _Cursor(data, path)
    magic = bytes(data[:4])
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    cursor.position = 4
    version = cursor.scalar(_U32)
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise cursor.error("a big-endian GGUF file; convert it with gguf-convert-endian from the gguf package")
        raise cursor.error(f"GGUF version {version} is not supported; convert the model again (versions 2 and 3 are)")
    num_tensors, num_pairs = cursor.scalar(_U64), cursor.scalar(_U64)
    if num_tensors * _MIN_TENSOR_BYTES + num_pairs * _MIN_KEY_VALUE_BYTES > cursor.remaining:
        raise cursor.error(
            f"the header declares {num_tensors} tensors and {num_pairs} metadata keys, more than its "
            f"{cursor.remaining} bytes can hold; the file is truncated or damaged, download it again"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.name("metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar(_U32), key, depth=0)
    return Header(version, metadata, _parse_tensors(cursor, num_tensors, _alignment(metadata, cursor)))


class _Cursor:
    """A position in the file; every step forward is checked against the file's end."""

    def __init__(self, data: bytes | mmap.mmap, path: str):
        self.data = data
        self.path = path
        self.position = 0
        self.end = min(len(data), _MAX_HEADER_BYTES)

    @property
    def remaining(self) -> int:
        return self.end - self.position

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def advance(self, nbytes: int) -> int:
        """Steps over `nbytes` and returns the position before them."""
        start = self.position
        if nbytes > self.end - start:
            if start + nbytes <= len(self.data):
                raise self.error(f"the header is longer than {_MAX_HEADER_BYTES} bytes; the file is damaged")
            raise self.error(
                f"truncated or damaged in the header: {start + nbytes - len(self.data)} bytes are missing "
                f"after byte {len(self.data)}; download it again"
            )
        self.position = start + nbytes
        return start

    def scalar(self, layout: struct.Struct) -> Any:
        return layout.unpack_from(self.data, self.advance(layout.size))[0]

    def name(self, what: str) -> str:
        length = self.scalar(_U64)
        if not 0 < length <= _MAX_NAME_BYTES:
            raise self.error(f"a {what} of {length} bytes; 1 to {_MAX_NAME_BYTES} are allowed, the file is damaged")
        return self.text(length, what)

    def text(self, length: int, what: str) -> str:
        start = self.advance(length)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"the text of {what} at byte {start} is not UTF-8 ({e.reason})") from None

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text(self.scalar(_U64), key)
        if kind == _ARRAY:
            return self.array(key, depth)
        raise self.error(f"metadata key {key!r} has the unknown value type {kind}")

    def array(self, key: str, depth: int) -> list[Any]:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.error(f"metadata key {key!r} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        kind, count = self.scalar(_U32), self.scalar(_U64)
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            start = self.advance(count * layout.size)
            # "?" reads any byte as a NumPy bool, which must be 0 or 1 to be one.
            values = np.frombuffer(self.data, "u1" if kind == 7 else layout.format, count, start)
            return (values != 0).tolist() if kind == 7 else values.tolist()
        if kind not in (_STRING, _ARRAY):
            raise self.error(f"metadata key {key!r} is an array of the unknown value type {kind}")
        if count * 8 > self.remaining:
            raise self.error(f"metadata key {key!r} declares {count} elements, more than the file can hold")
        if kind == _ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.strings(count, key)

    def strings(self, count: int, key: str) -> list[str]:
        # Vocabularies have some 150,000 strings, so this loop makes no call per string that it can avoid.
        data, unpack, position, end = self.data, _U64.unpack_from, self.position, self.end
        values = []
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    break
                position = start + unpack(data, position)[0]
                if position > end:
                    break
                values.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as e:
            raise self.error(f"element {len(values)} of metadata key {key!r} is not UTF-8 ({e.reason})") from None
        if len(values) < count:
            raise self.error(
                f"truncated or damaged in the header: metadata key {key!r} ends after {len(values)} of "
                f"{count} strings; download it again"
            )
        self.position = position
        return values


def _alignment(metadata: dict[str, Any], cursor: _Cursor) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}; it must be a power of two, at least 8")
    return alignment


def _parse_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for _ in range(count):
        name = cursor.name("tensor name")
        if name in entries:
            raise cursor.error(f"tensor {name!r} appears twice")
        num_dimensions = cursor.scalar(_U32)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
        # Stored innermost first; row-major shapes are outermost first.
        shape = tuple(cursor.scalar(_U64) for _ in range(num_dimensions))[::-1]
        type_ = _tensor_type(cursor, cursor.scalar(_U32), name)
        if 0 in shape or shape[-1] % type_.block_elements:
            raise cursor.error(
                f"tensor {name!r} has shape {shape}; its rows must be a positive multiple of the "
                f"{type_.block_elements} elements of a {type_.name} block"
            )
        offset = cursor.scalar(_U64)
        if offset % alignment:
            raise cursor.error(
                f"tensor {name!r} is at data offset {offset}, not a multiple of the alignment {alignment}"
            )
        nbytes = math.prod(shape) // type_.block_elements * type_.block_bytes
        entries[name] = TensorEntry(TensorInfo(name, shape, type_.name, nbytes), type_, offset)
    data_start = -(-cursor.position // alignment) * alignment
    entries = {name: dataclasses.replace(e, offset=data_start + e.offset) for name, e in entries.items()}
    _check_layout(cursor, entries)
    return entries


def _tensor_type(cursor: _Cursor, type_id: int, name: str) -> GGMLType:
    if type_id not in GGML_TYPES:
        called = f" ({UNSUPPORTED_TYPES[type_id]})" if type_id in UNSUPPORTED_TYPES else ""
        known = ", ".join(f"{t.name}={t.id}" for t in GGML_TYPES.values())
        raise cursor.error(
            f"tensor {name!r} has type {type_id}{called}, which is not supported; quantise the model to one of {known}"
        )
    return GGML_TYPES[type_id]


def _check_layout(cursor: _Cursor, entries: dict[str, TensorEntry]) -> None:
    """All tensors lie inside the file and no two share bytes."""
    size, previous_end, previous_name = len(cursor.data), 0, ""
    ends = [(e.offset, e.offset + e.info.nbytes, name) for name, e in entries.items()]
    if ends and (needed := max(end for _, end, _ in ends)) > size:
        cut = min((offset, name) for offset, end, name in ends if end > size)[1]
        raise cursor.error(
            f"truncated: its tensors need {needed} bytes and the file has {size}, {needed - size} are "
            f"missing (the first cut tensor is {cut!r}); download it again"
        )
    for offset, end, name in sorted(ends):
        if offset < previous_end:
            raise cursor.error(f"tensors {previous_name!r} and {name!r} overlap; the file is damaged")
        previous_end, previous_name = end, name
