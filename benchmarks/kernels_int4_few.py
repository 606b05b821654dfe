"""Schedules of the INT4 product for few rows side by side, and where the time of one launch goes.

    python -m benchmarks.kernels_int4_few            # every case: all are compiled at once, then timed by CUPTI
    python -m benchmarks.kernels_int4_few --stamps   # four cases: clocks that the kernel writes

Weights are rotated past the L2 cache. TB/s counts the codes only.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks import int4_profile, int4_stamps
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
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion, Plan, Schedule

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
    *(Case(m, *UP, 9.6, tuning.HALF) for m in (3, 5, 7)),
    *(Case(m, *OUT, 4.6, tuning.HALF_FEW) for m in (3, 5, 7)),
    *(Case(m, *QKV, 5.5, tuning.HALF_FEW) for m in (3, 5, 7)),
    *(Case(m, *OUT, 4.8, tuning.HALF_FEW, fusion=RESIDUAL) for m in (3, 5, 7, 8)),
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
STAMPED = [Case(8, *UP, 9.4), Case(8, *OUT, 4.1), Case(16, *UP, 11.3), Case(16, *DOWN, 11.3)]
"""As they are in use, by the time that their targets would take: missed but for the first."""
STAMPED_CALLS = 3


def operands(case: Case) -> tuple[jax.Array, list[Any]]:
    x, *_ = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    return x, weights_of(case.k, case.n, case.group, case.kind)


def lowered(case: Case) -> list[Any]:
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
    return [jax.jit(lambda x, weights: [product(x, w) for w in weights]).lower(x, weights)]


def timed(function: Any, *arguments: Any) -> tuple[list[float], float]:
    """Microseconds of every run of our kernel, and of all other kernels together per run of ours."""
    _, timings = profiler.measure(function, aggregate=False, iterations=6)(*arguments)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    kernels = [(name, ms * 1e3) for iteration in timings[1:] for name, ms in iteration]
    ours = [us for name, us in kernels if "int4_matmul" in name or "mosaic" in name]
    return ours, (sum(us for _, us in kernels) - sum(ours)) / len(ours)


def run(recorder: Recorder, case: Case, function: Any) -> None:
    weights = weights_of(case.k, case.n, case.group, case.kind)
    x, _, expected = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    first, *_ = function(x, weights)
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, function(x, weights)[0])) for _ in range(2))
    ours, others = timed(function, x, weights)
    us, spread = statistics.median(ours), statistics.quantiles(ours, n=10)
    verdict = f"error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}{'' if error < 1e-2 else ' WRONG'}"
    if case.only:
        verdict = "reads only,"
    print(f"predicted {case.predicted_us} us, {verdict} p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} sum {others:.1f}")
    recorder.record(case.record, {"us": (us, "us"), "tb_per_s": (case.k * case.n / 2 / us / 1e6, "TB/s")})


def lowered_stamped(case: Case) -> list[Any]:
    """The product with every weight in turn, as it is and with stamps."""
    products = functools.partial(int4_stamps.products, schedule=case.chosen)
    return [*lowered(case), jax.jit(products).lower(*operands(case))]


def show(recorder: Recorder, case: Case, *functions: Any) -> None:
    """Prints and records where the time of a case goes; `functions` are those of `lowered_stamped`."""
    x, weights = operands(case)
    *_, expected = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    plan = Plan.of(case.m, weights[0], case.chosen)
    us, stamped_us = (statistics.median(timed(function, x, weights)[0]) for function in functions)
    outs = [out for _ in range(STAMPED_CALLS) for out in functions[-1](x, weights)]
    difference = int4_stamps.results_of(plan, outs[0]) - np.asarray(expected)
    error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    if not error < 1e-2:
        raise AssertionError(f"{case.name}: error {error:.1e}")
    profile = int4_profile.Profile.of(plan, outs)
    print(f"{case.name}: error {error:.1e}", *profile.table(), sep="\n")
    record = case.record | {"op": "int4_matmul profile"}
    recorder.record(record, {"us": (us, "us"), "stamped_us": (stamped_us, "us"), **profile.metrics()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--words", nargs="*", help="only cases whose name contains one of them")
    parser.add_argument("--seconds", type=float, default=40.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    jobs = [(case, lowered, functools.partial(run, recorder)) for case in CASES]
    if arguments.stamps:
        jobs = [(case, lowered_stamped, functools.partial(show, recorder)) for case in STAMPED]
    if arguments.words:
        jobs = [job for job in jobs if any(word in job[0].name for word in arguments.words)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        shapes = {(case.k, case.n): case for case, *_ in jobs}
        list(pool.map(operands, shapes.values()))
        list(pool.map(operands, {(case.m, case.k, case.n): case for case, *_ in jobs}.values()))
        pending = [(case, [pool.submit(one.compile) for one in build(case)], measure) for case, build, measure in jobs]

        def job(case: Case, functions: list[concurrent.futures.Future], measure: Callable[..., None]) -> None:
            measure(case, *(function.result() for function in functions))

        try:
            run_each([(one[0].name, functools.partial(job, *one)) for one in pending], started, arguments.seconds)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
