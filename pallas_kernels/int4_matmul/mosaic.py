"""Fused INT4 dequantise-and-multiply for Hopper, for the few rows of a decode step.

The product is computed as out^T = W x^T: 16 output features are the large operand of `mma.m16n8k16`, 8 tokens the small
one. A warp owns 128 or 256 inputs for the whole kernel and keeps their x in registers, in fragment order; a block's
warps own neighbouring inputs and walk together through units of output features. Weights and scales travel by
asynchronous copies into a ring that each warp has for itself, several units ahead, and each lane reads back what it
has copied, so the loop needs no barrier for them. The warps' sums of a unit are added in shared memory in a fixed
order, so results are reproducible. Blocks that share an output feature write float32 partial sums, which XLA adds
inside whatever comes next.

Codes become bf16 by bit tricks (0x4300 | code is 128 + code). Scale, zero point or minimum enter once a group:

    sum_k x_k w_k = scale * sum_k x_k (128 + code_k) + bias * sum_k x_k

with bias = -scale (128 + zero) or minimum - 128 scale, in float32; sum_k x_k is computed once for the whole kernel.

docs/kernels.md has the layout, the reasons and the measurements.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.packing import Kind, PackedInt4
from pallas_kernels.int4_matmul.plan import COLUMNS, PIECE_BYTES, STRIP, Plan, Schedule
from pallas_kernels.int4_matmul.stream import Weights, stream_of
from pallas_kernels.int4_matmul.warp import Int4Warp

ONES = 0x3F803F80  # two bfloat16


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; `out` is [slices, rows, out_features]."""

    weights: Weights
    x: Any
    out: Any
    scale_dtype: str
    offset_dtype: str | None
    out_dtype: str
    kind: Kind


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One warp's work: the instructions are emitted through `w`, an Int4Warp (or its NumPy twin in the tests)."""
    schedule = plan.schedule
    group, quad = w.lane // 4, w.lane % 4
    zero, one = w.integer(0), w.integer(1)
    stream = stream_of(w, plan, a.weights, slice_, block)

    stream.begin()
    for d in range(schedule.depth):
        stream.start(w.integer(d), w.integer(d))
    if schedule.early_launch:
        w.early_launch_wait()

    tokens = []  # [tile][step][token block]: two words of x in fragment order
    for t in range(plan.warp_tiles):
        steps = []
        for s in range(COLUMNS // 16):
            column = (stream.first_tile + t) * COLUMNS + 16 * s + quad * 4
            blocks = []
            for b in range(plan.token_blocks):
                token = group + 8 * b
                inside = (token < plan.rows) & (column < plan.in_features)
                blocks.append(w.load_two_words(a.x, token * plan.in_features + column, inside))
            steps.append(blocks)
        tokens.append(steps)
    step_of = [(t, s) for t in range(plan.warp_tiles) for s in range(COLUMNS // 16)]
    per_segment = plan.segment // 16
    segments = [step_of[i : i + per_segment] for i in range(0, len(step_of), per_segment)]
    nothing = [w.number(0.0)] * 4
    ones = [w.integer(ONES)] * 4
    token_sums = []  # [segment][token block]: sums of x of this lane's two tokens
    for steps in segments:
        sums = [nothing] * plan.token_blocks
        for t, s in steps:
            sums = [w.mma(total, ones, words) for total, words in zip(sums, tokens[t][s], strict=True)]
        token_sums.append([total[:2] for total in sums])

    def turn(index: Any, carry: Any) -> Any:
        slot, parity, next_slot, buffer = carry
        stream.start(index + schedule.depth, next_slot)
        stream.wait(slot, parity)
        address = stream.address(slot)
        pieces = {
            (t, j): w.shared_words(address + (w.lane * 16 + (t * schedule.strips + j) * PIECE_BYTES))
            for t in range(plan.warp_tiles)
            for j in range(schedule.strips)
        }
        sums = (buffer * schedule.warps + w.warp) * plan.sums_bytes + plan.sums_start
        for j in range(schedule.strips):
            totals = [nothing] * plan.token_blocks
            for segment, steps in enumerate(segments):
                products = [nothing] * plan.token_blocks
                for t, s in steps:
                    codes = w.codes(pieces[t, j][s])
                    products = [w.mma(p, codes, words) for p, words in zip(products, tokens[t][s], strict=True)]
                scale, bias = scale_and_bias(address, segment, j)
                totals = [
                    [total[e] + scale[e // 2] * product[e] + bias[e // 2] * of_tokens[e % 2] for e in range(4)]
                    for total, product, of_tokens in zip(totals, products, token_sums[segment], strict=True)
                ]
            for b, total in enumerate(totals):
                for e in range(4):
                    token, row = quad * 2 + (8 * b + e % 2), group + (STRIP * j + 8 * (e // 2))
                    inside = None if 8 * b + 8 <= plan.rows else token < plan.rows
                    w.shared_store(sums + token * plan.sums_stride + row * 4, total[e], inside)
        w.block_barrier()
        store(stream.first_unit + index, buffer)
        last = slot + 1 < plan.slots
        return stream.after(slot), w.select(last, parity, one - parity), stream.after(next_slot), one - buffer

    def scale_and_bias(address: Any, segment: int, j: int) -> tuple[list[Any], list[Any]]:
        """Of this lane's two rows of strip j."""
        scales, biases = [], []
        for half in range(2):
            row = segment * plan.unit_rows + STRIP * j + 8 * half
            start_of = plan.words_bytes + row * plan.scale_bytes
            scale = w.shared_number(address + group * plan.scale_bytes, a.scale_dtype, start_of)
            if a.kind == "symmetric":
                bias = scale * -136.0
            else:
                start_of = plan.words_bytes + plan.scales_bytes + row * plan.offset_bytes
                offset = w.shared_number(address + group * plan.offset_bytes, a.offset_dtype, start_of)
                bias = scale * (offset * -1.0 - 128.0) if a.kind == "zero_point" else scale * -128.0 + offset
            scales.append(scale)
            biases.append(bias)
        return scales, biases

    def store(unit: Any, buffer: Any) -> None:
        """Adds the warps' sums of a unit, in order, and writes them."""
        outputs = plan.rows * plan.unit_rows
        for base in range(0, outputs, plan.threads):
            index = w.thread + base
            token, row = index // plan.unit_rows, index % plan.unit_rows
            inside = index < outputs
            feature = unit * plan.unit_rows + row
            address = (token * plan.sums_stride + row * 4) + plan.sums_start
            address = w.select(inside, address + buffer * (schedule.warps * plan.sums_bytes), zero)
            total = w.shared_number(address, "float32")
            for other in range(1, schedule.warps):
                total = total + w.shared_number(address, "float32", other * plan.sums_bytes)
            offset = (slice_ * plan.rows + token) * plan.out_features + feature
            w.store_number(a.out, offset, total, a.out_dtype, inside & (feature < plan.out_features))

    w.loop(stream.count, (zero, zero, w.integer(schedule.depth), zero), turn)


def arguments_of(weight: PackedInt4, *, out_dtype: str, **arrays: Any) -> Arguments:
    """The kernel's arguments for the arrays (or references) of a weight."""
    return Arguments(
        **arrays,
        scale_dtype=str(weight.scales.dtype),
        offset_dtype=None if weight.offsets is None else str(weight.offsets.dtype),
        out_dtype=out_dtype,
        kind=weight.kind,
    )


def int4_matmul(x: jax.Array, weight: PackedInt4, *, schedule: Schedule, out_dtype: jnp.dtype) -> jax.Array:
    """x [rows, in_features] bf16 times a weight of the mosaic layout -> [rows, out_features]."""
    partial = partial_sums(x, weight, schedule=schedule, out_dtype=out_dtype)
    # Written as a chain of additions, XLA makes it part of the next elementwise operation.
    return functools.reduce(operator.add, list(partial)).astype(out_dtype)


def partial_sums(
    x: jax.Array,
    weight: PackedInt4,
    *,
    schedule: Schedule,
    out_dtype: jnp.dtype,
    program: Callable[[Any, Plan, Arguments, Any, Any], None] = multiply,
) -> jax.Array:
    """The same before the last addition: [slices, rows, out_features], float32 unless there is only one slice.

    `program` is what each warp does; benchmarks pass one that reads the weights and nothing else.
    """
    plan = Plan.of(x.shape[0], weight, schedule)
    dtype = jnp.dtype(jnp.float32) if plan.slices > 1 else jnp.dtype(out_dtype)
    operands = [weight.codes, weight.scales, *([] if weight.offsets is None else [weight.offsets]), x]
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *arrays, out, shared, slice_, block = values
            words, scales, *rest = arrays
            offsets = rest[0] if weight.offsets is not None else None
            arguments = arguments_of(
                weight, weights=Weights(words, scales, offsets), x=rest[-1], out=out, out_dtype=str(dtype)
            )
            w = Int4Warp(shared)
            program(w, plan, arguments, w.scalar(slice_), w.scalar(block))

        if schedule.early_launch:
            plgpu.griddepcontrol_launch_dependents()
        emit(*refs, jax.lax.axis_index("slice"), jax.lax.axis_index("block"))

    threads = {"num_threads": schedule.warps // 4, "thread_name": "warpgroup"} if schedule.warps > 4 else {}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.slices, plan.rows, plan.out_features), dtype),
        grid=(plan.slices, plan.blocks_per_slice),
        grid_names=("slice", "block"),
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="int4_matmul",
        **threads,
    )(*operands)
