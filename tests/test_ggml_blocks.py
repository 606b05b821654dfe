"""ggml block formats against gguf-py's own decoder, bit for bit, and against values computed by hand."""

import gguf
import gguf_files
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as oracle
from gguf.quants import quantize

from checkpoints.formats import ggml, ggml_codes

QUANTISED = sorted(gguf_files.SCALE_OFFSETS)
SCALES = [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 1e-7, 0.0123, -333.25]
"""Float16 scales: both zeros, the largest, subnormals (below 6.1e-5), and ordinary ones."""


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def half(value: float) -> bytes:
    return np.array(value, "<f2").tobytes()


def packed_row(*fields: bytes | list[int]) -> np.ndarray:
    return np.frombuffer(b"".join(bytes(field) for field in fields), np.uint8)


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_decode_as_in_gguf_py(name: str, rng: np.random.Generator) -> None:
    blocks = gguf_files.random_blocks(rng, name, 300, 512)
    assert_bits_equal(ggml.dequantize(blocks, name), oracle(blocks, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_scales_decode_as_in_gguf_py(name: str, rng: np.random.Generator) -> None:
    block_bytes = ggml.ggml_type(name).block_bytes
    blocks = rng.integers(0, 256, (len(SCALES) ** 2, block_bytes), dtype=np.uint8)
    pairs = np.stack(np.meshgrid(SCALES, SCALES), axis=-1).reshape(-1, 2).astype("<f2")
    for field, offset in enumerate(gguf_files.SCALE_OFFSETS[name]):
        blocks[:, offset : offset + 2] = np.ascontiguousarray(pairs[:, field : field + 1]).view(np.uint8)
    assert_bits_equal(ggml.dequantize(blocks, name), oracle(blocks, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", QUANTISED)
def test_damaged_scales_give_nan_without_a_warning(name: str, rng: np.random.Generator) -> None:
    blocks = gguf_files.random_blocks(rng, name, 4, 256)
    for row, scale in zip(blocks, (np.inf, -np.inf, np.nan, 1.0), strict=True):
        offset = gguf_files.SCALE_OFFSETS[name][0]
        row[offset : offset + 2] = np.frombuffer(half(scale), np.uint8)
    with np.errstate(all="ignore"):
        expected = oracle(blocks, GGMLQuantizationType[name])
    np.testing.assert_array_equal(ggml.dequantize(blocks, name), expected)
    assert np.isfinite(ggml.dequantize(blocks, name)[3]).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_types(name: str, rng: np.random.Generator) -> None:
    values = np.concatenate([[0.0, -0.0, 1.5, 6e-8, -1e-6, 65504.0], rng.normal(size=58)]).reshape(4, 16)
    blocks = quantize(values.astype(np.float32), GGMLQuantizationType[name]).view(np.uint8)
    assert_bits_equal(ggml.dequantize(blocks, name), oracle(blocks, GGMLQuantizationType[name]))
    np.testing.assert_allclose(ggml.dequantize(blocks, name), values, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_come_back(name: str, rng: np.random.Generator) -> None:
    """The value, not only the agreement: what gguf-py quantises is decoded to within half a step or so."""
    weights = rng.uniform(-1, 1, (8, 64)).astype(np.float32)
    blocks = quantize(weights, GGMLQuantizationType[name])
    steps = {"Q4_0": 16, "Q4_1": 15, "Q5_0": 32, "Q5_1": 31, "Q8_0": 254}[name]
    np.testing.assert_allclose(ggml.dequantize(blocks, name), weights, atol=1.3 * 2 / steps)


def test_q4_0_by_hand() -> None:
    # Byte j holds element j in its low nibble and element j + 16 in its high one; value = d * (code - 8).
    row = packed_row(half(0.5), [0xF0] + [0x88] * 14 + [0x2A])
    values = ggml.dequantize(row, "Q4_0")
    assert values[0] == 0.5 * (0 - 8)
    assert values[16] == 0.5 * (15 - 8)
    assert values[15] == 0.5 * (10 - 8)
    assert values[31] == 0.5 * (2 - 8)
    assert not values[1:15].any()
    assert not values[17:31].any()


def test_q4_k_by_hand() -> None:
    # Scales 1..8 and minimums 9..16: the first four in bytes 0-3 and 4-7, the low nibbles of the others in 8-11.
    scales = [1, 2, 3, 4, 9, 10, 11, 12, 0xD5, 0xE6, 0xF7, 0x08]
    scales[7] |= 0b01_000000  # minimum 7 is 16: its bits 4-5 are the top bits of byte 7
    codes = [0x73] * 128
    values = ggml.dequantize(packed_row(half(2.0), half(0.25), scales, codes), "Q4_K")
    expected = [2.0 * (i + 1) * (3 if i % 2 == 0 else 7) - 0.25 * (i + 9) for i in range(8)]
    np.testing.assert_array_equal(values, np.repeat(np.array(expected, np.float32), 32))


def test_q6_k_by_hand() -> None:
    # Low nibbles 5 and high bits 3 everywhere: code 5 + 48 - 32 = 21. Scales -8..7 for the 16 groups of 16.
    scales = [s % 256 for s in range(-8, 8)]
    values = ggml.dequantize(packed_row([0x55] * 128, [0xFF] * 64, scales, half(0.5)), "Q6_K")
    np.testing.assert_array_equal(values, np.repeat(np.arange(-8, 8, dtype=np.float32), 16) * 21 * 0.5)


def test_iq4_nl_by_hand() -> None:
    row = packed_row(half(1.0), [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2)
    book = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    np.testing.assert_array_equal(ggml.dequantize(row, "IQ4_NL"), book[0::2] * 2 + book[1::2] * 2)


@pytest.mark.parametrize("name", QUANTISED)
def test_unpacked_parts_give_the_values(name: str, rng: np.random.Generator) -> None:
    blocks = gguf_files.random_blocks(rng, name, 6, 512).reshape(2, 3, -1)
    parts = ggml.unpack(blocks, name)
    assert parts.codes.shape == (2, 3, 512)
    assert parts.codes.dtype == (np.uint8 if parts.minimums is not None else np.int8)
    assert parts.scales.shape == (2, 3, 512 // parts.group_size)
    values = parts.codes * np.repeat(parts.scales, parts.group_size, axis=-1)
    if parts.minimums is not None:
        values = values + np.repeat(parts.minimums, parts.group_size, axis=-1)
    assert_bits_equal(values, ggml.dequantize(blocks, name))


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_give_the_values(name: str, rng: np.random.Generator) -> None:
    """The form that packed weights are made of: unsigned codes, and scales in 16 bits only where they are so."""
    blocks = gguf_files.random_blocks(rng, name, 70, 512)
    codes = ggml_codes.unpack(blocks[3:66], name)
    assert codes.codes.shape == (63, 512)
    assert codes.codes.dtype == np.uint8
    assert codes.codes.max() < 2**codes.bits
    assert codes.bits == ggml_codes.CODE_BITS[name]
    assert_bits_equal(codes.values() + 0.0, oracle(blocks[3:66], GGMLQuantizationType[name]) + 0.0)


def test_leading_axes_and_strided_rows(rng: np.random.Generator) -> None:
    blocks = gguf_files.random_blocks(rng, "Q5_K", 12, 256)
    expected = ggml.dequantize(blocks, "Q5_K")
    assert_bits_equal(ggml.dequantize(blocks.reshape(2, 6, -1), "Q5_K"), expected.reshape(2, 6, 256))
    assert_bits_equal(ggml.dequantize(blocks[::3], "Q5_K"), expected[::3])
    assert ggml.dequantize(blocks[:0], "Q5_K").shape == (0, 256)
    assert ggml.unpack(blocks[:0], "Q5_K").scales.shape == (0, 8)


def test_type_table_agrees_with_gguf_py() -> None:
    for type_ in ggml.GGML_TYPES.values():
        known = GGMLQuantizationType(type_.id)
        assert known.name == type_.name
        assert gguf.GGML_QUANT_SIZES[known] == (type_.block_elements, type_.block_bytes)
    for type_id, name in ggml.UNSUPPORTED_TYPES.items():
        assert GGMLQuantizationType(type_id).name == name
        assert type_id not in ggml.GGML_TYPES


def test_bad_input() -> None:
    row = np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="'Q4_9' is not supported; supported are F32"):
        ggml.dequantize(row, "Q4_9")
    with pytest.raises(ValueError, match="Q4_0 rows are uint8 with a multiple of 18 bytes"):
        ggml.dequantize(row[:17], "Q4_0")
    with pytest.raises(ValueError, match="Q4_0 rows are uint8"):
        ggml.dequantize(row.view(np.int8), "Q4_0")
    with pytest.raises(ValueError, match="I32 values do not fit float32"):
        ggml.dequantize(row[:16], "I32")
    with pytest.raises(ValueError, match="F16 is not a quantised type"):
        ggml.unpack(row, "F16")
