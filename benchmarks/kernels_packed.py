"""Checks and times products with code books and with codes of 8 bits, beside INT4, kernel by kernel by CUPTI.

    python -m benchmarks.kernels_packed             # about 30 s

TB/s counts the codes only: 8-bit codes should come within 25 % of INT4's. Every case prints its relative error against
a float32 product with the weight in bfloat16.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, ROTATED_BYTES, UP, timed
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, dequantize, int4_matmul

BOOK = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A weight's bits, group size, dtype of its scales and what it has beside them: "", "zero_point" or "book"."""

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
        book = jnp.asarray(BOOK, jnp.float32) * np.float32(0.0123) if self.beside == "book" else None
        return PackedInt4(words, scales, offsets, book, (n, k), self.group, "mosaic")


KINDS = {
    "INT4": Kind(4, 128, BF16, "zero_point"),
    "GPTQ-8": Kind(8, 128, BF16, "zero_point"),
    "Q8_0": Kind(8, 32, jnp.dtype(jnp.float16)),
    "Q6_K": Kind(8, 16, jnp.dtype(jnp.float32)),
    "MXFP4": Kind(4, 32, BF16, "book"),
    "NVFP4": Kind(4, 16, BF16, "book"),
}
CASES = [
    *((name, 1) for name in ("GPTQ-8", "Q8_0", "MXFP4", "NVFP4", "INT4", "Q6_K")),
    *((name, rows) for rows in (8, 64, 16) for name in ("GPTQ-8", "Q8_0", "NVFP4")),
]


def run(recorder: Recorder, name: str, rows: int) -> None:
    (k, n), kind = UP, KINDS[name]
    nbytes = k * n * kind.bits // 8
    make = jax.jit(lambda seeds: [kind.weight(seed, k, n) for seed in seeds])
    weights = make(list(range(max(2, -(-ROTATED_BYTES // nbytes)))))
    x = jax.random.normal(jax.random.key(rows), (rows, k), BF16)

    @jax.jit
    def reference(x: jax.Array, w: Packed) -> jax.Array:
        return jnp.dot(x, dequantize(w, BF16).T, preferred_element_type=jnp.float32)

    @jax.jit  # traced and lowered once, however often the timed function calls it
    def product(x: jax.Array, w: Packed) -> jax.Array:
        return int4_matmul(x, w, backend="mosaic", out_dtype=jnp.float32)

    first, expected = product(x, weights[0]), reference(x, weights[0])
    same = all(bool(jnp.array_equal(first, product(x, weights[0]))) for _ in range(3))
    error = float(jnp.linalg.norm(first - expected) / jnp.linalg.norm(expected))
    times, rest = timed(lambda x, weights: [product(x, w) for w in weights], x, weights)
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
    started, recorder, failed = time.perf_counter(), Recorder("kernels", arguments.results), []
    for name, rows in CASES:
        if time.perf_counter() - started > arguments.seconds:
            print(f"{name} {rows} rows: left out, the time is up", flush=True)
            continue
        try:
            run(recorder, name, rows)
        except AssertionError as error:  # one wrong case must not cost the others
            failed.append(str(error))
            print(error, flush=True)
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
