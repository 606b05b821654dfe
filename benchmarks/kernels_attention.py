"""Paged attention on the GPU: is it right, and how close to the memory's speed is it?

    python -m benchmarks.kernels_attention [--seconds 110] [--large-clusters]

Checks the Mosaic kernel against float64 NumPy first, then times it by CUPTI (kernel only; the L2 cache flushed
before each call, as a model's weights do between layers) and in a device loop (launch gaps included). Prints lines
as they come; with OUT set, writes JSON lines to $OUT/kernels_attention.jsonl. An error in one case is printed and
the next case runs. Clusters of 16 blocks are only tried with --large-clusters: a launch that the driver refuses
ends the process.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.paged_attention import api, mosaic, reference

READ_RATE = 4.39e12  # bytes/s, the largest that a reduction reached on an H200 (docs/performance.md)
BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    tokens: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    ragged: bool = False

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)


# Tuning by (splits, warps, depth): None is what api.plan_for picks.
TIMINGS: list[tuple[Shape, list[tuple[int, int, int] | None]]] = [
    (Shape(64, 4096), [None, (2, 4, 2), (1, 4, 1), (4, 4, 1)]),
    (Shape(1, 2048), [None, (8, 8, 2), (8, 4, 1), (16, 4, 2), (4, 8, 2)]),
    (Shape(1, 32768), [None, (8, 8, 2), (16, 4, 2), (16, 8, 1)]),
    (Shape(1, 2048, head_dim=64), [None, (8, 8, 2), (8, 4, 4)]),
    (Shape(1, 128), [None, (2, 4, 1), (1, 8, 1)]),
    (Shape(1, 128, head_dim=64), [None, (1, 8, 1)]),
    (Shape(16, 1024), [None, (4, 4, 2), (1, 4, 2)]),
    (Shape(64, 2048, ragged=True), [None, (4, 4, 2)]),
    (Shape(8, 1024, tokens=5), [None, (4, 4, 1)]),
]

# (rows' lengths, shape, plan changes, window, softcap, sinks)
CHECKS: list[tuple[list[int], Shape, dict[str, Any], int | None, float | None, bool]] = [
    ([0, 1, 16, 17, 333], Shape(5, 400), {"splits": 1, "depth": 1}, None, None, False),
    ([0, 1, 16, 17, 1000], Shape(5, 1024, head_dim=64), {"splits": 8}, None, None, False),
    ([5, 700, 64], Shape(3, 1024, tokens=5), {"splits": 2, "depth": 1}, None, None, False),
    ([16, 257, 128], Shape(3, 300, tokens=16, q_heads=8, kv_heads=2, page_size=32), {"splits": 4}, 40, None, True),
    ([90, 200], Shape(2, 256, q_heads=16, kv_heads=1, head_dim=80, page_size=64), {"splits": 2}, None, 30.0, False),
    ([33, 500], Shape(2, 512, q_heads=8, kv_heads=8, head_dim=96), {"splits": 4, "warps": 8}, 100, None, False),
    ([77, 512], Shape(2, 512, q_heads=8, kv_heads=4, head_dim=256), {"splits": 2, "depth": 1}, None, 50.0, True),
    ([1000, 2048], Shape(2, 2048), {"splits": 16}, None, None, False),
    ([1000, 2048], Shape(2, 2048), {"splits": 8, "early_launch": True}, None, None, False),
]


def plan_of(shape: Shape, **changes: Any) -> mosaic.Plan:
    plan = api.plan_for(
        (shape.batch, shape.tokens, shape.q_heads, shape.head_dim),
        (1, shape.kv_heads, shape.page_size, shape.head_dim),
        shape.pages_per_row,
        scale=shape.head_dim**-0.5,
    )
    return dataclasses.replace(plan, **changes)


def exact(q, k_pages, v_pages, table, lengths, plan: mosaic.Plan, sinks) -> np.ndarray:
    """float64 attention, row by row."""
    out = np.zeros(q.shape)
    for b, length in enumerate(lengths):
        pages = table[b, : -(-length // plan.page_size)]
        keys, values = (
            pool[pages].transpose(1, 0, 2, 3).reshape(plan.kv_heads, -1, plan.head_dim)[:, :length].astype(np.float64)
            for pool in (k_pages, v_pages)
        )
        for t in range(plan.tokens):
            last = length - plan.tokens + t
            if last < 0:
                continue
            first = 0 if plan.window is None else max(0, last - plan.window + 1)
            for h in range(plan.q_heads):
                logits = keys[h // plan.group, first : last + 1] @ q[b, t, h].astype(np.float64) * plan.scale
                if plan.softcap is not None:
                    logits = plan.softcap * np.tanh(logits / plan.softcap)
                peak = logits.max() if sinks is None else max(logits.max(), sinks[h])
                weights = np.exp(logits - peak)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - peak))
                out[b, t, h] = weights @ values[h // plan.group, first : last + 1] / total
    return out


def check(index: int, lengths, shape: Shape, changes, window, softcap, with_sinks) -> dict[str, Any]:
    """Relative error against float64, with NaN in everything that must not be read, and three runs bit for bit."""
    rng = np.random.default_rng(index)
    plan = plan_of(shape, window=window, softcap=softcap, sinks=with_sinks, **changes)
    num_pages = shape.batch * shape.pages_per_row + 1
    pool = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
    k_pages, v_pages = (rng.standard_normal(pool).astype(BF16) for _ in range(2))
    table = (rng.permutation(num_pages - 1) + 1).reshape(shape.batch, -1).astype(np.int32)
    for b, length in enumerate(lengths):
        for pages in (k_pages, v_pages):
            for slot in range(length // shape.page_size, shape.pages_per_row):
                used = max(0, length - slot * shape.page_size)
                pages[table[b, slot], :, used:] = np.nan
        table[b, -(-length // shape.page_size) :] = 0
    k_pages[0] = v_pages[0] = np.nan
    q = (2 * rng.standard_normal((shape.batch, shape.tokens, shape.q_heads, shape.head_dim))).astype(BF16)
    sinks = rng.standard_normal(shape.q_heads).astype(np.float32) if with_sinks else None
    run = jax.jit(functools.partial(mosaic.paged_attention, plan=plan, return_lse=True))
    arguments = [jnp.asarray(x) for x in (q, k_pages, v_pages, table, np.array(lengths, np.int32))]
    sink_logits = None if sinks is None else jnp.asarray(sinks)
    outs = [np.asarray(run(*arguments, sink_logits)[0]) for _ in range(3)]
    want = exact(q, k_pages, v_pages, table, lengths, plan, sinks)
    error = np.linalg.norm(outs[0].astype(np.float64) - want) / np.linalg.norm(want)
    return {
        "case": f"check {index}: {shape} {changes} window {window} softcap {softcap} sinks {with_sinks}",
        "error": float(error),
        "nan": int(np.isnan(outs[0].astype(np.float32)).sum()),
        "same_bits": all((o.view(np.uint16) == outs[0].view(np.uint16)).all() for o in outs),
        "ok": bool(error < 5e-3),
    }


class Workload:
    """One shape's arrays: a pool several times the L2 cache, and page tables that point at different parts of it."""

    def __init__(self, shape: Shape):
        self.shape = shape
        rng = np.random.default_rng(0)
        lengths = np.full(shape.batch, shape.context, np.int32)
        if shape.ragged:
            lengths = rng.integers(shape.context // 16, shape.context + 1, shape.batch).astype(np.int32)
        self.read = int(lengths.sum()) * shape.kv_heads * shape.head_dim * 2 * 2
        pages = shape.batch * shape.pages_per_row
        copies = int(np.clip(400e6 // self.read, 1, 16))
        pool = (pages * copies + 1, shape.kv_heads, shape.page_size, shape.head_dim)
        self.k_pages, self.v_pages = (jax.random.normal(jax.random.key(i), pool, jnp.bfloat16) for i in range(2))
        order = rng.permutation(pages * copies).astype(np.int32) + 1
        self.tables = list(jnp.asarray(order.reshape(copies, shape.batch, shape.pages_per_row)))
        self.lengths = jnp.asarray(lengths)
        rows = (shape.batch, shape.tokens, shape.q_heads, shape.head_dim)
        self.q = jax.random.normal(jax.random.key(2), rows, jnp.bfloat16)
        self.junk = jnp.ones(64 * 2**20, jnp.bfloat16)

    def kernel_us(self, call) -> float:
        """Median time of one kernel, L2 flushed by a 128 MB read before each."""

        def chain(q, k_pages, v_pages, lengths, tables, junk):
            outs = []
            for table in tables:
                flushed = junk.max()
                q, junk, flushed = jax.lax.optimization_barrier((q, junk, flushed))
                q = call(q, k_pages, v_pages, table, lengths)
                q, junk = jax.lax.optimization_barrier((q, junk))
                outs.append(flushed)
            return q, outs

        measured = profiler.measure(jax.jit(chain), aggregate=False, iterations=4)(
            self.q, self.k_pages, self.v_pages, self.lengths, self.tables, self.junk
        )[1]
        if measured is None:
            raise RuntimeError("CUPTI saw no kernel")
        times = [t for iteration in measured for name, t in iteration if "paged_attention" in name]
        if not times:
            raise RuntimeError(f"CUPTI saw no paged_attention kernel, but {sorted({n for n, _ in measured[0]})}")
        return statistics.median(times) * 1e3

    def loop_us(self, call) -> float:
        """Time per call in a device loop of 50 rounds over the page tables, each call waiting for the one before."""

        @jax.jit
        def loop(q, k_pages, v_pages, lengths, tables):
            def round_(_, q):
                for table in tables:
                    q = call(q, k_pages, v_pages, table, lengths)
                return q

            return jax.lax.fori_loop(0, 50, round_, q)

        arguments = (self.q, self.k_pages, self.v_pages, self.lengths, self.tables)
        loop(*arguments).block_until_ready()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            loop(*arguments).block_until_ready()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 50 / len(self.tables) * 1e6


def timing(work: Workload, tuning: tuple[int, int, int] | None, **changes: Any) -> dict[str, Any]:
    if tuning is not None:
        changes |= dict(zip(("splits", "warps", "depth"), tuning, strict=True))
    plan = plan_of(work.shape, **changes)

    def call(q, k_pages, v_pages, table, lengths):
        return mosaic.paged_attention(q, k_pages, v_pages, table, lengths, None, plan=plan, return_lse=False)[0]

    us = work.kernel_us(call)
    return {
        "case": dataclasses.asdict(work.shape),
        "plan": {"splits": plan.splits, "warps": plan.warps, "depth": plan.depth, **changes},
        "us": round(us, 2),
        "tb_per_s": round(work.read / us / 1e6, 3),
        "hbm_share": round(work.read / us * 1e6 / READ_RATE, 3),
        "loop_us": round(work.loop_us(call), 2),
    }


def gather_timing(work: Workload) -> dict[str, Any]:
    """What XLA makes of the reference, in the same loop."""

    def call(q, k_pages, v_pages, table, lengths):
        return reference.paged_attention(
            q, k_pages, v_pages, table, lengths, None, scale=0.1, window=None, softcap=None
        )[0]

    return {"case": dataclasses.asdict(work.shape), "plan": "reference through XLA", "loop_us": work.loop_us(call)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110, help="start no new case after this long")
    parser.add_argument("--large-clusters", action="store_true", help="only the cases with 16 blocks in a cluster")
    options = parser.parse_args()
    start = time.perf_counter()

    def attempt(name: str, function, *arguments: Any, **keywords: Any) -> None:
        if ("splits=16" in name) != options.large_clusters:
            return
        if time.perf_counter() - start > options.seconds:
            print("out of time:", name, flush=True)
            return
        try:
            record: dict[str, Any] = function(*arguments, **keywords)
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            record = {"case": name, "failed": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc(limit=-2)
        record["at_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps(record), flush=True)
        if os.environ.get("OUT"):
            with open(Path(os.environ["OUT"]) / "kernels_attention.jsonl", "a") as file:
                file.write(json.dumps({"benchmark": "kernels", "op": "paged_attention", **record}) + "\n")

    print(jax.devices(), jax.__version__, flush=True)
    for index, case in enumerate(CHECKS):
        attempt(f"check {index} splits={case[2].get('splits')}", check, index, *case)
    for shape, tunings in TIMINGS:
        work = Workload(shape)
        for tuning in tunings:
            attempt(f"{shape} {tuning} splits={tuning and tuning[0]}", timing, work, tuning)
        if shape.batch == 1 and shape.context == 2048:
            attempt(f"{shape} early", timing, work, None, early_launch=True)
            attempt(f"{shape} gather", gather_timing, work)
        del work


if __name__ == "__main__":
    main()
