"""One decode step's attention on Hopper in one kernel: norm, RoPE, append, attend (see `decode.py` for the op).

The warp program is that of `mosaic.py`; only start and end differ. Every block of a cluster normalises and rotates the
query heads and the new keys into its shared memory; the first block writes the new keys and values to their pages. The
new tokens are attended from shared memory, so no block waits for another's write: a single one as the first entry of
one warp's softmax, several as that warp's last tile. Where pages hold codes, the new keys and values are quantised
first: tokens attend themselves as later ones will see them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.merge import Outputs, Place, merge, start_merge
from pallas_kernels.paged_attention.mosaic import launch
from pallas_kernels.paged_attention.new_rows import NewRows
from pallas_kernels.paged_attention.new_token import Arguments, DecodePlan, NewTokens
from pallas_kernels.paged_attention.tiles import Pools, Tiles
from pallas_kernels.paged_attention.warp import Warp
from pallas_kernels.token_order import image_shape


def decode(w: Any, plan: DecodePlan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin; the indices are those of `mosaic.attend`."""
    attention = plan.attention
    start_merge(w, attention, split)
    true = w.const(1, "i32") > 0
    position = w.load_i32(args.positions, row, true)
    place = Place(row, kv_head, row_block * attention.block_rows)
    length = w.maximum(position, w.const(0, "i32"))
    tiles = Tiles(w, attention, args.pools, args.page_table, row, kv_head, length, length, split)
    # In the order in which they are needed: page ids, the projections, then what depends on the page ids.
    pages = [tiles.page(w.const(j, "i32")) for j in range(attention.depth)]
    tokens, rows = NewTokens(w, plan, args, place), NewRows(w, plan, args, place)
    rows.read_pages(length, (position > -1) & (split < 1) & (row_block < 1))
    buffers = [tiles.read(j, pages[j]) for j in range(attention.depth)]
    tokens.stage()
    w.block_barrier()
    rows.write()

    softmax, state = rows.attended(tiles, buffers, position, length, split)
    softmax.store_partial(state)
    w.block_barrier()
    merge(w, attention, args.outputs, place, split)


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
    """Runs the kernel: output [B, T, Hq * D], pools and scales, updated in place where the caller gives them up.

    With `plan.attention.order` the output is an image in that order.

    With `return_lse` the float32 log-sum-exp [B, T, Hq] follows the output.
    """
    attention = plan.attention
    rows = (attention.batch, attention.tokens)
    pools = [jax.new_ref(pool) for pool in (k_pages, v_pages, *(scales or ()))]
    operands = [qkv, page_table, positions, *pools]
    operands += [*(rope or ()), *(norms or ()), *(() if sinks is None else (sinks,))]
    width = attention.q_heads * attention.head_dim
    out_type = [jax.ShapeDtypeStruct((*rows, width), qkv.dtype)]
    if attention.order is not None:
        out_type = [jax.ShapeDtypeStruct(image_shape(math.prod(rows), width, attention.order), jnp.int32)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct((*rows, attention.q_heads), jnp.float32))

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
