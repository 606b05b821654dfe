"""The decode attention op: the reference and the kernel's warp program against float64, what is written, GPU runs."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import decode_attention, decode_mosaic, paged_attention
from tests import paged_attention_cases as cases
from tests.paged_attention_cases import Case

# Lengths count the new tokens; 0 is an idle row. 17 writes the first token of a page, 16 the last.
CASES = [
    Case((0, 1, 16, 17, 100), rotary_dim=64),
    Case((1, 0, 127), head_dim=128, kv_heads=1, rotary_dim=128, norm=True, splits=2, warps=4),
    Case((128,), head_dim=128, kv_heads=1, splits=4, warps=4, depth=1),
    Case((33, 2), head_dim=80, q_heads=6, page_size=32, rotary_dim=32, interleaved=True, warps=4),
    Case((65,), head_dim=96, q_heads=16, kv_heads=1, page_size=64, pages_per_row=2, rotary_dim=72, warps=8, depth=1),
    Case((77,), head_dim=256, q_heads=2, kv_heads=1, rotary_dim=256, norm=True, depth=1, splits=2, warps=4),
    Case((40,), head_dim=16, q_heads=20, kv_heads=1, rotary_dim=16, norm=True, interleaved=True, warps=4),
    Case((100, 21, 20), window=20, q_heads=2, kv_heads=1, rotary_dim=64, splits=2, warps=4),
    Case((100, 3), window=1, q_heads=2, kv_heads=1, warps=4),
    Case((0, 50), softcap=20.0, sinks=True, q_heads=2, kv_heads=1, rotary_dim=64, splits=2, warps=4),
    Case((0, 1, 16, 17, 100), rotary_dim=64, kv="int8"),
    Case((1, 0, 127), head_dim=128, kv_heads=1, rotary_dim=128, norm=True, splits=2, warps=4, kv="float8_e4m3fn"),
    Case((33, 2), head_dim=80, q_heads=6, page_size=32, rotary_dim=32, interleaved=True, warps=4, kv="int8"),
    Case((65,), head_dim=96, q_heads=16, kv_heads=1, page_size=64, pages_per_row=2, rotary_dim=72, depth=1, kv="int4"),
    Case((77,), head_dim=256, q_heads=2, kv_heads=1, rotary_dim=256, norm=True, splits=2, warps=4, kv="int4"),
    Case((40,), head_dim=32, q_heads=20, kv_heads=1, rotary_dim=16, norm=True, interleaved=True, warps=4, kv="int4"),
    Case((100, 20), window=20, q_heads=2, kv_heads=1, rotary_dim=64, splits=2, warps=4, kv="float8_e4m3fn"),
    # Several new tokens: over a page's end, nothing stored before them, two blocks of rows, twice as many heads as are
    # read at the same time.
    Case((0, 5, 18, 100), tokens=5, rotary_dim=64, norm=True, warps=4),
    Case((0, 2, 33), tokens=2, q_heads=2, kv_heads=1, head_dim=128, rotary_dim=128, norm=True, splits=2, warps=4),
    Case((70,), tokens=16, q_heads=4, kv_heads=1, head_dim=128, rotary_dim=128, splits=2, warps=4),
    Case(
        (19, 16), tokens=16, q_heads=2, kv_heads=1, head_dim=16, page_size=32, rotary_dim=16, interleaved=True, warps=4
    ),
    Case((100, 20, 3), tokens=3, window=2, softcap=20.0, sinks=True, q_heads=6, kv_heads=2, rotary_dim=64, warps=4),
    Case((60,), tokens=4, q_heads=2, kv_heads=1, head_dim=256, rotary_dim=256, norm=True, splits=2, warps=4),
    Case((0, 5, 18), tokens=5, rotary_dim=64, norm=True, warps=4, kv="int8"),
    Case((37, 8), tokens=8, q_heads=2, kv_heads=1, head_dim=96, rotary_dim=72, warps=4, kv="float8_e4m3fn"),
    Case((70, 5), tokens=5, q_heads=4, kv_heads=1, head_dim=96, rotary_dim=96, splits=2, warps=4, kv="int4"),
    Case((20,), tokens=3, q_heads=4, kv_heads=1, head_dim=16, window=8, warps=4, kv="int8"),
]
# Fewer rows a block than fit, the last block has the fewest.
CASES.append(Case((70, 20), tokens=5, q_heads=4, kv_heads=1, rotary_dim=64, splits=2, warps=4, most_halves=1))
CASES.append(
    Case((0, 1, 17, 127), head_dim=128, kv_heads=1, rotary_dim=128, splits=1, warps=4, depth=1, late_values=True)
)
# Every third row first.
CASES.append(Case((100, 0, 17, 60, 33, 1, 128, 80), head_dim=128, kv_heads=1, rotary_dim=128, warps=4, every=3))
SEVERAL = [case for case in CASES if case.tokens > 1]


def make(case: Case, dtype=cases.BF16) -> cases.Arrays:
    return cases.make(case, dtype, stored=tuple(max(0, length - case.tokens) for length in case.lengths))


def call(case: Case, arrays: cases.Arrays, backend=None, return_lse=False) -> list[np.ndarray]:
    def run(inputs, rope, norms, sinks, scales):
        k_scales, v_scales = scales or (None, None)
        return decode_attention(
            *inputs,
            *(rope or (None, None)),
            num_q_heads=case.q_heads,
            scale=case.scale,
            interleaved=case.interleaved,
            q_norm=norms and norms[0],
            k_norm=norms and norms[1],
            norm_eps=cases.NORM_EPS,
            window=case.window,
            softcap=case.softcap,
            sinks=sinks,
            k_scales=k_scales,
            v_scales=v_scales,
            return_lse=return_lse,
            backend=backend,
        )

    inputs = (arrays.qkv, arrays.k_pages, arrays.v_pages, arrays.page_table, cases.first_places(case))
    return [np.asarray(x) for x in jax.jit(run)(inputs, arrays.rope, arrays.norms, arrays.sinks, arrays.scales)]


@functools.cache
def reference(case: Case) -> list[np.ndarray]:
    """In bfloat16; compiled once for the tests that want it."""
    return call(case, make(case), "reference")


def check_pools(case: Case, arrays: cases.Arrays, pools: list[np.ndarray]) -> None:
    """New rows hold what they should, every other bit of the pools is as it was."""
    _, *want = cases.decode(case, arrays)
    written = np.zeros(arrays.k_pages.shape[:3], bool)
    for _, _, page, offset in cases.new_places(case, arrays):
        written[page, :, offset] = True
    for got, before in zip(pools, arrays.pools, strict=True):
        np.testing.assert_array_equal(bits(got)[~written], bits(before)[~written])
    for got, wanted in zip(pools[1::2], want[1::2], strict=True):  # the value and its scale
        np.testing.assert_array_equal(bits(got)[written], bits(wanted)[written])
    # A rounding of the last bit of a bfloat16 key may fall the other way than from float64.
    scales = (None, None) if case.kv == "bfloat16" else (pools[2][written], want[2][written])
    keys = (pools[0][written], want[0][written])
    got, wanted = (cases.elements(x, scale, case.head_dim) for x, scale in zip(keys, scales, strict=True))
    step = {"bfloat16": 0, "int8": 1 / 127, "float8_e4m3fn": 1 / 14, "int4": 1 / 7}[case.kv]  # of codes, at most
    np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=1e-6 + step * np.abs(wanted).max())
    assert (np.abs(got - wanted) > 2**-7 * np.abs(wanted) + 1e-6).mean() < 0.02
    assert (got != wanted).mean() < 0.02 or scales[0] is not None


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("case", [*CASES[:17], SEVERAL[0], SEVERAL[4], SEVERAL[6]])
def test_reference_in_float32_equals_float64(case):
    arrays = make(case, np.float32)
    out, k_pages, v_pages, *scales = call(case, arrays, "reference")
    want, want_k, want_v, *want_scales = cases.decode(case, arrays)
    np.testing.assert_array_equal(bits(v_pages), bits(want_v))
    if scales:
        np.testing.assert_array_equal(bits(scales[1]), bits(want_scales[1]))
        # float32 rotations differ from float64's in the last bit, and a code then falls to its neighbour.
        assert cases.relative_error(out, want) < 2e-3
    else:
        np.testing.assert_allclose(out, want, rtol=5e-5, atol=5e-6)
        np.testing.assert_allclose(k_pages, want_k, rtol=1e-5, atol=1e-5)
    assert (out[arrays.lengths == 0] == 0).all()


@pytest.mark.parametrize("case", [*CASES[:3], *CASES[10:17], SEVERAL[0], SEVERAL[6]])
def test_reference_writes_the_new_rows_only(case):
    arrays = make(case)
    out, *pools = reference(case)
    assert cases.relative_error(out, cases.decode(case, arrays)[0]) < 5e-3
    check_pools(case, arrays, pools)


@pytest.mark.parametrize("case", CASES)
def test_warp_program_equals_float64(case):
    arrays = make(case)
    out, *pools = cases.simulate_decode(case, arrays)
    assert cases.relative_error(out, cases.decode(case, arrays)[0]) < 5e-3
    assert (out[arrays.lengths == 0] == 0).all()
    check_pools(case, arrays, pools)


def test_equals_the_ops_one_after_the_other():
    """RMSNorm, RoPE and append as written here, then paged_attention: the same bits."""
    case = Case((1, 16, 17, 100), rotary_dim=64, norm=True)
    arrays = make(case)
    rope, norms = arrays.rope, arrays.norms
    assert rope is not None and norms is not None
    slots = arrays.lengths - 1
    pages = np.take_along_axis(arrays.page_table, slots[:, None] // case.page_size, 1)[:, 0]

    def turned(x, weight):
        cos, sin = [jnp.asarray(x)[:, 0, None, :] for x in rope]
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + jnp.float32(cases.NORM_EPS)) * weight[None, None, :]
        a, b = jnp.split(x.astype(jnp.bfloat16).astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(jnp.bfloat16)

    @jax.jit
    def ops(qkv, k_pages, v_pages):
        heads = qkv.reshape(case.batch, -1, case.head_dim)
        q, k, v = jnp.split(heads, [case.q_heads, case.q_heads + case.kv_heads], axis=1)
        q, k = turned(q, jnp.asarray(norms[0])), turned(k, jnp.asarray(norms[1]))
        k_pages = k_pages.at[pages, :, slots % case.page_size].set(k)
        v_pages = v_pages.at[pages, :, slots % case.page_size].set(v)
        table, lengths = jnp.asarray(arrays.page_table), jnp.asarray(arrays.lengths)
        out = paged_attention(q[:, None], k_pages, v_pages, table, lengths, scale=case.scale, backend="reference")
        return out.reshape(case.batch, 1, -1), k_pages, v_pages

    want = ops(arrays.qkv, arrays.k_pages, arrays.v_pages)
    for got, expected in zip(call(case, arrays, "reference"), want, strict=True):
        np.testing.assert_array_equal(bits(got), bits(np.asarray(expected)))


LSE_CASES = [CASES[0], CASES[1], CASES[9], CASES[10], CASES[14], SEVERAL[4]]
"""An idle row; a norm and a cluster; soft-cap and sinks; codes of 8 and of 4 bits; several tokens."""


@pytest.mark.parametrize("case", LSE_CASES)
def test_log_sum_exp_equals_float64(case):
    """With `return_lse` the rest of the results is the same; an idle row has -inf, so that it weighs nothing."""
    arrays = make(case)
    queries, after = cases.appended(case, arrays)
    want = cases.attention(case, queries, after)[1]
    out, lse, *pools = call(case, arrays, "reference", return_lse=True)
    for got, expected in zip((out, *pools), reference(case), strict=True):
        np.testing.assert_array_equal(bits(got), bits(expected))
    simulated = np.full(want.size, np.nan, np.float32)
    cases.simulate_decode(case, arrays, simulated)
    for got in (lse, simulated.reshape(want.shape)):
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("case", "return_lse"), [*((case, False) for case in CASES), (LSE_CASES[1], True), (LSE_CASES[3], True)]
)
def test_lowers_for_cuda_in_place(case, return_lse):
    plan, arrays = case.decode_plan(), make(case)

    layers = functools.partial(decode_mosaic.decode_attention, plan=plan, return_lse=return_lse)
    inputs = (arrays.qkv, arrays.k_pages, arrays.v_pages, arrays.page_table, arrays.lengths)
    text = cases.lower_for_cuda(layers, *inputs, arrays.rope, arrays.norms, arrays.sinks, arrays.scales)
    assert text.count("@mosaic_gpu_v2") == 1
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    assert aliases == [(str(1 + return_lse + i), str(3 + i)) for i in range(len(arrays.pools))]


def test_equal_layers_share_one_kernel():
    """Two layers of pools, one kernel in the program: without the inner jit each would be compiled for itself."""
    case = CASES[0]
    plan, arrays = case.decode_plan(), make(case)

    def layers(qkv, pools, page_table, positions, rope, norms, sinks):
        out = []
        for k_pages, v_pages in pools:
            step = (qkv, k_pages, v_pages, page_table, positions, rope, norms, sinks)
            out.append(decode_mosaic.decode_attention(*step, plan=plan))
        return out

    pools = [(arrays.k_pages, arrays.v_pages)] * 2
    inputs = (arrays.qkv, pools, arrays.page_table, arrays.lengths)
    text = cases.lower_for_cuda(layers, *inputs, arrays.rope, arrays.norms, arrays.sinks)
    assert text.count("@mosaic_gpu_v2") == 1
    assert len(re.findall(r"call @decode_attention\(", text)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"qkv": jnp.zeros((2, 1, 700), jnp.bfloat16)},
            r"qkv has shape \(2, 1, 700\).*need \[batch, tokens, 12 \* head_dim\]",
        ),
        ({"qkv": jnp.zeros((2, 1, 768), jnp.float32)}, "cast the tokens to the pages' dtype"),
        ({"num_q_heads": 7}, "7 query heads are not a multiple of the pages' 2 KV heads"),
        ({"v_pages": jnp.zeros((4, 2, 16, 32), jnp.bfloat16)}, "k_pages and v_pages of one dtype and one shape"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, r"page_table is int32\(3, 2\); it needs int32\[2, pages\]"),
        ({"positions": jnp.zeros((2, 1), jnp.int32)}, r"positions is int32\(2, 1\); it needs int32\[2\]"),
        ({"sin": None}, "cos and sin go together"),
        ({"cos": jnp.zeros((2, 1, 33)), "sin": jnp.zeros((2, 1, 33))}, "half up to 32"),
        ({"q_norm": jnp.ones(64)}, "q_norm and k_norm go together"),
        ({"q_norm": jnp.ones(32), "k_norm": jnp.ones(64)}, r"q_norm is float32\(32,\); it needs float32\[64\]"),
        ({"sinks": jnp.zeros(2)}, "one logit for each of 8 query heads"),
        ({"window": 0}, "window is 0; it needs at least 1"),
        ({"softcap": -1.0}, "softcap is -1.0; it needs a positive number"),
        ({"backend": "mosaic"}, "decode_attention cannot run on mosaic: this process has no GPU"),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_errors_say_what_is_wrong(change, message):
    arguments = {
        "qkv": jnp.zeros((2, 1, 768), jnp.bfloat16),
        "k_pages": jnp.zeros((4, 2, 16, 64), jnp.bfloat16),
        "v_pages": jnp.zeros((4, 2, 16, 64), jnp.bfloat16),
        "page_table": jnp.zeros((2, 2), jnp.int32),
        "positions": jnp.zeros(2, jnp.int32),
        "cos": jnp.zeros((2, 1, 32)),
        "sin": jnp.zeros((2, 1, 32)),
    }
    with pytest.raises(ValueError, match=message):
        # Unwrapped: the shape checks of the test settings would speak first.
        inspect.unwrap(decode_attention)(**(arguments | {"num_q_heads": 8, "scale": 0.125} | change))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case):
    """Against float64; what is not to be written keeps its bits; the same bits on every run; as the API answers."""
    arrays = make(case)
    inputs = (arrays.qkv, arrays.k_pages, arrays.v_pages, arrays.page_table, cases.first_places(case))
    run = jax.jit(functools.partial(decode_mosaic.decode_attention, plan=case.decode_plan()))
    options = (arrays.rope, arrays.norms, arrays.sinks, arrays.scales)
    runs = [[np.asarray(x) for x in run(*inputs, *options)] for _ in range(3)]
    out, *pools = runs[0]
    assert cases.relative_error(out, cases.decode(case, arrays)[0]) < 5e-3
    assert (out[arrays.lengths == 0] == 0).all()
    check_pools(case, arrays, pools)
    for again in runs[1:]:
        for x, first in zip(again, runs[0], strict=True):
            np.testing.assert_array_equal(bits(x), bits(first))
    through_api = call(case, arrays, "mosaic")
    assert cases.relative_error(through_api[0], out.astype(np.float64)) < 5e-3
    check_pools(case, arrays, through_api[1:])
