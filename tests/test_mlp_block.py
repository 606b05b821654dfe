"""A small model's feed-forward block in one kernel, and products of sums, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_cluster_warp import simulate_gated_once, simulate_once_of_sum
from test_int4_fused import small
from test_int4_matmul import BF16, make

from pallas_kernels.int4_matmul import (
    PackedInt4,
    gated_once,
    int4_gated_mlp_of_sum,
    int4_matmul_of_sum,
    once_of_sum,
    to_mosaic,
)
from pallas_kernels.int4_matmul.gated_plan import GatedPlan, shape_for
from pallas_kernels.int4_matmul.mlp import gated_shapes_refusal
from pallas_kernels.int4_matmul.plan import Fusion, Schedule
from pallas_kernels.int4_matmul.tuning import plan_for

EPS, TINY = 1e-5, 1 / 64


def tiny(weight: PackedInt4) -> PackedInt4:
    """A weight in the kernel's layout, so small that gates are in the range where they do something."""
    offsets = weight.offsets * np.float32(TINY) if weight.kind == "minimum" else weight.offsets
    return to_mosaic(dataclasses.replace(weight, scales=weight.scales * np.float32(TINY), offsets=offsets))


def normalised(y: np.ndarray, norm: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | float]:
    """y times the norm's weights, rounded as the kernel rounds it, and what products are to be multiplied by."""
    wide = y.astype(np.float64)
    if norm is None:
        return wide, 1.0
    return (wide * norm).astype(BF16).astype(np.float64), 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS)


