"""Which tiles of keys and values a warp works through, and how it reads them."""

import dataclasses
from collections.abc import Callable
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
    ):
        self.w, self.plan = w, plan
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

    def start(self, pages: list[Any]) -> list[Any]:
        """Starts the reads of the first `depth` tiles; returns their words, where these are kept in registers."""
        places = range(self.plan.depth)
        if not self.plan.staged:
            return [self.read(j, pages[j]) for j in places]
        for j in places:
            self.copy(j, pages[j], self.w.const(j, "i32"))
        return []

    def bring_near(self, count: int, num_pages: int) -> None:
        """Has the warp's first `count` tiles brought into the L2 cache, from pages and of a length that may be wrong:
        another kernel may still write both. Nothing else comes of it."""
        w, plan = self.w, self.plan
        places = [w.const(i, "i32") for i in range(count)]
        slots = [self.first_key(i) // plan.page_size for i in places]
        pages = [w.peek_i32(self.page_table, self.page_table_row + x, x < plan.pages_per_row) for x in slots]
        for i, page in zip(places, pages, strict=True):
            block, own = self._block(i, w.maximum(w.const(0, "i32"), clamp(w, page, num_pages)))
            for start in range(0, KEYS * plan.row_bytes, 32 * LINE):
                line = w.lane * LINE + start
                valid = (own < 0) & (line < KEYS * plan.row_bytes)
                for pool in (self.pools.k_pages, self.pools.v_pages):
                    w.prefetch(pool, block * plan.row_bytes + w.wide(line), valid)

    def read(self, i: Any, page: Any) -> tuple[Any, Any, Any, Any]:
        """Starts the reads of tile i: words of keys [2 halves][chunk] and values [4 keys][chunk], and with scales
        those of the keys and values [4 keys], in the order of the values.

        Positions from `length` on read as zero.
        """
        w, pools = self.w, self.pools
        block, own = self._block(i, page)
        value = self.quad * 2  # this lane's values are this one and those after it in VALUE_STEPS

        def scales(pool: Any) -> list[Any]:
            if pool is None:
                return []
            offset = block + w.wide(value)
            return [w.load_scale(pool, offset, own + value < -step, step) for step in VALUE_STEPS]

        def words(pages: Any, offset: Any, size: int, valid: Any, constant: int) -> Any:
            return w.load_bytes(pages, offset, size, valid, constant)

        keys, values = self._each_chunk(block, own, words)
        return keys, values, scales(pools.k_scales), scales(pools.v_scales)

    def copy(self, i: Any, page: Any, place: Any) -> None:
        """Starts copies of what `read` reads to the warp's `place` in shared memory: to each lane its own words."""
        w, at = self.w, 0

        def words(pages: Any, offset: Any, size: int, valid: Any, constant: int) -> None:
            nonlocal at
            w.copy_bytes(self._staged(place, at, size), pages, offset, size, valid, constant)
            at += 32 * size

        self._each_chunk(*self._block(i, page), words)
        w.commit_copies()

    def take(self, place: Any) -> tuple[Any, Any, Any, Any]:
        """The words of the tile at `place`, in the form of `read`. Its copies must have come."""
        w, plan, at = self.w, self.plan, 0

        def words(size: int) -> Any:
            nonlocal at
            got = w.shared_load(self._staged(place, at, size), size // 4, "i32")
            at += 32 * size
            return got

        keys = [[words(size) for _, size in plan.key_chunks] for _ in KEY_STEPS]
        values = [[words(size) for _, size in plan.value_chunks] for _ in VALUE_STEPS]
        return keys, values, [], []

    def _staged(self, place: Any, at: int, size: int) -> Any:
        w, plan = self.w, self.plan
        return w.warp * plan.warp_bytes + place * plan.tile_bytes + w.lane * size + (plan.warps_start + at)

    def _block(self, i: Any, page: Any) -> tuple[Any, Any]:
        """Tile i's first row in the pools, and its first key's place relative to the sequence's end."""
        w, plan, key = self.w, self.plan, self.first_key(i)
        block = w.wide(page * plan.kv_heads + self.kv_head) * plan.page_size + w.wide(key % plan.page_size)
        return block, key - self.length

    def _each_chunk(self, block: Any, own: Any, words: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        """words(pages, offset, size, valid, constant) of each chunk of this lane's keys and values."""
        w, plan = self.w, self.plan
        tile = block * plan.row_bytes

        def of_row(pages: Any, first: Any, step: int, chunks: list[tuple[int, int]], lane: Any) -> list[Any]:
            # Lanes are `size` bytes apart; chunks of one size share an address.
            return [
                words(
                    pages,
                    tile + w.wide(first * plan.row_bytes + lane * size),
                    size,
                    own + first < -step,
                    step * plan.row_bytes + start,
                )
                for start, size in chunks
            ]

        k_pages, v_pages, value = self.pools.k_pages, self.pools.v_pages, self.quad * 2
        keys = [of_row(k_pages, self.group, step, plan.key_chunks, self.quad) for step in KEY_STEPS]
        return keys, [of_row(v_pages, value, step, plan.value_chunks, self.group) for step in VALUE_STEPS]
