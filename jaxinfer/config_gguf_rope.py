"""RopeConfig from GGUF metadata and from the tensors that hold RoPE factors."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from checkpoints.tensors import TensorInfo
from jaxinfer.config import RopeConfig
from jaxinfer.config_gguf_keys import GGUFKeys


def read_rope(
    keys: GGUFKeys,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    head_dim: int,
    interleaved: bool,
) -> RopeConfig:
    """The RoPE of the layers with full attention.

    `read` returns a tensor's values; it is called for the tensors with per-frequency factors:
    `rope_freqs.weight`, which Llama 3.x files have in place of the parameters of its scaling, and the two
    of longrope. Raises ValueError for scaling that is malformed or not supported.
    """
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{keys.arch}.rope.dimension_count is {rotary_dim}; expected an even number <= {head_dim}")

    def factors(name: str) -> tuple[float, ...]:
        if name not in tensors:
            return ()
        if tensors[name].shape != (rotary_dim // 2,):
            raise ValueError(f"{name} has shape {tensors[name].shape} in the GGUF file; expected ({rotary_dim // 2},)")
        values = read(name).astype(np.float64)
        if not np.all((values > 0) & np.isfinite(values)):
            raise ValueError(f"{name} in the GGUF file must hold finite numbers > 0")
        return tuple(values.tolist())

    plain = RopeConfig(
        kind="default",
        theta=keys.number("rope.freq_base", 10000.0),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        frequency_divisors=factors("rope_freqs.weight"),
    )
    short, long = factors("rope_factors_short.weight"), factors("rope_factors_long.weight")
    # Files without a type mean linear, by whichever of the two keys gives a factor.
    scaling = keys.get("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if short or long or scaling == "longrope":
        return _longrope(plain, keys, short, long)
    if scaling == "yarn":
        return _yarn(plain, keys, factor)
    if scaling == "none" or (scaling == "linear" and factor in (0.0, 1.0)):
        return plain
    if scaling == "linear":
        return dataclasses.replace(plain, kind="linear", factor=factor)
    raise ValueError(
        f"{keys.arch}.rope.scaling.type is {scaling!r} in the GGUF metadata; supported are none, linear, yarn, longrope"
    )


def _longrope(plain: RopeConfig, keys: GGUFKeys, short: tuple[float, ...], long: tuple[float, ...]) -> RopeConfig:
    if not short or not long:
        raise ValueError("longrope needs rope_factors_short.weight and rope_factors_long.weight in the GGUF file")
    original = keys.integer("rope.scaling.original_context_length", minimum=2)
    factor = keys.integer("context_length") / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return dataclasses.replace(
        plain,
        kind="longrope",
        factor=factor,
        attention_factor=keys.number("rope.scaling.attn_factor", default),
        original_max_position_embeddings=original,
        short_factor=short,
        long_factor=long,
    )


def _yarn(plain: RopeConfig, keys: GGUFKeys, factor: float) -> RopeConfig:
    if factor < 1:
        raise ValueError(f"{keys.arch}.rope.scaling.factor is {factor} in the GGUF metadata; yarn needs one >= 1")
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    mscale = (0.1 * math.log(factor) + 1) / (0.1 * log_multiplier * math.log(factor) + 1)
    return dataclasses.replace(
        plain,
        kind="yarn",
        factor=factor,
        attention_factor=keys.number("rope.scaling.yarn_attn_factor", mscale) * plain.attention_factor,
        original_max_position_embeddings=keys.integer("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )
