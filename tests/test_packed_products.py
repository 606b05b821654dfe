"""Products with code books (NF4, IQ4_NL, MXFP4, NVFP4) and with codes of 8 bits: simulated, lowered, on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_int4_warp import SimulatedInt4Warp, in_float64, relative_error
from simulated_int4_warp import simulate as simulate_few
from simulated_warp import SimulatedWarp, run_cluster
from simulated_wide_warp import simulate as simulate_many
from simulated_wide_warp import simulate_dequantize

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import (
    PackedInt4,
    PackedInt8,
    dequantize,
    from_codes,
    from_int8_codes,
    int4_matmul,
    int8_to_mosaic,
    mosaic,
    to_kernel_layout,
    to_mosaic,
    tuning,
    unpack_int8_codes,
    wide,
    wide_dequantize,
    wide_tuning,
)
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.packing import by_row
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Fusion, Schedule
from pallas_kernels.int4_matmul.wide_plan import WideSchedule

BF16 = ml_dtypes.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# QLoRA's, https://arxiv.org/abs/2305.14314, to four digits.
_BELOW = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911)
_ABOVE = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1)
BOOKS = {
    "nf4": np.array([*_BELOW, 0, *_ABOVE], np.float32),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
    "mxfp4": E2M1,
    "nvfp4": E2M1 * np.float32(0.0123456789),  # its second scale is in the book
}
EXACT = ("iq4_nl", "mxfp4", "nvfp4")
KINDS = ("symmetric", "zero_point", "minimum")


def with_book(out_features: int, in_features: int, group_size: int, book: str, dtype: type = BF16) -> PackedInt4:
    """A canonical weight of random codes."""
    rng = np.random.default_rng(out_features + in_features)
    group_size = in_features if group_size == -1 else group_size
    codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (out_features, -(-in_features // group_size))).astype(dtype)
    return from_codes(codes, scales, group_size=group_size, book=BOOKS[book])


def of_8_bits(out_features: int, in_features: int, group_size: int, kind: str, dtype: type = BF16) -> PackedInt8:
    """A canonical weight of random codes, of which some rows have only the extreme ones."""
    rng = np.random.default_rng(out_features + in_features)
    group_size = in_features if group_size == -1 else group_size
    codes = rng.integers(0, 256, (out_features, in_features), dtype=np.uint8)
    codes[0], codes[1] = 0, 255
    shape, offsets = (out_features, -(-in_features // group_size)), None
    if kind == "zero_point":
        offsets = rng.integers(0, 256, shape, dtype=np.uint8)
        offsets[0], offsets[1] = 255, 0
    elif kind == "minimum":
        offsets = (-128 * rng.uniform(0.5, 1.5, shape)).astype(dtype)
    return from_int8_codes(codes, rng.uniform(0.5, 1.5, shape).astype(dtype), offsets, group_size=group_size)


def tokens(rows: int, in_features: int) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, in_features))
    x[0] = np.abs(x[0])  # sums as large as they get
    return x.astype(BF16)


def in_layout(weight: Packed) -> Packed:
    return int8_to_mosaic(weight) if isinstance(weight, PackedInt8) else to_mosaic(weight)


def values_of(weight: Packed, dtype: type = np.float32) -> np.ndarray:
    """With the book's numbers rounded as the kernels do, to bfloat16 in units of the smallest."""
    if weight.kind == "code_book":
        book = np.asarray(weight.book)
        unit = np.abs(book)[book != 0].min()
        rounded = (book / unit).astype(BF16).astype(np.float32) * unit
        weight = PackedInt4(weight.codes, weight.scales, None, rounded, weight.shape, weight.group_size)
    return np.asarray(dequantize(weight, dtype)).astype(np.float64)


