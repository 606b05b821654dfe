"""Prefill attention over pages: the kernel's program run in NumPy, the reference, and on a GPU the kernel itself.

All of them against float64, on the same cases. Pages nobody owns, and positions past a row's length, are NaN.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import paged_attention_cases as cases
import pytest
from paged_attention_cases import lower_for_cuda, relative_error
from simulated_prefill_warp import simulate

from pallas_kernels.paged_prefill import mosaic, mosaic_refusal, paged_prefill, reference
from pallas_kernels.paged_prefill.plan import PrefillPlan, most_stages, plan_for

BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """`counts` are the real tokens of each row, of which `tokens` come as queries; `starts` what is stored before."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    pages: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv: str = "bfloat16"
    stages: int | None = None
    blocks: int | None = 2

    @property
    def lengths(self) -> np.ndarray:
        starts, counts = np.array(self.starts), np.array(self.counts)
        return np.where(counts > 0, starts + counts, 0).astype(np.int32)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}

    @property
    def plan(self) -> PrefillPlan:
        names = ("tokens", "q_heads", "kv_heads", "head_dim", "page_size")
        plan = plan_for(
            batch=len(self.starts),
            pages_per_row=self.pages,
            sinks=self.sinks,
            kv=self.kv,
            **self.options,
            **{name: getattr(self, name) for name in names},
        )
        return dataclasses.replace(plan, stages=self.stages or plan.stages, blocks=self.blocks)


CASES = [
    # Two rows, one of them short; the first tiles that some queries see are hidden from others altogether.
    Case((100, 0), (40, 13), 40, q_heads=4, kv_heads=2),
    Case((150,), (70,), 70, q_heads=4, head_dim=128, window=50),
    # An empty row, a group that does not divide a block, all the options together, two stages.
    Case((60, 7), (33, 0), 33, q_heads=3, head_dim=80, softcap=5.0, sinks=True, stages=2),
    Case((90,), (64,), 64, q_heads=1, head_dim=256, page_size=32, pages=8),
    Case((100,), (130,), 130, q_heads=1, head_dim=96, page_size=64, pages=4, sinks=True, blocks=None),
    # Sixteen heads share a KV head; a window of one; a prefix that ends with a page.
    Case((112,), (9,), 12, q_heads=16, head_dim=64, window=1),
    Case((90, 5), (40, 30), 40, q_heads=4, kv_heads=2, head_dim=64, kv="int8"),
    Case((75,), (33,), 33, q_heads=2, head_dim=80, page_size=32, pages=8, kv="int4", window=70),
    Case((70,), (60,), 64, q_heads=1, head_dim=256, kv="float8_e4m3fn"),
    # Three blocks deal seven parts.
    Case((0, 130, 128), (160, 1, 33), 160, q_heads=2, head_dim=64, stages=2, blocks=3),
]


