"""Token embedding and the language-model head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.config import ModelConfig
from jaxinfer.layers.linear import Weight, linear


def embed(
    tokens: Int32[Array, "*batch"], table: Float[Array, "vocab hidden"], config: ModelConfig
) -> Float[Array, "*batch hidden"]:
    """Looks up rows of `table` and applies the family's multiplier."""
    x = jnp.take(table, tokens, axis=0, mode="clip")
    if config.embedding_multiplier == 1.0:
        return x
    multiplier = jnp.asarray(config.embedding_multiplier, jnp.float32)
    if config.embedding_multiplier_rounded:
        multiplier = multiplier.astype(x.dtype).astype(jnp.float32)
    return (x.astype(jnp.float32) * multiplier).astype(x.dtype)


def head(hidden: Float[Array, "*batch hidden"], weight: Weight, config: ModelConfig) -> Float[Array, "*batch vocab"]:
    """float32 logits of normalised hidden states, divided and soft-capped as the family asks."""
    logits = linear(hidden, weight, out_dtype=jnp.float32)
    if config.logits_divisor != 1.0:
        logits = logits / jnp.float32(config.logits_divisor)
    if config.logits_softcap is not None:
        cap = jnp.float32(config.logits_softcap)
        logits = cap * jnp.tanh(logits / cap)
    return logits
