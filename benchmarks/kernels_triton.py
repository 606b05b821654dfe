"""Checks and times the Triton kernels by CUPTI: the packed product and paged attention.

    python -m benchmarks.kernels_triton                  # every case, until --seconds (75) are over
    python -m benchmarks.kernels_triton int4_matmul      # the cases whose name contains the word

Runs on any NVIDIA card from compute capability 8.0 on, with jax-triton installed. Weights are rotated past the L2
cache, which is flushed before each attention. TB/s counts the codes, or keys and values, only. Every case prints what
was predicted for an H200.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.attention_workload import REPEATS, Shape, Workload, flushed_calls
from benchmarks.harness import RESULTS, Recorder, read_rate, run_each
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, dequantize, triton_matmul, triton_tuning
from pallas_kernels.paged_attention import reference, triton_attention
from pallas_kernels.paged_attention.triton_attention import Schedule as Tiling
from pallas_kernels.triton_backend import refusal

ROTATED_BYTES = 256 << 20
RUNS = 4
CHECKED_ROWS = 256
BF16 = jnp.dtype(jnp.bfloat16)
UP, DOWN = (4096, 14336), (14336, 4096)


@dataclasses.dataclass(frozen=True)
class Product:
    """x[m, k] times a weight [n, k] in groups of 128 with zero points, or with a code book."""

    m: int
    k: int
    n: int
    predicted_us: float
    schedule: triton_tuning.Schedule | None = None  # None: what tuning chooses
    bits: int = 4
    book: bool = False

    @property
    def record(self) -> dict[str, object]:
        s = self.schedule
        chosen = "tuned" if s is None else f"{s.kernel} {s.block_n}x{s.block_m} {s.warps}w{s.stages}s {s.splits} splits"
        chosen += " rescaled" if s is not None and s.rescaled else ""
        return {
            "op": "int4_matmul",
            "backend": "triton",
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "group": 128,
            "zero": "code_book" if self.book else "zero_point",
            "schedule": chosen,
            **({} if self.bits == 4 else {"bits": self.bits}),
        }


@dataclasses.dataclass(frozen=True)
class Attention:
    shape: Shape
    predicted_us: float
    schedule: Tiling | None = None  # None: what the sizes and the card decide

    @property
    def record(self) -> dict[str, object]:
        s = self.schedule
        chosen = {} if s is None else {"schedule": f"{s.block_rows}x{s.keys} {s.warps}w{s.stages}s {s.splits} splits"}
        return {"op": "paged_attention", "backend": "triton", **dataclasses.asdict(self.shape), **chosen}


DOT8, _ = triton_tuning.DOT[8]
GEMV, _ = triton_tuning.EXACT[4]
WIDE = triton_tuning.Schedule(128, 128, 8, 3, rescaled=True)
THIRD = triton_tuning.Schedule(128, 64, 8, 3, rescaled=True)
TALL = triton_tuning.Schedule(128, 256, 8, 3, rescaled=True)
CASES: list[Product | Attention] = [
    Product(1, *UP, 10.8),
    Product(8, *UP, 11.5),
    Product(16, *UP, 13.0),
    Product(64, *UP, 27.0),
    Attention(Shape(64, 4096, kv="int8"), 180.0),
    Attention(Shape(8, 1024, tokens=5), 13.5),
    Attention(Shape(64, 4096, kv="float8_e4m3fn"), 195.0),
    Attention(Shape(64, 4096, kv="int4"), 150.0),
    Attention(Shape(16, 1024, kv="int8"), 19.0),
    Attention(Shape(64, 4096), 243.0),
    Attention(Shape(16, 1024, kv="float8_e4m3fn"), 20.0),
    Attention(Shape(16, 1024, kv="int4"), 17.0),
    Attention(Shape(64, 4096, tokens=4, kv="int8"), 185.0),
    Attention(Shape(1, 2048), 8.0),
    Product(1, *UP, 13.0, dataclasses.replace(GEMV, splits=4)),
    Product(8, *DOWN, 12.0),
    Attention(Shape(1, 32768), 38.0),
    Attention(Shape(16, 1024), 22.0),
    Product(8, 4096, 4096, 6.3),
    Attention(Shape(64, 2048, ragged=True), 87.0),
    Product(32, *UP, 18.0),
    Product(8, *UP, 21.0, bits=8),
    Product(1, *UP, 21.0, bits=8),
    Product(64, *UP, 36.0, bits=8),
    Product(8, *UP, 23.0, book=True),
    Product(256, *UP, 62.0, WIDE),
    Product(256, *UP, 75.0),
    Product(128, *UP, 38.0, dataclasses.replace(WIDE, splits=2)),
    Product(128, *UP, 44.0),
    Product(256, *DOWN, 60.0, dataclasses.replace(WIDE, splits=4)),
    Product(256, *DOWN, 71.0),
    Product(256, 4096, 4096, 21.0, dataclasses.replace(WIDE, splits=4)),
    Product(256, 4096, 4096, 24.0),
    Product(192, *UP, 60.0, WIDE),
    Product(192, *UP, 62.0, THIRD),
    Product(192, *UP, 73.0),
    Product(160, *UP, 72.0),
    Product(128, *DOWN, 40.0),
    Product(128, 4096, 4096, 15.0),
    Product(128, 4096, 6144, 22.0),
    Product(256, 4096, 6144, 42.0),
    Product(96, *UP, 42.0),
    Product(224, *UP, 74.0),
    Product(256, *UP, 70.0, TALL),
    Product(256, *UP, 106.0, triton_tuning.DOT[64][0]),
    Product(1024, *UP, 230.0),
    Attention(Shape(64, 4096, kv="int8"), 132.0, Tiling(16, 64, 1, 5, 1)),
    Product(8, *UP, 11.5, dataclasses.replace(DOT8, splits=2)),
    Product(8, *UP, 11.5, dataclasses.replace(DOT8, stages=3, splits=5)),
]


def random_weight(seed: jax.Array, k: int, n: int, bits: int, book: bool) -> Packed:
    """A weight of the triton layout: any bits are valid codes."""
    codes_key, scales_key, offsets_key = jax.random.split(jax.random.key(seed), 3)
    words = jax.random.bits(codes_key, (n // 16, k * bits // 512, 16, 32), jnp.uint16)
    codes = jax.lax.bitcast_convert_type(words, jnp.int16)
    shape = (k // 128, n)
    scales = jax.random.uniform(scales_key, shape, jnp.float32, 0.5, 1.5).astype(BF16)
    if book:
        return PackedInt4(codes, scales, None, jnp.linspace(-1, 1, 16) ** 3, (n, k), 128, "triton")
    offsets = jax.random.randint(offsets_key, shape, 0, 2**bits, jnp.int32).astype(jnp.uint8)
    if bits == 8:
        return PackedInt8(codes, scales, offsets, (n, k), 128, "triton")
    return PackedInt4(codes, scales, offsets, None, (n, k), 128, "triton")


@functools.cache
def weights_of(k: int, n: int, bits: int, book: bool) -> list[Packed]:
    """As many weights as it takes to pass the L2 cache."""
    make = jax.jit(functools.partial(random_weight, k=k, n=n, bits=bits, book=book))
    return [make(seed) for seed in range(max(2, -(-ROTATED_BYTES // (n * k * bits // 8))))]


def rows_of(m: int, k: int) -> jax.Array:
    """bfloat16[m, k]: the first of the same rows for every m up to CHECKED_ROWS, whose products are computed once."""
    return jax.random.normal(jax.random.key(99), (max(m, CHECKED_ROWS), k), BF16)[:m]


@functools.cache
def expected_of(m: int, k: int, n: int, bits: int, book: bool) -> jax.Array:
    """float32[m, n]: the product with the first weight, by XLA."""
    product = jax.jit(lambda x, w: jnp.dot(x.astype(jnp.float32), dequantize(w).T, precision="highest"))
    return product(rows_of(m, k), weights_of(k, n, bits, book)[0])


def kernels_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that `RUNS` calls ran, after one that does not count."""
    _, timings = profiler.measure(jax.jit(function), aggregate=False, iterations=1 + RUNS)(*arguments)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    return [(name, ms * 1e3) for run in timings[1:] for name, ms in run]