def make(case: Case, rng: np.random.Generator) -> list[Any]:
    """q, k_pages, v_pages, page_table, starts, lengths, sinks (or None), scales (or None)."""
    batch, num_pages = len(case.starts), len(case.starts) * case.pages + 3
    table = (rng.permutation(num_pages - 1) + 1)[: batch * case.pages].reshape(batch, -1).astype(np.int32)
    used = np.zeros((num_pages, case.page_size), bool)
    for row, length in enumerate(case.lengths):
        places = np.arange(length)
        used[table[row, places // case.page_size], places % case.page_size] = True
        table[row, -(-length // case.page_size) :] = rng.integers(0, num_pages)
    pools, scales = [], []
    for _ in range(2):
        x = rng.standard_normal((num_pages, case.kv_heads, case.page_size, case.head_dim)).astype(np.float32)
        if case.kv == "bfloat16":
            pools.append(np.where(used[:, None, :, None], x.astype(BF16), np.array(np.nan, BF16)))
            continue
        codes, scale = cases.quantise(
            x * np.exp(rng.standard_normal((*x.shape[:3], 1)) / 2).astype(np.float32), case.kv
        )
        pools.append(np.where(used[:, None, :, None], codes.view(np.uint8), 0xFF).view(codes.dtype))
        scales.append(np.where(used[:, None, :], scale, np.float32(np.nan)))
    q = (2 * rng.standard_normal((batch, case.tokens, case.q_heads, case.head_dim))).astype(BF16)
    sinks = rng.standard_normal(case.q_heads).astype(np.float32) if case.sinks else None
    places = (table, np.array(case.starts, np.int32), case.lengths)
    return [q, *pools, *places, sinks, tuple(scales) or None]


def on_device(arrays: list[Any]) -> list[Any]:
    return jax.tree.map(jnp.asarray, arrays)


def by_reference(case: Case, arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
    """In one program: operation by operation it would be 45 of them."""
    return jax.jit(functools.partial(reference.paged_prefill, **case.options))(*on_device(arrays))


def oracle(case: Case, arrays: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, query by query; zero and -inf for padding."""
    q, k_pages, v_pages, page_table, _, _, sinks, scales = arrays
    if scales is not None:
        stored = zip((k_pages, v_pages), scales, strict=True)
        k_pages, v_pages = (cases.elements(codes, scale, case.head_dim) for codes, scale in stored)
    out = np.zeros(q.shape)
    lse = np.full(out.shape[:3], -np.inf)
    for row, token in np.ndindex(*out.shape[:2]):
        here = case.starts[row] + token
        if here >= case.lengths[row]:
            continue
        first = 0 if case.window is None else max(0, here - case.window + 1)
        seen = np.arange(first, here + 1)
        pages, places = page_table[row, seen // case.page_size], seen % case.page_size
        for head in range(case.q_heads):
            kv_head = head * case.kv_heads // case.q_heads
            keys, values = (pool[pages, kv_head, places].astype(float) for pool in (k_pages, v_pages))
            logits = keys @ q[row, token, head].astype(float) * case.head_dim**-0.5
            if case.softcap is not None:
                logits = case.softcap * np.tanh(logits / case.softcap)
            sink = -np.inf if sinks is None else float(sinks[head])
            lse[row, token, head] = np.logaddexp.reduce([*logits, sink])
            out[row, token, head] = np.exp(logits - lse[row, token, head]) @ values
    return out, lse


def assert_right(case: Case, got: tuple[Any, Any], want: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    out, lse = (np.asarray(x).astype(np.float64) for x in got)
    assert np.isfinite(out).all()
    real = np.arange(case.tokens) < np.array(case.counts)[:, None]
    assert relative_error(out[real], want[0][real]) < tolerance
    # Logits of 20, of keys that were rounded to bfloat16 when they were made from codes.
    np.testing.assert_allclose(lse[real], want[1][real], rtol=0, atol=2e-3 if case.kv == "bfloat16" else 6e-2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_program_and_reference(case: Case, rng) -> None:
    """Stale stages, wrong swizzles, fragments or masks, and waits for ever, would all show here."""
    arrays = make(case, rng)
    want = oracle(case, arrays)
    # Codes times scales are rounded to bfloat16 on their way.
    assert_right(case, simulate(case.plan, *arrays), want, 3e-3 if case.kv == "bfloat16" else 6e-3)
    assert_right(case, by_reference(case, arrays), want, 3e-3)


def test_queries_behind_the_keys_see_all_of_them(rng) -> None:
    """A prefix in pages of its own: what is merged by log-sum-exp. A row without a prefix gives zero and -inf."""
    case = Case((0, 0), (20, 0), 9, head_dim=64)
    arrays = make(case, rng)
    arrays[4] = np.array([1000, 0], np.int32)
    out, lse = simulate(case.plan, *arrays)
    want, want_lse = by_reference(case, arrays)
    assert relative_error(out[0].astype(float), np.asarray(want[0]).astype(float)) < 3e-3
    np.testing.assert_allclose(lse[0], np.asarray(want_lse)[0], atol=2e-3)
    assert (out[1] == 0).all()
    assert np.isneginf(lse[1]).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_plan_fits(head_dim: int) -> None:
    plan = dataclasses.replace(Case((0,), (8,), 8, head_dim=head_dim).plan, blocks=132)
    assert plan.stages == most_stages(head_dim) >= 2
    assert plan.shared_bytes <= 227 * 1024
    assert plan.swizzle * plan.slabs == 2 * head_dim


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[6]], ids=str)
def test_lowers_for_cuda(case: Case, rng) -> None:
    *arrays, sinks, scales = on_device(make(case, rng))

    def run(*arrays: jax.Array) -> Any:
        return mosaic.paged_prefill(*arrays, sinks, scales, plan=case.plan, return_lse=True)

    assert "mosaic_gpu" in lower_for_cuda(run, *arrays)


def call(function: Any = paged_prefill, **changes: Any) -> Any:
    arrays = {
        "q": jnp.zeros((1, 8, 4, 64), jnp.bfloat16),
        "k_pages": jnp.zeros((3, 2, 16, 64), jnp.bfloat16),
        "v_pages": jnp.zeros((3, 2, 16, 64), jnp.bfloat16),
        "page_table": jnp.ones((1, 2), jnp.int32),
        "starts": jnp.zeros(1, jnp.int32),
        "lengths": jnp.full(1, 8, jnp.int32),
        "scale": 1.0,
    } | changes
    return function(**arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 8, 3, 64), jnp.bfloat16)}, "3 heads, which is not a multiple of the pages' 2"),
        ({"starts": jnp.zeros(2, jnp.int32)}, r"starts is int32\(2,\); it needs int32\[1\]"),
        ({"lengths": jnp.zeros(1, jnp.float32)}, r"lengths is float32\(1,\); it needs int32\[1\]"),
        ({"page_table": jnp.ones((2, 2), jnp.int32)}, r"it needs int32\[1, pages\]"),
        ({"sinks": jnp.zeros(3)}, "one logit for each of 4 query heads"),
        ({"scale": 0.0}, "scale is 0.0; it needs a positive number"),
        ({"window": 0}, "window is 0; it needs at least 1"),
        ({"window": 2**40}, "window is 1099511627776; it needs at least 1 and less than"),
        ({"softcap": float("nan")}, "softcap is nan; it needs a positive number"),
        ({"softcap": -1.0}, "softcap is -1.0; it needs a positive number"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    function = getattr(paged_prefill, "__wrapped__", paged_prefill)  # without the tests' own check of shapes
    with pytest.raises(ValueError, match=message):
        call(function, **change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "no GPU"),
        ({"dtype": jnp.float32}, "it needs bfloat16 queries, not float32"),
        ({"kv": "float16"}, "it needs pages of bfloat16, int8, float8_e4m3fn, int4, not float16"),
        ({"head_dim": 72}, "a multiple of 16 and at most 256, not 72"),
        ({"page_size": 8}, "a page size of 16, 32 or 64, not 8"),
        ({"head_dim": 256, "page_size": 128}, "a page size of 16, 32 or 64, not 128"),
        ({"tokens": 2**22}, "it counts query elements in 31 bits"),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_refusals(change: dict[str, Any], reason: str) -> None:
    given = {"tokens": 8, "head_dim": 64, "dtype": jnp.bfloat16, "kv": "bfloat16", "page_size": 16} | change
    shape = (1, given["tokens"], 32, given["head_dim"])
    assert reason in str(mosaic_refusal(shape, given["dtype"], given["kv"], given["page_size"]))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU chooses")
def test_explains_its_choice() -> None:
    choices = call(explain=True)
    assert [(choice.backend, choice.taken) for choice in choices] == [("mosaic", False), ("reference", True)]
    assert "GPU" in choices[0].reason


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu(case: Case, rng) -> None:
    """The kernel on the card; the same bits on every run."""
    arrays = make(case, rng)
    inputs = on_device(arrays)
    got = [mosaic.paged_prefill(*inputs, plan=case.plan, return_lse=True) for _ in range(5)]
    assert_right(case, got[0], oracle(case, arrays), 4e-3 if case.kv == "bfloat16" else 7e-3)
    for again in got[1:]:
        np.testing.assert_array_equal(np.asarray(again[0]).view(np.uint16), np.asarray(got[0][0]).view(np.uint16))
