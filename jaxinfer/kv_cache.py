"""The paged key-value cache: a pool of fixed-size pages that sequences own by number.

Per layer there is one array for keys and one for values, [num_pages, kv_heads, page_size, head_dim], so that one
(page, head) is one contiguous block. Page 0 is scratch: padding is written there and nobody reads it.
"""

import functools
import typing

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.config import ModelConfig

SCRATCH_PAGE = 0


@typing.no_type_check  # JAX rebuilds pytrees around placeholders, as in `eval_shape`
@flax.struct.dataclass
class PagedKVCache:
    """One array per layer for keys and one for values, each [num_pages, kv_heads, page_size, head_dim]."""

    keys: list[jax.Array]
    values: list[jax.Array]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    def with_layer(self, layer: int, keys: jax.Array, values: jax.Array) -> "PagedKVCache":
        """The cache with the pools of one layer replaced."""
        new_keys, new_values = list(self.keys), list(self.values)
        new_keys[layer], new_values[layer] = keys, values
        return PagedKVCache(keys=new_keys, values=new_values)


def bytes_per_token(config: ModelConfig, dtype: jnp.dtype | type) -> int:
    """Bytes of cache that one token takes in all layers together."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def create(
    config: ModelConfig, num_pages: int, page_size: int = 16, dtype: jnp.dtype | type = jnp.bfloat16
) -> PagedKVCache:
    """Allocates a zeroed cache of `num_pages` pages of `page_size` tokens, scratch page 0 included.

    Raises ValueError for fewer than 2 pages (page 0 holds no sequence) or a page size below 1.
    """
    if num_pages < 2:
        raise ValueError(f"num_pages={num_pages}: page 0 is scratch, so a cache needs at least 2 pages")
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: a page holds at least 1 token; 16 is usual")
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    return _zeros(config.num_layers, shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype) -> PagedKVCache:
    """All pools from one program: 64 allocations one by one would delay the first token of a 32-layer model."""
    pools = [[jnp.zeros(shape, dtype) for _ in range(num_layers)] for _ in range(2)]
    return PagedKVCache(keys=pools[0], values=pools[1])


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
    position marks padding, which goes to the scratch page.
    """
    page_size = cache.page_size
    pages = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1, mode="clip")
    pages = jnp.where(positions >= 0, pages, SCRATCH_PAGE)
    offsets = jnp.maximum(positions, 0) % page_size

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[pages, :, offsets].set(new.astype(pool.dtype), mode="drop")

    return cache.with_layer(layer, write(cache.keys[layer], keys), write(cache.values[layer], values))
