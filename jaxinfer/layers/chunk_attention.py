"""Prefill of a chunk whose prefix is in pages, by cuDNN.

cuDNN reads contiguous keys and its causal mask starts both sequences at their first position, so a chunk cannot be
given to it as the end of its context. In two parts it can: the chunk's own keys under the causal mask, and the
prefix, which every query sees whole. The parts merge with weights exp(log-sum-exp). The prefix is copied out of the
pages, `PREFIX_AT_ONCE` keys at a time; that moves 8 bytes for each number of the cache that 4 * tokens operations a
query head then work on.

With a window each query sees another part of the prefix. But only the last `window` keys matter then, and so the
chunk is one call after all: over those keys and its own, with as many queries of zeros before its own.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

# Public `jax.nn.dot_product_attention` rounds the log-sum-exp to bfloat16: an error of 0.03 at 10, and 3 % of a weight.
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.paged_attention.formats import dequantise

PREFIX_AT_ONCE = 4096
"""Keys of the prefix that are copied at a time: room for 16 MB a row with 8 heads of 128 in bfloat16."""

WIDEST_WINDOW = 4
"""Windows of up to this many times a chunk's tokens are worth the queries of zeros: cuDNN is 8 times as fast as XLA."""

type Part = Callable[..., tuple[jax.Array, jax.Array]]
"""(query [B, T, H, D], keys, values [B, S, Hkv, D], lengths int32 [B] or None, *, scale) -> output, float32
log-sum-exp [B, T, H]. Without lengths the keys are the queries' own and the mask is causal; with them each query
sees the first `lengths` keys, at least one."""


