"""Brings x into the order in which the kernel for many rows takes it.

For few rows XLA does it; for many it would read memory in pieces of four bytes. A lane of this kernel reads 64 bytes of
a token and writes four pieces of 16, which are the transposed of the 4 x 4 words it read; eight lanes with neighbouring
tokens write whole lines. Where a norm is before the product, its kernel does it (`wide_norm`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.packing import steps_per_run
from pallas_kernels.int4_matmul.wide_plan import WidePlan
from pallas_kernels.token_order import STAGE, image_shape, ordered

FEW_ROWS = 64
WARPS = 8
"""Of a block; each has 8 tokens and a stage of inputs."""


def arrange(x: jax.Array, plan: WidePlan) -> jax.Array:
    """x [rows, in_features] bf16, `ordered` as the plan's product takes it."""
    return ordered(x, plan.token_order) if plan.rows <= FEW_ROWS else by_kernel(x, plan)


def shape_of(plan: WidePlan) -> tuple[int, ...]:
    return image_shape(plan.rows, plan.in_features, plan.token_order)


def blocks(plan: WidePlan) -> int:
    return -(-plan.token_tiles * plan.steps * (plan.schedule.tokens // 8) // WARPS)


def reorder(w: Any, plan: WidePlan, x: Any, out: Any, block: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests)."""
    tokens = plan.schedule.tokens
    unit = block * WARPS + w.warp
    in_tile, rest = unit % (tokens // 8) * 8 + w.lane % 8, unit // (tokens // 8)
    step, tile = rest % plan.steps, rest // plan.steps
    token, column = tile * tokens + in_tile, step * STAGE + w.lane // 8 * 32
    words = read(w, plan, x, token, column)
    place = (rest * 16 + w.lane // 8 * 4) * tokens + in_tile
    write(w, plan, out, words, place, tile < plan.token_tiles)


def read(w: Any, plan: WidePlan, x: Any, token: Any, column: Any) -> list[Any]:
    """A token's 32 inputs from `column` on, zeros where there are none."""
    words = []
    for first in range(0, 32, 8):
        there = (token < plan.rows) & (column + first < plan.in_features)
        words += w.load_words(x, token * plan.in_features + column, 4, there, first)
    return words


def write(w: Any, plan: WidePlan, out: Any, words: list[Any], place: Any, there: Any) -> None:
    """These as four pieces, of which the first is piece `place` of `out`."""
    tokens, run = plan.schedule.tokens, steps_per_run(plan.group_size)
    for piece in range(4):
        # A lane of the product has neighbours of 32 inputs for its two steps, or of 16 for one.
        first, stride = (piece, 4) if run == 2 else (piece // 2 * 8 + piece % 2, 2)
        w.store_words(out, (place + piece * tokens) * 8, [words[first + stride * q] for q in range(4)], there)


def by_kernel(x: jax.Array, plan: WidePlan) -> jax.Array:
    def program(w: Any, references: Any, block: Any) -> None:
        x_ref, out = references
        reorder(w, plan, x_ref, out, block)

    out_type = jax.ShapeDtypeStruct(shape_of(plan), jnp.int32)
    return run_blocks(program, [x], out_type, blocks=blocks(plan), warps=WARPS, name="int4_arrange")
