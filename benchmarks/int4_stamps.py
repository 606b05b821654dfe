"""Where the time of the INT4 product of few rows goes, by bulk copies of weights: clocks that the kernel writes.

Results take the first half of the array that is otherwise all theirs, in bfloat16; stamps the second. So results are
checked too, and written as ever (slices of the inputs in half of their bytes).
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from benchmarks.clocks import read_register
from pallas_kernels.int4_matmul import apart, lifted, mosaic, strip
from pallas_kernels.int4_matmul.cluster_warp import ClusterWarp
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Plan, Schedule
from pallas_kernels.int4_matmul.warp import Value
from pallas_kernels.paged_attention.warp import Words

HEAD = 3
"""Words before a warp's stamps: its multiprocessor, and nanoseconds at its start and end."""


@dataclasses.dataclass(frozen=True)
class Events:
    """A warp's stamps before the loop, and those of each turn; one at its end follows."""

    before: tuple[str, ...]
    turn: tuple[str, ...]

    def words(self, plan: Plan) -> int:
        return HEAD + len(self.before) + plan.most_strips * len(self.turn) + 1


X = ("warps start", "x asked for", "x there", "x summed")
WHOLE = Events(X, ("weights there", "sums there", "results written"))
"""Of a warp that does everything; without an addition in a turn its sums are not stamped."""
MULTIPLY = Events(X, ("weights there", "weights read", "room for sums", "sums there"))
HELP = Events(
    ("warps start", "first strip asked for", "all asked for"), ("next asked for", "all sums", "results written")
)
"""Of warps apart: of one that multiplies and one that helps."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where stamps are, in words: of a block's first and last warp that multiplies, and of its first helper."""

    plan: Plan

    @property
    def events(self) -> tuple[Events, ...]:
        return (MULTIPLY, MULTIPLY, HELP) if self.plan.schedule.apart else (WHOLE, WHOLE)

    @property
    def starts(self) -> list[int]:
        """Where each of these warps' words begin, and where those of a block end."""
        return [0, *itertools.accumulate(events.words(self.plan) for events in self.events)]

    @property
    def block(self) -> int:
        return self.starts[-1]

    @property
    def start(self) -> int:
        """The half of the result."""
        return self.plan.partials * self.plan.all_rows * self.plan.results // 2

    @property
    def blocks(self) -> int:
        return self.plan.slices * self.plan.blocks_per_slice


