"""ModelConfig from a Hugging Face `config.json`, as transformers 4 or 5 writes it or as people trim it.

Absent keys get the defaults of transformers' configuration class (`config_hf_defaults.py`); keys for which no
default makes sense are required. A value that is not understood is an error, never a guess.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.config_hf_defaults import DEFAULTS
from jaxinfer.config_hf_rope import rope_config
from jaxinfer.config_keys import Keys, show

SUPPORTED = (*DEFAULTS, "gemma3")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def from_hugging_face(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    num_tokens: int | None = None,
    extra_eos: Iterable[int] = (),
) -> ModelConfig:
    """Normalises the parsed `config.json` of a supported family.

    `generation_config` is the parsed `generation_config.json`, if there is one; its end-of-sequence ids join
    those of `config` and `extra_eos`. `num_tokens` is the tokenizer's size: ids from there on are padding.

    Raises ValueError, in one line that names the key: unsupported `model_type`, RoPE type or activation,
    missing required key, wrong type, contradictory values.
    """
    keys = _text_keys(config)
    family = keys.defaults["model_type"]
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    vocab_size = keys.integer("vocab_size")
    num_kv_heads = keys.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"does not divide num_attention_heads {num_heads}")
    head_dim = keys.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            problem = f"does not divide hidden_size {hidden_size}, and there is no head_dim"
            raise keys.error("num_attention_heads", problem)
        head_dim = hidden_size // num_heads
    layers, max_positions = _layers(keys, head_dim)
    facts: dict[str, Any] = {
        "model_type": "gemma3" if family == "gemma3_text" else family,
        "vocab_size": vocab_size,
        "num_tokens": vocab_size if num_tokens is None else min(num_tokens, vocab_size),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layers": layers,
        "max_position_embeddings": max_positions,
        "norm_eps": keys.number("rms_norm_eps"),
        "activation": _activation(keys, "hidden_activation" if family.startswith("gemma") else "hidden_act"),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": keys.flag("tie_word_embeddings"),
        "bos_token_id": keys.optional_integer("bos_token_id", least=0),
        "eos_token_ids": _eos_token_ids(keys, config, generation_config, extra_eos, vocab_size),
    }
    return ModelConfig(**(facts | _FAMILY_FACTS[family](keys)))


def _text_keys(config: Mapping[str, Any]) -> Keys:
    """The language model's keys: the whole file, or its `text_config` with the outer keys behind it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json: model_type is missing; it names the architecture, such as llama")
    if model_type not in SUPPORTED:
        raise ValueError(
            f"config.json: model_type {show(model_type)} is not supported{_hint(model_type, config)}; "
            f"supported are {', '.join(sorted(SUPPORTED))}"
        )
    if model_type != "gemma3":
        return Keys(config, DEFAULTS[model_type])
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError("config.json: text_config is missing; model_type gemma3 keeps its language model there")
    outer = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    return Keys(outer | dict(text), DEFAULTS["gemma3_text"])


def _hint(model_type: str, config: Mapping[str, Any]) -> str:
    """Why a known relative of a supported family is not supported itself."""
    expert_keys = ("num_experts", "num_local_experts", "n_routed_experts")
    if "moe" in model_type or any(config.get(key) for key in expert_keys):
        return " (mixture-of-experts layers are not implemented)"
    if any(key in config for key in ("vision_config", "audio_config", "text_config")):
        return " (it is multimodal; gemma3 is the only such family whose language model can be read)"
    if config.get("is_encoder_decoder"):
        return " (it is an encoder-decoder; only decoder-only models are implemented)"
    return ""


