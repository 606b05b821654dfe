"""Adds the partial sums of a product whose inputs are cut into slices, and a residual, in a kernel of its own.

XLA would add them as well as this does. But where kernels are to be on the card together, they have to agree on how
much of a multiprocessor's memory is shared memory: `shared_bytes`, which this kernel has no other use for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.warp import Int4Warp

THREADS = 128


@functools.partial(jax.jit, static_argnames="shared_bytes")
def added(partial: jax.Array, residual: jax.Array, *, shared_bytes: int) -> jax.Array:
    """Sum over slices of float32 [slices, rows, out_features], plus a residual [rows, out_features], in its dtype."""
    slices, rows, features = partial.shape
    count, dtype = rows * features, str(residual.dtype)
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, partial: Any, residual: Any, out: Any, shared: Any, block: Any) -> None:
            del ctx
            w = Int4Warp(shared)
            index = w.scalar(block) * THREADS + w.thread
            inside = index < count
            numbers = [w.load_number(partial, index + i * count, "float32", inside) for i in range(slices)]
            numbers.append(w.load_number(residual, index, dtype, inside))
            w.store_number(out, index, functools.reduce(lambda a, b: a + b, numbers), dtype, inside)

        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        emit(*refs, jax.lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        grid=(-(-count // THREADS),),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((shared_bytes // 4,), jnp.float32)],
        kernel_name="add_slices",
    )(partial, residual)
