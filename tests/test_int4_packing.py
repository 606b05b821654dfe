"""Packing of INT4 weights: exact both ways, in NumPy and in JAX alike."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.int4_matmul import (
    PackedInt4,
    PackedInt8,
    dequantize,
    from_codes,
    to_canonical,
    to_mosaic,
    to_triton,
    unpack_codes,
)
from pallas_kernels.int4_matmul.api import REPACK

BF16 = ml_dtypes.bfloat16


def make(seed: int, out_features: int, in_features: int, group_size: int, kind: str) -> tuple[np.ndarray, PackedInt4]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
    shape = (out_features, -(-in_features // min(group_size, in_features)))
    scales = rng.uniform(0.5, 1.5, shape).astype(BF16)
    offsets, book = None, None
    if kind == "zero_point":
        offsets = rng.integers(0, 16, shape, dtype=np.uint8)
    elif kind == "minimum":
        offsets = rng.standard_normal(shape).astype(BF16)
    elif kind == "code_book":
        book = np.sort(rng.standard_normal(16)).astype(np.float32)
    return codes, from_codes(codes, scales, offsets, group_size=group_size, book=book)


weights = st.builds(
    make,
    st.integers(0, 1000),
    st.integers(1, 200),
    st.integers(1, 300),
    st.sampled_from([1, 7, 16, 32, 64, 128, 1000]),
    st.sampled_from(["symmetric", "zero_point", "minimum", "code_book"]),
)


@given(weights)
@settings(deadline=None, max_examples=60)
def test_layouts_give_back_the_codes_scales_and_offsets(case: tuple[np.ndarray, PackedInt4]) -> None:
    codes, canonical = case
    assert np.array_equal(unpack_codes(canonical), codes)
    for repacked in (to_mosaic(canonical), to_triton(canonical)):
        assert np.array_equal(unpack_codes(repacked), codes)
        back = to_canonical(repacked)
        assert (back.shape, back.group_size, back.layout) == (canonical.shape, canonical.group_size, "canonical")
        for before, after in zip(jax.tree.leaves(canonical), jax.tree.leaves(back), strict=True):
            assert before.dtype == after.dtype
            assert np.array_equal(before, after)


# A single weight; padded rows and inputs; groups that divide nothing; whole tiles; groups of 16, whose words differ.
SOME_WEIGHTS = [
    (1, 1, 1000, "symmetric"),
    (70, 100, 32, "minimum"),
    (33, 130, 7, "zero_point"),
    (64, 256, 128, "code_book"),
    (17, 65, 16, "zero_point"),
    (200, 300, 64, "symmetric"),
]


@pytest.mark.parametrize("case", SOME_WEIGHTS, ids=str)
def test_jax_packs_as_numpy_does(case: tuple[int, int, int, str]) -> None:
    """In one program: each operation by itself would be one. NumPy, the reference here, sees any shape above."""
    _, canonical = make(0, *case)

    def repack(weight: PackedInt4) -> list[tuple[PackedInt4, np.ndarray | jax.Array]]:
        return [(packed, unpack_codes(packed)) for packed in (to_mosaic(weight), to_triton(weight))]

    expected, on_device = repack(canonical), jax.jit(repack)(canonical)
    for numpy, device in zip(jax.tree.leaves(expected), jax.tree.leaves(on_device), strict=True):
        assert isinstance(device, jax.Array) and not isinstance(numpy, jax.Array)
        assert numpy.dtype == device.dtype
        assert np.array_equal(numpy, np.asarray(device))


@pytest.mark.parametrize("case", SOME_WEIGHTS, ids=str)
def test_values_are_the_definition_in_any_layout(case: tuple[int, int, int, str]) -> None:
    codes, weight = make(1, *case)
    spread = [np.repeat(a.astype(np.float64), weight.group_size, 1)[:, : weight.shape[1]] for a in _rows(weight)]
    scales, offsets = spread[0], spread[-1]
    expected = {
        "symmetric": lambda: scales * (codes - 8.0),
        "zero_point": lambda: scales * (codes - offsets),
        "minimum": lambda: scales * codes + offsets,
        "code_book": lambda: scales * weight.book[codes],
    }[weight.kind]()
    for layout in (weight, to_mosaic(weight), to_triton(weight)):
        np.testing.assert_allclose(np.asarray(dequantize(layout)), expected, rtol=3e-7, atol=3e-7)


def _rows(weight: PackedInt4) -> list[np.ndarray]:
    return [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]


def test_awq_zero_points_0_and_15_stay_what_they_are() -> None:
    # Trap I5: a zero point of 0 must not wrap to 15 through a stored "zero - 1".
    codes = np.array([[0, 1, 15, 8]], np.uint8)
    scales = np.ones((1, 2), BF16)
    weight = from_codes(codes, scales, np.array([[0, 15]], np.uint8), group_size=2)
    assert np.array_equal(np.asarray(dequantize(to_mosaic(weight))), [[0.0, 1.0, 0.0, -7.0]])


@pytest.mark.parametrize(("group_size", "first_column"), [(64, 32 * 1 + 8 * 1 + 4 * 1), (16, 16 * 3 + 4 * 1)])
def test_a_word_holds_what_the_diagram_says(group_size: int, first_column: int) -> None:
    codes = np.zeros((64, 64), np.uint8)
    strip, lane, step = 2, 13, 3
    row = 16 * strip + lane // 4
    places = [(row + half, first_column + column) for column in (0, 2, 1, 3) for half in (0, 8)]
    for value, place in enumerate(places, start=1):
        codes[place] = value
    words = to_mosaic(from_codes(codes, np.ones((64, 64 // group_size), BF16), group_size=group_size)).codes
    assert words.shape == (4, 1, 128)
    assert words[strip, 0, 4 * lane + step] == np.uint32(0x87654321).view(np.int32)
    assert np.count_nonzero(words) == 1


@pytest.mark.parametrize(("group_size", "columns"), [(32, (5, 37, 69, 101)), (16, (5, 21, 37, 53))])
def test_a_triton_word_holds_four_inputs_a_quarter_of_a_tile_apart(group_size: int, columns: tuple[int, ...]) -> None:
    codes = np.zeros((40, 256), np.uint8)
    tile = 256 // 2 if group_size == 32 else 64
    for value, column in enumerate(columns, start=1):
        codes[35, tile + column] = value
    weight = to_triton(from_codes(codes, np.ones((40, 256 // group_size), BF16), group_size=group_size))
    assert weight.codes.shape == ((3, 2, 16, 32) if group_size == 32 else (3, 4, 16, 16))
    assert weight.codes[2, 1, 3, 5] == 0x4321
    assert np.count_nonzero(weight.codes) == 1
    assert weight.scales.shape == (256 // group_size, 48)
    assert not np.any(weight.scales[:, 40:])


def test_padding_has_codes_and_scales_of_zero() -> None:
    _, weight = make(0, 70, 100, 32, "minimum")
    mosaic = to_mosaic(weight)
    assert mosaic.codes.shape == (5, 2, 128)
    assert mosaic.scales.shape == mosaic.offsets.shape == (5, 4, 16)
    # Rows 64 to 69 are the last strip's first six, in places 0, 2, ..., 10.
    padding = np.delete(mosaic.scales[4].astype(np.float32), np.arange(0, 12, 2), axis=1)
    assert not np.any(padding)
    whole = unpack_codes(PackedInt4(mosaic.codes, None, None, None, (80, 128), 128, "mosaic"))
    assert not np.any(whole[70:])
    assert not np.any(whole[:, 100:])


def test_a_packed_weight_is_a_pytree_whose_layout_is_static() -> None:
    _, weight = make(1, 8, 64, 32, "zero_point")
    packed = to_mosaic(weight)
    assert len(jax.tree.leaves(packed)) == 3
    doubled = jax.jit(lambda w: w)(packed)
    assert (doubled.layout, doubled.shape, doubled.group_size) == ("mosaic", (8, 64), 32)


def test_refusals_say_what_was_expected() -> None:
    codes, scales = np.zeros((8, 64), np.uint8), np.ones((8, 2), BF16)
    with pytest.raises(ValueError, match=r"scales have shape \(8, 2\).*groups of 16 need \(8, 4\)"):
        from_codes(codes, scales, group_size=16)
    with pytest.raises(ValueError, match=r"group_size is 0"):
        from_codes(codes, scales, group_size=0)
    for wrong in (codes[0], codes[:0], codes[:, :0]):
        with pytest.raises(ValueError, match=r"expected \[out_features, in_features\], none of them 0"):
            from_codes(wrong, scales, group_size=32)
    with pytest.raises(ValueError, match=r"scales are int32; expected floats"):
        from_codes(codes, scales.astype(np.int32), group_size=32)
    with pytest.raises(ValueError, match=r"offsets are int32; expected uint8 zero points, or floats"):
        from_codes(codes, scales, np.zeros(scales.shape, np.int32), group_size=32)
    with pytest.raises(ValueError, match=r"codes are int32; expected uint8"):
        from_codes(codes.astype(np.int32), scales, group_size=32)
    with pytest.raises(ValueError, match=r"a code book has 16 entries"):
        from_codes(codes, scales, group_size=32, book=np.zeros(15))
    mosaic = to_mosaic(from_codes(codes, scales, group_size=32))
    with pytest.raises(ValueError, match=r"takes a canonical weight; this one has layout 'mosaic'"):
        to_mosaic(mosaic)
    with pytest.raises(ValueError, match=r"to_triton takes a canonical weight; this one has layout 'mosaic'"):
        to_triton(mosaic)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("layout", "times"), [("mosaic", 0.1), ("triton", 1.1)])
def test_repacking_on_a_device_takes_little_room_beside_the_result(bits: int, layout: str, times: float) -> None:
    """A model of many GB is repacked weight by weight: what a step of it held would be part of the peak of loading."""

    def array(*shape: int, dtype: type = np.uint8) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    scales = array(1024, 4, dtype=np.float32)
    if bits == 4:
        weight = PackedInt4(array(1024, 256), scales, None, None, (1024, 512), 128)
    else:
        weight = PackedInt8(array(1024, 512), scales, None, (1024, 512), 128)
    memory = jax.jit(REPACK[type(weight), layout]).lower(weight).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < times * memory.output_size_in_bytes
