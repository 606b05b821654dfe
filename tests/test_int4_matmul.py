"""The INT4 matrix product: the definition in float64, the Hopper kernel on a simulated warp, dispatch, the GPU."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_int4_warp import simulate

from pallas_kernels import dispatch, triton_backend
from pallas_kernels.int4_matmul import (
    PackedInt4,
    dequantize,
    from_codes,
    int4_matmul,
    int4_matmul_fused,
    mosaic,
    to_kernel_layout,
    to_mosaic,
    to_triton,
    tuning,
    wide_tuning,
)
from pallas_kernels.int4_matmul.columns import Columns
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Plan, Schedule

BF16 = ml_dtypes.bfloat16
ROWS, OUT, IN, GROUPS = (1, 2, 7, 16, 17), (8, 32, 72, 96, 192, 576, 1440), (64, 192, 576, 1536), (32, 64, 128, -1)
KINDS = ("symmetric", "zero_point", "minimum")


def make(
    out_features: int, in_features: int, group_size: int, kind: str, dtype: type = BF16, seed: int = 0
) -> tuple[PackedInt4, np.ndarray]:
    """A canonical weight and its values in float64."""
    rng = np.random.default_rng(seed)
    group_size = in_features if group_size == -1 else min(group_size, in_features)
    codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
    shape = (out_features, -(-in_features // group_size))
    scales = rng.uniform(0.5, 1.5, shape).astype(dtype)
    offsets, zeros = None, 8.0
    if kind == "zero_point":
        offsets = rng.integers(0, 16, shape, dtype=np.uint8)
        zeros = np.repeat(offsets.astype(np.float64), group_size, 1)[:, :in_features]
    spread = np.repeat(scales.astype(np.float64), group_size, 1)[:, :in_features]
    values = spread * (codes - zeros)
    if kind == "minimum":
        offsets = (-8 * rng.uniform(0.5, 1.5, shape)).astype(dtype)
        values = spread * codes + np.repeat(offsets.astype(np.float64), group_size, 1)[:, :in_features]
    return from_codes(codes, scales, offsets, group_size=group_size), values


def tokens(rows: int, in_features: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, in_features)).astype(BF16)


def error(out: np.ndarray, x: np.ndarray, values: np.ndarray) -> float:
    expected = x.astype(np.float64) @ values.T
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))


# Every pair of a shape's sizes occurs; every combination would take minutes.
SHAPES = [
    (ROWS[(i + j + k) % 5], n, k_size, GROUPS[(i + j) % 4], KINDS[(i + 2 * j) % 3])
    for (i, n), (j, k_size) in itertools.product(enumerate(OUT), enumerate(IN))
    for k in [i * j]
]


@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind"), SHAPES)
@pytest.mark.parametrize("layout", ["canonical", "mosaic", "triton"])
def test_reference_is_the_float64_product(rows, out_features, in_features, group_size, kind, layout) -> None:
    weight, values = make(out_features, in_features, group_size, kind)
    weight = {"mosaic": to_mosaic, "triton": to_triton}.get(layout, lambda w: w)(weight)
    x = tokens(rows, in_features).astype(np.float32)
    out = jax.jit(int4_matmul)(jnp.asarray(x), weight)
    assert out.shape == (rows, out_features)
    assert error(np.asarray(out), x, values) < 1e-6


def test_reference_multiplies_by_a_code_book() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (24, 64), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (24, 2)).astype(np.float32)
    book = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
    weight = from_codes(codes, scales, group_size=32, book=book)
    values = np.repeat(scales, 32, 1) * book[codes]
    x = tokens(3, 64).astype(np.float32)
    for w in (weight, to_mosaic(weight), to_triton(weight)):
        assert error(np.asarray(int4_matmul(jnp.asarray(x), w)), x, values.astype(np.float64)) < 1e-6


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "group_size", "kind", "dtype"),
    [
        (1, 8, 64, 32, "symmetric", BF16),
        (2, 72, 192, 64, "zero_point", BF16),
        (7, 96, 576, 128, "zero_point", np.float16),
        (16, 192, 576, -1, "minimum", np.float32),
        (17, 32, 1536, 128, "minimum", BF16),
        (8, 64, 1160, 16, "zero_point", BF16),
        (40, 64, 256, 128, "zero_point", BF16),
    ],
)
def test_hopper_kernel_on_simulated_warps(rows, out_features, in_features, group_size, kind, dtype) -> None:
    weight, values = make(out_features, in_features, group_size, kind, dtype)
    x, packed = tokens(rows, in_features), to_mosaic(weight)
    partial = simulate(x, packed, tuning.plan_for(rows, packed).schedule)
    assert error(partial.astype(np.float64).sum(0), x, values) < 3e-6


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(warps=4, blocks=2),
        Schedule(warps=4, parts=1, strips=1, depth=1, blocks=1),
        Schedule(warps=8, parts=1, strips=2, depth=3, blocks=3),
        Schedule(warps=12, parts=1, strips=2, depth=4, blocks=7, digits=True),
        Schedule(warps=16, parts=2, strips=2, depth=2, blocks=2),
        Schedule(warps=4, parts=3, strips=2, depth=2, blocks=4, digits=True),
        Schedule(warps=8, parts=2, strips=2, depth=2, blocks=4, scaled=True),
    ],
)
def test_every_schedule_computes_the_same(schedule: Schedule) -> None:
    weight, values = make(256, 1408, 128, "zero_point")
    x = tokens(5, 1408)
    partial = simulate(x, to_mosaic(weight), schedule)
    assert error(partial.astype(np.float64).sum(0), x, values) < 3e-6


@pytest.mark.parametrize(("group_size", "kind"), [(128, "zero_point"), (32, "minimum"), (64, "symmetric")])
def test_digits_of_two_tokens_are_columns_on_simulated_warps(group_size: int, kind: str) -> None:
    """Tokens of very different size share a product, and one that holds an infinity does not reach the other."""
    weight, values = make(64, 896, group_size, kind)
    x = (tokens(2, 896).astype(np.float32) * np.array([[1.0], [2.0**40]], np.float32)).astype(BF16)
    schedule = Schedule(warps=4, parts=2, strips=2, depth=2, blocks=2, scaled=True)
    assert Columns.serves(Plan.of(2, to_mosaic(weight), schedule))
    out = simulate(x, to_mosaic(weight), schedule)[0]
    for token in range(2):
        assert error(out[token : token + 1], x[token : token + 1], values) < 5e-7
    x[1, 300] = np.inf
    with_infinity = simulate(x, to_mosaic(weight), schedule)[0]
    assert np.isnan(with_infinity[1]).all()
    assert (with_infinity[0] == out[0]).all()


def test_lifted_tokens_of_very_different_size_on_simulated_warps() -> None:
    """What x is lifted by leaves room for 2^70 and for 2^-40, and an infinity does not reach other tokens."""
    weight, values = make(64, 1024, 128, "zero_point")
    sizes = np.array([[2.0**70], [1.0], [2.0**-40]], np.float32)
    x = (tokens(3, 1024).astype(np.float32) * sizes).astype(BF16)
    schedule = Schedule(warps=4, parts=2, strips=2, depth=2, blocks=2, scaled=True)
    out = simulate(x, to_mosaic(weight), schedule)[0]
    for token in range(3):
        assert error(out[token : token + 1], x[token : token + 1], values) < 1e-6
    x[1, 300] = np.inf
    with_infinity = simulate(x, to_mosaic(weight), schedule)[0]
    assert np.isnan(with_infinity[1]).all()
    assert (with_infinity[::2] == out[::2]).all()


@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64])
@pytest.mark.parametrize(("out_features", "in_features"), [(14336, 4096), (4096, 14336), (576, 1536), (72, 64)])
def test_kernel_lowers_for_cuda(rows: int, out_features: int, in_features: int) -> None:
    lower(rows, out_features, in_features, 64, KINDS[rows % 3], None)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(warps=4),
        Schedule(warps=28, parts=1, strips=2, depth=2),
        Schedule(digits=True),
        Schedule(warps=4, scaled=True, bulk=True),
        Schedule(warps=8, parts=1, strips=1, scaled=True, bulk=True, apart=True),
    ],
)
def test_schedules_lower_for_cuda(schedule: Schedule) -> None:
    lower(8, 256, 1024, 128, "zero_point", schedule)


def lower(rows, out_features, in_features, group_size, kind, schedule, fusion: Fusion = PLAIN) -> None:
    weight = jax.eval_shape(lambda: to_mosaic(jax.tree.map(jnp.asarray, make(64, in_features, group_size, kind)[0])))
    strips = -(-out_features // 16)
    codes, scales, offsets = (
        None if a is None else jax.ShapeDtypeStruct((strips, *a.shape[1:]), a.dtype)
        for a in (weight.codes, weight.scales, weight.offsets)
    )
    weight = PackedInt4(codes, scales, offsets, None, (out_features, in_features), weight.group_size, "mosaic")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    x = jax.ShapeDtypeStruct((rows, in_features), jnp.bfloat16)

    if schedule is None:
        schedule = tuning.plan_for(rows, weight, fusion=fusion).schedule
    results = Plan.of(rows, weight, schedule, fusion).results
    norm = None if fusion.norm_eps is None else jax.ShapeDtypeStruct((in_features,), jnp.float32)
    residual = jax.ShapeDtypeStruct((rows, results), jnp.bfloat16) if fusion.residual else None

    def product(x, w, norm, residual):
        options = {"schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
        return mosaic.int4_matmul(x, w, norm, residual, **options)

    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(product).trace(x, weight, norm, residual).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_plan_gives_every_unit_to_one_block_and_all_blocks_are_resident_at_once() -> None:
    shapes = [(14336, 4096), (4096, 14336), (4096, 4096), (576, 1536), (64, 64)]
    for rows, (n, k), group_size in itertools.product((1, 8, 16, 32, 64), shapes, (16, 32, 128)):
        scales = np.zeros(0, np.float32)
        plan = tuning.plan_for(rows, PackedInt4(None, scales, scales, None, (n, k), min(k, group_size), "mosaic"))
        bounds = [b * plan.strips // plan.blocks_per_slice for b in range(plan.blocks_per_slice + 1)]
        counts = np.diff(bounds)
        assert bounds[-1] == plan.strips
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        resident = plan.schedule.blocks // 132
        assert plan.slices * plan.blocks_per_slice <= plan.schedule.blocks
        assert (plan.shared_bytes + 1024) * resident <= 228 * 1024


def test_what_has_been_measured_with_a_scaled_x_takes_it() -> None:
    scales = np.zeros(0, BF16)

    def schedule(
        rows: int, n: int, k: int, group_size: int = 128, *, zeros: bool = True, fusion: Fusion = PLAIN
    ) -> Schedule:
        offsets = np.zeros(0, np.uint8) if zeros else None
        weight = PackedInt4(None, scales, offsets, None, (n, k), group_size, "mosaic")
        return tuning.plan_for(rows, weight, fusion=fusion).schedule

    for rows in (1, 2, 8):
        assert schedule(rows, 14336, 4096).bulk
        assert schedule(rows, 4096, 14336).blocks == 264
        assert schedule(rows, 4096, 4096).scaled
        assert schedule(rows, 4096, 4096).bulk
    assert [schedule(rows, 4096, 4096).apart for rows in (1, 2, 9, 16)] == [False, False, True, True]
    assert schedule(1, 14336, 4096, 32).scaled
    assert schedule(5, 14336, 4096, 64).bulk
    assert schedule(1, 14336, 4096, zeros=False).scaled
    halves = {*itertools.product((3, 7, 8), (4096, 6144, 14336)), (16, 14336)}
    for rows, n in itertools.product((1, 2, 3, 7, 8, 9, 15, 16), (2048, 4096, 6144, 14336, 28672)):
        assert schedule(rows, n, 4096).joined == ((rows, n) in halves)
        assert schedule(rows, n, 4096, fusion=Fusion(residual=True)).joined == (3 <= rows <= 8 and n == 4096)
        assert not schedule(rows, n, 4096, fusion=Fusion(norm_eps=1e-5)).joined
        assert not schedule(rows, n, 4096, 64).joined
    assert schedule(15, 14336, 4096).apart
    assert schedule(16, 4096, 14336).apart
    assert schedule(16, 14336, 4096, 64).bulk
    others = [schedule(9, 14336, 4096, 64), schedule(17, 14336, 4096), schedule(1, 14336, 4096, 16)]
    others.append(schedule(1, 14336, 4000))
    assert not any(other.scaled for other in others)


def test_bulk_copies_need_matrices_that_blocks_divide_evenly() -> None:
    with pytest.raises(ValueError, match="bulk copies need whole groups of at most 128 inputs for every warp of"):
        lower(1, 64, 576, 64, "zero_point", Schedule(warps=4, scaled=True, bulk=True))


@pytest.mark.parametrize(("rows", "strips"), [(2, 1), (8, 2), (17, 1)])
def test_warps_that_do_not_multiply_have_their_limits(rows: int, strips: int) -> None:
    schedule = Schedule(warps=4, strips=strips, scaled=True, bulk=True, apart=True)
    with pytest.raises(ValueError, match=f"by bulk copies, and add 1 strips, not {rows} rows"):
        lower(rows, 64, 1024, 128, "zero_point", schedule)


def test_leading_dimensions_and_out_dtype() -> None:
    weight, values = make(24, 64, 32, "symmetric")
    x = tokens(6, 64).astype(np.float32)
    out = int4_matmul(jnp.asarray(x).reshape(2, 3, 64), weight, out_dtype=jnp.bfloat16)
    assert out.shape == (2, 3, 24)
    assert out.dtype == jnp.bfloat16
    assert error(np.asarray(out).reshape(6, 24), x, values) < 4e-3
    assert int4_matmul(jnp.asarray(x)[0], weight).shape == (24,)
    assert int4_matmul(jnp.zeros((0, 64)), weight).shape == (0, 24)


def test_explain_says_why_not_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    weight = to_mosaic(make(24, 64, 32, "symmetric")[0])
    x = jnp.zeros((4, 64), jnp.bfloat16)

    def reason(x: jax.Array, w: PackedInt4) -> str:
        mosaic_choice, triton_choice, reference_choice = int4_matmul(x, w, explain=True)
        assert reference_choice.taken != mosaic_choice.taken
        assert not triton_choice.taken
        return mosaic_choice.reason

    assert reason(x, weight) == "the first that supports this call"
    assert "bfloat16 activations, not float32" in reason(x.astype(jnp.float32), weight)
    assert "one row or more" in reason(jnp.zeros((0, 64), jnp.bfloat16), weight)
    assert "repack with to_kernel_layout" in reason(x, make(24, 64, 32, "symmetric")[0])
    odd = to_mosaic(make(24, 72, 24, "symmetric")[0])
    assert "groups of 16, 32, 64 or a multiple of 128" in reason(jnp.zeros((4, 72), jnp.bfloat16), odd)


def test_backend_can_be_forced_and_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make(24, 64, 32, "symmetric")[0]
    x = jnp.zeros((4, 64), jnp.bfloat16)
    assert [c.taken for c in int4_matmul(x, weight, backend="reference", explain=True)] == [False, False, True]
    with pytest.raises(ValueError, match="int4_matmul cannot run on mosaic: it reads weights of the mosaic layout"):
        int4_matmul(x, weight, backend="mosaic")
    monkeypatch.setenv("JAXINFER_KERNELS", "tpu")
    with pytest.raises(ValueError, match="int4_matmul has no backend 'tpu'; it has mosaic, triton, reference"):
        int4_matmul(x, weight)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool, jnp.complex64, jnp.float8_e4m3fn])
def test_activations_that_are_no_floats_are_an_error(dtype) -> None:
    weight = make(24, 64, 32, "symmetric")[0]
    with pytest.raises(ValueError, match=f"x is {jnp.dtype(dtype)} and results .*; x needs bfloat16"):
        inspect.unwrap(int4_matmul)(jnp.ones((2, 64), dtype), weight)


def test_results_of_integers_are_an_error() -> None:
    weight = make(24, 64, 32, "symmetric")[0]
    with pytest.raises(ValueError, match="x is float32 and results int32"):
        int4_matmul(jnp.ones((2, 64)), weight, out_dtype=jnp.int32)


@pytest.mark.parametrize(
    ("out_features", "options", "message"),
    [
        (24, {"norm": jnp.ones(32)}, r"norm has shape \(32,\); x of 64 features needs \(64,\)"),
        (24, {"residual": jnp.ones((5, 2, 24))}, r"residual has shape \(5, 2, 24\); the result has \(2, 24\)"),
        (24, {"gated": True, "residual": jnp.ones((2, 24))}, r"the result has \(2, 12\)"),
        (23, {"gated": True}, "an even number of out_features, not 23"),
    ],
)
def test_surroundings_that_do_not_fit_are_an_error(out_features: int, options: dict, message: str) -> None:
    weight = make(out_features, 64, 32, "symmetric")[0]
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(int4_matmul_fused)(jnp.ones((2, 64)), weight, **options)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_weights_are_repacked_for_the_kernel_that_will_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make(24, 64, 32, "symmetric")[0]
    assert to_kernel_layout(weight) is weight  # no GPU here
    monkeypatch.setattr(triton_backend, "refusal", lambda: None)
    assert to_kernel_layout(weight).layout == "triton"
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    assert to_kernel_layout(weight).layout == "mosaic"
    assert to_kernel_layout(make(24, 72, 24, "symmetric")[0]).layout == "canonical"  # groups of 24: neither kernel
    monkeypatch.setenv("JAXINFER_KERNELS", "triton")
    assert to_kernel_layout(weight).layout == "triton"
    monkeypatch.setenv("JAXINFER_KERNELS", "reference")
    assert to_kernel_layout(weight) is weight


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = make(24, 64, 32, "symmetric")[0]
    with pytest.raises(ValueError, match=r"x has shape \(4, 63\); a weight of 64 in_features needs \[..., 64\]"):
        int4_matmul(jnp.zeros((4, 63)), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(4096, 4096), (6144, 4096), (4096, 6144)])
def test_lifted_x_on_the_gpu(rows: int, out_features: int, in_features: int) -> None:
    """Asynchronous copies, bulk copies, bulk copies in three slices of the inputs; tokens of very different size.

    One and two rows are columns of bytes, whose sums are exact. A model of the tensor core (test_lifted_sums.py) comes
    to 3e-7 for the others; the bound is what float16 kept to before.
    """
    weight, values = make(out_features, in_features, 128, "zero_point")
    x = (tokens(rows, in_features).astype(np.float32) * 2.0 ** np.arange(0, 80, 10)[:rows, None]).astype(BF16)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    assert tuning.plan_for(rows, packed).schedule.scaled
    runs = [np.asarray(int4_matmul(jnp.asarray(x), packed, out_dtype=jnp.float32)) for _ in range(3)]
    for token in range(rows):
        assert error(runs[0][token : token + 1], x[token : token + 1], values) < 8e-6
    assert (runs[0] == runs[1]).all()
    assert (runs[0] == runs[2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("group_size", "kind"),
    [(32, "zero_point"), (32, "minimum"), (32, "symmetric"), (64, "zero_point"), (128, "symmetric")],
)
def test_other_groups_and_kinds_of_lifted_x_on_the_gpu(rows: int, group_size: int, kind: str) -> None:
    """The bound is twice that of the test above: nobody has measured these against float64 yet."""
    weight, values = make(2048, 4096, group_size, kind)
    x = tokens(rows, 4096)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    assert tuning.plan_for(rows, packed).schedule.scaled
    out = np.asarray(int4_matmul(jnp.asarray(x), packed, out_dtype=jnp.float32))
    assert error(out, x, values) < 1.6e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_features", "in_features", "group_size", "kind"), SHAPES)
def test_kernel_on_the_gpu(rows, out_features, in_features, group_size, kind) -> None:
    weight, values = make(out_features, in_features, group_size, kind)
    x = tokens(rows, in_features)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    product = jax.jit(lambda x, w: int4_matmul(x, w, backend="mosaic", out_dtype=jnp.float32))
    outs = [np.asarray(product(jnp.asarray(x), packed)) for _ in range(3)]
    # Exact products; sums of 128 + code that cancel; weights rounded to bfloat16.
    allowed = 3e-6 if rows <= tuning.DIGITS_MAX_ROWS else 1e-5 if rows < wide_tuning.WIDE_ROWS else 3e-3
    assert error(outs[0], x, values) < allowed
    assert all(np.array_equal(outs[0], out) for out in outs)


@pytest.mark.gpu
def test_dequantised_path_on_the_gpu_matches_the_kernel() -> None:
    weight = jax.tree.map(jnp.asarray, to_mosaic(make(576, 1536, 64, "minimum")[0]))
    x = jnp.asarray(tokens(16, 1536))
    fused, plain = (int4_matmul(x, weight, backend=b, out_dtype=jnp.float32) for b in ("mosaic", "reference"))
    assert jnp.linalg.norm(fused - plain) / jnp.linalg.norm(plain) < 3e-3  # the plain one rounds weights to bf16
    assert dequantize(weight).shape == (576, 1536)
