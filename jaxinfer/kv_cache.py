"""The paged key-value cache: a pool of fixed-size pages that sequences own by number.

Per layer there is one array for keys and one for values, [num_pages, kv_heads, page_size, head_dim], so that one
(page, head) is one contiguous block. Page 0 is scratch: a page table's unused entries point there, nobody reads it.

A cache of int8, float8_e4m3fn or int4 holds codes, and one float32 scale for each token and head beside them
(`pallas_kernels/paged_attention/formats.py`): 0.52 of bfloat16's bytes, or 0.27, for a head_dim of 128. New keys and
values are quantised as they are written, and attention only ever sees what the cache holds, a prompt's own tokens
included. So a prompt gives the same result in one piece, in chunks, and with a prefix that was cached before.
"""

import dataclasses
import functools
import typing

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.config import ModelConfig
from pallas_kernels.paged_attention.formats import FORMATS, KVFormat, dequantise, format_of, quantise

SCRATCH_PAGE = 0


@typing.no_type_check  # JAX rebuilds pytrees around placeholders, as in `eval_shape`
@flax.struct.dataclass
class PagedKVCache:
    """One array per layer for keys and one for values, each [num_pages, kv_heads, page_size, head_dim].

    Scales are float32 [num_pages, kv_heads, page_size] per layer; none where the pools hold the elements themselves.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    key_scales: list[jax.Array] = dataclasses.field(default_factory=list)
    value_scales: list[jax.Array] = dataclasses.field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def format(self) -> KVFormat | None:
        """How the pools hold codes; None where they hold the elements themselves."""
        return format_of(self.keys[0].dtype) if self.key_scales else None

    def scales(self, layer: int) -> tuple[jax.Array | None, jax.Array | None]:
        """Scales of one layer's keys and values, if it has them."""
        return (self.key_scales[layer], self.value_scales[layer]) if self.key_scales else (None, None)

    def with_layer(self, layer: int, keys: jax.Array, values: jax.Array, *scales: jax.Array) -> "PagedKVCache":
        """The cache with the pools of one layer replaced: keys, values and, if it has them, their scales."""
        lists = (self.keys, self.values, self.key_scales, self.value_scales)
        new = (keys, values, *scales)
        return PagedKVCache(*([*old[:layer], x, *old[layer + 1 :]] for old, x in zip(lists, new, strict=False)))


def format_for(dtype: jnp.dtype | type | str) -> KVFormat | None:
    """The format of a cache of `dtype`; None for one that holds floats of 16 or 32 bits as they are.

    Raises ValueError for a dtype that no cache has.
    """
    try:
        resolved = jnp.dtype(dtype)
    except (TypeError, ValueError):  # NumPy has both for text that is no type
        resolved = None
    if resolved is not None and resolved.name in FORMATS:
        return FORMATS[resolved.name]
    if resolved in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return None
    raise ValueError(f"kv_dtype={dtype!r}: a cache can be float32, bfloat16, float16, {', '.join(FORMATS)}")


def bytes_per_token(config: ModelConfig, dtype: jnp.dtype | type | str) -> int:
    """Bytes of cache that one token takes in all layers together, scales included."""
    form = format_for(dtype)
    head = config.head_dim * jnp.dtype(dtype).itemsize if form is None else form.width(config.head_dim) + 4
    return 2 * config.num_layers * config.num_kv_heads * head


def create(
    config: ModelConfig, num_pages: int, page_size: int = 16, dtype: jnp.dtype | type | str = jnp.bfloat16
) -> PagedKVCache:
    """Allocates a zeroed cache of `num_pages` pages of `page_size` tokens, scratch page 0 included.

    `dtype` is float32, bfloat16, float16, int8, float8_e4m3fn or int4. Raises ValueError for another one, for fewer
    than 2 pages (page 0 holds no sequence) or a page size below 1.
    """
    if num_pages < 2:
        raise ValueError(f"num_pages={num_pages}: page 0 is scratch, so a cache needs at least 2 pages")
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: a page holds at least 1 token; 16 is usual")
    form = format_for(dtype)
    storage = jnp.dtype(dtype) if form is None else form.storage
    width = config.head_dim if form is None else form.width(config.head_dim)
    return _zeros(config.num_layers, (num_pages, config.num_kv_heads, page_size, width), storage, form is not None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _zeros(num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype, scaled: bool) -> PagedKVCache:
    """All pools from one program: 64 allocations one by one would delay the first token of a 32-layer model."""

    def pools(shape: tuple[int, ...], dtype: jnp.dtype) -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for _ in range(num_layers)]

    scales = [pools(shape[:3], jnp.dtype(jnp.float32)) for _ in range(2)] if scaled else []
    return PagedKVCache(pools(shape, dtype), pools(shape, dtype), *scales)


def append(
    cache: PagedKVCache,
    layer: int,
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    positions: Int32[Array, "batch tokens"],
    page_table: Int32[Array, "batch pages"],
) -> PagedKVCache:
    """Writes new keys and values into their pages, in place when `cache` is donated.

    A token at position p of a row goes to page `page_table[row, p // page_size]`, offset `p % page_size`. A negative
    position marks padding, which is written nowhere, as is what a row's table sends to the scratch page.
    """
    num_pages, kv_heads, page_size, _ = cache.keys[layer].shape
    pages = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1, mode="clip")
    offsets = jnp.maximum(positions, 0) % page_size
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :]
    places = (pages[:, :, None] * kv_heads + heads) * page_size + offsets[:, :, None]
    written = (positions >= 0) & (pages != SCRATCH_PAGE)
    places = jnp.where(written[:, :, None], places, num_pages * kv_heads * page_size)

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        # As rows of one matrix, each written once: otherwise XLA makes every 16-bit number an atomic update, which
        # takes longer than all the rest of a small model's prefill.
        rows = pool.reshape(-1, *pool.shape[3:])
        new = new.astype(pool.dtype).reshape(-1, *pool.shape[3:])
        return rows.at[places.reshape(-1)].set(new, mode="drop", unique_indices=True).reshape(pool.shape)

    pools, new = [cache.keys[layer], cache.values[layer]], [keys, values]
    if cache.format is not None:
        (keys, key_scales), (values, value_scales) = (quantise(x, cache.format) for x in new)
        pools += [cache.key_scales[layer], cache.value_scales[layer]]
        new = [keys, values, key_scales, value_scales]
    return cache.with_layer(layer, *(write(pool, x) for pool, x in zip(pools, new, strict=True)))


def as_stored(cache: PagedKVCache, x: Float[Array, "*rows head_dim"]) -> Float[Array, "*rows head_dim"]:
    """Keys or values as attention will read them from this cache, in their own dtype."""
    if cache.format is None:
        return x
    return dequantise(*quantise(x, cache.format)).astype(x.dtype)
