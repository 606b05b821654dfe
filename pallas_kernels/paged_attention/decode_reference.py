"""One decode step's attention in plain jnp: the CPU path, and what the kernel is checked against."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.formats import format_of, quantise


def decode_attention(
    qkv: Float[Array, "batch qkv"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    positions: Int32[Array, " batch"],
    rope: tuple[Float32[Array, "batch half"], Float32[Array, "batch half"]] | None,
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

    With `return_lse` the log-sum-exp [batch, q_heads] follows the output. `attend` is the attention, called as the
    reference is.
    """
    num_pages, kv_heads, page_size, _ = k_pages.shape
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k, v = jnp.split(heads, [num_q_heads, num_q_heads + kv_heads], axis=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norm_eps), rms_norm(k, norms[1], norm_eps)
    if rope is not None:
        q, k = rotate(q, *rope, interleaved), rotate(k, *rope, interleaved)
    slots = jnp.maximum(positions, 0)
    pages = jnp.take_along_axis(page_table, slots[:, None] // page_size, axis=1, mode="clip")[:, 0]
    pages = jnp.where(positions >= 0, pages, num_pages)  # past the end, which is dropped
    new = [k, v]
    if scales is not None:
        form = format_of(k_pages.dtype)
        assert form is not None
        (k, k_scale), (v, v_scale) = quantise(k, form), quantise(v, form)
        new = [k, v, k_scale, v_scale]
    stored = [
        pool.at[pages, :, slots % page_size].set(x, mode="drop")
        for pool, x in zip((k_pages, v_pages, *(scales or ())), new, strict=True)
    ]
    if scales is not None:
        scales = (stored[2], stored[3])
    attended = (q[:, None], stored[0], stored[1], page_table, positions + 1, sinks, scales)
    out, lse = attend(*attended, scale=scale, window=window, softcap=softcap)
    return out.reshape(qkv.shape[0], num_q_heads * head_dim), *([lse[:, 0]] if return_lse else []), *stored


def rms_norm(
    x: Float[Array, "batch heads head_dim"], weight: Float32[Array, " head_dim"], eps: float
) -> Float[Array, "batch heads head_dim"]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * inverse * weight[None, None, :]).astype(x.dtype)


def rotate(
    x: Float[Array, "batch heads head_dim"],
    cos: Float32[Array, "batch half"],
    sin: Float32[Array, "batch half"],
    interleaved: bool,
) -> Float[Array, "batch heads head_dim"]:
    """Rotates the first 2 * half dimensions: pairs (i, i + half), or (2i, 2i + 1) if `interleaved`."""
    rotary_dim = 2 * cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    wide = x[..., :rotary_dim].astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.stack(pair, axis=-1) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.reshape(wide.shape).astype(x.dtype), x[..., rotary_dim:]], axis=-1)
