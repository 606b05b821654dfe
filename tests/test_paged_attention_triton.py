"""Paged attention on Triton: interpreted on NumPy, compiled for the cards it is meant for, on the GPU.

Opt-in: the first two run where triton and jax-triton are installed (`pip install jaxinfer[triton]`), without a GPU.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode_attention import CASES as DECODE_CASES
from test_decode_attention import bits, call
from test_decode_attention import make as make_decode
from test_paged_attention import CASES, inputs_of

from pallas_kernels import triton_backend
from pallas_kernels.paged_attention import paged_attention, reads_lengths, triton_attention
from pallas_kernels.paged_attention.triton_attention import Schedule, schedule_for
from tests import paged_attention_cases as cases
from tests.interpreted_triton import BLOCK_BYTES, compile_for, interpreter, needs_triton
from tests.paged_attention_cases import Case


def options_of(case: Case) -> dict[str, Any]:
    return {"scale": case.scale, "window": case.window, "softcap": case.softcap}


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with interpreter() as call:
        yield call


@pytest.fixture
def interpreted(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_backend, "call", worker)
    with jax.disable_jit():
        yield


@needs_triton
@pytest.mark.parametrize(("splits", "dtype"), [(1, np.float32), (3, cases.BF16)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_interpreted(interpreted, case: Case, splits: int, dtype: type) -> None:
    arrays = cases.make(case, dtype)
    rows = case.tokens * case.group
    schedule = Schedule(16 if rows <= 16 else 32, 32, 1, 5, splits)
    inputs = jax.tree.map(jnp.asarray, inputs_of(arrays))
    out, lse = triton_attention.paged_attention(*inputs, **options_of(case), schedule=schedule)
    want, want_lse = cases.attention(case, arrays.q, arrays)
    if dtype == np.float32:
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=4e-6 * max(1, np.abs(want).max()))
    else:
        assert cases.relative_error(np.asarray(out), want) < 8e-3  # the interpreter cuts off where the card rounds
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


def with_nan(where: str) -> tuple[Case, Any]:
    """Two sequences over fp8 pages; the first has one NaN among its keys or its values."""
    case = Case((70, 20), head_dim=64, kv="float8_e4m3fn")
    arrays = cases.make(case)
    pages = {"keys": arrays.k_pages, "values": arrays.v_pages}[where]
    pages.view(np.uint8)[arrays.page_table[0, 2], :, 5, 33] = 0xFF
    return case, arrays


def assert_only_first_is_nan(case: Case, arrays: Any, schedule: Schedule | None) -> None:
    inputs = jax.tree.map(jnp.asarray, inputs_of(arrays))
    out = np.asarray(triton_attention.paged_attention(*inputs, **options_of(case), schedule=schedule)[0], np.float32)
    clean, _ = cases.attention(case, arrays.q, cases.make(case))
    assert np.isnan(out[0]).any(axis=-1).all()  # of every head
    assert cases.relative_error(out[1], clean[1]) < 8e-3


@needs_triton
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_stays_nan_interpreted(interpreted, where: str) -> None:
    assert_only_first_is_nan(*with_nan(where), Schedule(16, 32, 1, 5, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_stays_nan_on_the_gpu(where: str) -> None:
    assert_only_first_is_nan(*with_nan(where), None)


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize(
    "case",
    [
        Case((100, 17), q_heads=32, kv_heads=8, head_dim=128),
        Case((77,), q_heads=8, kv_heads=1, head_dim=256, sinks=True),
        Case((33, 128), head_dim=80, q_heads=6, page_size=32, kv="int8"),
        Case((5, 0, 40), tokens=5, q_heads=16, kv_heads=1, window=20, softcap=30.0),
        Case((77,), head_dim=64, page_size=64, pages_per_row=2, kv="float8_e4m3fn"),
        Case((33, 128), head_dim=128, kv="int4"),
        Case((33,), head_dim=256, q_heads=16, kv_heads=1, kv="int4"),
    ],
    ids=lambda case: f"{case.tokens}x{case.head_dim}{case.kv}",
)
def test_compiles_for(capability: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through jax-triton down to PTX, within the shared memory that a block can have."""
    if case.kv == "float8_e4m3fn" and capability < 89:
        pytest.skip("the card has no float8")
    shared_bytes = compile_for(capability, monkeypatch)
    run = functools.partial(triton_attention.paged_attention, **options_of(case))
    assert cases.lower_for_cuda(run, *inputs_of(cases.make(case))).count("@triton_kernel_call") == 2
    assert max(shared_bytes) <= BLOCK_BYTES[capability]


@pytest.mark.parametrize(
    ("pairs", "rows", "head_dim", "max_keys", "card", "expected"),
    [
        (512, 4, 128, 4096, (132, "9.0"), Schedule(16, 32, 1, 5, 1)),  # 64 sequences of 8 KV heads: one block each
        (8, 4, 128, 32768, (132, "9.0"), Schedule(16, 32, 1, 5, 64)),
        (8, 4, 128, 512, (132, "9.0"), Schedule(16, 32, 1, 5, 4)),  # four tiles each
        (600, 4, 128, 4096, (132, "9.0"), Schedule(16, 32, 1, 5, 4)),  # several rounds
        (64, 20, 64, 1024, (108, "8.0"), Schedule(32, 64, 2, 5, 3)),
        (8, 8, 256, 4096, (82, "8.6"), Schedule(16, 32, 1, 3, 20)),
        (4, 256, 128, 4096, (128, "8.9"), Schedule(64, 32, 4, 5, 4)),
    ],
)
def test_schedules(pairs, rows, head_dim, max_keys, card, expected) -> None:
    sizes = {"pairs": pairs, "rows": rows, "head_dim": head_dim, "max_keys": max_keys, "exact": False}
    assert schedule_for(**sizes, codes=False, multiprocessors=card[0], capability=card[1]) == expected


