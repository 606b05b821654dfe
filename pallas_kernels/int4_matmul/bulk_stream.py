"""The weights' way from global to shared memory by bulk copies: `Stream` for matrices that the blocks divide evenly.

Four neighbouring warps are a team, whose words, scales and offsets of a strip are contiguous each: three copies that
one thread starts and no thread carries out. A team has a ring of slots, each with a barrier that says it is full and
one that says all four warps have read it.

What is asked for first delays what is asked for later. So the first strip is asked for before x, which is needed with
it, and the others one after the other behind x.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.stream import Places, Weights, first_and_count

TEAM = 4


class BulkStream:
    """The strips of a warp's team. Strip i lies in slot i + 1 of the ring; slot 0 is spare until the first turn."""

    def __init__(self, w: Any, plan: Plan, weights: Weights, slice_: Any, block: Any, warp: Any = None):
        """`warp`: the one whose strips they are, by default this one."""
        self.w, self.plan = w, plan
        self.first_strip, self.count = first_and_count(plan, block)
        warp = w.warp if warp is None else warp
        self.first_tile = (slice_ * plan.schedule.warps + warp) * plan.warp_tiles
        team, self._member = warp // TEAM, warp % TEAM
        self._slots = plan.slots
        self._ring = team * (TEAM * plan.ring_bytes)
        self._barriers = team * (2 * 8 * self._slots) + plan.barriers_start
        self._leader = self._member < 1
        self._thread = self._leader & (w.lane < 1)
        self.spare = self._ring + self._member * plan.slot_bytes
        first_tile = (slice_ * plan.schedule.warps + team * TEAM) * plan.warp_tiles
        first_group = first_tile * COLUMNS // plan.group_size
        stride = plan.column_tiles * plan.tile_bytes
        self._copies = [(weights.words, first_tile * plan.tile_bytes, stride, plan.words_bytes)]
        for array, itemsize in ((weights.scales, plan.scale_bytes), (weights.offsets, plan.offset_bytes)):
            if itemsize:
                size = STRIP * itemsize
                self._copies.append((array, first_group * size, plan.groups * size, plan.segments * size))

    def begin(self) -> None:
        """Asks for the first strip, before anything else is; another warp makes the other strips' barriers."""
        w = self.w
        one, lane = w.integer(1), w.lane < 1

        def ask() -> None:
            w.barrier_init(self._full(one), 1, lane)
            w.barriers_ready()
            self._ask(w.integer(0), one, lane)

        def make() -> None:
            for slot in range(self._slots):
                if slot != 1:
                    w.barrier_init(self._full(w.integer(slot)), 1, lane)
                w.barrier_init(self._empty(w.integer(slot)), TEAM, lane)
            w.barriers_ready()
            w.arrive_in(self._full(w.integer(0)), None, lane)  # nothing comes into the spare slot yet

        w.when(self._leader, ask)
        w.when(self._is_member(2), make)

    def open(self) -> None:
        """All warps of the block come here, and find the barriers made."""
        self.w.block_barrier()

    def fill(self) -> None:
        """Asks for the other strips that are to be under way, in order."""
        w = self.w

        def rest() -> None:
            for strip in range(1, self.plan.schedule.depth):
                self._ask(w.integer(strip), w.integer(strip + 1), w.lane < 1)

        # Another warp than the leader, whose x comes later already.
        w.when(self._is_member(1), rest)

    def spare_is_free(self) -> None:
        """This warp has read what it wrote into its part of the spare slot."""
        self.w.barriers_ready()  # bulk copies come after those writes
        self.release(self.w.integer(0))

    def first(self) -> tuple[Any, ...]:
        """What the loop carries: slot and parity of the strip, and of that two strips before."""
        w = self.w
        one = w.integer(1)
        return one, w.integer(0), w.integer(self._slots - 1), one

    def arrived(self, index: Any, carry: Sequence[Any]) -> Places:
        """Asks for a strip that is to come, and waits for strip `index`."""
        w = self.w
        slot, parity, free_slot, free_parity = carry
        coming = index + (self.plan.schedule.depth - 1)

        def refill() -> None:
            w.barrier_wait(self._empty(free_slot), free_parity)
            self._ask(coming, free_slot, self._thread)

        w.when(self._leader & (w.integer(0) < index) & (coming < self.count), refill)
        w.barrier_wait(self._full(slot), parity)
        return self.places(slot)

    def places(self, slot: Any) -> Places:
        """Where this warp's part of the strip in a slot lies."""
        plan = self.plan
        base = self._ring + slot * (TEAM * plan.slot_bytes)
        return Places(
            base + self._member * plan.words_bytes,
            base + self._member * plan.scales_bytes + TEAM * plan.words_bytes,
            base + self._member * (plan.slot_bytes - plan.offsets_start) + TEAM * plan.offsets_start,
        )

    def read(self, carry: Sequence[Any]) -> tuple[Any, ...]:
        """This warp has read its part of the strip."""
        slot, parity, free_slot, free_parity = carry
        self.release(slot)
        return (*self.after(slot, parity), *self.after(free_slot, free_parity))

    def after(self, slot: Any, parity: Any) -> tuple[Any, Any]:
        """The next slot, and the parity of its barriers."""
        w = self.w
        around = w.integer(self._slots - 1) <= slot
        return w.select(around, w.integer(0), slot + 1), w.select(around, w.integer(1) - parity, parity)

    def _is_member(self, member: int) -> Any:
        return (self.w.integer(member - 1) < self._member) & (self._member < member + 1)

    def _full(self, slot: Any) -> Any:
        return self._barriers + slot * 16

    def _empty(self, slot: Any) -> Any:
        return self._barriers + slot * 16 + 8

    def release(self, slot: Any) -> None:
        """This warp has read its part of what the slot holds."""
        self.w.warp_barrier()
        self.w.arrive_in(self._empty(slot), None, self.w.lane < 1)

    def _ask(self, index: Any, slot: Any, thread: Any) -> None:
        """Asks for strip `index`, if there is one; one thread of the team does it."""
        w, plan = self.w, self.plan
        go, full = thread & (index < self.count), self._full(slot)
        strip = index
        if plan.strip_parts > 1:
            strip = index // 2 + index % 2 * plan.result_strips
        strip = self.first_strip + strip
        w.expect_bytes(full, TEAM * plan.slot_bytes, go)
        place = self._ring + slot * (TEAM * plan.slot_bytes)
        for array, offset, stride, nbytes in self._copies:
            w.copy_once(place, array, offset + strip * stride, TEAM * nbytes, full, go)
            place = place + TEAM * nbytes
