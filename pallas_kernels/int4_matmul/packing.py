"""The packed INT4 weight: its canonical form, and the orders of bits that the kernels read.

A weight is `[out_features, in_features]` as checkpoints store it. Groups run along the inputs; the last one may be
shorter. Every function takes NumPy or JAX arrays and returns the same kind.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_kernels.int4_matmul import triton_layout

Layout = Literal["canonical", "mosaic", "triton", "rows"]
Kind = Literal["symmetric", "zero_point", "minimum", "code_book"]

STRIP, COLUMNS = 16, 64
"""Output features and inputs of a tile of the mosaic layout."""


def steps_per_run(group_size: int) -> int:
    """Steps of 16 inputs in which a lane's inputs are neighbours: one load of x covers them. They share a group."""
    return 1 if group_size < 32 else 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedInt4:
    """A weight of 4-bit codes. The value of a code is

    - `scale * (code - 8)` if there is neither offset nor book ("symmetric"),
    - `scale * (code - offset)` if offsets are uint8 ("zero_point"),
    - `scale * code + offset` if offsets are floating ("minimum"),
    - `scale * book[code]` if there is a book ("code_book").

    | layout | codes | scales, offsets |
    |---|---|---|
    | canonical | uint8[out, ceil(in / 2)], the even input in the low half | [out, groups] |
    | mosaic | int32[ceil(out / 16), ceil(in / 64), 128], see `to_mosaic` | [ceil(out / 16), groups, 16] |
    | triton | int16[ceil(out / 16), ceil(in / 128), 16, 32], see `triton_layout.pack` | [groups, 16 * ceil(out / 16)] |

    `shape` is (out_features, in_features) without padding. `whole`: what `is_whole` says of the book; a kernel can take
    such numbers for bytes.
    """

    codes: Any
    scales: Any
    offsets: Any
    book: Any
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True}, default="canonical")
    whole: bool = dataclasses.field(metadata={"static": True}, default=False)

    bits: ClassVar[int] = 4

    @property
    def kind(self) -> Kind:
        if self.book is not None:
            return "code_book"
        if self.offsets is None:
            return "symmetric"
        return "minimum" if jnp.issubdtype(self.offsets.dtype, jnp.floating) else "zero_point"

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)


def from_codes(codes: Any, scales: Any, offsets: Any = None, *, group_size: int, book: Any = None) -> PackedInt4:
    """Packs codes uint8[out, in], one a byte, with scales (and offsets) [out, groups] into the canonical form."""
    group_size = check_groups(codes, scales, offsets, group_size, largest=15)
    if book is not None and (offsets is not None or tuple(book.shape) != (16,)):
        raise ValueError("a code book has 16 entries and takes the place of offsets; pass one or the other")
    xp, shape = codes.__array_namespace__(), tuple(codes.shape)
    if shape[1] % 2:
        codes = xp.pad(codes, ((0, 0), (0, 1)))
    if isinstance(codes, np.ndarray):
        pairs = np.ascontiguousarray(codes).view("<u2")  # twice as fast as taking every other code
        packed = (pairs | (pairs >> np.uint16(4))).astype(np.uint8)
    else:
        packed = codes[:, 0::2] | (codes[:, 1::2] << xp.uint8(4))
    return PackedInt4(packed, scales, offsets, book, shape, group_size, whole=is_whole(book))


def is_whole(book: Any) -> bool:
    """Whether a book's numbers are known to be whole multiples, up to 127, of the smallest that is not zero.

    Those of FP4 are, whatever factor a file has multiplied them by, and IQ4_NL's. Nothing is known of a book that is
    being traced.
    """
    if book is None or isinstance(book, Tracer | jax.ShapeDtypeStruct):
        return False
    numbers = np.asarray(book, np.float64)
    magnitudes = np.abs(numbers[numbers != 0])
    if not np.isfinite(numbers).all() or not magnitudes.size:
        return False
    multiples = magnitudes / magnitudes.min()
    return bool(multiples.max() < 127.5 and (np.abs(multiples - np.rint(multiples)) < 1e-4).all())


