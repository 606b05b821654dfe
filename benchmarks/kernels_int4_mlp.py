"""Checks and times parts of an 8B model's layer with INT4 weights for many rows, all their kernels by CUPTI.

    python -m benchmarks.kernels_int4_mlp                # the gated block, 16 to 4096 rows, about 30 s
    python -m benchmarks.kernels_int4_mlp --layer        # a layer's products, 80 to 512 rows, about 25 s
    python -m benchmarks.kernels_int4_mlp --model qwen3-8b --rows 80    # and under the schedules of TRIED

The gated block, with its norm and the residual, in three ways: kernels for the norm, for the first product with silu
and multiplication, and for the second one ("gated"), the two products with XLA's kernels around them ("apart"), and
cuBLAS with bfloat16 weights. All products of a layer, from the output projection to the next layer's qkv: slices and
residuals added by the norms' kernels ("pending"), by XLA's ("added"), and cuBLAS. Weights are rotated past the L2
cache. Every way prints its error against cuBLAS, and whether its bits repeat.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16
from benchmarks.kernels_int4_wide import BLAS_ONLY, RUNS, described, times
from jaxinfer.layers.norm import rms_norm
from pallas_kernels.int4_matmul import (
    Packed,
    dequantize,
    int4_gated_mlp,
    int4_gated_mlp_of_sum,
    int4_matmul,
    int4_matmul_fused,
    int4_matmul_of_sum,
    int4_slices,
    wide,
    wide_tuning,
)
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule

ROWS, LAYER_ROWS = (16, 256, 64, 4096), (80, 128, 256, 512)
MODELS = {
    "8b": ("gate_up", "down", "o", "qkv"),
    "qwen3-8b": ("gate_up_12288", "down_12288", "o", "qkv"),
    "qwen3-0.6b": ("gate_up_3072", "down_3072"),
}
TRIED = {
    ("qwen3-8b", 80): [
        WideSchedule(80, tiles=2),
        WideSchedule(80, warpgroups=3, cluster=2),
    ],
    ("qwen3-0.6b", 32): [WideSchedule(32, tiles=2), WideSchedule(32, warpgroups=1)],
}
"""Schedules of gate and up, by model and rows."""
BLOCKS = {"8b": 4, "qwen3-8b": 4, "qwen3-0.6b": 40}
"""With weights of their own: at least 200 MB."""
PREDICTED = {16: 46.0, 64: 54.5, 128: 73.0, 144: 80.0, 192: 101.0, 256: 133.0, 512: 252.0, 1024: 449.0, 4096: 1780.0}
LAYER_PREDICTED = {80: 80.4, 128: 105.4, 256: 179.0, 512: 321.0}
"""Microseconds of "gated", and of "pending", on an H200, before their first runs."""
EPS = 1e-5


def gated(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed) -> jax.Array:
    return x + int4_gated_mlp(x, gate_up, down, norm=norm, norm_eps=EPS, backend="mosaic")


def gated_under(schedule: WideSchedule, x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed) -> jax.Array:
    """`gated` under another schedule of its first product."""
    second = wide_tuning.wide_schedule(len(x), down)
    order = WidePlan.of(len(x), down, second).token_order
    plan = dataclasses.replace(WidePlan.of(len(x), gate_up, schedule), gated=True, result_order=order)
    first = wide_tuning.fitted(plan, schedule)
    assert first is not None
    schedules = (first.schedule, second)
    slices, _ = wide.gated_mlp(x, gate_up, down, norm, schedules=schedules, norm_eps=EPS)
    return x + wide.added(slices, x.dtype)


def apart(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed) -> jax.Array:
    both = int4_matmul(rms_norm(x, norm, EPS), gate_up, backend="mosaic")
    return x + int4_matmul(hidden(both), down, backend="mosaic")


def cublas(x: jax.Array, norm: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    both = by_cublas(rms_norm(x, norm, EPS), gate_up)
    return x + by_cublas(hidden(both), down)


def pending(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed, o: Packed, qkv: Packed) -> jax.Array:
    """x is what attention made of the layer's input, too."""
    options = {"norm": norm, "norm_eps": EPS, "backend": "mosaic"}
    slices, x = int4_gated_mlp_of_sum(x, int4_slices(x, o, backend="mosaic"), gate_up, down, **options)
    return int4_matmul_of_sum(x, slices, qkv, **options)[0]


def added(x: jax.Array, norm: jax.Array, gate_up: Packed, down: Packed, o: Packed, qkv: Packed) -> jax.Array:
    x = gated(x + int4_matmul(x, o, backend="mosaic"), norm, gate_up, down)
    return int4_matmul_fused(x, qkv, norm=norm, norm_eps=EPS, backend="mosaic")


def cublas_layer(
    x: jax.Array, norm: jax.Array, gate_up: jax.Array, down: jax.Array, o: jax.Array, qkv: jax.Array
) -> jax.Array:
    x = cublas(x + by_cublas(x, o), norm, gate_up, down)
    return by_cublas(rms_norm(x, norm, EPS), qkv)


