"""Writes small GGUF files, whole or deliberately wrong, from plain values.

    gguf_files.write(path, {"general.architecture": "llama"}, {"a": np.zeros((2, 3), np.float32)})

Metadata: str, bool, int (u32, i32 or u64, the first that fits), float (f32), lists of one of these, or
`Typed`. Tensors: NumPy arrays (float32, float16, bfloat16, float64, integers) or `Packed` blocks.
"""

import dataclasses
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.formats.ggml import ggml_type

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

PLAIN_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64",
    np.dtype(np.int8): "I8",
    np.dtype(np.int16): "I16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}

SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Byte offsets of the float16 fields of each block-quantised type."""


@dataclasses.dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type id; for arrays, of its elements."""

    kind: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tensor by its type name, row-major shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def random_blocks(rng: np.random.Generator, dtype: str, rows: int, columns: int) -> np.ndarray:
    """Packed rows of a quantised type: every bit random but the float16 fields, which are finite and
    small."""
    type_ = ggml_type(dtype)
    blocks = rng.integers(0, 256, (rows, columns // type_.block_elements, type_.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[dtype]:
        scales = rng.normal(0, 0.02, blocks.shape[:2]).astype("<f2")
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def packed(rng: np.random.Generator, dtype: str, *shape: int) -> Packed:
    """A tensor of random blocks."""
    rows = int(np.prod(shape[:-1]))
    return Packed(dtype, shape, random_blocks(rng, dtype, rows, shape[-1]).tobytes())


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def _kind(value: Any) -> int:
    if isinstance(value, str):
        return STRING
    if isinstance(value, bool):
        return 7
    if isinstance(value, float):
        return 6
    return 4 if 0 <= value < 2**32 else 5 if -(2**31) <= value < 0 else 10


def _scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + FORMATS[kind], value)


def value(item: Any) -> bytes:
    """A metadata value with its type in front."""
    kind = item.kind if isinstance(item, Typed) else None
    content = item.value if isinstance(item, Typed) else item
    if isinstance(content, list):
        if content and isinstance(content[0], list):
            nested = b"".join(value(element)[4:] for element in content)
            return struct.pack("<IIQ", ARRAY, ARRAY, len(content)) + nested
        kinds = {_kind(element) for element in content}
        element = kind if kind is not None else 5 if kinds == {4, 5} else min(kinds, default=4)
        body = b"".join(_scalar(element, x) for x in content)
        return struct.pack("<IIQ", ARRAY, element, len(content)) + body
    kind = _kind(content) if kind is None else kind
    return struct.pack("<I", kind) + _scalar(kind, content)


def _as_packed(tensor: np.ndarray | Packed) -> Packed:
    if isinstance(tensor, Packed):
        return tensor
    return Packed(PLAIN_NAMES[tensor.dtype], tensor.shape, tensor.tobytes())


def tensor_entry(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dimensions + struct.pack("<IQ", type_id, offset)


def header(version: int, num_tensors: int, pairs: list[bytes], entries: list[bytes]) -> bytes:
    """Magic to tensor table, of parts that are already bytes."""
    start = struct.pack("<4sIQQ", b"GGUF", version, num_tensors, len(pairs))
    return start + b"".join(pairs) + b"".join(entries)


def pad(content: bytes, alignment: int) -> bytes:
    return content + bytes(-len(content) % alignment)


def to_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Packed],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The content of a GGUF file. `alignment` is recorded in `general.alignment` where it is not 32."""
    metadata = dict(metadata) | ({} if alignment == 32 else {"general.alignment": alignment})
    entries, data = [], b""
    for name, tensor in tensors.items():
        stored = _as_packed(tensor)
        entries.append(tensor_entry(name, stored.shape, ggml_type(stored.dtype).id, len(data)))
        data = pad(data + stored.data, alignment)
    pairs = [string(key) + value(item) for key, item in metadata.items()]
    return pad(header(version, len(entries), pairs, entries), alignment) + data


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Packed],
    *,
    version: int = 3,
    alignment: int = 32,
) -> pathlib.Path:
    """Writes a GGUF file and returns its path."""
    path = pathlib.Path(path)
    path.write_bytes(to_bytes(metadata, tensors, version=version, alignment=alignment))
    return path


def write_split(
    folder: pathlib.Path,
    metadata: Mapping[str, Any],
    parts: Sequence[Mapping[str, np.ndarray | Packed]],
    *,
    prefix: str = "model",
) -> list[pathlib.Path]:
    """Writes a model in parts; `metadata` goes into the first."""
    paths = []
    for number, tensors in enumerate(parts):
        split = {
            "split.no": Typed(2, number),
            "split.count": Typed(2, len(parts)),
            "split.tensors.count": Typed(5, sum(len(part) for part in parts)),
        }
        path = folder / f"{prefix}-{number + 1:05}-of-{len(parts):05}.gguf"
        paths.append(write(path, (dict(metadata) if number == 0 else {}) | split, tensors))
    return paths
