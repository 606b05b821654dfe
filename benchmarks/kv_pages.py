"""The key-value caches that `benchmarks.kv_tiers` compares: pools and page tables of rows of one length."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import kv_cache, tiers
from jaxinfer.batch import PAGE_SIZE, Limits, bucket
from jaxinfer.config import ModelConfig
from jaxinfer.tier_pages import TierPages, TierRules
from jaxinfer.tiered_batch import pools_for
from jaxinfer.tiers import KVCache, PageTable, TieredKV, TieredKVCache

CACHES = ("bfloat16", "int8", "float8_e4m3fn", "int4", "tiered")


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


class Pages:
    """A cache of one kind and the tables of its rows, which all have the same number of tokens."""

    def __init__(self, config: ModelConfig, kind: str, dtype: jnp.dtype, rows: int, num_tokens: int, limits: Limits):
        self.config, self.dtype, self.rows = config, dtype, rows
        self.kv = tiers.resolve(kind)
        if isinstance(self.kv, TieredKV):
            rules = TierRules.of(config, self.kv, PAGE_SIZE)
            self.pools = pools_for(rules, rows, num_tokens, limits)
            self.widths = rules.room(bucket(num_tokens), limits.decode_chunk)
            self.tiers = TierPages(rules, self.pools, rows)
        self.width = -(-num_tokens // PAGE_SIZE)

    def create(self) -> KVCache:
        if isinstance(self.kv, TieredKV):
            return tiers.create(self.config, self.pools, PAGE_SIZE, self.dtype)
        return kv_cache.create(self.config, 1 + self.rows * self.width, PAGE_SIZE, self.kv)

    def table(self) -> PageTable:
        if isinstance(self.kv, TieredKV):
            return jax.tree.map(jnp.asarray, self.tiers.tables(range(self.rows), self.widths))
        return 1 + jnp.arange(self.rows * self.width, dtype=jnp.int32).reshape(self.rows, self.width)

    def append(self, cache: KVCache, count: int, rows: Sequence[int] | None = None) -> tuple[KVCache, int]:
        """Makes room for `count` tokens of each row. Returns the cache and the pages that moved down before."""
        moved = 0
        if isinstance(cache, TieredKVCache):
            for moves in self.tiers.settle():
                moved += int((moves.pages[:, 1] != kv_cache.SCRATCH_PAGE).sum())
                pages = jnp.asarray(moves.pages)
                cache = tiers.move_pages(cache, pages, source=moves.source, target=moves.target)
            for row in range(self.rows) if rows is None else rows:
                self.tiers.append(row, count)
        return cache, moved
