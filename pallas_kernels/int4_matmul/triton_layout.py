"""The order of bits that the Triton kernels read: 16-bit words whose codes, four or two, lie apart in a tile.

Functions on arrays, NumPy or JAX; `to_triton` and `int8_to_triton` apply them to a weight.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

STRIP = 16
"""Output features that are stored together."""
WORD = 16
"""Bits of a word."""


def tile_width(group_size: int, num_groups: int) -> int:
    """Words of one output feature in a tile. The codes at one place of these words must lie in one group."""
    return 16 if num_groups > 1 and group_size % 32 else 32


def pack(codes: Any, width: int, bits: int) -> Any:
    """uint8[out, in], one code a byte, -> int16[strips, tiles, 16, width].

    A tile is 16 output features by width inputs for every code of a word; input `q * width + w` of a tile is code q of
    word w, here of 4 bits:

        bits    0-3    4-7        8-11           12-15
        input   w      w + width  w + 2 * width  w + 3 * width

    so the q-th codes of `width` neighbouring words are `width` neighbouring inputs: unpacking needs no shuffle, and
    two neighbouring words in a register give two neighbouring inputs. A row of a tile is 64 bytes (32 where groups have
    16 inputs), a tile is contiguous, and so is a strip. Padded codes are 0.
    """
    xp, places = codes.__array_namespace__(), WORD // bits
    out_features, in_features = codes.shape
    codes = xp.pad(codes, ((0, -out_features % STRIP), (0, -in_features % (places * width))))
    strips, tiles = codes.shape[0] // STRIP, codes.shape[1] // (places * width)
    # Axes: strip, row, tile, place, word.
    codes = codes.reshape(strips, STRIP, tiles, places, width).transpose(0, 2, 1, 4, 3)
    shifts = xp.arange(0, WORD, bits, dtype=xp.uint16).reshape(1, 1, 1, 1, places)
    words = (codes.astype(xp.uint16) << shifts).sum(axis=-1, dtype=xp.uint16)
    return _bits(words, jnp.int16)


def unpack(words: Any, shape: tuple[int, int], bits: int) -> Any:
    """Undoes `pack`: uint8[out, in], one code a byte."""
    xp, places = words.__array_namespace__(), WORD // bits
    strips, tiles, _, width = words.shape
    words, mask = _bits(words, jnp.uint16), xp.uint16(2**bits - 1)
    codes = xp.stack([(words >> xp.uint16(bits * q)) & mask for q in range(places)], axis=-2).astype(xp.uint8)
    # Axes: strip, tile, row, place, word.
    codes = codes.transpose(0, 2, 1, 3, 4).reshape(strips * STRIP, tiles * places * width)
    return codes[: shape[0], : shape[1]]


def by_group(values: Any) -> Any:
    """Scales or offsets [out, groups] as the kernels read them, [groups, 16 * strips], padded with 0."""
    xp = values.__array_namespace__()
    return xp.pad(values, ((0, -values.shape[0] % STRIP), (0, 0))).T.copy()


def _bits(array: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(array, dtype) if isinstance(array, jax.Array) else array.view(dtype)
