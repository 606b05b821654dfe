"""Checks and times products with 8-bit floats in blocks of 128 x 128: the kernel beside XLA's ways, by CUPTI.

    python -m benchmarks.kernels_float8             # about 25 s

Weights are rotated past the L2 cache; microseconds are of all kernels of a product, TB/s counts the codes only. Every
case prints its relative error against a float32 product with the decoded weight.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder, run_each
from pallas_kernels.float8_matmul import decode_blocks, float8_matmul
from pallas_kernels.float8_matmul.api import Backend

BLOCK = (128, 128)
ROTATED_BYTES = 200e6
UP, OUT, DOWN = (4096, 14336), (4096, 4096), (14336, 4096)
CASES: list[tuple[Backend, int, tuple[int, int]]] = [
    *((backend, rows, UP) for rows in (1, 2, 8, 16, 32, 64) for backend in ("mosaic", "reference")),
    *((backend, rows, shape) for shape in (OUT, DOWN) for rows in (1, 8) for backend in ("mosaic", "reference")),
]


@dataclasses.dataclass(frozen=True)
class Programs:
    """A case's compiled products of one x with a list of weights, and what the first of them should be."""

    x: jax.Array
    weights: list[tuple[jax.Array, jax.Array]]
    products: jax.stages.Compiled
    expected: jax.stages.Compiled

    @classmethod
    def of(cls, backend: Backend, rows: int, shape: tuple[int, int]) -> "Programs":
        k, n = shape
        x = jax.random.normal(jax.random.key(rows), (rows, k), jnp.bfloat16)
        weights = weights_of(k, n)

        def products(x: jax.Array, weights: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
            options = {"block": BLOCK, "out_dtype": jnp.float32, "backend": backend}
            return [float8_matmul(x, codes, scales, **options) for codes, scales in weights]

        def expected(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
            values = decode_blocks(*weight, BLOCK, jnp.float32)
            return jnp.dot(x.astype(jnp.float32), values.T, precision="highest")

        compiled = [jax.jit(products).lower(x, weights).compile(), jax.jit(expected).lower(x, weights[0]).compile()]
        return cls(x, weights, *compiled)


@functools.cache
def weights_of(k: int, n: int) -> list[tuple[jax.Array, jax.Array]]:
    """Random ones: codes and scales."""

    def one(seed: int) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(seed))
        codes = jax.random.normal(keys[0], (n, k), jnp.bfloat16) * 60
        return codes.astype(jnp.float8_e4m3fn), jax.random.uniform(keys[1], (n // BLOCK[0], k // BLOCK[1]))

    count = max(2, -(-int(ROTATED_BYTES) // (k * n)))
    return jax.jit(lambda: [one(seed) for seed in range(count)])()


def run(recorder: Recorder, backend: Backend, rows: int, shape: tuple[int, int], programs: Programs) -> None:
    k, n = shape
    x, weights = programs.x, programs.weights
    first, *others = [programs.products(x, weights)[0] for _ in range(4)]
    expected = programs.expected(x, weights[0])
    same = all(bool(jnp.array_equal(first, other)) for other in others)
    error = float(jnp.linalg.norm(first - expected) / jnp.linalg.norm(expected))
    _, timings = profiler.measure(programs.products, aggregate=False, iterations=6)(x, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    us = statistics.median(sum(t * 1e3 for _, t in iteration) for iteration in timings[1:]) / len(weights)
    kernels = len(timings[-1]) / len(weights)
    print(f"{backend} {rows} rows: error {error:.1e}, {kernels:.0f} kernels{'' if same else ', NOT REPEATABLE'}")
    case: dict[str, object] = {"op": "float8_matmul", "backend": backend, "m": rows, "k": k, "n": n}
    recorder.record(case, {"us": (us, "us"), "tb_per_s": (n * k / us / 1e6, "TB/s")})
    if not error < (1e-2 if backend == "reference" else 1e-5) or (not same and backend == "mosaic"):
        raise AssertionError(f"{backend} {rows} rows: error {error:.1e}, repeatable: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    for shape in (UP, OUT, DOWN):
        weights_of(*shape)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = {case: pool.submit(Programs.of, *case) for case in CASES}
        concurrent.futures.wait(programs.values())
    print(f"{len(programs)} cases compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def job(case: tuple[Backend, int, tuple[int, int]]) -> None:
        run(recorder, *case, programs[case].result())

    jobs = [(str(case), functools.partial(job, case)) for case in CASES]
    run_each(jobs, started, arguments.seconds)


if __name__ == "__main__":
    main()
