"""A batch whose key-value cache is in tiers: pages move down before each program, when they are old enough."""

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import tiers
from jaxinfer.batch import MIN_PAGES, PAGE_SIZE, Batch, Limits, bucket, pages_for
from jaxinfer.loop import DecodedChunk
from jaxinfer.model import Model
from jaxinfer.request import Request
from jaxinfer.tier_pages import TierPages, TierRules
from jaxinfer.tiers import TieredKV, TieredKVCache, TierPools, TierTables
from pallas_kernels.paged_attention import reads_lengths

PREFILL_TOKENS = 4096
"""Tokens of a prefill call at most. They go to the newest tier, which so needs room for them beside the rows' own."""


def tiered_limits(limits: Limits) -> Limits:
    """The limits with which a tiered batch works."""
    return dataclasses.replace(limits, prefill_tokens=min(limits.prefill_tokens, PREFILL_TOKENS))


def pools_for(rules: TierRules, num_rows: int, num_tokens: int, limits: Limits) -> TierPools:
    """Pages for rows of up to `num_tokens` tokens; both numbers rounded up to sizes that programs are compiled for."""
    num_rows, num_tokens = bucket(num_rows), pages_for(num_tokens) * PAGE_SIZE
    decoding = rules.room(num_tokens, limits.decode_chunk)
    prefilling = rules.room(num_tokens, limits.prefill_chunk)
    # What prefill calls need for a while; one call at a time.
    most = max(limits.prefill_tokens, limits.prefill_chunk) // PAGE_SIZE
    return TierPools(
        recent=num_rows * decoding.recent + min(num_rows * (prefilling.recent - decoding.recent), most),
        int8=num_rows * decoding.int8,
        int4=num_rows * decoding.int4,
        window=num_rows * decoding.window + min(num_rows * (prefilling.window - decoding.window), most),
    )


def num_bytes(model: Model, kv: TieredKV, num_rows: int, num_tokens: int, limits: Limits) -> int:
    """Bytes of the cache of a batch of `num_rows` rows of up to `num_tokens` tokens."""
    pools = pools_for(TierRules.of(model.config, kv, PAGE_SIZE), num_rows, num_tokens, tiered_limits(limits))
    return tiers.num_bytes(model.config, pools, PAGE_SIZE, model.dtype)


class TieredBatch(Batch):
    """A batch that knows of each row how many tokens it has in the cache when a program starts.

    A row that ended on the device and not yet on the host is taken to go on: its pages move without need.
    """

    def __init__(self, model: Model, requests: Sequence[Request], limits: Limits) -> None:
        super().__init__(model, requests, tiered_limits(limits))

    def _share_out(self, longest: int, spare_tokens: int) -> Hashable:
        model = self.model
        assert isinstance(model.kv_dtype, TieredKV) and not spare_tokens
        self.rules = TierRules.of(model.config, model.kv_dtype, PAGE_SIZE)
        self.room = pages_for(longest) * PAGE_SIZE
        pools = pools_for(self.rules, len(self.requests), longest, self.limits)
        self.pages = TierPages(self.rules, pools, len(self.requests))
        self.tier_pools = pools
        return pools, model.dtype

    def _allocate(self) -> TieredKVCache:
        return tiers.create(self.model.config, self.tier_pools, PAGE_SIZE, self.model.dtype)

    def _prefill_table(self, rows: np.ndarray, start: int, chunk: int) -> TierTables:
        self._move()
        for row in rows:
            if row >= 0:
                self.pages.append(int(row), int(np.clip(self.lengths[row] - start, 0, chunk)))
        return self.pages.tables(rows.tolist(), self.rules.room(self.room, self.limits.prefill_chunk))

    def _dispatch(self, dispatched: int) -> DecodedChunk:
        self._move()
        for row, request in enumerate(self.requests):
            if not request.finished:
                after = min(dispatched + self.limits.decode_chunk, request.max_tokens) - 1 + len(request.prompt)
                self.pages.append(row, after - self.pages.rows[row].num_tokens)
        return super()._dispatch(dispatched)

    def _move(self) -> None:
        """Moves what is old enough, so that the next program finds each row's pages where its length says."""
        assert isinstance(self.cache, TieredKVCache)
        for moves in self.pages.settle():
            pages = jnp.asarray(moves.pages)
            self.cache = tiers.move_pages(self.cache, pages, source=moves.source, target=moves.target)

    def _decode_table(self, num_tokens: int) -> TierTables:
        """Tables as wide as rows can need where kernels read no more than a row has, else as rows of that length do."""
        model, whole = self.model, self.rules.room(self.room, self.limits.decode_chunk)
        wide = all(
            reads_lengths(model.dtype, form, model.config.head_dim, PAGE_SIZE)
            for form in (model.dtype.name, *(name for name in ("int8", "int4") if getattr(whole, name)))
        )
        if not wide:
            needed = self.rules.room(num_tokens, self.limits.decode_chunk)
            whole = TierPools(
                *(
                    min(bucket(pages, MIN_PAGES), most)  # not 0 before there are any: that would be another program
                    for pages, most in zip(dataclasses.astuple(needed), dataclasses.astuple(whole), strict=True)
                )
            )
        rows = [row if row < len(self.requests) else -1 for row in range(self.size)]
        return jax.tree.map(jnp.asarray, self.pages.tables(rows, whole))
