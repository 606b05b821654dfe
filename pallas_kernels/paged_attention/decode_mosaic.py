"""One decode step's attention on Hopper in one kernel: norm, RoPE, append, attend (see `decode.py` for the op).

The warp program is that of `mosaic.py`; only the start differs. Every block of a cluster rotates the query heads into
its shared memory; the first block also the new key, whose row it writes to its page together with the value's. The
new token itself is attended from shared memory, as the first entry of one warp's softmax, so no block waits for
another's write. Where pages hold codes, the new key and value are quantised first: the token attends itself as later
ones will see it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.merge import Outputs, Place, merge
from pallas_kernels.paged_attention.mosaic import launch
from pallas_kernels.paged_attention.new_token import Arguments, DecodePlan, NewToken
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import Pools, Tiles
from pallas_kernels.paged_attention.warp import Warp


def decode(w: Any, plan: DecodePlan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin; the indices are those of `mosaic.attend`."""
    stored = plan.stored
    if stored.splits > 1:
        w.cluster_arrive(release=False)
    true = w.const(1, "i32") > 0
    position = w.load_i32(args.positions, row, true)
    place = Place(row, kv_head, row_block * stored.block_rows)
    length = w.maximum(position, w.const(0, "i32"))
    tiles = Tiles(w, stored, args.pools, args.page_table, row, kv_head, length, split)
    # In the order in which they are needed: page ids, the projections, then what depends on the page ids.
    pages = [tiles.page(w.const(j, "i32")) for j in range(stored.depth)]
    token = NewToken(w, plan, args, place)
    writes = (position > -1) & (split < 1) & (row_block < 1)
    slot = length // stored.page_size
    writes = writes & (slot < stored.pages_per_row)
    page = w.load_i32(args.page_table, row * stored.pages_per_row + slot, writes)
    buffers = [tiles.read(j, pages[j]) for j in range(stored.depth)]
    token.stage()
    w.block_barrier()
    token.write(page, length % stored.page_size, writes)

    softmax = Softmax(w, stored, length, place.first_row)
    # The warp with the fewest tiles of the block that has the new key.
    owns = (position > -1) & (split < 1) & (w.warp > stored.warps - 2)
    empty, structure = jax.tree.flatten(softmax.initial())
    state = w.when(owns, empty, lambda: jax.tree.flatten(token.attended(softmax))[0])
    softmax.store_partial(softmax.over(tiles, buffers, jax.tree.unflatten(structure, state)))
    w.block_barrier()
    merge(w, stored, args.outputs, place, split)


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("plan", "return_lse"))
def decode_attention(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    plan: DecodePlan,
    return_lse: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs the kernel: output [B, Hq * D], pools and scales, updated in place where the caller gives them up.

    With `return_lse` the float32 log-sum-exp [B, Hq] follows the output.
    """
    attention = plan.attention
    pools = [jax.new_ref(pool) for pool in (k_pages, v_pages, *(scales or ()))]
    operands = [qkv, page_table, positions, *pools]
    operands += [*(rope or ()), *(norms or ()), *(() if sinks is None else (sinks,))]
    out_type = [jax.ShapeDtypeStruct((attention.batch, attention.q_heads * attention.head_dim), qkv.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct((attention.batch, attention.q_heads), jnp.float32))

    def program(w: Warp, inputs: list[Any], outs: list[Any], *indices: Any) -> None:
        rest = iter(inputs[3 + len(pools) :])
        cos, sin = (next(rest), next(rest)) if rope else (None, None)
        q_norm, k_norm = (next(rest), next(rest)) if norms else (None, None)
        outputs = Outputs(outs[0], outs[1] if return_lse else None, next(rest) if sinks is not None else None)
        stored = Pools(*inputs[3 : 3 + len(pools)])
        args = Arguments(inputs[0], stored, inputs[1], inputs[2], cos, sin, q_norm, k_norm, outputs)
        decode(w, plan, args, *indices)

    outs = launch(program, attention, operands, out_type, plan.smem_bytes, "decode_attention")
    return *outs, *[jax.freeze(pool) for pool in pools]