def _layers(keys: Keys, head_dim: int) -> tuple[tuple[LayerConfig, ...], int]:
    """Every layer's RoPE and window, and the longest context the file declares."""
    max_positions = keys.integer("max_position_embeddings")
    layer_types = _layer_types(keys)
    window = _window(keys)
    if window is None and "sliding_attention" in layer_types:
        raise keys.error("layer_types", "has sliding_attention layers, but no sliding_window is in use")
    ropes = {kind: rope_config(keys, head_dim, max_positions, kind) for kind in dict.fromkeys(layer_types)}
    for rope in ropes.values():
        # These two say how far they stretch the context, whatever max_position_embeddings says.
        if rope.kind in ("dynamic", "yarn"):
            max_positions = max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    if window is not None and window >= max_positions:
        window = None  # as in Phi-3-mini-128k: never reached, and plain causal attention is faster
    layers = tuple(
        LayerConfig(
            rope=ropes[kind] if has_rope else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, has_rope in zip(layer_types, _rope_layers(keys, len(layer_types)), strict=True)
    )
    return layers, max_positions


def _window(keys: Keys) -> int | None:
    if "use_sliding_window" in keys.defaults and not keys.flag("use_sliding_window"):
        return None
    return keys.optional_integer("sliding_window")


def _layer_types(keys: Keys) -> list[str]:
    """`layer_types` if the file has it, else what transformers derives from the older keys of the family."""
    count = keys.integer("num_hidden_layers", most=10_000)
    given = keys.optional_list("layer_types", count)
    if given is not None:
        for kind in given:
            if kind not in ("full_attention", "sliding_attention"):
                raise keys.error("layer_types", f"has {show(kind)}; known are full_attention and sliding_attention")
        return given
    family = keys.defaults["model_type"]
    if family == "gemma3_text":
        pattern = keys.integer("sliding_window_pattern")
        slides = [(i + 1) % pattern != 0 for i in range(count)]
    elif _window(keys) is None or family in ("llama", "olmo2", "granite", "glm4"):
        slides = [False] * count
    elif family == "gemma2":
        slides = [i % 2 == 0 for i in range(count)]
    elif family in ("qwen2", "qwen3"):
        full_layers = keys.integer("max_window_layers", least=0)
        slides = [i >= full_layers for i in range(count)]
    elif family == "smollm3":
        slides = [not has_rope for has_rope in _rope_layers(keys, count)]
    else:
        slides = [True] * count
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _rope_layers(keys: Keys, count: int) -> list[bool]:
    """Which layers have positions: all, except in SmolLM3."""
    if keys.defaults["model_type"] != "smollm3":
        return [True] * count
    given = keys.optional_list("no_rope_layers", count)
    if given is not None:
        return [bool(flag) for flag in given]  # 1 means RoPE, against the name
    interval = keys.integer("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(count)]


def _activation(keys: Keys, key: str) -> str:
    name = keys.text(key)
    if name not in ACTIVATIONS:
        raise keys.error(key, f"is not supported; supported are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def _eos_token_ids(
    keys: Keys,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    extra: Iterable[int],
    vocab_size: int,
) -> tuple[int, ...]:
    """All end-of-sequence ids named anywhere, sorted; the family's default only if none is named.

    Ids outside the vocabulary, which some files have, cannot be sampled and are left out.
    """
    found = set(extra)
    for source in (keys.values, config, generation_config or {}):
        found.update(_id_list(keys, source.get("eos_token_id")))
    found = found or set(_id_list(keys, keys.defaults["eos_token_id"]))
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _id_list(keys: Keys, value: Any) -> list[int]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"config.json: eos_token_id is {show(value)}; expected an integer or a list of integers")
    return list(ids)


def _attention_biases(keys: Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def _llama(keys: Keys) -> dict[str, Any]:
    return _attention_biases(keys) | {"mlp_bias": keys.flag("mlp_bias")}


def _gemma(keys: Keys) -> dict[str, Any]:
    if keys.flag("use_bidirectional_attention", null=False):
        raise keys.error("use_bidirectional_attention", "is for embedding models, which are not supported")
    return _attention_biases(keys) | {
        "norm_offset": 1.0,
        "post_norms": True,
        "qk_norm": "head" if keys.defaults["model_type"] == "gemma3_text" else "none",
        "attention_scale": keys.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": keys.optional_number("attn_logit_softcapping"),
        "logits_softcap": keys.optional_number("final_logit_softcapping"),
        "embedding_multiplier": math.sqrt(keys.integer("hidden_size")),
        "embedding_multiplier_rounded": True,
    }


def _granite(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | {
        "attention_scale": keys.number("attention_multiplier"),
        "embedding_multiplier": keys.number("embedding_multiplier"),
        "residual_multiplier": keys.number("residual_multiplier"),
        "logits_divisor": keys.number("logits_scaling"),
    }


_FAMILY_FACTS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda keys: {},
    "qwen2": lambda keys: {"qkv_bias": True},
    "qwen3": lambda keys: _attention_biases(keys) | {"qk_norm": "head"},
    "phi3": lambda keys: {},
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "smollm3": _llama,
    "olmo2": lambda keys: _attention_biases(keys) | {"pre_norms": False, "post_norms": True, "qk_norm": "full"},
    "granite": _granite,
    "glm4": lambda keys: {"qkv_bias": keys.flag("attention_bias"), "post_norms": True},
}
