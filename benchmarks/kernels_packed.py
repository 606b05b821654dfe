"""Checks and times products with code books and with codes of 8 bits, beside INT4, kernel by kernel by CUPTI.

    python -m benchmarks.kernels_packed             # about 30 s

TB/s counts the codes only: 8-bit codes should come within 25 % of INT4's. Every case prints its relative error against
a float32 product with the weight in bfloat16.
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
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder, run_each
from benchmarks.kernels_int4 import BF16, ROTATED_BYTES, UP
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, dequantize, int4_matmul, is_whole

MAGNITUDES = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
BOOKS = {
    "FP4": 0.0123 * np.concatenate([MAGNITUDES, -MAGNITUDES]),
    "NF4": np.linspace(-1, 1, 16) ** 3,  # numbers that are no multiples of one of them
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A weight's bits, group size, dtype of its scales; "", "zero_point" or the name of a book; see `PackedInt4`."""

    bits: int
    group: int
    scales: jnp.dtype
    beside: str = ""

    def weight(self, seed: int, k: int, n: int) -> Packed:
        """A random one in the kernel's layout: any bits are valid codes."""
        keys = jax.random.split(jax.random.key(seed), 3)
        words = jax.lax.bitcast_convert_type(
            jax.random.bits(keys[0], (n // 16, k // 64, 32 * self.bits), jnp.uint32), jnp.int32
        )
        shape = (n // 16, k // self.group, 16)
        scales = jax.random.uniform(keys[1], shape, jnp.float32, 0.5, 1.5).astype(self.scales)
        offsets = None
        if self.beside == "zero_point":
            offsets = jax.random.randint(keys[2], shape, 0, 2**self.bits, jnp.int32).astype(jnp.uint8)
        if self.bits == 8:
            return PackedInt8(words, scales, offsets, (n, k), self.group, "mosaic")
        book = BOOKS.get(self.beside)
        whole, book = is_whole(book), None if book is None else jnp.asarray(book, jnp.float32)
        return PackedInt4(words, scales, offsets, book, (n, k), self.group, "mosaic", whole)


KINDS = {
    "INT4": Kind(4, 128, BF16, "zero_point"),
    "GPTQ-8": Kind(8, 128, BF16, "zero_point"),
    "Q8_0": Kind(8, 32, jnp.dtype(jnp.float16)),
    "Q6_K": Kind(8, 16, jnp.dtype(jnp.float32)),
    "MXFP4": Kind(4, 32, BF16, "FP4"),
    "NVFP4": Kind(4, 16, BF16, "FP4"),
    "NF4": Kind(4, 64, jnp.dtype(jnp.float32), "NF4"),
}
CASES = [
    *((name, 1) for name in ("MXFP4", "NVFP4", "INT4", "NF4", "Q6_K")),
    *((name, 8) for name in ("MXFP4", "NVFP4", "GPTQ-8", "Q8_0", "NF4")),
    *((name, rows) for rows in (64, 16) for name in ("MXFP4", "GPTQ-8", "Q8_0")),
]


@dataclasses.dataclass(frozen=True)
class Programs:
    """A case's compiled products of one x with a list of weights, and what the first of them should be."""

    weights: list[Packed]
    x: jax.Array
    products: jax.stages.Compiled
    expected: jax.stages.Compiled

    @classmethod
    def of(cls, name: str, rows: int) -> "Programs":
        (k, n), kind = UP, KINDS[name]
        count = max(2, -(-ROTATED_BYTES // (k * n * kind.bits // 8)))
        weights = jax.jit(lambda: [kind.weight(seed, k, n) for seed in range(count)])()
        x = jax.random.normal(jax.random.key(rows), (rows, k), BF16)

        def products(x: jax.Array, weights: list[Packed]) -> list[jax.Array]:
            return [int4_matmul(x, w, backend="mosaic", out_dtype=jnp.float32) for w in weights]

        def expected(x: jax.Array, w: Packed) -> jax.Array:
            return jnp.dot(x, dequantize(w, BF16).T, preferred_element_type=jnp.float32)

        return cls(
            weights,
            x,
            jax.jit(products).lower(x, weights).compile(),
            jax.jit(expected).lower(x, weights[0]).compile(),
        )


def run(recorder: Recorder, name: str, rows: int, programs: Programs) -> None:
    (k, n), kind = UP, KINDS[name]
    nbytes = k * n * kind.bits // 8
    x, weights = programs.x, programs.weights
    first, *others = [programs.products(x, weights)[0] for _ in range(4)]
    expected = programs.expected(x, weights[0])
    same = all(bool(jnp.array_equal(first, other)) for other in others)
    error = float(jnp.linalg.norm(first - expected) / jnp.linalg.norm(expected))
    _, timings = profiler.measure(programs.products, aggregate=False, iterations=6)(x, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    times = [t * 1e3 for iteration in timings[1:] for kernel, t in iteration if "int4_matmul" in kernel]
    rest = sum(t * 1e3 for iteration in timings[1:] for _, t in iteration) / len(times) - statistics.mean(times)
    us = statistics.median(times)
    print(f"{name} {rows} rows: error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'} rest {rest:.1f} us")
    if not same or not error < 1e-2:
        raise AssertionError(f"{name} {rows} rows: error {error:.1e}, repeatable: {same}, {us:.2f} us")
    case: dict[str, object] = {"op": "int4_matmul", "weights": name, "m": rows, "k": k, "n": n}
    recorder.record(case, {"us": (us, "us"), "tb_per_s": (nbytes / us / 1e6, "TB/s")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = [pool.submit(Programs.of, name, rows) for name, rows in CASES]
        concurrent.futures.wait(programs)
    print(f"{len(programs)} cases compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def job(name: str, rows: int, program: concurrent.futures.Future[Programs]) -> None:
        run(recorder, name, rows, program.result())

    jobs = [
        (f"{case[0]} {case[1]} rows", functools.partial(job, *case, program))
        for case, program in zip(CASES, programs, strict=True)
    ]
    run_each(jobs, started, arguments.seconds)


if __name__ == "__main__":
    main()
