"""The prefill attention op over pages: validates, picks a backend, says why."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import dispatch
from pallas_kernels.paged_attention.formats import FORMATS, check_limits, check_pools
from pallas_kernels.paged_prefill import mosaic, reference
from pallas_kernels.paged_prefill.plan import keys_of, plan_for


def paged_prefill(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    starts: Int32[Array, " batch"],
    lengths: Int32[Array, " batch"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    return_lse: bool = False,
    backend: Literal["mosaic", "reference"] | None = None,
    explain: bool = False,
) -> Any:
    """Attention of a chunk of each row's tokens over the row's keys and values in pages, the chunk's own included.

    Args:
      q: queries; token t of a row sits at position starts + t and sees the positions up to its own that are below the
        row's length, so tokens at starts + t >= lengths are padding: their result is finite and means nothing.
      k_pages, v_pages: the pools, of q's dtype and head_dim wide, or codes with scales as
        `paged_attention/formats.py` describes them.
      page_table: page ids of each row in order. Entries past a row's length may be anything in range: neither they nor
        what the pages hold from position `length` on (NaN included) touches the result.
      starts: position of each row's first query, at least 0. Past the length, all queries see all keys.
      lengths: tokens in the pages, the new ones included.
      scale: multiplies q k; positive.
      window: a query sees its own position and the window - 1 before it.
      softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
      sinks: per query head a logit that takes part in the normalisation and adds no value (gpt-oss).
      k_scales, v_scales: what codes are multiplied with, for each token and head; positive.
      return_lse: also return the float32 log-sum-exp [batch, tokens, q_heads] of the visible logits and the sink, -inf
        where there is none.
      backend: forces one; else the environment variable JAXINFER_KERNELS, else the first that supports the call.
      explain: return the list of `dispatch.Choice` and compute nothing.

    Returns:
      [batch, tokens, q_heads, head_dim] in q's dtype; (output, lse) with `return_lse`.

    Raises:
      ValueError: shapes or dtypes that no backend takes, or that the forced one does not.
    """
    if q.ndim != 4:
        raise ValueError(f"paged_prefill takes q [batch, tokens, q_heads, head_dim], not {q.shape}")
    batch, tokens, q_heads, head_dim = q.shape
    kv = check_pools("paged_prefill", q.dtype, head_dim, k_pages, v_pages, k_scales, v_scales)
    if 0 in q.shape or 0 in k_pages.shape:
        raise ValueError(f"q {q.shape} over pages {k_pages.shape} has an axis of 0; every axis needs at least 1")
    kv_heads, page_size = k_pages.shape[1:3]
    _validate(q, kv_heads, page_table, starts, lengths, sinks, scale=scale, window=window, softcap=softcap)
    reasons = {"mosaic": mosaic_refusal(q.shape, q.dtype, kv, page_size), "reference": None}
    choices = dispatch.choose("paged_prefill", reasons, backend)
    if explain:
        return choices
    arrays = (q, k_pages, v_pages, page_table, starts, lengths)
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    if choices[0].taken:
        plan = plan_for(
            batch=batch,
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pages_per_row=page_table.shape[1],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
            kv=kv,
        )
        sinks = None if sinks is None else sinks.astype(jnp.float32)
        q, page_table, starts, lengths = dispatch.in_memory((q, page_table, starts, lengths))
        arrays = (q, k_pages, v_pages, page_table, starts, lengths)
        out, lse = mosaic.paged_prefill(*arrays, sinks, scales, plan=plan, return_lse=return_lse)
    else:
        out, lse = reference.paged_prefill(*arrays, sinks, scales, scale=scale, window=window, softcap=softcap)
    return (out, lse) if return_lse else out


def mosaic_refusal(shape: tuple[int, ...], dtype: jnp.dtype | type, kv: str, page_size: int) -> str | None:
    """Why the kernel does not take queries [batch, tokens, heads, head_dim] over pages of `kv`; None if it does."""
    dtype, head_dim, size = jnp.dtype(dtype), shape[3], shape[0] * shape[1] * shape[2] * shape[3]
    if dtype != jnp.bfloat16:
        return f"it needs bfloat16 queries, not {dtype}"
    if kv != "bfloat16" and kv not in FORMATS:
        return f"it needs pages of bfloat16, {', '.join(FORMATS)}, not {kv}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head_dim that is a multiple of 16 and at most 256, not {head_dim}"
    if page_size % 16 or keys_of(head_dim) % page_size:
        return f"with a head_dim of {head_dim} it needs a page size of 16, 32 or 64, not {page_size}"
    if size > 2**31:
        return f"it counts query elements in 31 bits, and {shape} are {size}"
    return dispatch.hopper_refusal()


def _validate(
    q: jax.Array,
    kv_heads: int,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    batch, _, q_heads, _ = q.shape
    if q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, which is not a multiple of the pages' {kv_heads} KV heads")
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}; it needs int32[{batch}, pages]")
    for name, array in (("starts", starts), ("lengths", lengths)):
        if array.shape != (batch,) or array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}{array.shape}; it needs int32[{batch}]")
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; it needs one logit for each of {q_heads} query heads")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it needs a positive number, usually head_dim ** -0.5")
    check_limits(window, softcap)
