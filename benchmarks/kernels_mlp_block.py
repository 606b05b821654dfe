"""A small model's feed-forward block for few rows: norm, gate and up, silu, down.

    python -m benchmarks.kernels_mlp_block              # a 0.6B draft's at 1 and at 2 rows, every way
    python -m benchmarks.kernels_mlp_block --rows 1

Blocks of 16 layers with weights of their own (75 MB) one behind the other, in a loop on the device: by the host's clock
microseconds a block, what lies between the kernels included, and each kernel's own time by CUPTI. Beforehand one block
is compared with float32, and a loop's steps must have the same bits. Then the product behind it, qkv, of x and of x and
slices, by CUPTI.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, Case, random_weight, timed
from pallas_kernels.int4_matmul import PackedInt4, dequantize, gated_once, mosaic, once_of_sum, tuning
from pallas_kernels.int4_matmul.plan import Fusion

HIDDEN, INTERMEDIATE, LAYERS, STEPS, CALLS = 1024, 3072, 16, 24, 6
EPS = 1e-6

type Layer = tuple[PackedInt4, PackedInt4, jax.Array]
"""Gate and up, down, the norm's weights."""
type Stream = tuple[jax.Array, jax.Array | None]
"""x, and slices that are to be added to it."""


def apart(stream: Stream, layer: Layer) -> Stream:
    """A kernel for each product; the second adds the residual."""
    (x, _), (gate_up, down, norm) = stream, layer
    gated, residual = Fusion(norm_eps=EPS, gated=True), Fusion(residual=True)
    options: dict[str, Any] = {"out_dtype": BF16}
    schedule = tuning.plan_for(len(x), gate_up, fusion=gated).schedule
    hidden = mosaic.int4_matmul(x, gate_up, norm, schedule=schedule, fusion=gated, **options)
    schedule = tuning.plan_for(len(x), down, fusion=residual).schedule
    return mosaic.int4_matmul(hidden, down, residual=x, schedule=schedule, fusion=residual, **options), None


def together(clusters: int, cluster: int, settled: bool = False) -> Callable[[Stream, Layer], Stream]:
    """One kernel; `settled`: XLA adds its slices."""

    def block(stream: Stream, layer: Layer) -> Stream:
        (x, partial), (gate_up, down, norm) = stream, layer
        options = {"clusters": clusters, "cluster": cluster, "norm_eps": EPS}
        out, y = gated_once.gated_mlp(x, partial, gate_up, down, norm, **options)
        return (settle((y, out)), None) if settled else (y, out)

    return block


def settle(stream: Stream) -> jax.Array:
    x, partial = stream
    return x if partial is None else (x.astype(jnp.float32) + partial.sum(0)).astype(BF16)


WAYS: dict[str, Callable[[Stream, Layer], Stream]] = {
    "a kernel a product": apart,
    "16 clusters of 8": together(16, 8),
    "8 clusters of 8": together(8, 8),
    "16 clusters of 4": together(16, 4),
    "16 clusters of 8, added by XLA": together(16, 8, settled=True),
}
PREDICTED = {
    (1, "a kernel a product"): 7.4,
    (1, "16 clusters of 8"): 5.0,
    (1, "8 clusters of 8"): 5.4,
    (1, "16 clusters of 4"): 5.6,
    (1, "16 clusters of 8, added by XLA"): 6.9,
    (2, "a kernel a product"): 7.8,
    (2, "16 clusters of 8"): 5.3,
}
"""Microseconds a block, with what lies between kernels."""


def random_layer(seed: jax.Array) -> Layer:
    """Scales are so small that gates are in the range where they do something."""
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = []
    for key, (inputs, outputs) in zip(keys, ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)), strict=False):
        weight = random_weight(key, Case(1, inputs, outputs, 0))
        weights.append(dataclasses.replace(weight, scales=weight.scales * jnp.asarray(0.003, weight.scales.dtype)))
    return weights[0], weights[1], jax.random.uniform(keys[2], (HIDDEN,), jnp.float32, 0.5, 1.5)


def reference(stream: Stream, layer: Layer) -> jax.Array:
    """What the block adds to x, in float32."""
    gate_up, down, norm = layer
    x = settle(stream).astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + jnp.float32(EPS))
    gate, up = jnp.split(jnp.dot(x * root * norm[None], dequantize(gate_up).T, precision="highest"), 2, axis=1)
    return jnp.dot(jax.nn.silu(gate) * up, dequantize(down).T, precision="highest")


def error_of(way: str, rows: int, layer: Layer) -> float:
    """Of what one block adds, relative; the memory that it writes to held NaN before."""
    keys = jax.random.split(jax.random.key(7), 2)
    x = jax.random.normal(keys[0], (rows, HIDDEN), BF16)
    slices = None if way == "a kernel a product" or "XLA" in way else jax.random.normal(keys[1], (8, rows, HIDDEN))
    block = jax.jit(lambda stream, layer: settle(WAYS[way](stream, layer)).astype(jnp.float32))
    jax.block_until_ready([jnp.full((1 << 16,), jnp.nan) for _ in range(32)])
    got = block((x, slices), layer) - settle((x, slices)).astype(jnp.float32)
    want = reference((x, slices), layer)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def program(way: str) -> Any:
    """jit of (x [rows, hidden], layers) -> x behind the last layer, of every step."""

    def step(carry: jax.Array, layers: list[Layer]) -> tuple[jax.Array, jax.Array]:
        stream: Stream = (carry, None)
        for layer in layers:
            stream = WAYS[way](stream, layer)
        out = settle(stream)
        # Every step begins with the same x, and waits for the one before.
        return jnp.where(jnp.isnan(out), out, carry), out

    return jax.jit(lambda x, layers: lax.scan(lambda carry, _: step(carry, layers), x, None, length=STEPS)[1])


