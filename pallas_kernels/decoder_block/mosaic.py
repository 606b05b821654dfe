"""The attention half of a decoder layer on Hopper in one kernel, for one sequence's few new tokens of a small model.

As kernels of their own, the qkv product, the attention and the o product of a 0.6B model are latency: each brings in
what the one before it wrote, and 0.6 to 0.9 us lie between them. Here a cluster of eight blocks has one KV head from
the residual stream to its share of the o product:

    x + slices, RMS norm          every block, all inputs: a warp the 128 (or 256, ...) that it multiplies
    q, k, v of the KV head        a block an eighth of the outputs; sent to all blocks of the cluster
    norm, RoPE, append, attend    as `decode_mosaic.py` does it: a block every eighth tile of keys
    merge                         every block gets all blocks' sums, and so all of the cluster's heads
    o product                     a block an eighth of the outputs, over the cluster's heads: a slice of the result

Slices and all weights are asked for at the start, in this order, and keys when x is there. Blocks send through
`st.async`, whose bytes the receiver's barrier counts; all sums are in a fixed order. What reads the residual stream
next adds the slices, one of each KV head.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_kernels.decoder_block.attend import Output, SentTokens, Tables, merge_sums, send_sums
from pallas_kernels.decoder_block.keys import Listed, ListedTiles, RowsBehindFewKeys
from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.decoder_block.project import Strips, SummedRows, project, send_heads, strips_of
from pallas_kernels.early_launch import take_turn
from pallas_kernels.int4_matmul import strip
from pallas_kernels.int4_matmul.ahead import Ahead, fetch_ahead
from pallas_kernels.int4_matmul.cluster_warp import ClusterWarp
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.paged_attention.merge import Outputs, Place
from pallas_kernels.paged_attention.new_token import Arguments as AttentionArguments
from pallas_kernels.paged_attention.tiles import Pools
from pallas_kernels.paged_attention.warp import Value, Warp


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory. `y`: x plus the slices. `ahead`: what later kernels read first."""

    x: Any
    partial: Any
    norm: Any
    y: Any
    attention: AttentionArguments
    qkv: strip.Arguments
    o: strip.Arguments
    ahead: Sequence[Ahead] = ()