@given(st.lists(st.floats(-300, 300, width=16), min_size=16, max_size=16), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_book_gives_every_code_its_number(book: list[float], bits: int) -> None:
    found: list[np.ndarray] = []
    entries = np.array(book, np.float32)

    def program(warp: SimulatedWarp, _: int) -> None:
        w = SimulatedInt4Warp(warp)
        looked_up = Book(w, entries)
        word = np.full(32, np.uint32(bits)).view(np.int32)
        found.extend(w._numbers(number)[0] * looked_up.unit[0] for number in looked_up.numbers(word))

    run_cluster(1, 1, 4, program)
    for i, pair in enumerate(found):
        for half in range(2):
            expected = entries[bits >> (4 * (i + 4 * half)) & 15]
            np.testing.assert_allclose(pair[half], expected, rtol=2**-8)


@pytest.mark.parametrize("book", BOOKS)
def test_code_books_on_simulated_warps(book: str) -> None:
    """For few rows, for many, and unpacked."""
    weight = with_book(40, 320, {"nvfp4": 16, "nf4": 64}.get(book, 32), book, np.float16 if book == "iq4_nl" else BF16)
    packed, exact = to_mosaic(weight), np.asarray(dequantize(weight)).astype(np.float64)
    for rows in (3, 10):
        x = tokens(rows, 320)
        digits = book in EXACT and rows <= tuning.DIGITS_MAX_ROWS
        few = simulate_few(x, packed, Schedule(warps=4, parts=1, strips=2, depth=2, blocks=2, digits=digits))
        out = few.astype(np.float64).sum(0)
        assert relative_error(out, in_float64(x, values_of(weight))) < 1e-6
        assert relative_error(out, in_float64(x, exact)) < (1e-6 if book in EXACT else 4e-3)
    x = tokens(20, 320)
    many = simulate_many(x, packed, WideSchedule(24, warpgroups=1, stages=2))[0]
    assert relative_error(many, in_float64(x, exact)) < (2.5e-3 if book in EXACT else 5e-3)
    unpacked = simulate_dequantize(packed).astype(np.float64)
    assert (np.abs(unpacked - exact) <= np.abs(exact) / (128 if book in EXACT else 64)).all()


@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "kind", "dtype"),
    [
        (1, 256, 32, "symmetric", np.float16),  # Q8_0
        (7, 288, 32, "minimum", np.float32),  # Q5_K
        (16, 320, 16, "symmetric", np.float32),  # Q6_K
        (8, 384, 128, "zero_point", BF16),  # GPTQ
        (12, 200, 64, "minimum", BF16),
        (3, 192, -1, "zero_point", BF16),
    ],
)
def test_codes_of_8_bits_on_simulated_warps(rows, in_features, group_size, kind, dtype) -> None:
    weight, x = of_8_bits(40, in_features, group_size, kind, dtype), tokens(rows, in_features)
    schedule = Schedule(warps=4, parts=1, strips=2, depth=2, blocks=2, digits=rows <= tuning.DIGITS_MAX_ROWS)
    few = simulate_few(x, int8_to_mosaic(weight), schedule).astype(np.float64).sum(0)
    assert relative_error(few, in_float64(x, values_of(weight))) < 2e-6
    x = tokens(20, in_features)
    many = simulate_many(x, int8_to_mosaic(weight), WideSchedule(24, warpgroups=1, stages=2))[0]
    if dtype is BF16:
        assert relative_error(many, in_float64(x, values_of(weight, BF16))) < 1e-6
    assert relative_error(many, in_float64(x, values_of(weight))) < 3.5e-3


@pytest.mark.parametrize("weight", [of_8_bits(96, 256, 32, "zero_point"), with_book(96, 256, 32, "iq4_nl")])
def test_with_its_surroundings_on_simulated_warps(weight: Packed) -> None:
    """A norm before, a gate behind: what is between them is that of test_int4_fused.py."""
    weight = dataclasses.replace(weight, scales=weight.scales * BF16(2**-10))
    x, fusion = tokens(3, 256), Fusion(norm_eps=1e-5, gated=True)
    norm = np.random.default_rng(7).uniform(0.5, 1.5, 256).astype(np.float32)
    digits = weight.kind != "code_book"
    schedule = Schedule(warps=4, parts=1, strips=2, depth=2, blocks=2, digits=digits)
    out = simulate_few(x, in_layout(weight), schedule, fusion=fusion, norm=norm)[0]
    wide = x.astype(np.float64)
    roots = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-5)
    gate, other = np.split(in_float64((wide * norm).astype(BF16), values_of(weight)) * roots, 2, axis=1)
    assert relative_error(out, gate / (1 + np.exp(-gate)) * other) < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_codes_of_8_bits_on_simulated_warps(kind: str) -> None:
    weight = of_8_bits(24, 200, 32, kind)
    assert (simulate_dequantize(int8_to_mosaic(weight)) == np.asarray(dequantize(weight, BF16))).all()


@given(st.integers(2, 70), st.integers(1, 20), st.sampled_from([16, 32, 128, -1]), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=25)
def test_layout_of_8_bits_gives_back_the_weight(out_features: int, eights: int, group_size: int, kind: str) -> None:
    weight = of_8_bits(out_features, 8 * eights, min(group_size, 8 * eights), kind)
    packed = int8_to_mosaic(weight)
    assert (unpack_int8_codes(packed) == weight.codes).all()
    for before, after in ((weight.scales, packed.scales), (weight.offsets, packed.offsets)):
        assert (before is None and after is None) or (by_row(after, packed) == before).all()


