"""From how many rows on which INT4 product: the fused kernel for many rows, unpacking and cuBLAS, and cuBLAS alone.

    python -m benchmarks.kernels_int4_crossover             # the four matrices of an 8B model, within --seconds (55)
    python -m benchmarks.kernels_int4_crossover --all       # the fused kernel at every number of rows up to 2048

Microseconds of all kernels of a product by CUPTI, weights rotated past the L2 cache. The fused kernel, which takes
seconds to compile, is timed at some numbers of rows only; unpacking is timed once a matrix and added to cuBLAS.
The rule that the last columns check: at no number of rows more than 10 % slower than cuBLAS with bfloat16 weights.
"""

import argparse
import concurrent.futures
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

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, DOWN, OUT, QKV, ROTATED_BYTES, UP, Case, random_weight, weights_of
from pallas_kernels.int4_matmul import PackedInt4, wide, wide_dequantize, wide_tuning

MATRICES = {"up": UP, "down": DOWN, "o": OUT, "qkv": QKV}
ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FUSED_ROWS = ROWS[:7]
FUSED = {
    "up": (64, 128, 256, 512, 1024, 2048),
    "down": (64, 128, 512, 1024),
    "o": (256, 1024),
    "qkv": (128, 256, 512),
}
"""Where the fused kernel is timed unless all are asked for."""
BLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}
"""Trying Triton's kernels beside cuBLAS' takes a second for each product, and none of them wins at these sizes."""


def fused(x: jax.Array, weight: PackedInt4) -> jax.Array:
    schedule = wide_tuning.wide_schedule(x.shape[0], weight, natural=True)
    return wide.int4_matmul(x, weight, schedule=schedule, out_dtype=BF16)


def blas(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def each(product: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """The products of pairs from two lists; of one list, its members' images."""
    return lambda *lists: [product(*pair) for pair in zip(*lists, strict=True)]


def microseconds(products: jax.stages.Compiled, *lists: list[Any]) -> float:
    """The median over runs of what one product takes, all its kernels together."""
    _, timings = profiler.measure(products, aggregate=False, iterations=6)(*lists)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    return statistics.median(sum(t for _, t in run) * 1e3 / len(lists[0]) for run in timings[1:])


def tokens_of(rows: int, k: int, count: int) -> list[jax.Array]:
    x = jax.random.normal(jax.random.key(rows), (rows, k), BF16)
    return [jnp.roll(x, i, axis=0) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="*", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--all", action="store_true", help="time the fused kernel at every number of rows up to 2048")
    parser.add_argument("--seconds", type=float, default=55.0, help="measure nothing after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started = time.perf_counter()
    recorder, wrong = Recorder("kernels", arguments.results), []

    def kernel(name: str, rows: int | None) -> jax.stages.Compiled:
        """Compiles products (None: unpacking) of one matrix, without running anything."""
        k, n = MATRICES[name]
        weight = jax.eval_shape(functools.partial(random_weight, case=Case(1, k, n, 0.0)), jax.random.key(0))
        weights = [weight] * rotated(k * n // 2)
        if rows is None:
            return jax.jit(each(wide_dequantize.dequantize)).lower(weights).compile()
        x = jax.ShapeDtypeStruct((rows, k), BF16)
        return jax.jit(each(fused)).lower([x] * len(weights), weights).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        kernels = {
            (name, rows): pool.submit(kernel, name, rows)
            for name in arguments.matrices
            for rows in (None, *(FUSED_ROWS if arguments.all else FUSED[name]))
        }
        concurrent.futures.wait(kernels.values())
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)

    for name in arguments.matrices:
        k, n = MATRICES[name]
        packed = weights_of(k, n, 128, "zero_point")
        unpack = kernels[name, None].result()
        unpacking = microseconds(unpack, packed)
        dense = unpack(packed)[: rotated(2 * k * n)]
        print(f"{name}: unpacking {unpacking:.1f} us, {2.5 * k * n / unpacking / 1e6:.2f} TB/s", flush=True)
        for rows in ROWS:
            if time.perf_counter() - started > arguments.seconds:
                print(f"{name} from {rows} rows on: left out, the time is up", flush=True)
                break
            xs = tokens_of(rows, k, len(packed))
            some = xs[: len(dense)]
            multiply = jax.jit(each(blas)).lower(some, dense).compile(compiler_options=BLAS_ONLY)
            alone = microseconds(multiply, some, dense)
            metrics = {"cublas_us": (alone, "us"), "unpacked_us": (unpacking + alone, "us")}
            if (name, rows) in kernels:
                products = kernels[name, rows].result()
                error = relative_error(products(xs, packed)[0], multiply(some, dense)[0])
                metrics["fused_us"] = (microseconds(products, xs, packed), "us")
                if not error < 1e-2:
                    wrong.append(f"{name} {rows}: error {error:.1e}")
            best = min(value for key, (value, _) in metrics.items() if key != "cublas_us")
            metrics["best_over_cublas"] = (best / alone, "")
            recorder.record({"op": "int4_matmul", "part": "crossover", "m": rows, "k": k, "n": n}, metrics)
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)
    if wrong:
        sys.exit("wrong: " + "; ".join(wrong))


def rotated(nbytes: int) -> int:
    """Weights of so many bytes that together pass the L2 cache."""
    return max(2, -(-ROTATED_BYTES // nbytes))


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """Both are rounded to bfloat16, which alone makes about 2e-3."""
    a, b = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


if __name__ == "__main__":
    main()
