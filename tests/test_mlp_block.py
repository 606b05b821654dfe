"""A small model's feed-forward block in one kernel, and products of sums, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_cluster_warp import simulate_gated_once, simulate_once_of_sum
from test_int4_fused import small
from test_int4_matmul import BF16

from pallas_kernels.int4_matmul import PackedInt4, gated_once, to_mosaic
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.plan import Schedule

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
    ("rows", "slices", "group", "hidden", "clusters", "cluster", "sharing", "normed"),
    [
        (1, 3, 128, 384, 2, 2, 2, True),
        (2, 0, 64, 512, 2, 4, 1, True),
        (3, 9, 32, 256, 1, 4, 4, False),
        (2, 2, 128, 256, 1, 2, 1, True),
    ],
)
def test_block_on_simulated_warps(rows, slices, group, hidden, clusters, cluster, sharing, normed) -> None:
    gate_up, gate_values = small(2 * hidden, 512, group)
    down, down_values = small(256, hidden, group)
    weights = (to_mosaic(gate_up), to_mosaic(down))
    assert GatedPlan.refusal(rows, *weights, clusters, cluster) is None
    x, partial, total = stream(rows, slices, 512)
    norm = np.random.default_rng(7).uniform(0.5, 1.5, 512).astype(np.float32) if normed else None
    options = {"clusters": clusters, "cluster": cluster, "sharing": sharing, "norm_eps": EPS}
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


def test_block_lowers_for_cuda() -> None:
    gate_up, down = shapes(3072, 1024)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    x, partial = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1, 1024), jnp.float32)
    norm = jax.ShapeDtypeStruct((1024,), jnp.float32)
    options = {"clusters": 16, "cluster": 4, "norm_eps": EPS}
    run = jax.jit(lambda *arguments: gated_once.gated_mlp(*arguments, jax.tree.leaves(arguments[2]), **options))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = run.trace(x, partial, gate_up, down, norm).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
