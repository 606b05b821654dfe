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
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, DOWN, OUT, QKV, UP, Case, inputs, weights_of
from pallas_kernels.int4_matmul import mosaic
from pallas_kernels.int4_matmul.plan import Plan, Schedule
from pallas_kernels.int4_matmul.warp import Int4Warp, Value

STAMPS, PROLOGUE, PER_TURN = 40, 8, 4
END_TIME, END, START_TIME = 36, 37, 38
"""Places of stamps: the kernel's start and its barriers before the loop; from PROLOGUE on those of each turn of at most
seven; its end, and its start and end by the card's clock in nanoseconds."""

WIDE = Schedule(16, 2, 4, 3, 132, digits=True)
TALL = Schedule(8, 2, 4, 3, 264, digits=True)


def scaled(schedule: Schedule, **fields: int) -> Schedule:
    return dataclasses.replace(schedule, digits=False, scaled=True, **fields)


PAIR = scaled(WIDE, parts=1, depth=6, together=True)


CASES = [
    Case(1, *UP, 11.2, WIDE),
    Case(1, *UP, 9.9, scaled(WIDE)),
    Case(1, *UP, 9.9, scaled(WIDE, depth=5)),
    Case(1, *UP, 10.1, scaled(WIDE, strips=2)),
    Case(8, *UP, 12.6, WIDE),
    Case(8, *UP, 12.0, scaled(WIDE)),
    Case(16, *UP, 14.7, Schedule(16, 2, 2, 3, 132)),
    Case(16, *UP, 14.2, scaled(WIDE, strips=2)),
    Case(8, *UP, 11.3, PAIR),
    Case(16, *UP, 12.4, dataclasses.replace(PAIR, strips=2)),
    Case(8, *OUT, 4.4, PAIR),
    Case(8, *QKV, 5.7, PAIR),
    Case(1, *UP, 10.2, PAIR),
    Case(1, *OUT, 4.3, PAIR),
    Case(16, *OUT, 5.0, dataclasses.replace(PAIR, strips=2)),
    Case(1, *DOWN, 10.2, scaled(WIDE, parts=1)),
    Case(1, *DOWN, 9.9, scaled(TALL)),
    Case(8, *DOWN, 11.1, scaled(TALL, strips=2)),
    Case(16, *DOWN, 14.5, scaled(WIDE, strips=2, parts=1)),
    Case(1, *OUT, 4.4, scaled(WIDE)),
    Case(8, *OUT, 5.7, scaled(WIDE)),
    Case(8, *OUT, 4.6, scaled(WIDE, parts=1)),
    Case(8, *QKV, 7.0, scaled(WIDE)),
]
STAMPED = [
    Case(1, *UP, 0, WIDE),
    Case(1, *UP, 0, scaled(WIDE)),
    Case(8, *UP, 0, WIDE),
    Case(8, *UP, 0, scaled(WIDE)),
    Case(8, *OUT, 0, scaled(WIDE)),
    Case(8, *OUT, 0, PAIR),
]


