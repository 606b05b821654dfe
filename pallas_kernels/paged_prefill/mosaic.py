"""Prefill attention over pages for Hopper, through Pallas Mosaic GPU.

One warpgroup copies rows of keys and values from their pages into shared memory, two multiply: each has 64 query rows
(a token's query heads of one KV head are neighbours), scores and values as `wgmma` sums in registers and the softmax
between them. While one works on its softmax the tensor cores have the other's products, and its own of the tile before
(as in FlashAttention-3, https://arxiv.org/abs/2407.08608, but without its turns, which cost a tenth here).
docs/kernels_attention.md has the measurements.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill import fetch, fetch_codes
from pallas_kernels.paged_prefill.attend import Attend
from pallas_kernels.paged_prefill.parts import Arguments, Part, number_of_parts, part_of
from pallas_kernels.paged_prefill.plan import CONSUMER_WARPS, PRODUCERS, PrefillPlan
from pallas_kernels.paged_prefill.warp import PrefillWarp


def prefill(w: Any, plan: PrefillPlan, a: Arguments, block: Any) -> None:
    """One warp's work, emitted through `w`, a PrefillWarp (or its NumPy twin in the tests)."""
    leader = w.thread < 1
    for name, start in plan.barriers.items():
        arrivals = PRODUCERS if name.endswith("full") else CONSUMER_WARPS
        for stage in range(1 if name.startswith("queries") else plan.stages):
            w.barrier_init(w.integer(start + 8 * stage), arrivals, leader)
    w.barriers_ready()
    w.block_barrier()
    parts = number_of_parts(w, plan, block)

    def part(i: Any) -> Part:
        return Part(w, plan, a, part_of(w, plan, block, i))

    def produce() -> None:
        w.set_registers(plan.registers[0], more=False)
        # The first time round every stage is empty, and none is before the first.
        start = (w.integer(0), w.integer(1), w.integer(-1), w.integer(1))
        if plan.kv == "bfloat16":
            _, _, last, _ = w.loop(parts, start, lambda i, carry: fetch.fetch_part(w, plan, a, part(i), carry))
            fetch.report_last(w, plan, last)
        else:
            w.loop(parts, start, lambda i, carry: fetch_codes.fetch_part(w, plan, a, part(i), carry))

    def consume() -> None:
        w.set_registers(plan.registers[1], more=True)
        w.loop(parts, [w.integer(0)] * 3, lambda i, carry: Attend(w, plan, part(i)).run(a, carry))

    w.when(w.warp < CONSUMER_WARPS, consume)
    w.when(w.integer(CONSUMER_WARPS - 1) < w.warp, produce)


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("plan", "return_lse"))
def paged_prefill(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    plan: PrefillPlan,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel. bfloat16 q and output, pages as `plan.kv` says; float32 sinks, scales and log-sum-exp."""
    operands = [q, k_pages, v_pages, page_table, starts, lengths, *(scales or ()), *(() if sinks is None else (sinks,))]
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            inputs, (*outs, shared, block) = values[: len(operands)], values[len(operands) :]
            w = PrefillWarp(shared)
            arguments = Arguments(
                *inputs[:6],
                sinks=None if sinks is None else inputs[-1],
                out=outs[0],
                lse=outs[1] if return_lse else None,
                k_scales=inputs[6] if scales else None,
                v_scales=inputs[7] if scales else None,
            )
            prefill(w, plan, arguments, w.scalar(block))

        emit(*refs, lax.axis_index("block"))

    outs = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(plan.launched,),
        grid_names=("block",),
        num_threads=(32 * CONSUMER_WARPS + PRODUCERS) // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="paged_prefill",
    )(*operands)
    return outs[0], (outs[1] if return_lse else None)
