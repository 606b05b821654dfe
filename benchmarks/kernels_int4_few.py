"""Schedules of the INT4 product for few rows side by side, and where the time of one launch goes.

    python -m benchmarks.kernels_int4_few            # every case: all are compiled at once, then timed by CUPTI
    python -m benchmarks.kernels_int4_few --stamps   # clocks written by the kernel itself, in place of its results

Weights are rotated past the L2 cache. TB/s counts the codes only.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.harness import RESULTS, Recorder, run_each
from benchmarks.kernels_int4 import (
    BF16,
    DOWN,
    GATE_UP,
    HALVES,
    NORM,
    NORM_GATE,
    OUT,
    QKV,
    TALL,
    UP,
    WIDE,
    Case,
    inputs,
    read,
    weights_of,
)
from pallas_kernels.int4_matmul import mosaic, strip, tuning
from pallas_kernels.int4_matmul.plan import Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.warp import Value
from pallas_kernels.int4_matmul.wide_warp import WideWarp

PROLOGUE, TURNS, PER_TURN = 9, 7, 6
END_TIME = PROLOGUE + TURNS * PER_TURN
END, START_TIME, STAMPS = END_TIME + 1, END_TIME + 2, END_TIME + 3
"""Places of stamps: the kernel's start and its barriers before the loop; those of each turn (of the seventh and later
ones the last); its end, and its start and end by the card's clock in nanoseconds."""

ONE = dataclasses.replace(WIDE, strips=4)
ASYNCHRONOUS = dataclasses.replace(WIDE, bulk=False)
LONG, HEAD = (12288, 4096), (1024, 151936)
RESIDUAL = Fusion(residual=True)
DIGITS = Schedule(warps=16, parts=2, strips=4, depth=3, digits=True)
"""Version 7."""
APART = Schedule(warps=16, parts=2, strips=1, depth=4, scaled=True, bulk=True, apart=True)
APART_FEW, APART_MANY = (dataclasses.replace(APART, depth=depth) for depth in (2, 3))
APART_TALL = dataclasses.replace(APART, parts=1, depth=6)
MANY = dataclasses.replace(HALVES, strips=2, bulk=True)
CASES = [
    Case(1, *UP, 8.3, dataclasses.replace(ASYNCHRONOUS, strips=4), only="read"),
    Case(1, *UP, 8.6, ONE, only="read"),
    *(Case(m, *UP, us, ONE) for m, us in ((1, 9.4), (2, 9.6))),
    *(Case(m, *UP, us, WIDE) for m, us in ((5, 10.5), (8, 10.7), (16, 15.2))),
    Case(16, *UP, 15.1, MANY),
    Case(1, *DOWN, 9.2, TALL),
    Case(8, *DOWN, 10.1, TALL),
    *(Case(1, *OUT, us, way) for way, us in ((ONE, 4.3), (ASYNCHRONOUS, 4.4))),
    *(Case(8, *OUT, us, way) for way, us in ((ASYNCHRONOUS, 5.5), (WIDE, 5.6))),
    *(Case(8, *QKV, us, way) for way, us in ((WIDE, 7.0), (ASYNCHRONOUS, 7.6), (DIGITS, 7.5))),
    *(Case(m, *GATE_UP, us, ONE, fusion=NORM_GATE) for m, us in ((1, 16.7), (2, 16.4))),
    *(Case(m, *GATE_UP, us, WIDE, fusion=NORM_GATE) for m, us in ((5, 17.7), (8, 18.6))),
    Case(1, *QKV, 5.6, ONE, fusion=NORM),
    *(Case(m, *QKV, us, WIDE, fusion=NORM) for m, us in ((5, 7.0), (8, 7.3))),
    Case(1, *OUT, 4.3, ONE, fusion=RESIDUAL),
    *(Case(5, *OUT, us, way, fusion=RESIDUAL) for way, us in ((ASYNCHRONOUS, 5.3), (WIDE, 5.6))),
    Case(1, *LONG, 8.4, ONE),
    Case(5, *LONG, 9.4, WIDE),
    *(Case(m, *LONG, us, tuning.JOINED[2], fusion=RESIDUAL) for m, us in ((1, 9.0), (5, 9.9), (8, 10.4))),
    *(Case(m, *DOWN, us, tuning.JOINED[7], fusion=RESIDUAL) for m, us in ((1, 10.0), (5, 10.9))),
    Case(8, *UP, 9.97, tuning.HALF),
    *(Case(8, *shape, us, tuning.HALF_FEW) for shape, us in ((OUT, 4.7), (QKV, 5.75))),
    Case(16, *UP, 12.1, tuning.HALF_MANY),
    Case(8, *UP, 10.0, APART),
    *(Case(8, *shape, us, APART_FEW) for shape, us in ((OUT, 4.9), (QKV, 5.9))),
    *(Case(16, *shape, us, APART_MANY) for shape, us in ((UP, 12.9), (OUT, 6.0), (QKV, 7.4))),
    Case(16, *DOWN, 12.5, APART_TALL),
    Case(5, *OUT, 4.7, APART_FEW, fusion=RESIDUAL),
    Case(1, *UP, 10.6, ONE, group=32),
    Case(1, *UP, 9.4, ONE, kind="symmetric"),
    Case(1, *UP, 10.8, ONE, group=32, kind="minimum"),
    Case(1, *HEAD, 21.6),
    Case(1, *QKV, 5.8, ONE, group=64, fusion=NORM),
    Case(1, *OUT, 4.5, ONE, group=64, fusion=RESIDUAL),
    Case(1, *GATE_UP, 17.2, ONE, group=64, fusion=NORM_GATE),
    Case(1, *DOWN, 9.6, TALL, group=64),
    Case(5, *QKV, 7.3, WIDE, group=64, fusion=NORM),
    Case(5, *OUT, 5.5, ASYNCHRONOUS, group=64, fusion=RESIDUAL),
    Case(5, *GATE_UP, 18.6, WIDE, group=64, fusion=NORM_GATE),
    Case(5, *DOWN, 10.2, TALL, group=64),
]
"""What is in use, by its measured or expected time, and what it is to be compared with."""
STAMPED = [
    Case(1, *UP, 0, ONE),
    Case(8, *UP, 0, WIDE),
    Case(8, *OUT, 0, ASYNCHRONOUS),
    Case(16, *UP, 0, MANY),
]


