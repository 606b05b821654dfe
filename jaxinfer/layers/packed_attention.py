"""The attention half of a layer as one kernel, where there is one."""

import functools
import logging
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.layers.residual import Pending, Residual
from jaxinfer.layers.weights import Weight
from jaxinfer.tiers import LayerPages
from pallas_kernels.decoder_block import attention_block, attention_block_refusal
from pallas_kernels.int4_matmul import Packed

log = logging.getLogger("jaxinfer")


@functools.cache
def _say_once(reason: str) -> None:
    log.debug("a layer's attention is not one kernel: %s", reason)


def packed_attention(
    x: Residual,
    norm: Float[Array, " hidden"] | None,
    qkv: Weight,
    o: Weight,
    pages: LayerPages,
    first: Int32[Array, " places"] | None,
    rope: tuple[Float32[Array, "batch places half"], Float32[Array, "batch places half"]] | None,
    *,
    norm_eps: float,
    num_heads: int,
    scale: float,
    interleaved: bool,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Pending, Array, Array] | None:
    """The residual stream behind the output projection, still pending, and the pools with the new tokens.

    For few tokens of one row of a small model with packed weights; else None, and the log (at level debug) has the
    reason, each once. The new tokens' places follow each other, from the row's first position on; -1 is an idle row.
    `first` and `rope` are as `Tokens` has them. `ahead`: weights that are read next, which the kernel may bring nearer.
    """
    y, partial = (x.x, x.partial) if isinstance(x, Pending) else (x, None)
    if norm is None or pages.older or not isinstance(qkv, Packed) or not isinstance(o, Packed):
        return None
    store, place = pages.store, pages.place
    keys, values, table = store.keys[place], store.values[place], pages.page_table
    sizes = {"num_q_heads": num_heads, "rotary_dim": 0 if rope is None else 2 * rope[0].shape[2]}
    slices = 0 if partial is None else len(partial)
    refused = attention_block_refusal(y, slices, qkv, o, keys, table, **sizes)
    if refused is not None:
        _say_once(refused)
        return None
    left, y, keys, values = attention_block(
        y,
        partial,
        qkv,
        o,
        keys,
        values,
        table,
        pages.positions[:, 0] if first is None else first,
        *(rope or (None, None)),
        norm=norm,
        norm_eps=norm_eps,
        num_q_heads=num_heads,
        scale=scale,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        ahead=ahead,
    )
    return Pending(y, left), keys, values
