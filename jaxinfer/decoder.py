"""One decoder for all families: embed -> layers -> norm. What differs between families is a flag in ModelConfig."""

import dataclasses
import typing

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer import kv_cache
from jaxinfer.attention_routes import attend, decode_few, rotated_heads
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.layers.embedding import embed, head, norm_head
from jaxinfer.layers.linear import Weight, add_linear, add_order, linear, norm_linear_of
from jaxinfer.layers.mlp import gated_hidden, is_packed_mlp, packed_mlp
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.packed_attention import packed_attention
from jaxinfer.layers.residual import Pending, Residual, settled
from jaxinfer.layers.rope import rope_tables
from jaxinfer.tiers import KVCache, LayerPages, PageTable, layer_pages, with_store
from jaxinfer.tokens import Stage, Tokens, one_token
from pallas_kernels.int4_matmul import Ordered, sum_slices
from pallas_kernels.paged_attention import MAX_TOKENS
from pallas_kernels.token_order import TokenOrder

# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@flax.struct.dataclass
class LayerParams:
    """Weights of one layer; None where the family has no such tensor. Linear weights are [out, in].

    `qkv` holds the rows of q, k and v, `gate_up` those of gate and up. Norm weights are float32 with the family's
    offset already added.
    """

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    attn_norm: jax.Array | None = None
    attn_post_norm: jax.Array | None = None
    mlp_norm: jax.Array | None = None
    mlp_post_norm: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    qkv_bias: jax.Array | None = None
    o_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


LINEAR = ("qkv", "o", "gate_up", "down")
"""A layer's weights that are products."""


@typing.no_type_check
@flax.struct.dataclass
class Params:
    """Weights of a model. `lm_head` is None when the head is the embedding itself."""

    embed_tokens: jax.Array
    norm: jax.Array
    layers: list[LayerParams]
    lm_head: Weight | None = None


MANY_TOKENS = 2048
"""Tokens from which layers are kept apart. XLA's scheduler may do early what waits for no activations, and late what
nothing in the program waits for: in a prefill of 16384 tokens it decoded the packed weights of all layers first (7 GB
of an 8B model's gate and up), and wrote all layers' keys and values last (4.6 GB of Qwen3-0.6B's projections)."""


def attention_block[Cache: KVCache](
    params: LayerParams,
    qkv: Float[Array, "batch tokens qkv"],
    cache: Cache | None,
    layer: int,
    tokens: Tokens,
    config: ModelConfig,
) -> tuple[Float[Array, "batch tokens q_size"] | Ordered, Cache | None]:
    """Rotates, appends to the cache, attends: the heads' results, side by side.

    Those of decode steps come in the order in which the output projection takes them, where it has one.
    """
    batch, length, _ = qkv.shape
    layer_config = config.layers[layer]
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    pages = None
    if cache is not None:
        assert tokens.page_table is not None
        pages = layer_pages(cache, layer, tokens.positions, tokens.page_table)
    if pages is not None and tokens.stage == "decode" and length <= MAX_TOKENS and config.qk_norm != "full":
        order = heads_order(params, qkv, pages, config)
        out, store = decode_few(qkv, params.q_norm, params.k_norm, pages, layer_config, tokens, config, order)
        assert cache is not None
        return out, with_store(cache, layer, store)
    q, k, v = jnp.split(qkv, [q_size, q_size + kv_size], axis=-1)
    if config.qk_norm == "full":
        assert params.q_norm is not None and params.k_norm is not None
        q, k = rms_norm(q, params.q_norm, config.norm_eps), rms_norm(k, params.k_norm, config.norm_eps)
    q = rotated_heads(q, params.q_norm, layer_config, tokens, config)
    k = rotated_heads(k, params.k_norm, layer_config, tokens, config)
    v = v.reshape(batch, length, config.num_kv_heads, config.head_dim)
    if pages is not None:
        assert cache is not None
        store = kv_cache.append(pages.store, pages.place, k, v, pages.positions, pages.page_table)
        k, v = kv_cache.as_stored(store, k), kv_cache.as_stored(store, v)
        pages, cache = dataclasses.replace(pages, store=store), with_store(cache, layer, store)
    out = attend(q, k, v, pages, layer_config, tokens, config)
    return out.reshape(batch, length, q_size), cache


def adds_as_is(
    bias: Float[Array, " hidden"] | None, post_norm: Float[Array, " hidden"] | None, config: ModelConfig
) -> bool:
    """Whether a branch's product is what is added to the stream, with nothing done to it in between."""
    return bias is None and post_norm is None and config.residual_multiplier == 1.0


def heads_order(
    params: LayerParams, qkv: Float[Array, "batch tokens qkv"], pages: LayerPages, config: ModelConfig
) -> TokenOrder | None:
    """The order in which `add_branch` takes the heads' results of a decode step; None: as rows."""
    if not adds_as_is(params.o_bias, params.attn_post_norm, config):
        return None
    if pages.older or (pages.store.format is None and pages.store.keys[pages.place].dtype != qkv.dtype):
        return None  # results are merged, or of another type
    return add_order(qkv[:, :, : config.num_heads * config.head_dim], params.o)  # queries are like their results


