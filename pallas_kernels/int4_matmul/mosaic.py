"""Fused INT4 dequantise-and-multiply for Hopper, for the few rows of a decode step.

The product is computed as out^T = W x^T: 64 output features are the large operand of `mma.sync`, the tokens its
8-column operand. A warpgroup owns 64 features and a slice of K; the slices of one thread block are added in shared
memory and those of a cluster through distributed shared memory, always in the same order, so results are reproducible
and no partial result leaves the chip. Weights go from global memory to registers (or through a ring of bulk copies),
`depth` tiles ahead; tokens and scales of the slice are fetched once.

Codes become bf16 by bit tricks (0x4300 | code is 128 + code), zero points are subtracted exactly as small integers, and
the scale multiplies the float32 sum of a group, so the only rounding is that of x, the float32 sums and the output.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

ROWS = 64
"""Output features of a tile: 4 warps of 16."""
COLUMNS = 64
"""Inputs of a tile; a thread holds it as 4 words, one 16-byte load."""
WORDS = (4, 128)
"""Words of a tile, int32, in load order; two dimensions because a bulk copy takes at most 256 elements of one."""

_WEIGHTS = plgpu.Layout.MMA_LHS(jnp.bfloat16)
_TOKENS = plgpu.Layout.MMA_RHS(jnp.bfloat16)
_SUMS = plgpu.Layout.MMA_ACC(jnp.bfloat16)
_PACKED = plgpu.Layout.WG_STRIDED(WORDS, vec_size=4)
_ROW_MAJOR = plgpu.Layout.TILED(
    mgpu.fragmented_array.Tiling(((4, 32), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
_ZERO_IN_BF16 = 0x4300  # 128.0, whose last mantissa bit is worth 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one matrix is spread over the card.

    A thread block holds `rows` row tiles times `splits` slices of K, a warpgroup for each; a cluster of `cluster` blocks
    divides K further. Each warpgroup keeps `depth` steps of weights in flight, in `registers` or in a `ring` in shared memory.
    """

    rows: int
    splits: int
    cluster: int
    depth: int
    stream: Literal["registers", "ring"] = "registers"

    @property
    def slices(self) -> int:
        return self.splits * self.cluster

    @property
    def warpgroups(self) -> int:
        return self.rows * self.splits


def _unpack(words: jax.Array) -> jax.Array:
    """int32[4, 128] in load order -> bf16[64, 64] in operand order, each element 128 + code."""

    @plgpu.inline_mgpu(
        arg_types=(_PACKED,),
        return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, layout=_WEIGHTS),
    )
    def unpack(ctx, packed):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = _WEIGHTS.to_mgpu()
        (vector,) = packed.registers.flat
        registers = []
        for step in range(COLUMNS // 16):
            word = mgpu.utils.bitcast(mgpu.utils.vector_slice(vector, slice(step, step + 1)), i32)
            for nibble in range(4):
                shifted = arith.shrui(word, mgpu.c(4 * nibble, i32)) if nibble else word
                # One instruction for mask and exponent; written as `and` and `or`, ptxas often keeps two.
                codes = llvm.inline_asm(i32, [shifted], "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;", "=r,r")
                registers.append(mgpu.utils.bitcast(codes, pair))
        operand = np.empty(len(registers), dtype=object)
        operand[:] = registers
        return mgpu.FragmentedArray(
            _registers=operand.reshape(layout.registers_shape((ROWS, COLUMNS))), _layout=layout, _is_signed=None
        )

    return unpack(words)


def _across_columns(values: jax.Array, columns: int, layout: plgpu.Layout) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (ROWS, columns), (0,)), layout)


