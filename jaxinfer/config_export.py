"""A Hugging Face `config.json` from a ModelConfig, for models whose file has none, as GGUF files.

What is written is read back by `from_hugging_face`, and what comes out differently is refused: a key is written only
for families whose class in transformers heeds it, so that nothing is said that other engines would pass over.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.layers.rope import inverse_frequencies

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}


def to_hugging_face(config: ModelConfig, *, pad_token_id: int | None = None) -> dict[str, Any]:
    """The `config.json` of a model, in the spelling that transformers 4 and 5 both read.

    `from_hugging_face` makes the same configuration of it, but for what computes the same otherwise: `norm_offset` is
    the family's (a GGUF file has it in its norms), a llama whose layers all have a window is a mistral, windows that no
    context reaches are left out, and `frequency_divisors` are the llama3 scaling that they were made by.

    Raises ValueError, naming the field, for what the family's `config.json` has no form for.
    """
    family = "gemma3_text" if config.model_type == "gemma3" else config.model_type
    layers = tuple(_reachable(layer, config.max_position_embeddings) for layer in config.layers)
    if family == "llama" and any(layer.window for layer in layers):
        family = "mistral"
    gemma = family.startswith("gemma")
    eos = list(config.eos_token_ids)
    keys: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation" if gemma else "hidden_act": _ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": pad_token_id,
    }
    keys |= _rope_keys(layers, config) | _family_keys(family, layers, config)
    _check(dataclasses.replace(config, layers=layers), from_hugging_face(keys, num_tokens=config.num_tokens))
    return keys


def _reachable(layer: LayerConfig, max_positions: int) -> LayerConfig:
    """Without a window that is never reached, as `from_hugging_face` has it."""
    return layer if layer.window is None or layer.window < max_positions else LayerConfig(layer.rope)


def _family_keys(family: str, layers: tuple[LayerConfig, ...], config: ModelConfig) -> dict[str, Any]:
    """Biases, windows, scales and layers without positions, in the families whose classes have them."""
    keys: dict[str, Any] = {}
    window = next((layer.window for layer in layers if layer.window), None)
    if family not in ("mistral", "qwen2", "phi3"):
        keys["attention_bias"] = config.qkv_bias
    if family in ("llama", "smollm3", "granite"):
        keys["mlp_bias"] = config.mlp_bias
    if family in ("mistral", "phi3"):
        keys["sliding_window"] = window
    if family in ("phi3", "glm4"):
        rope = _rope(layers, sliding=False)
        keys["partial_rotary_factor"] = 1.0 if rope is None else rope.rotary_dim / config.head_dim
    if family == "smollm3":
        keys["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    if family == "granite":
        keys |= {
            "attention_multiplier": config.attention_scale,
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_divisor,
        }
    if family.startswith("gemma"):
        keys |= {
            "query_pre_attn_scalar": round(config.attention_scale**-2),  # transformers 5 takes only an integer
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logits_softcap,
            "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in layers],
            "sliding_window": window,
        }
    return keys


def _rope_keys(layers: tuple[LayerConfig, ...], config: ModelConfig) -> dict[str, Any]:
    sliding = _rope(layers, sliding=True)
    rope = _rope(layers, sliding=False) or sliding
    if rope is None:
        raise ValueError("a model without any positions (NoPE) has no form in a config.json")
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    if config.model_type == "gemma3" and sliding is not None:
        keys["rope_local_base_freq"] = sliding.theta
    if any(divisor != 1 for divisor in rope.frequency_divisors):
        return keys | {"rope_scaling": _llama3_scaling(rope)}
    original = rope.original_max_position_embeddings
    match rope.kind:
        case "default":
            scaling = None
        case "linear":
            scaling = {"rope_type": "linear", "factor": rope.factor}
        case "llama3":
            scaling = {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": original,
            }
        case "yarn":
            scaling = {
                "rope_type": "yarn",
                "factor": rope.factor,
                "original_max_position_embeddings": original,
                "attention_factor": rope.attention_factor,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "truncate": rope.truncate,
            }
        case "longrope":
            # Phi-3's class in transformers 4 wants these three and no others.
            keys["original_max_position_embeddings"] = original
            factors = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
            scaling = {"type": "longrope", **factors}
        case _:
            raise ValueError(f"{rope.kind} RoPE does not occur in GGUF files and is not written to a config.json")
    return keys if scaling is None else keys | {"rope_scaling": scaling}


def _rope(layers: tuple[LayerConfig, ...], *, sliding: bool) -> RopeConfig | None:
    """That of the first layer of a kind."""
    ropes = (layer.rope for layer in layers if layer.rope is not None and (layer.window is not None) == sliding)
    return next(ropes, None)


def _llama3_scaling(rope: RopeConfig) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, which GGUF files hold only as the divisors that come of them.

    A frequency of t turns a token keeps the share (original t - low) / (high - low) of itself, cut off at 0 and 1, and
    the rest is divided by the factor. Only ratios count, so low may be 1; two shares between 0 and 1 give the others.
    Where there is only one, high is taken to be Llama's 4.
    """
    inverse = 1 / np.array(rope.frequency_divisors)
    turns = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim) / (2 * np.pi)
    kept = (inverse - inverse.min()) / (1 - inverse.min())
    between = (kept > 1e-4) & (kept < 1 - 1e-4)
    slope, start = 0.0, 0.0
    if between.sum() == 1:
        start = -1 / 3
        slope = float((kept[between][0] - start) / turns[between][0])
    elif between.any():
        slope, start = map(float, np.polyfit(turns[between], kept[between], 1))
    if start >= 0 or round(-slope / start) < 2:
        raise ValueError("rope_freqs.weight is no scaling that a config.json has a name for; expected Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": round(float(1 / inverse.min()), 5),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(1 - 1 / start, 4),
        "original_max_position_embeddings": round(-slope / start),
    }