@pytest.mark.parametrize("group_size", [16, 64])
def test_jax_packs_8_bits_as_numpy_does(group_size: int) -> None:
    weight = of_8_bits(40, 200, group_size, "zero_point")
    packed, on_device = int8_to_mosaic(weight), int8_to_mosaic(jax.tree.map(jnp.asarray, weight))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(on_device), jax.tree.leaves(packed), strict=True))
    assert (unpack_int8_codes(on_device) == weight.codes).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reference_multiplies_by_codes_of_8_bits(kind: str) -> None:
    weight, x = of_8_bits(24, 80, 32, kind, np.float32), tokens(3, 80).astype(np.float32)
    codes = weight.codes.astype(np.float64)
    scales, offsets = (
        None if a is None else np.repeat(a.astype(np.float64), 32, 1)[:, :80] for a in (weight.scales, weight.offsets)
    )
    assert scales is not None
    if offsets is None:
        values = scales * (codes - 128)
    else:
        values = scales * (codes - offsets) if kind == "zero_point" else scales * codes + offsets
    for w in (weight, int8_to_mosaic(weight)):
        assert relative_error(np.asarray(int4_matmul(jnp.asarray(x), w)), in_float64(x, values)) < 1e-6


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_layout_and_backend_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    book, eight = with_book(24, 64, 32, "mxfp4"), of_8_bits(24, 64, 32, "symmetric")
    assert to_kernel_layout(eight) is eight
    x = jnp.zeros((4, 64), jnp.bfloat16)
    assert "reads weights of the triton layout, not canonical" in int4_matmul(x, eight, explain=True)[1].reason
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    assert to_kernel_layout(book).layout == to_kernel_layout(eight).layout == "mosaic"
    for weight in (book, eight):
        assert int4_matmul(x, to_kernel_layout(weight), explain=True)[0].taken


def test_shapes_of_8_bit_codes_are_checked() -> None:
    codes = np.zeros((8, 64), np.uint8)
    with pytest.raises(ValueError, match=r"scales have shape \(8, 3\); codes \(8, 64\) in groups of 32 need \(8, 2\)"):
        from_int8_codes(codes, np.ones((8, 3), BF16), group_size=32)
    with pytest.raises(ValueError, match=r"codes are int8; expected uint8 holding 0..255"):
        from_int8_codes(codes.astype(np.int8), np.ones((8, 2), BF16), group_size=32)


def some_weights(out_features: int, in_features: int) -> list[Packed]:
    return [
        *(with_book(out_features, in_features, size, book) for book, size in (("nf4", 64), ("nvfp4", 16))),
        of_8_bits(out_features, in_features, 32, "symmetric", np.float16),
        of_8_bits(out_features, in_features, 16, "symmetric", np.float32),
        of_8_bits(out_features, in_features, 128, "zero_point"),
    ]


@pytest.mark.parametrize("index", range(5))
def test_kernels_lower_for_cuda(index: int) -> None:
    weight = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), in_layout(some_weights(288, 512)[index]))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")

    def products(few: jax.Array, many: jax.Array, w: Packed) -> list[jax.Array]:
        schedule, dtype = tuning.plan_for(few.shape[0], w).schedule, jnp.dtype(jnp.bfloat16)
        wide_schedule = wide_tuning.wide_schedule(many.shape[0], w)
        return [
            mosaic.int4_matmul(few, w, schedule=schedule, out_dtype=dtype),
            wide.int4_matmul(many, w, schedule=wide_schedule, out_dtype=dtype),
            wide_dequantize.dequantize(w),
        ]

    x = [jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16) for rows in (8 + index, 64)]
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(products).trace(*x, weight).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(5))
def test_every_route_on_the_gpu(index: int) -> None:
    """Few rows, many, and cuBLAS; the same bits whenever they run."""
    weight = some_weights(584, 1160)[index]
    packed = jax.tree.map(jnp.asarray, in_layout(weight))
    values = values_of(weight)
    product = jax.jit(lambda x, w: int4_matmul(x, w, backend="mosaic", out_dtype=jnp.float32))
    for rows, allowed in ((1, 3e-6), (8, 3e-6), (16, 1e-5), (40, 4e-3), (wide_tuning.DEQUANTIZED_ROWS, 4e-3)):
        x = tokens(rows, 1160)
        outs = [np.asarray(product(jnp.asarray(x), packed)) for _ in range(3)]
        assert relative_error(outs[0], in_float64(x, values)) < allowed, rows
        assert all(np.array_equal(outs[0], out) for out in outs)
