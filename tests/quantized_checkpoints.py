"""Tiny llama checkpoints with quantised weights, one for each format, beside the same model in float32.

case = quantized_checkpoints.make("gptq", folder)
case.quantized, case.dense       # folders; `dense` has the values, computed one weight at a time
case.values["...q_proj.weight"]  # float32 [out, in]
"""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import packing

from checkpoints.safetensors_file import DTYPES

HIDDEN, FF, VOCAB, HEADS, KV_HEADS, GROUP = 64, 128, 64, 4, 2, 32
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FF,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FF, HIDDEN),
    "mlp.up_proj": (FF, HIDDEN),
    "mlp.down_proj": (HIDDEN, FF),
}

type Tensors = dict[str, np.ndarray]
type Encode = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]
"""Random parts of a weight [out, in] and their values."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def save(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, also of the dtypes that its own library cannot write from NumPy."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def integers(
    bits: int, rng: np.random.Generator, out: int, inputs: int, symmetric: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, zeros, scales = packing.random_weight(rng, out, inputs, GROUP, bits)
    if symmetric:
        zeros[...] = 2 ** (bits - 1)
    return codes, zeros, scales


def in_order(inputs: int) -> np.ndarray:
    return np.arange(inputs) // GROUP


def awq_gemm(rng: np.random.Generator, out: int, inputs: int, bits: int = 4) -> tuple[Tensors, np.ndarray]:
    weight = integers(bits, rng, out, inputs)
    return packing.awq_gemm(*weight, bits), packing.values(*weight, in_order(inputs))


def awq_gemv(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    codes, zeros, scales = integers(4, rng, out, inputs)
    padding = ((0, 0), (0, 32 - inputs // GROUP))  # groups of 32 are padded to four words
    parts = {
        "qweight": packing.pack_rows(codes, 4),
        "qzeros": packing.pack_rows(np.pad(zeros, padding), 4),
        "scales": np.pad(scales, padding),
    }
    return parts, packing.values(codes, zeros, scales, in_order(inputs))


def gptq(bits: int, version: int, act_order: bool = False, symmetric: bool = False) -> Encode:
    def encode(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        codes, zeros, scales = integers(bits, rng, out, inputs, symmetric)
        # q, k and v see the same inputs, so that GPTQ gives them the same order.
        order = np.random.default_rng(inputs).permutation(in_order(inputs)) if act_order else in_order(inputs)
        return packing.gptq(codes, zeros, scales, bits, version, order), packing.values(codes, zeros, scales, order)

    return encode


def gptq_own_order(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """Each weight in an order of its own: nothing can be joined."""
    codes, zeros, scales = integers(4, rng, out, inputs)
    order = rng.permutation(in_order(inputs))
    return packing.gptq(codes, zeros, scales, 4, 1, order), packing.values(codes, zeros, scales, order)


def packed_integers(bits: int, symmetric: bool, order: bool = False) -> Encode:
    def encode(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        codes, zeros, scales = integers(bits, rng, out, inputs, symmetric)
        groups = np.random.default_rng(inputs).permutation(in_order(inputs)) if order else in_order(inputs)
        parts = {
            "weight_packed": packing.pack_rows(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array([out, inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = packing.pack_columns(zeros, bits)
        if order:
            parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, packing.values(codes, zeros, scales, groups)

    return encode


def packed_channel(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """One scale and one zero an output."""
    codes, zeros, scales = packing.random_weight(rng, out, inputs, inputs, 4)
    parts = {
        "weight_packed": packing.pack_rows(codes, 4),
        "weight_scale": scales,
        "weight_shape": np.array([out, inputs]),
        "weight_zero_point": packing.pack_columns(zeros, 4),
    }
    return parts, packing.values(codes, zeros, scales, np.zeros(inputs, int))


def int8(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    weight = rng.integers(-128, 128, (out, inputs)).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, (out, 1)).astype(ml_dtypes.bfloat16)
    parts = {"weight": weight, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    return parts, weight.astype(np.float32) * scale.astype(np.float32)


def fp8(
    name: str,
    scale_shape: Callable[[int, int], tuple[int, ...]],
    block: tuple[int, int] = (1, 1),
    dtype: type = ml_dtypes.float8_e4m3fn,
    scale_dtype: type = np.float32,
) -> Encode:
    def encode(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        weight = rng.normal(0, 2, (out, inputs)).astype(dtype)
        stored = rng.uniform(0.01, 0.1, scale_shape(out, inputs)).astype(scale_dtype)
        scale = stored.astype(np.float32)
        spread = scale
        if block != (1, 1):
            spread = scale[np.arange(out)[:, None] // block[0], np.arange(inputs)[None, :] // block[1]]
        return {"weight": weight, name: stored}, weight.astype(np.float32) * spread

    return encode


def fp4(rng: np.random.Generator, out: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, (out, inputs), dtype=np.uint8)
    return codes, (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(codes_name: str, global_name: str) -> Encode:
    def encode(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        codes, packed = fp4(rng, out, inputs)
        scale = rng.uniform(1, 300, (out, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
        factor = np.float32(2.0**-10)
        stored = factor if global_name == "weight_scale_2" else np.float32(1) / factor
        parts = {codes_name: packed, "weight_scale": scale, global_name: np.array([stored])}
        return parts, E2M1[codes] * np.repeat(scale.astype(np.float32), 16, axis=1) * factor

    return encode


def mxfp4(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    codes, packed = fp4(rng, out, inputs)
    exponent = rng.integers(118, 124, (out, inputs // 32), dtype=np.uint8)
    scale = np.float32(2) ** (exponent.astype(np.float32) - 127)
    return {"weight_packed": packed, "weight_scale": exponent}, E2M1[codes] * np.repeat(scale, 32, axis=1)


def nf4(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    book = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
    codes = rng.integers(0, 16, out * inputs, dtype=np.uint8)
    outer_map = np.linspace(-1, 1, 256, dtype=np.float32)
    inner = rng.integers(0, 256, out * inputs // 64, dtype=np.uint8)
    outer = rng.uniform(0.1, 0.2, -(-inner.size // 16)).astype(np.float32)
    state = {"shape": [out, inputs], "blocksize": 64, "quant_type": "nf4", "nested_blocksize": 16, "nested_offset": 0.5}
    absmax = np.array([outer_map[code] * outer[i // 16] for i, code in enumerate(inner)], np.float32) + np.float32(0.5)
    parts = {
        "weight": (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1),
        "weight.absmax": inner,
        "weight.quant_map": book,
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": outer_map,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return parts, (book[codes] * np.repeat(absmax, 64)).reshape(out, inputs)


def hqq(bits: int) -> Encode:
    def encode(rng: np.random.Generator, out: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 2**bits, (out * inputs // GROUP, GROUP), dtype=np.uint8)
        scale = rng.uniform(0.01, 0.05, (len(codes), 1)).astype(np.float16)
        zero = rng.uniform(0, 2**bits - 1, (len(codes), 1)).astype(np.float16)
        folds = codes.reshape(8 // bits, -1, GROUP)
        packed = np.zeros_like(folds[0])
        for fold in folds:  # the first in the highest bits
            packed = (packed << bits if bits < 8 else packed) | fold
        numbers = {"nbits": bits, "group_size": GROUP, "axis": 1, "view_as_float": 0, "offload_meta": 0}
        parts = {"W_q": packed, "scale": scale, "zero": zero, "shape": np.array([out, inputs])}
        parts |= {name: np.array(number, np.int32) for name, number in numbers.items()}
        parts["packing"] = np.frombuffer(b"4bit_u8", np.uint8)
        minimum = -(zero.astype(np.float32) * scale.astype(np.float32))
        return parts, (codes * scale.astype(np.float32) + minimum).reshape(out, inputs)

    return encode


def compressed(fmt: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP4 = FP8 | {"num_bits": 4}

FORMATS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "awq gemm": (awq_gemm, AWQ | {"version": "gemm"}),
    "awq 8 bits": (functools.partial(awq_gemm, bits=8), AWQ | {"bits": 8}),
    "awq gemv": (awq_gemv, AWQ | {"version": "GEMV"}),
    "gptq": (gptq(4, 1), GPTQ | {"checkpoint_format": "gptq"}),
    "gptq v2": (gptq(4, 2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq mislabelled": (gptq(4, 2, symmetric=True), GPTQ | {"sym": True, "checkpoint_format": "gptq"}),
    "gptq act-order": (gptq(4, 1, act_order=True), GPTQ | {"desc_act": True}),
    "gptq own order": (gptq_own_order, GPTQ | {"desc_act": True}),
    "gptq 2 bits": (gptq(2, 1), GPTQ | {"bits": 2}),
    "gptq 3 bits": (gptq(3, 1), GPTQ | {"bits": 3}),
    "gptq 8 bits": (gptq(8, 1), GPTQ | {"bits": 8}),
    "gptq dynamic": (gptq(8, 1), GPTQ | {"dynamic": {"+:.*_proj": {"bits": 8}, "-:lm_head": {}}}),
    "packed int4": (packed_integers(4, True), compressed("pack-quantized", **INT4, symmetric=True)),
    "packed int4 asymmetric": (packed_integers(4, False), compressed("pack-quantized", **INT4, symmetric=False)),
    "packed int4 order": (packed_integers(4, True, True), compressed("pack-quantized", **INT4, symmetric=True)),
    "packed int4 channel": (
        packed_channel,
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False),
    ),
    "packed int8 asymmetric": (
        packed_integers(8, False),
        compressed("pack-quantized", **INT4 | {"num_bits": 8}, symmetric=False),
    ),
    "packed int8": (packed_integers(8, True), compressed("pack-quantized", **INT4 | {"num_bits": 8}, symmetric=True)),
    "int8": (int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)),
    "fp8 tensor": (fp8("weight_scale", lambda o, i: (1,)), compressed("naive-quantized", strategy="tensor", **FP8)),
    "fp8 channel": (fp8("weight_scale", lambda o, i: (o, 1)), compressed("float-quantized", strategy="channel", **FP8)),
    "fp8 blocks": (
        fp8("weight_scale_inv", lambda o, i: (-(-o // 48), -(-i // 48)), (48, 48)),
        {"quant_method": "fp8", "weight_block_size": [48, 48], "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8 whole blocks": (
        fp8("weight_scale", lambda o, i: (o // 32, i // 16), (32, 16), scale_dtype=ml_dtypes.bfloat16),
        compressed("float-quantized", strategy="block", block_structure=[32, 16], **FP8),
    ),
    "fp8 e5m2 powers of two": (
        fp8(
            "weight_scale_inv", lambda o, i: (o // 32, i // 32), (32, 32),
            ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu,
        ),
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    ),
    "nvfp4": (
        nvfp4("weight_packed", "weight_global_scale"),
        compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **FP4),
    ),
    "nvfp4 modelopt": (nvfp4("weight", "weight_scale_2"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", strategy="group", group_size=32, **FP4)),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "hqq": (hqq(4), {"quant_method": "hqq", "skip_modules": ["lm_head"]}),
    "hqq 8 bits": (hqq(8), {"quant_method": "hqq", "skip_modules": ["lm_head"]}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    quantized: pathlib.Path
    dense: pathlib.Path
    tensors: Tensors
    values: Tensors
    config: dict[str, Any]

    def rewrite(self, tensors: Tensors, config: dict[str, Any] | None = None) -> pathlib.Path:
        """The quantised folder again, with other content."""
        write(self.quantized, tensors, self.config if config is None else config)
        return self.quantized


def write(folder: pathlib.Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", tensors)


def plain_tensors(rng: np.random.Generator, prefix: str = "model.") -> Tensors:
    """All but the linear weights of the layers."""
    return {
        f"{prefix}embed_tokens.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        f"{prefix}norm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}layers.0.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": rng.normal(0, 0.2, (VOCAB, HIDDEN)).astype(np.float32),
    }


@functools.cache
def _content(name: str, prefix: str) -> tuple[Tensors, Tensors]:
    encode, _ = FORMATS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    plain = plain_tensors(rng, prefix)
    parts, values = dict(plain), dict(plain)
    for module, (out, inputs) in LINEAR.items():
        module_parts, dense = encode(rng, out, inputs)
        parts |= {f"{prefix}layers.0.{module}.{part}": array for part, array in module_parts.items()}
        values[f"{prefix}layers.0.{module}.weight"] = dense.astype(np.float32)
    return parts, values


def make(name: str, folder: pathlib.Path, prefix: str = "model.") -> Case:
    """Writes both checkpoints of a format into `folder`."""
    parts, values = (dict(tensors) for tensors in _content(name, prefix))
    config = CONFIG | {"quantization_config": FORMATS[name][1]}
    write(folder / "quantized", parts, config)
    write(folder / "dense", values, CONFIG)
    return Case(folder / "quantized", folder / "dense", parts, values, config)
