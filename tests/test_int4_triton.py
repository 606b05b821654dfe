"""Triton's kernels of the packed products: interpreted on NumPy, compiled for the cards they are meant for, on the GPU.

Opt-in: the first two run where triton and jax-triton are installed (`pip install jaxinfer[triton]`), without a GPU.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_int4_matmul import SHAPES, error, make, tokens
from test_packed_products import BOOKS, KINDS, of_8_bits

from pallas_kernels import triton_backend
from pallas_kernels.int4_matmul import (
    PackedInt4,
    PackedInt8,
    dequantize,
    from_codes,
    int4_matmul,
    int8_to_canonical,
    int8_to_triton,
    to_kernel_layout,
    to_triton,
    triton_matmul,
    triton_tuning,
    unpack_int8_codes,
)
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.triton_tuning import Schedule, schedule_for
from tests.interpreted_triton import BLOCK_BYTES, compile_for, interpreter, needs_triton
from tests.paged_attention_cases import lower_for_cuda

BF16, F32 = ml_dtypes.bfloat16, np.dtype(np.float32)
DOT, GEMV = Schedule(32, 8, 4, 3, splits=2), Schedule(32, 0, 4, 3, splits=2)
RESCALED = dataclasses.replace(DOT, rescaled=True)


def make_with_book(out_features: int, in_features: int, group_size: int, book: str) -> tuple[PackedInt4, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (out_features, -(-in_features // group_size))).astype(BF16)
    entries = BOOKS[book].astype(np.float64)
    values = np.repeat(scales.astype(np.float64), group_size, 1)[:, :in_features] * entries[codes]
    return from_codes(codes, scales, group_size=group_size, book=BOOKS[book]), values


def case(
    out_features: int, in_features: int, group_size: int, kind: str, dtype: type = BF16
) -> tuple[Packed, np.ndarray]:
    """A canonical weight and its values in float64; `kind` may be the name of a code book, or begin with "8 bits "."""
    if kind in BOOKS:
        return make_with_book(out_features, in_features, group_size, kind)
    if kind.startswith("8 bits "):
        weight = of_8_bits(out_features, in_features, group_size, kind.removeprefix("8 bits "), dtype)
        return weight, np.asarray(dequantize(weight)).astype(np.float64)
    return make(out_features, in_features, group_size, kind, dtype)


def in_layout(weight: Packed) -> Packed:
    """A canonical weight in the triton layout, on the device."""
    packed = int8_to_triton(weight) if isinstance(weight, PackedInt8) else to_triton(weight)
    return jax.tree.map(jnp.asarray, packed)


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with interpreter() as call:
        yield call


@pytest.fixture
def interpreted(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_backend, "call", worker)
    with jax.disable_jit():
        yield


# Group sizes of one, two and four segments, a shorter last group, one group; out_features and in_features of no tile.
CASES = [
    (1, 24, 64, 32, "symmetric", BF16),
    (3, 72, 192, 64, "zero_point", BF16),
    (16, 40, 576, 128, "minimum", np.float32),
    (4, 40, 576, 128, "zero_point", np.float16),
    (5, 24, 160, 16, "zero_point", BF16),
    (2, 24, 192, 96, "symmetric", np.float32),
    (9, 17, 200, -1, "minimum", BF16),
    (2, 16, 512, 256, "zero_point", BF16),
    (3, 33, 130, 64, "nf4", BF16),
    (4, 17, 96, 16, "nvfp4", BF16),
    (3, 24, 192, 64, "8 bits zero_point", BF16),
    (4, 17, 100, 32, "8 bits minimum", np.float32),
    (2, 24, 80, 16, "8 bits symmetric", BF16),
]


@needs_triton
@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind", "dtype"), CASES)
@pytest.mark.parametrize("schedule", [DOT, GEMV, RESCALED], ids=["dot", "gemv", "rescaled"])
def test_kernels_interpreted(interpreted, schedule, rows, out_features, in_features, group_size, kind, dtype) -> None:
    if schedule is GEMV:
        rows = min(rows, 4)
    weight, values = case(out_features, in_features, group_size, kind, dtype)
    packed = in_layout(weight)
    for x_dtype in (BF16, np.float16 if rows % 2 else np.float32):
        x = tokens(rows, in_features).astype(x_dtype)
        out = triton_matmul.int4_matmul(jnp.asarray(x), packed, out_dtype=F32, schedule=schedule)
        # A code book's entries are rounded to x's dtype; the interpreter cuts off where the card rounds.
        rounding = {2: 6e-3 if kind in BOOKS and schedule is not GEMV else 0, 4: 0}[x.dtype.itemsize]
        assert error(np.asarray(out), x, values) < max(rounding, 2e-6)


@needs_triton
@pytest.mark.parametrize(
    "some",
    [(0.0, 1.0, -(2.0**-9), 2.0**12, -3.0), (0.0, -1e30, 1.0), (1e-22, 3e-21), (0.0, 1e-15, 65504.0)],
    ids=["plain", "huge", "tiny", "both"],
)
def test_sums_in_units_of_a_scale_survive_scales_of_any_size_and_sign(interpreted, some: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (24, 1024), dtype=np.uint8)
    scales = rng.choice(some, (24, 8)).astype(BF16)
    scales[:, 7], scales[3] = 0.0, 0.0
    weight = from_codes(codes, scales, group_size=128)
    values = np.repeat(scales.astype(np.float64), 128, 1) * (codes.astype(np.float64) - 8)
    x = tokens(5, 1024)
    out = triton_matmul.int4_matmul(jnp.asarray(x), in_layout(weight), out_dtype=F32, schedule=RESCALED)
    assert error(np.asarray(out), x, values) < 2e-6
    assert np.abs(np.asarray(out)[:, 3]).max() < 1e-32


@needs_triton
def test_rows_beyond_a_block_and_results_of_16_bits_interpreted(interpreted) -> None:
    weight, values = make(40, 256, 128, "zero_point")
    x = tokens(19, 256)
    schedule = dataclasses.replace(DOT, splits=1)
    out = triton_matmul.int4_matmul(
        jnp.asarray(x),
        in_layout(weight),
        out_dtype=jnp.dtype(jnp.bfloat16),
        schedule=schedule,
    )
    assert out.dtype == jnp.bfloat16
    assert error(np.asarray(out), x, values) < 6e-3  # the interpreter cuts off where the card rounds


@given(st.integers(2, 40), st.integers(1, 160), st.sampled_from([16, 32, 128, -1]), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=15)
def test_layout_of_8_bits_gives_back_the_weight(
    out_features: int, in_features: int, group_size: int, kind: str
) -> None:
    weight = of_8_bits(out_features, in_features, min(group_size, in_features), kind)
    packed = int8_to_triton(weight)
    assert (unpack_int8_codes(packed) == weight.codes).all()
    back = int8_to_canonical(packed)
    for before, after in zip(jax.tree.leaves(weight), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before))


def test_a_word_holds_two_inputs_of_8_bits_half_a_tile_apart() -> None:
    weight = of_8_bits(40, 128, 32, "symmetric")
    weight.codes[:] = 0
    weight.codes[35, 64 + 5], weight.codes[35, 64 + 37] = 0x21, 0x43
    packed = int8_to_triton(weight)
    assert packed.codes.shape == (3, 2, 16, 32)
    assert packed.codes[2, 1, 3, 5] == 0x4321
    assert np.count_nonzero(packed.codes) == 1
    on_device = jax.jit(int8_to_triton)(jax.tree.map(jnp.asarray, weight))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(on_device), jax.tree.leaves(packed), strict=True))
    with pytest.raises(ValueError, match="int8_to_triton takes a canonical weight; this one has layout 'triton'"):
        int8_to_triton(packed)


@needs_triton
@pytest.mark.parametrize(("out_features", "in_features", "group_size", "kind"), [c[1:5] for c in CASES])
def test_dequantize_interpreted(interpreted, out_features, in_features, group_size, kind) -> None:
    weight, values = case(out_features, in_features, group_size, kind)
    packed = in_layout(weight)
    np.testing.assert_allclose(triton_matmul.dequantize(packed, jnp.float32), values, rtol=3e-7, atol=3e-7)


def abstract(out_features: int, in_features: int, group_size: int, kind: str) -> Packed:
    """A weight of the triton layout without its numbers."""
    weight = jax.eval_shape(in_layout, case(16, in_features, group_size, kind)[0])
    strips = -(-out_features // 16)
    codes = jax.ShapeDtypeStruct((strips, *weight.codes.shape[1:]), jnp.int16)
    scales, offsets = (
        None if a is None else jax.ShapeDtypeStruct((a.shape[0], 16 * strips), a.dtype)
        for a in (weight.scales, weight.offsets)
    )
    return dataclasses.replace(weight, codes=codes, scales=scales, offsets=offsets, shape=(out_features, in_features))


COMPILED = [
    (1, 14336, 4096, 128, "zero_point", jnp.bfloat16),
    (8, 14336, 4096, 128, "zero_point", jnp.bfloat16),
    (16, 4096, 14336, 128, "symmetric", jnp.float16),
    (32, 576, 1536, 32, "minimum", jnp.bfloat16),
    (64, 14336, 4096, 128, "zero_point", jnp.bfloat16),
    (4, 1536, 576, 16, "minimum", jnp.float32),
    (7, 72, 192, 64, "nf4", jnp.float16),
    (64, 576, 1536, 32, "mxfp4", jnp.bfloat16),
    (64, 72, 192, 64, "nf4", jnp.float32),
    (8, 14336, 4096, 128, "8 bits zero_point", jnp.bfloat16),
    (64, 576, 1536, 32, "8 bits minimum", jnp.float16),
    (1, 4096, 14336, 128, "8 bits symmetric", jnp.float32),
    (300, 4096, 4096, 128, "zero_point", jnp.bfloat16),
    (128, 4096, 4096, 128, "zero_point", jnp.bfloat16),
    (250, 4096, 4096, 128, "zero_point", jnp.bfloat16),
]


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind", "dtype"), COMPILED)
def test_compiles_for(capability, rows, out_features, in_features, group_size, kind, dtype, monkeypatch) -> None:
    """Through jax-triton down to PTX, within the shared memory that a block can have."""
    shared_bytes = compile_for(capability, monkeypatch)
    x = jax.ShapeDtypeStruct((rows, in_features), dtype)
    text = lower_for_cuda(
        functools.partial(triton_matmul.int4_matmul, out_dtype=jnp.dtype(dtype)),
        x,
        abstract(out_features, in_features, group_size, kind),
    )
    assert text.count("@triton_kernel_call") == 1
    assert max(shared_bytes) <= BLOCK_BYTES[capability]


@needs_triton
@pytest.mark.parametrize("rows", triton_tuning.WIDE["9.0"])
def test_weights_of_wide_blocks_reach_the_products_from_registers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory has room for words and x only; on their way through it, the weights would take 8 KB more."""
    shared_bytes = compile_for(90, monkeypatch)
    lower_for_cuda(
        functools.partial(triton_matmul.int4_matmul, out_dtype=jnp.dtype(jnp.bfloat16)),
        jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16),
        abstract(14336, 4096, 128, "zero_point"),
    )
    schedule, most = triton_tuning.WIDE["9.0"][rows]
    x_bytes = schedule.stages * 128 * schedule.block_m * 2
    words_bytes = (schedule.stages - 1) * schedule.block_n * 64
    assert x_bytes + words_bytes < max(shared_bytes) < x_bytes + words_bytes + 1024
    assert max(shared_bytes) <= most


