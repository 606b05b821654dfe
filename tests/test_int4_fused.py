"""The INT4 product with its surroundings: norm before it, gate and residual behind it, against float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_int4_warp import in_float64, simulate
from test_int4_matmul import BF16, lower, make, tokens

from jaxinfer.layers import linear as linear_module
from jaxinfer.layers import mlp as mlp_module
from jaxinfer.layers.linear import add_linear, norm_linear
from jaxinfer.layers.mlp import gated_hidden
from jaxinfer.layers.residual import settled
from pallas_kernels.int4_matmul import PackedInt4, fused_refusal, int4_matmul, int4_matmul_fused, to_mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion, Schedule

EPS = 1e-5
FUSIONS = [Fusion(norm_eps=EPS), Fusion(norm_eps=EPS, gated=True), Fusion(gated=True), Fusion(residual=True)]


def small(out_features: int, in_features: int, group_size: int) -> tuple[PackedInt4, np.ndarray]:
    """A weight so small that gates are in the range where they do something."""
    weight, values = make(out_features, in_features, group_size, "zero_point", np.float32)
    return dataclasses.replace(weight, scales=weight.scales * np.float32(1 / 64)), values / 64


def arrays(rows: int, out_features: int, in_features: int) -> tuple[np.ndarray, np.ndarray]:
    """A norm's weights, and something to add."""
    rng = np.random.default_rng(7)
    norm = rng.uniform(0.5, 1.5, in_features).astype(np.float32)
    return norm, rng.standard_normal((rows, out_features)).astype(np.float32)


def expected(x: np.ndarray, values: np.ndarray, fusion: Fusion, norm: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """In float64, but x times the norm's weights, which the kernel rounds to bfloat16."""
    wide, roots = x.astype(np.float64), np.ones((x.shape[0], 1))
    if fusion.norm_eps is not None:
        roots = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + fusion.norm_eps)
        wide = (wide * norm).astype(BF16).astype(np.float64)
    out = wide @ values.T * roots
    if fusion.gated:
        gate, other = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * other
    return out + residual if fusion.residual else out


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "schedule"),
    [
        (1, 1024, 128, Schedule(warps=4, parts=2, strips=2, depth=2, blocks=3, digits=True)),
        (5, 480, 32, Schedule(warps=4, parts=1, strips=4, depth=3, blocks=2, digits=True)),
        (13, 512, 64, Schedule(warps=4, parts=1, strips=2, depth=1, blocks=2)),
    ],
)
def test_fused_kernel_on_simulated_warps(rows, in_features, group_size, schedule, fusion) -> None:
    check_simulated(rows, in_features, group_size, schedule, fusion)


@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "schedule"),
    [
        (1, 512, 16, Schedule(warps=4, parts=1, strips=2, depth=1, blocks=2, scaled=True)),
        (1, 1536, 128, Schedule(warps=4, parts=3, strips=2, depth=1, blocks=2, scaled=True)),
        (3, 992, 32, Schedule(warps=4, parts=2, strips=2, depth=1, blocks=2, scaled=True)),
        (2, 1536, 128, Schedule(warps=4, parts=3, strips=2, depth=2, blocks=2, scaled=True, bulk=True)),
        (5, 1024, 64, Schedule(warps=8, parts=1, strips=2, depth=2, blocks=2, scaled=True, bulk=True)),
        (1, 1024, 128, Schedule(warps=4, parts=2, strips=4, depth=2, blocks=3, scaled=True, bulk=True)),
    ],
)
def test_other_schedules_on_simulated_warps(rows, in_features, group_size, schedule) -> None:
    """Norm and gate are what goes through most of a schedule's parts."""
    check_simulated(rows, in_features, group_size, schedule, Fusion(norm_eps=EPS, gated=True))


