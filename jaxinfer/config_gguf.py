"""ModelConfig from GGUF metadata.

Keys and their defaults are those of llama.cpp (`src/llama-model.cpp`, `src/models/`, `conversion/`). What
it does not write down is settled here per architecture: which layers slide, what softcaps and scales
default to, which blocks have no positions.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from checkpoints.tensors import TensorInfo
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.config_gguf_keys import GGUFKeys
from jaxinfer.config_gguf_rope import read_rope


@dataclasses.dataclass(frozen=True)
class _Family:
    """What an architecture's name implies, beyond the keys in its files.

    `sliding_period`: where there is a window, every `sliding_period`-th layer has full attention; 0 means
    that all layers slide, None that the architecture has no windows. `wide_scale_layers`: number of layers
    of the one model size whose attention scale is (hidden / heads) ** -0.5 instead of head_dim ** -0.5.
    """

    model_type: str
    qk_norm: Literal["none", "head", "full"] = "none"
    pre_norms: bool = True
    post_norms: bool = False
    gemma: bool = False
    sliding_period: int | None = None
    window: int = 0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    wide_scale_layers: int | None = None


_FAMILIES = {
    "llama": _Family("llama", sliding_period=0),
    "mistral3": _Family("mistral", sliding_period=0),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", qk_norm="head"),
    "phi3": _Family("phi3", sliding_period=0),
    "gemma2": _Family(
        "gemma2",
        post_norms=True,
        gemma=True,
        sliding_period=2,
        window=4096,
        attention_softcap=50.0,
        logits_softcap=30.0,
        wide_scale_layers=46,
    ),
    "gemma3": _Family("gemma3", qk_norm="head", post_norms=True, gemma=True, sliding_period=6, wide_scale_layers=62),
    "smollm3": _Family("smollm3"),
    "olmo2": _Family("olmo2", qk_norm="full", pre_norms=False, post_norms=True, sliding_period=4),
    "granite": _Family("granite"),
    "glm4": _Family("glm4", post_norms=True),
}

# Features that a file may switch on and the decoder does not have, with the value that means off.
_ABSENT = {
    "expert_count": 0,
    "nextn_predict_layers": 0,
    "attention.temperature_scale": 0.0,
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
}

_END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
    }
)
"""Special tokens that end a generation whatever the file's eos key says; many files name only one of two."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read: Callable[[str], np.ndarray]
) -> ModelConfig:
    """Builds the configuration of a GGUF model.

    `metadata` and `tensors` are those of the file; `read` returns a tensor's values and is called for the
    small tensors that hold RoPE factors. Raises ValueError for an unknown architecture, and for keys that
    are missing, malformed, or ask for something that is not supported.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _FAMILIES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}")
    family, keys = _FAMILIES[arch], GGUFKeys(metadata, arch)
    for key, absent in _ABSENT.items():
        if (value := keys.get(key, absent)) != absent:
            raise ValueError(f"{arch}.{key} is {value!r} in the GGUF metadata, which is not supported")
    sections = keys.get("rope.dimension_sections", [])
    if not isinstance(sections, list) or any(sections):
        raise ValueError(f"{arch}.rope.dimension_sections: multimodal RoPE is not supported; use a text-only model")

    hidden_size = keys.integer("embedding_length")
    num_layers = _num_layers(keys, tensors)
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{arch}.attention.head_count {num_heads} is not a multiple of head_count_kv {num_kv_heads}")
    if (value_length := keys.integer("attention.value_length", head_dim)) != head_dim:
        raise ValueError(
            f"{arch}.attention.value_length {value_length} differs from key_length {head_dim}, which is not supported"
        )
    vocab_size = _vocab_size(tensors, hidden_size)
    wide_scale = num_layers == family.wide_scale_layers
    default_scale = (hidden_size // num_heads if wide_scale else head_dim) ** -0.5
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=vocab_size,
        num_tokens=_num_tokens(metadata, vocab_size),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(arch, family, keys, tensors, read, num_layers, head_dim),
        max_position_embeddings=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,  # Gemma's 1 + w: the converters store the sum
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        qk_norm=family.qk_norm,
        activation="gelu_tanh" if family.gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        attention_scale=keys.number("attention.scale", 0.0) or default_scale,
        attention_softcap=keys.number("attn_logit_softcapping", family.attention_softcap) or None,
        logits_softcap=keys.number("final_logit_softcapping", family.logits_softcap) or None,
        embedding_multiplier=hidden_size**0.5 if family.gemma else keys.number("embedding_scale", 0.0) or 1.0,
        embedding_multiplier_rounded=family.gemma,
        residual_multiplier=keys.number("residual_scale", 0.0) or 1.0,
        logits_divisor=keys.number("logit_scale") if arch == "granite" else 1.0,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=_token_id(metadata, "bos", vocab_size),
        eos_token_ids=_eos_token_ids(metadata, vocab_size),
    )


def _num_layers(keys: GGUFKeys, tensors: Mapping[str, TensorInfo]) -> int:
    num_layers = keys.integer("block_count")
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))}
    if len(blocks) != num_layers or max(blocks) != num_layers - 1:
        raise ValueError(
            f"{keys.arch}.block_count is {num_layers} but the GGUF file has tensors of {len(blocks)} blocks; "
            "a part of the model is missing"
        )
    return num_layers


def _vocab_size(tensors: Mapping[str, TensorInfo], hidden_size: int) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise ValueError(
            f"token_embd.weight in the GGUF file has shape {embedding and embedding.shape}; "
            f"expected (vocabulary, {hidden_size})"
        )
    return embedding.shape[0]


def _num_tokens(metadata: Mapping[str, Any], vocab_size: int) -> int:
    """Number of real tokens: converters name the ids that only pad the embedding [PAD{id}]."""
    tokens, types = _tokens(metadata)
    if len(tokens) > vocab_size:
        raise ValueError(f"the GGUF tokenizer has {len(tokens)} tokens, token_embd.weight only {vocab_size} rows")
    count = len(tokens)
    while count and tokens[count - 1] == f"[PAD{count - 1}]" and types[count - 1 : count] in ([], [_UNUSED]):
        count -= 1
    return count or vocab_size


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list) or not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ValueError("tokenizer.ggml.tokens and .token_type in the GGUF metadata must be arrays of one length")
    return tokens, types


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {value!r}; expected an id below {vocab_size}")
    return value


def _eos_token_ids(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids that end a generation: the eos, eot and eom keys, and special tokens that always mean it."""
    named = [_token_id(metadata, name, vocab_size) for name in ("eos", "eot", "eom")]
    tokens, types = _tokens(metadata)
    special = {
        i
        for i, text in enumerate(tokens)
        if isinstance(text, str) and text in _END_TEXTS and (not types or types[i] in (_CONTROL, _USER_DEFINED))
    }
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *sorted(special)]))