def expected(y: np.ndarray, gate_up: np.ndarray, down: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    """In float64, but what is between the products: that the kernel rounds to bfloat16."""
    wide, root = normalised(y, norm)
    gate, up = np.split(wide @ gate_up.T * root, 2, axis=1)
    hidden = (gate / (1 + np.exp(-gate)) * up).astype(BF16).astype(np.float64)
    return hidden @ down.T


def stream(rows: int, slices: int, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, slices that are to be added to it, and their sum."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, features)).astype(BF16)
    partial = rng.standard_normal((slices, rows, features)).astype(np.float32)
    return x, partial, (x.astype(np.float32) + partial.sum(0)).astype(BF16)


def same_sum(got: np.ndarray, want: np.ndarray) -> bool:
    """Sums in another order round to the other neighbour now and then."""
    return bool((got == want).mean() > 0.99) and np.allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.01)


@pytest.mark.parametrize(
    ("rows", "slices", "group", "hidden", "clusters", "cluster", "normed"),
    [
        (1, 3, 128, 512, 2, 2, True),
        (2, 0, 64, 512, 2, 4, True),
        (2, 9, 32, 256, 1, 4, False),
        (1, 2, 64, 256, 2, 8, True),
    ],
)
def test_block_on_simulated_warps(rows, slices, group, hidden, clusters, cluster, normed) -> None:
    gate_up, gate_values = small(2 * hidden, 512, group)
    down, down_values = small(256, hidden, group)
    weights = (to_mosaic(gate_up), to_mosaic(down))
    assert GatedPlan.refusal(rows, *weights, clusters, cluster) is None
    x, partial, total = stream(rows, slices, 512)
    norm = np.random.default_rng(7).uniform(0.5, 1.5, 512).astype(np.float32) if normed else None
    options = {"clusters": clusters, "cluster": cluster, "norm_eps": EPS}
    ahead = [np.zeros(size, np.uint8) for size in (16, 4100, 65536)]  # counts how often a byte was asked for
    got, y = simulate_gated_once(x, partial if slices else None, weights, norm, ahead, **options)
    assert all((array == 1)[: len(array) // 16 * 16].all() for array in ahead)
    assert same_sum(y, total)
    want = expected(y, gate_values, down_values, norm)
    assert np.linalg.norm(got.sum(0, dtype=np.float64) - want) / np.linalg.norm(want) < 1e-3


@pytest.mark.parametrize(("rows", "slices", "cluster"), [(1, 10, 4), (2, 3, 2)])
def test_product_of_a_sum_on_simulated_warps(rows: int, slices: int, cluster: int) -> None:
    weight, values = small(64, 512, 128)
    x, partial, total = stream(rows, slices, 512)
    norm = np.random.default_rng(7).uniform(0.5, 1.5, 512).astype(np.float32)
    schedule = Schedule(4, 1, 1, 1, 4, once=True)
    options = {"schedule": schedule, "cluster": cluster, "norm_eps": EPS}
    got, y = simulate_once_of_sum(x, partial, to_mosaic(weight), norm, **options)
    assert same_sum(y, total)
    wide, root = normalised(y, norm)
    want = wide @ values.T * root
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-6


def shapes(hidden: int, inputs: int, group: int = 128) -> tuple[PackedInt4, PackedInt4]:
    """Gate and up, and down, as arrays that are not there."""

    def weight(outputs: int, inputs: int) -> PackedInt4:
        factors = (outputs // 16, -(-inputs // group), 16)
        codes = jax.ShapeDtypeStruct((outputs // 16, inputs // 64, 128), jnp.int32)
        scales, offsets = (jax.ShapeDtypeStruct(factors, dtype) for dtype in (jnp.bfloat16, jnp.uint8))
        return PackedInt4(codes, scales, offsets, None, (outputs, inputs), group, "mosaic")

    return weight(2 * hidden, inputs), weight(inputs, hidden)


@pytest.mark.parametrize(
    ("rows", "hidden", "inputs", "expected"),
    [
        (1, 3072, 1024, (12, 8)),
        (2, 3072, 1024, (12, 8)),
        (3, 3072, 1024, None),
        (1, 1536, 512, (12, 8)),
        (1, 1024, 512, (8, 4)),
        (1, 2048, 1024, (8, 4)),
        (1, 4096, 1024, None),
        (1, 1536, 576, None),
        (1, 8192, 2048, None),
        (1, 14336, 4096, None),
    ],
)
def test_small_blocks_of_few_rows_are_one_kernel(rows: int, hidden: int, inputs: int, expected: tuple | None) -> None:
    weights = shapes(hidden, inputs)
    assert shape_for(rows, *weights) == expected
    refusal = gated_shapes_refusal(rows, *weights)
    assert refusal == (None if expected else "it is for 9 rows and more")


def test_clusters_whose_threads_would_leave_a_block_out_are_refused() -> None:
    """Of three blocks, or of ten, the last would wait for features that nobody sends."""
    refusals = {cluster: GatedPlan.refusal(1, *shapes(1920, 512), 1, cluster) for cluster in (2, 3, 4, 8, 10)}
    assert {cluster for cluster, refusal in refusals.items() if refusal} >= {3, 10}
    for cluster in (3, 10):
        assert "they send to evenly" in (refusals[cluster] or "")


def test_block_and_the_product_behind_it_lower_for_cuda() -> None:
    gate_up, down = shapes(3072, 1024)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    x, partial = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1, 1024), jnp.float32)
    norm = jax.ShapeDtypeStruct((1024,), jnp.float32)
    qkv, _ = shapes(2048, 1024)
    schedule = plan_for(1, qkv, fusion=Fusion(norm_eps=EPS)).schedule

    def run(x, partial, gate_up, down, qkv, norm):
        ahead, options = jax.tree.leaves(qkv), {"clusters": 12, "cluster": 8, "norm_eps": EPS}
        left, y = gated_once.gated_mlp(x, partial, gate_up, down, norm, ahead, **options)
        options = {"schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "norm_eps": EPS}
        return once_of_sum.int4_matmul_of_sum(y, left, qkv, norm, **options)

    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(run).trace(x, partial, gate_up, down, qkv, norm).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "slices", "kind", "group"),
    [(1, 8, "zero_point", 128), (1, 0, "symmetric", 128), (2, 5, "minimum", 64), (2, 16, "zero_point", 32)],
)
def test_block_on_the_gpu(rows: int, slices: int, kind: str, group: int) -> None:
    """A 0.6B model's, and the product behind it, twenty times the same bits; what the kernels write to was NaN."""
    gate_up, gate_values = make(6144, 1024, group, kind, np.float32)
    down, down_values = make(1024, 3072, group, kind, np.float32)
    qkv, qkv_values = make(4096, 1024, group, kind, np.float32)
    weights = [tiny(weight) for weight in (gate_up, down, qkv)]
    x, partial, total = stream(rows, slices, 1024)
    norm = np.random.default_rng(7).uniform(0.5, 1.5, 1024).astype(np.float32)

    @jax.jit
    def run(x, partial, weights, norm):
        gate_up, down, qkv = weights
        left, y = int4_gated_mlp_of_sum(
            x, partial, gate_up, down, norm=norm, norm_eps=EPS, ahead=jax.tree.leaves(qkv), backend="mosaic"
        )
        return left, y, *int4_matmul_of_sum(y, left, qkv, norm=norm, norm_eps=EPS, backend="mosaic")

    arguments = jax.tree.map(jnp.asarray, (x, partial if slices else None, weights, norm))
    jax.block_until_ready([jnp.full((1 << 16,), jnp.nan) for _ in range(64)])
    left, y, out, after = (np.asarray(array) for array in run(*arguments))
    assert left.shape == (12, rows, 1024)
    for _ in range(20):
        again = run(*arguments)
        assert all(np.array_equal(np.asarray(a), b) for a, b in zip(again, (left, y, out, after), strict=True))
    assert same_sum(y, total)
    want = expected(y, gate_values * TINY, down_values * TINY, norm)
    assert np.linalg.norm(left.sum(0, dtype=np.float64) - want) / np.linalg.norm(want) < 4e-3
    assert same_sum(after, (y.astype(np.float32) + left.sum(0)).astype(BF16))
    wide, root = normalised(after, norm)
    want = wide @ (qkv_values * TINY).T * root
    assert np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want) < 4e-3
