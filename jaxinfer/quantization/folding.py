"""AWQ's scales within a layer: a projection's columns times s, whatever makes its inputs divided by s.

| projection | its inputs are made by | scales |
|---|---|---|
| q, k, v | the norm before attention | one an input |
| o | the rows and biases of v: attention mixes tokens, not channels | one a channel of v, whichever query head |
| gate, up | the norm before the MLP | one an input |
| down | the rows (and biases) of up: the gate only multiplies them | one an input |

The layer computes what it did, but for rounding. Where there is no norm before (OLMo 2) the columns stay. The values in
the key-value cache are divided by o's scales: a quantised cache sees other ranges than with the original.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams
from jaxinfer.quantization.layer_pass import InputMoments

FIELDS = ("o", "down", "qkv", "gate_up")
"""In this order: folding o and down changes rows of the other two, which are scaled after that."""


def can_fold(layer: LayerParams, field: str) -> bool:
    """Whether something before the projection takes the inverse scales."""
    match field:
        case "qkv":
            return layer.attn_norm is not None
        case "gate_up":
            return layer.mlp_norm is not None
        case _:
            return True


def tie(values: Float[Array, " in"], field: str, config: ModelConfig) -> Float[Array, " in"]:
    """Means over the inputs that must have one scale: o's, over the query heads that share a head of v."""
    if field != "o":
        return values
    by_head = values.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(jnp.mean(by_head, axis=1, keepdims=True), by_head.shape).reshape(-1)


def fold(
    layer: LayerParams, moments: InputMoments, field: str, scales: Float[Array, " in"], config: ModelConfig
) -> tuple[LayerParams, InputMoments]:
    """The layer with a projection's columns scaled and the inverse folded in, and its moments then. Arrays only."""
    inverse = 1.0 / scales
    changed: dict[str, jax.Array] = {field: getattr(layer, field) * scales[None, :]}
    match field:
        case "qkv":
            assert layer.attn_norm is not None
            changed["attn_norm"] = layer.attn_norm * inverse
        case "gate_up":
            assert layer.mlp_norm is not None
            changed["mlp_norm"] = layer.mlp_norm * inverse
        case "o":
            channels = inverse.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
            changed |= _last_rows(layer, "qkv", channels)
        case "down":
            changed |= _last_rows(layer, "gate_up", inverse)
    own = getattr(moments, field) * inverse[:, None] * inverse[None, :]
    return dataclasses.replace(layer, **changed), dataclasses.replace(moments, **{field: own})


def _last_rows(layer: LayerParams, field: str, factors: Float[Array, " rows"]) -> dict[str, jax.Array]:
    """Multiplies the last rows of a fused weight, and of its bias: v's, or up's."""
    weight, bias = getattr(layer, field), getattr(layer, f"{field}_bias")
    first = weight.shape[0] - len(factors)
    changed = {field: weight.at[first:].multiply(factors[:, None])}
    return changed if bias is None else changed | {f"{field}_bias": bias.at[first:].multiply(factors)}
