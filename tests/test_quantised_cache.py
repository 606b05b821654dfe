"""Caches of int8, fp8 and int4: codes and scales by hand, where they go, and what a model computes with them."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import kv_cache, steps
from jaxinfer.generation import generate
from jaxinfer.model import Model, load
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.paged_attention.formats import FORMATS, dequantise, quantise
from tests import paged_attention_cases as cases

DTYPES = ["int8", "float8_e4m3fn", "int4"]
PAGE = 16


@functools.cache
def tiny() -> Model:
    return load(families.BY_NAME["llama"].folder, dtype="float32", progress=False)


def poisoned_cache(model: Model, num_pages: int, dtype: str) -> kv_cache.PagedKVCache:
    """All scales NaN and all bits of codes set: whatever is read without having been written shows."""
    cache = kv_cache.create(model.config, num_pages, PAGE, dtype)

    def poison(pool: jax.Array) -> jax.Array:
        if pool.dtype == jnp.float32:
            return jnp.full_like(pool, jnp.nan)
        return jnp.asarray(np.full(pool.shape, 0xFF, np.uint8).view(pool.dtype))

    return jax.tree.map(poison, cache)


def test_codes_and_scales_by_hand():
    x = jnp.array([[127.0, -63.5, 1.5, 2.5]])
    codes, scales = quantise(x, FORMATS["int8"])
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[127, -64, 2, 2]]  # halves go to the even number
    codes, scales = quantise(jnp.array([[7.0, -7.0, 3.0, 0.0]]), FORMATS["int4"])
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[(7 + 8) + 16 * (3 + 8), (-7 + 8) + 16 * 8]]  # element j with element j + 2
    codes, scales = quantise(jnp.array([[448.0, -9.6, 0.0, 0.01]]), FORMATS["float8_e4m3fn"])
    assert scales.tolist() == [1.0]
    assert np.asarray(codes).astype(np.float32).tolist() == [[448.0, -10.0, 0.0, 0.009765625]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_what_is_not_finite(dtype: str):
    """Zeros come back as zeros. NaN and infinities come back as NaN: they must not turn into numbers (trap K1)."""
    x = jnp.array([[0.0] * 4, [1.0, jnp.nan, 0.0, 2.0], [1.0, jnp.inf, 0.0, 2.0]])
    codes, scales = quantise(x, FORMATS[dtype])
    assert scales[0] > 0
    back = np.asarray(dequantise(codes, scales))
    assert (back[0] == 0).all()
    assert np.isnan(back[1]).all()
    assert np.isnan(back[2]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_quantise_equals_numpy_and_is_as_near_as_its_codes_allow(dtype: str, data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((3, 16)).astype(np.float32) * np.float32(2.0 ** data.draw(st.integers(-60, 60)))
    codes, scales = (np.asarray(part) for part in quantise(jnp.asarray(x), FORMATS[dtype]))
    want_codes, want_scales = cases.quantise(x, dtype)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes.view(np.uint8), want_codes.view(np.uint8))
    back = cases.elements(codes, scales, 16)
    np.testing.assert_allclose(np.asarray(dequantise(jnp.asarray(codes), jnp.asarray(scales))), back, rtol=1e-6)
    step = scales[:, None] * (1 if dtype != "float8_e4m3fn" else np.maximum(np.abs(back / scales[:, None]) / 8, 2**-9))
    assert (np.abs(back - x) <= 0.51 * step).all()


@pytest.mark.parametrize(
    ("dtype", "expected"), [("int8", 96), ("float8_e4m3fn", 96), ("int4", 64), (jnp.int8, 96), ("bfloat16", 128)]
)
def test_bytes_per_token_by_hand(dtype: str, expected: int):
    """Keys and values of 2 layers, 2 heads: 8 times 8 codes and a float32 scale."""
    config = tiny().config
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 2, 8)
    assert kv_cache.bytes_per_token(config, dtype) == expected
    cache = kv_cache.create(config, 5, 4, dtype)
    assert sum(pool.nbytes for pool in jax.tree.leaves(cache)) == 5 * 4 * expected


def test_a_dtype_that_no_cache_has_is_refused():
    for wrong in ("int3", "float64", jnp.int16):
        with pytest.raises(ValueError, match="a cache can be float32, bfloat16, float16, int8, float8_e4m3fn, int4"):
            kv_cache.format_for(wrong)
    with pytest.raises(ValueError, match="int4 keys and values need an even head_dim, not 7"):
        kv_cache.create(dataclasses.replace(tiny().config, head_dim=7), 4, dtype="int4")


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_codes_and_scales_where_a_loop_would(dtype: str):
    config, rng = tiny().config, np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 2, 3, 2, 8)).astype(np.float32)
    positions = np.array([[3, 4, 5], [0, -1, -1]], np.int32)
    table = np.array([[2, 4], [1, 3]], np.int32)
    before = kv_cache.create(config, 5, 4, dtype)
    before = jax.tree.map(lambda pool: jnp.full_like(pool, 3), before)
    after = kv_cache.append(before, 1, *(jnp.asarray(x) for x in (keys, values, positions, table)))
    expected = {name: [np.array(x) for x in getattr(before, name)] for name in ("keys", "values")}
    scales = {name: [np.array(x) for x in getattr(before, name)] for name in ("key_scales", "value_scales")}
    for row, token in np.argwhere(positions >= 0):
        place = table[row, positions[row, token] // 4], slice(None), positions[row, token] % 4
        for (name, pools), (scales_name, pool_scales), x in zip(
            expected.items(), scales.items(), (keys, values), strict=True
        ):
            del name, scales_name
            pools[1][place], pool_scales[1][place] = cases.quantise(x[row, token], dtype)
    for name, pools in (expected | scales).items():
        for got, want in zip(getattr(after, name), pools, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[1:].view(np.uint8), want[1:].view(np.uint8))


def logits_by_chunks(model: Model, tokens: np.ndarray, chunks: list[int], dtype: str) -> np.ndarray:
    """Last logits of one row, prefilled in `chunks`; the first of a chunk of 1 is decoded."""
    cache = poisoned_cache(model, 8, dtype)
    table = jnp.array([[5, 2, 7, 1, 3]], jnp.int32)
    start, logits = 0, None
    for count in chunks:
        piece = jnp.asarray(tokens[None, start : start + count])
        if count == 1:
            logits, cache = steps.decode(
                model.params, cache, piece[:, 0], jnp.array([start], jnp.int32), table, config=model.config
            )
        else:
            padded = jnp.pad(piece, ((0, 0), (0, 64 - count)))
            lengths, starts = jnp.array([count], jnp.int32), jnp.array([start], jnp.int32)
            logits, cache = steps.prefill(
                model.params,
                cache,
                padded,
                lengths,
                starts,
                table,
                config=model.config,
                from_empty=start == 0,
            )
        start += count
    assert start == len(tokens)
    return np.asarray(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_prefixes_and_decoding_agree(dtype: str):
    """Trap K3: attention sees what the cache holds, so how the prompt was cut changes nothing."""
    model = tiny()
    tokens = np.random.default_rng(1).integers(3, model.config.num_tokens, 50).astype(np.int32)
    whole = logits_by_chunks(model, tokens, [50], dtype)
    pieces = logits_by_chunks(model, tokens, [17, 16, 15, 1, 1], dtype)
    np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-4)
    exact = logits_by_chunks(model, tokens, [50], "float32")
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    assert 0 < error < {"int8": 0.02, "float8_e4m3fn": 0.1, "int4": 0.4}[dtype]


def test_verification_equals_decoding():
    """Several tokens at once see each other as decoding one by one would."""
    model, dtype = tiny(), "int4"
    tokens = np.random.default_rng(2).integers(3, model.config.num_tokens, 20).astype(np.int32)
    table, params = jnp.array([[2, 1]], jnp.int32), model.params
    cache = poisoned_cache(model, 3, dtype)
    padded, lengths = jnp.pad(jnp.asarray(tokens[None, :16]), ((0, 0), (0, 48))), jnp.array([16], jnp.int32)
    _, cache = steps.prefill(
        params, cache, padded, lengths, jnp.zeros(1, jnp.int32), table, config=model.config, from_empty=True
    )
    copy = jax.tree.map(jnp.copy, cache)
    at = jnp.array([16], jnp.int32)
    together, _ = steps.verify(params, copy, jnp.asarray(tokens[None, 16:]), at, table, config=model.config)
    for i in range(4):
        one, cache = steps.decode(
            params, cache, jnp.asarray(tokens[16 + i : 17 + i]), at + i, table, config=model.config
        )
        np.testing.assert_allclose(np.asarray(together)[:, i], np.asarray(one), rtol=1e-4, atol=1e-4)


def test_fp8_codes_are_those_of_ml_dtypes():
    """XLA's conversion on this device rounds as ml_dtypes does, to the nearest even, for every bfloat16 up to 448."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    every = every[np.abs(every) <= 448]
    got = jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))(jnp.asarray(every))
    want = every.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


def test_load_with_kv_dtype_and_generate():
    """The same tokens as prefill and decode by hand over a cache of that dtype."""
    model = load(families.BY_NAME["llama"].folder, dtype="float32", kv_dtype="int8", progress=False)
    assert (model.dtype, model.cache_dtype, tiny().cache_dtype) == (jnp.float32, jnp.int8, jnp.float32)
    prompt = [5, 9, 4, 7, 6]
    got = generate(model, [prompt], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0].token_ids
    tokens = [*prompt]
    for _ in range(3):
        logits = logits_by_chunks(model, np.array(tokens, np.int32), [len(tokens)], "int8")
        tokens.append(int(logits[0].argmax()))
    assert list(got) == tokens[len(prompt) :]
    with pytest.raises(ValueError, match="kv_dtype='int3': a cache can be"):
        load(families.BY_NAME["llama"].folder, kv_dtype="int3", progress=False)
