"""Attention over a cache in tiers: one call for each tier, merged by log-sum-exp.

Only the newest tier holds tokens that some queries of a call may not see yet. Every query sees all of an older tier,
so its query tokens are so many more heads to a kernel that knows one token a row.

A decode step of one layer takes five launches with all three tiers: the kernel that rotates, appends and attends over
the newest, a fusion that rotates the queries for the others, a kernel for each of these, and the fusion that merges.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.layers.attention import prefill_attention
from jaxinfer.layers.chunk_attention import Prefix
from pallas_kernels.paged_attention import paged_attention

type Parts = Sequence[tuple[jax.Array, jax.Array]]
"""(output [batch, tokens, heads, head_dim], float32 log-sum-exp [batch, tokens, heads]) over disjoint keys."""


def merged(parts: Parts) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention over the keys of all parts, in the first one's dtype; zero where no part has a key."""
    if len(parts) == 1:
        return parts[0][0]
    peak = jnp.float32(-1e30)  # not -inf: an idle row must not compute inf - inf
    for _, lse in parts:
        peak = jnp.maximum(peak, lse)
    weights = [jnp.exp(lse - peak) for _, lse in parts]
    total = jnp.maximum(sum(weights[1:], weights[0]), jnp.float32(1e-30))
    outs = [
        out.astype(jnp.float32) * (weight / total)[..., None] for (out, _), weight in zip(parts, weights, strict=True)
    ]
    return sum(outs[1:], outs[0]).astype(parts[0][0].dtype)


def decode_older(
    query: Float[Array, "batch tokens heads head_dim"], prefix: Prefix, *, scale: float, softcap: float | None
) -> tuple[Float[Array, "batch tokens heads head_dim"], Float32[Array, "batch tokens heads"]]:
    """Attention of a few tokens a row over a tier of codes that they all see whole, and its log-sum-exp."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads = prefix.pools[0].shape[1]
    # One token with the heads of all: those of one KV head stay together.
    folded = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    k_scales, v_scales = prefix.scales
    out, lse = paged_attention(
        folded.reshape(batch, 1, tokens * heads, head_dim),
        *prefix.pools,
        prefix.page_table,
        prefix.lengths,
        scale=scale,
        softcap=softcap,
        k_scales=k_scales,
        v_scales=v_scales,
        return_lse=True,
    )
    out = out.reshape(batch, kv_heads, tokens, heads // kv_heads, head_dim).swapaxes(1, 2)
    lse = lse.reshape(batch, kv_heads, tokens, heads // kv_heads).swapaxes(1, 2)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def prefill_older(
    query: Float[Array, "batch tokens heads head_dim"],
    positions: Int32[Array, "batch tokens"],
    prefix: Prefix,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Float32[Array, "batch tokens heads"]]:
    """As `decode_older` for any number of tokens, by XLA; position -1 is padding."""
    last = jnp.where(positions >= 0, prefix.lengths[:, None] - 1, jnp.int32(-1))
    stored = (*prefix.pools, last, prefix.page_table, *prefix.scales)
    return prefill_attention(query, *stored, scale=scale, window=None, softcap=softcap, return_lse=True)