class StampedWarp(ClusterWarp, abc.ABC):
    """Reads clocks where a warp waits.

    Stamp i is in lane i % 32 of register i // 32 until the warp has done its work: a fence would wait for memory.
    """

    _plan: Plan
    _events: Events
    _is_stamped: Value
    _start: Value
    _first: Value | None
    _last: Value
    _names: tuple[str, ...]
    _kept: list[Value]
    _waits: int
    _barriers: int

    @classmethod
    def of(cls, w: ClusterWarp, plan: Plan) -> Any:
        stamped: StampedWarp = cls.__new__(cls)
        vars(stamped).update(vars(w))
        stamped._plan, stamped._waits, stamped._barriers = plan, 0, 0
        stamped._begin(Places(plan))
        stamped._names, stamped._first = stamped._events.before, w.integer(HEAD)
        stamped._kept = [w.integer(0)] * -(-stamped._events.words(plan) // 32)
        for i, register in enumerate(("%smid", "%globaltimer_lo")):
            stamped._keep(w.integer(i), read_register(register))
        stamped._stamp("warps start")
        return stamped

    @abc.abstractmethod
    def _begin(self, places: Places) -> None:
        """Sets what is stamped, whether this warp is, and where its words are among the block's."""

    def hand_over(self, out: Any, block: Value) -> None:
        """Writes this warp's stamps."""
        self._keep(self.integer(2), read_register("%globaltimer_lo"))
        self._keep(self._last, read_register("%clock"))
        places, words = Places(self._plan), self._events.words(self._plan)
        for first, kept in zip(range(0, words, 32), self._kept, strict=True):
            place = self._start + self.lane + (block * places.block + (places.start + first))
            inside = self._is_stamped & (self.lane + first < words)
            self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", self._pointer(out, place, 4), kept.ir, inside.ir)

    def _is(self, warp: int) -> Value:
        return (self.integer(warp - 1) < self.warp) & (self.warp < warp + 1)

    def _keep(self, place: Value, word: Value) -> None:
        for i, kept in enumerate(self._kept):
            here = arith.cmpi(arith.CmpIPredicate.eq, (self.lane + 32 * i).ir, place.ir)
            self._kept[i] = self.select(Value(here), word, kept)

    def _stamp(self, name: str, behind: Sequence[Value] = ()) -> None:
        """Keeps the clock for an event of these; behind the loop there are none."""
        if self._first is not None:
            self._keep(self._first + self._names.index(name), read_register("%clock", behind))

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """What is kept inside stays."""
        before = list(self._kept)
        branch = scf.IfOp(condition.ir, [value.ir.type for value in before], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            body()
            scf.YieldOp([value.ir for value in self._kept])
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.else_block):
            scf.YieldOp([value.ir for value in before])
        self._kept = [Value(value) for value in branch.results]

    def loop(self, count: Value, carry: Sequence[Value], body: Callable[..., Any]) -> Words:
        assert self._first is not None
        first, own, events = self._first + len(self._events.before), len(carry), self._events.turn
        self._names = events

        def turn(index: Value, inner: Words) -> Sequence[Value]:
            self._first, self._kept = first + index * len(events), list(inner[own:])
            self._waits, self._barriers = 0, 0
            following = body(index, inner[:own])
            self._end_turn()
            return [*following, *self._kept]

        result = super().loop(count, [*carry, *self._kept], turn)
        self._kept, self._first, self._last = list(result[own:]), None, first + count * len(events)
        return result[:own]

    def _end_turn(self) -> None:
        pass


class WithX(StampedWarp):
    """The first or the last of those that multiply."""

    _x: list[Value]
    _sums_of_x: list[Value]

    def _begin(self, places: Places) -> None:
        last = self._is(self._plan.schedule.warps - 1)
        self._events, self._x, self._sums_of_x = places.events[0], [], []
        self._is_stamped = self.select(last, last, self._is(0))
        self._start = self.select(last, self.integer(places.starts[1]), self.integer(0))

    def block_barrier(self) -> None:
        self._stamp("x asked for" if "x asked for" in self._names else "sums there")
        super().block_barrier()

    def multiply_pairs(self, a: Value, b: Value) -> Value:
        """Of x only, and all of it before the first product."""
        word = super().multiply_pairs(a, b)
        self._x.append(word)
        return word

    def mma(self, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str = "bf16") -> Words:
        """The first ones, before the loop, sum up x."""
        if self._x:
            self._stamp("x there", self._x[::2])
            self._x = []
        sums = super().mma(acc, a, b, kind)
        self._sums_of_x.append(sums[0])
        return sums

    def loop(self, count: Value, carry: Sequence[Value], body: Callable[..., Any]) -> Words:
        """Of x's products the last of each chain has to be waited for."""
        chain = lifted.CHAIN * self._plan.token_blocks
        self._stamp("x summed", self._sums_of_x[chain - 1 :: chain])
        return super().loop(count, carry, body)


class WholeWarp(WithX):
    """One that also asks for weights and adds."""

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        """A turn's first wait is for a slot of the ring, in a branch, the second one for weights."""
        super().barrier_wait(barrier, parity)
        self._waits += 1
        if self._waits == 2:
            self._stamp("weights there")

    def _end_turn(self) -> None:
        self._stamp("results written")


class MultiplyingWarp(WithX):
    """One of warps apart."""

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        super().barrier_wait(barrier, parity)
        self._waits += 1
        self._stamp("weights there" if self._waits == 1 else "room for sums")

    def warp_barrier(self) -> None:
        super().warp_barrier()
        self._barriers += 1
        self._stamp("weights read" if self._barriers == 1 else "sums there")


class HelpingWarp(StampedWarp):
    """The first of those that do not multiply."""

    def _begin(self, places: Places) -> None:
        self._events, self._is_stamped = HELP, self._is(self._plan.schedule.warps)
        self._start = self.integer(places.starts[2])

    def block_barrier(self) -> None:
        self._stamp("first strip asked for")
        super().block_barrier()

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        """A turn's first wait is for a slot of the ring, the second one for sums."""
        self._waits += 1
        if self._waits == 2:
            self._stamp("next asked for")
        super().barrier_wait(barrier, parity)
        if self._waits == 2:
            self._stamp("all sums")

    def warp_barrier(self) -> None:
        super().warp_barrier()
        self._stamp("results written")

    def loop(self, count: Value, carry: Sequence[Value], body: Callable[..., Any]) -> Words:
        self._stamp("all asked for")
        return super().loop(count, carry, body)


def product(w: ClusterWarp, plan: Plan, a: strip.Arguments, slice_: Value, block: Value) -> None:
    """One warp's work, as `mosaic.multiply` or `apart.multiply`."""
    in_half, warps = dataclasses.replace(a, out_dtype="bfloat16"), plan.schedule.warps

    def work(kind: type[StampedWarp], program: Any) -> None:
        stamped = kind.of(w, plan)
        program(stamped, plan, in_half, slice_, block)
        stamped.hand_over(a.out, slice_ * plan.blocks_per_slice + block)

    if not plan.schedule.apart:
        return work(WholeWarp, mosaic.multiply)
    w.when(w.warp < warps, functools.partial(work, MultiplyingWarp, apart.product))
    w.when(w.integer(warps - 1) < w.warp, functools.partial(work, HelpingWarp, apart.help_out))


def products(x: jax.Array, weights: Sequence[Packed], schedule: Schedule) -> list[jax.Array]:
    """The product with every weight in turn: results and stamps."""
    places = Places(Plan.of(x.shape[0], weights[0], schedule))
    if places.blocks * places.block > places.start:
        raise ValueError(f"{places.block} stamps of {places.blocks} blocks do not fit into {places.start} words")
    dtype = jnp.dtype(jnp.float32)
    return [mosaic.partial_sums(x, w, schedule=schedule, out_dtype=dtype, program=product) for w in weights]


def results_of(plan: Plan, out: np.ndarray) -> np.ndarray:
    """float32 [rows, results]."""
    numbers = np.asarray(out).reshape(-1).view(jnp.bfloat16)[: out.size].astype(np.float32)
    return numbers.reshape(out.shape).sum(0)
