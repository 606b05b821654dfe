"""One decode step's attention on Hopper in one kernel: norm, RoPE, append, attend (see `decode.py` for the op).

The warp program is that of `mosaic.py`; only start and end differ. Every block of a cluster normalises and rotates the
query heads and the new keys into its shared memory; the first block writes the new keys and values to their pages. The
new tokens are attended from shared memory, so no block waits for another's write: a single one as the first entry of
one warp's softmax, several as that warp's last tile. Where pages hold codes, the new keys and values are quantised
first: tokens attend themselves as later ones will see them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.merge import Outputs, Place, merge, start_merge
from pallas_kernels.paged_attention.mosaic import launch
from pallas_kernels.paged_attention.new_rows import NewRows
from pallas_kernels.paged_attention.new_token import Arguments, DecodePlan, NewTokens
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import Pools, Tiles
from pallas_kernels.paged_attention.warp import Warp

EARLY_TILES = 4  # of each warp


def decode(w: Any, plan: DecodePlan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin; the indices are those of `mosaic.attend`."""
    attention = plan.attention
    start_merge(w, attention, split)
    true = w.const(1, "i32") > 0
    position = w.load_i32(args.positions, row, true)
    place = Place(row, kv_head, row_block * attention.block_rows)
    length = w.maximum(position, w.const(0, "i32"))
    tiles = Tiles(w, attention, args.pools, args.page_table, row, kv_head, length, length, split, args.next_pools)
    # In the order in which they are needed: page ids, the projections, then what depends on the page ids.
    pages = [tiles.page(w.const(j, "i32")) for j in range(attention.depth)]
    further = [tiles.page(w.const(attention.depth + j, "i32")) for j in range(attention.ahead)]
    tokens, rows = NewTokens(w, plan, args, place), NewRows(w, plan, args, place)
    rows.read_pages(length, (position > -1) & (split < 1) & (row_block < 1))
    buffers = [tiles.reader(j, pages[j]).both() for j in range(attention.depth)]
    tokens.stage()
    w.block_barrier()
    rows.write()
    for j, page in enumerate(further):
        tiles.reader(w.const(attention.depth + j, "i32"), page).bring()

    softmax = Softmax(w, attention, length, place.first_row, last_stored=length - 1)
    # The warp with the fewest tiles of the first block takes the new tokens in.
    owns = (position > -1) & (split < 1) & (w.warp > attention.warps - 2)
    state, structure = jax.tree.flatten(softmax.initial())
    if attention.tokens == 1:
        state = w.when(owns, state, lambda: jax.tree.flatten(rows.alone(softmax))[0])
    state = softmax.over(tiles, buffers, jax.tree.unflatten(structure, state))
    if attention.tokens > 1:  # after the loop: registers for one more tile are free there
        flat = jax.tree.leaves(state)
        new = functools.partial(softmax.update, state, first_key=length, last_keys=softmax.positions)
        state = jax.tree.unflatten(structure, w.when(owns, flat, lambda: jax.tree.leaves(new(rows.tile())[0])))
    softmax.store_partial(state)
    w.block_barrier()
    merge(w, attention, args.outputs, place, split)


def ask_early(w: Any, plan: Plan, args: Arguments, num_pages: int, row: Any, kv_head: Any, split: Any) -> None:
    """Before the kernel's turn: has the first stored tiles brought into the L2 cache, beside the end of the projection.

    Safe whatever the kernels before do: what is read here, places and page ids, only decides which lines the cache
    fetches, and a cache of the whole card is never behind.
    """
    length = w.maximum(w.peek_i32(args.positions, row, w.const(1, "i32") > 0), w.const(0, "i32"))
    tiles = Tiles(w, plan, args.pools, args.page_table, row, kv_head, length, length, split)
    tiles.bring_near(EARLY_TILES, num_pages)


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
    next_pages: tuple[jax.Array, jax.Array] | None = None,
    *,
    plan: DecodePlan,
    return_lse: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs the kernel: output [B, T, Hq * D], pools and scales, updated in place where the caller gives them up.

    With `return_lse` the float32 log-sum-exp [B, T, Hq] follows the output. The rows' lines of `next_pages`, pools like
    these of a layer that follows, are brought into the L2 cache.
    """
    attention = plan.attention
    rows = (attention.batch, attention.tokens)
    pools = [jax.new_ref(pool) for pool in (k_pages, v_pages, *(scales or ()))]
    operands = [qkv, page_table, positions, *pools]
    operands += [*(rope or ()), *(norms or ()), *(() if sinks is None else (sinks,)), *(next_pages or ())]
    out_type = [jax.ShapeDtypeStruct((*rows, attention.q_heads * attention.head_dim), qkv.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct((*rows, attention.q_heads), jnp.float32))

    def arguments(inputs: list[Any], outs: list[Any]) -> Arguments:
        rest = iter(inputs[3 + len(pools) :])
        cos, sin = (next(rest), next(rest)) if rope else (None, None)
        q_norm, k_norm = (next(rest), next(rest)) if norms else (None, None)
        outputs = Outputs(outs[0], outs[1] if return_lse else None, next(rest) if sinks is not None else None)
        stored = Pools(*inputs[3 : 3 + len(pools)])
        next_pools = Pools(next(rest), next(rest)) if next_pages else None
        return Arguments(inputs[0], stored, inputs[1], inputs[2], cos, sin, q_norm, k_norm, outputs, next_pools)

    def program(w: Warp, inputs: list[Any], outs: list[Any], *indices: Any) -> None:
        decode(w, plan, arguments(inputs, outs), *indices)

    def early(w: Warp, inputs: list[Any], outs: list[Any], row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
        del row_block
        ask_early(w, attention, arguments(inputs, outs), k_pages.shape[0], row, kv_head, split)

    asks = early if attention.early else None
    outs = launch(program, attention, operands, out_type, plan.smem_bytes, "decode_attention", asks)
    return *outs, *[jax.freeze(pool) for pool in pools]