def test_wide_blocks_only_where_they_were_timed() -> None:
    def chosen(rows: int, capability: str = "9.0", wide: bool = True) -> Schedule:
        options = {"exact": False, "book": False, "multiprocessors": 132}
        return schedule_for(rows, 14336, 32, capability=capability, wide=wide, **options)

    assert chosen(64) == Schedule(128, 64, 8, 3, splits=2)
    assert chosen(128) == Schedule(128, 128, 8, 2, splits=2, rescaled=True)
    assert chosen(256) == Schedule(128, 128, 8, 2, splits=1, rescaled=True)
    assert chosen(256, capability="8.0").block_m == chosen(256, wide=False).block_m == 64


@pytest.mark.parametrize(
    ("rows", "out_features", "tiles", "card", "expected"),
    [
        (8, 14336, 32, (132, "9.0"), Schedule(128, 8, 4, 4, splits=4)),  # 112 x 4 blocks on 132 x 4 places
        (8, 4096, 112, (132, "9.0"), Schedule(128, 8, 4, 4, splits=16)),
        (8, 4096, 32, (108, "8.0"), Schedule(128, 8, 4, 4, splits=8)),  # four tiles each
        (16, 14336, 32, (128, "8.9"), Schedule(128, 16, 4, 4, splits=2)),
        (64, 14336, 32, (132, "9.0"), Schedule(128, 64, 8, 3, splits=2)),
        (200, 14336, 32, (132, "9.0"), Schedule(128, 64, 8, 3, splits=1)),
        (1, 64, 1, (82, "8.6"), Schedule(128, 8, 4, 4, splits=1)),
    ],
)
def test_schedules_fill_the_card_once(rows, out_features, tiles, card, expected) -> None:
    multiprocessors, capability = card
    options = {"multiprocessors": multiprocessors, "capability": capability}
    assert schedule_for(rows, out_features, tiles, exact=False, book=False, **options) == expected
    if rows <= 4:
        assert schedule_for(rows, out_features, tiles, exact=True, book=False, **options).kernel == "gemv"


