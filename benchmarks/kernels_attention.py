"""Paged attention on the GPU: is it right, and how close to the memory's speed is it?

    python -m benchmarks.kernels_attention [--seconds 75] [--results FOLDER]

Checks the decode op's kernel against its reference first. Then times kernels by CUPTI, the L2 cache flushed before
each call and the call's projections written after that, as in a model's layer; and, for a few cases, calls that follow
each other in a device loop (launch gaps included, the cache warm). One process, about a second a case; an error in one
case is printed and the next case runs.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import Recorder, median, read_rate, seconds
from pallas_kernels.paged_attention import decode_mosaic, decode_reference, mosaic
from pallas_kernels.paged_attention.plan import Plan, plan_for

REPEATS = 6  # calls of a program that is timed by CUPTI
LOOP_ROUNDS, LOOP_CALLS = 64, 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """`table` is how many tokens the page table has room for, by default the context."""

    batch: int
    context: int
    tokens: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    table: int = 0
    ragged: bool = False

    @property
    def pages_per_row(self) -> int:
        return -(-max(self.table, self.context) // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.batch * self.pages_per_row + 1

    @property
    def lengths(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        return np.random.default_rng(0).integers(self.context // 16, self.context + 1, self.batch).astype(np.int32)

    @property
    def bytes_read(self) -> int:
        return int(self.lengths.sum()) * self.kv_heads * self.head_dim * 2 * 2

    def plan(self, **changes: Any) -> Plan:
        names = ("batch", "tokens", "q_heads", "kv_heads", "head_dim", "page_size", "pages_per_row")
        plan = plan_for(**{name: getattr(self, name) for name in names}, scale=self.head_dim**-0.5)
        return dataclasses.replace(plan, **changes)


# Schedules to try; {} is what plan_for picks.
DECODE: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(1, 128), [{}, {"keep_tables": False}, {"splits": 2, "warps": 4}, {"splits": 1, "warps": 8, "depth": 1}]),
    (Shape(1, 512), [{}, {"splits": 8, "warps": 4, "depth": 1}, {"early_launch": True}]),
    (Shape(1, 2048), [{}, {"keep_tables": False}, {"depth": 1}]),
    (Shape(1, 128, table=2048), [{}]),
    (Shape(1, 512, table=2048), [{}]),
    (Shape(1, 128, head_dim=64), [{}]),
    (Shape(1, 512, head_dim=64), [{}]),
    (Shape(1, 2048, head_dim=64), [{}, {"depth": 4}]),
    (Shape(16, 256), [{}, {"splits": 2, "warps": 4, "depth": 1}]),
    (Shape(64, 256), [{}, {"depth": 2}, {"warps": 8}]),
    (Shape(64, 4096), [{}]),
]
ATTENTION: list[tuple[Shape, list[dict[str, Any]]]] = [
    (Shape(1, 512), [{}]),
    (Shape(1, 2048), [{}]),
    (Shape(1, 32768), [{}]),
    (Shape(16, 1024), [{}, {"splits": 2, "warps": 4, "depth": 1}]),
    (Shape(64, 2048, ragged=True), [{}, {"splits": 2}]),
    (Shape(64, 4096), [{}]),
    (Shape(8, 1024, tokens=5), [{}]),
]
LOOPS = [Shape(1, 512), Shape(1, 2048), Shape(16, 256)]


class Workload:
    """One shape's arrays: a pool, and page tables that point all over it."""

    def __init__(self, shape: Shape):
        self.shape = shape
        pool = (shape.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        fill = jax.jit(
            lambda: (jax.lax.iota(jnp.int32, math.prod(pool)).reshape(pool) % 251 - 125).astype(jnp.bfloat16)
        )
        self.k_pages, self.v_pages = fill(), fill()
        order = np.random.default_rng(0).permutation(shape.num_pages - 1).astype(np.int32) + 1
        self.table = jnp.asarray(order.reshape(shape.batch, -1))
        self.lengths = jnp.asarray(shape.lengths)
        heads = (shape.batch, shape.tokens, shape.q_heads, shape.head_dim)
        self.q = jnp.ones(heads, jnp.bfloat16)
        self.qkv = jnp.ones((shape.batch, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim), jnp.bfloat16)
        self.rope = (jnp.ones((shape.batch, shape.head_dim // 2)),) * 2


# An op takes (x, k_pages, v_pages, table, lengths, rope) and returns (output, k_pages, v_pages).
def decode_op(plan: Plan) -> Callable[..., Any]:
    whole = decode_mosaic.DecodePlan(plan, plan.head_dim, False, None)

    @jax.jit
    def op(qkv, k_pages, v_pages, table, lengths, rope):
        return decode_mosaic.decode_attention(qkv, k_pages, v_pages, table, lengths - 1, rope, None, None, plan=whole)

    return op


def attention_op(plan: Plan) -> Callable[..., Any]:
    @jax.jit
    def op(q, k_pages, v_pages, table, lengths, rope):
        del rope
        out, _ = mosaic.paged_attention(q, k_pages, v_pages, table, lengths, None, plan=plan, return_lse=False)
        return out, k_pages, v_pages

    return op


def separate_ops(plan: Plan) -> Callable[..., Any]:
    """RoPE and append through XLA, attention through its own kernel."""

    @jax.jit
    def op(qkv, k_pages, v_pages, table, lengths, rope):
        # Not the same in every round, or XLA would take the rotation out of the loop.
        qkv = qkv + k_pages[0, 0, 0, :1][None, :] * jnp.bfloat16(1e-30)
        heads = qkv.reshape(plan.batch, -1, plan.head_dim)
        q, k, v = jnp.split(heads, [plan.q_heads, plan.q_heads + plan.kv_heads], axis=1)
        q, k = (decode_reference.rotate(x, *rope, interleaved=False) for x in (q, k))
        slots = lengths - 1
        pages = jnp.take_along_axis(table, slots[:, None] // plan.page_size, axis=1)[:, 0]
        k_pages, v_pages = (
            pool.at[pages, :, slots % plan.page_size].set(new) for pool, new in ((k_pages, k), (v_pages, v))
        )
        out, _ = mosaic.paged_attention(q[:, None], k_pages, v_pages, table, lengths, None, plan=plan, return_lse=False)
        return out.reshape(plan.batch, -1), k_pages, v_pages

    return op


def flushed_calls(op: Callable[..., Any]) -> Callable[..., Any]:
    """A program of `REPEATS` calls, the L2 cache flushed by a 256 MB read before each."""

    def program(x, k_pages, v_pages, table, lengths, rope, junk):
        outs = []  # all returned, or XLA would leave calls out
        for i in range(REPEATS):
            largest = jnp.max(junk * jnp.bfloat16(i + 1))
            fresh = x + largest * jnp.bfloat16(1e-30)
            out, k_pages, v_pages = op(fresh, k_pages, v_pages, table, lengths, rope)
            x, out = jax.lax.optimization_barrier((x, out))
            outs.append(out)
        return outs, k_pages, v_pages

    return program


def looped_calls(op: Callable[..., Any]) -> Callable[..., Any]:
    def program(x, k_pages, v_pages, table, lengths, rope):
        def round_(_, carry):
            _, k_pages, v_pages = carry
            outs = []
            for _ in range(LOOP_CALLS):
                out, k_pages, v_pages = op(x, k_pages, v_pages, table, lengths, rope)
                outs.append(out)
            return outs, k_pages, v_pages

        shape = jax.eval_shape(op, x, k_pages, v_pages, table, lengths, rope)[0]
        outs = [jnp.zeros(shape.shape, shape.dtype)] * LOOP_CALLS
        return jax.lax.fori_loop(0, LOOP_ROUNDS, round_, (outs, k_pages, v_pages))

    return program


def kernel_us(work: Workload, op: Callable[..., Any], x: jax.Array, junk: jax.Array) -> float:
    """Median time of the kernel alone."""
    program = jax.jit(flushed_calls(op))
    arguments = (x, work.k_pages, work.v_pages, work.table, work.lengths, work.rope, junk)
    _, kernels = profiler.measure(program, aggregate=False)(*arguments)
    times = [ms for name, ms in kernels or [] if "_attention" in name]
    if len(times) != REPEATS:
        raise RuntimeError(f"CUPTI saw {len(times)} of {REPEATS} calls among {sorted({n for n, _ in kernels or []})}")
    return median(times) * 1e3


def loop_us(work: Workload, op: Callable[..., Any]) -> float:
    """Time per call in a device loop."""
    program = jax.jit(looped_calls(op), donate_argnums=(1, 2))

    def run() -> None:
        _, work.k_pages, work.v_pages = program(
            work.qkv, work.k_pages, work.v_pages, work.table, work.lengths, work.rope
        )
        work.k_pages.block_until_ready()

    seconds(run, 2)
    return median(seconds(run, 5)) / (LOOP_ROUNDS * LOOP_CALLS) * 1e6


@dataclasses.dataclass(frozen=True)
class Check:
    positions: tuple[int, ...]
    shape: Shape
    norm: bool
    interleaved: bool
    rotary_dim: int
    window: int | None = None


CHECKS = [
    Check((-1, 0, 15, 16, 1000, 2047), Shape(6, 2048), True, False, 128),
    Check((1500, 7, -1, 255), Shape(4, 2048, q_heads=9, kv_heads=3, head_dim=64), False, False, 64),
    Check((100, 2047), Shape(2, 2048, q_heads=32, kv_heads=2), False, True, 64, window=500),
]


def check(case: Check) -> None:
    """The kernel against the reference through XLA on the same device: outputs, pools, the same bits three times."""
    shape = case.shape
    rng = np.random.default_rng(0)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32)).astype(jnp.bfloat16)

    pool = (shape.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
    k_pages, v_pages = normal(*pool), normal(*pool)
    k_pages, v_pages = k_pages.at[0].set(jnp.nan), v_pages.at[0].set(jnp.nan)
    table = rng.permutation(shape.num_pages - 1).astype(np.int32).reshape(shape.batch, -1) + 1
    positions = np.array(case.positions, np.int32)
    for row, position in enumerate(positions):
        table[row, position // shape.page_size + 1 :] = 0
    angles = rng.uniform(-3, 3, (shape.batch, case.rotary_dim // 2)).astype(np.float32)
    rope = (jnp.cos(angles), jnp.sin(angles))
    norms = (jnp.full(shape.head_dim, 0.9), jnp.full(shape.head_dim, 1.1)) if case.norm else None
    qkv = normal(shape.batch, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim)
    arrays = (qkv, k_pages, v_pages, jnp.asarray(table), jnp.asarray(positions), rope, norms, None)
    plan = decode_mosaic.DecodePlan(
        shape.plan(window=case.window), case.rotary_dim, case.interleaved, 1e-6 if case.norm else None
    )
    run = jax.jit(functools.partial(decode_mosaic.decode_attention, plan=plan))
    runs = [run(*arrays) for _ in range(3)]
    options = {"num_q_heads": shape.q_heads, "scale": shape.head_dim**-0.5, "interleaved": case.interleaved}
    reference = functools.partial(
        decode_reference.decode_attention, **options, norm_eps=1e-6, window=case.window, softcap=None
    )
    # Without this XLA drops the rounding between norm and rotation, and a quarter of the keys differ in their last bit.
    want = jax.jit(reference, compiler_options={"xla_allow_excess_precision": False})(*arrays)
    (out, keys, values), (want_out, want_keys, want_values) = (
        [np.asarray(x).astype(np.float32) for x in got] for got in (runs[0], want)
    )
    error = float(np.linalg.norm(out - want_out) / np.linalg.norm(want_out))
    values_equal = np.array_equal(values, want_values, equal_nan=True)
    # XLA may contract a product and a sum otherwise, and a key then rounds to its neighbour.
    rounded = int((~((keys == want_keys) | np.isnan(want_keys))).sum())
    largest = float(np.nanmax(np.abs(keys - want_keys)))
    same_bits = all(
        np.array_equal(np.asarray(x).view(np.uint16), np.asarray(first).view(np.uint16))
        for again in runs[1:]
        for x, first in zip(again, runs[0], strict=True)
    )
    ok = error < 6e-3 and values_equal and rounded <= 40 and largest < 0.04 and same_bits
    print(
        f"check {case}: {'ok' if ok else 'WRONG'}: error {error:.2e}, same bits {same_bits}, values equal "
        f"{values_equal}, {rounded} key elements differ by up to {largest:.3g}",
        flush=True,
    )
    if not ok:
        raise AssertionError("the kernel disagrees with its reference")


def timing(
    recorder: Recorder, name: str, work: Workload, changes: dict[str, Any], junk: jax.Array, rate: float
) -> None:
    shape = work.shape
    plan = shape.plan(**changes)
    op, x = (decode_op(plan), work.qkv) if name == "decode_attention" else (attention_op(plan), work.q)
    us = kernel_us(work, op, x, junk)
    read = shape.bytes_read / us * 1e6
    metrics = {"us": (us, "us"), "tb_per_s": (read / 1e12, "TB/s"), "hbm_share": (read / rate, "")}
    recorder.record(case_of(name, shape, plan), metrics)


def loop_timing(recorder: Recorder, work: Workload) -> None:
    plan = work.shape.plan()
    metrics = {
        "loop_us": (loop_us(work, decode_op(plan)), "us"),
        "loop_early_launch_us": (loop_us(work, decode_op(dataclasses.replace(plan, early_launch=True))), "us"),
        "loop_separate_us": (loop_us(work, separate_ops(plan)), "us"),
    }
    recorder.record(case_of("decode_attention", work.shape, plan), metrics)


def case_of(name: str, shape: Shape, plan: Plan) -> dict[str, object]:
    schedule = {field: getattr(plan, field) for field in ("splits", "warps", "depth", "early_launch", "keep_tables")}
    return {"op": name, "kv": "bfloat16"} | dataclasses.asdict(shape) | schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75, help="start no new case after this long")
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    options = parser.parse_args()
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

    for case in CHECKS:
        attempt(str(case), check, case)
    rate = read_rate()
    print(f"read rate {rate / 1e12:.2f} TB/s", flush=True)
    junk = jnp.ones(128 * 2**20, jnp.bfloat16)
    for name, table in (("decode_attention", DECODE), ("paged_attention", ATTENTION)):
        for shape, schedules in table:
            work = Workload(shape)
            for changes in schedules:
                attempt(f"{name} {shape} {changes}", timing, recorder, name, work, changes, junk, rate)
            if name == "decode_attention" and shape in LOOPS:
                attempt(f"loops of {shape}", loop_timing, recorder, work)
            del work
    if failed:
        sys.exit(f"{len(failed)} cases failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
