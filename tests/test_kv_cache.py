"""The paged cache: where a token goes, what stays as it was, and how many bytes it takes; against a loop in NumPy."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import kv_cache
from jaxinfer.config import ModelConfig
from jaxinfer.config_hf import from_hugging_face

PAGES, PAGE, HEADS, DIM = 9, 4, 2, 8


@functools.cache
def config() -> ModelConfig:
    """Two layers, two KV heads of eight."""
    return from_hugging_face(families.BY_NAME["llama"].config, {}, num_tokens=None, extra_eos=())


def counted_cache(dtype: type = jnp.float32) -> kv_cache.PagedKVCache:
    """Every element different from every other in its pool, and negative."""
    cache = kv_cache.create(config(), PAGES, PAGE, dtype)
    return jax.tree.map(lambda pool: -1 - jnp.arange(pool.size, dtype=dtype).reshape(pool.shape), cache)


@functools.partial(jax.jit, static_argnames="layer")
def append(cache, layer, keys, values, positions, table):
    return kv_cache.append(cache, layer, keys, values, positions, table)


def test_a_new_cache_is_zeros_of_the_shape_that_kernels_read():
    cache = kv_cache.create(config(), PAGES, PAGE, jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == 2
    for pool in (*cache.keys, *cache.values):
        assert pool.shape == (PAGES, HEADS, PAGE, DIM)
        assert pool.dtype == jnp.bfloat16
        assert not np.asarray(pool).any()
    assert (cache.num_pages, cache.page_size) == (PAGES, PAGE)
    assert kv_cache.create(config(), 2).page_size == 16


@pytest.mark.parametrize(("dtype", "expected"), [(jnp.bfloat16, 128), (jnp.float32, 256)])
def test_bytes_per_token_by_hand(dtype: type, expected: int):
    """Keys and values of 2 layers, 2 heads, 8 dimensions: 64 numbers."""
    assert kv_cache.bytes_per_token(config(), dtype) == expected
    cache = kv_cache.create(config(), PAGES, PAGE, dtype)
    assert sum(pool.nbytes for pool in jax.tree.leaves(cache)) == PAGES * PAGE * expected


@pytest.mark.parametrize(
    ("arguments", "message"), [((1, 16), "num_pages=1"), ((0, 16), "num_pages=0"), ((4, 0), "page_size=0")]
)
def test_sizes_without_room_are_refused(arguments: tuple[int, int], message: str):
    with pytest.raises(ValueError, match=message):
        kv_cache.create(config(), *arguments)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_append_writes_where_a_loop_would_and_nowhere_else(data: st.DataObject):
    """Three rows of five tokens with pages in any order, any starts, any padding."""
    rows, tokens, width = 3, 5, 2
    pages = np.array(data.draw(st.permutations(range(1, PAGES))), np.int32)[: rows * width].reshape(rows, width)
    positions = np.full((rows, tokens), -1, np.int32)
    for row in range(rows):
        start = data.draw(st.integers(0, width * PAGE - 1))
        count = data.draw(st.integers(0, min(tokens, width * PAGE - start)))
        positions[row, :count] = start + np.arange(count)
    layer = data.draw(st.integers(0, 1))
    keys = np.arange(rows * tokens * HEADS * DIM, dtype=np.float32).reshape(rows, tokens, HEADS, DIM)
    cache = counted_cache()
    expected = [np.array(pool) for pool in (*cache.keys, *cache.values)]
    for row, token in np.argwhere(positions >= 0):
        page, offset = pages[row, positions[row, token] // PAGE], positions[row, token] % PAGE
        expected[layer][page, :, offset] = keys[row, token]
        expected[2 + layer][page, :, offset] = 10_000 + keys[row, token]
    after = append(
        cache, layer, jnp.asarray(keys), jnp.asarray(10_000 + keys), jnp.asarray(positions), jnp.asarray(pages)
    )
    for pool, wanted in zip((*after.keys, *after.values), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(pool)[1:], wanted[1:])  # page 0 is scratch


def test_append_rounds_to_the_cache_s_dtype():
    keys = jnp.full((1, 1, HEADS, DIM), 1.001, jnp.float32)
    cache = append(counted_cache(jnp.bfloat16), 0, keys, keys, jnp.array([[0]], jnp.int32), jnp.array([[1]], jnp.int32))
    assert cache.keys[0].dtype == jnp.bfloat16
    assert float(cache.keys[0][1, 0, 0, 0]) == 1.0


def test_a_position_past_the_table_hurts_no_other_row():
    """It is a caller's mistake; what it may not do is to write into a page that the row does not own."""
    keys = jnp.ones((2, 1, HEADS, DIM), jnp.float32)
    cache = counted_cache()
    before = np.array(cache.keys[0])
    positions, table = jnp.array([[2 * PAGE], [-1]], jnp.int32), jnp.array([[3, 4], [5, 6]], jnp.int32)
    after = np.asarray(append(cache, 0, keys, keys, positions, table).keys[0])
    changed = {int(page) for page in np.argwhere(after != before)[:, 0]}
    assert changed <= {0, 3, 4}
