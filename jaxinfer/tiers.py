"""A key-value cache in tiers: a sequence's newest tokens as they are, older pages in int8, the oldest in int4.

Each tier is a pool of pages of its own, so what a page saves when it moves down is room for others to use. Whole pages
move, on the device, when all their tokens have aged past a distance: a page of the newest tier is quantised to int8
(`formats.quantise`), one of int8 is dequantised and quantised to int4, and its old page is free. What a tier holds
does not depend on when or how often pages moved; which queries still saw a token as it was does. Pages move between
programs, so a prompt that is cut into other chunks gives results that differ by what rounding does. Which page a token
is in is the host's knowledge (`tier_pages.py`); programs get it as `TierTables`.

A layer with a sliding window reads nothing behind the window: it keeps its window as it is and forgets the rest.

Attention reads each tier by itself, and the results are merged by their log-sum-exp (`layers/tiered_attention.py`).
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxinfer import kv_cache
from jaxinfer.config import ModelConfig
from jaxinfer.kv_cache import SCRATCH_PAGE, PagedKVCache
from jaxinfer.layers.chunk_attention import Prefix
from pallas_kernels.paged_attention.formats import FORMATS, dequantise, quantise

type Tier = Literal["recent", "int8", "int4"]

MOVED_AT_ONCE = (8, 64, 256)
"""Pages that one call of `move_pages` moves, padding included: as decoding a few rows needs, many, and as prefill does,
where a chunk of 2048 tokens lets as many age. A call is four to six kernels a layer, however few pages it moves."""


@dataclasses.dataclass(frozen=True)
class TieredKV:
    """How far back tokens are kept how. In text "tiered", or "tiered:RECENT,INT8".

    `recent` is the least distance from a sequence's end, in tokens, at which a page leaves the newest tier, whose
    elements have the model's dtype. `int8` is how many tokens further it leaves int8 for int4; 0 is no int8 tier.
    Pages hold 16 tokens and leave whole, when their last token has that distance.
    """

    recent: int = 1024
    int8: int = 4096

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("int8", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"TieredKV({name}={value!r}): expected an integer of at least {least}, in tokens")

    def __str__(self) -> str:
        return f"tiered:{self.recent},{self.int8}"


def resolve(kv_dtype: jnp.dtype | type | str | TieredKV) -> jnp.dtype | TieredKV:
    """What `kv_dtype` of `jaxinfer.load` means. Raises ValueError for what no cache can be."""
    if isinstance(kv_dtype, TieredKV):
        return kv_dtype
    if isinstance(kv_dtype, str) and kv_dtype.startswith("tiered"):
        match = re.fullmatch(r"tiered(?::(\d+),(\d+))?", kv_dtype)
        if match is None:
            raise ValueError(f'kv_dtype={kv_dtype!r}: expected "tiered" or "tiered:RECENT,INT8", such as {TieredKV()}')
        return TieredKV(*map(int, match.groups())) if match[1] else TieredKV()
    try:
        kv_cache.format_for(kv_dtype)
    except ValueError as error:
        raise ValueError(f"{error}, or tiered") from None
    return jnp.dtype(kv_dtype)


# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@flax.struct.dataclass
class TieredKVCache:
    """The pools of each tier. `recent`, `int8` and `int4` have those of the layers that see everything, `window` those
    of the layers with a window, each in the order of the layers; a tier that no row can reach has none."""

    recent: PagedKVCache
    int8: PagedKVCache
    int4: PagedKVCache
    window: PagedKVCache
    windowed: tuple[bool, ...] = flax.struct.field(pytree_node=False)
    """Which layers have a window."""

    def place(self, layer: int) -> int:
        """Index of a layer in the lists of its pools."""
        return sum(windowed == self.windowed[layer] for windowed in self.windowed[:layer])


@typing.no_type_check
@flax.struct.dataclass
class TierTables:
    """Where a program's rows have their pages. A table lists the pages of its tier in the order of their tokens; what
    lies behind a row's last is anything in range. A tier that no row can reach has a table of width 0.

    int4 begins with the row's first token, each of the others at a multiple of the page size; int8 ends where the
    newest begins.
    """

    recent: Int32[Array | np.ndarray, "batch recent_pages"]
    int8: Int32[Array | np.ndarray, "batch int8_pages"]
    int4: Int32[Array | np.ndarray, "batch int4_pages"]
    window: Int32[Array | np.ndarray, "batch window_pages"]
    recent_start: Int32[Array | np.ndarray, " batch"]
    """Position of the first token of the newest tier."""
    int8_start: Int32[Array | np.ndarray, " batch"]
    window_start: Int32[Array | np.ndarray, " batch"]


type KVCache = PagedKVCache | TieredKVCache
type PageTable = Int32[Array, "batch pages"] | TierTables


@dataclasses.dataclass(frozen=True)
class LayerPages:
    """Where one layer has its keys and values: layer `place` of `store`, which new ones go to, and older tiers, whose
    tokens all precede those.

    `positions` [batch, tokens] count from the first token of `page_table`; -1 is padding, as everywhere.
    """

    store: PagedKVCache
    place: int
    positions: Int32[Array, "batch tokens"]
    page_table: Int32[Array, "batch pages"]
    older: tuple[Prefix, ...] = ()


def layer_pages(
    cache: KVCache, layer: int, positions: Int32[Array, "batch tokens"], page_table: PageTable
) -> LayerPages:
    """Where `layer` has its keys and values; `positions` are places in the sequence."""
    if isinstance(cache, PagedKVCache):
        assert not isinstance(page_table, TierTables)
        return LayerPages(cache, layer, positions, page_table)
    assert isinstance(page_table, TierTables)
    tables = jax.tree.map(jnp.asarray, page_table)
    place = cache.place(layer)

    def since(start: jax.Array) -> jax.Array:
        return jnp.where(positions >= 0, positions - start[:, None], jnp.int32(-1))

    if cache.windowed[layer]:
        return LayerPages(cache.window, place, since(tables.window_start), tables.window)
    busy = jnp.any(positions >= 0, axis=1)
    older = []
    for store, table, length in (
        (cache.int4, tables.int4, tables.int8_start),
        (cache.int8, tables.int8, tables.recent_start - tables.int8_start),
    ):
        if table.shape[1]:
            pools, scales = (store.keys[place], store.values[place]), store.scales(place)
            older.append(Prefix(pools, scales, table, jnp.where(busy, length, jnp.int32(0))))
    return LayerPages(cache.recent, place, since(tables.recent_start), tables.recent, tuple(older))


def with_store[Cache: KVCache](cache: Cache, layer: int, store: PagedKVCache) -> Cache:
    """The cache in which `store` is what new keys and values of `layer` went to."""
    if isinstance(cache, PagedKVCache):
        return typing.cast(Cache, store)
    return typing.cast(Cache, dataclasses.replace(cache, **{"window" if cache.windowed[layer] else "recent": store}))


@dataclasses.dataclass(frozen=True)
class TierPools:
    """Pages of each tier's pool, or of one row in it; scratch pages not counted."""

    recent: int
    int8: int
    int4: int
    window: int


def create(config: ModelConfig, pools: TierPools, page_size: int, dtype: jnp.dtype) -> TieredKVCache:
    """Allocates a zeroed cache with scratch pages too. `dtype` is that of the newest tier and of windows."""
    stores = {
        name: kv_cache.create(part, 1 + num_pages, page_size, form) if num_pages else PagedKVCache([], [])
        for name, part, num_pages, form in _parts(config, pools, dtype)
    }
    return TieredKVCache(**stores, windowed=tuple(layer.window is not None for layer in config.layers))


def num_bytes(config: ModelConfig, pools: TierPools, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of what `create` allocates."""
    return sum(
        (1 + num_pages) * page_size * kv_cache.bytes_per_token(part, form)
        for _, part, num_pages, form in _parts(config, pools, dtype)
        if num_pages
    )


def _parts(
    config: ModelConfig, pools: TierPools, dtype: jnp.dtype
) -> Iterator[tuple[str, ModelConfig, int, jnp.dtype]]:
    """Of each tier its name, the model with only the layers it serves, its pages and what they hold."""
    full = tuple(layer for layer in config.layers if layer.window is None)
    windowed = tuple(layer for layer in config.layers if layer.window is not None)
    forms = {"recent": dtype, "int8": jnp.dtype("int8"), "int4": jnp.dtype("int4"), "window": dtype}
    for name, form in forms.items():
        layers = windowed if name == "window" else full
        yield name, dataclasses.replace(config, layers=layers), getattr(pools, name) if layers else 0, form


@functools.partial(jax.jit, static_argnames=("source", "target"), donate_argnames="cache")
def move_pages(cache: TieredKVCache, pages: Int32[Array, "moves 2"], *, source: Tier, target: Tier) -> TieredKVCache:
    """Moves pages of all layers down: from `pages[i, 0]` of the source's pool to `pages[i, 1]` of the target's.

    A move to the scratch page is none: padding. From the newest tier to int4 a page goes by way of int8, so that its
    codes are the same as if it had stayed there for a while. No two moves have one target.
    """
    old: PagedKVCache = getattr(cache, source)
    new: PagedKVCache = getattr(cache, target)
    by_way_of = (FORMATS["int8"],) if (source, target) == ("recent", "int4") else ()
    sources, targets = pages[:, 0], pages[:, 1]

    def moved(pool: jax.Array, scales: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        page = jnp.take(pool, sources, axis=0, mode="clip")
        if scales is not None:
            page = dequantise(page, jnp.take(scales, sources, axis=0, mode="clip"))
        for form in by_way_of:
            page = dequantise(*quantise(page, form))
        return quantise(page, FORMATS[target])

    def write(pool: jax.Array, page: jax.Array) -> jax.Array:
        # Unique, and padding past the end: otherwise XLA writes every byte with a loop of compare-and-swap.
        places = jnp.where(targets == SCRATCH_PAGE, pool.shape[0] + jnp.arange(targets.size, dtype=jnp.int32), targets)
        return pool.at[places].set(page, mode="drop", unique_indices=True)

    for place in range(len(old.keys)):
        key_scales, value_scales = old.scales(place)
        keys, values = moved(old.keys[place], key_scales), moved(old.values[place], value_scales)
        pools = (new.keys[place], new.values[place], new.key_scales[place], new.value_scales[place])
        moves = (keys[0], values[0], keys[1], values[1])
        new = new.with_layer(place, *(write(pool, page) for pool, page in zip(pools, moves, strict=True)))
    return dataclasses.replace(cache, **{target: new})
