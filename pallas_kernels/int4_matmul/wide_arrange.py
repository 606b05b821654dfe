"""Brings x into the order in which the kernel for many rows takes it, normalised where a norm is before the product.

For few rows XLA does it, inside whatever computes x; for many it would read memory in pieces of four bytes. A lane of
these kernels reads 64 bytes of a token and writes four pieces of 16, which are the transposed of the 4 x 4 words it
read; lanes with neighbouring tokens write neighbouring pieces: whole lines, or with a norm, for which a block has all
inputs of its tokens, 32 bytes.
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
"""Of a block without a norm; each has 8 tokens and a stage of inputs."""
NORM_TOKENS, NORM_INPUTS = 2, 512
"""Of a block with a norm, and of each of its warps."""
MOST_NORM_INPUTS = 32 * NORM_INPUTS
"""A block has at most 32 warps."""


def arrange(x: jax.Array, plan: WidePlan, norm: jax.Array | None = None, norm_eps: float = 0.0) -> jax.Array:
    """x [rows, in_features] bf16 as int32[token tile, stage, 16 pieces, tokens, 4].

    A piece is what the eight columns of an 8 x 8 matrix are of 32 (or 16) inputs, two neighbouring inputs a word. Past
    the last input are zeros; what is past the last token, nobody reads the products of. `norm` float32 [in_features]:
    x goes through an RMS norm with these weights.
    """
    if norm is None and plan.rows <= FEW_ROWS:
        return by_xla(x, plan)
    return by_kernel(x, plan, norm, norm_eps)


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


def norm_warps(plan: WidePlan) -> int:
    """Of a block: whole warpgroups."""
    return 4 * -(-plan.steps * STAGE // (4 * NORM_INPUTS))


def reorder(w: Any, plan: WidePlan, x: Any, out: Any, block: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests)."""
    tokens = plan.schedule.tokens
    unit = block * WARPS + w.warp
    in_tile, rest = unit % (tokens // 8) * 8 + w.lane % 8, unit // (tokens // 8)
    step, tile = rest % plan.steps, rest // plan.steps
    token, column = tile * tokens + in_tile, step * STAGE + w.lane // 8 * 32
    words = _read(w, plan, x, token, column)
    place = (rest * 16 + w.lane // 8 * 4) * tokens + in_tile
    _write(w, plan, out, words, place, tile < plan.token_tiles)


def normalise(w: Any, plan: WidePlan, x: Any, norm: Any, eps: float, out: Any, block: Any) -> None:
    """One warp's work where a norm is before the product."""
    tokens = plan.schedule.tokens
    token, column = block * NORM_TOKENS + w.lane % NORM_TOKENS, w.warp * NORM_INPUTS + w.lane // NORM_TOKENS * 32
    words = _read(w, plan, x, token, column)
    # Asked for before they are needed: the barrier is between.
    weights = [
        weight
        for first in range(0, 32, 4)
        for weight in w.load_four(norm, column, column + first < plan.in_features, first)
    ]
    numbers = [number for word in words for number in w.numbers_of(word)]
    square = w.number(0.0)
    for number in numbers:
        square = w.fma(number, number, square)
    for mask in (2, 4, 8, 16):
        square = square + w.shuffle_xor(square, mask)
    w.shared_store(w.warp * 8 + w.lane * 4, square, w.lane < NORM_TOKENS)
    w.block_barrier()
    mine = w.lane % NORM_TOKENS * 4
    total = w.shared_number(mine)
    for other in range(1, norm_warps(plan)):
        total = total + w.shared_number(mine, 8 * other)
    root = w.rsqrt(total * (1.0 / plan.in_features) + eps)
    scaled = [number * root * weight for number, weight in zip(numbers, weights, strict=True)]
    words = [w.pair(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
    stage = token // tokens * plan.steps + column // STAGE
    place = (stage * 16 + column % STAGE // 32 * 4) * tokens + token % tokens
    _write(w, plan, out, words, place, (token < plan.rows) & (column < plan.steps * STAGE))


def _read(w: Any, plan: WidePlan, x: Any, token: Any, column: Any) -> list[Any]:
    """A token's 32 inputs from `column` on, zeros where there are none."""
    words = []
    for first in range(0, 32, 8):
        there = (token < plan.rows) & (column + first < plan.in_features)
        words += w.load_words(x, token * plan.in_features + column, 4, there, first)
    return words


def _write(w: Any, plan: WidePlan, out: Any, words: list[Any], place: Any, there: Any) -> None:
    """These as four pieces, of which the first is piece `place` of `out`."""
    tokens, run = plan.schedule.tokens, steps_per_run(plan.group_size)
    for piece in range(4):
        # A lane of the product has neighbours of 32 inputs for its two steps, or of 16 for one.
        first, stride = (piece, 4) if run == 2 else (piece // 2 * 8 + piece % 2, 2)
        w.store_words(out, (place + piece * tokens) * 8, [words[first + stride * q] for q in range(4)], there)


def by_kernel(x: jax.Array, plan: WidePlan, norm: jax.Array | None = None, norm_eps: float = 0.0) -> jax.Array:
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *given, out, shared, block = values
            w = WideWarp(shared)
            if norm is None:
                reorder(w, plan, given[0], out, w.scalar(block))
            else:
                normalise(w, plan, given[0], given[1], norm_eps, out, w.scalar(block))

        # The next kernel may be brought onto the card already; it waits for this one's end, as this one does before.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        emit(*refs, lax.axis_index("block"))

    warps = WARPS if norm is None else norm_warps(plan)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(_shape_of(plan), jnp.int32),
        grid=(blocks(plan) if norm is None else -(-plan.rows // NORM_TOKENS),),
        grid_names=("block",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((max(32, NORM_TOKENS * warps),), jnp.float32)],
        kernel_name="int4_arrange" if norm is None else "int4_normalise",
    )(*[array for array in (x, norm) if array is not None])
