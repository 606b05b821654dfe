"""Which tiles of keys and values a warp works through, and how it reads them."""

import dataclasses
from typing import Any

from pallas_kernels.paged_attention.plan import KEYS, Plan

VALUE_STEPS = (0, 1, 8, 9)  # keys of a tile whose values, weights and scales a lane has, from 2 * quad on


@dataclasses.dataclass(frozen=True)
class Pools:
    """The pages in global memory; scales are None for pages that hold the elements themselves."""

    k_pages: Any
    v_pages: Any
    k_scales: Any = None
    v_scales: Any = None


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

    def read(self, i: Any, page: Any, late: Any = None) -> tuple[Any, Any, Any, Any]:
        """Starts the reads of tile i: words of keys [2 halves][chunk] and values [4 keys][chunk], and with scales
        those of the keys and values [4 keys], in the order of the values.

        Positions from `length` on read as zero. `late`, a condition that is true, is one more of the values' reads,
        which can then not start before it is known.
        """
        w, plan, pools = self.w, self.plan, self.pools
        key = self.first_key(i)
        block = w.wide(page * plan.kv_heads + self.kv_head) * plan.page_size + w.wide(key % plan.page_size)
        tile = block * plan.row_bytes
        own = key - self.length
        value = self.quad * 2  # this lane's values are this one and those after it in VALUE_STEPS

        def words(
            pages: Any, first: Any, step: int, chunks: list[tuple[int, int]], lane: Any, late: Any = None
        ) -> list[Any]:
            valid = own + first < -step if late is None else (own + first < -step) & late
            got = []
            for start, size in chunks:
                # Lanes are `size` bytes apart; chunks of one size share an address.
                offset = tile + w.wide(first * plan.row_bytes + lane * size)
                got.append(w.load_bytes(pages, offset, size, valid, step * plan.row_bytes + start))
            return got

        def scales(pool: Any) -> list[Any]:
            if pool is None:
                return []
            offset = block + w.wide(value)
            return [w.load_scale(pool, offset, own + value < -step, step) for step in VALUE_STEPS]

        keys = [words(pools.k_pages, self.group, step, plan.key_chunks, self.quad) for step in (0, 8)]
        k_scales = scales(pools.k_scales)
        values = [words(pools.v_pages, value, step, plan.value_chunks, self.group, late) for step in VALUE_STEPS]
        return keys, values, k_scales, scales(pools.v_scales)
