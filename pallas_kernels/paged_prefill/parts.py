"""What each block of the prefill kernel works on, and in which order."""

import dataclasses
from typing import Any

from pallas_kernels.paged_prefill.plan import ROWS, PrefillPlan


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory, as the warp's memory methods take them."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    starts: Any
    lengths: Any
    sinks: Any
    out: Any
    lse: Any
    k_scales: Any = None
    v_scales: Any = None


def number_of_parts(w: Any, plan: PrefillPlan, block: Any) -> Any:
    """Parts of a block: one of each round, the last of which may be short."""
    rounds, rest = divmod(plan.parts, plan.launched)
    if rest == 0:
        return w.integer(rounds)
    late = block < rest if rounds % 2 == 0 else w.integer(plan.launched - rest - 1) < block
    return w.select(late, w.integer(rounds + 1), w.integer(rounds))


def part_of(w: Any, plan: PrefillPlan, block: Any, round_: Any) -> Any:
    """Which part comes next.

    Parts are in order of falling work; odd rounds deal them backwards, so that all blocks get about the same.
    """
    backward = w.integer(0) < round_ % 2
    place = w.select(backward, w.integer(plan.launched - 1) - block, block)
    return round_ * plan.launched + place


class Part:
    """128 query rows (token * group + head in the group) of one row and KV head, and the tiles of keys they see."""

    def __init__(self, w: Any, plan: PrefillPlan, a: Arguments, index: Any):
        pairs = plan.batch * plan.kv_heads
        always = w.integer(0) < 1
        # The last query rows see most keys: they go first.
        self.first_row = (w.integer(plan.row_blocks - 1) - index // pairs) * ROWS
        self.row, self.kv_head = index % pairs // plan.kv_heads, index % plan.kv_heads
        self.start = w.load_integer(a.starts, self.row, always)
        self.length = w.load_integer(a.lengths, self.row, always)
        first = self.start + self.first_row // plan.group
        last = self.start + w.minimum((self.first_row + (ROWS - 1)) // plan.group, w.integer(plan.tokens - 1))
        # One tile at least, or there would be no last one.
        last_key = w.maximum(w.minimum(last, self.length - 1), w.integer(0))
        self.last_tile = last_key // plan.keys
        self.first_tile = w.integer(0)
        # Tiles from the first number on, and before the second, hold keys that some of the queries must not see.
        self.masked_from, self.masked_before = w.minimum(first + 1, self.length) // plan.keys, w.integer(0)
        if plan.window is not None:
            first_key = w.maximum(first - (plan.window - 1), w.integer(0))
            self.first_tile = w.minimum(first_key // plan.keys, self.last_tile)
            self.masked_before = w.maximum(last - (plan.window - plan.keys), w.integer(0)) // plan.keys
        self.count = self.last_tile - self.first_tile + 1


def after(w: Any, plan: PrefillPlan, slot: Any, parity: Any) -> tuple[Any, Any]:
    """The stage that follows, and the parity of its phase."""
    last = w.integer(plan.stages - 1) <= slot
    return w.select(last, w.integer(0), slot + 1), w.select(last, w.integer(1) - parity, parity)
