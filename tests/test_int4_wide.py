"""The INT4 matrix product for many rows: on simulated warps, lowered for CUDA, on the GPU; its schedules."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_wide_warp import simulate, simulate_arrange, simulate_dequantize, simulate_gated, simulate_normalise

from jaxinfer.layers.norm import rms_norm
from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import (
    PackedInt4,
    dequantize,
    from_codes,
    gated_mlp_refusal,
    int4_gated_mlp,
    int4_gated_mlp_of_sum,
    int4_matmul,
    int4_matmul_fused,
    int4_matmul_of_sum,
    int4_slices,
    slices_refusal,
    to_mosaic,
    wide,
    wide_arrange,
    wide_dequantize,
    wide_norm,
    wide_tuning,
)
from pallas_kernels.int4_matmul.wide_plan import Part, WidePlan, WideSchedule
from pallas_kernels.token_order import STAGE, TokenOrder, ordered

BF16 = ml_dtypes.bfloat16
KINDS = ("symmetric", "zero_point", "minimum")


def make(out_features: int, in_features: int, group_size: int, kind: str, dtype: type = BF16) -> PackedInt4:
    """A canonical weight."""
    rng = np.random.default_rng(out_features + in_features)
    group_size = in_features if group_size == -1 else min(group_size, in_features)
    codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
    shape = (out_features, -(-in_features // group_size))
    offsets = None
    if kind == "zero_point":
        offsets = rng.integers(0, 16, shape, dtype=np.uint8)
    elif kind == "minimum":
        offsets = (-8 * rng.uniform(0.5, 1.5, shape)).astype(dtype)
    return from_codes(codes, rng.uniform(0.5, 1.5, shape).astype(dtype), offsets, group_size=group_size)


def tokens(rows: int, in_features: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, in_features)).astype(BF16)


def error(out: np.ndarray, x: np.ndarray, weight: PackedInt4, dtype: type = np.float32) -> float:
    """Against the float64 product with the weight in a dtype."""
    expected = x.astype(np.float64) @ np.asarray(dequantize(weight, dtype)).astype(np.float64).T
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))


def truncation(plan: WidePlan) -> float:
    """How far results of `wgmma` may be from exact sums, see `error`.

    Each step of 16 inputs cuts its sum off, towards zero, instead of rounding it: by half of the last bit on average,
    at most 2^-24 of the sum. With inputs of random signs the sum after step t of n has on average t / n of the result
    in it, so the losses add up to n / 2 x 2^-24. The rest is what rounding does to few steps.
    """
    steps = -(-plan.steps // plan.schedule.slices) * STAGE // 16
    return steps / 2 * 2**-24 + 1e-6


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "group_size", "kind", "schedule"),
    [
        (20, 200, 384, 128, "zero_point", WideSchedule(24, stages=3, blocks=1)),
        (20, 201, 576, 32, "symmetric", WideSchedule(24, stages=3, slices=2, blocks=3, turns=True)),
        (40, 136, 320, 64, "minimum", WideSchedule(16, tiles=2, stages=2, blocks=2)),
        (40, 300, 320, 64, "zero_point", WideSchedule(8, warpgroups=1, slices=2, stages=2, blocks=3, together=2)),
        (64, 136, 256, 128, "symmetric", WideSchedule(16, stages=2, cluster=2, blocks=4, together=2)),
        (17, 40, 200, 16, "zero_point", WideSchedule(8, warpgroups=1, stages=2, cluster=2, blocks=2)),
        (33, 264, 640, -1, "minimum", WideSchedule(24, warpgroups=4, slices=3, stages=2)),
        (33, 520, 256, 256, "zero_point", WideSchedule(48, tiles=2, cluster=4, stages=2, blocks=4)),
        (5, 72, 64, 32, "symmetric", WideSchedule(8, warpgroups=3, stages=3, blocks=8, turns=True)),
        (20, 200, 384, 128, "zero_point", WideSchedule(24, stages=3, blocks=1, natural=True)),
        (20, 201, 576, 32, "symmetric", WideSchedule(24, stages=4, slices=2, blocks=3, natural=True)),
        (40, 136, 1152, 64, "minimum", WideSchedule(16, tiles=2, stages=5, cluster=2, blocks=4, natural=True)),
        (17, 40, 200, 32, "zero_point", WideSchedule(8, 1, stages=2, cluster=2, natural=True)),
        (33, 264, 640, -1, "minimum", WideSchedule(16, slices=3, cluster=4, stages=4, blocks=8, natural=True)),
        (20, 200, 640, 128, "zero_point", WideSchedule(32, stages=3, cluster=2, joined=True)),
        (41, 201, 896, 32, "symmetric", WideSchedule(32, 3, stages=4, cluster=2, natural=True, joined=True)),
        (40, 136, 384, 64, "minimum", WideSchedule(48, tiles=2, stages=3, cluster=2, joined=True)),
    ],
)
def test_kernel_on_simulated_warps(rows, out_features, in_features, group_size, kind, schedule) -> None:
    weight, x = make(out_features, in_features, group_size, kind), tokens(rows, in_features)
    out = simulate(x, to_mosaic(weight), schedule).astype(np.float64).sum(0)
    assert error(out, x, weight, BF16) < 1e-6  # the weights are those of a bfloat16 model, to the bit
    assert error(out, x, weight) < 2.5e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_scales_of_more_bits_than_bfloat16(kind: str, dtype: type) -> None:
    """Their weights are rounded to bfloat16 too, some of the minimum kind twice."""
    weight, x = make(64, 192, 64, kind, dtype), tokens(18, 192)
    out = simulate(x, to_mosaic(weight), WideSchedule(24, warpgroups=1, stages=2))[0]
    assert error(out, x, weight) < (3e-3 if kind == "minimum" else 2e-3)


@pytest.mark.parametrize(
    ("rows", "out_features", "schedule"),
    [
        (24, 72, WideSchedule(24, warpgroups=1, stages=2)),
        (20, 72, WideSchedule(24, warpgroups=1, stages=3)),
        (100, 136, WideSchedule(56, warpgroups=1, tiles=2, stages=2)),
        (139, 80, WideSchedule(72, stages=2, cluster=2, blocks=2)),
        (140, 64, WideSchedule(144, warpgroups=1, stages=2)),
        (139, 72, WideSchedule(144, stages=3, natural=True)),
        (139, 200, WideSchedule(80, 3, stages=3, cluster=2, natural=True, joined=True)),
        (139, 72, WideSchedule(144, stages=3, cluster=2, joined=True)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_of_16_bits(rows: int, out_features: int, schedule: WideSchedule, dtype: str) -> None:
    """Written by each thread, or as whole lines: equal to the float32 results, rounded."""
    weight, x = to_mosaic(make(out_features, 256, 128, "zero_point")), tokens(rows, 256)
    out, exact = (simulate(x, weight, schedule, name)[0] for name in (dtype, "float32"))
    assert (out == exact.astype(out.dtype)).all()


@pytest.mark.parametrize(
    ("rows", "results", "group_size", "run", "schedule"),
    [
        (20, 128, 128, 2, WideSchedule(24, warpgroups=1, tiles=2, stages=2)),
        (41, 256, 16, 1, WideSchedule(24, tiles=2, stages=2, cluster=2, blocks=2, turns=True)),
    ],
)
def test_gated_results_in_the_order_of_the_next_product(rows, results, group_size, run, schedule) -> None:
    weight, x = make(2 * results, 256, group_size, "zero_point"), tokens(rows, 256)
    scaled = dataclasses.replace(weight, scales=weight.scales * BF16(2**-6))
    gate, other = np.split(x.astype(np.float64) @ np.asarray(dequantize(scaled, BF16)).astype(np.float64).T, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * other
    as_rows = simulate_gated(x, to_mosaic(scaled), schedule, None)
    assert np.linalg.norm(as_rows - expected) < 1e-6 * np.linalg.norm(expected)
    order = TokenOrder(16, run)
    image = simulate_gated(x, to_mosaic(scaled), schedule, order)
    next_plan = WidePlan.of(rows, to_mosaic(make(16, results, 16 * run, "symmetric")), WideSchedule(16))
    rounded = np.asarray(ordered(jnp.asarray(as_rows.astype(BF16)), next_plan.token_order))
    tile, token = np.indices((-(-rows // 16), 16))
    there = (tile * 16 + token < rows)[:, None, None, :, None] & np.ones(image.shape, bool)
    assert (image[there] == rounded[there]).all()


@pytest.mark.parametrize(
    ("rows", "results", "run", "schedule"),
    [
        (85, 128, 2, WideSchedule(88, warpgroups=2, stages=2)),
        (21, 256, 1, WideSchedule(24, warpgroups=3, stages=2)),
        (139, 128, 2, WideSchedule(144, stages=2, cluster=2, blocks=2)),
        (250, 128, 1, WideSchedule(256, stages=2)),  # their lines are written sixteen at a time
    ],
)
def test_gates_and_others_of_different_warps_give_the_same(rows, results, run, schedule) -> None:
    weight, x, order = to_mosaic(make(2 * results, 128, 32, "zero_point")), tokens(rows, 128), TokenOrder(16, run)
    two_tiles = WideSchedule(8 * -(-rows // 16), warpgroups=1, tiles=2, stages=2)
    expected = simulate_gated(x, weight, two_tiles, order)
    tile, token = np.indices((-(-rows // 16), 16))
    there = (tile * 16 + token < rows)[:, None, None, :, None] & np.ones(expected.shape, bool)
    assert (simulate_gated(x, weight, schedule, order)[there] == expected[there]).all()


@pytest.mark.parametrize("group_size", [16, 128])
def test_arrange_puts_a_words_inputs_where_it_multiplies_them(group_size: int) -> None:
    """Products of 16 inputs take two pieces: lane q's inputs 2q, 2q + 1 of the first, then of the second."""
    plan = WidePlan.of(3, to_mosaic(make(16, 256, group_size, "symmetric")), WideSchedule(8))
    x = np.arange(3 * 256, dtype=np.int16).view(BF16).reshape(3, 256)
    image = np.asarray(ordered(jnp.asarray(x), plan.token_order)).view(np.int16).reshape(1, 2, 8, 2, 8, 4, 2)
    for stage, step, lane, pair, element in itertools.product(range(2), range(8), range(4), range(2), range(2)):
        within = 32 * (step // 2) + 8 * lane + 4 * (step % 2) if group_size >= 32 else 16 * step + 4 * lane
        column = 128 * stage + within + 2 * pair + element
        assert image[0, stage, step, pair, 2, lane, element] == 2 * 256 + column
        assert image[0, stage, step, pair, 5, lane, element] == 0  # there is no token 5


@pytest.mark.parametrize("group_size", [16, 32])
def test_kernel_that_arranges_does_what_xla_does(group_size: int) -> None:
    plan = WidePlan.of(37, to_mosaic(make(16, 200, group_size, "symmetric")), WideSchedule(24))
    x = tokens(37, 200)
    expected = np.asarray(ordered(jnp.asarray(x), plan.token_order))
    assert (simulate_arrange(x, plan) == expected).all()


def assert_normalised(image: np.ndarray, total: np.ndarray, norm: np.ndarray, plan: WidePlan) -> None:
    """An image of `rms_norm(total)`, but for the last bit of bfloat16."""
    expected = np.asarray(ordered(rms_norm(jnp.asarray(total), jnp.asarray(norm), 1e-5), plan.token_order))
    tile, _, _, token, _ = np.indices(expected.shape)
    there = tile * plan.schedule.tokens + token < plan.rows
    found = [a[there].view(BF16).astype(np.float32) for a in (image, expected)]
    np.testing.assert_allclose(*found, rtol=2**-7)
    assert (found[0] == found[1]).mean() > 0.99


def slices_of(rows: int, in_features: int, slices: int) -> np.ndarray | None:
    """What a product before may have left: float32, or one slice of bfloat16."""
    if not slices:
        return None
    numbers = np.random.default_rng(slices).standard_normal((slices, rows, in_features))
    return numbers.astype(BF16 if slices == 1 else np.float32)


def with_slices(x: np.ndarray, partial: np.ndarray | None) -> np.ndarray:
    return x if partial is None else (x.astype(np.float32) + partial.astype(np.float32).sum(0)).astype(BF16)


@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "slices"),
    [(7, 200, 16, 0), (5, 2312, 32, 3), (133, 136, 16, 1), (1, 8584, 32, 2), (5, 2304, 32, 3), (133, 192, 16, 1)],
)
def test_kernel_that_normalises_does_what_xla_does(rows: int, in_features: int, group_size: int, slices: int) -> None:
    """One token a block or two, one turn of its warps or several; with what the product before left."""
    plan = WidePlan.of(rows, to_mosaic(make(16, in_features, group_size, "symmetric")), WideSchedule(16))
    x, norm = tokens(rows, in_features), np.linspace(0.5, 1.5, in_features, dtype=np.float32)
    partial = slices_of(rows, in_features, slices)
    image, total, left = simulate_normalise(x, plan, norm, 1e-5, partial)
    assert (total == with_slices(x, partial)).mean() > 0.999  # sums of several in another order
    assert_normalised(image, total, norm, plan)
    if partial is not None and in_features % (128 // partial.dtype.itemsize):  # a line has numbers of two tokens
        assert (left == partial).all()
    elif partial is not None:
        assert np.isnan(left.astype(np.float32)).all()


def test_slices_that_are_in_memory_already_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_norm, "MOST_GIVEN_UP", 2 * 5 * 2304 * 4)
    plan = WidePlan.of(5, to_mosaic(make(16, 2304, 32, "symmetric")), WideSchedule(16))
    x, norm = tokens(5, 2304), np.ones(2304, np.float32)
    for slices, lost in ((2, True), (3, False)):
        partial = slices_of(5, 2304, slices)
        assert partial is not None
        left = simulate_normalise(x, plan, norm, 1e-5, partial)[2]
        assert np.isnan(left).all() == lost and (left == partial).all() != lost


