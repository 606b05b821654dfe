"""Few rows with four warps that do not multiply: they ask for the weights, and add up and write what the others leave.

A warp that multiplies waits for its words, multiplies, and puts its sums into shared memory, one strip of results after
the other; it never waits for the block's other warps but where both buffers of sums are full. What else is to be done
would hold it up: a bulk copy takes its issuer a hundred clocks and more, and code that runs for the first time, such as
that of the addition, comes from memory behind the weights.

Each helper serves one team's ring (those of bulk_stream.py), and all of them add. A buffer of sums has two barriers:
all warps have put theirs there, and all helpers have read them.
"""

from typing import Any

from pallas_kernels.int4_matmul.bulk_stream import TEAM, BulkStream
from pallas_kernels.int4_matmul.columns import MOST_TOKENS
from pallas_kernels.int4_matmul.lifted import Lifted
from pallas_kernels.int4_matmul.operands import Tokens
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import HELPERS, Plan
from pallas_kernels.int4_matmul.stream import Places
from pallas_kernels.int4_matmul.strip import (
    Arguments,
    factors_of,
    pieces_of,
    put,
    residual_of,
    result_of,
    totals_of,
    write,
)

BUFFERS = 2
REGISTERS = 112, 32
"""Of a thread that multiplies more than 8 tokens or normalises, and of a helper's: of 640 threads with 96 each."""


class ServedStream(BulkStream):
    """A team's ring, filled by a helper: strip i lies in slot i % slots."""

    def serve(self) -> None:
        """Asks for the first strip, and makes the barriers."""
        w, lane, first = self.w, self.w.lane < 1, self.w.integer(0)
        w.barrier_init(self._full(first), 1, lane)
        w.barriers_ready()
        self._ask(first, first, lane)
        for slot in map(w.integer, range(1, self._slots)):
            w.barrier_init(self._full(slot), 1, lane)
        for slot in map(w.integer, range(self._slots)):
            w.barrier_init(self._empty(slot), TEAM, lane)
        w.barriers_ready()

    def serve_more(self) -> None:
        """Asks for as many strips as there are slots; all warps have asked for x."""
        for strip in map(self.w.integer, range(1, self._slots)):
            self._ask(strip, strip, self.w.lane < 1)

    def refill(self, index: Any, slot: Any, parity: Any) -> None:
        """Asks for the strip that takes the place of strip `index`, when that has been read."""
        w = self.w
        coming = index + self._slots

        def ask() -> None:
            w.barrier_wait(self._empty(slot), parity)
            self._ask(coming, slot, w.lane < 1)

        w.when(coming < self.count, ask)

    def wait(self, slot: Any, parity: Any) -> Places:
        """Waits for a strip."""
        self.w.barrier_wait(self._full(slot), parity)
        return self.places(slot)


class Buffers:
    """The two buffers of sums, which take turns: where their barriers are."""

    def __init__(self, w: Any, plan: Plan):
        self.w, self.plan = w, plan

    def make(self) -> None:
        w = self.w
        for buffer in map(w.integer, range(BUFFERS)):
            w.barrier_init(self.made(buffer), self.plan.schedule.warps, w.lane < 1)
            w.barrier_init(self.added(buffer), HELPERS, w.lane < 1)

    def made(self, buffer: Any) -> Any:
        """All warps have put their sums there."""
        return buffer * 16 + self.plan.sum_barriers_start

    def added(self, buffer: Any) -> Any:
        """All helpers have read them."""
        return buffer * 16 + (self.plan.sum_barriers_start + 8)


def check(plan: Plan) -> None:
    """Raises ValueError for a plan with such warps that they cannot serve."""
    s = plan.schedule
    fits = s.scaled and s.bulk and not s.joined and s.strips == plan.strip_parts
    fits = fits and plan.rows > MOST_TOKENS and plan.token_blocks <= 2
    if s.apart and not (fits and plan.in_rows is None and plan.bits == 4 and s.warps <= HELPERS * TEAM):
        raise ValueError(
            f"warps apart take 3 to 16 rows, codes of 4 bits by bulk copies, and add {plan.strip_parts} strips, "
            f"not {plan.rows} rows under {s}"
        )


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One warp's work, as `mosaic.multiply`."""
    w.when(w.warp < plan.schedule.warps, lambda: product(w, plan, a, slice_, block))
    w.when(w.integer(plan.schedule.warps - 1) < w.warp, lambda: help_out(w, plan, a, slice_, block))