class StampedWarp(WideWarp):
    """Writes clocks where the kernel has its barriers, for the first and the last warp, in place of its results.

    A turn's are: its start, weights there, and where sums are added its sums made, all warps' sums made. With bulk
    copies: its start, room for the next strip (of one warp in four), weights there, weights read, and the same two.
    """

    _out: Any
    _lead: Value
    _base: Value
    _first: Value
    _next: int

    @classmethod
    def of(cls, w: WideWarp, plan: Plan, out: Any, block: Value) -> "StampedWarp":
        stamped = cls.__new__(cls)
        stamped.__dict__.update(w.__dict__)
        last = w.integer(plan.schedule.warps - 2) < w.warp
        first = w.warp < 1
        stamped._out, stamped._lead = out, (w.lane < 1) & w.select(first, first, last)
        stamped._base = block * (2 * STAMPS) + w.select(last, w.integer(STAMPS), w.integer(0))
        stamped._first, stamped._next = w.integer(0), 0
        stamped._put(stamped._base + START_TIME, "%globaltimer_lo")
        stamped._stamp()
        return stamped

    def _put(self, place: Any, register: str) -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], f"mov.u32 $0, {register};", "=r,~{memory}", has_side_effects=True)
        self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", self._pointer(self._out, place, 4), bits, self._lead.ir)

    def _stamp(self) -> None:
        if self._next < 0:
            return
        self._put(self._base + self._first + self._next, "%clock")
        self._next += 1

    def warp_barrier(self) -> None:
        super().warp_barrier()
        self._stamp()

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        super().barrier_wait(barrier, parity)
        self._stamp()

    def block_barrier(self) -> None:
        self._stamp()
        super().block_barrier()
        self._stamp()

    def loop(self, count: Value, carry: Sequence[Value], body: Callable[..., Any]) -> Any:
        if not carry:
            return super().loop(count, carry, body)
        self._stamp()

        def stamped(index: Value, inner: Any) -> Any:
            last = self.integer(TURNS - 1)
            self._first, self._next = self.select(index < last, index, last) * PER_TURN + PROLOGUE, 0
            self._stamp()
            return body(index, inner)

        result = super().loop(count, carry, stamped)
        self._first, self._next = self.integer(END_TIME), -STAMPS  # no stamps behind the loop
        self._put(self._base + END, "%clock")
        self._put(self._base + END_TIME, "%globaltimer_lo")
        return result

    def store_number(self, ref: Any, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


def operands(case: Case) -> tuple[jax.Array, list[Any]]:
    x, *_ = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    return x, weights_of(case.k, case.n, case.group, case.kind)


def compiled(case: Case) -> Any:
    """The product with every weight in turn, traced and lowered."""
    schedule = case.chosen
    _, given, _ = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)

    @jax.jit
    def product(x: jax.Array, w: Any) -> jax.Array:
        if case.only:
            program = functools.partial(read, with_x=case.only == "read x")
            return mosaic.partial_sums(x, w, schedule=schedule, out_dtype=BF16, program=program)
        return mosaic.int4_matmul(x, w, **given, schedule=schedule, out_dtype=BF16, fusion=case.fusion)

    x, weights = operands(case)
    return jax.jit(lambda x, weights: [product(x, w) for w in weights]).lower(x, weights)