def cudnn_part(
    query: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array | None, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """A `Part` on a GPU: bfloat16 or float16, tokens and keys in multiples of 64, head_dim up to 256."""
    mask: dict[str, Any] = {"mask_type": MaskType.CAUSAL}
    if lengths is not None:
        queries = jnp.full(query.shape[:1], query.shape[1], jnp.int32)
        mask = {"mask_type": MaskType.PADDING, "q_seqlen": queries, "kv_seqlen": lengths}
    out, lse = cast(Any, dot_product_attention)(query, keys, values, scale=scale, return_residual=True, **mask)
    return out, lse.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Keys and values that every query sees: the first `lengths` [batch] tokens of a table's pages."""

    pools: tuple[jax.Array, jax.Array]
    scales: tuple[jax.Array | None, jax.Array | None]
    page_table: Int32[Array, "batch pages"]
    lengths: Int32[Array, " batch"]


def chunk_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    pools: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
    *,
    scale: float,
    older: Sequence[Prefix] = (),
    part: Part = cudnn_part,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Causal attention of each row's chunk over its prefix and itself; position -1 is padding, at a row's end.

    `keys` and `values` are the chunk's own, as the cache stores them. `pools` [num_pages, kv_heads, page_size, width]
    and their `scales` hold the prefix: positions before `positions[:, 0]`. What precedes these, in pools of other
    formats, is `older`.
    """
    out, lse = part(query, keys, values, None, scale=scale)
    prefix = Prefix(pools, scales, page_table, jnp.maximum(positions[:, 0], 0))
    out = out.astype(jnp.float32)
    for one in (prefix, *older):
        out, lse = with_prefix(out, lse, query, one, scale=scale, part=part)
    return out.astype(query.dtype)


def with_prefix(
    out: Float32[Array, "batch tokens heads head_dim"],
    lse: Float32[Array, "batch tokens heads"],
    query: Float[Array, "batch tokens heads head_dim"],
    prefix: Prefix,
    *,
    scale: float,
    part: Part,
) -> tuple[Float32[Array, "batch tokens heads head_dim"], Float32[Array, "batch tokens heads"]]:
    """A result over other keys, merged with attention over a prefix."""
    page_size = prefix.pools[0].shape[2]
    # A multiple of 64 keys, and no more of them than the table has room for.
    unit = max(1, 64 // page_size)
    pages_at_once = min(-(-prefix.page_table.shape[1] // unit), max(1, PREFIX_AT_ONCE // page_size // unit)) * unit
    keys_at_once = pages_at_once * page_size
    table = jnp.pad(prefix.page_table, ((0, 0), (0, -prefix.page_table.shape[1] % pages_at_once)))

    def turn(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index, out, lse = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_at_once, pages_at_once, axis=1)
        lengths = jnp.clip(prefix.lengths - index * keys_at_once, 0, keys_at_once)
        stored = jnp.arange(keys_at_once, dtype=jnp.int32)[None, :] < lengths[:, None]
        pools = zip(prefix.pools, prefix.scales, strict=True)
        gathered = [gather(*pool, pages, stored, query.dtype) for pool in pools]
        more, more_lse = part(query, *gathered, jnp.maximum(lengths, 1), scale=scale)
        seen = (lengths > 0)[:, None, None]
        return index + 1, *merge(out, lse, more, jnp.where(seen, more_lse, -jnp.inf))

    turns = (jnp.max(prefix.lengths) + (keys_at_once - 1)) // keys_at_once
    _, out, lse = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, (jnp.int32(0), out, lse))
    return out, lse


def windowed_chunk_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    pools: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
    *,
    scale: float,
    window: int,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch tokens heads head_dim"]:
    """As `chunk_attention` with a sliding window; `pools` hold the chunk too. Costs (tokens + window) / tokens."""
    batch, tokens, heads, head_dim = query.shape
    page_size = pools[0].shape[2]
    starts = jnp.maximum(positions[:, 0], 0)
    first = jnp.maximum(starts - (window - 1), 0) // page_size  # page
    offsets = starts - first * page_size  # of the chunk among the keys that are gathered
    unit = math.lcm(64, page_size)
    length = -(-(window + page_size + tokens) // unit) * unit
    slots = first[:, None] + jnp.arange(length // page_size, dtype=jnp.int32)[None, :]
    pages = jnp.take_along_axis(page_table, slots, axis=1, mode="clip")
    stored = first[:, None] * page_size + jnp.arange(length, dtype=jnp.int32)[None, :] <= jnp.max(
        positions, axis=1, keepdims=True
    )
    keys, values = (gather(*pool, pages, stored, query.dtype) for pool in zip(pools, scales, strict=True))
    padded = jnp.zeros((batch, length, heads, head_dim), query.dtype)
    place = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=0))
    out = jax.nn.dot_product_attention(
        place(padded, query, offsets),
        keys,
        values,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0),
        implementation=implementation,
    )
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, tokens, axis=0))(out, offsets)


def gather(
    pool: jax.Array, scales: jax.Array | None, pages: Int32[Array, "batch pages"], stored: jax.Array, dtype: jnp.dtype
) -> Float[Array, "batch keys kv_heads head_dim"]:
    """Keys or values of consecutive `pages`, zero where not `stored` [batch, keys].

    What lies there may be another request's, NaN included; 0 * NaN would be NaN.
    """
    got = jnp.take(pool, pages, axis=0, mode="clip")
    if scales is not None:
        got = dequantise(got, jnp.take(scales, pages, axis=0, mode="clip"))
    got = got.astype(dtype).swapaxes(2, 3)
    got = got.reshape(got.shape[0], -1, *got.shape[3:])
    return jnp.where(stored[:, :, None, None], got, jnp.zeros((), dtype))


def merge(
    out: Float32[Array, "batch tokens heads head_dim"],
    lse: Float32[Array, "batch tokens heads"],
    more: Float[Array, "batch tokens heads head_dim"],
    more_lse: Float32[Array, "batch tokens heads"],
) -> tuple[Float32[Array, "batch tokens heads head_dim"], Float32[Array, "batch tokens heads"]]:
    """The result over the keys of both parts; `lse` is finite, `more_lse` -inf where the second part has none."""
    total = jnp.logaddexp(lse, more_lse)
    first, second = (jnp.exp(x - total)[..., None] for x in (lse, more_lse))
    return out * first + more.astype(jnp.float32) * second, total