def test_code_books_have_three_blocks_on_a_multiprocessor() -> None:
    for exact, splits in ((False, 3), (True, 4)):
        found = schedule_for(8, 14336, 32, exact=exact, book=True, multiprocessors=132, capability="9.0")
        assert found.splits == splits


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_explain_says_why_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = to_triton(make(24, 64, 32, "symmetric")[0])

    def reason(weight: Packed = weight, x: jax.Array | None = None) -> str:
        x = jnp.zeros((4, 64), jnp.bfloat16) if x is None else x
        return int4_matmul(x, weight, explain=True)[1].reason

    class Device:
        core_count = 108

        def __init__(self, capability: str) -> None:
            self.compute_capability = capability

    def install(**versions: str) -> None:
        def version(package: str) -> str:
            if package.replace("-", "_") not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[package.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)
        triton_backend.package_refusal.cache_clear()

    assert reason() == "this process has no GPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device("8.6")])
    install()
    assert reason() == "jax-triton is not installed: pip install jaxinfer[triton]"
    install(jax_triton="0.4.1", triton="3.6.0")
    assert reason() == "jax-triton 0.4.1 needs triton 3.7 or 3.8, not 3.6.0: pip install 'jax-triton==0.3.1'"
    for jax_triton, triton in (("0.3.1", "3.6.0"), ("0.4.1", "3.8.0")):
        install(jax_triton=jax_triton, triton=triton)
        assert reason() == "the first that supports this call"
    eight = to_kernel_layout(of_8_bits(24, 64, 32, "zero_point"))
    assert eight.layout == "triton" and reason(eight) == "the first that supports this call"
    assert "it reads weights of the triton layout, not canonical; repack with to_kernel_layout" in reason(
        make(24, 64, 32, "symmetric")[0]
    )
    odd = to_triton(make(24, 72, 24, "symmetric")[0])
    assert "groups of 16 or a multiple of 32, or one group, not 24" in reason(odd, jnp.zeros((4, 72), jnp.bfloat16))
    monkeypatch.setattr(jax, "devices", lambda: [Device("7.5")])
    assert "needs compute capability 8.0 (A100, RTX 30 series) or later, not 7.5" in reason()
    monkeypatch.setattr(jax, "devices", lambda: [Device("gfx942")])
    assert "it is written for NVIDIA GPUs" in reason()
    triton_backend.package_refusal.cache_clear()