def _layers(
    arch: str,
    family: _Family,
    keys: GGUFKeys,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    num_layers: int,
    head_dim: int,
) -> tuple[LayerConfig, ...]:
    rope = read_rope(keys, tensors, read, head_dim, interleaved=arch == "glm4")
    sliding_rope = rope
    if arch in ("gemma3", "olmo2"):  # their sliding layers keep the plain RoPE when the full ones are scaled
        theta = keys.number("rope.freq_base_swa", 10000.0 if arch == "gemma3" else rope.theta)
        sliding_rope = RopeConfig("default", theta, rope.rotary_dim)
    window = keys.integer("attention.sliding_window", family.window, minimum=0)
    slides = _sliding_layers(family, keys, num_layers) if window else [False] * num_layers

    # Granite 4 without positions marks it here; llama.cpp reads the key for granite alone.
    no_rope = arch == "granite" and keys.get("rope.scaling.finetuned", True) is False
    layers = []
    for i, sliding in enumerate(slides):
        positions = sliding_rope if sliding else rope
        if no_rope or (arch == "smollm3" and (i + 1) % 4 == 0):
            positions = None
        layers.append(LayerConfig(rope=positions, window=window if sliding else None))
    return tuple(layers)


def _sliding_layers(family: _Family, keys: GGUFKeys, num_layers: int) -> list[bool]:
    if family.sliding_period is None:
        return [False] * num_layers
    pattern = keys.get("attention.sliding_window_pattern", family.sliding_period)
    if isinstance(pattern, list) and len(pattern) >= num_layers:
        return [bool(slides) for slides in pattern[:num_layers]]
    if type(pattern) is not int or pattern < 0:
        raise ValueError(
            f"{keys.arch}.attention.sliding_window_pattern in the GGUF metadata must be a period >= 0 "
            f"or an array for {num_layers} layers"
        )
    return [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]
