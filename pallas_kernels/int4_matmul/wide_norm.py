"""The RMS norm before a product of many rows, and the residual before that: x in the product's order in one pass.

A block has all inputs of two tokens, a lane 64 bytes of one. Lanes of neighbouring tokens write pieces of 16 bytes that
are neighbours.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.wide_arrange import read, shape_of, write
from pallas_kernels.int4_matmul.wide_plan import STAGE, WidePlan
from pallas_kernels.int4_matmul.wide_warp import WideWarp

TOKENS, WARP_INPUTS = 2, 512
"""Of a block, and of each of its warps."""
MOST_INPUTS = 32 * WARP_INPUTS
"""A block has at most 32 warps."""


def arrange_normalised(x: jax.Array, plan: WidePlan, norm: jax.Array, eps: float) -> jax.Array:
    """x [rows, in_features] bf16, divided by the root of its mean square and times `norm` (float32), see `arrange`."""
    return _by_kernel((x, norm), plan, eps)[0]


def arrange_sum_normalised(
    x: jax.Array, partial: jax.Array, plan: WidePlan, norm: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """The same of x + the sums of `partial` [slices, rows, in_features] (float32), which come back as well, in bf16."""
    image, total = _by_kernel((x, norm, partial), plan, eps)
    return image, total


def warps(plan: WidePlan) -> int:
    """Of a block: whole warpgroups."""
    return 4 * -(-plan.steps * STAGE // (4 * WARP_INPUTS))


def blocks(plan: WidePlan) -> int:
    return -(-plan.rows // TOKENS)


def normalise(
    w: Any, plan: WidePlan, x: Any, norm: Any, partial: Any, slices: int, eps: float, outs: Sequence[Any], block: Any
) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests).

    `outs`: the image, and where there are slices of partial sums what x becomes by them.
    """
    tokens = plan.schedule.tokens
    token, column = block * TOKENS + w.lane % TOKENS, w.warp * WARP_INPUTS + w.lane // TOKENS * 32
    words = read(w, plan, x, token, column)
    place = token * plan.in_features + column
    sums: list[Any] = []
    for index in range(slices):
        more = floats(w, plan, partial, place + index * (plan.rows * plan.in_features), column, token < plan.rows)
        sums = [a + b for a, b in zip(sums, more, strict=True)] if sums else more
    # Asked for before they are needed: the barrier is between.
    weights = floats(w, plan, norm, column, column)
    if slices:
        numbers = [number for word in words for number in w.numbers_of(word)]
        words = _pairs(w, [number + more for number, more in zip(numbers, sums, strict=True)])
        for first in range(0, 32, 8):
            there = (token < plan.rows) & (column + first < plan.in_features)
            w.store_words(outs[1], place + first, words[first // 2 : first // 2 + 4], there)
    numbers = [number for word in words for number in w.numbers_of(word)]
    root = w.rsqrt(_sum_of_squares(w, plan, numbers) * (1.0 / plan.in_features) + eps)
    words = _pairs(w, [number * root * weight for number, weight in zip(numbers, weights, strict=True)])
    stage = token // tokens * plan.steps + column // STAGE
    piece = (stage * 16 + column % STAGE // 32 * 4) * tokens + token % tokens
    write(w, plan, outs[0], words, piece, (token < plan.rows) & (column < plan.steps * STAGE))


def floats(w: Any, plan: WidePlan, array: Any, place: Any, column: Any, there: Any = None) -> list[Any]:
    """32 float32 of an array from `place` on, zeros where there are no inputs from `column` on."""
    numbers = []
    for first in range(0, 32, 4):
        inside = column + first < plan.in_features
        numbers += w.load_four(array, place, inside if there is None else inside & there, first)
    return numbers


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


def _pairs(w: Any, numbers: Sequence[Any]) -> list[Any]:
    return [w.pair(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def _by_kernel(arrays: Sequence[jax.Array], plan: WidePlan, eps: float) -> Sequence[jax.Array]:
    """`arrays`: x, the norm's weights, and perhaps partial sums."""
    scalar = plgpu.Layout.WG_SPLAT(())
    slices = arrays[2].shape[0] if len(arrays) > 2 else 0

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *given, shared, block = values
            x, norm, *rest = given[: len(arrays)]
            w = WideWarp(shared)
            outs = given[len(arrays) :]
            normalise(w, plan, x, norm, rest[0] if rest else None, slices, eps, outs, w.scalar(block))

        # The next kernel may be brought onto the card already; it waits for this one's end, as this one does before.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        emit(*refs, lax.axis_index("block"))

    outs = [jax.ShapeDtypeStruct(shape_of(plan), jnp.int32)]
    if slices:
        outs.append(jax.ShapeDtypeStruct((plan.rows, plan.in_features), jnp.bfloat16))
    return plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(blocks(plan),),
        grid_names=("block",),
        num_threads=warps(plan) // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((max(32, TOKENS * warps(plan)),), jnp.float32)],
        kernel_name="int4_normalise",
    )(*arrays)