def one_kernel[Cache: KVCache](
    params: LayerParams, x: Residual, cache: Cache | None, layer: int, tokens: Tokens, config: ModelConfig
) -> tuple[Residual, Cache] | None:
    """A layer's attention from norm to output projection, where one kernel does it all; else None.

    It leaves its result pending, which costs a kernel more where those of the MLP do not add it.
    """
    layer_config = config.layers[layer]
    if cache is None or tokens.stage != "decode" or tokens.order is not None or config.qk_norm == "full":
        return None
    if params.qkv_bias is not None or not adds_as_is(params.o_bias, params.attn_post_norm, config):
        return None
    if layer_config.window is not None or config.attention_softcap is not None:
        return None
    mlp = (params.gate_up, params.gate_up_bias, params.down, params.down_bias, config.activation)
    if params.mlp_norm is None or not is_packed_mlp(x.x if isinstance(x, Pending) else x, *mlp):
        return None
    assert tokens.page_table is not None
    pages, rope = layer_pages(cache, layer, tokens.positions, tokens.page_table), layer_config.rope
    found = packed_attention(
        x,
        params.attn_norm,
        params.qkv,
        params.o,
        pages,
        tokens.first,
        None if rope is None else tokens.rope_tables[rope],
        norm_eps=config.norm_eps,
        num_heads=config.num_heads,
        scale=config.attention_scale,
        interleaved=rope is not None and rope.interleaved,
        q_norm=params.q_norm,
        k_norm=params.k_norm,
        ahead=jax.tree.leaves([params.gate_up, params.down, params.mlp_norm]),
    )
    if found is None:
        return None
    x, *pools = found
    return x, with_store(cache, layer, pages.store.with_layer(pages.place, *pools))


def add_branch(
    x: Float[Array, "batch tokens hidden"],
    out: Float[Array, "batch tokens features"] | Ordered,
    weight: Weight,
    bias: Float[Array, " hidden"] | None,
    post_norm: Float[Array, " hidden"] | None,
    config: ModelConfig,
) -> Residual:
    """x + multiplier * norm(linear(out)); norm and multiplier only where the family has them."""
    if isinstance(out, Ordered) or adds_as_is(bias, post_norm, config):
        return add_linear(x, out, weight)
    return joined(x, linear(out, weight, bias), post_norm, config)


def joined(
    x: Float[Array, "batch tokens hidden"],
    branch: Float[Array, "batch tokens hidden"],
    post_norm: Float[Array, " hidden"] | None,
    config: ModelConfig,
) -> Float[Array, "batch tokens hidden"]:
    """x + multiplier * norm(branch)."""
    if post_norm is not None:
        branch = rms_norm(branch, post_norm, config.norm_eps)
    if config.residual_multiplier != 1.0:
        branch = branch * jnp.asarray(config.residual_multiplier, branch.dtype)
    return x + branch


def decoder_layer[Cache: KVCache](
    params: LayerParams,
    x: Residual,
    cache: Cache | None,
    layer: int,
    tokens: Tokens,
    config: ModelConfig,
    wanted: Int32[Array, " batch"] | None = None,
    following: LayerParams | None = None,
) -> tuple[Residual, Cache | None]:
    """One layer: attention and MLP, each with the norms its family has before and after.

    With `wanted` the result is that of one token a row: what follows attention is not computed for the others.
    `following` is the layer behind this one, whose weights a kernel may bring nearer.
    """
    with jax.named_scope("attention"):
        kernel = one_kernel(params, x, cache, layer, tokens, config)
        if kernel is not None:
            x, cache = kernel
        else:
            qkv, x = norm_linear_of(x, params.attn_norm, config.norm_eps, params.qkv, params.qkv_bias)
            heads, cache = attention_block(params, tokens.in_rows(qkv), cache, layer, tokens, config)
            if isinstance(heads, Ordered):
                pass  # of decode steps, which compute all their tokens in rows
            elif wanted is None:
                heads = tokens.out_of_rows(heads)
            else:
                x, heads = tokens.one(x, wanted), one_token(heads, wanted)
            x = add_branch(x, heads, params.o, params.o_bias, params.attn_post_norm, config)
    with jax.named_scope("mlp"):
        block = (params.mlp_norm, config.norm_eps, params.gate_up, params.gate_up_bias)
        ahead = following
        if kernel is not None and following is not None:  # whose attention brings the rest of its layer nearer
            ahead = (following.attn_norm, following.qkv, following.o, following.q_norm, following.k_norm)
        kernels = packed_mlp(x, *block, params.down, params.down_bias, config.activation, jax.tree.leaves(ahead))
        if kernels is not None:
            partial, x = kernels
            if adds_as_is(params.down_bias, params.mlp_post_norm, config):  # with a bias there would be no kernels
                return Pending(x, partial), cache
            return joined(x, sum_slices(partial, x.dtype), params.mlp_post_norm, config), cache
        x = settled(x)
        hidden = gated_hidden(x, *block, config.activation)
        return add_branch(x, hidden, params.down, params.down_bias, params.mlp_post_norm, config), cache


