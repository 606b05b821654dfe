"""Paged attention for decode and verification on Hopper, through Pallas Mosaic GPU.

Flash decoding with the splits of one (sequence, KV head) in one thread block cluster. A warp owns every n-th tile of
16 keys: it reads keys and values straight from their pages into tensor-core fragments (no shared memory, no barrier
in the loop), keeps its own online softmax in float32 (`softmax.py`), and the warps' partial results are merged through
shared memory, across the cluster's blocks without touching global memory (`merge.py`). So a call is one launch, and
nothing has to be zeroed before it. docs/kernels_attention.md has the measurements.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.early_launch import take_turn
from pallas_kernels.paged_attention.fragments import element_of
from pallas_kernels.paged_attention.merge import Outputs, Place, merge, start_merge
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import Pools, Tiles
from pallas_kernels.paged_attention.warp import Warp


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory, as the warp's memory methods take them."""

    q: Any
    pools: Pools
    page_table: Any
    lengths: Any
    outputs: Outputs


def attend(w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin.

    `row` is the sequence, `row_block` the block of its query rows, `split` the block's place in its cluster.
    """
    start_merge(w, plan, split)
    length = w.load_i32(args.lengths, row, w.const(1, "i32") > 0)
    place = Place(row, kv_head, row_block * plan.block_rows)
    first_query = length - plan.tokens
    tiles = Tiles(w, plan, args.pools, args.page_table, row, kv_head, length, first_query, split)
    # Start the first tiles' reads, then bring the queries in while they fly.
    buffers = [tiles.read(j, tiles.page(w.const(j, "i32"))) for j in range(plan.depth)]
    stage_queries(w, plan, args.q, place)
    w.block_barrier()
    softmax = Softmax(w, plan, first_query, place.first_row)
    softmax.store_partial(softmax.over(tiles, buffers, softmax.initial()))
    w.block_barrier()
    merge(w, plan, args.outputs, place, split)


def stage_queries(w: Any, plan: Plan, q: Any, place: Place) -> None:
    """Writes the query rows to shared memory as A fragments: [16 rows][k-step][lane] four words.

    Rows past the last are zero.
    """
    steps = plan.head_dim // 16
    for start in range(0, 32 * steps * plan.row_tiles, plan.threads):
        index = w.thread + start
        tile, step, lane = index // (32 * steps), (index // 32) % steps, index % 32
        group, quad = lane // 4, lane % 4
        inside = tile < plan.row_tiles
        d = element_of(w, plan, step, quad)
        halves = []
        for half in range(min(2, plan.halves)):
            query = place.first_row + tile * 16 + group + 8 * half
            token, head = query // plan.group, query % plan.group
            position = (place.row * plan.tokens + token) * plan.q_heads + place.kv_head * plan.group + head
            valid = (query < plan.rows) & inside
            words = w.load_words(q, position * plan.head_dim + d, 2, valid)
            halves.append([query_word(w, plan, word) for word in words])
        zero = w.const(0, "i32")
        low, high = halves if len(halves) == 2 else (halves[0], (zero, zero))
        w.shared_store(index * 16, [low[0], high[0], low[1], high[1]], inside)


def query_word(w: Any, plan: Plan, word: Any) -> Any:
    """Two bfloat16 as the mma takes them: float16 where keys are codes, up to the largest float16."""
    if not plan.quantised:
        return word
    largest = w.const(65504.0)
    low, high = (w.maximum(w.minimum(x, largest), 0.0 - largest) for x in w.unpack_bf16(word))
    return w.pack_f16(low, high)


def row_of(w: Any, plan: Plan, place: Any) -> Any:
    """The row that comes at `place`: each `plan.every`-th, then the others."""
    if plan.every == 1:
        return place
    first, between = -(-plan.batch // plan.every), plan.every - 1
    rest = w.maximum(place - first, w.const(0, "i32"))
    return w.select(place < first, place * plan.every, rest // between * plan.every + (rest % between + 1))


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("plan", "return_lse"))
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    plan: Plan,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel. bfloat16 q and output, pages as `plan.kv` says; float32 scales, sinks and log-sum-exp."""
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    operands = [q, page_table, lengths, k_pages, v_pages, *(scales or ()), *(() if sinks is None else (sinks,))]

    def program(w: Warp, inputs: list[Any], outs: list[Any], *indices: Any) -> None:
        pools = Pools(*inputs[3 : 7 if scales else 5])
        outputs = Outputs(outs[0], outs[1] if return_lse else None, None if sinks is None else inputs[-1])
        attend(w, plan, Arguments(inputs[0], pools, inputs[1], inputs[2], outputs), *indices)

    outs = launch(program, plan, operands, out_type, plan.smem_bytes, "paged_attention")
    return outs[0], (outs[1] if return_lse else None)


def launch(
    program: Callable[..., None],
    plan: Plan,
    operands: list[Any],
    out_type: list[jax.ShapeDtypeStruct],
    smem_bytes: int,
    name: str,
) -> Any:
    """Runs `program(warp, inputs, outputs, row, kv_head, row_block, split)` in every warp of the plan's grid."""
    scalar = plgpu.Layout.WG_SPLAT(())

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), scalar, scalar, scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *arrays, smem = values[: len(refs)]
            w = Warp(smem)
            place, *indices = [w.scalar(x) for x in values[len(refs) :]]
            program(w, arrays[: len(operands)], arrays[len(operands) :], row_of(w, plan, place), *indices)

        take_turn()
        split = jax.lax.axis_index("split") if plan.splits > 1 else jnp.int32(0)
        emit(*refs, *[jax.lax.axis_index(name) for name in ("row", "kv_head", "row_block")], split)

    cluster = {"cluster": (plan.splits,), "cluster_names": ("split",)} if plan.splits > 1 else {}
    threads = {"num_threads": plan.warps // 4, "thread_name": "warpgroup"} if plan.warps > 4 else {}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(plan.batch, plan.kv_heads, plan.row_blocks),
        grid_names=("row", "kv_head", "row_block"),
        scratch_types=[plgpu.SMEM((smem_bytes // 4,), jnp.float32)],
        kernel_name=name,
        **cluster,
        **threads,
    )(*operands)
