"""The fetching warpgroup where pages hold codes: read into registers, made bfloat16, written as matrices.

A thread has the same pieces as in `fetch.py`, eight elements of a row: two words of 8-bit codes; of int4 codes the
lower or the upper halves of two words. Loads are ahead by one unit, half a tile of keys or of values or so. A lane
has the scale of one of its warp's rows of a tile.

As float32, 2^15 + n has the byte n in bits 8 to 15. So a byte is a number with one permutation, and code * scale with
one multiplication and addition more, exact but for the rounding of 2^15 * scale: a thousandth of a code.
"""

import dataclasses
from typing import Any

from pallas_kernels.paged_prefill.fetch import Fetch
from pallas_kernels.paged_prefill.parts import Arguments, Part, after
from pallas_kernels.paged_prefill.plan import PrefillPlan

ROWS_AHEAD = 8
"""Rows of a thread in a unit: two registers each."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Some of a thread's rows of a tile of keys or values: the first is row `first` of the thread's."""

    kind: str
    first: int
    last: bool


def units_of(plan: PrefillPlan) -> list[Unit]:
    rows = plan.keys // plan.rows_at_once
    return [
        Unit(kind, first, first + ROWS_AHEAD >= rows)
        for kind in ("keys", "values")
        for first in range(0, rows, ROWS_AHEAD)
    ]


class FetchCodes(Fetch):
    def __init__(self, w: Any, plan: PrefillPlan, a: Arguments, part: Part):
        super().__init__(w, plan)
        self.part = part
        self.pools = {"keys": (a.k_pages, a.k_scales), "values": (a.v_pages, a.v_scales)}
        # In units of two bytes.
        self.width = plan.head_dim // (4 if plan.kv == "int4" else 2)
        self.piece, self.shift = self.chunk * 4, w.integer(0)
        if plan.kv == "int4":
            half = plan.row_chunks // 2
            self.piece = self.chunk % half * 4
            self.shift = w.select(self.chunk < half, w.integer(0), w.integer(4))

    def rows(self, unit: Unit) -> range:
        step = self.plan.rows_at_once
        return range(unit.first * step, min(self.plan.keys, (unit.first + ROWS_AHEAD) * step), step)

    def load(self, unit: Unit, tile: Any, pages: Any) -> list[Any]:
        """Two words of each row; zeros from the row's length on."""
        w, plan, part = self.w, self.plan, self.part
        codes, _ = self.pools[unit.kind]
        left = part.length - tile * plan.keys - self.row
        loaded = []
        for key in self.rows(unit):
            page = w.broadcast(pages, key // plan.page_size)
            row = (page * plan.kv_heads + part.kv_head) * plan.page_size + self.row
            inside = w.integer(key) < left
            if self.inside is not None:
                inside = inside & self.inside
            loaded += w.load_words(codes, row * self.width + self.piece, 2, inside, key % plan.page_size * self.width)
        return loaded

    def scales(self, tile: Any, pages: Any) -> list[Any]:
        """The scales of a tile's keys and values, those of this warp's rows in the order of its lanes."""
        w, plan, part = self.w, self.plan, self.part
        at_once = plan.rows_at_once // 4  # rows of a warp
        row = w.warp % 4 * at_once + w.lane % at_once
        key = w.lane // at_once * plan.rows_at_once + row
        page = w.pick(pages, key // plan.page_size % 32)
        place = (page * plan.kv_heads + part.kv_head) * plan.page_size + key % plan.page_size
        inside = (key < plan.keys) & (key < part.length - tile * plan.keys)
        return [w.load_integer(self.pools[kind][1], place, inside) for kind in ("keys", "values")]

    def store(self, unit: Unit, loaded: list[Any], scales: Any, base: Any) -> None:
        w, step = self.w, self.plan.rows_at_once
        addresses = self.places(base)
        for index, key in enumerate(self.rows(unit)):
            scale = w.as_float(w.pick(scales, w.lane // self.plan.row_lanes + key // step * (step // 4)))
            words = [word for codes in loaded[2 * index : 2 * index + 2] for word in self.numbers(codes, scale)]
            kind = key // step % len(addresses)
            w.store_shared(addresses[kind], (key - kind * step) * self.plan.swizzle, words, self.inside)

    def numbers(self, codes: Any, scale: Any) -> list[Any]:
        """Four codes times their scale, as two words of bfloat16."""
        w, plan = self.w, self.plan
        if plan.kv == "float8_e4m3fn":
            halves = [w.half_number(word, half) for word in w.e4m3_to_f16(codes) for half in range(2)]
            numbers = [half * scale for half in halves]
        else:
            if plan.kv == "int8":
                zero, codes = 128, w.either(codes, w.integer(-0x7F7F7F80))  # code + 128
            else:
                zero, codes = 8, w.shift_right(codes, self.shift) & 0x0F0F0F0F
            lowest = scale * float(-(2**15 + zero))
            bytes_ = [w.as_float(w.permute(codes, 0x47000000, 0x7404 | byte << 4)) for byte in range(4)]
            numbers = [w.fma(number, scale, lowest) for number in bytes_]
        return [w.pack(numbers[i], numbers[i + 1], "bfloat16") for i in (0, 2)]


def fetch_part(w: Any, plan: PrefillPlan, a: Arguments, part: Part, carry: Any) -> Any:
    """As `fetch.fetch_part`; what is written is reported at once."""
    slot, parity, before, query_parity = carry
    fetch, barriers, units = FetchCodes(w, plan, a, part), plan.barriers, units_of(plan)
    pages = fetch.pages(a, part, part.last_tile)
    w.barrier_wait(w.integer(barriers["queries_empty"]), query_parity)
    fetch.queries(a, part)
    w.arrive_when_copied(w.integer(barriers["queries_full"]))
    starts = {"keys": plan.keys_start, "values": plan.values_start}

    def step(i: Any, carry: Any) -> Any:
        slot, parity, pages, *rest = carry
        scales, loaded = {"keys": rest[0], "values": rest[1]}, rest[2:]
        tile = part.last_tile - i
        following = w.maximum(tile - 1, w.integer(0))  # behind the first tile anything will do
        following_pages = fetch.pages(a, part, following)
        following_scales: list[Any] = []
        for index, unit in enumerate(units):
            if index + 1 < len(units):
                ahead = fetch.load(units[index + 1], tile, pages)
            else:
                ahead = fetch.load(units[0], following, following_pages)
                following_scales = fetch.scales(following, following_pages)
            if unit.first == 0:
                w.barrier_wait(slot * 8 + barriers[f"{unit.kind}_empty"], parity)
            fetch.store(unit, loaded, scales[unit.kind], slot * plan.tile_bytes + starts[unit.kind])
            if unit.last:
                w.copies_to_products()
                w.arrive_in(slot * 8 + barriers[f"{unit.kind}_full"], None, w.integer(0) < 1)
            loaded = ahead
        return *after(w, plan, slot, parity), following_pages, *following_scales, *loaded

    first = [*fetch.scales(part.last_tile, pages), *fetch.load(units[0], part.last_tile, pages)]
    slot, parity, *_ = w.loop(part.count, (slot, parity, pages, *first), step)
    return slot, parity, before, w.integer(1) - query_parity
