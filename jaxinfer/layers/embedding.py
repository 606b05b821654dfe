"""Token embedding and the language-model head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.config import ModelConfig
from jaxinfer.layers.linear import Weight, linear
from jaxinfer.layers.norm import rms_norm
from pallas_kernels.int4_matmul import Packed, fused_refusal, int4_matmul_fused


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
    return _capped(linear(hidden, weight, out_dtype=jnp.float32), config)


def norm_head(
    x: Float[Array, "*batch hidden"], norm: Float[Array, " hidden"], weight: Weight, config: ModelConfig
) -> Float[Array, "*batch vocab"]:
    """`head` of the RMS-normalised x, which is never written where an INT4 kernel normalises it."""
    if isinstance(weight, Packed) and fused_refusal(x, weight, norm_eps=config.norm_eps) is None:
        options = {"norm": norm, "norm_eps": config.norm_eps, "out_dtype": jnp.float32}
        return _capped(int4_matmul_fused(x, weight, **options), config)
    return head(rms_norm(x, norm, config.norm_eps), weight, config)


def _capped(logits: Float[Array, "*batch vocab"], config: ModelConfig) -> Float[Array, "*batch vocab"]:
    if config.logits_divisor != 1.0:
        logits = logits / jnp.float32(config.logits_divisor)
    if config.logits_softcap is not None:
        cap = jnp.float32(config.logits_softcap)
        logits = cap * jnp.tanh(logits / cap)
    return logits
