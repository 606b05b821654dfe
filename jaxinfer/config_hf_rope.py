"""RopeConfig from the several places and spellings in which a `config.json` keeps RoPE parameters.

`rope_parameters` (transformers 5) comes before `rope_scaling` (transformers 4), both before top-level keys.
Either is one dictionary or one for each layer type. Its type is under `rope_type` or, in older files, `type`.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxinfer.config import RopeConfig, RopeKind
from jaxinfer.config_keys import Keys, show

_LAYER_TYPES = ("full_attention", "sliding_attention")
_DEFAULTS = {
    "attention_factor": None,
    "beta_fast": None,
    "beta_slow": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}


def rope_config(keys: Keys, head_dim: int, max_position_embeddings: int, layer_type: str) -> RopeConfig:
    """The RoPE of one layer type, all resolved. Raises ValueError for unknown types and missing keys."""
    family = keys.defaults["model_type"]
    name, parameters = _parameters(keys, layer_type)
    theta_key = "rope_theta"
    if family == "gemma3_text" and layer_type == "sliding_attention":
        theta_key = "rope_local_base_freq"
    top_level = {
        "rope_theta": keys.number(theta_key) if keys.has(theta_key) else keys.defaults[theta_key],
        "partial_rotary_factor": keys.number("partial_rotary_factor"),
    }
    found = keys.nested(name, parameters, top_level | _DEFAULTS)
    kind = _kind(found, family)
    theta = found.number("rope_theta")
    if theta <= 1:
        raise found.error("rope_theta", "is not above 1")
    rotary_dim = int(head_dim * found.number("partial_rotary_factor"))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim or (kind == "dynamic" and rotary_dim == 2):
        raise found.error("partial_rotary_factor", f"rotates {rotary_dim} of {head_dim} dimensions of a head")
    common: dict[str, Any] = {
        "kind": kind,
        "theta": theta,
        "rotary_dim": rotary_dim,
        "interleaved": family == "glm4",
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, factor=found.number("factor"))
    if kind == "dynamic":
        # transformers measures growth from max_position_embeddings, whatever else the file says.
        original = max_position_embeddings
        return RopeConfig(**common, factor=found.number("factor"), original_max_position_embeddings=original)
    original = _original_length(keys, found, max_position_embeddings)
    common["original_max_position_embeddings"] = original
    if kind == "llama3":
        return RopeConfig(**common, **_llama3(found))
    # YaRN may say null, LongRoPE may say nothing: then the lengths give the factor.
    factor = found.optional_number("factor") if kind == "yarn" or found.has("factor") else None
    factor = factor or max_position_embeddings / original
    if kind == "yarn":
        return RopeConfig(**common, **_yarn(found, factor))
    attention_factor = found.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        **common,
        factor=factor,
        attention_factor=attention_factor,
        short_factor=found.numbers("short_factor", rotary_dim // 2),
        long_factor=found.numbers("long_factor", rotary_dim // 2),
    )


def _parameters(keys: Keys, layer_type: str) -> tuple[str, Mapping[str, Any]]:
    """The name and contents of the dictionary that holds for `layer_type`; empty if there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        value = keys.values.get(key)
        if not value:
            continue
        if not isinstance(value, Mapping):
            raise keys.error(key, "must be a dictionary")
        if not any(name in value for name in _LAYER_TYPES):
            # Gemma 3 stretches only its full-attention layers, and older files do not say so.
            if keys.defaults["model_type"] == "gemma3_text" and layer_type == "sliding_attention":
                return key, {}
            return key, value
        nested = value.get(layer_type)
        if nested is None and keys.defaults["model_type"] == "gemma3_text":
            return key, {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"{keys.place}: {key} has no dictionary for {layer_type}, which layer_types names")
        return f"{key}.{layer_type}", nested
    return "rope_scaling", {}


def _kind(found: Keys, family: str) -> RopeKind:
    given = found.values.get("rope_type") or found.values.get("type") or "default"
    kinds: dict[Any, RopeKind] = {kind: kind for kind in get_args(RopeKind)}
    # Phi-3's first files call LongRoPE "su", some "yarn".
    aliases: dict[Any, RopeKind] = {"su": "longrope"}
    if family == "phi3":
        aliases["yarn"] = "longrope"
    kind = (kinds | aliases).get(given) if isinstance(given, str) else None
    if kind is None:
        known = ", ".join(kinds)
        raise ValueError(f"{found.place}: rope_type {show(given)} is not supported; supported are {known}")
    return kind


def _original_length(keys: Keys, found: Keys, max_position_embeddings: int) -> int:
    """Context length before scaling: at the top level (Phi-3), in the dictionary, or the family's default."""
    key = "original_max_position_embeddings"
    for place in (keys, found):
        if place.has(key):
            return place.integer(key, least=2)
    return keys.integer(key) if key in keys.defaults else max(max_position_embeddings, 2)


def _llama3(found: Keys) -> dict[str, Any]:
    low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
    if low >= high:
        raise found.error("low_freq_factor", f"must be below high_freq_factor {high}")
    return {"factor": found.number("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(found: Keys, factor: float) -> dict[str, Any]:
    attention_factor = found.optional_number("attention_factor")
    if attention_factor is None:
        # transformers takes 0 for absent.
        names = ("mscale", "mscale_all_dim")
        mscale, mscale_all_dim = (found.number(name) if found.values.get(name) else None for name in names)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": found.optional_number("beta_fast") or 32.0,
        "beta_slow": found.optional_number("beta_slow") or 1.0,
        "truncate": found.flag("truncate"),
    }


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