def time_product(recorder: Recorder, rate: float, case: Product) -> None:
    """Our kernel, and what XLA adds to it (the sum of splits; for many rows the product) per call."""
    weights = weights_of(case.k, case.n, case.bits, case.book)
    x = rows_of(case.m, case.k)

    @jax.jit  # traced and lowered once, however often the timed function calls it
    def product(w: Packed, x: jax.Array) -> jax.Array:
        return triton_matmul.int4_matmul(x, w, out_dtype=BF16, schedule=case.schedule)

    expected = expected_of(max(case.m, CHECKED_ROWS), case.k, case.n, case.bits, case.book)[: case.m]
    started = time.perf_counter()
    first = jax.block_until_ready(product(weights[0], x))
    compile_seconds = time.perf_counter() - started
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, product(weights[0], x))) for _ in range(3))
    print(f"error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'} compile {compile_seconds:.1f} s", flush=True)
    if not same or not error < 1e-2:
        raise AssertionError(f"error {error}, repeatable {same}")
    kernels = kernels_of(lambda x, weights: [product(w, x) for w in weights], (x, weights))
    ours = [us for name, us in kernels if "int4_" in name]
    if not ours:
        raise RuntimeError(f"CUPTI saw no int4 kernel among {sorted({name for name, _ in kernels})}")
    others = (sum(us for _, us in kernels) - sum(ours)) / len(ours)
    report(recorder, rate, case, statistics.median(ours), others, case.k * case.n * case.bits / 8)


