"""Paged attention in plain jnp: the CPU path, and what the kernels are checked against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.paged_attention.formats import unpack


def paged_attention(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float32[Array, "num_pages kv_heads page_size"], Float32[Array, "num_pages kv_heads page_size"]]
    | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "batch tokens q_heads head_dim"], Float[Array, "batch tokens q_heads"]]:
    """Output in q's dtype and the float32 log-sum-exp, for any number of tokens. Softmax and sums are float32.

    As in the kernel, `scales` multiply logits and weights, and the products see the codes themselves.
    """
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
    k_scale = v_scale = None
    if scales is not None:
        keys, values = unpack(keys, q.dtype), unpack(values, q.dtype)
        k_scale, v_scale = (_gather(pool[..., None], blocks)[..., 0] for pool in scales)
        v_scale = jnp.where(stored[:, None, :], v_scale, jnp.float32(0))
    values = jnp.where(stored[:, None, :, None], values, jnp.zeros((), values.dtype))

    rows = q.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    logits = jnp.einsum(
        "bhrd,bhkd->bhrk", rows, keys, precision=precision, preferred_element_type=jnp.float32
    ) * jnp.float32(scale)
    if k_scale is not None:
        logits = logits * k_scale[:, :, None, :]
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
    weights = weights.reshape(batch, kv_heads, group * tokens, -1)
    if v_scale is not None:
        weights = weights * v_scale[:, :, None, :]
    out = jnp.einsum(
        "bhrk,bhkd->bhrd",
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    ).reshape(batch, kv_heads, group, tokens, head_dim)
    out = out / jnp.where(total > 0, total, jnp.float32(1))
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
    lse = (peak + jnp.log(total))[..., 0].transpose(0, 3, 1, 2).reshape(batch, tokens, q_heads)
    return out, lse


def _gather(
    pages: Shaped[Array, "num_pages kv_heads page_size width"], blocks: Int32[Array, "batch kv_heads pages"]
) -> Shaped[Array, "batch kv_heads keys width"]:
    num_pages, kv_heads, page_size, width = pages.shape
    # "clip" keeps XLA from filling out-of-range blocks with NaN through a second select.
    got = pages.reshape(num_pages * kv_heads, page_size, width).at[blocks].get(mode="clip")
    return got.reshape(*blocks.shape[:2], -1, width)