def attend(w: Any, m: Any, plan: BlockPlan, args: Arguments, kv_head: Any, split: Any) -> None:
    """What one warp does: `w` is a `Warp` and `m` a `ClusterWarp` (or NumPy twins), each with its shared memory."""
    attention, a = plan.decode.attention, args.attention
    x = SummedRows(w, m, plan, args.x, args.partial, args.norm)
    listed, tables = Listed(m, plan, a.page_table, a.positions, split), Tables(m, plan, a)
    m.warp_barrier()
    w.open_inbox(plan.new_barrier, w.const(plan.new_bytes, "i32"))
    w.open_inbox(plan.sums_barrier, w.const(BLOCKS * (plan.sums_bytes + 8 * attention.rows), "i32"))
    w.cluster_arrive()
    tables.fetch()
    m.copy_commit()
    weights = Strips(m, plan.qkv, args.qkv.weights, m.warp * plan.qkv.warp_tiles, strips_of(m, plan, kv_head, split))
    weights.fill()
    output = Output(w, m, plan, args.o, kv_head, split)
    output.fill()
    m.copy_wait(plan.qkv.schedule.strips + plan.o.schedule.strips)
    m.warp_barrier()
    x.add(args.y, (split < 1) & (kv_head < 1))
    # Keys are needed last. Asked for earlier, they would be waited for with x: a warp has six counters of loads.
    zero, position = w.const(0, "i32"), listed.position()
    place, length = Place(zero, kv_head, zero), w.maximum(position, zero)
    rows = RowsBehindFewKeys(w, plan.decode, a, place)
    rows.read_pages(length, (position > -1) & (split < 1))
    tiles = ListedTiles(listed, w, attention, a.pools, a.page_table, zero, kv_head, length, length, split)
    buffers = [tiles.read_first()]
    m.warp_barrier()

    project(m, plan, args.qkv, weights, x)
    w.cluster_wait()  # not earlier: it empties the L1 cache, which waits for loads
    w.block_barrier()
    send_heads(w, m, plan, split)
    # Memory has nothing to do from here on.
    fetch_ahead(m, args.ahead, (kv_head * BLOCKS + split) * WARPS + w.warp, attention.kv_heads * BLOCKS * WARPS)
    new = SentTokens(w, m, plan, tables.places, place)
    w.wait_inbox(plan.new_barrier, "cta")
    new.stage()
    w.block_barrier()

    softmax, state = rows.attended(tiles, buffers, position, length, split)
    softmax.store_partial(state)
    w.block_barrier()
    send_sums(w, plan, split)
    rows.write()
    m.copy_wait(0)
    m.warp_barrier()
    output.read()
    w.wait_inbox(plan.sums_barrier, "cta")
    merge_sums(w, plan)
    w.block_barrier()
    output.multiply()


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("plan", "program"))
def attention_block(
    x: jax.Array,
    partial: jax.Array | None,
    norm: jax.Array,
    qkv: Packed,
    o: Packed,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    *,
    plan: BlockPlan,
    ahead: Sequence[jax.Array] = (),
    program: Callable[..., None] = attend,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Slices [kv_heads, tokens, hidden] float32 of o's result, y [tokens, hidden], and the pools.

    x [tokens, hidden] bf16, partial [slices, tokens, hidden] float32, norm [hidden] float32; the rest as
    `decode_mosaic.decode_attention` takes it, of one sequence. `ahead`: arrays
    that kernels behind this one read, brought into the L2 cache. `program`: what each warp does.
    """
    attention, hidden = plan.decode.attention, o.shape[0]
    pools = [jax.new_ref(pool) for pool in (k_pages, v_pages)]
    of_qkv, of_o = arrays_of(qkv), arrays_of(o)
    operands = [x, norm, page_table, positions, *pools, *of_qkv, *of_o]
    operands += [*(rope or ()), *(norms or ()), *(() if partial is None else (partial,)), *ahead]

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=[plgpu.RefType()] * len(refs))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            given = iter(values[: len(operands)])
            out, y, shared, product_shared = values[len(operands) :]
            x_ref, norm_ref, table, places, k_ref, v_ref = (next(given) for _ in range(6))
            weights = [Weights.of(weight, [next(given) for _ in of]) for weight, of in ((qkv, of_qkv), (o, of_o))]
            cos, sin = (next(given), next(given)) if rope else (None, None)
            q_norm, k_norm = (next(given), next(given)) if norms else (None, None)
            tables, nothing = (cos, sin, q_norm, k_norm), Outputs(None, None, None)
            attended = AttentionArguments(None, Pools(k_ref, v_ref), table, places, *tables, nothing)
            products = [
                strip.arguments_of(weight, weights=of, x=None, out=out, out_dtype="float32")
                for weight, of in zip((qkv, o), weights, strict=True)
            ]
            partial_ref = None if partial is None else next(given)
            later = [Ahead(next(given), array.nbytes) for array in ahead]
            args = Arguments(x_ref, partial_ref, norm_ref, y, attended, products[0], products[1], later)
            w, m = Warp(shared), ClusterWarp(product_shared)
            # `axis_index` would divide by the cluster's size as the launch has it: 250 clocks before the first address.
            block = Value(arith.index_cast(ir.IntegerType.get_signless(32), gpu.block_id(gpu.Dimension.x)))
            program(w, m, plan, args, block // BLOCKS, block % BLOCKS)

        take_turn()
        emit(*refs)

    slices, y = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((attention.kv_heads, attention.tokens, hidden), jnp.float32),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        ],
        grid=(attention.kv_heads,),
        grid_names=("kv_head",),
        cluster=(BLOCKS,),
        cluster_names=("split",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((plan.attention_bytes // 4,), jnp.float32),
            plgpu.SMEM((plan.product_bytes // 4,), jnp.float32),
        ],
        kernel_name="attention_block",
    )(*operands)
    k_pages, v_pages = (jax.freeze(pool) for pool in pools)
    return slices, y, k_pages, v_pages
