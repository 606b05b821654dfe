"""One decode step's attention in plain jnp: the CPU path, and what the kernel is checked against."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.formats import format_of, quantise


def decode_attention(
    qkv: Float[Array, "batch tokens qkv"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    positions: Int32[Array, " batch"],
    rope: tuple[Float32[Array, "batch tokens half"], Float32[Array, "batch tokens half"]] | None,
    norms: tuple[Float32[Array, " head_dim"], Float32[Array, " head_dim"]] | None,
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float32[Array, "num_pages kv_heads page_size"], Float32[Array, "num_pages kv_heads page_size"]]
    | None = None,
    *,
    num_q_heads: int,
    scale: float,
    interleaved: bool,
    norm_eps: float,
    window: int | None,
    softcap: float | None,
    head_dim: int,
    return_lse: bool = False,
    attend: Callable[..., Any] = reference.paged_attention,
) -> tuple[Array, ...]:
    """Norm, RoPE, append, attention, each rounded to qkv's dtype; the output, then the pools, then their scales.

    With `return_lse` the log-sum-exp [batch, tokens, q_heads] follows the output. `attend` is the attention, called as
    the reference is.
    """
    batch, tokens, _ = qkv.shape
    kv_heads = k_pages.shape[1]
    heads = qkv.reshape(batch, tokens, -1, head_dim)
    q, k, v = jnp.split(heads, [num_q_heads, num_q_heads + kv_heads], axis=2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norm_eps), rms_norm(k, norms[1], norm_eps)
    if rope is not None:
        q, k = rotate(q, *rope, interleaved), rotate(k, *rope, interleaved)
    new = [k, v]
    if scales is not None:
        form = format_of(k_pages.dtype)
        assert form is not None
        (k, k_scale), (v, v_scale) = quantise(k, form), quantise(v, form)
        new = [k, v, k_scale, v_scale]
    places = _places(k_pages, page_table, positions, tokens)
    stored = [_append(pool, x, places) for pool, x in zip((k_pages, v_pages, *(scales or ())), new, strict=True)]
    if scales is not None:
        scales = (stored[2], stored[3])
    lengths = jnp.where(positions >= 0, positions + tokens, 0)
    attended = (q, stored[0], stored[1], page_table, lengths, sinks, scales)
    out, lse = attend(*attended, scale=scale, window=window, softcap=softcap)
    return out.reshape(batch, tokens, num_q_heads * head_dim), *([lse] if return_lse else []), *stored


def _places(
    pool: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    positions: Int32[Array, " batch"],
    tokens: int,
) -> Int32[Array, "batch tokens kv_heads"]:
    """Which rows of the pool, as a matrix, the new tokens are; past its end for what is not to be written."""
    num_pages, kv_heads, page_size, _ = pool.shape
    slots = jnp.maximum(positions, 0)[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    pages = jnp.take_along_axis(page_table, slots // page_size, axis=1, mode="clip")
    written = (positions >= 0)[:, None] & (slots // page_size < page_table.shape[1])
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :]
    places = (pages[:, :, None] * kv_heads + heads) * page_size + (slots % page_size)[:, :, None]
    return jnp.where(written[:, :, None], places, num_pages * kv_heads * page_size)


def _append(pool: Array, new: Array, places: Int32[Array, "batch tokens kv_heads"]) -> Array:
    # Each row is written once, and XLA may know it: otherwise it makes every 16-bit number an atomic update.
    rows = pool.reshape(-1, *pool.shape[3:])
    new = new.reshape(-1, *pool.shape[3:])
    return rows.at[places.reshape(-1)].set(new, mode="drop", unique_indices=True).reshape(pool.shape)


def rms_norm(
    x: Float[Array, "batch tokens heads head_dim"], weight: Float32[Array, " head_dim"], eps: float
) -> Float[Array, "batch tokens heads head_dim"]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * inverse * weight[None, None, None, :]).astype(x.dtype)


def rotate(
    x: Float[Array, "batch tokens heads head_dim"],
    cos: Float32[Array, "batch tokens half"],
    sin: Float32[Array, "batch tokens half"],
    interleaved: bool,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotates the first 2 * half dimensions: pairs (i, i + half), or (2i, 2i + 1) if `interleaved`."""
    rotary_dim = 2 * cos.shape[2]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    wide = x[..., :rotary_dim].astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.stack(pair, axis=-1) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.reshape(wide.shape).astype(x.dtype), x[..., rotary_dim:]], axis=-1)
