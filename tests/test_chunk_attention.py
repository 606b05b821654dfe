"""Attention of a chunk over its prefix in pages and itself, against the same attention over pages in one piece."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers import attention, chunk_attention, paged_chunk, tiered_attention
from tests import paged_attention_cases as cases

PAGE_SIZE, KV_HEADS = 16, 2
STARTS, LENGTHS = np.array([0, 30, 81, 0]), np.array([6, 7, 1, 0])


def plain_part(
    query: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array | None, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """A `Part` written out: one key head at a time for all its query heads."""
    group = query.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (keys, values))
    scores = jnp.einsum("bthd,bshd->bhts", query.astype(jnp.float32), keys) * jnp.float32(scale)
    places = jnp.arange(keys.shape[1])
    if lengths is None:
        seen = (places[None, :] <= jnp.arange(query.shape[1])[:, None])[None, None]
    else:
        seen = (places[None, :] < lengths[:, None])[:, None, None, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", jnp.exp(scores - lse[..., None]), values)
    return out.astype(query.dtype), lse.swapaxes(1, 2)


def arrays(tokens: int, head_dim: int, dtype: type, kv: str, pages: int, rng: np.random.Generator):
    """Rows of different lengths, one empty; pages in any order, NaN wherever no token of a row lies."""
    batch, total = len(STARTS), STARTS + LENGTHS
    query = rng.standard_normal((batch, tokens, 6, head_dim)).astype(np.float32)
    table = 1 + rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    used = np.zeros((1 + batch * pages, PAGE_SIZE), bool)
    for row in range(batch):
        places = np.arange(total[row])
        used[table[row, places // PAGE_SIZE], places % PAGE_SIZE] = True
    positions = np.where(np.arange(tokens) < LENGTHS[:, None], STARTS[:, None] + np.arange(tokens), -1).astype(np.int32)
    pools, scales, own = [], [], []
    for _ in range(2):
        x = rng.standard_normal((1 + batch * pages, KV_HEADS, PAGE_SIZE, head_dim)).astype(np.float32)
        if kv == "none":
            codes, scale = x.astype(dtype), None
            number = codes.astype(np.float32)
            codes = np.where(used[:, None, :, None], codes, np.array(np.nan, codes.dtype))
        else:
            codes, scale = cases.quantise(x, kv)
            number = cases.elements(codes, scale, head_dim)
            scale = np.where(used[:, None], scale, np.float32(np.nan))
        places = np.maximum(positions, 0)
        new = number[np.take_along_axis(table, places // PAGE_SIZE, 1), :, places % PAGE_SIZE]
        pools.append(jnp.asarray(codes))
        scales.append(None if scale is None else jnp.asarray(scale))
        own.append(jnp.asarray(np.where(positions[..., None, None] >= 0, new, 0).astype(dtype)))
    query, positions, table = jnp.asarray(query.astype(dtype)), jnp.asarray(positions), jnp.asarray(table)
    return query, own, tuple(pools), tuple(scales), positions, table


@pytest.mark.parametrize(("kv", "prefix_at_once"), [("none", 64), ("none", 4096), ("int8", 64), ("int4", 128)])
def test_equals_attention_over_pages_in_one_piece(kv: str, prefix_at_once: int, monkeypatch, rng) -> None:
    monkeypatch.setattr(chunk_attention, "PREFIX_AT_ONCE", prefix_at_once)
    query, own, pools, scales, positions, table = arrays(7, 8, np.float32, kv, 7, rng)
    run = jax.jit(functools.partial(chunk_attention.chunk_attention, scale=0.4, part=plain_part))
    got = np.asarray(run(query, own[0], own[1], pools, scales, positions, table))
    options = {"scale": 0.4, "window": None, "softcap": None}
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    want = np.asarray(attention.prefill_attention(query, *stored, **options))
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(got[real], want[real], rtol=2e-5, atol=2e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(("kv", "window"), [("none", 1), ("none", 17), ("none", 40), ("int8", 33)])
def test_windowed_equals_attention_over_pages(kv: str, window: int, rng) -> None:
    query, _, pools, scales, positions, table = arrays(7, 8, np.float32, kv, 7, rng)
    run = functools.partial(chunk_attention.windowed_chunk_attention, scale=0.4, window=window, implementation="xla")
    got = np.asarray(jax.jit(run)(query, pools, scales, positions, table))
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    want = np.asarray(attention.prefill_attention(query, *stored, scale=0.4, window=window, softcap=None))
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(got[real], want[real], rtol=2e-5, atol=2e-5)
    assert np.isfinite(got).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU the kernel runs, which takes no float32")
@pytest.mark.parametrize(
    ("kv", "window", "softcap"), [("none", None, None), ("none", 17, 3.0), ("int8", None, 3.0), ("int4", 40, None)]
)
def test_kernels_route_equals_attention_over_pages(kv: str, window: int | None, softcap: float | None, rng) -> None:
    query, _, pools, scales, positions, table = arrays(7, 8, np.float32, kv, 7, rng)
    options = {"scale": 0.4, "window": window, "softcap": softcap}
    got = np.asarray(paged_chunk.paged_chunk_attention(query, pools, scales, positions, table, **options))
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    want = np.asarray(attention.prefill_attention(query, *stored, **options))
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(got[real], want[real], rtol=2e-5, atol=2e-5)
    assert np.isfinite(got).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU the kernel runs, which takes no float32")
def test_kernels_route_sees_all_of_older_tiers(rng) -> None:
    query, _, pools, scales, positions, table = arrays(7, 8, np.float32, "none", 7, rng)
    older = []
    for kv, lengths in (("int8", (40, 0, 3, 0)), ("int4", (0, 17, 64, 0))):
        _, _, old_pools, old_scales, _, old_table = arrays(7, 8, np.float32, kv, 7, rng)
        k_scales, v_scales = (None if x is None else jnp.nan_to_num(x, nan=0.3) for x in old_scales)
        lengths = jnp.asarray(lengths, jnp.int32)
        older.append(chunk_attention.Prefix(old_pools, (k_scales, v_scales), old_table, lengths))
    options: dict[str, Any] = {"scale": 0.4, "softcap": None}
    run = functools.partial(paged_chunk.paged_chunk_attention, window=None, older=older)
    got = np.asarray(run(query, pools, scales, positions, table, **options))
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    newest = attention.prefill_attention(query, *stored, **options, window=None, return_lse=True)
    parts = [newest, *(tiered_attention.prefill_older(query, positions, tier, **options) for tier in older)]
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(got[real], np.asarray(tiered_attention.merged(parts))[real], rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_kernel_is_refused_with_a_reason(monkeypatch) -> None:
    query, pools = jnp.zeros((1, 64, 2, 64), jnp.bfloat16), [jnp.zeros((2, 1, 16, 64), jnp.bfloat16)]
    assert paged_chunk.kernel_refusal(query, pools) == "this process has no GPU"
    assert "page size" in str(paged_chunk.kernel_refusal(query, [jnp.zeros((2, 1, 8, 64), jnp.int8)]))
    monkeypatch.setenv("JAXINFER_KERNELS", "triton")
    assert paged_chunk.kernel_refusal(query, pools) == "JAXINFER_KERNELS asks for triton"
    monkeypatch.setattr(paged_chunk, "mosaic_refusal", lambda *_: None)
    monkeypatch.setenv("JAXINFER_KERNELS", "mosaic")
    assert paged_chunk.kernel_refusal(query, pools) is None
    monkeypatch.delenv("JAXINFER_KERNELS")
    assert paged_chunk.kernel_refusal(query, pools) is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU refuses")
def test_refusal_gives_the_reason() -> None:
    query = jnp.zeros((1, 64, 2, 8), jnp.bfloat16)
    assert attention.cudnn_refusal(query, None) == "this process has no GPU"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it needs bfloat16 or float16 queries, not float32"),
        ({"tokens": 65}, "it needs a multiple of 64 tokens, not 65"),
        ({"head_dim": 12}, "a multiple of 8 and at most 256, not 12"),
        ({"softcap": 3.0}, "it has no soft-cap"),
        ({}, None),
    ],
)
def test_refusals_on_a_gpu(change, reason, monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arguments = {"dtype": jnp.bfloat16, "tokens": 64, "head_dim": 64, "softcap": None} | change
    query = jnp.zeros((1, arguments["tokens"], 2, arguments["head_dim"]), arguments["dtype"])
    got = attention.cudnn_refusal(query, arguments["softcap"])
    assert got is None if reason is None else reason in str(got)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv", "prefix_at_once"), [("none", 64), ("none", 4096), ("int8", 128), ("float8_e4m3fn", 64)])
def test_gpu(kv: str, prefix_at_once: int, monkeypatch, rng) -> None:
    """cuDNN's parts against float32's; the same bits on every run."""
    monkeypatch.setattr(chunk_attention, "PREFIX_AT_ONCE", prefix_at_once)
    query, own, pools, scales, positions, table = arrays(64, 128, cases.BF16, kv, 7, rng)
    inputs = (query, own[0], own[1], pools, scales, positions, table)
    run = jax.jit(functools.partial(chunk_attention.chunk_attention, scale=0.1))
    got = [np.asarray(run(*inputs)) for _ in range(3)]
    wide = [x.astype(jnp.float32) for x in (query, own[0], own[1])]
    plain = functools.partial(chunk_attention.chunk_attention, scale=0.1, part=plain_part)
    want = np.asarray(plain(wide[0], wide[1], wide[2], pools, scales, positions, table))
    real = np.asarray(positions) >= 0
    assert cases.relative_error(got[0][real], want[real]) < 8e-3
    windowed = functools.partial(chunk_attention.windowed_chunk_attention, scale=0.1, window=40)
    got_windowed = np.asarray(jax.jit(windowed)(query, pools, scales, positions, table))
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    want = attention.prefill_attention(wide[0], *stored, scale=0.1, window=40, softcap=None)
    assert cases.relative_error(got_windowed[real], np.asarray(want)[real]) < 8e-3
    for again in got[1:]:
        np.testing.assert_array_equal(again.view(np.uint16), got[0].view(np.uint16))