def by_cublas(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def hidden(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(both.dtype)


def blocks(block: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """A block for every row of tokens and its weights."""
    return lambda xs, norm, weights: [block(x, norm, *some) for x, some in zip(xs, weights, strict=True)]


def random_weights(seed: jax.Array, shapes: Sequence[str]) -> list[Packed]:
    """Of standard deviation 0.02, as an untrained model's."""
    weights: list[Packed] = []
    for shape, key in zip(shapes, jax.random.split(jax.random.key(seed), len(shapes)), strict=True):
        weight = jax.tree.map(lambda a: a, described(shape))
        keys = jax.random.split(key, 3)
        words = jax.random.bits(keys[0], weight.codes.shape, jnp.uint32)
        scales = (0.02 / 4.8) * jax.random.uniform(keys[1], weight.scales.shape, jnp.float32, 0.5, 1.5)
        offsets = jax.random.randint(keys[2], weight.offsets.shape, 6, 10, jnp.int32).astype(jnp.uint8)
        codes = jax.lax.bitcast_convert_type(words, jnp.int32)
        arrays = {"codes": codes, "scales": scales.astype(BF16), "offsets": offsets}
        weights.append(weight.__class__(**(vars(weight) | arrays)))
    return weights


def compiled(way: Callable[..., jax.Array], rows: int, weights: Any) -> jax.stages.Compiled:
    k = weights[0][0].shape[1]
    x, norm = jax.ShapeDtypeStruct((rows, k), BF16), jax.ShapeDtypeStruct((k,), jnp.float32)
    options = BLAS_ONLY if way in (cublas, cublas_layer) else None
    return jax.jit(blocks(way)).lower([x] * len(weights), norm, weights).compile(compiler_options=options)


def microseconds(program: jax.stages.Compiled, *arrays: Any) -> dict[str, float]:
    """Of a block, by kernel."""
    found: dict[str, list[float]] = {}
    for name, us in times(program, *arrays):
        found.setdefault(name.split("_mosaic")[0][:32], []).append(us)
    return {name: sum(values) / RUNS / len(arrays[0]) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="store_true", help="all products of a layer instead of the gated block's")
    parser.add_argument("--model", choices=MODELS, default="8b", help="whose shapes")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--seconds", type=float, default=45.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    op, shapes, predicted = "gated_mlp", MODELS[arguments.model][:2], PREDICTED
    if arguments.layer:
        op, shapes, predicted = "layer_products", MODELS[arguments.model], LAYER_PREDICTED
    every = arguments.rows or (LAYER_ROWS if arguments.layer else ROWS)
    random = jax.jit(functools.partial(random_weights, shapes=shapes))
    packed = [random(seed) for seed in range(BLOCKS[arguments.model])]
    dense = jax.jit(functools.partial(jax.tree.map, dequantized, is_leaf=is_packed))(packed)
    ways: dict[str, tuple[Callable[..., jax.Array], Any]]
    ways = {"gated": (gated, packed), "apart": (apart, packed), "cublas": (cublas, dense)}
    if arguments.layer:
        ways = {"pending": (pending, packed), "added": (added, packed), "cublas": (cublas_layer, dense)}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = {
            (rows, name): pool.submit(compiled, way, rows, weights)
            for rows in every
            for name, (way, weights) in (ways | under(arguments, rows, packed)).items()
        }
    print(f"{len(programs)} programs compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for rows in every:
        if time.perf_counter() - started > arguments.seconds:
            print(f"{rows} rows: left out, the time is up", flush=True)
            continue
        k = packed[0][0].shape[1]
        x = jax.random.normal(jax.random.key(rows), (rows, k), BF16)
        norm = jnp.linspace(0.5, 1.5, k)
        xs = [jnp.roll(x, i, axis=0) for i in range(len(packed))]
        outs: dict[str, jax.Array] = {}
        for name, (_, weights) in (ways | under(arguments, rows, packed)).items():
            program = programs[rows, name].result()
            outs[name], *again = [program(xs, norm, weights)[0] for _ in range(3)]
            same = all(bool(jnp.array_equal(outs[name], other)) for other in again)
            kernels = microseconds(program, xs, norm, weights)
            total = sum(kernels.values())
            parts = ", ".join(f"{kernel} {us:.1f}" for kernel, us in sorted(kernels.items(), key=lambda item: -item[1]))
            print(f"{rows} {name}: {total:.1f} us ({parts}) {'repeatable' if same else 'NOT REPEATABLE'}", flush=True)
            case: dict[str, object] = {"op": op, "m": rows, "way": name}
            if arguments.model != "8b":
                case["model"] = arguments.model
            recorder.record(case, {"us": (total, "us")})
        errors = [f"{name} {error(out, outs['cublas']):.1e}" for name, out in outs.items()]
        print(
            f"{rows} rows: predicted {predicted.get(rows)} us, errors against cuBLAS: {', '.join(errors)}", flush=True
        )
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)


def under(arguments: argparse.Namespace, rows: int, weights: Any) -> dict[str, tuple[Callable[..., jax.Array], Any]]:
    """The ways of TRIED."""
    schedules = [] if arguments.layer else TRIED.get((arguments.model, rows), [])
    return {
        f"gated {s.tokens}t{s.warpgroups}x{s.tiles} {s.cluster}c": (
            functools.partial(gated_under, s),
            weights,
        )
        for s in schedules
    }


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def dequantized(weight: Packed) -> jax.Array:
    return dequantize(weight, BF16)


def error(out: jax.Array, expected: jax.Array) -> float:
    a, b = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


if __name__ == "__main__":
    main()