@pytest.mark.gpu
@pytest.mark.parametrize("in_features", [4096, 14336])
@pytest.mark.parametrize("rows", [37, 256])
def test_kernel_that_normalises_on_the_gpu(rows: int, in_features: int) -> None:
    plan = WidePlan.of(rows, to_mosaic(make(16, in_features, 128, "symmetric")), WideSchedule(64))
    x, norm = tokens(rows, in_features), np.linspace(0.5, 1.5, in_features, dtype=np.float32)
    for slices in (0, 1, 4):
        partial = slices_of(rows, in_features, slices)
        given = None if partial is None else jnp.asarray(partial)
        run = jax.jit(functools.partial(wide_norm.arrange_normalised, plan=plan, eps=1e-5))
        image, total = run(jnp.asarray(x), norm=jnp.asarray(norm), partial=given)
        assert (np.asarray(total) == with_slices(x, partial)).mean() > 0.99
        assert_normalised(np.asarray(image), np.asarray(total), norm, plan)
        if given is not None:  # what the caller keeps is not given up, but a copy of it
            np.testing.assert_array_equal(np.asarray(given), partial)


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [16, 32])
def test_kernel_that_arranges_on_the_gpu(group_size: int) -> None:
    plan = WidePlan.of(300, to_mosaic(make(16, 1544, group_size, "symmetric")), WideSchedule(104))
    x = jnp.asarray(tokens(300, 1544))
    assert (wide_arrange.by_kernel(x, plan) == ordered(x, plan.token_order)).all()


