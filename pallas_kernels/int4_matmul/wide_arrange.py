"""Brings x into the order in which the kernel for many rows takes it.

For few rows XLA does it, inside whatever computes x; for many it would read memory in pieces of four bytes. A lane of
this kernel reads 64 bytes of a token and writes four pieces of 16, which are the transposed of the 4 x 4 words it read;
eight lanes with neighbouring tokens write whole lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.packing import steps_per_run
from pallas_kernels.int4_matmul.wide_plan import STAGE, TokenOrder, WidePlan
from pallas_kernels.int4_matmul.wide_warp import WideWarp

FEW_ROWS = 64
WARPS = 8
"""Of a block; each has 8 tokens and a stage of inputs."""


def arrange(x: jax.Array, plan: WidePlan) -> jax.Array:
    """x [rows, in_features] bf16 as int32[token tile, stage, 16 pieces, tokens, 4], padded with zeros.

    A piece is what the eight columns of an 8 x 8 matrix are of 32 (or 16) inputs, two neighbouring inputs a word.
    """
    return by_xla(x, plan) if plan.rows <= FEW_ROWS else by_kernel(x, plan)


def shape(rows: int, in_features: int, order: TokenOrder) -> tuple[int, ...]:
    return -(-rows // order.tokens), -(-in_features // STAGE), 16, order.tokens, 4


def _shape_of(plan: WidePlan) -> tuple[int, ...]:
    return shape(plan.rows, plan.in_features, plan.token_order)


def by_xla(x: jax.Array, plan: WidePlan) -> jax.Array:
    """The definition, in jax.numpy."""
    tokens = plan.schedule.tokens
    rows, columns = plan.token_tiles * tokens, plan.steps * STAGE
    x = jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
    words = lax.bitcast_convert_type(x.reshape(rows, columns // 2, 2), jnp.int32)
    run = steps_per_run(plan.group_size)
    words = words.reshape(plan.token_tiles, tokens, plan.steps, 8 // run, 4, 2 * run)
    return words.transpose(0, 2, 3, 5, 1, 4).reshape(_shape_of(plan))


def blocks(plan: WidePlan) -> int:
    return -(-plan.token_tiles * plan.steps * (plan.schedule.tokens // 8) // WARPS)


def reorder(w: Any, plan: WidePlan, x: Any, out: Any, block: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests)."""
    tokens, run = plan.schedule.tokens, steps_per_run(plan.group_size)
    unit = block * WARPS + w.warp
    in_tile, rest = unit % (tokens // 8) * 8 + w.lane % 8, unit // (tokens // 8)
    step, tile = rest % plan.steps, rest // plan.steps
    token, column = tile * tokens + in_tile, step * STAGE + w.lane // 8 * 32
    inside = token < plan.rows
    words = []
    for first in range(0, 32, 8):
        there = inside & (column + first < plan.in_features)
        words += w.load_words(x, token * plan.in_features + column, 4, there, first)
    for piece in range(4):
        # A lane of the product has neighbours of 32 inputs for its two steps, or of 16 for one.
        first, stride = (piece, 4) if run == 2 else (piece // 2 * 8 + piece % 2, 2)
        place = ((rest * 16 + w.lane // 8 * 4 + piece) * tokens + in_tile) * 8
        w.store_words(out, place, [words[first + stride * q] for q in range(4)], tile < plan.token_tiles)


def by_kernel(x: jax.Array, plan: WidePlan) -> jax.Array:
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            x_ref, out, shared, block = values
            w = WideWarp(shared)
            reorder(w, plan, x_ref, out, w.scalar(block))

        # The next kernel may be brought onto the card already; it waits for this one's end, as this one does before.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        emit(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(_shape_of(plan), jnp.int32),
        grid=(blocks(plan),),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((32,), jnp.float32)],
        kernel_name="int4_arrange",
    )(x)
