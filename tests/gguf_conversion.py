"""Converts the tiny Hugging Face checkpoints of `families` to GGUF, by the rules of llama.cpp's converters.

gguf-py gives the tensor names and the metadata keys; what the converters do beyond that (rows of interleaved RoPE,
norms plus one, factors as tensors) is written out here.
"""

import pathlib
from typing import Any

import gguf
import numpy as np
from families import FamilyCase
from gguf import MODEL_ARCH

from checkpoints.safetensors import SafetensorsFolder

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "phi3": MODEL_ARCH.PHI3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma3": MODEL_ARCH.GEMMA3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo2": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    "glm4": MODEL_ARCH.GLM4,
}

NOT_IN_GGUF = {
    "llama_rope_dynamic": "converters do not write dynamic RoPE",
    "llama_rope_dynamic_below": "converters do not write dynamic RoPE",
    "llama_rope_yarn_mscale": "ggml always truncates YaRN's dimensions",
    "qwen2_sliding": "converters do not write a window for qwen2",
}
"""Cases that a GGUF file cannot express."""

INTERLEAVED = (MODEL_ARCH.LLAMA, MODEL_ARCH.GRANITE, MODEL_ARCH.SMOLLM3)


def convert(case: FamilyCase, path: pathlib.Path) -> pathlib.Path:
    """Writes the checkpoint as float32 GGUF and returns the path."""
    config = case.config.get("text_config", case.config)
    arch = ARCHITECTURES[case.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_metadata(writer, case, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    checkpoint = SafetensorsFolder(case.folder)
    for name in checkpoint.tensors:
        if "vision" in name or "projector" in name:
            continue
        text_name = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        stored = names.get_name(text_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensor = checkpoint.read(name).astype(np.float32)
        writer.add_tensor(stored, converted(tensor, text_name, arch, config))
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tensor: np.ndarray, name: str, arch: MODEL_ARCH, config: dict[str, Any]) -> np.ndarray:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    projection = name.split(".")[-2]
    if arch in INTERLEAVED and projection in heads:
        halves = tensor.reshape(heads[projection], 2, -1, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters in either spelling, those of the full layers where layer types differ."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    return parameters | {"rope_type": kind, "rope_theta": theta}


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope = rope_of(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in ("long", "short")}
    if rope["rope_type"] != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def add_metadata(writer: gguf.GGUFWriter, case: FamilyCase, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = rope_of(config)
    context = config["max_position_embeddings"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(head_dim * partial))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if rope["rope_type"] == "longrope":
        original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(context / original) / np.log(original))))
    if config.get("sliding_window") and case.model_type != "qwen2":
        writer.add_sliding_window(config["sliding_window"])
    add_multipliers(writer, case, config)
    tokens = [f"[PAD{i}]" if i >= case.num_tokens else f"t{i}" for i in range(config["vocab_size"])]
    writer.add_token_list(tokens)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def add_multipliers(writer: gguf.GGUFWriter, case: FamilyCase, config: dict[str, Any]) -> None:
    if case.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if case.model_type.startswith("gemma"):
        # Converters leave these two to llama.cpp, which knows the released sizes; these are none of them.
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        if "gemma3" in case.model_type:
            if (period := config.get("sliding_window_pattern")) is not None:
                writer.add_sliding_window_pattern(period)
            else:
                writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
            local = config.get("rope_local_base_freq") or config["rope_parameters"]["sliding_attention"]["rope_theta"]
            writer.add_rope_freq_base_swa(local)
    if case.model_type == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
