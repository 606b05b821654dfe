"""The prefill kernel's fetching warpgroup: rows of queries, keys and values into swizzled shared memory."""

from typing import Any

from pallas_kernels.paged_prefill.parts import Arguments, Part, after
from pallas_kernels.paged_prefill.plan import CONSUMER_WARPS, ROWS, PrefillPlan


class Fetch:
    """One thread's share of every copy: one 16-byte piece of every `rows_at_once`-th row.

    A swizzle of 128 bytes puts piece c of row r at place c ^ (r % 8), one of 64 bytes at c ^ (r // 2 % 4), one of 32
    at c ^ (r // 4 % 2): the addresses' bits 7 to 9 are added to bits 4 to 6.
    """

    def __init__(self, w: Any, plan: PrefillPlan):
        self.w, self.plan = w, plan
        thread = w.thread - 32 * CONSUMER_WARPS
        self.row, self.chunk = thread // plan.row_lanes, thread % plan.row_lanes
        self.inside = None if plan.row_lanes == plan.row_chunks else self.chunk < plan.row_chunks
        self.slab_chunks = plan.swizzle // 16

    def place(self, row: Any, slab_rows: int) -> Any:
        """Where this thread's piece of that row goes, in a matrix [slab][slab_rows][swizzle]."""
        line = row * self.plan.swizzle
        piece = self.w.either(self.chunk % self.slab_chunks, line // 128 % self.slab_chunks)
        return self.chunk // self.slab_chunks * (slab_rows * self.plan.swizzle) + line + piece * 16

    def places(self, base: Any) -> list[Any]:
        """Where this thread's first rows of a tile go: rows a multiple of 8 apart have the same place in theirs."""
        step, keys = self.plan.rows_at_once, self.plan.keys
        return [base + self.place(self.row + kind * step, keys) for kind in range(max(1, 8 // step))]

    def queries(self, a: Arguments, part: Part) -> None:
        w, plan = self.w, self.plan
        for first in range(0, ROWS, plan.rows_at_once):
            row = part.first_row + self.row + first
            token, head = row // plan.group, row % plan.group
            chunk = ((part.row * plan.tokens + token) * plan.q_heads + part.kv_head * plan.group + head) * (
                plan.row_chunks
            )
            to = first // 64 * plan.query_bytes
            address = self.place(self.row + first % 64, 64)
            w.copy_chunk(address, to, a.q, chunk + self.chunk, 0, token < plan.tokens, self.inside)

    def pages(self, a: Arguments, part: Part, tile: Any) -> Any:
        """The page ids of a tile, one a lane."""
        w, plan = self.w, self.plan
        slot = tile * plan.tile_pages + w.lane
        mine = (w.lane < plan.tile_pages) & (slot < plan.pages_per_row)
        return w.load_integer(a.page_table, part.row * plan.pages_per_row + slot, mine)

    def tile(self, pool: Any, part: Part, tile: Any, pages: Any, base: Any) -> None:
        """One tile of keys or values; zeros from the row's length on: 0 * NaN would be NaN."""
        w, plan = self.w, self.plan
        addresses = self.places(base)
        left = part.length - tile * plan.keys - self.row
        for page in range(plan.tile_pages):
            head = w.broadcast(pages, page) * plan.kv_heads + part.kv_head
            chunk = (head * plan.page_size + self.row) * plan.row_chunks + self.chunk
            for step in range(plan.page_size // plan.rows_at_once):
                first = step * plan.rows_at_once
                key = page * plan.page_size + first
                kind = step % len(addresses)
                to = (key - kind * plan.rows_at_once) * plan.swizzle
                skip = first * plan.row_chunks * 16
                stored = w.integer(key) < left
                w.copy_chunk(addresses[kind], to, pool, chunk, skip, stored, self.inside)


def fetch_part(w: Any, plan: PrefillPlan, a: Arguments, part: Part, carry: Any) -> Any:
    """All copies of one part. `carry`: stage, parity of its phase, the stage before (-1: none), the queries' parity.

    A tile is reported when the next of its kind has been started: then this thread can wait for its copies, and put
    the fence behind them that products of what copies wrote need, without a copy less under way.
    """
    slot, parity, before, query_parity = carry
    fetch, barriers = Fetch(w, plan), plan.barriers
    pages = fetch.pages(a, part, part.last_tile)
    w.barrier_wait(w.integer(barriers["queries_empty"]), query_parity)
    fetch.queries(a, part)
    w.arrive_when_copied(w.integer(barriers["queries_full"]))

    def step(i: Any, carry: Any) -> Any:
        slot, parity, before, pages = carry
        tile = part.last_tile - i
        # Read one tile ahead; behind the first tile anything will do.
        following = fetch.pages(a, part, w.maximum(tile - 1, w.integer(0)))
        for pool, kind, start in ((a.k_pages, "keys", plan.keys_start), (a.v_pages, "values", plan.values_start)):
            w.barrier_wait(slot * 8 + barriers[f"{kind}_empty"], parity)
            fetch.tile(pool, part, tile, pages, slot * plan.tile_bytes + start)
            w.copy_commit()
            report(w, plan, kind, before, pending=2)
        return *after(w, plan, slot, parity), slot, following

    slot, parity, before, _ = w.loop(part.count, (slot, parity, before, pages), step)
    if not plan.queries_in_registers:
        # The queries are given back when the last tile is in use: it must be reported before they are waited for.
        report_last(w, plan, before)
        before = w.integer(-1)
    return slot, parity, before, w.integer(1) - query_parity


def report_last(w: Any, plan: PrefillPlan, stage: Any) -> None:
    report(w, plan, "keys", stage, pending=1)
    report(w, plan, "values", stage, pending=0)


def report(w: Any, plan: PrefillPlan, kind: str, stage: Any, pending: int) -> None:
    """Waits for all copies but those of the newest `pending` tiles, and reports a tile, unless its stage is -1."""
    w.copy_wait(pending)
    w.copies_to_products()
    w.arrive_in(stage * 8 + plan.barriers[f"{kind}_full"], None, w.integer(-1) < stage)
