"""The attention of a layer between its projections: by the kernel or the library that takes the stage, the cache, the
window and the card."""

from jaxtyping import Array, Float

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.layers.attention import cudnn_refusal, prefill_attention, self_attention
from jaxinfer.layers.chunk_attention import WIDEST_WINDOW, chunk_attention, windowed_chunk_attention
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.paged_chunk import kernel_refusal, paged_chunk_attention
from jaxinfer.layers.rope import apply_rope
from jaxinfer.layers.tiered_attention import decode_older, merged, prefill_older
from jaxinfer.tiers import LayerPages
from jaxinfer.tokens import Tokens
from pallas_kernels.int4_matmul import Ordered
from pallas_kernels.paged_attention import decode_attention, paged_attention
from pallas_kernels.token_order import TokenOrder


def rotated_heads(
    x: Float[Array, "batch tokens size"],
    norm: Float[Array, " size_of_norm"] | None,
    layer_config: LayerConfig,
    tokens: Tokens,
    config: ModelConfig,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Queries or keys by head, with the norm that the family has for a head, and rotated."""
    x = x.reshape(*x.shape[:2], -1, config.head_dim)
    if config.qk_norm == "head":
        assert norm is not None
        x = rms_norm(x, norm, config.norm_eps)
    if layer_config.rope is not None:
        cos, sin = tokens.angles(layer_config.rope)
        rope = layer_config.rope
        x = apply_rope(x, cos, sin, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved)
    return x


def decode_few(
    qkv: Float[Array, "batch tokens qkv"],
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    pages: LayerPages,
    layer_config: LayerConfig,
    tokens: Tokens,
    config: ModelConfig,
    order: TokenOrder | None = None,
) -> tuple[Float[Array, "batch tokens q_size"] | Ordered, PagedKVCache]:
    """One new token a row, or as many as are verified: everything between the projections is one kernel where there is.

    Older tiers are read by themselves. With `order`, which is for rows without them, the heads come in that.
    """
    store, place = pages.store, pages.place
    cos, sin, interleaved = None, None, False
    if layer_config.rope is not None:
        cos, sin = tokens.angles(layer_config.rope)
        interleaved = layer_config.rope.interleaved
    key_scales, value_scales = store.scales(place)
    out, *pools = decode_attention(
        qkv if store.format is not None else qkv.astype(store.keys[place].dtype),
        store.keys[place],
        store.values[place],
        pages.page_table,
        pages.positions[:, 0],
        cos,
        sin,
        num_q_heads=config.num_heads,
        scale=config.attention_scale,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=config.norm_eps,
        window=layer_config.window,
        softcap=config.attention_softcap,
        k_scales=key_scales,
        v_scales=value_scales,
        return_lse=bool(pages.older),
        order=order,
    )
    if order is not None:
        return Ordered(out, (*qkv.shape[:2], config.num_heads * config.head_dim)), store.with_layer(place, *pools)
    if pages.older:
        lse, *pools = pools
        queries = qkv[:, :, : config.num_heads * config.head_dim]
        queries = rotated_heads(queries, q_norm, layer_config, tokens, config)
        options = {"scale": config.attention_scale, "softcap": config.attention_softcap}
        older = [decode_older(queries, tier, **options) for tier in pages.older]
        out = merged([(out.reshape(queries.shape), lse), *older]).reshape(out.shape)
    return out.astype(qkv.dtype), store.with_layer(place, *pools)


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads head_dim"],
    pages: LayerPages | None,
    layer_config: LayerConfig,
    tokens: Tokens,
    config: ModelConfig,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention of new tokens whose keys and values are in the cache already, by the route that the stage allows."""
    scale, softcap, window = config.attention_scale, config.attention_softcap, layer_config.window
    pools = [] if pages is None else [pages.store.keys[pages.place], *(tier.pools[0] for tier in pages.older)]
    kernel = pages is not None and tokens.stage != "decode" and kernel_refusal(q, pools) is None
    if tokens.stage == "first":
        # The kernel reads pages faster than cuDNN does `k` and `v`, needs no copies for that, and has soft-caps; but
        # where it has to decode them, cuDNN is faster.
        coded = pages is not None and pages.store.format is not None
        if not kernel or (coded and cudnn_refusal(q, softcap) is None):
            return self_attention(q, k, v, tokens.positions, scale=scale, window=window, softcap=softcap)
    assert pages is not None
    store, positions, page_table = pages.store, pages.positions, pages.page_table
    keys, values = store.keys[pages.place], store.values[pages.place]
    key_scales, value_scales = store.scales(pages.place)
    if tokens.stage != "decode":
        arguments = ((keys, values), (key_scales, value_scales), positions, page_table)
        if kernel:
            options = {"scale": scale, "softcap": softcap}
            return paged_chunk_attention(q, *arguments, **options, window=window, older=pages.older)
        if cudnn_refusal(q, softcap) is None:
            if window is None or window >= page_table.shape[1] * store.page_size:
                return chunk_attention(q, k, v, *arguments, scale=scale, older=pages.older)
            if window <= WIDEST_WINDOW * q.shape[1]:
                return windowed_chunk_attention(q, *arguments, scale=scale, window=window)
        stored = (keys, values, positions, page_table, key_scales, value_scales)
        options = {"scale": scale, "softcap": softcap}
        newest = prefill_attention(q, *stored, **options, window=window, return_lse=True)
        return merged([newest, *(prefill_older(q, positions, tier, **options) for tier in pages.older)])
    lengths = positions[:, -1] + 1
    newest = paged_attention(
        q if store.format is not None else q.astype(keys.dtype),
        keys,
        values,
        page_table,
        lengths,
        scale=scale,
        window=window,
        softcap=softcap,
        k_scales=key_scales,
        v_scales=value_scales,
        return_lse=bool(pages.older),
    )
    if not pages.older:
        return newest.astype(q.dtype)
    older = [decode_older(q, tier, scale=scale, softcap=softcap) for tier in pages.older]
    return merged([newest, *older]).astype(q.dtype)
