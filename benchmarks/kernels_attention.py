"""Paged attention on the GPU: is it right, and how close to the memory's speed is it?

    python -m benchmarks.kernels_attention [--kv int8 float8_e4m3fn] [--tokens 4] [--parts check decode short many
                                           attention prefill loops] [--seconds 75] [--results FOLDER]

Checks the decode op's kernel against its reference first. Then times kernels by CUPTI, the L2 cache flushed before
each call and the call's projections written after that, as in a model's layer; for a few cases, calls that follow each
other in a device loop (launch gaps included, the cache warm); and prefill of a chunk after a prefix beside cuDNN's rate
on one contiguous prompt. One process, about a second a case; an error in one case is printed and the next case runs.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernels_triton
from benchmarks.attention_checks import CHECKS, check
from benchmarks.attention_prefill import CHUNKS, chunk_timing
from benchmarks.attention_workload import (
    Shape,
    Workload,
    attention_op,
    decode_op,
    kernel_us,
    loop_us,
    lowered_calls,
    separate_ops,
)
from benchmarks.harness import RESULTS, Recorder, read_rate
from pallas_kernels.paged_attention.plan import Plan

INT8, FP8, INT4 = "int8", "float8_e4m3fn", "int4"

# Schedules to try; {} is what plan_for picks.
DECODE: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(64, 4096), [{}]),
    (Shape(64, 4096, kv=INT8), [{}, {"depth": 1}, {"splits": 2}]),
    (Shape(64, 4096, kv=FP8), [{}, {"depth": 1}]),
    (Shape(64, 4096, kv=INT4), [{}, {"depth": 4}, {"splits": 2}]),
    (Shape(1, 128), [{}]),
    (Shape(1, 512), [{}, {"splits": 8, "warps": 4, "depth": 1}]),
    (Shape(1, 2048), [{}, {"depth": 1}]),
    (Shape(1, 2048, kv=INT8), [{}]),
    (Shape(1, 128, table=2048), [{}]),
    (Shape(1, 512, table=2048), [{}]),
    (Shape(1, 128, head_dim=64), [{}]),
    (Shape(1, 512, head_dim=64), [{}]),
    (Shape(1, 2048, head_dim=64), [{}]),
    (Shape(16, 256), [{}, {"splits": 1, "warps": 8, "depth": 2}]),
    (Shape(64, 256), [{}]),
]
# What speculation runs: a draft's passes (16 query heads), verification and plain decoding of a target.
DRAFT: dict[str, Any] = {"q_heads": 16, "norm": True}
SIXTEEN: dict[str, Any] = {"batch": 16, "context": 640, "shortest": 130, "ragged": True, "table": 1024}
SHORT: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(1, 400, table=512, **DRAFT), [{}]),
    (Shape(1, 400, table=512, tokens=2, **DRAFT), [{}]),
    (Shape(1, 400, table=512, tokens=5, norm=True), [{}, {"most_halves": None}]),
    (Shape(**SIXTEEN, **DRAFT), [{}]),
    (Shape(**SIXTEEN, **DRAFT, tokens=2), [{}]),
    (Shape(**SIXTEEN, norm=True), [{}]),
    (Shape(**SIXTEEN, norm=True, tokens=5), [{}, {"splits": 4}]),
]
# What `benchmarks.throughput --order shortest` runs, as its rows become fewer: (rows, shortest, longest).
SERVED = [
    (256, 209, 1126),
    (216, 315, 1232),
    (192, 385, 1302),
    (160, 472, 1389),
    (128, 618, 1522),
    (96, 738, 1636),
    (64, 870, 1768),
    (32, 1090, 1911),
]
IN_ORDER: dict[str, Any] = {"every": 1}
ROWS: dict[str, Any] = {"table": 2048, "ragged": True, "longest_first": True}
MANY: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(rows, longest, shortest=shortest, **ROWS), [{}, IN_ORDER]) for rows, shortest, longest in SERVED
]
MANY += [
    (Shape(64, 4096), [{}, IN_ORDER]),
    (Shape(256, 700, table=2048), [{}, IN_ORDER]),
    (Shape(192, 1302, shortest=385, kv=INT8, **ROWS), [{}, IN_ORDER]),
    (Shape(192, 1302, shortest=385, kv=FP8, **ROWS), [{}, IN_ORDER]),
    (Shape(64, 2048, tokens=4, ragged=True, longest_first=True), [{}, IN_ORDER]),
    (Shape(192, 1302, shortest=385, written=24, **ROWS), [{}, IN_ORDER]),
    (Shape(16, 1000), [{}]),
    (Shape(1, 32768), [{}]),
    (Shape(192, 1302, shortest=385, **ROWS), [{"late_values": False}]),
    (Shape(160, 1389, shortest=472, **ROWS), [{"late_values": True}]),
]
ATTENTION: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(64, 4096), [{}]),
    (Shape(64, 4096, kv=INT8), [{}]),
    (Shape(64, 4096, tokens=4), [{}]),
    (Shape(64, 4096, tokens=4, kv=INT8), [{}]),
    (Shape(64, 4096, tokens=8), [{}]),
    (Shape(64, 4096, tokens=16), [{}]),
    (Shape(8, 1024, tokens=5), [{}]),
    (Shape(1, 512), [{}]),
    (Shape(1, 2048), [{}]),
    (Shape(1, 32768), [{}]),
    (Shape(1, 32768, kv=INT8), [{}]),
    (Shape(16, 1024), [{}]),
    (Shape(64, 2048, ragged=True), [{}, {"splits": 1}]),
    (Shape(64, 4096, ragged=True), [{}, {"splits": 2}]),
    (Shape(64, 2048, ragged=True, kv=INT8), [{}]),
]
LOOPS = [Shape(1, 512), Shape(1, 2048), Shape(16, 256)]
PARTS = ("check", "decode", "short", "many", "attention", "prefill", "loops")


@dataclasses.dataclass
class Kernels:
    """Kernels that are compiled in threads, each once, whatever the order of the rows."""

    pool: concurrent.futures.Executor
    junk: jax.Array
    compiled: dict[Any, concurrent.futures.Future] = dataclasses.field(default_factory=dict)

    def start(self, name: str, shape: Shape, plan: Plan) -> concurrent.futures.Future:
        shape = dataclasses.replace(shape, longest_first=False)
        key = name, shape, plan
        if key not in self.compiled:
            decodes = name == "decode_attention"
            op = decode_op(plan, shape.norm) if decodes else attention_op(plan)
            self.compiled[key] = self.pool.submit(lowered_calls(op, shape, self.junk, projections=decodes).compile)
        return self.compiled[key]


def timing(
    recorder: Recorder, name: str, work: Workload, changes: dict[str, Any], kernels: Kernels, rate: float
) -> None:
    shape = work.shape
    plan = shape.plan(**changes)
    x = work.qkv if name == "decode_attention" else work.q
    us = kernel_us(work, kernels.start(name, shape, plan).result(), x, kernels.junk)
    read = shape.bytes_read / us * 1e6
    metrics = {"us": (us, "us"), "tb_per_s": (read / 1e12, "TB/s"), "hbm_share": (read / rate, "")}
    recorder.record(case_of(name, shape, plan), metrics)


def loop_timing(recorder: Recorder, work: Workload) -> None:
    plan = work.shape.plan()
    metrics = {
        "loop_us": (loop_us(work, decode_op(plan)), "us"),
        "loop_separate_us": (loop_us(work, separate_ops(plan)), "us"),
    }
    recorder.record(case_of("decode_attention", work.shape, plan), metrics)


def case_of(name: str, shape: Shape, plan: Plan) -> dict[str, object]:
    fields = ("splits", "warps", "depth", "most_halves", "late_values", "every")
    case = {"op": name} | dataclasses.asdict(shape) | {field: getattr(plan, field) for field in fields}
    # As records were made before there was a choice.
    later = {"longest_first": False, "written": 0, "late_values": False, "every": 1}
    return {key: value for key, value in case.items() if key not in later or value != later[key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="+", help="only shapes whose pages hold these")
    parser.add_argument("--tokens", nargs="+", type=int, help="only shapes with so many query tokens a row")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=75, help="start no new case after this long")
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    parser.add_argument("--backend", choices=("mosaic", "triton"), default="mosaic", help="triton: kernels_triton.py's")
    options = parser.parse_args()
    if options.backend == "triton":
        return kernels_triton.run([], options.seconds, options.results or RESULTS, "paged_attention")
    recorder = Recorder("kernels", options.results) if options.results else Recorder("kernels")
    start = time.perf_counter()
    failed: list[str] = []

    def attempt(name: str, function: Callable[..., None], *arguments: Any) -> None:
        elapsed = time.perf_counter() - start
        if elapsed > options.seconds:
            print(f"out of time: {name}", flush=True)
            return
        try:
            function(*arguments)
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AssertionError):
            failed.append(name)
            print(f"failed: {name}", flush=True)
            traceback.print_exc(limit=-3)
        print(f"  {time.perf_counter() - start - elapsed:.1f} s, {time.perf_counter() - start:.1f} in all", flush=True)

    def wanted(kv: str, tokens: int = 1) -> bool:
        return (not options.kv or kv in options.kv) and (not options.tokens or tokens in options.tokens)

    for case in CHECKS:
        if "check" in options.parts and wanted(case.shape.kv, case.shape.tokens):
            attempt(str(case), check, case)
    rate = read_rate()
    print(f"read rate {rate / 1e12:.2f} TB/s", flush=True)
    kernels = Kernels(concurrent.futures.ThreadPoolExecutor(8), jnp.ones(128 * 2**20, jnp.bfloat16))
    cases = [
        ("paged_attention" if part == "attention" else "decode_attention", shape, schedules)
        for part, table in (("decode", DECODE), ("short", SHORT), ("many", MANY), ("attention", ATTENTION))
        for shape, schedules in table
        if part in options.parts and wanted(shape.kv, shape.tokens)
    ]
    for name, shape, schedules in cases:
        for changes in schedules:
            kernels.start(name, shape, shape.plan(**changes))
    for name, shape, schedules in cases:
        work = Workload(shape)
        for changes in schedules:
            attempt(f"{name} {shape} {changes}", timing, recorder, name, work, changes, kernels, rate)
        del work
    kernels.pool.shutdown(cancel_futures=True)
    for case in CHUNKS:
        if "prefill" in options.parts and wanted(case.kv):
            attempt(str(case), chunk_timing, recorder, case)
    for shape in LOOPS:
        if "loops" in options.parts and wanted(shape.kv):
            attempt(f"loops of {shape}", loop_timing, recorder, Workload(shape))
    if failed:
        sys.exit(f"{len(failed)} cases failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
