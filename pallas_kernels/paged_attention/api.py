"""The paged attention op: validates, picks a backend, says why."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import mosaic, reference, triton_attention
from pallas_kernels.paged_attention.formats import check_limits, check_pools
from pallas_kernels.paged_attention.plan import KEYS, plan_for

MAX_TOKENS = 16  # more query tokens than verification needs: prefill, another kernel


def paged_attention(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    lengths: Int32[Array, " batch"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    return_lse: bool = False,
    backend: Literal["mosaic", "triton", "reference"] | None = None,
    explain: bool = False,
) -> Any:
    """Attention of the newest tokens of each sequence over its paged keys and values.

    Args:
      q: queries of the last `tokens` tokens of each row (1 for decode, up to 16 for verification; the reference takes
        any). Query t of a row sits at position lengths - tokens + t and sees the positions up to its own.
      k_pages, v_pages: the pools, of q's dtype and head_dim wide, or codes with scales as `formats.py` describes them
        (int8 and float8_e4m3fn, head_dim wide; int4 in uint8, half as wide). The tokens' own keys and values are in
        them already.
      page_table: page ids of each row in order. Entries past a row's length may be anything in range: neither they nor
        what the pages hold from position `length` on (NaN included) touches the result.
      lengths: tokens in the cache, the new ones included; 0 is an empty row, whose output is zero.
      scale: multiplies q k.
      window: a query sees its own position and the window - 1 before it.
      softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
      sinks: per query head a logit that takes part in the normalisation and adds no value (gpt-oss).
      k_scales, v_scales: what codes are multiplied with, for each token and head; positive.
      return_lse: also return the float32 log-sum-exp [batch, tokens, q_heads] of the visible logits and the sink, -inf
        where there is none. Results over several pools merge with weights exp(lse); give the sinks to one of them.
      backend: forces one; else the environment variable JAXINFER_KERNELS, else the first that supports the call.
      explain: return the list of `dispatch.Choice` and compute nothing.

    Returns:
      [batch, tokens, q_heads, head_dim] in q's dtype; (output, lse) with `return_lse`.

    Raises:
      ValueError: shapes or dtypes that no backend takes, or that the forced one does not.
    """
    if q.ndim != 4:
        raise ValueError(f"paged_attention takes q [batch, tokens, q_heads, head_dim], not {q.shape}")
    batch, tokens, q_heads, head_dim = q.shape
    kv = check_pools("paged_attention", q.dtype, head_dim, k_pages, v_pages, k_scales, v_scales)
    _validate(q, k_pages, page_table, lengths, sinks, window=window, softcap=softcap)
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    choices = dispatch.choose("paged_attention", refusals(q.dtype, kv, head_dim, k_pages.shape[2], tokens), backend)
    if explain:
        return choices
    chosen = next(choice.backend for choice in choices if choice.taken)
    if chosen == "mosaic":
        plan = plan_for(
            batch=batch,
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=k_pages.shape[1],
            head_dim=head_dim,
            page_size=k_pages.shape[2],
            pages_per_row=page_table.shape[1],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
            kv=kv,
        )
        sinks = None if sinks is None else sinks.astype(jnp.float32)
        q, page_table, lengths = dispatch.in_memory((q, page_table, lengths))
        out, lse = mosaic.paged_attention(
            q, k_pages, v_pages, page_table, lengths, sinks, scales, plan=plan, return_lse=return_lse
        )
    else:
        attend = triton_attention.paged_attention if chosen == "triton" else reference.paged_attention
        out, lse = attend(
            q, k_pages, v_pages, page_table, lengths, sinks, scales, scale=scale, window=window, softcap=softcap
        )
    return (out, lse) if return_lse else out


def reads_lengths(dtype: jnp.dtype, kv: str, head_dim: int, page_size: int) -> bool:
    """Whether attention of one token a row reads no more than the row's length, however wide its page table is."""
    reasons = refusals(jnp.dtype(dtype), kv, head_dim, page_size, tokens=1)
    choices = dispatch.choose("paged_attention", reasons)
    return next(choice.backend for choice in choices if choice.taken) != "reference"


def refusals(dtype: jnp.dtype, kv: str, head_dim: int, page_size: int, tokens: int) -> dict[str, str | None]:
    """Each backend's reason not to take queries of `dtype` over pages that hold `kv`, in order of preference."""
    return {
        "mosaic": mosaic_refusal(dtype, kv, head_dim, page_size, tokens),
        "triton": triton_attention.refusal(dtype, kv, head_dim, page_size, tokens),
        "reference": None,
    }


def mosaic_refusal(dtype: jnp.dtype, kv: str, head_dim: int, page_size: int, tokens: int) -> str | None:
    """Why the Mosaic kernel does not take queries of `dtype` over pages that hold `kv`; None if it does."""
    if dtype != jnp.bfloat16:
        return f"it needs bfloat16 queries, not {dtype}"
    if tokens > MAX_TOKENS:
        return f"it takes up to {MAX_TOKENS} query tokens, not {tokens}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head_dim that is a multiple of 16 and at most 256, not {head_dim}"
    if kv == "int4" and (head_dim % 32 or head_dim not in (*range(32, 129), 256)):
        return f"with int4 pages it needs a head_dim of 32, 64, 96, 128 or 256, not {head_dim}"
    if page_size % KEYS:
        return f"it needs a page size that is a multiple of {KEYS}, not {page_size}"
    return dispatch.hopper_refusal()


def _validate(
    q: jax.Array,
    k_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
) -> None:
    batch, tokens, q_heads, _ = q.shape
    kv_heads = k_pages.shape[1]
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q is {q.dtype}; it needs floats")
    if 0 in q.shape or 0 in k_pages.shape:
        raise ValueError(f"q {q.shape} over pages {k_pages.shape} has an axis of 0; every axis needs at least 1")
    if q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, which is not a multiple of the pages' {kv_heads} KV heads")
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}; it needs int32[{batch}, pages]")
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths is {lengths.dtype}{lengths.shape}; it needs int32[{batch}]")
    if tokens > page_table.shape[1] * k_pages.shape[2]:
        raise ValueError(f"{tokens} query tokens do not fit in {page_table.shape[1]} pages of {k_pages.shape[2]}")
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; it needs one logit for each of {q_heads} query heads")
    check_limits(window, softcap)