def _check(config: ModelConfig, read: ModelConfig) -> None:
    """Raises ValueError for the fields in which the two would compute something else."""
    layers = tuple(
        ours if _layers_agree(theirs, ours) else theirs for theirs, ours in zip(config.layers, read.layers, strict=True)
    )
    eos = tuple(sorted(config.eos_token_ids))
    config = dataclasses.replace(config, layers=layers, norm_offset=read.norm_offset, eos_token_ids=eos)
    if config.model_type == "llama":
        config = dataclasses.replace(config, model_type=read.model_type)
    if any(layer.rope is not None and layer.rope.kind == "yarn" for layer in layers):
        # How far it stretches the context counts for more in `from_hugging_face` than what the file declares.
        longest = max(config.max_position_embeddings, read.max_position_embeddings)
        config = dataclasses.replace(config, max_position_embeddings=longest)
    wrong = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if _single(getattr(config, field.name)) != _single(getattr(read, field.name))
    ]
    if wrong:
        shown = ", ".join(
            "layers (RoPE or window)" if name == "layers" else f"{name} {getattr(config, name)!r}" for name in wrong
        )
        raise ValueError(f"a config.json of {read.model_type} has no form for {shown}")


def _layers_agree(first: LayerConfig, second: LayerConfig) -> bool:
    """Whether the same is computed in both; of `first` only, the RoPE may have divisors."""
    a, b = first.rope, second.rope
    if a is None or b is None or not a.frequency_divisors:
        return _single(first) == _single(second)
    frequencies = (inverse_frequencies(rope, rope.original_max_position_embeddings) for rope in (a, b))
    return (
        first.window == second.window
        and a.kind == "default"
        and (a.rotary_dim, a.interleaved, a.attention_factor) == (b.rotary_dim, b.interleaved, b.attention_factor)
        and np.allclose(*frequencies, rtol=2e-6, atol=0)
    )


def _single(value: Any) -> Any:
    """With numbers in float32, which is what GGUF files have of them."""
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, tuple):
        return tuple(map(_single, value))
    if dataclasses.is_dataclass(value):
        return tuple(_single(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value
