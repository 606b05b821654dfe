"""Which tiles of keys and values a warp works through, and how it reads them."""

import dataclasses
from typing import Any

from pallas_kernels.paged_attention.plan import KEYS, Plan

KEY_STEPS = (0, 8)  # keys of a tile that a lane has words of, from `group` on
VALUE_STEPS = (0, 1, 8, 9)  # keys of a tile whose values, weights and scales a lane has, from 2 * quad on

LINE = 128  # bytes of the L2 cache that a lane asks for


@dataclasses.dataclass(frozen=True)
class Pools:
    """The pages in global memory; scales are None for pages that hold the elements themselves."""

    k_pages: Any
    v_pages: Any
    k_scales: Any = None
    v_scales: Any = None


def clamp(w: Any, index: Any, limit: int) -> Any:
    last = w.const(limit - 1, "i32")
    return w.select(index < limit, index, last)


class Tiles:
    """The tiles of 16 keys of one warp: every (splits * warps)-th one of the sequence's.

    `length` is the number of stored tokens to read; with a window, from the first that the query at `first_query` sees.
    """

    def __init__(
        self,
        w: Any,
        plan: Plan,
        pools: Pools,
        page_table: Any,
        row: Any,
        kv_head: Any,
        length: Any,
        first_query: Any,
        split: Any,
        next_pools: Pools | None = None,
    ):
        """`next_pools` are another layer's; what is read here is brought into the L2 cache there."""
        self.w, self.plan, self.next_pools = w, plan, next_pools
        self.pools, self.page_table = pools, page_table
        self.kv_head, self.length = kv_head, length
        self.page_table_row = row * plan.pages_per_row
        zero = w.const(0, "i32")
        first = zero
        if plan.window is not None:
            first = w.maximum(zero, first_query - (plan.window - 1)) // KEYS
        # Neighbouring tiles go to different blocks, so that a short sequence is read by many multiprocessors.
        mine = w.warp * plan.splits + split
        self.stride = plan.splits * plan.warps
        self.first = first + mine
        total = (length + (KEYS - 1)) // KEYS
        self.count = w.maximum(zero, total - self.first + (self.stride - 1)) // self.stride
        self.group = w.lane // 4
        self.quad = w.lane % 4

    def first_key(self, i: Any) -> Any:
        return (self.first + i * self.stride) * KEYS

    def page(self, i: Any) -> Any:
        """Page id of this warp's i-th tile, which is garbage past the last one: nothing is read from there.

        Not predicated on the length, so that the reads of both are under way at the same time.
        """
        slot = self.first_key(i) // self.plan.page_size
        return self.w.load_i32(self.page_table, self.page_table_row + slot, slot < self.plan.pages_per_row)

    def bring_near(self, count: int, num_pages: int) -> None:
        """Has the warp's first `count` tiles brought into the L2 cache, from pages and of a length that may be wrong:
        another kernel may still write both. Nothing else comes of it."""
        w, plan = self.w, self.plan
        places = [w.const(i, "i32") for i in range(count)]
        slots = [self.first_key(i) // plan.page_size for i in places]
        pages = [w.peek_i32(self.page_table, self.page_table_row + x, x < plan.pages_per_row) for x in slots]
        for i, page in zip(places, pages, strict=True):
            self.reader(i, w.maximum(w.const(0, "i32"), clamp(w, page, num_pages))).bring()

    def reader(self, i: Any, page: Any) -> "Reader":
        """Reads tile i, whose page has the id `page`."""
        return Reader(self, *self._block(i, page))

    def _block(self, i: Any, page: Any) -> tuple[Any, Any]:
        """Tile i's first row in the pools, and its first key's place relative to the sequence's end."""
        w, plan, key = self.w, self.plan, self.first_key(i)
        block = w.wide(page * plan.kv_heads + self.kv_head) * plan.page_size + w.wide(key % plan.page_size)
        return block, key - self.length


class Reader:
    """Starts the reads of a tile. Values from the sequence's end on read as zero."""

    def __init__(self, tiles: Tiles, block: Any, own: Any):
        """`block` is the tile's first row in the pools, `own` its first key's place relative to the sequence's end."""
        self.tiles, self.block, self.own = tiles, block, own

    def bring(self, pools: Pools | None = None) -> None:
        """Has the tile brought into the L2 cache, or that at its place in other pools."""
        w, row_bytes = self.tiles.w, self.tiles.plan.row_bytes
        pools = pools or self.tiles.pools
        for start in range(0, KEYS * row_bytes, 32 * LINE):
            line = w.lane * LINE + start
            valid = (self.own < 0) & (line < KEYS * row_bytes)
            for pool in (pools.k_pages, pools.v_pages):
                w.prefetch(pool, self.block * row_bytes + w.wide(line), valid)

    def both(self) -> tuple[Any, Any]:
        """Keys and values, zero from the sequence's end on."""
        return self.keys(zero=True), self.values()

    def keys(self, *, zero: bool) -> tuple[Any, Any]:
        """Words of keys [2 halves][chunk], and their scales [4 keys] in the order of the values (none: []).

        From the sequence's end on they are anything but where they are to be zero. Where nothing is in the registers
        yet, ptxas makes branches of the former.
        """
        tiles, plan = self.tiles, self.tiles.plan
        if tiles.next_pools is not None:
            self.bring(tiles.next_pools)
        words = [
            self._words(tiles.pools.k_pages, tiles.group, step, plan.key_chunks, tiles.quad, zero=zero)
            for step in KEY_STEPS
        ]
        return words, self._scales(tiles.pools.k_scales)

    def values(self) -> tuple[Any, Any]:
        """Words of values [4 keys][chunk], and their scales."""
        tiles, plan = self.tiles, self.tiles.plan
        words = [
            self._words(tiles.pools.v_pages, tiles.quad * 2, step, plan.value_chunks, tiles.group, zero=True)
            for step in VALUE_STEPS
        ]
        return words, self._scales(tiles.pools.v_scales)

    def _words(
        self, pages: Any, first: Any, step: int, chunks: list[tuple[int, int]], lane: Any, *, zero: bool
    ) -> list[Any]:
        w, row_bytes = self.tiles.w, self.tiles.plan.row_bytes
        valid = self.own + first < -step
        got = []
        for start, size in chunks:
            # Lanes are `size` bytes apart; chunks of one size share an address.
            offset = self.block * row_bytes + w.wide(first * row_bytes + lane * size)
            got.append(w.load_bytes(pages, offset, size, valid, step * row_bytes + start, zero))
        return got

    def _scales(self, pool: Any) -> list[Any]:
        if pool is None:
            return []
        w, first = self.tiles.w, self.tiles.quad * 2
        offset = self.block + w.wide(first)
        return [w.load_scale(pool, offset, self.own + first < -step, step) for step in VALUE_STEPS]
