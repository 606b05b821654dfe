"""Weights of 8-bit codes in groups: the canonical form, and the orders of bytes that the kernels read."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul import triton_layout
from pallas_kernels.int4_matmul.packing import (
    COLUMNS,
    STRIP,
    Kind,
    Layout,
    PackedInt4,
    arranged_for_triton,
    by_row,
    by_strip,
    check_groups,
    steps_per_run,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedInt8:
    """A weight of 8-bit codes. The value of a code is

    - `scale * (code - 128)` if there are no offsets ("symmetric"),
    - `scale * (code - offset)` if offsets are uint8 ("zero_point"),
    - `scale * code + offset` if offsets are floating ("minimum").

    | layout | codes | scales, offsets |
    |---|---|---|
    | canonical | uint8[out, in] | [out, groups] |
    | mosaic | int32[ceil(out / 16), ceil(in / 64), 256], see `int8_to_mosaic` | [ceil(out / 16), groups, 16] |
    | triton | int16[ceil(out / 16), ceil(in / 64), 16, 32], see `triton_layout.pack` | [groups, 16 * ceil(out / 16)] |

    `shape` is (out_features, in_features) without padding.
    """

    codes: Any
    scales: Any
    offsets: Any
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True}, default="canonical")

    bits: ClassVar[int] = 8
    book: ClassVar[None] = None
    whole: ClassVar[bool] = False

    @property
    def kind(self) -> Kind:
        if self.offsets is None:
            return "symmetric"
        return "minimum" if jnp.issubdtype(self.offsets.dtype, jnp.floating) else "zero_point"

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)


Packed = PackedInt4 | PackedInt8


def from_int8_codes(codes: Any, scales: Any, offsets: Any = None, *, group_size: int) -> PackedInt8:
    """The canonical form of codes uint8[out, in], one a byte, with scales (and offsets) [out, groups]."""
    group_size = check_groups(codes, scales, offsets, group_size, largest=255)
    return PackedInt8(codes, scales, offsets, tuple(codes.shape), group_size)


def int8_to_mosaic(weight: PackedInt8) -> PackedInt8:
    """Repacks a canonical weight into the order in which the Hopper kernels' threads hold it.

    As `to_mosaic` has it, with a byte for each code, less 128 and signed: where a lane has a word for 16 inputs there,
    it has one for row r and one for row r + 8 here, of

        bits    0-7      8-15     16-23    24-31
        column  c        c + 2    c + 1    c + 3

    A tile's first 128 words are those of its first 32 inputs.
    """
    if weight.layout != "canonical":
        raise ValueError(f"int8_to_mosaic takes a canonical weight; this one has layout {weight.layout!r}")
    xp = weight.codes.__array_namespace__()
    pad_rows, pad_columns = -weight.shape[0] % STRIP, -weight.shape[1] % COLUMNS
    codes = xp.pad(weight.codes ^ xp.uint8(128), ((0, pad_rows), (0, pad_columns)))
    strips, tiles, run = codes.shape[0] // STRIP, codes.shape[1] // COLUMNS, steps_per_run(weight.group_size)
    # Axes: strip, row half, row, column tile, run, lane of four, step of the run, pair of columns, element.
    octets = codes.reshape(strips, 2, 8, tiles, 4 // run, 4, run, 2, 2).transpose(0, 3, 2, 5, 4, 6, 1, 8, 7)
    # Axes: strip, column tile, lane, half of the tile, word, byte.
    octets = octets.reshape(strips, tiles, 32, 2, 4, 4).transpose(0, 1, 3, 2, 4, 5)
    return dataclasses.replace(
        weight,
        codes=_as_words(octets).reshape(strips, tiles, 256),
        scales=by_strip(weight.scales),
        offsets=None if weight.offsets is None else by_strip(weight.offsets),
        layout="mosaic",
    )


def int8_to_triton(weight: PackedInt8) -> PackedInt8:
    """Repacks a canonical weight into the order that the Triton kernels read, see `triton_layout.pack`."""
    if weight.layout != "canonical":
        raise ValueError(f"int8_to_triton takes a canonical weight; this one has layout {weight.layout!r}")
    return arranged_for_triton(weight, weight.codes)


def int8_to_canonical(weight: PackedInt8) -> PackedInt8:
    """Undoes `int8_to_mosaic` or `int8_to_triton` exactly; a canonical weight comes back as it is."""
    if weight.layout == "canonical":
        return weight
    offsets = None if weight.offsets is None else by_row(weight.offsets, weight)
    return from_int8_codes(
        unpack_int8_codes(weight), by_row(weight.scales, weight), offsets, group_size=weight.group_size
    )


def unpack_int8_codes(weight: PackedInt8) -> Any:
    """The codes of a weight of any layout, uint8[out, in]."""
    if weight.layout == "canonical":
        return weight.codes
    if weight.layout == "triton":
        return triton_layout.unpack(weight.codes, weight.shape, weight.bits)
    xp = weight.codes.__array_namespace__()
    strips, tiles, _ = weight.codes.shape
    run = steps_per_run(weight.group_size)
    octets = _as_octets(weight.codes).reshape(strips, tiles, 2, 32, 4, 4).transpose(0, 1, 3, 2, 4, 5)
    octets = octets.reshape(strips, tiles, 8, 4, 4 // run, run, 2, 2, 2).transpose(0, 6, 2, 1, 4, 3, 5, 8, 7)
    codes = octets.reshape(strips * STRIP, tiles * COLUMNS) ^ xp.uint8(128)
    return codes[: weight.shape[0], : weight.shape[1]]


def _as_words(octets: Any) -> Any:
    """uint8 [..., 4] -> int32 [...]."""
    if isinstance(octets, jax.Array):
        return lax.bitcast_convert_type(octets, jnp.int32)
    return octets.copy(order="C").view(jnp.int32)[..., 0]


def _as_octets(words: Any) -> Any:
    """int32 [...] -> uint8 [..., 4]."""
    if isinstance(words, jax.Array):
        return lax.bitcast_convert_type(words, jnp.uint8)
    return words[..., None].view(jnp.uint8)
