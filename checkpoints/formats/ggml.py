"""The block formats of ggml (GGUF files): what a tensor type id means, how packed blocks become float32.

Every block-quantised type is one affine form, `value = scale * code + minimum`, with one scale (and minimum)
for each group of 16 or 32 elements along the row. `unpack` gives that form exactly; `dequantize` evaluates it
in float32, with ggml's roundings. Effective scales of the K-quants need 17 bits, so they are float32 here.

Layouts are those of ggml's `ggml-common.h`; fields are little-endian, a block's bytes are contiguous.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class GGMLType:
    """A tensor type: `block_elements` consecutive elements of a row are stored in `block_bytes` bytes.

    `plain` is the NumPy dtype of the types that hold one number per block, None for the quantised ones.
    """

    id: int
    name: str
    block_elements: int
    block_bytes: int
    plain: np.dtype | None = None


def _plain(type_id: int, name: str, dtype: np.dtype) -> GGMLType:
    return GGMLType(type_id, name, 1, dtype.itemsize, dtype)


GGML_TYPES: dict[int, GGMLType] = {
    t.id: t
    for t in (
        _plain(0, "F32", np.dtype("<f4")),
        _plain(1, "F16", np.dtype("<f2")),
        GGMLType(2, "Q4_0", 32, 18),
        GGMLType(3, "Q4_1", 32, 20),
        GGMLType(6, "Q5_0", 32, 22),
        GGMLType(7, "Q5_1", 32, 24),
        GGMLType(8, "Q8_0", 32, 34),
        GGMLType(10, "Q2_K", 256, 84),
        GGMLType(11, "Q3_K", 256, 110),
        GGMLType(12, "Q4_K", 256, 144),
        GGMLType(13, "Q5_K", 256, 176),
        GGMLType(14, "Q6_K", 256, 210),
        GGMLType(20, "IQ4_NL", 32, 18),
        GGMLType(23, "IQ4_XS", 256, 136),
        _plain(24, "I8", np.dtype("<i1")),
        _plain(25, "I16", np.dtype("<i2")),
        _plain(26, "I32", np.dtype("<i4")),
        _plain(27, "I64", np.dtype("<i8")),
        _plain(28, "F64", np.dtype("<f8")),
        _plain(30, "BF16", np.dtype(ml_dtypes.bfloat16)),
    )
}
"""The types that can be read, by type id."""

UNSUPPORTED_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that ggml defines and this package does not read, for error messages."""

_BY_NAME = {t.name: t for t in GGML_TYPES.values()}


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """Blocks in affine form: element e of a row is `scales[..., g] * codes[..., e] + minimums[..., g]`, where
    `g = e // group_size`.

    `codes`: [..., n] uint8, or int8 where zero is in the middle. `scales`, `minimums`: float32
    [..., n / group_size]; `minimums` is None where the format has none.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    group_size: int


def ggml_type(name: str) -> GGMLType:
    """The type called `name`, such as "Q4_K". Raises ValueError for a name that is not in `GGML_TYPES`."""
    if name not in _BY_NAME:
        raise ValueError(f"ggml type {name!r} is not supported; supported are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def unpack(blocks: np.ndarray, name: str) -> Unpacked:
    """Takes packed rows of a quantised type apart, losslessly.

    `blocks`: uint8 [..., bytes], each row a whole number of blocks of type `name`. Raises ValueError for
    another dtype, a row that is not whole blocks, or a type that is not quantised.
    """
    type_ = ggml_type(name)
    if type_.plain is not None:
        raise ValueError(f"{name} is not a quantised type, so it has no codes; use dequantize")
    flat = _as_blocks(blocks, type_)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be inf or NaN; that is data, not a fault
        codes, scales, minimums = _UNPACK[name](flat)
    shape = _decoded_shape(blocks, type_)
    groups = (*shape[:-1], shape[-1] // codes.shape[-1])
    return Unpacked(
        codes=codes.reshape(shape),
        scales=scales.reshape(groups),
        minimums=None if minimums is None else minimums.reshape(groups),
        group_size=codes.shape[-1],
    )


def dequantize(blocks: np.ndarray, name: str, out: np.ndarray | None = None) -> np.ndarray:
    """Decodes packed rows to float32, bit for bit as ggml does.

    `blocks`: uint8 [..., bytes], each row a whole number of blocks of type `name`; returns float32 [...,
    n], which is `out`, C-contiguous, if that is given. Raises ValueError for another dtype, a row that is
    not whole blocks, an `out` of another shape, or an integer or float64 type.
    """
    type_ = ggml_type(name)
    flat, shape = _as_blocks(blocks, type_), _decoded_shape(blocks, type_)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous float32 {shape}, got {out.dtype} {out.shape}")
    if type_.plain is not None and name not in ("F32", "F16", "BF16"):
        raise ValueError(f"{name} values do not fit float32; read them as {type_.plain}")
    with np.errstate(invalid="ignore", over="ignore"):
        if type_.plain is not None:
            np.copyto(out, flat.view(type_.plain).reshape(shape))
            return out
        codes, scales, minimums = _UNPACK[name](flat)
        values = out.reshape(codes.shape)
        np.copyto(values, codes)
        values *= scales[..., None]
        if minimums is not None:
            values += minimums[..., None]
    return out


def _as_blocks(blocks: np.ndarray, type_: GGMLType) -> np.ndarray:
    if blocks.dtype != np.uint8 or blocks.ndim == 0 or blocks.shape[-1] % type_.block_bytes:
        raise ValueError(
            f"{type_.name} rows are uint8 with a multiple of {type_.block_bytes} bytes, "
            f"got {blocks.dtype} {blocks.shape}"
        )
    return np.ascontiguousarray(blocks).reshape(-1, type_.block_bytes)


def _decoded_shape(blocks: np.ndarray, type_: GGMLType) -> tuple[int, ...]:
    return (*blocks.shape[:-1], blocks.shape[-1] // type_.block_bytes * type_.block_elements)


# Each function below takes blocks uint8 [n, block_bytes] and returns codes [n, groups, group_size],
# scales float32 [n, groups] and minimums, likewise or None.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at a byte offset of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, b] -> [n, groups, 2, b]: the low nibbles of a group, then its high nibbles."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-2)


def _bits(packed: np.ndarray, width: int) -> np.ndarray:
    """uint8 [n, b] -> [n, 8 / width, b]: field j of every byte, lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (packed[:, None, :] >> shifts[:, None]) & np.uint8(2**width - 1)


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    """uint8 codes minus `zero`, as int8 (the wrapped difference has the right bits)."""
    return (codes - np.uint8(zero)).view(np.int8)