def int4_matmul(
    words: jax.Array,
    scales: jax.Array,
    offsets: jax.Array | None,
    x: jax.Array,
    *,
    group_size: int,
    schedule: Schedule,
    out_dtype: jnp.dtype = jnp.dtype(jnp.bfloat16),
) -> jax.Array:
    """x [M, K] bf16 times packed weights -> [M, N].

    M is a multiple of 8 up to 64, K a multiple of 64. `words` int32[N/64, K/64, 4, 128] (see packing.py); `scales` [groups, N]
    float; `offsets` is None (the zero point is 8), uint8[groups, N] zero points, or float minima [groups, N].
    """
    m, k = x.shape
    n = words.shape[0] * ROWS
    step = 2 * COLUMNS if k % (2 * COLUMNS) == 0 else COLUMNS
    tiles = step // COLUMNS
    steps, slices = k // step, schedule.slices
    steps_per_slice = -(-steps // slices)
    even = steps % slices == 0
    depth = min(schedule.depth, steps_per_slice)
    width = min(group_size, COLUMNS)  # columns of one operand: a group, or a tile
    groups_per_step = max(1, step // group_size)
    span = steps_per_slice * step
    aligned = even and (span % group_size == 0 or slices == 1)
    slice_groups = min(scales.shape[0], -(-span // group_size) + (0 if aligned else 1))
    minima = offsets is not None and jnp.issubdtype(offsets.dtype, jnp.floating)
    ring = schedule.stream == "ring"

    def kernel(*refs):
        words_ref, scales_ref, *rest = refs
        offsets_ref = rest.pop(0) if offsets is not None else None
        x_ref, out_ref, x_smem, scales_smem, *rest = rest
        offsets_smem = rest.pop(0) if offsets is not None else None
        ring_smem = rest.pop(0) if ring else None
        sums_smem, x_fetched, fetched, added, *filled = rest

        warpgroup = lax.axis_index("warpgroup")
        row, split = warpgroup // schedule.splits, warpgroup % schedule.splits
        tile = lax.axis_index("block") * schedule.rows + row
        rank = lax.axis_index("rank") if schedule.cluster > 1 else jnp.int32(0)
        part = rank * schedule.splits + split
        owner, seat = row % schedule.cluster, row // schedule.cluster  # the rows' sums are dealt out to the cluster
        first = part * steps_per_slice if even else part * steps // slices
        group_base = first * step // group_size

        def start(t):
            """Starts the fetch of step t; returns its registers, or nothing if it goes to the ring."""
            position = first + t if even else jnp.minimum(first + t, steps - 1)
            if ring:
                slot = t % depth
                plgpu.copy_gmem_to_smem(
                    words_ref.at[tile, pl.ds(position * tiles, tiles)],
                    ring_smem.at[warpgroup, slot],
                    filled[0].at[warpgroup, slot],
                )
                return ()
            return [
                plgpu.load(words_ref.at[tile, position * tiles + i], layout=_PACKED, optimized=False)
                for i in range(tiles)
            ]

        def finish(t, pending):
            if not ring:
                return pending
            slot = t % depth
            plgpu.barrier_wait(filled[0].at[warpgroup, slot])
            return [plgpu.load(ring_smem.at[warpgroup, slot, i], layout=_PACKED, optimized=False) for i in range(tiles)]

        def multiply(t, packed, total):
            for j in range(groups_per_step):
                if group_size < step:
                    group = t * groups_per_step + j
                else:
                    group = (first + t) * step // group_size - group_base
                scale = plgpu.load(scales_smem.at[warpgroup, group], layout=_SUMS.reduce(1)).astype(jnp.float32)
                zero = jnp.bfloat16(128 if minima else 136)
                if offsets is not None and not minima:
                    code = plgpu.load(offsets_smem.at[warpgroup, group], layout=_WEIGHTS.reduce(1))
                    zero = lax.bitcast_convert_type(code.astype(jnp.int16) | jnp.int16(_ZERO_IN_BF16), jnp.bfloat16)
                    zero = _across_columns(zero, width, _WEIGHTS)
                sums = plgpu.layout_cast(jnp.zeros((ROWS, m), jnp.float32), _SUMS)
                x_sums = plgpu.layout_cast(jnp.zeros((ROWS, m), jnp.float32), _SUMS)
                for column in range(j * step // groups_per_step, (j + 1) * step // groups_per_step, width):
                    weights = _unpack(packed[column // COLUMNS])
                    if width < COLUMNS:
                        weights = weights[:, column % COLUMNS : column % COLUMNS + width]
                    weights = weights - zero
                    tokens = plgpu.load(x_smem.at[split].at[:, pl.ds(t * step + column, width)].T, layout=_TOKENS)
                    sums = plgpu.mma(sums, weights, tokens)
                    if minima:
                        ones = plgpu.layout_cast(jnp.ones((ROWS, width), jnp.bfloat16), _WEIGHTS)
                        x_sums = plgpu.mma(x_sums, ones, tokens)
                valid = jnp.float32(1)
                if not even:
                    valid = jnp.where(first + t < (part + 1) * steps // slices, jnp.float32(1), jnp.float32(0))
                    scale = scale * valid
                total = total + sums * _across_columns(scale, m, _SUMS)
                if minima:
                    low = plgpu.load(offsets_smem.at[warpgroup, group], layout=_SUMS.reduce(1)).astype(jnp.float32)
                    total = total + x_sums * _across_columns(low * valid, m, _SUMS)
            return total

        pending = [start(t) for t in range(depth)]

        @pl.when(row == 0)
        def _():
            plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(first * step, span)], x_smem.at[split], x_fetched.at[split])

        here = (pl.ds(group_base, slice_groups), pl.ds(tile * ROWS, ROWS))
        plgpu.copy_gmem_to_smem(scales_ref.at[here], scales_smem.at[warpgroup], fetched.at[warpgroup])
        if offsets_ref is not None:
            plgpu.copy_gmem_to_smem(offsets_ref.at[here], offsets_smem.at[warpgroup], fetched.at[warpgroup])
        plgpu.barrier_wait(fetched.at[warpgroup])
        plgpu.barrier_wait(x_fetched.at[split])

        def advance(t, pending, total, *, more):
            packed = finish(t, pending[0])
            pending = [*pending[1:], start(t + depth)] if more else pending[1:]
            return pending, multiply(t, packed, total)

        def turn(r, carry):
            pending, total = carry
            for i in range(depth):
                pending, total = advance(r * depth + i, pending, total, more=True)
            return pending, total

        total = plgpu.layout_cast(jnp.zeros((ROWS, m), jnp.float32), _SUMS)
        turns = (steps_per_slice - depth) // depth
        if turns:
            pending, total = lax.fori_loop(0, turns, turn, (pending, total))
        for t in range(turns * depth, steps_per_slice):
            pending, total = advance(t, pending, total, more=t + depth < steps_per_slice)

        if schedule.cluster > 1:
            plgpu.async_store_smem(
                total, sums_smem.at[seat, part], added.at[seat], cluster_idx=owner, cluster_dim="rank"
            )
        else:
            sums_smem.at[seat, part][...] = total
            plgpu.barrier_arrive(added.at[seat])

        @pl.when(jnp.logical_and(split == 0, rank == owner))
        def _():
            plgpu.barrier_wait(added.at[seat])
            result = jnp.float32(0)
            for i in range(slices):
                result = result + plgpu.load(sums_smem.at[seat, i].T, layout=_ROW_MAJOR, optimized=False)
            out_ref.at[:, pl.ds(tile * ROWS, ROWS)][...] = result.astype(out_dtype)

    def swizzled(columns, dtype):
        bits = dtype.itemsize * 8
        swizzle = plgpu.find_swizzle(columns * bits, "operand")
        return (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))

    warpgroups, seats = schedule.warpgroups, -(-schedule.rows // schedule.cluster)
    scratch: list = [
        plgpu.SMEM((schedule.splits, m, span), jnp.bfloat16, transforms=swizzled(width, jnp.dtype(jnp.bfloat16))),
        plgpu.SMEM((warpgroups, slice_groups, ROWS), scales.dtype),
    ]
    if offsets is not None:
        scratch.append(plgpu.SMEM((warpgroups, slice_groups, ROWS), offsets.dtype))
    if ring:
        scratch.append(plgpu.SMEM((warpgroups, depth, tiles, *WORDS), jnp.int32))
    scratch += [
        plgpu.SMEM((seats, slices, ROWS, m), jnp.float32, transforms=swizzled(min(m, 32), jnp.dtype(jnp.float32))),
        plgpu.Barrier(num_barriers=schedule.splits),
        plgpu.Barrier(num_arrivals=1 if offsets is None else 2, num_barriers=warpgroups),
        plgpu.Barrier(num_arrivals=slices, num_barriers=seats),
    ]
    if ring:
        scratch.append(plgpu.Barrier(num_barriers=(warpgroups, depth)))
    clusters = {"cluster": (schedule.cluster,), "cluster_names": ("rank",)} if schedule.cluster > 1 else {}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(n // ROWS // schedule.rows,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="int4_matmul",
        **clusters,
    )(words, scales, *([] if offsets is None else [offsets]), x)
