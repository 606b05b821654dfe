"""The kernel that stays on the card: simulated warp by warp against float64."""

import ml_dtypes
import numpy as np
from simulated_int4_warp import relative_error
from simulated_resident_warp import simulate

from pallas_kernels.resident.chain import Chain

BF16 = ml_dtypes.bfloat16


def arrays(plan: Chain) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(0)
    x = random.standard_normal(plan.hidden).astype(BF16)
    norms = [random.uniform(0.5, 1.5, (plan.layers, plan.hidden)).astype(BF16) for _ in range(2)]
    weights = [
        (random.standard_normal((plan.layers, m.outputs, m.inputs)) / m.inputs**0.5).astype(BF16)
        for phase in plan.phases
        for m in phase
    ]
    return x, norms, weights


def reference(plan: Chain, x: np.ndarray, norms: list[np.ndarray], weights: list[np.ndarray]) -> np.ndarray:
    def normed(hidden: np.ndarray, factor: np.ndarray) -> np.ndarray:
        return hidden / np.sqrt(np.mean(hidden**2) + plan.eps) * factor.astype(np.float64)

    hidden = x.astype(np.float64)
    for layer in range(plan.layers):
        q, _, _, o, gate, up, down = (weight[layer].astype(np.float64) for weight in weights)
        hidden = hidden + o @ (q @ normed(hidden, norms[0][layer]))
        inner = normed(hidden, norms[1][layer])
        gated = gate @ inner
        hidden = hidden + down @ (gated / (1 + np.exp(-gated)) * (up @ inner))
    return hidden


def test_layers_follow_each_other_through_the_blocks() -> None:
    plan = Chain(2, 256, 128, 64, 256, blocks=8, warps=2, slots=5, window=3)
    given = arrays(plan)
    out = simulate(*given, plan)
    assert relative_error(out, reference(plan, *given)) < 1e-2
    np.testing.assert_array_equal(out, simulate(*given, plan))
