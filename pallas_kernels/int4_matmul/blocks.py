"""A kernel of blocks, or of clusters of blocks, that have nothing to do with each other, emitted warp by warp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul.cluster_warp import ClusterWarp


def run_blocks(
    program: Callable[[ClusterWarp, Sequence[Any], Any], None],
    arrays: Sequence[Any],
    out_type: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    blocks: int,
    warps: int,
    name: str,
    shared_floats: int = 32,
    cluster: int = 1,
) -> Any:
    """What `blocks` blocks of `warps` warps (a multiple of 4) write.

    `program(w, references, block)` emits one warp's work; references are those of `arrays`, then the result's,
    or the results'. Each `cluster` neighbouring blocks, up to 8, run at once and may send each other numbers.
    """

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs),))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *references, shared = values
            w = ClusterWarp(shared)
            program(w, references, w.block())

        take_turn()
        emit(*refs)

    clusters = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks // cluster,),
        grid_names=("block",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((shared_floats,), jnp.float32)],
        kernel_name=name,
        **clusters,
    )(*arrays)
