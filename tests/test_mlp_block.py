"""A small model's feed-forward block in one kernel, against float64."""

import numpy as np
import pytest
from simulated_cluster_warp import simulate_gated_once
from test_int4_fused import small
from test_int4_matmul import BF16

from pallas_kernels.int4_matmul import to_mosaic
from pallas_kernels.int4_matmul.gated_plan import GatedPlan

EPS = 1e-5


def expected(y: np.ndarray, gate_up: np.ndarray, down: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    """In float64, but what the kernel rounds to bfloat16: y times the norm's weights, and what is between products."""
    wide = y.astype(np.float64)
    root = 1.0
    if norm is not None:
        root = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS)
        wide = (wide * norm).astype(BF16).astype(np.float64)
    gate, up = np.split(wide @ gate_up.T * root, 2, axis=1)
    hidden = (gate / (1 + np.exp(-gate)) * up).astype(BF16).astype(np.float64)
    return hidden @ down.T


@pytest.mark.parametrize(
    ("rows", "slices", "group", "hidden", "clusters", "cluster", "normed"),
    [(1, 3, 128, 384, 2, 2, True), (2, 0, 64, 512, 2, 4, True), (3, 9, 32, 256, 1, 4, False)],
)
def test_block_on_simulated_warps(rows, slices, group, hidden, clusters, cluster, normed) -> None:
    rng = np.random.default_rng(rows)
    gate_up, gate_values = small(2 * hidden, 512, group)
    down, down_values = small(256, hidden, group)
    weights = (to_mosaic(gate_up), to_mosaic(down))
    assert GatedPlan.refusal(rows, *weights, clusters, cluster) is None
    x = rng.standard_normal((rows, 512)).astype(BF16)
    partial = rng.standard_normal((slices, rows, 512)).astype(np.float32) if slices else None
    norm = rng.uniform(0.5, 1.5, 512).astype(np.float32) if normed else None
    options = {"clusters": clusters, "cluster": cluster, "norm_eps": EPS}
    got, y = simulate_gated_once(x, partial, weights, norm, **options)
    total = x if partial is None else (x.astype(np.float64) + partial.sum(0, dtype=np.float64)).astype(BF16)
    assert (y == total).mean() > 0.99  # sums in float32 round to the other neighbour now and then
    want = expected(y, gate_values, down_values, norm)
    error = np.linalg.norm(got.sum(0, dtype=np.float64) - want) / np.linalg.norm(want)
    assert error < 1e-3, error
