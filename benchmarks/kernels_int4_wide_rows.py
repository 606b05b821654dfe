"""The INT4 matrix product beside cuBLAS with bfloat16 weights at many numbers of rows: is it a tenth slower anywhere?

    python -m benchmarks.kernels_int4_wide_rows                       # the four matrices of an 8B model
    python -m benchmarks.kernels_int4_wide_rows --matrices o qkv --rows 96 256

Microseconds of all kernels of `int4_matmul` as it is called, by CUPTI: with its pass over x and the addition of its
slices, or unpacking and cuBLAS. Weights and x are rotated past the L2 cache. The last line names what is slower.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness import RESULTS, Recorder, run_each
from benchmarks.kernels_int4 import BF16, ROTATED_BYTES, Case, random_weight, weights_of
from benchmarks.kernels_int4_crossover import BLAS_ONLY, MATRICES, blas, each, microseconds, relative_error, tokens_of
from pallas_kernels.int4_matmul import int4_matmul, wide_dequantize

ROWS = (
    *(256, 240, 384, 512, 432, 320, 1024, 1280, 4096, 352, 600, 768, 1536, 3072, 224, 272, 800, 96, 2048),
    *(8192, 1792, 3584, 640, 160, 128, 48, 24, 448, 2560, 144),
)
"""The most telling ones first."""
MOST = 1.10
"""Times cuBLAS' microseconds that a product may take."""
FEWEST = 6
"""So many products are one CUDA graph. Fewer are launched one by one, and where a kernel leaves multiprocessors idle
the next one's first blocks come onto them early and wait: CUPTI counts that as the next one's time, up to twice."""


def copies(rows: int, k: int, n: int) -> int:
    """Products whose weights, x and results pass the L2 cache together."""
    return max(FEWEST, -(-ROTATED_BYTES // (k * n // 2 + 2 * rows * (k + n))))


class Kernels:
    """Both products of one number of rows, compiled but not run."""

    def __init__(self, name: str, rows: int):
        self.name, self.rows = name, rows
        self.k, self.n = k, n = MATRICES[name]
        self.count = copies(rows, k, n)
        weight = jax.eval_shape(functools.partial(random_weight, case=Case(1, k, n, 0.0)), jax.random.key(0))
        x = [jax.ShapeDtypeStruct((rows, k), BF16)] * self.count
        product = functools.partial(int4_matmul, backend="mosaic")
        self.product = jax.jit(each(product)).lower(x, [weight] * self.count).compile()
        dense = [jax.ShapeDtypeStruct((n, k), BF16)] * self.count
        self.blas = jax.jit(each(blas)).lower(x, dense).compile(compiler_options=BLAS_ONLY)


def compare(recorder: Recorder, slower: list[str], future: concurrent.futures.Future, dense: list[jax.Array]) -> None:
    kernels: Kernels = future.result()
    k, n, rows, count = kernels.k, kernels.n, kernels.rows, kernels.count
    packed, some = weights_of(k, n, 128, "zero_point")[:count], dense[:count]
    xs = tokens_of(rows, k, count)
    first, *others = [kernels.product(xs, packed)[0] for _ in range(3)]
    error = relative_error(first, kernels.blas(xs, some)[0])
    if not error < 1e-2 or not all(bool(jnp.array_equal(first, other)) for other in others):
        raise AssertionError(f"{kernels.name} {rows}: wrong, or not repeatable; error {error:.1e}")
    ours, theirs = microseconds(kernels.product, xs, packed), microseconds(kernels.blas, xs, some)
    case: dict[str, object] = {"op": "int4_matmul", "part": "rows", "m": rows, "k": k, "n": n}
    recorder.record(case, {"us": (ours, "us"), "cublas_us": (theirs, "us"), "over_cublas": (ours / theirs, "")})
    if ours > MOST * theirs:
        slower.append(f"{kernels.name} {rows} ({ours:.1f} to {theirs:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="*", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=170.0, help="measure nothing after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    slower: list[str] = []
    unpack = jax.jit(each(wide_dequantize.dequantize))
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        # The most rows first, as their kernels take longest.
        cases = [(name, rows) for rows in sorted(arguments.rows, reverse=True) for name in arguments.matrices]
        kernels = {case: pool.submit(Kernels, *case) for case in cases}
        concurrent.futures.wait(kernels.values())
        print(f"{len(kernels)} numbers of rows compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def job(name: str, rows: int, dense: Callable[[], list[jax.Array]]) -> None:
        compare(recorder, slower, kernels[name, rows], dense())

    def dense_of(name: str) -> Callable[[], list[jax.Array]]:
        k, n = MATRICES[name]
        count = max(copies(rows, k, n) for rows in arguments.rows)
        return functools.cache(lambda: unpack(weights_of(k, n, 128, "zero_point")[:count]))

    dense = {name: dense_of(name) for name in arguments.matrices}
    jobs = [
        (f"{name} {rows}", functools.partial(job, name, rows, dense[name]))
        for rows in arguments.rows
        for name in arguments.matrices
    ]
    run_each(jobs, started, arguments.seconds)
    print("slower by more than a tenth: " + ("; ".join(slower) or "none"), flush=True)


if __name__ == "__main__":
    main()
