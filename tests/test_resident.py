"""All layers of a decode step in one kernel: simulated, every block's every warp side by side, against float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from simulated_int4_warp import relative_error
from simulated_resident_warp import simulate

from pallas_kernels.resident.plan import HEAD_DIM, Plan

BF16 = ml_dtypes.bfloat16


def normed(x: np.ndarray, factor: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * factor.astype(np.float64)


def reference(
    plan: Plan, x: np.ndarray, layers: Any, table: np.ndarray, position: int, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    """In float64; keys and values are appended to the pools."""
    hidden = x.astype(np.float64)
    cos, sin = (np.concatenate([a, b], -1)[:, None] for a, b in ((cos, cos), (-sin, sin)))

    def turned(heads: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        if norm is not None:
            heads = normed(heads, norm, plan.norm_eps)
        return heads * cos + np.roll(heads, HEAD_DIM // 2, -1) * sin

    for arrays in layers:
        a = dict(zip(plan.kinds, arrays, strict=True))
        weights = {kind: a[kind].astype(np.float64) for kind in ("qkv", "o", "gate_up", "down")}
        qkv = normed(hidden, a["attn_norm"], plan.norm_eps) @ weights["qkv"].T
        heads = qkv.reshape(plan.tokens, -1, HEAD_DIM)
        q, k, v = np.split(heads, [plan.q_heads, plan.q_heads + plan.kv_heads], 1)
        q, k = turned(q, a.get("q_norm")), turned(k, a.get("k_norm"))
        attended = np.zeros((plan.tokens, plan.q_heads, HEAD_DIM))
        for token in range(plan.tokens):
            place = max(position, 0) + token
            page, at = table[place // plan.page_size], place % plan.page_size
            if position >= 0:
                a["keys"][page, :, at], a["values"][page, :, at] = k[token], v[token]
            old = [(table[t // plan.page_size], t % plan.page_size) for t in range(max(position, 0))]
            for head in range(plan.q_heads):
                kv = head // plan.group
                keys, values = (
                    np.array([a[kind][p, kv, i].astype(np.float64) for p, i in old] + list(new[: token + 1, kv]))
                    for kind, new in (("keys", k), ("values", v))
                )
                scores = keys @ q[token, head] * plan.scale
                share = np.exp(scores - scores.max())
                attended[token, head] = share / share.sum() @ values
        hidden = hidden + attended.reshape(plan.tokens, -1) @ weights["o"].T
        gate, up = np.split(normed(hidden, a["mlp_norm"], plan.norm_eps) @ weights["gate_up"].T, 2, -1)
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T
    return hidden


def arrays(plan: Plan, pages: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    random = np.random.default_rng(1)

    def weight(out: int, inputs: int) -> np.ndarray:
        return (random.standard_normal((out, inputs)) / inputs**0.5).astype(BF16)

    def norm(size: int) -> np.ndarray:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    layers = []
    for _ in range(plan.layers):
        size = (pages, plan.kv_heads, plan.page_size, HEAD_DIM)
        pools = [random.standard_normal(size).astype(BF16) for _ in range(2)]
        qk = [norm(HEAD_DIM), norm(HEAD_DIM)] if plan.qk_norm else []
        weights = [weight(m.parts * m.outputs, m.inputs) for m in plan.matrices]
        layers.append([*weights, norm(plan.hidden), norm(plan.hidden), *qk, *pools])
    return random.standard_normal((plan.tokens, plan.hidden)).astype(BF16), layers


@pytest.mark.parametrize(("tokens", "position", "qk_norm"), [(1, 21, True), (2, 150, False), (1, -1, False)])
def test_simulated_step(tokens: int, position: int, qk_norm: bool) -> None:
    """Position -1 is an idle row: its result has no meaning, but nothing is written."""
    plan = Plan(2, 128, 2, 1, 128, tokens, 8, 24, 0.09, 1e-6, qk_norm, blocks=16, warps=2, window=2)
    assert plan.refusal() is None
    x, layers = arrays(plan, 40)
    random = np.random.default_rng(2)
    table = 1 + random.permutation(39)[:24]
    angles = random.uniform(0, 6, (tokens, HEAD_DIM // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    theirs = [[array.copy() for array in arrays] for arrays in layers]
    out = simulate(plan, x, layers, table, position, cos, sin)
    if position >= 0:
        expected = reference(plan, x, theirs, table, position, cos, sin)
        assert relative_error(out, expected) < 1e-2
    assert np.isfinite(out.astype(np.float32)).all()
    for mine, other in zip(layers, theirs, strict=True):
        for pool, expected in zip(mine[-2:], other[-2:], strict=True):
            assert relative_error(pool, expected.astype(np.float64)) < 3e-3


def test_shapes_that_do_not_divide_are_refused_with_the_reason() -> None:
    def refusal(**changes: Any) -> str:
        sizes: dict[str, Any] = {
            "hidden": 1024,
            "q_heads": 16,
            "kv_heads": 8,
            "ff": 3072,
            "pages_per_row": 256,
        } | changes
        fixed: dict[str, Any] = {
            "layers": 28,
            "tokens": 1,
            "page_size": 16,
            "scale": 0.09,
            "norm_eps": 1e-6,
            "qk_norm": True,
        }
        return str(Plan(**fixed, **sizes).refusal())

    assert refusal() == "None"  # Qwen3-0.6B
    assert "qkv has 2688 outputs" in refusal(q_heads=15, kv_heads=3)
    assert "more than" in refusal(ff=8192)
    assert "registers" in refusal(hidden=2048, ff=4096)
    assert "shared memory" in refusal(pages_per_row=1 << 15)