def check_groups(codes: Any, scales: Any, offsets: Any, group_size: int, *, largest: int) -> int:
    """Raises ValueError for arrays that do not fit; gives the group size, at most the number of inputs."""
    if codes.ndim != 2 or not codes.size:
        raise ValueError(f"codes have shape {tuple(codes.shape)}; expected [out_features, in_features], none of them 0")
    out_features, in_features = codes.shape
    if not group_size >= 1:
        raise ValueError(f"group_size is {group_size}; expected a positive number, such as 128")
    group_size = min(group_size, in_features)
    expected = (out_features, -(-in_features // group_size))
    for name, array in (("scales", scales), ("offsets", offsets)):
        if array is not None and tuple(array.shape) != expected:
            raise ValueError(
                f"{name} have shape {tuple(array.shape)}; "
                f"codes {tuple(codes.shape)} in groups of {group_size} need {expected}"
            )
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(f"scales are {scales.dtype}; expected floats")
    if offsets is not None and offsets.dtype != jnp.uint8 and not jnp.issubdtype(offsets.dtype, jnp.floating):
        raise ValueError(f"offsets are {offsets.dtype}; expected uint8 zero points, or floats that are minima")
    if codes.dtype != jnp.uint8:
        raise ValueError(f"codes are {codes.dtype}; expected uint8 holding 0..{largest}")
    return group_size


def unpack_codes(weight: PackedInt4) -> Any:
    """The codes of a weight of any layout, uint8[out, in], one a byte."""
    xp = weight.codes.__array_namespace__()
    out_features, in_features = weight.shape
    if weight.layout == "canonical":
        halves = xp.stack([weight.codes & xp.uint8(15), weight.codes >> xp.uint8(4)], axis=-1)
        return halves.reshape(out_features, -1)[:, :in_features]
    if weight.layout == "triton":
        return triton_layout.unpack(weight.codes, weight.shape, weight.bits)
    strips, column_tiles = weight.codes.shape[:2]
    run = steps_per_run(weight.group_size)
    words = _bits(weight.codes, jnp.uint32)
    nibbles = xp.stack([(words >> xp.uint32(4 * i)) & xp.uint32(15) for i in range(8)], axis=-1).astype(xp.uint8)
    # Axes: strip, column tile, row, lane of four, run, step of the run, element, pair of columns, row half.
    nibbles = nibbles.reshape(strips, column_tiles, 8, 4, 4 // run, run, 2, 2, 2)
    codes = nibbles.transpose(0, 8, 2, 1, 4, 3, 5, 7, 6).reshape(strips * STRIP, column_tiles * COLUMNS)
    return codes[:out_features, :in_features]


def by_row(values: Any, weight: Any) -> Any:
    """Scales or offsets of a weight of any layout, of 4 or 8 bits, as [out_features, groups]."""
    if weight.layout == "canonical":
        return values
    if weight.layout == "triton":
        return values.T[: weight.shape[0]]
    strips, groups, _ = values.shape
    return values.reshape(strips, groups, 8, 2).transpose(0, 3, 2, 1).reshape(-1, groups)[: weight.shape[0]]


def to_mosaic(weight: PackedInt4) -> PackedInt4:
    """Repacks a canonical weight into the order in which the Hopper kernel's threads hold it.

    A strip is 16 rows. Its tiles of 64 columns follow each other, 128 words each, in the order of a warp's lanes, a
    lane's four words one for each step of 16 columns. A word's nibbles are what `mma.m16n8k16` wants of its lane, with
    the columns of two steps in an order in which a lane's eight of them are neighbours, so that x is read in 16-byte
    pieces:

        bits    0-3      4-7      8-11     12-15    16-19    20-23    24-27    28-31
        row     r        r + 8    r        r + 8    r        r + 8    r        r + 8      r = 16 strip + lane // 4
        column  c        c        c + 2    c + 2    c + 1    c + 1    c + 3    c + 3

        c = 32 (step // 2) + 8 (lane % 4) + 4 (step % 2), or 16 step + 4 (lane % 4) if a group has less than 32 columns

    so that `(word >> 4i) & 0x000F000F` is one register of two neighbouring columns. A group's 16 scales are in the
    order of rows 0, 8, 1, 9, ..., so that a lane's two are neighbours. Padded codes are 0 under a scale of 0.
    """
    if weight.layout != "canonical":
        raise ValueError(f"to_mosaic takes a canonical weight; this one has layout {weight.layout!r}")
    xp = weight.codes.__array_namespace__()
    codes = unpack_codes(weight)
    pad_rows, pad_columns = -codes.shape[0] % STRIP, -codes.shape[1] % COLUMNS
    codes = xp.pad(codes, ((0, pad_rows), (0, pad_columns)))
    strips, column_tiles = codes.shape[0] // STRIP, codes.shape[1] // COLUMNS
    run = steps_per_run(weight.group_size)
    # Axes: strip, row half, row, column tile, run, lane of four, step of the run, pair of columns, element.
    nibbles = codes.reshape(strips, 2, 8, column_tiles, 4 // run, 4, run, 2, 2).transpose(0, 3, 2, 5, 4, 6, 8, 7, 1)
    nibbles = nibbles.reshape(strips, column_tiles, 128, 8)
    # A sum of all eight at once: XLA makes one kernel of it, without room for anything but the result.
    places = xp.arange(0, 32, 4, dtype=xp.uint32).reshape(1, 1, 1, 8)
    words = (nibbles.astype(xp.uint32) << places).sum(axis=-1, dtype=xp.uint32)
    return dataclasses.replace(
        weight,
        codes=_bits(words, jnp.int32),
        scales=by_strip(weight.scales),
        offsets=None if weight.offsets is None else by_strip(weight.offsets),
        layout="mosaic",
    )


def by_strip(values: Any) -> Any:
    """Scales or offsets [out_features, groups] in the mosaic layout, padded with zeros."""
    xp, strips = values.__array_namespace__(), -(-values.shape[0] // STRIP)
    values = xp.pad(values, ((0, strips * STRIP - values.shape[0]), (0, 0))).reshape(strips, 2, 8, -1)
    return values.transpose(0, 3, 2, 1).reshape(strips, -1, STRIP)


def to_triton(weight: PackedInt4) -> PackedInt4:
    """Repacks a canonical weight into the order that the Triton kernels read, see `triton_layout.pack`."""
    if weight.layout != "canonical":
        raise ValueError(f"to_triton takes a canonical weight; this one has layout {weight.layout!r}")
    return arranged_for_triton(weight, unpack_codes(weight))


def arranged_for_triton(weight: Any, codes: Any) -> Any:
    """A canonical weight of 4 or 8 bits in the triton layout; its codes are uint8[out, in], one a byte."""
    width = triton_layout.tile_width(weight.group_size, weight.num_groups)
    return dataclasses.replace(
        weight,
        codes=triton_layout.pack(codes, width, weight.bits),
        scales=triton_layout.by_group(weight.scales),
        offsets=None if weight.offsets is None else triton_layout.by_group(weight.offsets),
        layout="triton",
    )


def to_canonical(weight: PackedInt4) -> PackedInt4:
    """Undoes `to_mosaic` or `to_triton` exactly; a canonical weight comes back as it is."""
    if weight.layout == "canonical":
        return weight
    canonical = from_codes(
        unpack_codes(weight),
        by_row(weight.scales, weight),
        None if weight.offsets is None else by_row(weight.offsets, weight),
        group_size=weight.group_size,
        book=weight.book,
    )
    return dataclasses.replace(canonical, whole=weight.whole)  # which a traced book does not show


def _bits(array: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(array, dtype) if isinstance(array, jax.Array) else array.view(dtype)
