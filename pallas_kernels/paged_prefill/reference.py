"""Prefill attention over pages in plain jnp: what the kernel is checked against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.paged_attention.formats import dequantise


def paged_prefill(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    starts: Int32[Array, " batch"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[jax.Array, jax.Array] | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "batch tokens q_heads head_dim"], Float32[Array, "batch tokens q_heads"]]:
    """Output in q's dtype and the float32 log-sum-exp; all in between is float32, and all scores are in memory."""
    batch, tokens, q_heads, head_dim = q.shape
    kv_heads, group = k_pages.shape[1], q_heads // k_pages.shape[1]
    keys, values = (
        _gather(pool, None if scales is None else scales[i], page_table, lengths)
        for i, pool in enumerate((k_pages, v_pages))
    )
    rows = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, group, head_dim)
    logits = jnp.einsum("bthgd,bkhd->bhgtk", rows, keys, precision=jax.lax.Precision.HIGHEST) * jnp.float32(scale)
    if softcap is not None:
        logits = jnp.tanh(logits / jnp.float32(softcap)) * jnp.float32(softcap)
    key = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None, :]
    query = (starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :])[:, :, None]
    visible = (key <= query) & (key < lengths[:, None, None])
    if window is not None:
        visible &= key > query - window
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    sink = jnp.full((1, kv_heads, group, 1, 1), -jnp.inf, jnp.float32)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
    # Not below -1e30, so that a query that sees nothing computes exp(-inf - -1e30) = 0 and no inf - inf.
    peak = jnp.maximum(jnp.maximum(logits.max(-1, keepdims=True), sink), jnp.float32(-1e30))
    weights = jnp.exp(logits - peak)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - peak)
    out = jnp.einsum("bhgtk,bkhd->bhgtd", weights, values, precision=jax.lax.Precision.HIGHEST)
    out = out / jnp.where(total > 0, total, jnp.float32(1))
    lse = (peak + jnp.log(total))[..., 0].transpose(0, 3, 1, 2).reshape(batch, tokens, q_heads)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype), lse


def _gather(
    pool: jax.Array, scales: jax.Array | None, page_table: Int32[Array, "batch pages"], lengths: Int32[Array, " batch"]
) -> Float32[Array, "batch keys kv_heads head_dim"]:
    """Zero from the length on: what lies there may be NaN, and 0 * NaN is NaN."""
    got = jnp.take(pool, page_table, axis=0, mode="clip")
    if scales is not None:
        got = dequantise(got, jnp.take(scales, page_table, axis=0, mode="clip"))
    got = got.astype(jnp.float32).swapaxes(2, 3)
    got = got.reshape(got.shape[0], -1, *got.shape[3:])
    stored = jnp.arange(got.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    return jnp.where(stored[:, :, None, None], got, jnp.float32(0))