GPU_DTYPES = [
    *((*shape, BF16) for shape in SHAPES),
    (3, 72, 576, 16, "zero_point", np.float16),
    (3, 576, 1536, 32, "minimum", np.float32),
    (17, 96, 1536, 128, "zero_point", np.float32),
    (64, 576, 1536, 96, "minimum", BF16),
    (64, 576, 1536, 128, "symmetric", np.float16),
    (5, 96, 320, 64, "nf4", BF16),
    (3, 96, 320, 64, "mxfp4", np.float32),
    (9, 96, 320, 16, "nvfp4", BF16),
    (2, 96, 320, 32, "iq4_nl", np.float16),
    (8, 96, 1536, 128, "8 bits zero_point", BF16),
    (17, 96, 320, 16, "8 bits minimum", BF16),
    (5, 96, 320, 64, "8 bits symmetric", np.float16),
    (2, 96, 320, 64, "8 bits zero_point", np.float32),
    (300, 192, 576, 32, "8 bits symmetric", BF16),
    (200, 192, 576, 128, "zero_point", BF16),
    (300, 192, 576, 32, "minimum", BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind", "dtype"), GPU_DTYPES)
def test_triton_on_the_gpu(rows, out_features, in_features, group_size, kind, dtype) -> None:
    """Traps I5 and I7: any zero point, sizes that divide nothing, each call three times."""
    weight, values = case(out_features, in_features, group_size, kind)
    packed = in_layout(weight)
    product = jax.jit(lambda x, w: int4_matmul(x, w, backend="triton", out_dtype=jnp.float32))
    x = tokens(rows, in_features).astype(dtype)
    outs = [np.asarray(product(jnp.asarray(x), packed)) for _ in range(3)]
    # Beyond FUSED_ROWS the weight is rounded to x's dtype, and so is a code book of no whole numbers.
    rounded = dtype != np.float32 and (rows > triton_matmul.FUSED_ROWS or kind == "nf4")
    assert error(outs[0], x, values) < (3e-3 if rounded else 1e-5)
    assert all(np.array_equal(outs[0], out) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "schedule",
    [GEMV, *(schedule for table in (triton_tuning.DOT, triton_tuning.WIDE["9.0"]) for schedule, _ in table.values())],
    ids=str,
)
def test_every_schedule_on_the_gpu(schedule: Schedule) -> None:
    weight, values = make(1440, 1536, 128, "zero_point")
    packed = in_layout(weight)
    x = tokens(4 if schedule.kernel == "gemv" else schedule.block_m, 1536)
    for splits in (1, 3):
        used = dataclasses.replace(schedule, splits=splits)
        out = triton_matmul.int4_matmul(jnp.asarray(x), packed, out_dtype=F32, schedule=used)
        assert error(np.asarray(out), x, values) < 3e-6