def shifts_registers(plan: Plan) -> bool:
    """Whether warps that multiply need more registers than there would be for each of so many threads."""
    return plan.threads > 512 and (plan.token_blocks > 1 or plan.fusion.norm_eps is not None)


def product(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """A warp that multiplies."""
    assert a.weights.book is None, "codes are their own numbers here"
    unit, one = plan.strip_parts, w.integer(1)
    if shifts_registers(plan):
        w.set_registers(REGISTERS[0], more=True)
    stream, buffers = ServedStream(w, plan, a.weights, slice_, block), Buffers(w, plan)
    x = Lifted(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))
    w.block_barrier()
    x.prepare()

    def turn(index: Any, carry: Any) -> Any:
        slot, parity, buffer, phase = carry
        places = stream.wait(slot, parity)
        pieces = pieces_of(w, plan, places)
        totals = totals_of(w, plan, x, pieces, lambda i: factors_of(w, plan, a, x.code_bias, places, i))
        stream.release(slot)
        place = index % unit if unit > 1 else w.integer(0)
        w.barrier_wait(buffers.added(buffer), one - phase)
        put(w, plan, x, totals, buffer * plan.buffer_bytes + place * plan.strip_bytes)
        w.warp_barrier()
        full = w.integer(unit - 2) < place
        w.arrive_in(buffers.made(buffer), None, (w.lane < 1) & full)
        return (*stream.after(slot, parity), *next_buffer(w, full, buffer, phase))

    zero = w.integer(0)
    w.loop(stream.count, (zero, zero, zero, zero), turn)


def help_out(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One of the warps that do not."""
    unit, zero = plan.strip_parts, w.integer(0)
    if shifts_registers(plan):
        w.set_registers(REGISTERS[1], more=False)
    helper = w.warp - plan.schedule.warps
    stream, buffers = ServedStream(w, plan, a.weights, slice_, block, helper * TEAM), Buffers(w, plan)
    serves = helper < plan.schedule.warps // TEAM
    w.when(helper < 1, buffers.make)
    w.when(serves, stream.serve)
    w.block_barrier()
    w.when(serves, stream.serve_more)

    def turn(index: Any, carry: Any) -> Any:
        slot, parity, buffer, phase = carry
        w.when(serves, lambda: stream.refill(index, slot, parity))
        place = index % unit if unit > 1 else zero
        full = w.integer(unit - 2) < place
        w.when(full, lambda: add(index, buffer, phase))
        return (*stream.after(slot, parity), *next_buffer(w, full, buffer, phase))

    def add(index: Any, buffer: Any, phase: Any) -> None:
        first, waiting = stream.first_strip + (index // unit if unit > 1 else index), []
        place = buffer * plan.buffer_bytes
        for base in range(0, plan.rows * STRIP, 32 * HELPERS):
            base -= 32 * plan.schedule.warps  # a helper's threads come after those
            result = result_of(w, plan, slice_ * plan.rows, first, w.integer(unit), place, base)
            waiting.append((result, residual_of(w, plan, a, result)))
        w.barrier_wait(buffers.made(buffer), phase)
        for result, residual in waiting:
            write(w, plan, a, result, lambda residual=residual: residual)
        w.warp_barrier()
        w.arrive_in(buffers.added(buffer), None, w.lane < 1)

    w.loop(stream.count, (zero, zero, zero, zero), turn)


def next_buffer(w: Any, full: Any, buffer: Any, phase: Any) -> tuple[Any, Any]:
    """The buffer of the next strip, and the phase of its barriers."""
    one, last = w.integer(1), w.integer(BUFFERS - 2) < buffer
    following = w.select(last, w.integer(0), buffer + 1)
    return w.select(full, following, buffer), w.select(full & last, one - phase, phase)
