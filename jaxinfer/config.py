"""ModelConfig: one frozen, hashable description of a decoder-only transformer, whatever file it came from.

`config_hf.py` builds it from a Hugging Face `config.json`, `config_gguf.py` from GGUF metadata. Everything the
decoder branches on is here, resolved to its final value: no field means "look elsewhere".
"""

import dataclasses
import functools
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one layer type.

    `rotary_dim` is the number of leading dimensions of each head that are rotated. `attention_factor` multiplies both
    cos and sin. Lengths are in tokens. Fields that a kind does not use keep their defaults.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    attention_factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    frequency_divisors: tuple[float, ...] = ()
    """Per-frequency divisors stored in the checkpoint itself (GGUF `rope_freqs.weight`); applied last."""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer. `rope=None`: no positions (NoPE). `window=None`: full causal attention;
    `window=w`: a token sees itself and the w-1 tokens before it."""

    rope: RopeConfig | None
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: embed -> layers -> norm -> logits.

    Each layer computes, with N the norms that exist (`pre_norms`, `post_norms`) and r the residual multiplier:
    `h = x + r * N_attn_post(attention(N_attn(x)))`, then `h + r * N_mlp_post(mlp(N_mlp(h)))`.
    """

    model_type: str
    vocab_size: int
    """Rows of the embedding and the head, padding included."""
    num_tokens: int
    """Ids below this exist in the tokenizer; ids from here to `vocab_size` are padding and are never sampled."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    """Longest context in tokens the checkpoint declares."""
    norm_eps: float
    norm_offset: float = 0.0
    """Added to every norm weight: 1.0 for the Gemma family's safetensors, else 0.0."""
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys before RoPE: per head (weight [head_dim]) or over the whole projection."""
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 0.0
    """Multiplies q.k; always resolved (head_dim ** -0.5 for most families), never 0 in a real config."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    embedding_multiplier_rounded: bool = False
    """Round the multiplier to the parameter dtype first, as Gemma does."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of every end-of-generation id the checkpoint names (config, generation config, tokenizer, GGUF)."""

    def __hash__(self) -> int:
        """Computed once: each call of a jitted program asks for it, and the layers' hashes take their time."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, object]:
        # Another process hashes strings differently.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def num_layers(self) -> int:
        return len(self.layers)
