"""Paged attention in plain jnp: the CPU path, and what the kernels are checked against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def paged_attention(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "batch pages"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "batch tokens q_heads head_dim"], Float[Array, "batch tokens q_heads"]]:
    """Output in q's dtype and the float32 log-sum-exp, for any number of tokens. Softmax and sums are float32."""
    batch, tokens, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    group = q_heads // kv_heads
    # Gathering (page, head) blocks gives [batch, kv_heads, keys, head_dim] in one pass, with no transpose after it.
    blocks = page_table[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    keys = _gather(k_pages, blocks)
    values = _gather(v_pages, blocks)
    position = jnp.arange(keys.shape[2], dtype=jnp.int32)
    # Pages past the length may hold NaN, and 0 * NaN is NaN.
    stored = position[None, :] < lengths[:, None]
    values = jnp.where(stored[:, None, :, None], values, jnp.zeros((), values.dtype))

    rows = q.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    logits = jnp.einsum(
        "bhrd,bhkd->bhrk", rows, keys, precision=precision, preferred_element_type=jnp.float32
    ) * jnp.float32(scale)
    if softcap is not None:
        logits = jnp.tanh(logits / jnp.float32(softcap)) * jnp.float32(softcap)
    logits = logits.reshape(batch, kv_heads, group, tokens, -1)
    last = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    visible = position[None, None, :] <= last[:, :, None]
    if window is not None:
        visible &= position[None, None, :] > last[:, :, None] - window
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)

    if sinks is None:
        sink = jnp.full((1, kv_heads, group, 1, 1), -jnp.inf, jnp.float32)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
    # Not below -1e30, so that a row that sees nothing computes exp(-inf - -1e30) = 0 and no inf - inf.
    peak = jnp.maximum(jnp.maximum(logits.max(-1, keepdims=True), sink), jnp.float32(-1e30))
    weights = jnp.exp(logits - peak)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - peak)
    out = jnp.einsum(
        "bhrk,bhkd->bhrd",
        weights.reshape(batch, kv_heads, group * tokens, -1).astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    ).reshape(batch, kv_heads, group, tokens, head_dim)
    out = out / jnp.where(total > 0, total, jnp.float32(1))
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
    lse = (peak + jnp.log(total))[..., 0].transpose(0, 3, 1, 2).reshape(batch, tokens, q_heads)
    return out, lse


def _gather(
    pages: Float[Array, "num_pages kv_heads page_size head_dim"], blocks: Int32[Array, "batch kv_heads pages"]
) -> Float[Array, "batch kv_heads keys head_dim"]:
    num_pages, kv_heads, page_size, head_dim = pages.shape
    # "clip" keeps XLA from filling out-of-range blocks with NaN through a second select.
    got = pages.reshape(num_pages * kv_heads, page_size, head_dim).at[blocks].get(mode="clip")
    return got.reshape(*blocks.shape[:2], -1, head_dim)