def forward[Cache: KVCache](
    params: Params,
    token_ids: Int32[Array, "batch tokens"],
    positions: Int32[Array, "batch tokens"],
    cache: Cache | None,
    page_table: PageTable | None,
    *,
    config: ModelConfig,
    stage: Stage,
    context_lengths: Int32[Array, " batch"] | None = None,
    wanted: Int32[Array, " batch"] | None = None,
    order: Int32[Array, " ordered"] | None = None,
) -> tuple[Float[Array, "rows places hidden"], Cache | None]:
    """Runs `token_ids` through all layers and returns normalised hidden states and the updated cache.

    `positions` are places in the sequence, -1 for padding. `context_lengths` is the longest each row will become, for
    RoPE kinds that depend on it (longrope, dynamic); by default the length so far. Without a cache the stage is
    "first".

    With `wanted`, hidden states are of one token a row, the one at that place of `token_ids`: [batch, 1, hidden]. Of
    many tokens the last layer then computes the projections for attention and no more: an eighth of a layer's products.

    With `order`, which are distinct flat places of `token_ids`, only the tokens there are computed, and padding as far
    as it is among them: rows are what attention sees, and may be as short as its kernel likes them. All that are not
    padding must be there, and without `wanted` the result is [1, ordered, hidden].
    """
    if context_lengths is None:
        context_lengths = jnp.max(positions, axis=1) + 1
    tables = tables_of(positions, context_lengths, config)
    tokens = Tokens(positions, page_table, tables, stage, order)
    x = embedded(params, token_ids, tokens, config)
    x, cache = stream_of(params, x, cache, tokens, config=config, wanted=wanted)
    return rms_norm(x, params.norm, config.norm_eps), cache


def tables_of(
    positions: Int32[Array, "batch places"], context_lengths: Int32[Array, " batch"], config: ModelConfig
) -> dict[RopeConfig, tuple[jax.Array, jax.Array]]:
    """`rope_tables` of each kind of angles that layers have."""
    rope_positions = jnp.maximum(positions, 0)
    return {
        rope: rope_tables(rope, rope_positions, context_lengths)
        for rope in dict.fromkeys(layer.rope for layer in config.layers)
        if rope is not None
    }


def embedded(
    params: Params, token_ids: Int32[Array, "batch tokens"], tokens: Tokens, config: ModelConfig
) -> Float[Array, "rows places hidden"]:
    """What the first layer takes.

    Padding is zeros, whatever its id: that token's embedding may be NaN, and attention's 0 * NaN would spread it.
    """
    x = embed(tokens.out_of_rows(token_ids[:, :, None])[:, :, 0], params.embed_tokens, config)
    is_token = tokens.out_of_rows((tokens.positions >= 0)[:, :, None])
    return jnp.where(is_token, x, jnp.zeros((), x.dtype))


def stream_of[Cache: KVCache](
    params: Params,
    x: Float[Array, "rows places hidden"],
    cache: Cache | None,
    tokens: Tokens,
    *,
    config: ModelConfig,
    wanted: Int32[Array, " batch"] | None = None,
) -> tuple[Float[Array, "_ _ hidden"], Cache | None]:
    """`forward` behind the embedding and up to the last norm: what `norm_logits` takes, and the updated cache.

    Layers are unrolled: `scan` over stacked layers copies each layer's slice, 2.75 times slower on an H200.
    """
    stream: Residual = x
    batch, num_tokens = tokens.positions.shape[0], tokens.positions.size
    for index, layer in enumerate(params.layers):
        if num_tokens >= MANY_TOKENS:
            stream, layer, cache = jax.lax.optimization_barrier((stream, layer, cache))
        last = index == len(params.layers) - 1 and num_tokens >= MANY_TOKENS
        following = params.layers[index + 1] if index + 1 < len(params.layers) else None
        with jax.named_scope(f"layer_{index}"):
            of_one = wanted if last else None
            stream, cache = decoder_layer(layer, stream, cache, index, tokens, config, of_one, following)
    x = settled(stream)
    if wanted is not None and x.shape[:2] != (batch, 1):
        x = tokens.one(x, wanted)
    return x, cache


def logits(params: Params, hidden: Float[Array, "*batch hidden"], config: ModelConfig) -> Float[Array, "*batch vocab"]:
    """float32 logits of the hidden states that `forward` returned."""
    weight = params.embed_tokens if params.lm_head is None else params.lm_head
    return head(hidden, weight, config)


def norm_logits(params: Params, x: Float[Array, "*batch hidden"], config: ModelConfig) -> Float[Array, "*batch vocab"]:
    """`logits` of what `stream_of` returned, normalised on the way."""
    weight = params.embed_tokens if params.lm_head is None else params.lm_head
    return norm_head(x, params.norm, weight, config)
