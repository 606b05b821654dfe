"""How the Hopper INT4 kernel's weights travel from global to shared memory, several strips ahead of their use.

Each warp has a ring of slots for itself, which its lanes fill with asynchronous copies of 16 bytes: weights need no
barrier between warps. A slot is the words [tile, 512 bytes], then the scales and the offsets, [segment, 16] each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, Plan


@dataclasses.dataclass(frozen=True)
class Weights:
    """The packed weight's arrays in global memory; offsets and code book may be None."""

    words: Any
    scales: Any
    offsets: Any = None
    book: Any = None

    @classmethod
    def of(cls, weight: Packed, references: Sequence[Any]) -> "Weights":
        """Of references to what `arrays_of` lists."""
        words, scales, *rest = references
        offsets = rest.pop(0) if weight.offsets is not None else None
        return cls(words, scales, offsets, rest.pop(0) if weight.book is not None else None)


def arrays_of(weight: Packed) -> list[jax.Array]:
    """A weight's arrays as a kernel takes them."""
    book = None if weight.book is None else weight.book.astype(jnp.float32)
    return [array for array in (weight.codes, weight.scales, weight.offsets, book) if array is not None]


class Copy(NamedTuple):
    """Sixteen bytes for each lane whose predicate is true (None: all), to byte `place` of a slot.

    They come from byte `offset + constant` of the array, for each further strip `stride` later.
    """

    array: Any
    offset: Any
    stride: int
    place: int
    constant: int
    predicate: Any


class Places(NamedTuple):
    """Where a warp's words, scales and offsets of a strip lie in shared memory."""

    words: Any
    scales: Any
    offsets: Any


def first_and_count(plan: Plan, block: Any) -> tuple[Any, Any]:
    """A block's first strip of results and the number of its strips: the blocks of a slice share them evenly."""
    first = block * plan.result_strips // plan.blocks_per_slice
    count = (block + 1) * plan.result_strips // plan.blocks_per_slice - first
    return first, count * plan.strip_parts if plan.strip_parts > 1 else count


class Stream:
    """The strips of one warp, its inputs from tile `first_tile` on.

    There are `count`, from `first_strip` on; where a result needs two, each is followed by its other half.
    """

    def __init__(self, w: Any, plan: Plan, weights: Weights, slice_: Any, block: Any):
        first_tile = (slice_ * plan.schedule.warps + w.warp) * plan.warp_tiles
        self._begin(w, plan, weights, first_tile, *first_and_count(plan, block), w.warp * plan.ring_bytes)

    def _begin(
        self, w: Any, plan: Plan, weights: Weights, first_tile: Any, first_strip: Any, count: Any, ring: Any
    ) -> None:
        """`ring` is where the warp's slots begin in shared memory."""
        self.w, self.plan, self._ring = w, plan, ring
        self.first_tile, self.first_strip, self.count = first_tile, first_strip, count
        self.spare = self._ring + plan.schedule.depth * plan.slot_bytes
        self._copies = self._copies_of(weights)

    def _copies_of(self, weights: Weights) -> list[Copy]:
        """Those of a strip."""
        plan = self.plan
        copies = self._words(weights.words) + self._rows(weights.scales, plan.scale_bytes, plan.words_bytes)
        return copies + (
            self._rows(weights.offsets, plan.offset_bytes, plan.offsets_start) if plan.offset_bytes else []
        )

    def _words(self, array: Any) -> list[Copy]:
        plan, stride = self.plan, self.plan.column_tiles * self.plan.tile_bytes
        offset = self.first_strip * stride + self.first_tile * plan.tile_bytes + self.w.lane * 16
        copies = []
        for t in range(plan.warp_tiles):
            # What lies past the last input is never copied: any bits are codes, and x is zero there.
            inside = self.first_tile + t < plan.column_tiles if plan.ragged else None
            for place in range(t * plan.tile_bytes, (t + 1) * plan.tile_bytes, PIECE_BYTES):
                copies.append(Copy(array, offset, stride, place, place, inside))
        return copies

    def _rows(self, array: Any, itemsize: int, place: int) -> list[Copy]:
        """Past the last input the last group is read again: its scales are numbers."""
        w, plan, size = self.w, self.plan, STRIP * itemsize
        copies = []
        for base in range(0, plan.segments * size // 16, 32):
            chunk = w.lane + base
            segment, piece = chunk // (size // 16), chunk % (size // 16)
            group = (self.first_tile * COLUMNS + segment * plan.segment) // plan.group_size
            group = w.select(group < plan.groups, group, w.integer(plan.groups - 1))
            offset = (self.first_strip * plan.groups + group) * size + piece * 16
            inside = segment < plan.segments
            copies.append(Copy(array, offset, plan.groups * size, place + base * 16, 0, inside))
        return copies

    def _start(self, index: Any, slot: Any) -> None:
        """Starts the copies of strip `index`, if there is one."""
        self._fetch(self.strip(index), index < self.count, slot)

    def _fetch(self, strip: Any, left: Any, slot: Any) -> None:
        """Starts the copies of the strip that lies so many from the first one on, where `left`."""
        w = self.w
        address = self._ring + slot + w.lane * 16
        for copy in self._copies:
            go = left if copy.predicate is None else left & copy.predicate
            offset = copy.offset + strip * copy.stride
            w.copy_async(address, copy.array, offset, go, to=copy.place, source=copy.constant)
        w.copy_commit()

    def strip(self, index: Any) -> Any:
        """Where strip `index` of this block lies, from its first one on."""
        return index // 2 + index % 2 * self.plan.result_strips if self.plan.strip_parts > 1 else index

    def begin(self) -> None:
        """Asks for nothing: x comes first, since it waits for all weights that were asked for before it."""

    def open(self) -> None:
        """Without a barrier, ptxas would move the loads of x to where it is used, behind all weights."""
        self.w.warp_barrier()

    def fill(self) -> None:
        """Asks for the first strips."""
        for d in range(self.plan.schedule.depth):
            self._start(self.w.integer(d), self.w.integer(d * self.plan.slot_bytes))

    def places(self) -> list[Places]:
        """Where the strips of a block that fetches all at once lie."""
        return [self._places(self.w.integer(i * self.plan.slot_bytes)) for i in range(self.plan.schedule.strips)]

    def spare_is_free(self) -> None:
        """This warp has read what it wrote into the spare slot."""
        self.w.warp_barrier()

    def first(self) -> tuple[Any, ...]:
        """What the loop carries: the slots of the strip and of the one that is asked for next."""
        return self.w.integer(0), self.w.integer(self.plan.schedule.depth * self.plan.slot_bytes)

    def arrived(self, index: Any, carry: Sequence[Any]) -> Places:
        """Asks for a strip that is to come, and waits for strip `index`, the oldest asked for."""
        slot, next_slot = carry
        self._start(index + self.plan.schedule.depth, next_slot)
        self.w.copy_wait(self.plan.schedule.depth)
        self.w.warp_barrier()
        return self._places(slot)

    def _places(self, slot: Any) -> Places:
        base = self._ring + slot
        return Places(base, base + self.plan.words_bytes, base + self.plan.offsets_start)

    def read(self, carry: Sequence[Any]) -> tuple[Any, ...]:
        """This warp has read the strip."""
        slot, next_slot = carry
        return self._after(slot), self._after(next_slot)

    def _after(self, slot: Any) -> Any:
        following = slot + self.plan.slot_bytes
        return self.w.select(following < self.plan.ring_bytes, following, self.w.integer(0))