@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "warps"),
    [(1, 1024, 128, 8), (1, 1024, 16, 4), (2, 1024, 64, 4), (13, 512, 512, 4)],
)
def test_all_of_a_block_at_once_on_simulated_warps(rows, in_features, group_size, warps) -> None:
    """Codes are 128 + code here: sums that cancel are right to a few millionths."""
    for fusion in (Fusion(norm_eps=EPS, gated=True), Fusion(residual=True)):
        strips = 2 if rows < 5 else 4  # of 8: four gates and as many others, or eight
        schedule = Schedule(warps, in_features // warps // 128, strips, strips, 8 // strips, once=True)
        check_simulated(rows, in_features, group_size, schedule, fusion, out_features=128, bound=4e-6)


@pytest.mark.parametrize(
    ("rows", "in_features", "group_size", "fusion", "depth"),
    [
        (3, 1024, 128, Fusion(residual=True), 1),
        (5, 1024, 64, Fusion(norm_eps=EPS, gated=True), 2),
        (8, 2048, 128, Fusion(norm_eps=EPS, gated=True), 3),
        (16, 1024, 32, Fusion(norm_eps=EPS), 4),
    ],
)
def test_warps_that_do_not_multiply_on_simulated_warps(rows, in_features, group_size, fusion, depth) -> None:
    """More strips than the ring has slots and the sums have buffers, and fewer."""
    strips = 2 if fusion.gated else 1
    schedule = Schedule(in_features // 256, 2, strips, depth, 2, scaled=True, bulk=True, apart=True)
    check_simulated(rows, in_features, group_size, schedule, fusion)
    check_simulated(rows, in_features, group_size, schedule, fusion, out_features=32 * strips)


def test_tiles_of_tokens_have_blocks_of_their_own_on_simulated_warps() -> None:
    schedule = Schedule(4, 1, 2, 2, 2, once=True, tiles=2)
    check_simulated(20, 512, 128, schedule, Fusion(norm_eps=EPS, gated=True), out_features=64, bound=4e-6)


@pytest.mark.parametrize("bulk", [False, True])
def test_slices_are_joined_by_a_cluster_on_simulated_warps(bulk: bool) -> None:
    """Two clusters of seven strips each, which three blocks share."""
    schedule = Schedule(4, 1, 2, 2, 6, scaled=True, bulk=bulk, joined=True)
    check_simulated(5, 1536, 128, schedule, Fusion(residual=True), out_features=216)


@pytest.mark.parametrize("fusion", [Fusion(), Fusion(residual=True)], ids=str)
@pytest.mark.parametrize(("rows", "strips", "depth"), [(3, 2, 2), (8, 2, 3), (16, 1, 2)])
def test_two_halves_are_joined_on_simulated_warps(rows: int, strips: int, depth: int, fusion: Fusion) -> None:
    """Two clusters of seven strips each, and nine of one or two."""
    schedule = Schedule(4, 2, strips, depth, 4, scaled=True, bulk=True, joined=True)
    check_simulated(rows, 2048, 128, schedule, fusion)
    check_simulated(rows, 2048, 128, dataclasses.replace(schedule, blocks=18), fusion)


def check_simulated(
    rows: int,
    in_features: int,
    group_size: int,
    schedule: Schedule,
    fusion: Fusion,
    out_features: int = 224,
    bound: float = 2e-6,
) -> None:
    weight, values = small(out_features, in_features, group_size)
    x = tokens(rows, in_features)
    norm, residual = arrays(rows, out_features // 2 if fusion.gated else out_features, in_features)
    got = simulate(
        x,
        to_mosaic(weight),
        schedule,
        fusion=fusion,
        norm=None if fusion.norm_eps is None else norm,
        residual=residual if fusion.residual else None,
    )[0]
    want = expected(x, values, fusion, norm, residual)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_reference_of_the_fused_product(fusion: Fusion) -> None:
    weight, values = make(64, 192, 64, "minimum", np.float32)
    x = tokens(3, 192).astype(np.float32)
    norm, residual = arrays(3, 32 if fusion.gated else 64, 192)
    got = int4_matmul_fused(
        jnp.asarray(x),
        weight,
        norm=None if fusion.norm_eps is None else jnp.asarray(norm),
        norm_eps=EPS,
        gated=fusion.gated,
        residual=jnp.asarray(residual) if fusion.residual else None,
    )
    wide, root = x.astype(np.float64), 1.0
    if fusion.norm_eps is not None:
        root = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS)
        wide = wide * norm
    want = expected(x, values, Fusion(gated=fusion.gated, residual=fusion.residual), norm, residual)
    if fusion.norm_eps is not None:
        want = expected(wide * root, values, Fusion(gated=fusion.gated), norm, residual)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-5


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_fused_kernel_lowers_for_cuda(rows: int) -> None:
    for fusion in FUSIONS:
        lower(rows, 512, 2048, 64, "zero_point", None, fusion)


def test_plan_of_a_layer_keeps_its_inputs_in_one_block() -> None:
    """What the cases on the GPU rely on: or a cluster adds up. Adding slices of a small weight would take longer than
    reading it."""
    none = np.zeros(0, np.float32)
    for rows, fusion, shape in itertools.product((1, 8), FUSIONS, ((4096, 4096), (1024, 3072))):
        weight = PackedInt4(none, none, none, None, shape, 128, "mosaic")
        plan = tuning.plan_for(rows, weight, fusion=fusion)
        assert plan.partials == 1
        assert plan.slices == 1 or (rows == 8 and fusion == Fusion(residual=True) and shape == (4096, 4096))


def test_a_fused_product_needs_all_inputs_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.dispatch.hopper_refusal", lambda: None)
    weight = to_mosaic(make(64, 8192, 128, "symmetric")[0])
    x = jnp.zeros((1, 8192), jnp.bfloat16)
    assert tuning.plan_for(1, weight).slices > 1
    assert fused_refusal(x, weight, norm_eps=EPS) == "8192 inputs are more than a block has"
    for inputs in (12288, 14336):  # pairs and sevens of blocks add up their slices
        long = dataclasses.replace(weight, shape=(4096, inputs))
        assert fused_refusal(jnp.zeros((5, inputs), jnp.bfloat16), long, residual=True) is None
        assert fused_refusal(jnp.zeros((5, inputs), jnp.bfloat16), long, norm_eps=EPS) is not None
    small = to_mosaic(make(72, 256, 128, "symmetric")[0])
    x = jnp.zeros((1, 256), jnp.bfloat16)
    assert fused_refusal(x, small, norm_eps=EPS) is None
    for outputs in (72, 16):  # of 16 there is not one strip of results
        halves = dataclasses.replace(small, shape=(outputs, 256))
        refusal = f"gate and other half need a multiple of 16 outputs each, not {outputs} together"
        assert fused_refusal(x, halves, gated=True) == refusal
    many = jnp.zeros((9, 256), jnp.bfloat16)
    assert fused_refusal(many, small, residual=True) == "with a gate or a residual it is for up to 8 rows"


def test_the_kernel_gets_a_residual_in_the_dtype_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads residual and writes results as x's dtype, whatever it is given."""
    monkeypatch.setattr("pallas_kernels.dispatch.hopper_refusal", lambda: None)
    monkeypatch.setattr(
        "pallas_kernels.int4_matmul.mosaic.int4_matmul", lambda x, w, norm, residual, **options: residual
    )
    weight = to_mosaic(make(64, 256, 128, "symmetric")[0])
    given = int4_matmul_fused(jnp.zeros((1, 256), jnp.bfloat16), weight, residual=jnp.full((1, 64), 3.0))
    assert given.dtype == jnp.bfloat16
    assert given.tolist() == [[3.0] * 64]


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_dtype_of_the_result_without_a_kernel(fusion: Fusion) -> None:
    """x's by default; float32 that was asked for has been rounded nowhere."""
    weight, x = make(64, 192, 64, "minimum")[0], jnp.asarray(tokens(3, 192))
    norm, residual = map(jnp.asarray, arrays(3, 32 if fusion.gated else 64, 192))
    options = {
        "norm": None if fusion.norm_eps is None else norm,
        "gated": fusion.gated,
        "residual": residual if fusion.residual else None,
        "backend": "reference",
    }
    rounded = int4_matmul_fused(x, weight, **options)
    exact = int4_matmul_fused(x, weight, out_dtype=jnp.float32, **options)
    assert (rounded.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    assert (exact.astype(jnp.bfloat16) == rounded).all()
    assert (exact != rounded.astype(jnp.float32)).any()


def test_layers_give_the_same_with_and_without_a_fused_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers ask for a fused product where there is one; here the reference stands in for the kernel."""
    weight, _ = make(64, 64, 32, "zero_point", np.float32)
    square = jax.tree.map(jnp.asarray, weight)
    x = jnp.asarray(tokens(3, 64).astype(np.float32))
    norm = jnp.asarray(arrays(3, 64, 64)[0])

    def results() -> list[jax.Array]:
        hidden = gated_hidden(x, norm, EPS, square, None, "silu")
        return [norm_linear(x, norm, EPS, square), settled(add_linear(x, x, square)), hidden]

    plain = results()
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return int4_matmul_fused(*args, **kwargs)

    for module in (linear_module, mlp_module):
        monkeypatch.setattr(module, "fused_refusal", lambda *args, **kwargs: None)
        monkeypatch.setattr(module, "int4_matmul_fused", counted)
    for got, want in zip(results(), plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("rows", "shape", "fusion"),
    [(1, (4096, 1024), FUSIONS[0]), (16, (6144, 1024), FUSIONS[1]), (2, (1024, 3072), FUSIONS[3])],
)
def test_small_weights_take_blocks_that_fetch_all_at_once(rows: int, shape: tuple[int, int], fusion: Fusion) -> None:
    """A 0.6B model's up to 32 rows; a large one's never."""
    none = np.zeros(0, np.float32)
    weight = PackedInt4(none, none, none, None, shape, 128, "mosaic")
    assert tuning.plan_for(rows, weight, fusion=fusion).schedule.once
    assert not tuning.plan_for(rows, dataclasses.replace(weight, shape=(6144, 4096)), fusion=fusion).schedule.once
    many = tuning.plan_for(32, weight, fusion=fusion)
    assert (many.schedule.once, many.blocks_per_slice * many.schedule.tiles <= 132) == (True, True)
    assert not tuning.plan_for(33, weight, fusion=fusion).schedule.once
    two_by_two = dataclasses.replace(weight, shape=(3072, 2048))
    assert [tuning.plan_for(rows, two_by_two).schedule.once for rows in (8, 9)] == [True, False]
    wide = dataclasses.replace(weight, shape=(2048, 3072))  # twelve warps a block: two have no room
    assert [tuning.plan_for(rows, wide, kind).schedule.once for kind in tuning.MULTIPROCESSORS] == [True] * 3 + [False]


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "group"),
    [
        (1, 4096, 4096, 128),
        (1, 1024, 3072, 128),
        (2, 1024, 512, 128),
        (5, 1024, 1024, 128),
        (8, 4096, 4096, 128),
        (8, 3072, 2048, 128),
        (12, 2048, 1024, 128),
        (16, 1024, 3072, 128),
        (1, 1024, 1024, 16),
        (2, 1024, 1024, 32),
        (16, 2048, 1024, 32),
        (3, 1024, 2048, 64),
        (4, 1024, 1024, 1024),
        (17, 1024, 3072, 128),
        (32, 4096, 1024, 128),
        (27, 4096, 1024, 64),
    ],
)
def test_fused_kernel_on_the_gpu(rows: int, out_features: int, in_features: int, group: int, fusion: Fusion) -> None:
    """As many outputs as leave no multiprocessor idle: with fewer, the plan cuts 4096 inputs into slices."""
    weight, values = small(out_features, in_features, group)
    x = tokens(rows, in_features)
    norm, residual = arrays(rows, out_features // 2 if fusion.gated else out_features, in_features)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    assert fused_refusal(jnp.asarray(x), packed, norm_eps=fusion.norm_eps, gated=fusion.gated) is None
    got = int4_matmul_fused(
        jnp.asarray(x),
        packed,
        norm=None if fusion.norm_eps is None else jnp.asarray(norm),
        residual=jnp.asarray(residual.astype(BF16)) if fusion.residual else None,
        norm_eps=EPS,
        gated=fusion.gated,
    )
    want = expected(x, values, fusion, norm, residual.astype(BF16).astype(np.float64))
    assert np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out_features", "adding"),
    [
        *((rows, n, False) for rows, n in ((3, 4096), (6, 6136), (5, 14328), (8, 4096), (8, 14336), (16, 14328))),
        *((rows, 4088, True) for rows in (3, 5, 8)),
    ],
)
def test_two_halves_joined_by_a_cluster_on_the_gpu(rows: int, out_features: int, adding: bool) -> None:
    """Memory that results may get is NaN before; of some the last strip has eight outputs."""
    weight, values = small(out_features, 4096, 128)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    fusion = Fusion(residual=adding)
    assert tuning.plan_for(rows, packed, fusion=fusion).schedule.joined
    x, residual = tokens(rows, 4096), arrays(rows, out_features, 4096)[1].astype(BF16)
    want = in_float64(x, values) + (residual.astype(np.float64) if adding else 0.0)
    runs = []
    for _ in range(3):
        jax.block_until_ready([jnp.full((rows, out_features), jnp.nan, jnp.bfloat16) for _ in range(64)])
        if adding:
            got = int4_matmul_fused(jnp.asarray(x), packed, residual=jnp.asarray(residual))
        else:
            got = int4_matmul(jnp.asarray(x), packed, backend="mosaic")
        runs.append(np.asarray(got, np.float64))
    assert np.linalg.norm(runs[0] - want) / np.linalg.norm(want) < 4e-3
    assert all(np.array_equal(runs[0], run) for run in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize(("in_features", "group"), [(12288, 128), (14336, 64)])
def test_slices_joined_by_a_cluster_on_the_gpu(rows: int, in_features: int, group: int) -> None:
    """Memory that results may get is NaN before; the last clusters have a strip less, the last strip eight outputs."""
    weight, values = small(1992, in_features, group)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    assert tuning.plan_for(rows, packed, fusion=Fusion(residual=True)).schedule.joined
    x, residual = tokens(rows, in_features), arrays(rows, 1992, in_features)[1].astype(BF16)
    want = expected(x, values, Fusion(residual=True), residual, residual.astype(np.float64))
    runs = []
    for _ in range(3):
        jax.block_until_ready([jnp.full((rows, 1992), jnp.nan, jnp.bfloat16) for _ in range(64)])
        runs.append(np.asarray(int4_matmul_fused(jnp.asarray(x), packed, residual=jnp.asarray(residual)), np.float64))
    assert np.linalg.norm(runs[0] - want) / np.linalg.norm(want) < 4e-3
    assert all(np.array_equal(runs[0], run) for run in runs)