def measure(recorder: Recorder, way: str, rows: int, function: Any, layers: list[Layer]) -> jax.Array:
    x = jax.random.normal(jax.random.key(5), (rows, HIDDEN), BF16)
    outs, times = jax.block_until_ready(function(x, layers)), []
    same = bool((outs == outs[:1]).all())  # false where something is not a number, too
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(x, layers))
        times.append((time.perf_counter() - started) / STEPS / LAYERS * 1e6)
    print(
        f"predicted {PREDICTED.get((rows, way), 'nothing')} us, best {min(times):.2f}, "
        f"error of a block {error_of(way, rows, layers[0]):.1e}, {'same bits' if same else 'OTHER BITS'}"
    )
    case: dict[str, object] = {"op": "int4 mlp block", "m": rows, "way": way, "hidden": HIDDEN}
    recorder.record(case, {"us_per_block": (statistics.median(times), "us")})
    _, timings = profiler.measure(function, aggregate=False)(x, layers)
    by_name: dict[str, list[float]] = {}
    for i, (name, t) in enumerate(timings or []):
        key = f"{name[:24]} {i % 2}" if way == "a kernel a product" else name[:24]
        by_name.setdefault(key, []).append(t * 1e3)
    shown = [f"{name} {len(t)} of {statistics.median(t):.2f}" for name, t in by_name.items() if len(t) >= STEPS]
    print("  us:", ", ".join(shown))
    return outs[0]


QKV = 4096
PRODUCTS = {(0, 1): 2.9, (8, 4): 3.3, (16, 4): 3.4, (16, 8): 3.4}
"""Predicted microseconds of qkv at one row, by slices and blocks of a cluster."""


def measure_product(recorder: Recorder, slices: int, cluster: int, predicted: float) -> None:
    """A qkv product of x, or of x and slices, of weights past the L2 cache."""
    fusion, keys = Fusion(norm_eps=EPS), jax.random.split(jax.random.key(3), 4)
    make = jax.jit(lambda key: random_weight(key, Case(1, HIDDEN, QKV, 0)))
    weights = [make(key) for key in jax.random.split(keys[0], 2 * LAYERS)]
    x, norm = jax.random.normal(keys[1], (1, HIDDEN), BF16), jax.random.uniform(keys[2], (HIDDEN,), jnp.float32, 0.5)
    partial = jax.random.normal(keys[3], (slices, 1, HIDDEN)) if slices else None
    options: dict[str, Any] = {"schedule": tuning.plan_for(1, weights[0], fusion=fusion).schedule, "out_dtype": BF16}

    @jax.jit
    def product(w: PackedInt4, x: jax.Array, partial: jax.Array | None) -> jax.Array:
        if partial is None:
            return mosaic.int4_matmul(x, w, norm, fusion=fusion, **options)
        return once_of_sum.int4_matmul_of_sum(x, partial, w, norm, norm_eps=EPS, cluster=cluster, **options)[0]

    got = product(weights[0], x, partial)
    same = all(bool(jnp.array_equal(got, product(weights[0], x, partial))) for _ in range(20))
    y = settle((x, partial)).astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + jnp.float32(EPS))
    want = jnp.dot(y * root * norm[None], dequantize(weights[0]).T, precision="highest")
    error = float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))
    times, _ = timed(lambda x, weights, partial: [product(w, x, partial) for w in weights], x, weights, partial)
    print(f"predicted {predicted} us, error {error:.1e}, {'repeatable' if same else 'NOT REPEATABLE'}")
    case: dict[str, object] = {"op": "int4_matmul", "m": 1, "k": HIDDEN, "n": QKV, "slices": slices, "cluster": cluster}
    recorder.record(case, {"us": (statistics.median(times), "us")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="by default those with a prediction")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder = Recorder("kernels", arguments.results)
    make = jax.jit(random_layer)
    layers = [make(seed) for seed in range(LAYERS)]
    jobs = list(PREDICTED)
    if arguments.rows is not None:
        jobs = [(rows, way) for rows in arguments.rows for way in WAYS]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        lowered = [program(way).lower(jnp.zeros((rows, HIDDEN), BF16), layers) for rows, way in jobs]
        compiled = list(pool.map(lambda one: one.compile(), lowered))
    first: dict[int, jax.Array] = {}
    for (rows, way), function in zip(jobs, compiled, strict=True):
        out = measure(recorder, way, rows, function, layers).astype(jnp.float32)
        expected = first.setdefault(rows, out)
        print(f"  from the first way {float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)):.1e}")
    for (slices, cluster), predicted in PRODUCTS.items():
        measure_product(recorder, slices, cluster, predicted)


if __name__ == "__main__":
    main()