def _q4_0(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, None, 2:18]).reshape(-1, 1, 32)
    return _signed(codes, 8), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, None, 4:20]).reshape(-1, 1, 32)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Bit e of `high` (uint8 [n, 4], little-endian) is bit 4 of element e; `low` [n, 16] has the nibbles."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return (_nibbles(low[:, None, :]).reshape(-1, 32) | (fifth << 4))[:, None, :]


def _q5_0(blocks: np.ndarray) -> _Parts:
    return _signed(_five_bits(blocks[:, 2:6], blocks[:, 6:22]), 16), _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:24]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, None, 2:34].view(np.int8), _half(blocks, 0), None


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 64] -> [n, 16, 16]: 32 bytes hold 128 elements, bits 0-1 of all bytes, then bits 2-3, ..."""
    return np.concatenate([_bits(packed[:, :32], 2), _bits(packed[:, 32:], 2)], axis=1).reshape(-1, 16, 16)


def _q2_k(blocks: np.ndarray) -> _Parts:
    packed_scales = blocks[:, :16]
    scales = _half(blocks, 80) * (packed_scales & 0x0F).astype(np.float32)
    minimums = _half(blocks, 82) * (packed_scales >> 4).astype(np.float32)
    return _two_bits(blocks[:, 16:80]), scales, -minimums


def _q3_k(blocks: np.ndarray) -> _Parts:
    # Bit j of a mask byte belongs to the j-th run of 32 elements; a clear bit means 4 less.
    third = _bits(blocks[:, :32], 1).reshape(-1, 16, 16)
    codes = _signed(_two_bits(blocks[:, 32:96]) | (third << 2), 4)
    low = _nibbles(blocks[:, None, 96:104]).reshape(-1, 16)
    high = _bits(blocks[:, 104:108], 2).reshape(-1, 16)
    scales = _signed(low | (high << 4), 32).astype(np.float32)
    return codes, _half(blocks, 108) * scales, None


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums, as float32 [n, 8] each.

    Bytes 0-3 and 4-7 hold the first four scales and minimums; bytes 8-11 hold the low nibbles of the last
    four, whose upper two bits are the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | (first >> 6 << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> _Parts:
    scales, minimums = _k_scales(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _q5_k(blocks: np.ndarray) -> _Parts:
    scales, minimums = _k_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    codes = low | (_bits(blocks[:, 16:48], 1) << 4)
    return codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _q6_k(blocks: np.ndarray) -> _Parts:
    # Per half of 128 elements: 64 bytes of low nibbles (all the low ones first), 32 bytes of upper bit pairs.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = _two_bits(blocks[:, 128:192])
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _signed(low | (high << 4), 32), _half(blocks, 208) * scales, None


IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""The code book of IQ4_NL and IQ4_XS."""


def _iq4_nl(blocks: np.ndarray) -> _Parts:
    return IQ4_VALUES[_nibbles(blocks[:, None, 2:18]).reshape(-1, 1, 32)], _half(blocks, 0), None


def _iq4_xs(blocks: np.ndarray) -> _Parts:
    low = np.stack([blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = _bits(blocks[:, 2:4], 2).swapaxes(1, 2).reshape(-1, 8)
    scales = _signed(low | (high << 4), 32).astype(np.float32)
    codes = IQ4_VALUES[_nibbles(blocks[:, 8:136].reshape(-1, 8, 16)).reshape(-1, 8, 32)]
    return codes, _half(blocks, 0) * scales, None


_UNPACK: dict[str, Callable[[np.ndarray], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