def test_schedules_of_codes_have_more_blocks() -> None:
    sizes = {"pairs": 512, "rows": 4, "head_dim": 128, "max_keys": 4096, "codes": True, "exact": False}
    assert schedule_for(**sizes, multiprocessors=132, capability="9.0") == Schedule(16, 32, 1, 5, 2)
    assert schedule_for(**sizes, multiprocessors=108, capability="8.0") == Schedule(16, 32, 1, 5, 1)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_reads_lengths_wherever_a_kernel_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, f32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert not reads_lengths(bf16, "bfloat16", 128, 16)  # no GPU here: the reference gathers whole tables
    monkeypatch.setattr(triton_backend, "refusal", lambda: None)
    monkeypatch.setattr(triton_backend, "capability", lambda: "8.6")
    assert reads_lengths(bf16, "bfloat16", 128, 16)
    assert reads_lengths(f32, "float32", 80, 32)
    assert reads_lengths(bf16, "int8", 128, 16)
    assert not reads_lengths(bf16, "float8_e4m3fn", 128, 16)  # not before 8.9
    assert reads_lengths(bf16, "int4", 128, 16)
    assert not reads_lengths(bf16, "bfloat16", 320, 16)
    monkeypatch.setenv("JAXINFER_KERNELS", "reference")
    assert not reads_lengths(bf16, "bfloat16", 128, 16)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_explain_says_why_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = cases.make(CASES[0])
    *tables, _, _ = jax.tree.map(jnp.asarray, inputs_of(arrays))

    def reason() -> str:
        return paged_attention(*tables, scale=1.0, explain=True)[1].reason

    assert reason() == "this process has no GPU"
    monkeypatch.setattr(triton_backend, "refusal", lambda: "jax-triton is not installed: pip install jaxinfer[triton]")
    assert reason() == "jax-triton is not installed: pip install jaxinfer[triton]"
    monkeypatch.setattr(triton_backend, "refusal", lambda: None)
    assert reason() == "the first that supports this call"
    monkeypatch.setattr(triton_backend, "capability", lambda: "8.6")
    fp8 = triton_attention.refusal(jnp.dtype(jnp.bfloat16), "float8_e4m3fn", 128, 16, 1)
    assert fp8 == "fp8 pages need compute capability 8.9 or later, not 8.6; use int8"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_triton_gpu(case: Case) -> None:
    """Against float64, through the API; the same bits on every run; and with three splits."""
    arrays = cases.make(case)
    inputs = jax.tree.map(jnp.asarray, inputs_of(arrays))
    *arrays_in, sinks, scales = inputs
    k_scales, v_scales = scales or (None, None)
    run = jax.jit(functools.partial(paged_attention, **options_of(case), return_lse=True, backend="triton"))
    runs = [
        [np.asarray(x) for x in run(*arrays_in, sinks=sinks, k_scales=k_scales, v_scales=v_scales)] for _ in range(3)
    ]
    want, want_lse = cases.attention(case, arrays.q, arrays)
    assert cases.relative_error(runs[0][0], want) < 5e-3
    np.testing.assert_allclose(runs[0][1], want_lse, rtol=1e-3, atol=1e-3)
    for out, lse in runs[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), runs[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), runs[0][1].view(np.uint32))
    rows = case.tokens * case.group
    schedule = Schedule(16 if rows <= 16 else 32 if rows <= 32 else 64, 32, 1 if rows <= 16 else 2, 5, 3)
    out, lse = triton_attention.paged_attention(*inputs, **options_of(case), schedule=schedule)
    assert cases.relative_error(np.asarray(out), want) < 5e-3
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[10]])
def test_triton_gpu_in_other_dtypes(case: Case, dtype: type) -> None:
    arrays = cases.make(case, dtype)
    *arrays_in, sinks, _ = jax.tree.map(jnp.asarray, inputs_of(arrays))
    out = paged_attention(*arrays_in, sinks=sinks, **options_of(case), backend="triton")
    want, _ = cases.attention(case, arrays.q, arrays)
    assert cases.relative_error(np.asarray(out), want) < (1e-3 if dtype == np.float16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DECODE_CASES[0], DECODE_CASES[1], DECODE_CASES[3], DECODE_CASES[9]])
def test_triton_gpu_decodes(case: Case) -> None:
    """The decode op with Triton's attention: what is not to be written keeps its bits."""
    arrays = make_decode(case)
    out, *pools = call(case, arrays, "triton")
    want, *want_pools = cases.decode(case, arrays)
    assert cases.relative_error(out, want) < 6e-3
    assert (out[arrays.lengths == 0] == 0).all()
    written = np.zeros(arrays.k_pages.shape[:3], bool)
    for _, _, page, offset in cases.new_places(case, arrays):
        written[page, :, offset] = True
    for got, expected, before in zip(pools, want_pools, (arrays.k_pages, arrays.v_pages), strict=True):
        np.testing.assert_array_equal(bits(got)[~written], bits(before)[~written])
        # XLA leaves out roundings between norm and rotation.
        new, wanted = got[written].astype(np.float32), expected[written].astype(np.float32)
        np.testing.assert_allclose(new, wanted, rtol=2**-6, atol=2e-2)
