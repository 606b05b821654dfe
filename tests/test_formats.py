"""Formats of quantised weights: what the libraries that define them pack, and what is packed bit by bit by hand."""

import functools
import json
import pathlib

import ml_dtypes
import numpy as np
import packing
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.formats import awq, bitsandbytes, compressed_tensors, fp4, fp8, gptq, hqq
from checkpoints.formats.bits import fields, padded_fields
from checkpoints.formats.codes import QuantizedTensor
from checkpoints.safetensors_file import SafetensorsFile

WHERE = "layer.weight"
FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "quantized.safetensors"


@functools.cache
def library_cases() -> dict[str, dict[str, np.ndarray]]:
    """Written by tests/oracle/make_quantized.py."""
    file = SafetensorsFile(FIXTURE)
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name in file.tensors:
        case, part = name.split("|")
        cases.setdefault(case, {})[part] = file.read(name)
    return cases


def decode(parts: dict[str, np.ndarray], options: dict) -> tuple[tuple[int, int], QuantizedTensor]:
    """By the parts that are there, as a file's tensors are recognised."""
    infos, bits, group = packing.infos(parts), options.get("bits"), options.get("group_size")
    if "W_q" in parts:
        meta = hqq.read_meta(parts, WHERE)
        return hqq.shape(infos, meta, WHERE), hqq.decode(parts, meta)
    if "weight.absmax" in parts:
        (state_name,) = (name for name in parts if name in bitsandbytes.QUANT_STATES)
        state = bitsandbytes.read_state(parts[state_name], WHERE)
        return bitsandbytes.shape(infos, state, WHERE), bitsandbytes.decode(parts, state)
    if "weight_packed" in parts and parts["weight_packed"].dtype == np.int32:
        shape = compressed_tensors.packed_shape(infos, parts["weight_shape"], bits, group, WHERE)
        return shape, compressed_tensors.decode_packed(parts, bits, group, WHERE)
    if "weight_packed" in parts:
        if "weight_global_scale" not in parts:
            return fp4.shape(infos, "weight_packed", None, WHERE), fp4.decode_mxfp4(parts, WHERE)
        shape = fp4.shape(infos, "weight_packed", "weight_global_scale", WHERE)
        return shape, fp4.decode_nvfp4(parts, "weight_packed", "weight_global_scale", WHERE)
    if "weight" in parts and parts["weight"].dtype == np.int8:
        shape = compressed_tensors.int8_shape(infos, group, WHERE)
        return shape, compressed_tensors.decode_int8(parts, bits, group, WHERE)
    if "weight" in parts:
        block = tuple(options["block"]) if "block" in options else None
        return fp8.shape(infos, "weight_scale", block, WHERE), fp8.decode(parts, "weight_scale", block, WHERE)
    if options.get("gptq"):
        return gptq.shape(infos, bits, group, WHERE), gptq.decode(parts, bits, group, 1, None, WHERE)
    return awq.shape(infos, group, WHERE), awq.decode(parts, group, WHERE)


def all_values(tensor: QuantizedTensor, step: int = 7) -> np.ndarray:
    """Decoded a few rows at a time, at edges that no format's words have."""
    out = np.empty(tensor.shape, np.float32)
    for start in range(0, tensor.shape[0], step):
        stop = min(start + step, tensor.shape[0])
        tensor.read_into(out[start:stop], start, stop)
    return out


ONE_ROUNDING_MORE = ("hqq", "ct_nvfp4")
"""Where a zero or a global scale is multiplied in first; the rest is bit for bit."""


