"""The attention block op: a decoder layer from its residual stream to the slices of its output projection."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.decoder_block import mosaic
from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul import Packed
from pallas_kernels.int4_matmul.api import refusals_of
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import PART
from pallas_kernels.paged_attention.api import mosaic_refusal as attention_refusal
from pallas_kernels.paged_attention.new_token import DecodePlan
from pallas_kernels.paged_attention.plan import Plan

MOST_TOKENS, MOST_KV_HEADS = 2, 8
"""Tokens, and clusters that are on the card at once."""
MOST_ROOM = 2048 + 16
"""Places of a page table: those of 2,048 tokens, and the page behind them that drafted tokens may need."""
MOST_SLICES = 16
"""Every block reads them all."""
MOST_ROWS = 8
"""Query rows of a KV head: the columns of an mma."""
MOST_SHARED = 227 * 1024 - 1024
"""Bytes of shared memory that a block may have, less what the compiler takes."""


def attention_block(
    x: Float[Array, "1 tokens hidden"],
    partial: Float32[Array, "slices 1 tokens hidden"] | None,
    qkv: Packed,
    o: Packed,
    k_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "1 pages"],
    positions: Int32[Array, " places"],
    cos: Float32[Array, "1 angles half"] | None,
    sin: Float32[Array, "1 angles half"] | None,
    *,
    norm: Float32[Array, " hidden"],
    norm_eps: float,
    num_q_heads: int,
    scale: float,
    interleaved: bool = False,
    q_norm: Float32[Array, " head_dim"] | None = None,
    k_norm: Float32[Array, " head_dim"] | None = None,
    ahead: Sequence[Array] = (),
) -> tuple[Float32[Array, "left 1 tokens hidden"], Float[Array, "1 tokens hidden"], Array, Array]:
    """Adds slices, normalises, projects, appends, attends and multiplies with o, in one kernel.

    What `int4_matmul_of_sum`, `decode_attention` and `int4_slices` do one after the other; the caller has asked
    `attention_block_refusal` first. The arguments are theirs, `norm_eps` that of all norms; of `positions` the first
    counts, and of the angles as many as there are tokens. `ahead`: arrays that
    kernels behind this one read, brought into the L2 cache.

    Returns:
      (slices of o's result, y = x plus `partial`'s sum, k_pages, v_pages). The sum of y and the slices is the residual
      stream after the block.
    """
    _, tokens, hidden = x.shape
    slices = 0 if partial is None else len(partial)
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    rope = None if cos is None or sin is None else (cos, sin)
    rotary_dim = 0 if cos is None else 2 * cos.shape[2]
    attention = _attention(tokens, num_q_heads, k_pages, page_table, scale)
    decode = DecodePlan(attention, rotary_dim, interleaved, None if norms is None else norm_eps)
    plan = BlockPlan.of(decode, qkv, o, slices, norm_eps)
    partial = None if partial is None else partial.reshape(slices, tokens, hidden)
    arrays = (x.reshape(tokens, hidden), partial, page_table, positions, norm, rope, norms)
    x, partial, page_table, positions, norm, rope, norms = dispatch.in_memory(arrays)
    left, y, k_pages, v_pages = mosaic.attention_block(
        x, partial, norm, qkv, o, k_pages, v_pages, page_table, positions, rope, norms, plan=plan, ahead=tuple(ahead)
    )
    return left[:, None], y[None], k_pages, v_pages


def attention_block_refusal(
    x: Float[Array, "batch tokens hidden"],
    slices: int,
    qkv: Packed,
    o: Packed,
    k_pages: Array,
    page_table: Int32[Array, "batch pages"],
    *,
    num_q_heads: int,
    rotary_dim: int,
) -> str | None:
    """Why the kernel does not take such a block; None if it does.

    `slices` is how many are pending before it; `rotary_dim` the rotated dimensions of a head, 0 for none.
    """
    batch, tokens, hidden = x.shape
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    for weight in (qkv, o):
        choices = dispatch.choose("int4_matmul", refusals_of(tokens, x.dtype, jnp.dtype(x.dtype), weight))
        chosen = next(choice.backend for choice in choices if choice.taken)
        if chosen != "mosaic":
            return f"the {chosen} backend multiplies"
        if weight.bits != 4 or weight.kind == "code_book":
            return f"it takes linear codes of 4 bits, not {weight.kind} of {weight.bits}"
    if batch != 1 or tokens > MOST_TOKENS:
        return f"it takes one sequence of up to {MOST_TOKENS} new tokens, not {batch} of {tokens}"
    if hidden != WARPS * PART:
        return f"it takes {WARPS * PART} inputs, not {hidden}"
    if slices > MOST_SLICES:
        return f"it adds up to {MOST_SLICES} slices, not {slices}"
    if k_pages.dtype != jnp.bfloat16:
        return f"it reads pages of bfloat16, not {k_pages.dtype}"
    refused = attention_refusal(jnp.dtype(x.dtype), "bfloat16", head_dim, page_size, tokens)
    if refused is not None:
        return refused
    group = num_q_heads // kv_heads
    if kv_heads > MOST_KV_HEADS or tokens * group > MOST_ROWS:
        return f"it takes {MOST_KV_HEADS} KV heads of {MOST_ROWS} query rows, not {kv_heads} of {tokens * group}"
    if head_dim % STRIP or (group + 2) * head_dim % (STRIP * BLOCKS) or head_dim > 128:
        return f"the outputs of {group} query heads, a key and a value of {head_dim} do not divide by {BLOCKS} blocks"
    inputs = group * head_dim
    if inputs % PART or inputs > 4 * PART or inputs % o.group_size:
        return f"{inputs} inputs of a KV head's share of o are no whole groups, or more than {4 * PART}"
    if page_table.shape[1] * page_size > MOST_ROOM:
        return f"it is for page tables of up to {MOST_ROOM} places, not {page_table.shape[1] * page_size}"
    if rotary_dim % 8:
        return f"it rotates a multiple of 8 dimensions, not {rotary_dim}"
    # With norms of the heads, whose weights take room; the scale takes none.
    decode = DecodePlan(_attention(tokens, num_q_heads, k_pages, page_table, 1.0), rotary_dim, False, 1.0)
    plan = BlockPlan.of(decode, qkv, o, slices, 1.0)
    nbytes = plan.attention_bytes + plan.product_bytes
    return f"a block needs {nbytes} bytes of shared memory, more than {MOST_SHARED}" if nbytes > MOST_SHARED else None


def _attention(tokens: int, num_q_heads: int, k_pages: Array, page_table: Array, scale: float) -> Plan:
    """The plan of one sequence's attention, a KV head of which a cluster has."""
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    sizes = (tokens, num_q_heads, kv_heads, head_dim, page_size, page_table.shape[1])
    return Plan(1, *sizes, scale, splits=BLOCKS, warps=WARPS, depth=1)
