"""Attention of new tokens: over themselves when nothing is cached, else over the pages of the cache.

Decoding and verification read pages through `pallas_kernels.paged_attention`; what is here serves prefill.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

MASKED = -1e30
"""Score of a forbidden key: finite, so that a row in which every key is forbidden gives no NaN."""


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

    On a GPU, cuDNN does it where it can (16-bit, head_dim up to 256 and a multiple of 8, no soft-cap).
    """
    tokens, head_dim = query.shape[1], query.shape[3]
    fits_cudnn = query.dtype in (jnp.bfloat16, jnp.float16) and softcap is None and tokens % 64 == 0
    if jax.default_backend() == "gpu" and fits_cudnn and head_dim % 8 == 0 and head_dim <= 256:
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
    key_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    value_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention over a row's pages, which already hold the new tokens; position -1 is padding, at a row's end.

    Gathers the pages into a contiguous copy.
    """
    batch, pages = page_table.shape
    _, kv_heads, page_size, head_dim = key_pages.shape
    last = jnp.max(positions, axis=1)
    key_positions = jnp.broadcast_to(
        jnp.arange(pages * page_size, dtype=jnp.int32)[None, :], (batch, pages * page_size)
    )
    written = key_positions <= last[:, None]

    def gather(pool: jax.Array) -> jax.Array:
        blocks = jnp.take(pool, page_table, axis=0, mode="clip").swapaxes(2, 3)
        flat = blocks.reshape(batch, pages * page_size, kv_heads, head_dim)
        # What lies behind the last token may be another request's, NaN included; 0 * NaN would be NaN.
        return jnp.where(written[:, :, None, None], flat, jnp.zeros((), flat.dtype))

    mask = causal_mask(positions, key_positions, window)
    return masked_attention(query, gather(key_pages), gather(value_pages), mask, scale=scale, softcap=softcap)
