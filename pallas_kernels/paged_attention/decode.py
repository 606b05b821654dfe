"""The decode attention op: everything between a layer's qkv projection and its output projection, in one call."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import decode_mosaic, decode_reference, reference, triton_attention
from pallas_kernels.paged_attention.api import refusals
from pallas_kernels.paged_attention.formats import check_pools
from pallas_kernels.paged_attention.plan import plan_for
from pallas_kernels.token_order import STAGE, TokenOrder, ordered


def decode_attention(
    qkv: Float[Array, "batch tokens qkv"],
    k_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    v_pages: Shaped[Array, "num_pages kv_heads page_size width"],
    page_table: Int32[Array, "batch pages"],
    positions: Int32[Array, " batch"],
    cos: Float32[Array, "batch tokens half"] | None,
    sin: Float32[Array, "batch tokens half"] | None,
    *,
    num_q_heads: int,
    scale: float,
    interleaved: bool = False,
    q_norm: Float32[Array, " head_dim"] | None = None,
    k_norm: Float32[Array, " head_dim"] | None = None,
    norm_eps: float = 1e-6,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "num_pages kv_heads page_size"] | None = None,
    return_lse: bool = False,
    order: TokenOrder | None = None,
    backend: Literal["mosaic", "triton", "reference"] | None = None,
    explain: bool = False,
) -> Any:
    """Norms and rotates the new tokens of each row, appends them to its pages and attends over the row.

    Same result as RMSNorm, RoPE, append and `paged_attention` one after the other, each rounded to qkv's dtype. Pools
    of codes get the new keys and values quantised (`formats.quantise`), and tokens attend them as they were stored.

    Args:
      qkv: the projections of the new tokens of each row (1 for decode, up to 16 for verification; the reference takes
        any number): of each `num_q_heads` query heads, then the key heads, then the value heads.
      k_pages, v_pages: the pools, as in `paged_attention`. Donate them (or the cache they are in), with their scales:
        they are then updated in place.
      page_table: page ids of each row in order. Entries past a row's new tokens may be anything in range. No other row
        may have a page that a row writes to.
      positions: place of the first new token in its row; the last lies below pages * page_size. -1 is an idle row: its
        output is zero, and nothing is written.
      cos, sin: of the new tokens' angles, for the first 2 * half dimensions of queries and keys; None for no rotation.
      num_q_heads: query heads in `qkv`.
      scale: multiplies q k.
      interleaved: pairs are dimensions (2i, 2i + 1) and not (i, i + half).
      q_norm, k_norm: RMSNorm weights of the query and key heads (before the rotation), both or neither.
      norm_eps: added to the mean square.
      window, softcap, sinks, k_scales, v_scales, backend, explain: as in `paged_attention`.
      order: write the output in the order in which a product of packed weights takes it (`product_order`): int32, see
        `int4_matmul.Ordered`. `num_q_heads * head_dim` must be a multiple of 128 then.
      return_lse: also return the float32 log-sum-exp [batch, tokens, num_q_heads], as `paged_attention` does.

    Returns:
      (output [batch, tokens, num_q_heads * head_dim] in qkv's dtype, k_pages, v_pages), with scales (..., k_scales,
      v_scales); the log-sum-exp, if asked for, comes second.

    Raises:
      ValueError: shapes or dtypes that no backend takes, or that the forced one does not.
    """
    head_dim = _head_dim(qkv, k_pages, num_q_heads)
    kv = check_pools("decode_attention", qkv.dtype, head_dim, k_pages, v_pages, k_scales, v_scales)
    _validate_rows(qkv, page_table, positions, cos, sin, head_dim)
    _validate_options(q_norm, k_norm, sinks, num_q_heads, head_dim, window, softcap)
    if order is not None and num_q_heads * head_dim % STAGE:
        raise ValueError(f"an order is of a multiple of {STAGE} features, not {num_q_heads} x {head_dim}")
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    _, kv_heads, page_size, _ = k_pages.shape
    rotary_dim = 0 if cos is None else 2 * cos.shape[2]
    reasons = refusals(qkv.dtype, kv, head_dim, page_size, tokens=qkv.shape[1])
    if rotary_dim % 8:
        reasons["mosaic"] = f"it rotates a multiple of 8 dimensions, not {rotary_dim}"
    choices = dispatch.choose("decode_attention", reasons, backend)
    if explain:
        return choices
    rope = None if cos is None or sin is None else (cos, sin)
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    arrays = (qkv, k_pages, v_pages, page_table, positions, rope, norms)
    chosen = next(choice.backend for choice in choices if choice.taken)
    if chosen != "mosaic":
        # The Triton kernel attends; what comes before it is XLA's, as in the reference.
        out, *rest = decode_reference.decode_attention(
            *arrays,
            sinks,
            scales,
            attend=triton_attention.paged_attention if chosen == "triton" else reference.paged_attention,
            num_q_heads=num_q_heads,
            scale=scale,
            interleaved=interleaved,
            norm_eps=norm_eps,
            window=window,
            softcap=softcap,
            head_dim=head_dim,
            return_lse=return_lse,
        )
        return (out if order is None else ordered(out.reshape(-1, out.shape[-1]), order)), *rest
    attention = plan_for(
        batch=qkv.shape[0],
        tokens=qkv.shape[1],
        q_heads=num_q_heads,
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
    attention = dataclasses.replace(attention, order=order)
    plan = decode_mosaic.DecodePlan(attention, rotary_dim, interleaved, None if norms is None else norm_eps)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    qkv, page_table, positions, rope, norms = dispatch.in_memory((qkv, page_table, positions, rope, norms))
    arrays = (qkv, k_pages, v_pages, page_table, positions, rope, norms)
    return decode_mosaic.decode_attention(*arrays, sinks, scales, plan=plan, return_lse=return_lse)


def _head_dim(qkv: jax.Array, k_pages: jax.Array, num_q_heads: int) -> int:
    if k_pages.ndim != 4:
        raise ValueError(
            f"decode_attention takes pages [num_pages, kv_heads, page_size, head_dim], not {k_pages.shape}"
        )
    kv_heads = k_pages.shape[1]
    if num_q_heads % kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of the pages' {kv_heads} KV heads")
    heads = num_q_heads + 2 * kv_heads
    if qkv.ndim != 3 or qkv.shape[2] % heads:
        raise ValueError(
            f"qkv has shape {qkv.shape}; {num_q_heads} query heads and 2 x {kv_heads} KV heads need "
            f"[batch, tokens, {heads} * head_dim]"
        )
    return qkv.shape[2] // heads


def _validate_rows(
    qkv: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    head_dim: int,
) -> None:
    batch, tokens, _ = qkv.shape
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}; it needs int32[{batch}, pages]")
    if positions.shape != (batch,) or positions.dtype != jnp.int32:
        raise ValueError(f"positions is {positions.dtype}{positions.shape}; it needs int32[{batch}]")
    if cos is None and sin is None:
        return
    if cos is None or sin is None or cos.shape != sin.shape:
        raise ValueError("cos and sin go together and have one shape; give both or neither")
    if cos.ndim != 3 or cos.shape[:2] != (batch, tokens) or 2 * cos.shape[2] > head_dim:
        raise ValueError(
            f"cos and sin have shape {cos.shape}; they need [{batch}, {tokens}, half], half up to {head_dim // 2}"
        )
    if not (cos.dtype == sin.dtype == jnp.float32):
        raise ValueError(f"cos and sin are {cos.dtype} and {sin.dtype}; they need float32")


def _validate_options(
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    sinks: jax.Array | None,
    num_q_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together; give both or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.dtype != jnp.float32 or weight.shape != (head_dim,)):
            raise ValueError(f"{name} is {weight.dtype}{weight.shape}; it needs float32[{head_dim}]")
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; it needs one logit for each of {num_q_heads} query heads")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it needs at least 1, or None for no window")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; it needs a positive number, or None for no cap")
