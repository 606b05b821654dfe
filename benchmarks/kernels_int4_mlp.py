"""Checks and times the gated block of an 8B model with INT4 weights for many rows, all its kernels by CUPTI.

    python -m benchmarks.kernels_int4_mlp                # 16 to 4096 rows, about 30 s

Three ways, each with its norm and the residual: kernels for the norm, for the first product with silu and
multiplication, and for the second one ("gated"), the two products with XLA's kernels around them ("apart"), and cuBLAS
with bfloat16 weights. Weights are rotated past the L2 cache. Every way prints its error against cuBLAS, and whether its
bits repeat.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16
from benchmarks.kernels_int4_wide import BLAS_ONLY, RUNS, described, times
from jaxinfer.layers.norm import rms_norm
from pallas_kernels.int4_matmul import Packed, dequantize, int4_gated_mlp, int4_matmul

ROWS = (16, 256, 64, 4096)
BLOCKS = 4
"""With weights of their own: 350 MB."""
PREDICTED = {16: 46.0, 64: 54.5, 128: 73.0, 256: 133.0, 512: 252.0, 1024: 449.0, 4096: 1780.0}
"""Microseconds of "gated" on an H200, before its first run."""
EPS = 1e-5


def gated(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed) -> jax.Array:
    return x + int4_gated_mlp(x, gate_up, down, norm=norm, norm_eps=EPS, backend="mosaic")


def apart(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed) -> jax.Array:
    both = int4_matmul(rms_norm(x, norm, EPS), gate_up, backend="mosaic")
    return x + int4_matmul(hidden(both), down, backend="mosaic")


def cublas(x: jax.Array, norm: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    contract = (((1,), (1,)), ((), ()))
    both = jax.lax.dot_general(rms_norm(x, norm, EPS), gate_up, contract)
    return x + jax.lax.dot_general(hidden(both), down, contract)


def hidden(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(both.dtype)


def blocks(block: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """A block for every row of tokens and pair of weights."""
    return lambda xs, norm, weights: [block(x, norm, *pair) for x, pair in zip(xs, weights, strict=True)]


def random_pair(seed: jax.Array) -> tuple[Packed, Packed]:
    """Of standard deviation 0.02, as an untrained model's."""
    pair = []
    for shape, key in zip(("gate_up", "down"), jax.random.split(jax.random.key(seed)), strict=True):
        weight = jax.tree.map(lambda a: a, described(shape))
        keys = jax.random.split(key, 3)
        words = jax.random.bits(keys[0], weight.codes.shape, jnp.uint32)
        scales = (0.02 / 4.8) * jax.random.uniform(keys[1], weight.scales.shape, jnp.float32, 0.5, 1.5)
        offsets = jax.random.randint(keys[2], weight.offsets.shape, 6, 10, jnp.int32).astype(jnp.uint8)
        codes = jax.lax.bitcast_convert_type(words, jnp.int32)
        arrays = {"codes": codes, "scales": scales.astype(BF16), "offsets": offsets}
        pair.append(weight.__class__(**(vars(weight) | arrays)))
    return pair[0], pair[1]


def compiled(way: Callable[..., jax.Array], rows: int, weights: Any) -> jax.stages.Compiled:
    x, norm = jax.ShapeDtypeStruct((rows, 4096), BF16), jax.ShapeDtypeStruct((4096,), jnp.float32)
    options = BLAS_ONLY if way is cublas else None
    return jax.jit(blocks(way)).lower([x] * BLOCKS, norm, weights).compile(compiler_options=options)


def microseconds(program: jax.stages.Compiled, *arrays: Any) -> dict[str, float]:
    """Of a block, by kernel."""
    found: dict[str, list[float]] = {}
    for name, us in times(program, *arrays):
        found.setdefault(name.split("_mosaic")[0][:32], []).append(us)
    return {name: sum(values) / RUNS / BLOCKS for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--seconds", type=float, default=45.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    packed = [jax.jit(random_pair)(seed) for seed in range(BLOCKS)]
    dense = jax.jit(functools.partial(jax.tree.map, dequantized, is_leaf=is_packed))(packed)
    ways = {"gated": (gated, packed), "apart": (apart, packed), "cublas": (cublas, dense)}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = {
            (rows, name): pool.submit(compiled, way, rows, weights)
            for rows in arguments.rows
            for name, (way, weights) in ways.items()
        }
    print(f"{len(programs)} programs compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for rows in arguments.rows:
        if time.perf_counter() - started > arguments.seconds:
            print(f"{rows} rows: left out, the time is up", flush=True)
            continue
        x = jax.random.normal(jax.random.key(rows), (rows, 4096), BF16)
        norm = jnp.linspace(0.5, 1.5, 4096)
        xs = [jnp.roll(x, i, axis=0) for i in range(BLOCKS)]
        outs: dict[str, jax.Array] = {}
        for name, (_, weights) in ways.items():
            program = programs[rows, name].result()
            outs[name], *again = [program(xs, norm, weights)[0] for _ in range(3)]
            same = all(bool(jnp.array_equal(outs[name], other)) for other in again)
            kernels = microseconds(program, xs, norm, weights)
            total = sum(kernels.values())
            parts = ", ".join(f"{kernel} {us:.1f}" for kernel, us in sorted(kernels.items(), key=lambda item: -item[1]))
            print(f"{rows} {name}: {total:.1f} us ({parts}) {'repeatable' if same else 'NOT REPEATABLE'}", flush=True)
            case: dict[str, object] = {"op": "gated_mlp", "m": rows, "way": name}
            recorder.record(case, {"us": (total, "us")})
        print(
            f"{rows} rows: predicted {PREDICTED.get(rows)} us, errors against cuBLAS: gated "
            f"{error(outs['gated'], outs['cublas']):.1e}, apart {error(outs['apart'], outs['cublas']):.1e}",
            flush=True,
        )
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def dequantized(weight: Packed) -> jax.Array:
    return dequantize(weight, BF16)


def error(out: jax.Array, expected: jax.Array) -> float:
    a, b = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


if __name__ == "__main__":
    main()
