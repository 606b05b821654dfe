"""The order in which a product of packed weights takes many rows of x, for whatever computes them.

A lane of the product's kernel has neighbouring inputs of several steps in one word of codes, so x is multiplied in an
order of its own, and lies in shared memory as the tensor cores read it: [piece of 8 inputs][token][16 bytes]. Who
writes x writes it so.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

STAGE = 128
"""Inputs that travel at a time: two tiles."""


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """`tokens` a tile; `run`: steps of 16 inputs in which a lane's inputs are neighbours."""

    tokens: int
    run: int


def image_shape(rows: int, in_features: int, order: TokenOrder) -> tuple[int, int, int, int, int]:
    """Token tile, stage, piece, token, word."""
    return -(-rows // order.tokens), -(-in_features // STAGE), 16, order.tokens, 4


def ordered(x: jax.Array, order: TokenOrder) -> jax.Array:
    """x [rows, in_features] bf16 as int32[token tile, stage, 16 pieces, tokens, 4]: the definition, in jax.numpy.

    A piece is what the eight columns of an 8 x 8 matrix are of 32 (or 16) inputs, two neighbouring inputs a word. Past
    the last input are zeros; what is past the last token, nobody reads the products of.
    """
    tiles, steps, _, tokens, _ = image = image_shape(x.shape[0], x.shape[1], order)
    rows, columns = tiles * tokens, steps * STAGE
    x = jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
    words = lax.bitcast_convert_type(x.reshape(rows, columns // 2, 2), jnp.int32)
    words = words.reshape(tiles, tokens, steps, 8 // order.run, 4, 2 * order.run)
    return words.transpose(0, 2, 3, 5, 1, 4).reshape(image)