def in_the_librarys_order(parts: dict[str, np.ndarray], codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of codes [out, in] and scales [out, groups] of those, rounded as their libraries round."""
    spread = np.repeat(scales.astype(np.float32), codes.shape[1] // scales.shape[1], axis=1)
    if "weight_global_scale" in parts:
        return np.vectorize(e2m1)(codes).astype(np.float32) * (spread / parts["weight_global_scale"])
    zero = parts["zero"].reshape(-1)
    groups = (
        np.arange(codes.size) * zero.size // codes.size if parts["axis"] == 1 else np.arange(codes.size) % zero.size
    )
    return (codes - zero[groups].reshape(codes.shape)) * spread


@pytest.mark.parametrize("name", sorted(library_cases()))
def test_what_the_libraries_pack_is_what_they_decode(name: str) -> None:
    parts = dict(library_cases()[name])
    expected, options = parts.pop("values"), json.loads(parts.pop("options").tobytes())
    shape, tensor = decode(parts, options | {"gptq": name.startswith("gptq")})
    assert shape == tensor.shape == expected.shape
    if name.startswith(ONE_ROUNDING_MORE):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(all_values(tensor), expected, rtol=2.5e-7, atol=4e-7 * scale)
        everything = tensor.rows(0, shape[0])
        ordered = in_the_librarys_order(parts, everything.codes, everything.scales)
        np.testing.assert_array_equal(ordered, expected)  # codes and scales are the library's own
    else:
        np.testing.assert_array_equal(all_values(tensor), expected)
    codes = tensor.rows(0, 3)
    assert codes.codes.dtype == np.uint8
    assert codes.codes.max() < 2**codes.bits
    assert codes.scales.shape == (3, -(-shape[1] // codes.group_size))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_fields_are_a_stream(bits: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 2**bits, (3, 64), dtype=np.uint8)
    np.testing.assert_array_equal(fields(packing.pack_rows(codes, bits), bits)[:, :64], codes)
    per_word = 32 // bits
    padded = np.array(
        [[packing.words(row[i : i + per_word].tolist(), bits)[0] for i in range(0, 64, per_word)] for row in codes],
        np.int32,
    )
    np.testing.assert_array_equal(padded_fields(padded, bits)[:, :64], codes)


# --- AWQ


@pytest.mark.parametrize(("group", "out_features"), [(64, 32), (128, 24), (-1, 8)])
def test_i5_awq_by_hand(group: int, out_features: int, rng: np.random.Generator) -> None:
    """I5: nibble i of a word is column [0,2,4,6,1,3,5,7][i] in codes and zeros; a zero of 0 stays 0, 15 stays 15."""
    size = 256 if group == -1 else group
    codes, zeros, scales = packing.random_weight(rng, out_features, 256, size, 4)
    parts = packing.awq_gemm(codes, zeros, scales)
    assert awq.shape(packing.infos(parts), group, WHERE) == (out_features, 256)
    tensor = awq.decode(parts, group, WHERE)
    for start, stop in ((0, out_features), (3, 8), (5, 6)):
        rows = tensor.rows(start, stop)
        np.testing.assert_array_equal(rows.codes, codes[start:stop])
        assert rows.offsets is not None
        np.testing.assert_array_equal(rows.offsets, zeros[start:stop])
        np.testing.assert_array_equal(rows.scales, scales[start:stop])
        assert rows.scales.dtype == np.float16
        assert (rows.bits, rows.group_size) == (4, size)
    np.testing.assert_array_equal(all_values(tensor), packing.values(codes, zeros, scales, np.arange(256) // size))


# --- GPTQ


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_by_hand(bits: int, version: int, rng: np.random.Generator) -> None:
    codes, zeros, scales = packing.random_weight(rng, 64, 128, 32, bits)
    parts = packing.gptq(codes, zeros, scales, bits, version)
    assert gptq.shape(packing.infos(parts), bits, 32, WHERE) == (64, 128)
    tensor = gptq.decode(parts, bits, 32, 1 if version == 1 else 2, False, WHERE)
    rows = tensor.rows(0, 64)
    assert rows.offsets is not None
    assert rows.bits == (8 if bits == 8 else 4)
    np.testing.assert_array_equal(rows.codes, codes)
    np.testing.assert_array_equal(rows.offsets, zeros)
    np.testing.assert_array_equal(rows.scales, scales)
    np.testing.assert_array_equal(all_values(tensor), packing.values(codes, zeros, scales, np.arange(128) // 32))


def test_gptq_zero_of_nought_borrows_from_its_neighbour() -> None:
    """Zeros 0, 5, 9, 1, ...: less one each as whole words, 0 becomes 15 and takes one from the next; no zero is 16."""
    zeros = np.array([[0], [5], [9], [1], [0], [0], [15], [8]], np.uint8)
    codes, scales = np.zeros((8, 8), np.uint8), np.ones((8, 1), np.float16)
    parts = packing.gptq(codes, zeros, scales, 4, 1)
    assert parts["qzeros"].view(np.uint32).item() == (0x8F001950 - 0x11111111) % 2**32
    rows = gptq.decode(parts, 4, -1, 1, False, WHERE).rows(0, 8)
    assert rows.offsets is not None
    np.testing.assert_array_equal(rows.offsets, zeros)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored_as", [1, 2])
@pytest.mark.parametrize("labelled", [1, 2])
@pytest.mark.parametrize("symmetric", [True, None])
def test_mislabelled_gptq_zeros(bits: int, stored_as: int, labelled: int, symmetric: bool | None, rng) -> None:
    """Qwen3.5-27B-GPTQ-Int4 says "gptq" and stores zeros of 8 (models.md 3.11): 7 is version 1, 8 version 2."""
    codes, zeros, scales = packing.random_weight(rng, 32, 64, 32, bits)
    zeros[...] = 2 ** (bits - 1)
    parts = packing.gptq(codes, zeros, scales, bits, stored_as)
    rows = gptq.decode(parts, bits, 32, 1 if labelled == 1 else 2, symmetric, WHERE).rows(0, 32)
    assert rows.offsets is not None
    np.testing.assert_array_equal(rows.offsets, zeros)


def test_asymmetric_zeros_that_are_all_alike_follow_the_label() -> None:
    zeros = np.full((8, 1), 7, np.uint8)
    parts = packing.gptq(np.zeros((8, 8), np.uint8), zeros, np.ones((8, 1), np.float16), 4, 2)
    offsets = gptq.decode(parts, 4, -1, 2, False, WHERE).rows(0, 8).offsets
    assert offsets is not None
    np.testing.assert_array_equal(offsets, zeros)


def test_act_order_is_a_permutation_of_inputs(rng: np.random.Generator) -> None:
    codes, zeros, scales = packing.random_weight(rng, 16, 128, 32, 4)
    g_idx = rng.permutation(np.arange(128) // 32)
    parts = packing.gptq(codes, zeros, scales, 4, 1, g_idx)
    gptq.shape(packing.infos(parts), 4, 32, WHERE)
    tensor = gptq.decode(parts, 4, 32, 1, False, WHERE)
    assert tensor.permutation is not None
    np.testing.assert_array_equal(np.sort(tensor.permutation), np.arange(128))
    np.testing.assert_array_equal(tensor.rows(0, 16).codes, codes[:, tensor.permutation])
    np.testing.assert_array_equal(g_idx[tensor.permutation], np.arange(128) // 32)
    expected = packing.values(codes, zeros, scales, g_idx)
    np.testing.assert_array_equal(all_values(tensor), expected)
    in_order = packing.gptq(codes, zeros, scales, 4, 1, np.arange(128) // 32)
    assert gptq.decode(in_order, 4, 32, 1, False, WHERE).permutation is None


def test_groups_of_unequal_size_keep_a_scale_for_each_input(rng: np.random.Generator) -> None:
    codes, zeros, scales = packing.random_weight(rng, 16, 128, 32, 4)
    g_idx = rng.integers(0, 4, 128)
    tensor = gptq.decode(packing.gptq(codes, zeros, scales, 4, 1, g_idx), 4, 32, 1, False, WHERE)
    assert tensor.rows(0, 16).group_size == 1
    np.testing.assert_array_equal(all_values(tensor), packing.values(codes, zeros, scales, g_idx))


@pytest.mark.parametrize("bad", [-5, 4, 2**31 - 1])
def test_group_index_out_of_range(bad: int, rng: np.random.Generator) -> None:
    codes, zeros, scales = packing.random_weight(rng, 16, 128, 32, 4)
    g_idx = np.arange(128) // 32
    g_idx[5] = bad
    with pytest.raises(
        CheckpointError, match=r"layer.weight: the group index runs from .* there are 4 groups; .*again"
    ):
        gptq.decode(packing.gptq(codes, zeros, scales, 4, 1, g_idx), 4, 32, 1, False, WHERE)


# --- compressed-tensors


def whole_codes(bits: int, rows: np.ndarray) -> np.ndarray:
    """Each word holds as many codes as fit whole."""
    per_word = 32 // bits
    starts = range(0, rows.shape[1], per_word)
    return np.array([[packing.words(r[i : i + per_word].tolist(), bits)[0] for i in starts] for r in rows], np.int32)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_odd_widths_packed_without_straddling(bits: int, symmetric: bool, rng: np.random.Generator) -> None:
    """compressed-tensors#715: before #732 a word held 32 // bits whole codes; only the width tells."""
    codes, zeros, scales = packing.random_weight(rng, 16, 96, 32, bits)
    pad = functools.partial(whole_codes, bits)
    parts = {"weight_packed": pad(codes), "weight_scale": scales, "weight_shape": np.array([16, 96])}
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(pad(zeros.T).T)
    compressed_tensors.packed_shape(packing.infos(parts), parts["weight_shape"], bits, 32, WHERE)
    tensor = compressed_tensors.decode_packed(parts, bits, 32, WHERE)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    np.testing.assert_array_equal(all_values(tensor), packing.values(codes, zeros, scales, np.arange(96) // 32))


@pytest.mark.parametrize("out_features", [16, 96])
def test_widths_that_do_not_tell_follow_the_zero_points_then_the_library(
    out_features: int, rng: np.random.Generator
) -> None:
    """A row of 30 codes of 3 bits has three words in either layout; 96 zeros have nine words or ten, 16 have two."""
    codes, zeros, scales = packing.random_weight(rng, out_features, 30, 30, 3)
    expected = packing.values(codes, zeros, scales, np.zeros(30, int))
    common = {"weight_scale": scales, "weight_shape": np.array([out_features, 30])}
    straddling = {"weight_packed": packing.pack_rows(codes, 3), "weight_zero_point": packing.pack_columns(zeros, 3)}
    np.testing.assert_array_equal(
        all_values(compressed_tensors.decode_packed(straddling | common, 3, None, WHERE)), expected
    )
    whole = {"weight_packed": whole_codes(3, codes), "weight_zero_point": whole_codes(3, zeros.T).T}
    assert whole["weight_packed"].shape == straddling["weight_packed"].shape
    read = all_values(compressed_tensors.decode_packed(whole | common, 3, None, WHERE))
    assert np.array_equal(read, expected) == (out_features == 96)


def test_compressed_tensors_activation_order(rng: np.random.Generator) -> None:
    codes, _, scales = packing.random_weight(rng, 16, 128, 32, 4)
    g_idx = rng.permutation(np.arange(128) // 32).astype(np.int32)
    parts = {
        "weight_packed": packing.pack_rows(codes, 4),
        "weight_scale": scales,
        "weight_shape": np.array([16, 128], np.int32),
        "weight_g_idx": g_idx,
    }
    compressed_tensors.packed_shape(packing.infos(parts), parts["weight_shape"], None, None, WHERE)
    tensor = compressed_tensors.decode_packed(parts, None, None, WHERE)
    assert tensor.permutation is not None
    zeros = np.full(scales.shape, 8, np.uint8)
    np.testing.assert_array_equal(all_values(tensor), packing.values(codes, zeros, scales, g_idx))
    unused = parts | {"weight_g_idx": np.full(128, -1, np.int32)}
    assert compressed_tensors.decode_packed(unused, None, None, WHERE).permutation is None


def test_int8_codes_of_four_bits(rng: np.random.Generator) -> None:
    weight = rng.integers(-8, 8, (8, 64)).astype(np.int8)
    parts = {"weight": weight, "weight_scale": np.full((8, 2), 0.5, np.float16)}
    tensor = compressed_tensors.decode_int8(parts, 4, 32, WHERE)
    assert tensor.rows(0, 8).bits == 4
    np.testing.assert_array_equal(all_values(tensor), 0.5 * weight)
    weight[3, 3] = 9
    with pytest.raises(
        CheckpointError, match=r"weight has codes from -8 to 9, quantization_config says 4 bits, -8 to 7"
    ):
        all_values(compressed_tensors.decode_int8(parts, 4, 32, WHERE))


# --- FP8 and FP4


def test_fp8_blocks_by_hand() -> None:
    """weight_scale_inv multiplies, and its shape is rounded up: 3 x 5 weights in blocks of 2 x 4."""
    weight = np.arange(15, dtype=np.float32).reshape(3, 5).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[1, 2], [4, 8]], np.float32)
    for stored in (scales, scales.astype(ml_dtypes.bfloat16), scales.astype(ml_dtypes.float8_e8m0fnu)):
        parts = {"weight": weight, "weight_scale_inv": stored}
        assert fp8.shape(packing.infos(parts), "weight_scale_inv", (2, 4), WHERE) == (3, 5)
        tensor = fp8.decode(parts, "weight_scale_inv", (2, 4), WHERE)
        spread = np.array([[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [4, 4, 4, 4, 8]], np.float32)
        np.testing.assert_array_equal(all_values(tensor, 2), weight.astype(np.float32) * spread)


def test_fp8_codes_are_the_bytes() -> None:
    weight = np.arange(256, dtype=np.uint8).reshape(2, 128).view(ml_dtypes.float8_e4m3fn)
    tensor = fp8.decode({"weight": weight, "weight_scale": np.float32(2).reshape(())}, "weight_scale", None, WHERE)
    codes = tensor.rows(0, 2)
    np.testing.assert_array_equal(codes.codes.reshape(-1), np.arange(256))
    assert codes.book is not None
    # By the definition of E4M3: 7 of exponent and 3 of mantissa, bias 7, no infinity.
    byte = 0b0_1010_101
    assert codes.book[byte] == 2.0 ** (0b1010 - 7) * (1 + 0b101 / 8)
    assert codes.book[1] == 2.0**-9
    assert np.isnan(codes.book[[127, 255]]).all()


def e2m1(code: int) -> float:
    """By the definition: a sign, two bits of exponent with bias 1, one of mantissa, subnormals."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (0.5 * mantissa if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


@pytest.mark.parametrize("convention", ["weight_scale_2", "weight_global_scale"])
def test_nvfp4_by_hand(convention: str, rng: np.random.Generator) -> None:
    """models.md 3.15: ModelOpt multiplies by its global scale, compressed-tensors divides. Powers of two are exact."""
    codes = rng.integers(0, 16, (4, 64), dtype=np.uint8)
    codes[0, :16] = np.arange(16)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scales = rng.uniform(0.1, 300, (4, 4)).astype(ml_dtypes.float8_e4m3fn)
    name = "weight" if convention == "weight_scale_2" else "weight_packed"
    factor = 0.125 if convention == "weight_scale_2" else 8.0
    parts = {name: packed, "weight_scale": scales, convention: np.array([factor], np.float32)}
    assert fp4.shape(packing.infos(parts), name, convention, WHERE) == (4, 64)
    tensor = fp4.decode_nvfp4(parts, name, convention, WHERE)
    expected = np.vectorize(e2m1)(codes) * np.repeat(scales.astype(np.float64), 16, axis=1) * 0.125
    np.testing.assert_array_equal(all_values(tensor), expected.astype(np.float32))
    np.testing.assert_array_equal(tensor.rows(1, 3).codes, codes[1:3])
    np.testing.assert_array_equal(tensor.rows(1, 3).scales.astype(np.float32), scales[1:3].astype(np.float32))


def test_mxfp4_by_hand(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16, (3, 96), dtype=np.uint8)
    exponents = np.array([[127, 0, 250], [100, 130, 127], [127, 127, 1]], np.uint8)
    parts = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), "weight_scale": exponents}
    assert fp4.shape(packing.infos(parts), "weight_packed", None, WHERE) == (3, 96)
    expected = np.vectorize(e2m1)(codes) * 2.0 ** (np.repeat(exponents, 32, axis=1).astype(int) - 127)
    np.testing.assert_array_equal(all_values(fp4.decode_mxfp4(parts, WHERE)), expected.astype(np.float32))
    exponents[1, 1] = 255
    with pytest.raises(CheckpointError, match=r"layer.weight: weight_scale has NaN \(255\)"):
        fp4.decode_mxfp4(parts, WHERE)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_global_scale_that_cannot_be(value: float) -> None:
    parts = {"weight_packed": np.zeros((2, 8), np.uint8), "weight_scale": np.ones((2, 1), ml_dtypes.float8_e4m3fn)}
    parts["weight_global_scale"] = np.array([value], np.float32)
    if value == np.inf:  # divides: all weights are zero, which is a model, if a useless one
        assert not all_values(fp4.decode_nvfp4(parts, "weight_packed", "weight_global_scale", WHERE)).any()
        return
    with pytest.raises(CheckpointError, match="weight_global_scale gives a factor of"):
        fp4.decode_nvfp4(parts, "weight_packed", "weight_global_scale", WHERE)


# --- bitsandbytes and HQQ


def test_nf4_by_hand(rng: np.random.Generator) -> None:
    """The first weight is in the high half; blocks of 64 run on over rows of 96, each of which has three pieces."""
    book = np.sort(rng.normal(size=16)).astype(np.float32)
    codes = rng.integers(0, 16, (4, 96), dtype=np.uint8)
    absmax = rng.uniform(0.5, 2, 6).astype(np.float32)
    flat = codes.reshape(-1)
    state = {"shape": [4, 96], "blocksize": 64, "dtype": "bfloat16", "quant_type": "nf4"}
    parts = {
        "weight": (flat[0::2] << 4 | flat[1::2]).reshape(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": book,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    shape, tensor = decode(parts, {})
    assert shape == (4, 96)
    assert tensor.rows(1, 3).group_size == 32
    expected = [book[code] * absmax[i // 64] for i, code in enumerate(flat)]
    np.testing.assert_array_equal(all_values(tensor, 3), np.array(expected, np.float32).reshape(4, 96))


# --- Files that are wrong: one line, the tensor, the remedy


def bad_parts(name: str, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """A library's case with parts replaced, or without them."""
    parts = {part: array for part, array in library_cases()[name].items() if part not in ("values", "options")}
    return {part: array for part, array in (parts | changes).items() if array is not None}


def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD = {
    "awq zeros of other groups": ("awq_gemm_128", {"qzeros": zeros(3, 4)}, {"group_size": 128}, "qzeros is [3, 4]"),
    "awq codes of bytes": (
        "awq_gemm_128",
        {"qweight": zeros(256, 4, dtype=np.uint8)},
        {},
        "qweight is U8, expected I32",
    ),
    "awq absurd group": ("awq_gemm_128", {}, {"group_size": 10**12}, "2 groups of scales do not fit 256 inputs in gr"),
    "awq negative group": ("awq_gemm_128", {}, {"group_size": -7}, "2 groups of scales do not fit 256 inputs in gro"),
    "awq group of nought": ("awq_gemm_128", {}, {"group_size": 0}, "2 groups of scales do not fit 256 inputs in gro"),
    "awq gemv group": ("awq_gemv_64", {}, {"group_size": 48}, "group_size 48 does not fit 256 inputs"),
    "awq gemv unknown group": ("awq_gemv_64", {}, {}, "needs group_size in quantization_config"),
    "awq gemv narrow": (
        "awq_gemv_64",
        {"scales": zeros(32, 8, dtype=np.float16)},
        {"group_size": 64},
        "scales is [32, 8]",
    ),
    "gptq bits": ("gptq_v1_64", {}, {"bits": 8, "gptq": True}, "has 4 bits, quantization_config says 8"),
    "gptq zeros": ("gptq_v1_64", {"qzeros": zeros(4, 5)}, {"gptq": True}, "5 words of zero points for 32 outputs"),
    "gptq index": ("gptq_v1_64", {"g_idx": zeros(255)}, {"gptq": True}, "g_idx is [255], expected [256]"),
    "gptq empty": ("gptq_v1_64", {"qweight": zeros(0, 32)}, {"gptq": True}, "has shape [0, 32], expected 2 axes, none"),
    "packed shape": ("ct_int4_sym", {"weight_shape": np.array([24, 2**40])}, {}, "weight_shape is [24, 1099511627776]"),
    "packed other shape": ("ct_int4_sym", {"weight_shape": np.array([25, 192])}, {}, "weight_packed has 24 rows"),
    "packed bits": ("ct_int4_sym", {}, {"bits": 5}, "24 words a row do not hold 192 codes of 5 bits"),
    "packed no bits": ("ct_int4_sym", {}, {"bits": 0}, "num_bits is 0; expected 1 to 8"),
    "packed many bits": ("ct_int4_sym", {}, {"bits": 33}, "num_bits is 33; expected 1 to 8"),
    "packed scales": ("ct_int4_sym", {"weight_scale": zeros(23, 3, dtype=np.float32)}, {}, "weight_scale is [23, 3]"),
    "packed zeros": (
        "ct_int4_asym",
        {"weight_zero_point": zeros(4, 3)},
        {},
        "weight_zero_point is [4, 3], expected [3",
    ),
    "packed group": ("ct_int4_sym", {}, {"group_size": 32}, "3 groups of scales do not fit 192 inputs in groups of 32"),
    "int8 zeros": (
        "ct_int8_asym",
        {"weight_zero_point": zeros(24, 2, dtype=np.int8)},
        {},
        "weight_zero_point is [24, 2]",
    ),
    "fp8 scales": ("ct_fp8_block", {}, {"block": [8, 128]}, "weight_scale is [2, 2], expected [3, 2]"),
    "fp8 block": (
        "ct_fp8_block",
        {},
        {"block": [0, 128]},
        "blocks of 0 x 128, as quantization_config says, do not exist",
    ),
    "nvfp4 scales": (
        "ct_nvfp4",
        {"weight_scale": zeros(24, 12, dtype=np.uint8)},
        {},
        "weight_scale is U8, expected F8_E4M3",
    ),
    "nvfp4 global": ("ct_nvfp4", {"weight_global_scale": zeros(2, dtype=np.float32)}, {}, "weight_global_scale is [2]"),
    "mxfp4 scales": (
        "ct_mxfp4",
        {"weight_scale": zeros(24, 7, dtype=np.uint8)},
        {},
        "weight_scale is [24, 7], expected [24, 6]",
    ),
    "nf4 size": ("nf4", {"weight": zeros(2303, 1, dtype=np.uint8)}, {}, "weight is [2303, 1], expected [2304, 1]"),
    "nf4 map": (
        "nf4",
        {"weight.quant_map": zeros(15, dtype=np.float32)},
        {},
        "weight.quant_map is [15], expected [16]",
    ),
    "nf4 scales": (
        "nf4_nested",
        {"weight.nested_absmax": zeros(3, dtype=np.float32)},
        {},
        "weight.nested_absmax is [3]",
    ),
    "nf4 no map": ("nf4_nested", {"weight.nested_quant_map": None}, {}, "nested scales lack a map or a block size"),
    "hqq codes": ("hqq_4", {"W_q": zeros(35, 64, dtype=np.uint8)}, {}, "W_q is [35, 64], expected [36, 64]"),
    "hqq bits": ("hqq_4", {"nbits": np.array(5, np.int32)}, {}, "nbits 5 and axis 1 is not known"),
    "hqq shape": ("hqq_4", {"shape": np.array([-24, 192])}, {}, "HQQ with shape [-24, 192]"),
    "hqq group": ("hqq_4", {"group_size": np.array(-64, np.int32)}, {}, "group_size -64 does not divide a weight"),
    "hqq scale": ("hqq_4", {"scale": zeros(71, 1, dtype=np.float32)}, {}, "scale is [71, 1], expected [72, 1]"),
    "hqq nested": ("hqq_4", {"quant_zero": np.array(1, np.uint8)}, {}, "quantised scales or zeros is not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_files_are_refused(name: str) -> None:
    case, changes, options, message = BAD[name]
    with pytest.raises(CheckpointError) as caught:
        decode(bad_parts(case, **changes), options)
    text = str(caught.value)
    assert message in text
    assert text.startswith(WHERE)
    assert "\n" not in text
    assert ";" in text or ":" in text  # what to do


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"shape": [1], "blocksize": 64}', b'{"shape": [2, 4]}', b"\xff"]
)
def test_damaged_quant_state(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"layer.weight: quant_state is damaged.*; download the file again"):
        bitsandbytes.read_state(np.frombuffer(content, np.uint8), WHERE)
