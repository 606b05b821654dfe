"""What is no number in one row reaches no other; and softmax over logits that rise from tile to tile.

Rows share registers, fragments and shared memory in every kernel: simulated warps show whose numbers go where.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import test_byte_matmul
from simulated_int4_warp import simulate
from simulated_wide_warp import simulate_normalise
from test_int4_fused import EPS, arrays, small
from test_int4_wide import make, slices_of, tokens

from pallas_kernels.int4_matmul import to_mosaic
from pallas_kernels.int4_matmul.packing_rows import ByteRows
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Schedule
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule
from tests import paged_attention_cases as cases
from tests.paged_attention_cases import Case

BAD = 1
"""The row that holds what is no number."""
FUSION = Fusion(norm_eps=EPS, gated=True)


def spoiled(x: np.ndarray, value: float) -> np.ndarray:
    x = x.copy()
    x[BAD, x.shape[1] // 3] = value
    return x


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(
    ("schedule", "fusion"),
    [
        (Schedule(4, 1, 2, 2, blocks=2, digits=True), PLAIN),
        (Schedule(4, 1, 2, 2, blocks=2), FUSION),
        (Schedule(4, 1, 2, 2, blocks=2, scaled=True), FUSION),
        (Schedule(4, 1, 2, 2, blocks=2, once=True), FUSION),
    ],
)
def test_few_rows_of_packed_codes(schedule: Schedule, fusion: Fusion, value: float) -> None:
    weight, x = to_mosaic(small(64, 512, 64)[0]), tokens(3, 512)
    options = {"fusion": fusion, "norm": arrays(3, 32, 512)[0] if fusion is FUSION else None}
    with np.errstate(invalid="ignore", over="ignore"):
        clean, got = (simulate(rows, weight, schedule, **options)[0] for rows in (x, spoiled(x, value)))
    assert not np.isfinite(got[BAD]).any()
    np.testing.assert_array_equal(np.delete(got, BAD, 0), np.delete(clean, BAD, 0))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_few_rows_of_bytes(value: float) -> None:
    codes, scales, _ = test_byte_matmul.make((32, 512), (16, 128), ml_dtypes.float8_e4m3fn)
    weight, x = ByteRows(codes, scales, None, (32, 512), 128), tokens(3, 512)
    with np.errstate(invalid="ignore", over="ignore"):
        clean, got = (
            simulate(rows, weight, Schedule(4, 1, 2, 2, blocks=1, scaled=True))[0] for rows in (x, spoiled(x, value))
        )
    assert not np.isfinite(got[BAD]).any()
    np.testing.assert_array_equal(np.delete(got, BAD, 0), np.delete(clean, BAD, 0))


@pytest.mark.parametrize("rows", [3, 133])
@pytest.mark.parametrize("slices", [0, 2])
def test_the_norm_before_many_rows(rows: int, slices: int) -> None:
    """One token a block, or two; the number that is none is the stream's, or in a slice that is added to it."""
    plan = WidePlan.of(rows, to_mosaic(make(16, 136, 16, "symmetric")), WideSchedule(16))
    x, norm, partial = tokens(rows, 136), np.linspace(0.5, 1.5, 136, dtype=np.float32), slices_of(rows, 136, slices)
    bad_x, bad_partial = (x, partial.copy()) if partial is not None else (spoiled(x, np.nan), None)
    if bad_partial is not None:
        bad_partial[1] = spoiled(bad_partial[1], np.nan)
    clean, got = (
        simulate_normalise(a, plan, norm, EPS, b)[0].view(ml_dtypes.bfloat16).astype(np.float32)
        for a, b in ((x, partial), (bad_x, bad_partial))
    )
    tile, _, _, token, _ = np.indices(got.shape)
    row = tile * plan.schedule.tokens + token
    assert np.isnan(got[row == BAD]).any()
    others = (row != BAD) & (row < rows)
    assert np.isfinite(got[others]).all()
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize("value", [3e38, np.nan])
@pytest.mark.parametrize(("kv", "tokens_of_row"), [("bfloat16", 1), ("bfloat16", 3), ("int8", 3)])
def test_heads_and_tokens_of_attention(kv: str, tokens_of_row: int, value: float) -> None:
    """A query whose logits overflow, or are none: its head's result alone changes, and not the head's beside it."""
    case = Case((120, 5), tokens=tokens_of_row, q_heads=4, kv_heads=1, splits=1, warps=4, kv=kv)
    given = cases.make(case)
    bad = dataclasses.replace(given, qkv=given.qkv.copy())
    bad.qkv[0, 0, BAD * case.head_dim : (BAD + 1) * case.head_dim] = value
    with np.errstate(invalid="ignore", over="ignore"):
        clean, got = (
            cases.simulate_decode(case, a)[0].reshape(-1, case.head_dim).astype(np.float32) for a in (given, bad)
        )
    if np.isnan(value):
        assert np.isnan(got[BAD]).all()
    np.testing.assert_array_equal(np.delete(got, BAD, 0), np.delete(clean, BAD, 0))


@pytest.mark.parametrize("size", [4.0, 30.0])
@pytest.mark.parametrize("tokens_of_row", [1, 3])
def test_maxima_that_rise_a_little_and_a_lot(tokens_of_row: int, size: float) -> None:
    """Logits of a few units, and of dozens, in powers of two: what was added before a larger one still counts, or not.

    Four tiles a warp, so that sums are multiplied more than once; the log-sum-exp says whether the sums were."""
    case = Case((250, 41), tokens=tokens_of_row, q_heads=4, kv_heads=1, pages_per_row=16, splits=1, warps=4, depth=1)
    given = cases.make(case)
    queries = case.q_heads * case.head_dim
    given.qkv[..., :queries] = (given.qkv[..., :queries].astype(np.float32) * size).astype(given.qkv.dtype)
    _, after = cases.appended(case, given)
    want, want_lse = cases.attention(case, given.qkv[..., :queries].reshape(2, tokens_of_row, 4, -1), after)
    lse = np.full(want_lse.size, np.nan, np.float32)
    out = cases.simulate_decode(case, given, lse)[0]
    assert cases.relative_error(out, want.reshape(out.shape)) < 5e-3
    np.testing.assert_allclose(lse.reshape(want_lse.shape), want_lse, rtol=1e-5, atol=1e-3)
