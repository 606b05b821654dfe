"""The RMS norm before a product of many rows, which brings x into the product's order as well.

A block has all inputs of two tokens, a lane 64 bytes of one. Lanes of neighbouring tokens write pieces of 16 bytes that
are neighbours.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.wide_arrange import read, shape_of, write
from pallas_kernels.int4_matmul.wide_plan import STAGE, WidePlan

TOKENS, WARP_INPUTS = 2, 512
"""Of a block, and of each of its warps."""
MOST_INPUTS = 32 * WARP_INPUTS
"""A block has at most 32 warps."""


def warps(plan: WidePlan) -> int:
    """Of a block: whole warpgroups."""
    return 4 * -(-plan.steps * STAGE // (4 * WARP_INPUTS))


def blocks(plan: WidePlan) -> int:
    return -(-plan.rows // TOKENS)


def normalise(w: Any, plan: WidePlan, x: Any, norm: Any, eps: float, out: Any, block: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests)."""
    tokens = plan.schedule.tokens
    token, column = block * TOKENS + w.lane % TOKENS, w.warp * WARP_INPUTS + w.lane // TOKENS * 32
    words = read(w, plan, x, token, column)
    # Asked for before they are needed: the barrier is between.
    weights = [
        weight
        for first in range(0, 32, 4)
        for weight in w.load_four(norm, column, column + first < plan.in_features, first)
    ]
    numbers = [number for word in words for number in w.numbers_of(word)]
    root = w.rsqrt(_sum_of_squares(w, plan, numbers) * (1.0 / plan.in_features) + eps)
    scaled = [number * root * weight for number, weight in zip(numbers, weights, strict=True)]
    words = [w.pair(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
    stage = token // tokens * plan.steps + column // STAGE
    piece = (stage * 16 + column % STAGE // 32 * 4) * tokens + token % tokens
    write(w, plan, out, words, piece, (token < plan.rows) & (column < plan.steps * STAGE))


def _sum_of_squares(w: Any, plan: WidePlan, numbers: Sequence[Any]) -> Any:
    """Of a token's inputs, over the block."""
    square = w.number(0.0)
    for number in numbers:
        square = w.fma(number, number, square)
    for mask in (2, 4, 8, 16):
        square = square + w.shuffle_xor(square, mask)
    w.shared_store(w.warp * (4 * TOKENS) + w.lane * 4, square, w.lane < TOKENS)
    w.block_barrier()
    mine = w.lane % TOKENS * 4
    total = w.shared_number(mine)
    for other in range(1, warps(plan)):
        total = total + w.shared_number(mine, 4 * TOKENS * other)
    return total


def arrange_normalised(x: jax.Array, plan: WidePlan, norm: jax.Array, eps: float) -> jax.Array:
    """x [rows, in_features] bf16, divided by the root of its mean square and times `norm` (float32), see `arrange`."""

    def program(w: Any, references: Any, block: Any) -> None:
        x_ref, norm_ref, out = references
        normalise(w, plan, x_ref, norm_ref, eps, out, block)

    return run_blocks(
        program,
        [x, norm],
        jax.ShapeDtypeStruct(shape_of(plan), jnp.int32),
        blocks=blocks(plan),
        warps=warps(plan),
        name="int4_normalise",
        shared_floats=max(32, TOKENS * warps(plan)),
    )