@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size", "kind", "dtype"),
    [
        (40, 200, 32, "zero_point", BF16),
        (17, 328, 16, "symmetric", BF16),
        (64, 640, 128, "minimum", BF16),
        (33, 96, -1, "zero_point", np.float16),
        (16, 72, 64, "symmetric", np.float32),
    ],
)
def test_unpacking_on_simulated_warps(out_features, in_features, group_size, kind, dtype) -> None:
    weight = make(out_features, in_features, group_size, kind, dtype)
    expected = np.asarray(dequantize(weight, BF16)).astype(np.float32)
    values = simulate_dequantize(to_mosaic(weight)).astype(np.float32)
    if dtype is BF16:
        assert (values == expected).all()
    else:  # rounded twice: some differ in the last bit
        assert (np.abs(values - expected) <= np.abs(expected) / 128).all()
        assert (values == expected).mean() > 0.9


def test_gated_block_without_its_kernels() -> None:
    """Here the reference does it; and why kernels would not."""
    gate_up, down = make(256, 64, 32, "zero_point"), make(64, 128, 32, "zero_point")
    gate_up = dataclasses.replace(gate_up, scales=gate_up.scales * BF16(2**-6))
    x, norm = jnp.asarray(tokens(20, 64)), jnp.linspace(0.5, 1.5, 64)
    out = int4_gated_mlp(x.astype(jnp.float32), gate_up, down, norm=norm, norm_eps=1e-5)
    first, second = (np.asarray(dequantize(w)) for w in (gate_up, down))
    gate, up = np.split(np.asarray(rms_norm(x.astype(jnp.float32), norm, 1e-5)) @ first.T, 2, axis=1)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up @ second.T, rtol=1e-4, atol=1e-3)
    assert gated_mlp_refusal(x, down, gate_up) == "gate and up have 64 outputs, not twice the 64 inputs of down"
    assert gated_mlp_refusal(x[:8], gate_up, down) == "it is for 9 rows and more"
    if jax.default_backend() != "gpu":
        assert gated_mlp_refusal(x, gate_up, down) == "the reference backend has no gated block"


