"""Attention of new tokens: over themselves when nothing is cached, else over the pages of the cache.

Decoding and verification read pages through `pallas_kernels.paged_attention`; what is here serves prefill, with
`chunk_attention.py` where cuDNN can do it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels.paged_attention.formats import dequantise

MASKED = -1e30
"""Score of a forbidden key: finite, so that a row in which every key is forbidden gives no NaN."""

KEYS_AT_ONCE = 512
"""Keys that prefill takes from the pages at a time: their scores, not those of the whole context, are in memory."""


def causal_mask(
    query_positions: Int32[Array, "batch queries"],
    key_positions: Int32[Array, "batch keys"],
    window: int | None,
) -> Bool[Array, "batch queries keys"]:
    """True where a query may see a key: not later than itself, and fewer than `window` positions back."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    allowed = (distance >= 0) & (key_positions >= 0)[:, None, :]
    if window is not None:
        allowed &= distance < window
    return allowed


def masked_attention(
    query: Float[Array, "batch queries heads head_dim"],
    keys: Float[Array, "batch keys kv_heads head_dim"],
    values: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "batch queries keys"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Grouped-query attention written out, softmax in float32. Needs batch * heads * queries * keys floats of room."""
    batch, queries, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(scale)
    if softcap is not None:
        scores = jnp.float32(softcap) * jnp.tanh(scores / jnp.float32(softcap))
    scores = jnp.where(mask[:, None, None], scores, jnp.float32(MASKED))
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, values)
    return out.reshape(batch, queries, heads, head_dim).astype(query.dtype)


def cudnn_refusal(query: Float[Array, "batch tokens heads head_dim"], softcap: float | None) -> str | None:
    """Why cuDNN does not do attention for these queries in this process; None if it does."""
    tokens, head_dim = query.shape[1], query.shape[3]
    if jax.default_backend() != "gpu":
        return "this process has no GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 queries, not {query.dtype}"
    if softcap is not None:
        return "it has no soft-cap"
    if tokens % 64:
        return f"it needs a multiple of 64 tokens, not {tokens}"
    if head_dim % 8 or head_dim > 256:
        return f"it needs a head_dim that is a multiple of 8 and at most 256, not {head_dim}"
    return None


def self_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    positions: Int32[Array, "batch tokens"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention among new tokens that nothing precedes; position t of a row is its t-th token or -1 (padding, last).

    On a GPU, cuDNN does it where it can.
    """
    tokens = query.shape[1]
    if cudnn_refusal(query, softcap) is None:
        return jax.nn.dot_product_attention(
            query,
            keys,
            values,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None or window >= tokens else (window - 1, 0),
            implementation="cudnn",
        )
    mask = causal_mask(positions, positions, window)
    return masked_attention(query, keys, values, mask, scale=scale, softcap=softcap)


def prefill_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    value_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
    key_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    value_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    return_lse: bool = False,
) -> Any:
    """Attention over a row's pages, which already hold the new tokens; position -1 is padding, at a row's end.

    Returns [batch, tokens, heads, head_dim] in the queries' dtype; with `return_lse` also the float32 log-sum-exp
    [batch, tokens, heads], -inf where a query sees no key.

    Pages may hold codes, with scales. Takes `KEYS_AT_ONCE` keys a turn with an online softmax
    (https://arxiv.org/abs/2205.14135), and as many turns as the longest row needs: neither the room nor the time
    depends on how wide the page table is.
    """
    batch, tokens, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    pages_at_once = min(page_table.shape[1], max(1, KEYS_AT_ONCE // page_size))
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_at_once)))
    keys_at_once = pages_at_once * page_size
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    last = jnp.max(positions, axis=1)

    def turn(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index, peak, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_at_once, pages_at_once, axis=1)
        places = index * keys_at_once + jnp.arange(keys_at_once, dtype=jnp.int32)
        key_positions = jnp.broadcast_to(places[None, :], (batch, keys_at_once))

        def gather(pool: jax.Array, scales: jax.Array | None) -> jax.Array:
            got = jnp.take(pool, pages, axis=0, mode="clip")
            if scales is not None:
                got = dequantise(got, jnp.take(scales, pages, axis=0, mode="clip")).astype(query.dtype)
            return got.swapaxes(1, 2).reshape(batch, kv_heads, keys_at_once, head_dim)

        keys = gather(key_pages, key_scales)
        scores = jnp.einsum("bqhgd,bhkd->bhgqk", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * jnp.float32(scale)
        if softcap is not None:
            scores = jnp.float32(softcap) * jnp.tanh(scores / jnp.float32(softcap))
        mask = causal_mask(positions, key_positions, window)
        scores = jnp.where(mask[:, None, None], scores, jnp.float32(MASKED))
        # What lies behind the last token may be another request's, NaN included; 0 * NaN would be NaN.
        written = (key_positions <= last[:, None])[:, None, :, None]
        values = gather(value_pages, value_scales)
        values = jnp.where(written, values, jnp.zeros((), values.dtype))
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        kept = jnp.exp(peak - new_peak)
        added = jnp.einsum(
            "bhgqk,bhkd->bhgqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return index + 1, new_peak, total * kept + weights.sum(axis=-1), out * kept[..., None] + added

    rows = (batch, kv_heads, heads // kv_heads, tokens)
    start = (
        jnp.int32(0),
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )
    turns = jnp.max(last) // keys_at_once + 1
    _, peak, total, out = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)
    # A query that sees no key (padding) met no turn, or only forbidden keys: any finite answer will do.
    total = jnp.maximum(total, jnp.float32(1e-30))
    out = out / total[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    if not return_lse:
        return out
    lse = jnp.where(peak > MASKED, peak + jnp.log(total), -jnp.inf)
    return out, lse.transpose(0, 3, 1, 2).reshape(query.shape[:3])
