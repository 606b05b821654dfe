"""Which tiles of keys and values a warp works through, and how it reads them."""

from typing import Any

from pallas_kernels.paged_attention.plan import KEYS, Plan


class Tiles:
    """The tiles of 16 keys of one warp: every (splits * warps)-th one of the sequence's.

    `length` is the number of stored tokens to read; with a window, from the first that the first query sees.
    """

    def __init__(
        self,
        w: Any,
        plan: Plan,
        k_pages: Any,
        v_pages: Any,
        page_table: Any,
        row: Any,
        kv_head: Any,
        length: Any,
        split: Any,
    ):
        self.w, self.plan = w, plan
        self.k_pages, self.v_pages, self.page_table = k_pages, v_pages, page_table
        self.kv_head, self.length = kv_head, length
        self.page_table_row = row * plan.pages_per_row
        zero = w.const(0, "i32")
        first = zero
        if plan.window is not None:
            first = w.maximum(zero, length - (plan.tokens + plan.window - 1)) // KEYS
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

    def read(self, i: Any, page: Any) -> tuple[Any, Any]:
        """Starts the reads of tile i: words of keys [2 halves][chunk] and values [4 keys][chunk].

        Positions from `length` on read as zero.
        """
        w, plan = self.w, self.plan
        key = self.first_key(i)
        tile = w.wide(page * plan.kv_heads + self.kv_head) * (plan.page_size * plan.head_dim)
        tile = tile + w.wide((key % plan.page_size) * plan.head_dim)
        own = key - self.length

        def words(pages: Any, first: Any, step: int, chunks: list[tuple[int, int]], lane: Any) -> list[Any]:
            valid = own + first < -step
            got = []
            for start, width in chunks:
                # Lanes are 2 * width elements apart; chunks of one width share an address.
                offset = tile + w.wide(first * plan.head_dim + lane * (2 * width))
                got.append(w.load_words(pages, offset, width, valid, step * plan.head_dim + start))
            return got

        keys = [words(self.k_pages, self.group, step, plan.key_chunks, self.quad) for step in (0, 8)]
        values = [words(self.v_pages, self.quad * 2, step, plan.value_chunks, self.group) for step in (0, 1, 8, 9)]
        return keys, values
