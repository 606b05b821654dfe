"""The paged attention op: the reference and the kernel's warp program against float64, lowering, errors, GPU runs."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention import mosaic, paged_attention, plan, reference
from tests import paged_attention_cases as cases
from tests.paged_attention_cases import Case
from tests.simulated_warp import Cluster, SimulatedWarp

# Lengths: empty, one token, a page boundary, one more, many pages.
CASES = [
    Case((0, 1, 16, 17, 100)),
    Case((1, 0, 128), head_dim=128, kv_heads=1, splits=2, warps=4),
    Case((33, 128), head_dim=80, q_heads=6, page_size=32, splits=4, warps=4, depth=1),
    Case((65,), head_dim=96, q_heads=16, kv_heads=1, page_size=64, pages_per_row=2, warps=8, depth=1),
    Case((77,), head_dim=256, q_heads=2, kv_heads=1, depth=1, splits=2, warps=4),
    Case((5, 0, 40), tokens=5, q_heads=4, kv_heads=1, warps=4),  # 20 query rows: two row blocks
    Case((16, 100), tokens=16, q_heads=2, kv_heads=1, head_dim=16, splits=2, warps=4),
    Case((100, 17), window=20, splits=2, warps=4),
    Case((100, 3), window=1, q_heads=2, kv_heads=1, warps=4),
    Case((100,), tokens=3, window=40, sinks=True, q_heads=2, kv_heads=1, warps=4),
    Case((0, 50), softcap=20.0, sinks=True, q_heads=2, kv_heads=1, splits=2, warps=4),
    Case((70, 16), tokens=4, q_heads=24, kv_heads=2, head_dim=80, warps=4),  # 48 query rows in one pass
    Case((0, 1, 16, 17, 100), kv="int8"),
    Case((1, 0, 128), head_dim=128, kv_heads=1, splits=2, warps=4, kv="float8_e4m3fn"),
    Case((33, 128), head_dim=80, q_heads=6, page_size=32, splits=4, warps=4, depth=1, kv="int8"),
    Case((65,), head_dim=96, q_heads=16, kv_heads=1, page_size=64, pages_per_row=2, depth=1, kv="int4"),
    Case((77,), head_dim=256, q_heads=2, kv_heads=1, depth=1, splits=2, warps=4, kv="int4"),
    Case((5, 0, 40), tokens=5, q_heads=4, kv_heads=1, warps=4, kv="float8_e4m3fn"),
    Case((100,), tokens=3, window=40, sinks=True, q_heads=2, kv_heads=1, warps=4, kv="int4"),
    Case((0, 50), softcap=20.0, sinks=True, q_heads=2, kv_heads=1, head_dim=32, warps=4, kv="int4"),
]


def reference_of(case: Case, arrays: cases.Arrays):
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    run = jax.jit(functools.partial(reference.paged_attention, **options))
    return run(*inputs_of(arrays))


def inputs_of(arrays: cases.Arrays):
    tables = (arrays.page_table, arrays.lengths, arrays.sinks)
    return arrays.q, arrays.k_pages, arrays.v_pages, *tables, arrays.scales


@pytest.mark.parametrize("case", CASES)
def test_reference_in_float32_equals_float64(case):
    arrays = cases.make(case, np.float32)
    out, lse = reference_of(case, arrays)
    want, want_lse = cases.attention(case, arrays.q, arrays)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6 * max(1, np.abs(want).max()))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_reference_in_bfloat16():
    case = CASES[0]
    arrays = cases.make(case)
    want, _ = cases.attention(case, arrays.q, arrays)
    assert cases.relative_error(np.asarray(reference_of(case, arrays)[0]), want) < 5e-3


@pytest.mark.parametrize("case", CASES)
def test_warp_program_equals_float64(case):
    arrays = cases.make(case)
    out, lse = cases.simulate(case, arrays)
    want, want_lse = cases.attention(case, arrays.q, arrays)
    assert cases.relative_error(out, want) < 5e-3
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_cuda(case):
    run = functools.partial(mosaic.paged_attention, plan=case.plan(), return_lse=True)
    assert cases.lower_for_cuda(run, *inputs_of(cases.make(case))).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("batch", "kv_heads", "pages_per_row", "blocks", "warps"),
    [
        (1, 8, 8, 8, 8),  # 128 tokens: a tile for each warp of one block, no cluster
        (1, 8, 32, 64, 4),  # 512 tokens: a tile for each warp of small blocks
        (1, 8, 128, 64, 8),  # 2048 tokens: clusters of 8, the fastest that was measured
        (1, 3, 2048, 24, 8),
        (16, 8, 64, 256, 4),  # two small blocks for each multiprocessor beat one large one
        (32, 8, 64, 512, 4),
        (64, 8, 128, 512, 4),  # more rows, the longest first, do without clusters of two
        (64, 8, 256, 512, 4),
        (256, 8, 128, 2048, 4),
    ],
)
def test_schedule(batch, kv_heads, pages_per_row, blocks, warps):
    got = plan.plan_for(
        batch=batch,
        tokens=1,
        q_heads=4 * kv_heads,
        kv_heads=kv_heads,
        head_dim=128,
        page_size=16,
        pages_per_row=pages_per_row,
        scale=1.0,
    )
    assert (batch * kv_heads * got.splits, got.warps) == (blocks, warps)
    assert got.late_values == (batch == 256)
    assert got.every == {32: 2, 64: 2, 256: 8}.get(batch, 1)  # blocks over those that run at once, two a multiprocessor


@pytest.mark.parametrize(("batch", "every"), [(1, 1), (5, 1), (64, 2), (192, 6), (193, 6), (10, 3), (7, 12)])
def test_each_row_comes_once_every_nth_first(batch: int, every: int):
    w = SimulatedWarp(Cluster(1, 4, 0), 0, 0)
    schedule = dataclasses.replace(Case((1,) * batch).plan(), every=every)
    rows = [int(mosaic.row_of(w, schedule, w.const(place, "i32"))[0]) for place in range(batch)]
    first = list(range(0, batch, every))
    assert rows == first + [row for row in range(batch) if row not in first]


@pytest.mark.parametrize("other", [{"kv": "int8"}, {"head_dim": 64}, {"tokens": 5}], ids=str)
def test_schedule_of_many_rows_that_were_not_measured_keeps_clusters(other: dict):
    shape: dict = {"tokens": 1, "head_dim": 128, "q_heads": 32, "kv_heads": 8, "page_size": 16, "pages_per_row": 128}
    assert plan.plan_for(batch=64, scale=1.0, **(shape | other)).splits == 2


@pytest.mark.parametrize(
    ("batch", "tokens", "group", "row_blocks", "blocks", "warps"),
    [
        (1, 2, 2, 1, 64, 4),  # a draft's first pass: as one token
        (1, 5, 4, 3, 96, 8),  # verification: 8 rows a block
        (2, 5, 4, 1, 64, 8),  # too many blocks for that
        (16, 5, 4, 1, 256, 4),
    ],
)
def test_schedule_of_several_tokens(batch, tokens, group, row_blocks, blocks, warps):
    shape = {"batch": batch, "tokens": tokens, "q_heads": 8 * group, "kv_heads": 8, "head_dim": 128}
    got = plan.plan_for(**shape, page_size=16, pages_per_row=32, scale=1.0)
    assert (got.row_blocks, batch * 8 * got.row_blocks * got.splits, got.warps) == (row_blocks, blocks, warps)


@pytest.mark.parametrize(("q_heads", "depth"), [(8, 2), (32, 1)])
def test_schedule_of_codes_leaves_registers_for_the_sums(q_heads, depth):
    """512 tokens: two tiles in flight, but not beside the sums of 32 rows of 128 elements."""
    shape = {"batch": 1, "tokens": 1, "q_heads": q_heads, "kv_heads": 1, "head_dim": 128}
    got = plan.plan_for(**shape, page_size=16, pages_per_row=32, scale=1.0, kv="int8")
    assert (got.splits, got.warps, got.depth) == (8, 4, depth)


INT8, SCALES = jnp.zeros((4, 2, 16, 64), jnp.int8), jnp.ones((4, 2, 16))
INT8_CALL = {"k_pages": INT8, "v_pages": INT8, "k_scales": SCALES, "v_scales": SCALES}


def arguments_of(**change):
    arguments = {
        "q": jnp.zeros((2, 1, 4, 64), jnp.bfloat16),
        "k_pages": jnp.zeros((4, 2, 16, 64), jnp.bfloat16),
        "v_pages": jnp.zeros((4, 2, 16, 64), jnp.bfloat16),
        "page_table": jnp.zeros((2, 2), jnp.int32),
        "lengths": jnp.zeros(2, jnp.int32),
        "scale": 0.125,
    }
    return arguments | change


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 4, 64), jnp.bfloat16)}, r"takes q \[batch, tokens, q_heads, head_dim\]"),
        ({"q": jnp.zeros((2, 1, 3, 64), jnp.bfloat16)}, "q has 3 heads, which is not a multiple of the pages' 2"),
        ({"q": jnp.zeros((2, 1, 4, 32), jnp.bfloat16)}, "head_dim 32, for which pages of bfloat16 are 32 wide, not 64"),
        ({"q": jnp.zeros((2, 1, 4, 64), jnp.float32)}, "cast the tokens to the pages' dtype"),
        ({"q": jnp.zeros((2, 33, 4, 64), jnp.bfloat16)}, "33 query tokens do not fit in 2 pages of 16"),
        ({"v_pages": jnp.zeros((3, 2, 16, 64), jnp.bfloat16)}, "of one dtype and one shape"),
        ({"k_pages": INT8, "v_pages": INT8}, "pages of int8 hold codes; give k_scales and v_scales"),
        ({"k_scales": SCALES, "v_scales": SCALES}, r"pages of bfloat16 take no scales; codes are int8 \(int8\)"),
        ({"k_pages": INT8, "v_pages": INT8, "k_scales": SCALES}, r"need float32\(4, 2, 16\), one of them is None"),
        (INT8_CALL | {"v_scales": SCALES[:3]}, r"one of them is float32\(3, 2, 16\)"),
        (INT8_CALL | {"q": jnp.zeros((2, 1, 4, 32), jnp.bfloat16)}, "pages of int8 are 32 wide, not 64"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, r"it needs int32\[2, pages\]"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, r"it needs int32\[2\]"),
        ({"sinks": jnp.zeros(2)}, "one logit for each of 4 query heads"),
        ({"window": 0}, "window is 0; it needs at least 1"),
        ({"window": 2**40}, "window is 1099511627776; it needs at least 1 and less than"),
        ({"softcap": float("nan")}, "softcap is nan; it needs a positive number"),
        ({"q": jnp.zeros((2, 0, 4, 64), jnp.bfloat16)}, "has an axis of 0; every axis needs at least 1"),
        (INT8_CALL | {"q": jnp.zeros((2, 1, 4, 64), jnp.int8)}, "q is int8; it needs floats"),
        ({"softcap": 0.0}, "softcap is 0.0; it needs a positive number"),
        ({"backend": "tpu"}, "no backend 'tpu'; it has mosaic, triton, reference"),
        ({"backend": "triton"}, "cannot run on triton: this process has no GPU"),
        ({"backend": "mosaic"}, "cannot run on mosaic: this process has no GPU"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        # Unwrapped: the shape checks of the test settings would speak first.
        inspect.unwrap(paged_attention)(**arguments_of(**change))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_explain_gives_each_backend_its_reason(monkeypatch):
    assert paged_attention(**arguments_of(), explain=True) == [
        Choice("mosaic", False, "this process has no GPU"),
        Choice("triton", False, "this process has no GPU"),
        Choice("reference", True, "the first that supports this call"),
    ]
    monkeypatch.setenv("JAXINFER_KERNELS", "reference")
    assert paged_attention(**arguments_of(), explain=True) == [
        Choice("mosaic", False, "reference was asked for"),
        Choice("triton", False, "reference was asked for"),
        Choice("reference", True, "asked for"),
    ]
    monkeypatch.setenv("JAXINFER_KERNELS", "mosaic")
    with pytest.raises(ValueError, match=r"JAXINFER_KERNELS=mosaic: .* this process has no GPU; unset it to let"):
        paged_attention(**arguments_of())
    pages = jnp.zeros((4, 2, 8, 24), jnp.bfloat16)
    refused = arguments_of(q=jnp.zeros((2, 1, 4, 24), jnp.bfloat16), k_pages=pages, v_pages=pages)
    with pytest.raises(ValueError, match="a head_dim that is a multiple of 16 and at most 256, not 24"):
        paged_attention(**refused)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case):
    """Against float64; the same bits on every run; as the API answers."""
    arrays = cases.make(case)
    inputs = inputs_of(arrays)
    run = jax.jit(functools.partial(mosaic.paged_attention, plan=case.plan(), return_lse=True))
    runs = [[np.asarray(x) for x in run(*inputs)] for _ in range(3)]
    want, want_lse = cases.attention(case, arrays.q, arrays)
    assert cases.relative_error(runs[0][0], want) < 5e-3
    np.testing.assert_allclose(runs[0][1], want_lse, rtol=1e-3, atol=1e-3)
    for out, lse in runs[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), runs[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), runs[0][1].view(np.uint32))
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "backend": "mosaic"}
    *arrays_in, sinks, scales = jax.tree.map(jnp.asarray, inputs)
    k_scales, v_scales = scales or (None, None)
    through_api = paged_attention(*arrays_in, sinks=sinks, k_scales=k_scales, v_scales=v_scales, **options)
    assert cases.relative_error(np.asarray(through_api), want) < 5e-3