class StampedWarp(Int4Warp):
    """Writes clocks where the kernel has its barriers, for the first and the last warp, in place of its results."""

    _out: Any
    _lead: Value
    _base: Value
    _place: Any

    @classmethod
    def of(cls, w: Int4Warp, plan: Plan, out: Any, block: Value) -> "StampedWarp":
        stamped = cls.__new__(cls)
        stamped.__dict__.update(w.__dict__)
        last = w.integer(plan.schedule.warps - 2) < w.warp
        first = w.warp < 1
        stamped._out, stamped._lead = out, (w.lane < 1) & w.select(first, first, last)
        stamped._base = block * (2 * STAMPS) + w.select(last, w.integer(STAMPS), w.integer(0))
        stamped._place = 0
        stamped._put(stamped._base + START_TIME, "%globaltimer_lo")
        stamped._stamp()
        return stamped

    def _put(self, place: Any, register: str) -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], f"mov.u32 $0, {register};", "=r,~{memory}", has_side_effects=True)
        self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", self._pointer(self._out, place, 4), bits, self._lead.ir)

    def _stamp(self) -> None:
        self._put(self._base + self._place, "%clock")
        self._place = self._place + 1

    def warp_barrier(self) -> None:
        super().warp_barrier()
        self._stamp()

    def block_barrier(self) -> None:
        self._stamp()
        super().block_barrier()
        self._stamp()

    def loop(self, count: Value, carry: Sequence[Value], body: Callable[..., Any]) -> Any:
        self._stamp()

        def stamped(index: Value, inner: Any) -> Any:
            self._place = index * PER_TURN + PROLOGUE
            self._stamp()
            return body(index, inner)

        result = super().loop(count, carry, stamped)
        self._put(self._base + END, "%clock")
        self._put(self._base + END_TIME, "%globaltimer_lo")
        return result

    def store_number(self, ref: Any, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


def operands(case: Case) -> tuple[jax.Array, list[Any]]:
    x, *_ = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    return x, weights_of(case.k, case.n, case.group, case.kind)


def compiled(case: Case) -> Any:
    """The product with every weight in turn."""
    schedule = case.chosen

    def products(x: jax.Array, weights: list[Any]) -> list[jax.Array]:
        return [mosaic.int4_matmul(x, w, schedule=schedule, out_dtype=BF16) for w in weights]

    x, weights = operands(case)
    return jax.jit(products).lower(x, weights)


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
    print(f"predicted {case.predicted_us} us, {verdict} p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} sum {others:.1f}")
    recorder.record(case.record, {"us": (us, "us"), "tb_per_s": (case.k * case.n / 2 / us / 1e6, "TB/s")})


def stamped(case: Case) -> Any:
    """The product with every weight in turn, with stamps for results."""
    schedule = case.chosen

    def program(w: Int4Warp, plan: Plan, a: mosaic.Arguments, slice_: Value, block: Value) -> None:
        w = StampedWarp.of(w, plan, a.out, slice_ * plan.blocks_per_slice + block)
        mosaic.multiply(w, plan, a, slice_, block)

    def products(x: jax.Array, weights: list[Any]) -> list[jax.Array]:
        dtype = jnp.dtype(jnp.float32)
        return [mosaic.partial_sums(x, w, schedule=schedule, out_dtype=dtype, program=program) for w in weights]

    x, weights = operands(case)
    return jax.jit(products).lower(x, weights)


def show(case: Case, function: Any) -> None:
    x, weights = operands(case)
    jax.block_until_ready(function(x, weights))
    plan = Plan.of(case.m, weights[0], case.chosen)
    blocks = plan.slices * plan.blocks_per_slice
    out = np.asarray(function(x, weights)[len(weights) // 2]).view(np.uint32).reshape(-1)
    all_stamps = out[: blocks * 2 * STAMPS].reshape(blocks, 2, STAMPS).astype(np.int64)
    begin, end = all_stamps[:, 0, START_TIME], all_stamps[:, 0, END_TIME]
    print(f"{case.name}: {blocks} blocks started within {np.ptp(begin)} ns, ended within {np.ptp(end)} ns")
    print(f"  first start to last end {end.max() - begin.min()} ns, a block {np.median(end - begin):.0f} ns")
    for which in range(2):
        clocks = (all_stamps[:, which] - all_stamps[:, which, :1]) & 0xFFFFFFFF
        # A stamp that was not written in a block is a huge difference.
        middle = [
            f"{np.median(column[column < 1 << 20]):.0f}" if (column < 1 << 20).any() else "-" for column in clocks.T
        ]
        turns = [middle[i : i + PER_TURN] for i in range(PROLOGUE, END_TIME, PER_TURN)]
        print(
            f"  {'last' if which else 'first'} warp, clocks: before {' '.join(middle[1:PROLOGUE])}; end {middle[END]}"
        )
        print(f"    turns (start, weights there, sums made, all added): {'; '.join(' '.join(turn) for turn in turns)}")


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
        for case, function, measure in pending:
            if time.perf_counter() - started > arguments.seconds:
                print(f"{case.name}: left out, the time is up", flush=True)
                function.cancel()
                continue
            try:
                measure(case, function.result())
            except Exception:  # one failing case must not cost the others
                print(f"{case.name}: FAILED", flush=True)
                traceback.print_exc()
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