def run(recorder: Recorder, case: Case, function: Any) -> None:
    weights = weights_of(case.k, case.n, case.group, case.kind)
    x, _, expected = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    first, *_ = function(x, weights)
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, function(x, weights)[0])) for _ in range(2))
    _, timings = profiler.measure(function, aggregate=False, iterations=6)(x, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    kernels = [(name, ms * 1e3) for iteration in timings[1:] for name, ms in iteration]
    ours = [us for name, us in kernels if "int4_matmul" in name or "mosaic" in name]
    others = (sum(us for _, us in kernels) - sum(ours)) / len(ours)
    us, spread = statistics.median(ours), statistics.quantiles(ours, n=10)
    verdict = f"error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}{'' if error < 1e-2 else ' WRONG'}"
    if case.only:
        verdict = "reads only,"
    print(f"predicted {case.predicted_us} us, {verdict} p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} sum {others:.1f}")
    recorder.record(case.record, {"us": (us, "us"), "tb_per_s": (case.k * case.n / 2 / us / 1e6, "TB/s")})


def stamped(case: Case) -> Any:
    """The product with every weight in turn, with stamps for results."""
    schedule = case.chosen

    def program(w: WideWarp, plan: Plan, a: strip.Arguments, slice_: Value, block: Value) -> None:
        w = StampedWarp.of(w, plan, a.out, slice_ * plan.blocks_per_slice + block)
        mosaic.multiply(w, plan, a, slice_, block)

    def products(x: jax.Array, weights: list[Any]) -> list[jax.Array]:
        dtype = jnp.dtype(jnp.float32)
        return [mosaic.partial_sums(x, w, schedule=schedule, out_dtype=dtype, program=program) for w in weights]

    x, weights = operands(case)
    return jax.jit(products).lower(x, weights)


def show(case: Case, function: Any) -> None:
    """Prints medians over all launches and blocks; blocks end at different times, so those separately."""
    x, weights = operands(case)
    jax.block_until_ready(function(x, weights))
    plan = Plan.of(case.m, weights[0], case.chosen)
    blocks = plan.slices * plan.blocks_per_slice
    launches = [np.asarray(out).view(np.uint32).reshape(-1) for out in function(x, weights)]
    stamps = np.stack([launch[: blocks * 2 * STAMPS].reshape(blocks, 2, STAMPS) for launch in launches]).astype(
        np.int64
    )
    begin = stamps[:, :, 0, START_TIME].min(1, keepdims=True)
    ends = np.sort(stamps[:, :, 0, END_TIME] - begin, 1)
    quantiles = [f"{np.median(ends[:, int(q * (blocks - 1))]):.0f}" for q in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)]
    print(
        f"{case.name}: ns from the first start to the end of the first, 10 %, 25, 50, 75, 90, last block: {quantiles}"
    )
    took = stamps[:, :, 0, END_TIME] - stamps[:, :, 0, START_TIME]
    clocks_a_ns = np.median(((stamps[:, :, 0, END] - stamps[:, :, 0, 0]) & 0xFFFFFFFF) / took)
    starts = np.median((stamps[:, :, 0, START_TIME] - begin).max(1))
    print(f"  the last block starts after {starts:.0f} ns; {clocks_a_ns:.2f} clocks a ns")
    for which in range(2):
        clocks = (stamps[:, :, which] - stamps[:, :, which, :1]) & 0xFFFFFFFF
        columns = clocks.reshape(-1, STAMPS).T
        # A stamp that was not written in a block is a huge difference.
        middle = [f"{np.median(c[c < 1 << 20]):.0f}" if (c < 1 << 20).mean() > 0.3 else "-" for c in columns]
        turns = [middle[i : i + PER_TURN] for i in range(PROLOGUE, END_TIME, PER_TURN)]
        print(f"  {('first', 'last')[which]} warp, clocks: before {' '.join(middle[1:PROLOGUE])}; end {middle[END]}")
        print(f"    turns (see StampedWarp): {'; '.join(' '.join(turn) for turn in turns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--words", nargs="*", help="only cases whose name contains one of them")
    parser.add_argument("--seconds", type=float, default=40.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    jobs = [(case, compiled, functools.partial(run, recorder)) for case in CASES]
    if arguments.stamps:
        jobs = [(case, stamped, show) for case in STAMPED] + jobs
    if arguments.words:
        jobs = [job for job in jobs if any(word in job[0].name for word in arguments.words)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        shapes = {(case.k, case.n): case for case, *_ in jobs}
        list(pool.map(operands, shapes.values()))
        list(pool.map(operands, {(case.m, case.k, case.n): case for case, *_ in jobs}.values()))
        pending = [(case, pool.submit(build(case).compile), measure) for case, build, measure in jobs]

        def job(case: Case, function: concurrent.futures.Future, measure: Callable[..., None]) -> None:
            measure(case, function.result())

        try:
            run_each([(one[0].name, functools.partial(job, *one)) for one in pending], started, arguments.seconds)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
