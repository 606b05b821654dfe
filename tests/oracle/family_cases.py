"""The tiny checkpoints that `make_families.py` writes: a `Case` for each family and for each thing it varies.

`must_matter` lists configuration changes that have to change the logits: a fixture in which a sliding window
or a soft-cap could be ignored without anybody noticing would prove nothing.
"""

import dataclasses
from typing import Any, Literal

PROMPT_LENGTH = 9
CONTINUATION_LENGTH = 24
SEQUENCE_LENGTH = 40
SHORT_LENGTH = 12
"""Below the original context of the cases whose RoPE depends on the length; `SEQUENCE_LENGTH` is above."""

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`config` extends `BASE`. `spelling`: v5 as transformers writes it, v4 as most files on the Hub are."""

    name: str
    model_type: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    must_matter: tuple[dict[str, Any], ...] = ()
    spelling: Literal["v4", "v5"] = "v5"
    storage: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    num_tokens: int | None = None
    max_shard_size: str | None = None

    @property
    def length_dependent(self) -> bool:
        """Whether the RoPE frequencies depend on the length of the sequence."""
        return self.config.get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope")


def rope(rope_type: str = "default", theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


DEFAULT_ROPE = {"rope_parameters": rope()}
UNSCALED = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5)
LONGROPE_FACTORS = {
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.2, 1.9, 3.1, 4.4, 6.0, 9.0],
}
PHI3 = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
GEMMA3_ROPE = {
    "sliding_attention": rope(theta=1000.0),
    "full_attention": rope("linear", theta=50000.0, factor=8.0),
}
GEMMA3 = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "rope_parameters": GEMMA3_ROPE,
}

CASES = (
    Case("llama", "llama", {"rms_norm_eps": 1e-5}, ({"rope_parameters": rope(theta=500.0)},)),
    Case(
        "llama_biases",
        "llama",
        {
            "hidden_size": 40,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "llama_sharded",
        "llama",
        {"num_key_value_heads": 4, "rope_parameters": rope(theta=500000.0)},
        (DEFAULT_ROPE,),
        storage="float32",
        max_shard_size="40KB",
    ),
    Case(
        "llama_rope_llama3",
        "llama",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        (
            DEFAULT_ROPE,
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}},
            {"rope_parameters": LLAMA3 | {"factor": 32.0}},
        ),
        spelling="v4",
    ),
    Case(
        "llama_rope_linear",
        "llama",
        {"vocab_size": 104, "rope_parameters": rope("linear", theta=100000.0, factor=4.0)},
        ({"rope_parameters": rope(theta=100000.0)},),
        spelling="v4",
        num_tokens=88,
    ),
    Case(
        "llama_rope_dynamic",
        "llama",
        {"head_dim": 16, "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=4.0)},
        (DEFAULT_ROPE, {"max_position_embeddings": 32}),
    ),
    Case(
        "llama_rope_dynamic_below",
        "llama",
        {"head_dim": 16, "max_position_embeddings": 64, "rope_parameters": rope("dynamic", factor=4.0)},
        ({"max_position_embeddings": 16},),
        spelling="v4",
    ),
    Case(
        "llama_rope_yarn_mscale",
        "llama",
        {
            "head_dim": 16,
            "rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.25, "truncate": False},
        },
        (
            DEFAULT_ROPE,
            {"rope_parameters": YARN | {"truncate": False}},
            {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.25}},
        ),
    ),
    Case(
        "mistral_sliding",
        "mistral",
        {"hidden_size": 40, "head_dim": 16, "sliding_window": 8},
        ({"sliding_window": None}, {"sliding_window": 9}),
    ),
    Case(
        "mistral_full",
        "mistral",
        {"sliding_window": None, "head_dim": None, "rope_parameters": rope(theta=1000000.0)},
        ({"sliding_window": 32}, DEFAULT_ROPE),
        spelling="v4",
        storage="float16",
    ),
    Case(
        "qwen2",
        "qwen2",
        {
            "vocab_size": 112,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 8,
            "max_window_layers": 1,
            "rope_parameters": rope(theta=1000000.0),
        },
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None},),
        spelling="v4",
        num_tokens=96,
    ),
    Case(
        "qwen2_sliding",
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ({"use_sliding_window": False, "layer_types": None}, {"max_window_layers": 0, "layer_types": None}),
    ),
    Case("qwen3", "qwen3", {"hidden_size": 40, "head_dim": 16}),
    Case(
        "qwen3_rope_yarn",
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
        (
            DEFAULT_ROPE,
            {"rope_parameters": YARN | {"truncate": False}},
            {"rope_parameters": YARN | {"attention_factor": 1.0}},
        ),
        spelling="v4",
    ),
    Case(
        "phi3",
        "phi3",
        {"hidden_size": 48, "num_attention_heads": 6, "sliding_window": 12},
        ({"sliding_window": None}, {"sliding_window": 13}),
    ),
    Case(
        "phi3_longrope",
        "phi3",
        PHI3
        | {
            "tie_word_embeddings": True,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": rope("longrope", partial_rotary_factor=0.75, **LONGROPE_FACTORS),
        },
        ({"original_max_position_embeddings": 48}, {"max_position_embeddings": 128}),
        spelling="v4",
    ),
    Case(
        "phi3_longrope_below",
        "phi3",
        PHI3
        | {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": rope("longrope", partial_rotary_factor=0.75, **LONGROPE_FACTORS),
        },
        ({"original_max_position_embeddings": 16}, {"rope_parameters": rope(partial_rotary_factor=0.75)}),
    ),
    Case(
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
        (
            {"sliding_window": 64},
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
        spelling="v4",
    ),
    Case(
        "gemma3_text",
        "gemma3_text",
        GEMMA3,
        (
            {"sliding_window": 64},
            {"rope_parameters": GEMMA3_ROPE | {"full_attention": rope(theta=50000.0)}},
            {"rope_parameters": GEMMA3_ROPE | {"sliding_attention": rope(theta=50000.0)}},
        ),
    ),
    Case("gemma3_multimodal", "gemma3", GEMMA3, spelling="v4"),
    Case(
        "smollm3",
        "smollm3",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "no_rope_layers": [1, 0, 1, 1],
            "tie_word_embeddings": True,
        },
        ({"no_rope_layers": [1, 1, 1, 1]}, {"no_rope_layers": [1, 1, 1, 0]}),
    ),
    Case("olmo2", "olmo2", {"rms_norm_eps": 1e-5}),
    Case(
        "granite",
        "granite",
        {
            "tie_word_embeddings": True,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
        tuple({key: value} for key, value in UNSCALED.items()),
    ),
    Case(
        "glm4",
        "glm4",
        {"head_dim": 16, "rope_parameters": rope(partial_rotary_factor=0.5), "num_key_value_heads": 2},
        ({"rope_parameters": rope(partial_rotary_factor=1.0)},),
    ),
)
