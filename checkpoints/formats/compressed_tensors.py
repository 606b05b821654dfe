"""Integer weights of compressed-tensors: pack-quantized (1 to 8 bits in words) and int-quantized (int8).

    weight_packed int32 [out, ceil(in * bits / 32)]    codes + 2**(bits - 1), a stream of fields along the inputs
    weight_scale [out, groups], [out, 1] or [1]
    weight_shape int64 [2] or int32 [2]                (out, in)
    weight_zero_point int32 [ceil(out * bits / 32), groups]    if asymmetric; a stream along the outputs
    weight_g_idx int32 [in]                            if the groups are in activation order

    weight int8 [out, in], weight_scale as above, weight_zero_point int8 like the scale

The value is scale * (code - zero) with signed codes and zeros; both are stored with the same offset. Until version
0.13 fields of 3, 5, 6 and 7 bits did not straddle words; the width tells which it is. Where neither that of the weight
nor that of its zero points tells, which takes fewer than 160 inputs, they straddle, as the library reads every file.
https://github.com/vllm-project/compressed-tensors
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.bits import fields, padded_fields
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.gptq import group_order, has_order
from checkpoints.formats.parts import SCALE_DTYPES, check_group, expect, misfit
from checkpoints.tensors import TensorInfo

MAX_FEATURES = 2**31


def packed_shape(
    infos: Mapping[str, TensorInfo], stated: np.ndarray, bits: int | None, group_size: int | None, where: str
) -> tuple[int, int]:
    """Checks the tensors of a pack-quantized weight; `stated` is the content of weight_shape. Returns (out, in)."""
    expect(infos["weight_packed"], ("I32",), 2, where)
    expect(infos["weight_scale"], SCALE_DTYPES, None, where)
    expect(infos["weight_shape"], ("I64", "I32"), 1, where)
    out_features, words = infos["weight_packed"].shape
    size = [int(n) for n in stated.reshape(-1)]
    if len(size) != 2 or size[0] != out_features or not 1 <= size[1] <= MAX_FEATURES:
        raise CheckpointError(
            f"{where}: weight_shape is {size}, weight_packed has {out_features} rows; "
            "the file is damaged: download it again"
        )
    in_features = size[1]
    bits = field_bits(words, in_features, bits, where)
    groups = _num_groups(infos["weight_scale"], out_features, where)
    check_group(in_features, groups, group_size, where, indexed="weight_g_idx" in infos)
    if "weight_zero_point" in infos:
        expect(infos["weight_zero_point"], ("I32",), 2, where)
        widths = {math.ceil(out_features * bits / 32), math.ceil(out_features / (32 // bits))}
        if infos["weight_zero_point"].shape not in {(width, groups) for width in widths}:
            raise misfit(infos["weight_zero_point"], (min(widths), groups), where)
    if "weight_g_idx" in infos:
        expect(infos["weight_g_idx"], ("I32", "I64"), 1, where)
        if infos["weight_g_idx"].shape != (in_features,):
            raise misfit(infos["weight_g_idx"], (in_features,), where)
    return out_features, in_features


def decode_packed(
    parts: Mapping[str, np.ndarray], bits: int | None, group_size: int | None, where: str
) -> QuantizedTensor:
    """A pack-quantized weight whose shapes `packed_shape` has checked."""
    packed = parts["weight_packed"]
    out_features, in_features = (int(n) for n in parts["weight_shape"].reshape(-1))
    bits = field_bits(packed.shape[1], in_features, bits, where)
    straddles = _straddles(packed.shape[1], in_features, bits)
    stored_zeros = parts["weight_zero_point"].T if "weight_zero_point" in parts else None
    zeros_straddle = None if stored_zeros is None else _straddles(stored_zeros.shape[1], out_features, bits)
    # Weight and zeros were packed by the same version: one may tell of the other.
    take = padded_fields if (zeros_straddle if straddles is None else straddles) is False else fields
    scales = _by_row(parts["weight_scale"], out_features)
    groups = scales.shape[1]
    g_idx = parts.get("weight_g_idx")
    size = check_group(in_features, groups, group_size, where, indexed=has_order(g_idx))
    order = group_order(g_idx, size, groups, in_features, where)
    container: Literal[4, 8] = 4 if bits <= 4 else 8
    zeros, shift = None, np.uint8(2 ** (container - 1) - 2 ** (bits - 1))
    if stored_zeros is not None:
        unpack = take if zeros_straddle is None else fields if zeros_straddle else padded_fields
        zeros, shift = np.ascontiguousarray(unpack(stored_zeros, bits)[:, :out_features].T), np.uint8(0)

    def rows(start: int, stop: int) -> Codes:
        codes = take(packed[start:stop], bits)[:, :in_features]
        if shift:
            codes = codes + shift
        offsets = None if zeros is None else zeros[start:stop]
        return order.apply(Codes(codes, scales[start:stop], offsets, None, container, size))

    return QuantizedTensor((out_features, in_features), rows, order.permutation)


def _straddles(words: int, count: int, bits: int) -> bool | None:
    """Whether fields straddle the words that they fill; None where that many words hold them either way."""
    dense, padded = math.ceil(count * bits / 32), math.ceil(count / (32 // bits))
    return None if dense == padded else words == dense


def field_bits(words: int, in_features: int, bits: int | None, where: str) -> int:
    """The width of a code: that of the configuration, or without one the only power of two that fits."""
    candidates = (bits,) if bits is not None else (2, 4, 8)
    for candidate in candidates:
        if not 1 <= candidate <= 8:
            raise CheckpointError(f"{where}: num_bits is {candidate}; expected 1 to 8: use the original model")
        if words in (math.ceil(in_features * candidate / 32), math.ceil(in_features / (32 // candidate))):
            return candidate
    told = "2, 4 or 8 bits" if bits is None else f"{bits} bits, as quantization_config says"
    raise CheckpointError(
        f"{where}: {words} words a row do not hold {in_features} codes of {told}; "
        "configuration and weights are of different models: download both from one revision"
    )


def int8_shape(infos: Mapping[str, TensorInfo], group_size: int | None, where: str) -> tuple[int, int]:
    """Checks an int8 weight and its scales; returns (out, in)."""
    expect(infos["weight"], ("I8",), 2, where)
    expect(infos["weight_scale"], SCALE_DTYPES, None, where)
    out_features, in_features = infos["weight"].shape
    groups = _num_groups(infos["weight_scale"], out_features, where)
    check_group(in_features, groups, None if groups == 1 else group_size, where)
    if "weight_zero_point" in infos:
        expect(infos["weight_zero_point"], ("I8",), None, where)
        if infos["weight_zero_point"].shape != infos["weight_scale"].shape:
            raise misfit(infos["weight_zero_point"], infos["weight_scale"].shape, where)
    return out_features, in_features


def decode_int8(
    parts: Mapping[str, np.ndarray], bits: int | None, group_size: int | None, where: str
) -> QuantizedTensor:
    """An int8 weight whose shapes `int8_shape` has checked. Of 4 bits, as `bits` may say, the codes are -8 to 7."""
    weight = parts["weight"]
    out_features, in_features = weight.shape
    scales = _by_row(parts["weight_scale"], out_features)
    size = check_group(in_features, scales.shape[1], None if scales.shape[1] == 1 else group_size, where)
    container: Literal[4, 8] = 4 if bits is not None and bits <= 4 else 8
    middle = 2 ** (container - 1)
    zeros = None
    if "weight_zero_point" in parts:
        zeros = _by_row(_unsigned(parts["weight_zero_point"], middle, where, "weight_zero_point"), out_features)

    def rows(start: int, stop: int) -> Codes:
        codes = _unsigned(weight[start:stop], middle, where, "weight")
        return Codes(codes, scales[start:stop], None if zeros is None else zeros[start:stop], None, container, size)

    return QuantizedTensor((out_features, in_features), rows)


def _unsigned(signed: np.ndarray, middle: int, where: str, name: str) -> np.ndarray:
    """int8 codes as uint8 with zero at `middle`."""
    if middle == 8 and signed.size and (int(signed.min()) < -8 or int(signed.max()) > 7):
        raise CheckpointError(
            f"{where}: {name} has codes from {int(signed.min())} to {int(signed.max())}, quantization_config says "
            "4 bits, -8 to 7; configuration and weights are of different models: download both from one revision"
        )
    return signed.view(np.uint8) + np.uint8(middle)


def _num_groups(scale: TensorInfo, out_features: int, where: str) -> int:
    """Groups of a scale [out, groups], [out], [1] or []."""
    match scale.shape:
        case () | (1,) | (1, 1):
            return 1
        case (rows,) | (rows, 1) if rows == out_features:
            return 1
        case (rows, groups) if rows == out_features and groups:
            return groups
    raise misfit(scale, (out_features, 1), where)


def _by_row(values: np.ndarray, out_features: int) -> np.ndarray:
    """Scales of any of these shapes as [out, groups]."""
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (out_features, 1))
    return values.reshape(out_features, -1)
