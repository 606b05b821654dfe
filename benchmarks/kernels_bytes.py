"""Checks and times products with weights of a byte a code: the kernel beside XLA's ways, by CUPTI.

    python -m benchmarks.kernels_bytes
    python -m benchmarks.kernels_bytes --weights int8 fp8     # these alone

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
from jaxinfer.program import CUBLAS
from pallas_kernels.byte_matmul import byte_matmul, decode_blocks
from pallas_kernels.byte_matmul.api import Backend

ROTATED_BYTES = 200e6
UP, OUT, DOWN, HEAD = (4096, 14336), (4096, 4096), (14336, 4096), (1024, 151936)
BACKENDS: tuple[Backend, Backend] = ("mosaic", "reference")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of codes, and outputs and inputs that share a scale; None: one an output."""

    dtype: jnp.dtype
    block: tuple[int, int] | None = None


KINDS = {
    "fp8 128 x 128": Kind(jnp.dtype(jnp.float8_e4m3fn), (128, 128)),
    "fp8": Kind(jnp.dtype(jnp.float8_e4m3fn)),
    "int8": Kind(jnp.dtype(jnp.int8)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    weights: str
    rows: int
    shape: tuple[int, int]
    backend: Backend


CASES = [
    *(Case("int8", rows, HEAD, "reference") for rows in (1, 2)),
    *(Case("int8", rows, UP, backend) for rows in (8, 12, 16, 24, 32) for backend in BACKENDS),
    *(Case("int8", 16, shape, backend) for shape in (OUT, DOWN) for backend in BACKENDS),
    *(Case("fp8", 16, UP, backend) for backend in BACKENDS),
    *(Case("fp8 128 x 128", rows, UP, "mosaic") for rows in (1, 2, 8, 16, 32, 64)),
    *(Case("fp8 128 x 128", 8, shape, backend) for shape in (UP, DOWN) for backend in BACKENDS[shape == UP :]),
]

type Weight = tuple[jax.Array, jax.Array]
"""Codes and scales."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """A case's compiled products of one x with a list of weights, and what the first of them should be."""

    x: jax.Array
    weights: list[Weight]
    products: jax.stages.Compiled
    expected: jax.stages.Compiled

    @classmethod
    def of(cls, case: Case) -> "Programs":
        (k, n), kind = case.shape, KINDS[case.weights]
        x = jax.random.normal(jax.random.key(case.rows), (case.rows, k), jnp.bfloat16)
        weights = weights_of(case.weights, k, n)

        def products(x: jax.Array, weights: list[Weight]) -> list[jax.Array]:
            options = {"block": kind.block, "out_dtype": jnp.float32, "backend": case.backend}
            return [byte_matmul(x, codes, scales, **options) for codes, scales in weights]

        def expected(x: jax.Array, weight: Weight) -> jax.Array:
            codes, scales = weight
            if kind.block is None:
                values = codes.astype(jnp.float32) * scales[:, None]
            else:
                values = decode_blocks(codes, scales, kind.block, jnp.float32)
            return jnp.dot(x.astype(jnp.float32), values.T, precision="highest")

        # XLA chooses its products by timing, as it does for a model of such weights; nothing else here is worth that.
        options = None if case.backend == "reference" else CUBLAS
        compiled = jax.jit(products).lower(x, weights).compile(options)
        return cls(x, weights, compiled, jax.jit(expected).lower(x, weights[0]).compile(CUBLAS))


@functools.cache
def weights_of(name: str, k: int, n: int) -> list[Weight]:
    """Random ones."""
    kind = KINDS[name]
    shape = (n,) if kind.block is None else (n // kind.block[0], k // kind.block[1])

    def one(seed: int) -> Weight:
        keys = jax.random.split(jax.random.key(seed))
        codes = jnp.clip(jax.random.normal(keys[0], (n, k), jnp.bfloat16) * 40, -127, 127)
        return codes.astype(kind.dtype), jax.random.uniform(keys[1], shape)

    count = max(2, -(-int(ROTATED_BYTES) // (k * n)))
    return jax.jit(lambda: [one(seed) for seed in range(count)])()


def run(recorder: Recorder, case: Case, programs: Programs) -> None:
    k, n = case.shape
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
    print(f"error {error:.1e}, {kernels:.1f} kernels a product{'' if same else ', NOT REPEATABLE'}")
    described = {"op": "byte_matmul", "weights": case.weights, "backend": case.backend, "m": case.rows, "k": k, "n": n}
    recorder.record(described, {"us": (us, "us"), "tb_per_s": (n * k / us / 1e6, "TB/s")})
    if not error < (1e-2 if case.backend == "reference" else 1e-5) or (not same and case.backend == "mosaic"):
        raise AssertionError(f"{case}: error {error:.1e}, repeatable: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    parser.add_argument("--weights", nargs="*", choices=KINDS, default=list(KINDS), help="kinds of weights")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.weights in arguments.weights]
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    for name, shape in dict.fromkeys((case.weights, case.shape) for case in cases):
        jax.block_until_ready(weights_of(name, *shape))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # more would disturb XLA's own timing
        programs = {case: pool.submit(Programs.of, case) for case in cases}
        concurrent.futures.wait(programs.values())
    print(f"{len(programs)} cases compiled in {time.perf_counter() - started:.0f} s", flush=True)
    jobs = [(str(case), functools.partial(run_one, recorder, case, future)) for case, future in programs.items()]
    run_each(jobs, started, arguments.seconds)


def run_one(recorder: Recorder, case: Case, programs: concurrent.futures.Future[Programs]) -> None:
    run(recorder, case, programs.result())


if __name__ == "__main__":
    main()
