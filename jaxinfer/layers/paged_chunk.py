"""Prefill over pages by the kernel of `pallas_kernels/paged_prefill`: a chunk, its prefix and older tiers."""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.layers.chunk_attention import Prefix
from jaxinfer.layers.tiered_attention import merged
from pallas_kernels.dispatch import KERNELS_VARIABLE
from pallas_kernels.paged_attention.formats import format_of
from pallas_kernels.paged_prefill import mosaic_refusal, paged_prefill


def kernel_refusal(query: Float[Array, "batch tokens heads head_dim"], pools: Sequence[jax.Array]) -> str | None:
    """Why the kernel does not take these queries over these pools, each its tier's keys; None if it does."""
    asked = os.environ.get(KERNELS_VARIABLE) or None
    if asked not in (None, "mosaic"):
        return f"{KERNELS_VARIABLE} asks for {asked}"
    for pool in pools:
        form = format_of(pool.dtype)
        held = pool.dtype.name if form is None else form.name
        refusal = mosaic_refusal(query.shape, query.dtype, held, pool.shape[2])
        if refusal is not None:
            return refusal
    return None


def paged_chunk_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    pools: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    older: Sequence[Prefix] = (),
) -> Float[Array, "batch tokens heads head_dim"]:
    """Causal attention of each row's chunk over the pages that hold it and what precedes it, and over older tiers.

    Position -1 is padding, at a row's end.
    """
    starts, lengths = jnp.maximum(positions[:, 0], 0), jnp.max(positions, axis=1) + 1

    def part(tier: Prefix, starts: Int32[Array, " batch"], window: int | None) -> tuple[jax.Array, jax.Array]:
        return paged_prefill(
            query,
            *tier.pools,
            tier.page_table,
            starts,
            tier.lengths,
            scale=scale,
            window=window,
            softcap=softcap,
            k_scales=tier.scales[0],
            v_scales=tier.scales[1],
            return_lse=True,
        )

    newest = part(Prefix(pools, scales, page_table, lengths), starts, window)
    # From a start behind the last key on, every query sees all of them.
    return merged([newest, *(part(tier, tier.lengths, None) for tier in older)])