def time_attention(recorder: Recorder, rate: float, case: Attention) -> None:
    """The kernel that attends, and the one that merges its splits."""
    work = Workload(case.shape)
    scale = case.shape.head_dim**-0.5
    options: dict[str, Any] = {"scale": scale, "window": None, "softcap": None}

    @jax.jit
    def op(q, pools, table, lengths, rope):
        del rope
        k_pages, v_pages, *scales = pools
        call = (q, k_pages, v_pages, table, lengths, None, tuple(scales) or None)
        return triton_attention.paged_attention(*call, **options, schedule=case.schedule)[0], pools

    if case.shape.batch * case.shape.context <= 1 << 16:  # the reference gathers all keys
        k_pages, v_pages, *scales = work.pools
        call = (work.q, k_pages, v_pages, work.table, work.lengths, None, tuple(scales) or None)
        want, _ = jax.jit(functools.partial(reference.paged_attention, **options))(*call)
        got, _ = op(work.q, work.pools, work.table, work.lengths, work.rope)
        gap = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
        print(f"error {float(gap):.1e}", flush=True)
        if not float(gap) < 1e-2:
            raise AssertionError(f"error {float(gap)} against the reference")
    junk = jnp.ones(128 * 2**20, jnp.bfloat16)
    kernels = kernels_of(flushed_calls(op), (work.q, work.pools, work.table, work.lengths, work.rope, junk))
    split = [us for name, us in kernels if "paged_attention_split" in name]
    merge = [us for name, us in kernels if "paged_attention_merge" in name]
    if len(split) != RUNS * REPEATS or len(merge) != RUNS * REPEATS:
        raise RuntimeError(f"CUPTI saw {len(split)} and {len(merge)} of {RUNS * REPEATS} calls")
    both = statistics.median(split) + statistics.median(merge)
    report(recorder, rate, case, both, statistics.median(merge), case.shape.bytes_read)


def report(recorder: Recorder, rate: float, case: Product | Attention, us: float, others: float, nbytes: float) -> None:
    """`rate`: the bytes per second at which this card reads memory; `others`: time that goes to other kernels."""
    read = nbytes / us * 1e6
    print(f"predicted {case.predicted_us:.1f} us, of {us:.1f} the second kernel {others:.1f} us", flush=True)
    metrics = {"us": (us, "us"), "tb_per_s": (read / 1e12, "TB/s"), "hbm_share": (read / rate, "")}
    recorder.record(case.record, metrics)


def run(words: list[str], limit: float, results: pathlib.Path, op: str = "") -> None:
    """Times the cases of an op (all) whose name contains one of the words (any), none after `limit` seconds."""
    reason = refusal()
    if reason is not None:
        sys.exit(f"the Triton kernels cannot run: {reason}")
    started = time.perf_counter()
    recorder, rate = Recorder("kernels", results), read_rate()
    jobs: list[tuple[str, Callable[[], None]]] = []
    for case in CASES:
        name = " ".join(f"{key}={value}" for key, value in case.record.items())
        if op in name and (not words or any(word in name for word in words)):
            if isinstance(case, Product):
                jobs.append((name, functools.partial(time_product, recorder, rate, case)))
            else:
                jobs.append((name, functools.partial(time_attention, recorder, rate, case)))
    run_each(jobs, started, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the cases whose name contains one of them")
    parser.add_argument("--seconds", type=float, default=75.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    run(arguments.words, arguments.seconds, arguments.results)


if __name__ == "__main__":
    main()