def test_gated_block_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    gate_up, down = described(1024, 256, 128, "zero_point"), described(256, 512, 128, "zero_point")
    x, norm = jax.ShapeDtypeStruct((100, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)
    product = jax.jit(lambda x, norm, *pair: int4_gated_mlp(x, *pair, norm=norm))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = product.trace(x, norm, gate_up, down).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3  # the norm, the first product, the second


def test_cublas_writes_a_products_results_in_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of rows behind a norm too: in float32 they would be written and read once more."""
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    weight, rows = described(64, 256, 128, "zero_point"), wide_tuning.DEQUANTIZED_ROWS
    x, norm = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)
    product = jax.jit(lambda x, norm, weight: int4_matmul_fused(x, weight, norm=norm))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = product.trace(x, norm, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert [line.split("-> ")[1] for line in text.splitlines() if "dot_general" in line] == [f"tensor<{rows}x64xbf16>"]


def behind_attention(x: jax.Array, heads: jax.Array, norm: jax.Array, o, gate_up, down, qkv) -> list[jax.Array]:
    """From attention to the next layer's: its result, x behind both branches, and the next queries, keys, values."""
    partial, after = int4_gated_mlp_of_sum(x, int4_slices(heads, o), gate_up, down, norm=norm)
    return [after, *int4_matmul_of_sum(after, partial, qkv, norm=norm)]


def sum_by_sum(x: jax.Array, heads: jax.Array, norm: jax.Array, o, gate_up, down, qkv) -> list[jax.Array]:
    after = x + int4_matmul(heads, o)
    y = after + int4_gated_mlp(after, gate_up, down, norm=norm)
    return [after, int4_matmul_fused(y, qkv, norm=norm), y]


def layer_weights(group_size: int) -> list[PackedInt4]:
    shapes = ((328, 576), (1280, 328), (328, 640), (264, 328))
    weights = [make(*shape, group_size, "zero_point") for shape in shapes]
    return [dataclasses.replace(w, scales=w.scales * BF16(2**-6)) for w in weights]


def test_slices_are_added_without_their_kernels_too() -> None:
    x, heads = (jnp.asarray(tokens(20, n)).astype(jnp.float32)[None] for n in (328, 576))
    norm, weights = jnp.linspace(0.5, 1.5, 328), layer_weights(32)
    for got, want in zip(behind_attention(x, heads, norm, *weights), sum_by_sum(x, heads, norm, *weights), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_slices_are_added_in_the_norms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    weights = [described(n, k, 128, "zero_point") for n, k in ((256, 384), (1024, 256), (256, 512), (128, 256))]
    x, heads = (jax.ShapeDtypeStruct((100, n), jnp.bfloat16) for n in (256, 384))
    norm = jax.ShapeDtypeStruct((256,), jnp.float32)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(behind_attention).trace(x, heads, norm, *weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 7  # heads into order, four products, and two norms
    for rows, refusal in ((16, "it is for 17 to 4095 rows"), (17, None), (4096, "it is for 17 to 4095 rows")):
        assert slices_refusal(jnp.zeros((rows, 256), jnp.bfloat16), weights[1]) == refusal


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 20, 200, 700])
def test_slices_are_added_in_the_norms_kernel_on_the_gpu(rows: int) -> None:
    """The sum is rounded once where there are several slices."""
    weights = jax.tree.map(jnp.asarray, [to_mosaic(w) for w in layer_weights(32)])
    x, heads, norm = jnp.asarray(tokens(rows, 328)), jnp.asarray(tokens(rows, 576)), jnp.linspace(0.5, 1.5, 328)
    run = jax.jit(behind_attention)
    outs = [[np.asarray(a, np.float32) for a in run(x, heads, norm, *weights)] for _ in range(3)]
    for got, want in zip(outs[0], jax.jit(sum_by_sum)(x, heads, norm, *weights), strict=True):
        want = np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
    assert all(np.array_equal(a, b) for out in outs for a, b in zip(outs[0], out, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "group_size", "schedule"),
    [
        (9, 16, None),
        (100, 32, None),
        (300, 128, WideSchedule(128, tiles=2, cluster=2, stages=4, blocks=8, turns=True)),
        (77, 64, WideSchedule(80, warpgroups=3, cluster=2, blocks=8)),
        (150, 32, WideSchedule(152, cluster=2, blocks=8)),
        (40, 32, WideSchedule(40, warpgroups=1)),
        (1000, -1, None),
    ],
)
def test_gated_block_on_the_gpu(
    rows: int, group_size: int, schedule: WideSchedule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the schedule that tuning chooses for gate and up, or another."""
    pair = [
        dataclasses.replace(w, scales=w.scales * BF16(2**-6))
        for w in (make(1280, 1160, group_size, "zero_point"), make(328, 640, group_size, "symmetric"))
    ]
    x, norm = jnp.asarray(tokens(rows, 1160)), jnp.linspace(0.5, 1.5, 1160)
    packed = jax.tree.map(jnp.asarray, [to_mosaic(w) for w in pair])
    if schedule is not None:
        monkeypatch.setitem(wide_tuning.MEASURED, (rows, 1160, 1280), schedule)
    run = jax.jit(lambda x, norm, *pair: int4_gated_mlp(x, *pair, norm=norm, norm_eps=1e-5, backend="mosaic"))
    outs = [np.asarray(run(x, norm, *packed), np.float64) for _ in range(3)]
    first, second = (np.asarray(dequantize(w, BF16)).astype(np.float64) for w in pair)
    gate, up = np.split(np.asarray(rms_norm(x, norm, 1e-5)).astype(np.float64) @ first.T, 2, axis=1)
    expected = (gate / (1 + np.exp(-gate)) * up) @ second.T
    assert np.linalg.norm(outs[0] - expected) < 5e-3 * np.linalg.norm(expected)
    assert all(np.array_equal(outs[0], out) for out in outs)


SHAPES = [
    (14336, 4096),
    (4096, 14336),
    (4096, 4096),
    (28672, 4096),
    (576, 1536),
    (64, 64),
    (128256, 4096),
]


def described(out_features: int, in_features: int, group_size: int, kind: str) -> PackedInt4:
    """A weight of the mosaic layout without its numbers."""
    groups, strips = -(-in_features // group_size), -(-out_features // 16)
    shape = jax.ShapeDtypeStruct((strips, groups, 16), jnp.bfloat16)
    offsets = {
        "symmetric": None,
        "zero_point": jax.ShapeDtypeStruct(shape.shape, jnp.uint8),
        "minimum": shape,
    }[kind]
    codes = jax.ShapeDtypeStruct((strips, -(-in_features // 64), 128), jnp.int32)
    return PackedInt4(codes, shape, offsets, None, (out_features, in_features), group_size, "mosaic")


@pytest.mark.parametrize("group_size", [16, 128])
def test_schedules_fit_the_card(group_size: int) -> None:
    for rows, shape in itertools.product((17, 64, 256, 1000), SHAPES):
        weight = described(*shape, min(group_size, shape[1]), "minimum")
        schedule = wide_tuning.wide_schedule(rows, weight)
        plan = WidePlan.of(rows, weight, schedule)
        assert plan.shared_bytes <= 227 * 1024
        assert plan.clusters * schedule.cluster <= 132
        assert schedule.tokens % 8 == 0
        assert schedule.tokens * schedule.tiles <= 256
        assert schedule.slices <= plan.steps
        assert schedule.stages >= 3
        assert plan.token_tiles * schedule.tokens < rows + 8 * plan.token_tiles


def test_x_as_it_is_where_it_was_measured() -> None:
    """Linear codes of 4 bits of some shapes, in groups of 32 and more; tokens fill boxes of 8 in each block."""
    measured = [(129, 6144, 4096), (8192, 4096, 4096), (512, 4096, 14336), (1024, 14336, 4096)]
    others = [(128, 6144, 4096), (192, 4096, 4096), (300, 576, 4096), (8193, 14336, 4096)]
    for (rows, n, k), natural in [*((case, True) for case in measured), *((case, False) for case in others)]:
        schedule = wide_tuning.wide_schedule(rows, described(n, k, 128, "minimum"), natural=True)
        assert schedule.natural == natural
        assert schedule.tokens % (16 if natural and schedule.cluster == 4 else 8) == 0
        assert natural == wide_tuning.natural_taken(rows, described(n, k, 128, "minimum"), "NVIDIA H200")
    small_groups = described(6144, 4096, 16, "symmetric")
    assert not wide_tuning.wide_schedule(300, small_groups, natural=True).natural
    weight = described(6144, 4096, 128, "zero_point")
    assert not wide_tuning.wide_schedule(300, weight).natural
    assert not wide_tuning.wide_schedule(300, weight, "NVIDIA H100 PCIe", natural=True).natural
    schedule = wide_tuning.wide_schedule(200, weight, natural=True)
    assert (schedule.tokens, schedule.cluster, schedule.joined) == (112, 2, True)
    norm = jnp.ones(4096)
    with pytest.raises(ValueError, match="a schedule for x as it is takes no norm"):
        wide.int4_matmul(jnp.ones((200, 4096), BF16), weight, norm, schedule=schedule, out_dtype=jnp.dtype(BF16))


def test_rounds_of_x_as_it_is_are_the_shortest() -> None:
    """Those that were the fastest of what was tried on an H200, and that all of them fit and cover the rows."""
    shapes = {"o": (4096, 4096), "qkv": (6144, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    fastest = {
        ("o", 320): (160, 1, 0), ("o", 1152): (192, 3, 0), ("o", 1280): (160, 2, 0), ("o", 2560): (216, 2, 4),
        ("qkv", 256): (128, 3, 0), ("qkv", 384): (192, 3, 0), ("qkv", 544): (136, 3, 0),
        ("qkv", 800): (160, 2, 0), ("qkv", 3072): (192, 3, 4),
        ("up", 960): (192, 3, 0), ("up", 1280): (184, 2, 0), ("up", 3072): (224, 2, 4), ("down", 1280): (160, 2, 4),
        ("down", 600): (152, 2, 4), ("down", 4096): (256, 2, 4),
    }  # fmt: skip
    for (name, rows), expected in fastest.items():
        weight = described(*shapes[name], 128, "zero_point")
        s = wide_tuning.wide_schedule(rows, weight, natural=True)
        assert ((s.tokens, s.warpgroups, s.together), s.natural) == (expected, True), (name, rows)
        assert s.joined == (name == "qkv" and rows < 385)
    for name, rows in [
        *itertools.product(shapes, range(513, 8193, 211)),
        *(("qkv", rows) for rows in range(193, 385, 9)),
    ]:
        weight = described(*shapes[name], 128, "minimum")
        schedule = wide_tuning.wide_schedule(rows, weight, natural=True)
        plan = WidePlan.of(rows, weight, schedule)
        assert plan.shared_bytes <= 227 * 1024
        assert schedule.stages >= 3
        assert plan.token_tiles * schedule.tokens >= rows
        assert plan.clusters * schedule.cluster <= 132


def test_blocks_that_join_their_sums_have_one_part_each() -> None:
    weight = described(6144, 4096, 128, "zero_point")
    schedule = WideSchedule(64, 3, cluster=2, natural=True, joined=True)

    def fitted(rows: int, tokens: int, **changes: Any) -> WidePlan | None:
        plan = dataclasses.replace(WidePlan.of(rows, weight, schedule), **changes)
        return wide_tuning.fitted(plan, dataclasses.replace(schedule, tokens=tokens))

    assert fitted(128, 64) is not None
    assert fitted(256, 64) is None  # 128 parts for 66 clusters
    assert fitted(120, 120) is None  # a half would be no whole blocks of 8
    assert fitted(128, 64, result_order=TokenOrder(64, 2)) is None
    assert fitted(128, 64, gated=True, result_order=TokenOrder(64, 2)) is None


def test_rows_between_those_that_were_measured_have_their_schedules() -> None:
    o, qkv = described(4096, 4096, 128, "zero_point"), described(6144, 4096, 128, "zero_point")
    found = [
        (s.tokens, s.warpgroups, s.slices)
        for s in (wide_tuning.wide_schedule(rows, w) for rows, w in ((200, o), (256, o), (250, qkv), (700, qkv)))
    ]
    assert found == [(104, 1, 1), (128, 1, 1), (256, 1, 1), (176, 3, 1)]


def test_tokens_are_multiplied_in_groups_where_they_do_not_stay_in_the_cache() -> None:
    def groups(rows: int, hidden: int, features: int) -> list[tuple[int, int]]:
        weights = described(2 * features, hidden, 128, "zero_point"), described(hidden, features, 128, "zero_point")
        return [(s.tokens, s.together) for s in wide_tuning.gated_schedules(rows, *weights)]

    assert groups(16384, 4096, 14336) == [(128, 16), (256, 8)]
    assert [together for _, together in groups(4096, 4096, 14336)] == [0, 0]
    assert [together for _, together in groups(8192, 1024, 2048)] == [0, 0]  # 16 and 32 MB


class Numbers:
    """As much of a warp as a part asks for."""

    integer = staticmethod(int)

    @staticmethod
    def select(condition: bool, a: int, b: int) -> int:
        return a if condition else b


@pytest.mark.parametrize(("rows", "groups"), [(64, [4, 4]), (72, [4, 4, 1])])
def test_a_group_of_tokens_meets_all_weights_before_the_next_one(rows: int, groups: list[int]) -> None:
    schedule = WideSchedule(8, slices=2, together=4)
    plan = WidePlan.of(rows, described(640, 256, 128, "zero_point"), schedule)
    parts = [Part(Numbers(), plan, index, 0) for index in range(plan.parts)]
    found = [(part.token_tile, part.slice, part.first_strip) for part in parts]
    tiles = [[*range(4 * i, 4 * i + count)] for i, count in enumerate(groups)]
    assert [tile for tile, _, _ in found] == [tile for group in tiles for _ in range(10) for tile in group]
    assert len(set(found)) == plan.parts == 10 * sum(groups)  # five parts of 128 features, two slices


@pytest.mark.parametrize(
    ("rows", "shape", "group_size", "kind", "natural"),
    [
        (17, (576, 1536), 32, "minimum", False),
        (64, (14336, 4096), 128, "zero_point", False),
        (100, (4096, 14336), 64, "symmetric", False),
        (2048, (72, 64), 16, "zero_point", False),
        (300, (4096, 14336), 64, "symmetric", True),
    ],
)
def test_kernel_lowers_for_cuda(rows: int, shape: tuple[int, int], group_size: int, kind: str, natural: bool) -> None:
    weight = described(*shape, group_size, kind)
    schedule = wide_tuning.wide_schedule(rows, weight, natural=natural)
    assert schedule.natural == natural
    x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)

    def product(x: jax.Array, w: PackedInt4) -> jax.Array:
        return wide.int4_matmul(x, w, schedule=schedule, out_dtype=jnp.dtype(jnp.bfloat16))

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(product).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


GPU_CASES = [
    (rows, *((8, 72, 201, 576, 1440)[(i + j) % 5], (64, 192, 576, 1536, 4104)[(i + 2 * j) % 5]), group_size, kind)
    for (i, rows), (j, (group_size, kind)) in itertools.product(
        enumerate((1, 17, 64, 100, 300)), enumerate(zip((16, 32, 64, 128, 256, -1), KINDS * 2, strict=True))
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind"), GPU_CASES)
def test_kernel_on_the_gpu(rows, out_features, in_features, group_size, kind) -> None:
    weight = make(out_features, in_features, group_size, kind)
    x, packed = tokens(rows, in_features), jax.tree.map(jnp.asarray, to_mosaic(weight))
    schedule = wide_tuning.wide_schedule(rows, packed)
    product = jax.jit(lambda x, w: wide.int4_matmul(x, w, schedule=schedule, out_dtype=jnp.dtype(jnp.float32)))
    outs = [np.asarray(product(jnp.asarray(x), packed)) for _ in range(3)]
    assert error(outs[0], x, weight, BF16) < truncation(WidePlan.of(rows, packed, schedule))
    assert all(np.array_equal(outs[0], out) for out in outs)
    short = wide.int4_matmul(jnp.asarray(x), packed, schedule=schedule, out_dtype=jnp.dtype(jnp.bfloat16))
    assert np.array_equal(np.asarray(short), outs[0].astype(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"), [(201, 576, 32), (72, 1160, 16), (64, 4096, 128)]
)
def test_unpacking_on_the_gpu(out_features: int, in_features: int, group_size: int) -> None:
    weight = make(out_features, in_features, group_size, "zero_point")
    values = wide_dequantize.dequantize(jax.tree.map(jnp.asarray, to_mosaic(weight)))
    assert (np.asarray(values) == np.asarray(dequantize(weight, BF16))).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "schedule",
    [
        WideSchedule(64, stages=3, blocks=16),
        WideSchedule(64, slices=3, cluster=2, stages=9, blocks=16),
        WideSchedule(64, warpgroups=4, slices=4, stages=6),
        WideSchedule(64, cluster=4, stages=7, blocks=16),
        WideSchedule(32, tiles=2, slices=2, stages=4),
        WideSchedule(128, cluster=2, stages=5, blocks=16),
        WideSchedule(200, cluster=2, stages=3, blocks=16, turns=True),
        WideSchedule(200, warpgroups=1, cluster=4, stages=3, blocks=16),
        WideSchedule(64, tiles=2, cluster=4, stages=6, blocks=16),
        WideSchedule(128, tiles=2, stages=4, blocks=16),
        WideSchedule(64, cluster=2, stages=8, blocks=16, turns=True),
        WideSchedule(128, tiles=2, stages=4, blocks=16, turns=True),
        WideSchedule(64, cluster=4, stages=8, blocks=16, turns=True),
        WideSchedule(104, tiles=2, cluster=2, stages=4, blocks=16, turns=True),
        WideSchedule(80, tiles=2, cluster=2, stages=5, blocks=16, turns=True),
        WideSchedule(128, warpgroups=3, stages=4, blocks=16, turns=True),
        WideSchedule(64, stages=4, blocks=16, natural=True),
        WideSchedule(64, slices=3, cluster=2, stages=5, blocks=16, natural=True),
        WideSchedule(80, warpgroups=3, cluster=4, stages=3, blocks=16, natural=True),
        WideSchedule(208, warpgroups=1, cluster=4, stages=3, blocks=16, natural=True),
        WideSchedule(104, tiles=2, cluster=2, stages=4, blocks=16, turns=True, natural=True),
    ],
)
def test_schedules_on_the_gpu(schedule: WideSchedule) -> None:
    """As many inputs as wrap the ring of stages several times, and parts enough for several a block."""
    weight, x = make(1416, 4096, 128, "zero_point"), tokens(200, 4096)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    exact, short, again = (
        np.asarray(wide.int4_matmul(jnp.asarray(x), packed, schedule=schedule, out_dtype=jnp.dtype(dtype)))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    )
    assert error(exact, x, weight, BF16) < truncation(WidePlan.of(200, packed, schedule))
    assert np.array_equal(short, exact.astype(BF16))
    assert np.array_equal(short, again)
