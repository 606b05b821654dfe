"""A kernel of blocks that have nothing to do with each other, emitted warp by warp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul.wide_warp import WideWarp


def run_blocks(
    program: Callable[[WideWarp, Sequence[Any], Any], None],
    arrays: Sequence[jax.Array],
    out_type: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    blocks: int,
    warps: int,
    name: str,
    shared_floats: int = 32,
) -> Any:
    """What `blocks` blocks of `warps` warps (a multiple of 4) write.

    `program(w, references, block)` emits one warp's work; references are those of `arrays`, then the result's,
    or the results'.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *references, shared, block = values
            w = WideWarp(shared)
            program(w, references, w.scalar(block))

        take_turn()
        emit(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((shared_floats,), jnp.float32)],
        kernel_name=name,
    )(*arrays)
