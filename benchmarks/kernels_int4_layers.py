"""A decoder layer's kernels one behind the other, as a decode step has them.

    python -m benchmarks.kernels_int4_layers              # at 1 and at 8 rows
    python -m benchmarks.kernels_int4_layers --kernels    # and each kernel's own time, by CUPTI

Eight layers of an 8B model's shapes with weights of their own (870 MB), in a loop on the device, timed by the host's
clock: what counts is from the first kernel's start to the last one's end. A step's results must have the same bits
every time: a kernel that read something before the one before had written it would show here.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, DOWN, GATE_UP, NORM, NORM_GATE, OUT, QKV, Case, random_weight
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Schedule
from pallas_kernels.paged_attention import decode_attention

LAYERS, STEPS, CALLS = 8, 24, 6
HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES, POSITION = 32, 8, 128, 16, 32, 256
SHAPES: dict[str, tuple[tuple[int, int], Fusion]] = {
    "qkv": (QKV, NORM),
    "o": (OUT, Fusion(residual=True)),
    "gate_up": (GATE_UP, NORM_GATE),
    "down": (DOWN, PLAIN),
}
DIGITS = Schedule(digits=True)
WAYS: dict[str, dict[str, Schedule]] = {
    "as tuning has it": {},
    "version 7 for qkv and o": {"qkv": DIGITS, "o": DIGITS},
}
PREDICTED = {(1, "as tuning has it"): 48.5, (1, "version 7 for qkv and o"): 50.1, (8, "as tuning has it"): 58.9}


def random_layer(seed: jax.Array) -> dict[str, Any]:
    """Scales are so small that gates are in the range where they do something."""
    layer: dict[str, Any] = {}
    for i, (name, (shape, fusion)) in enumerate(SHAPES.items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        weight = random_weight(key, Case(1, shape[0], shape[1], 0))
        layer[name] = dataclasses.replace(weight, scales=weight.scales * jnp.asarray(0.003, weight.scales.dtype))
        if fusion.norm_eps is not None:
            layer[f"{name} norm"] = jax.random.uniform(key, (shape[0],), jnp.float32, 0.5, 1.5)
    return layer


def program(schedules: dict[str, Schedule], rows: int) -> Any:
    """jit of (x [rows, hidden], pools, layers) -> x behind the last layer, of every step."""

    def product(name: str, x: jax.Array, layer: dict[str, Any], **given: jax.Array) -> jax.Array:
        fusion = SHAPES[name][1]
        schedule = schedules.get(name) or tuning.plan_for(rows, layer[name], fusion=fusion).schedule
        return mosaic.int4_matmul(x, layer[name], **given, schedule=schedule, out_dtype=BF16, fusion=fusion)

    def step(carry: Any, layers: list[dict[str, Any]]) -> tuple[Any, jax.Array]:
        x, pools = carry
        start, after = x, []
        table = jnp.arange(rows * PAGES, dtype=jnp.int32).reshape(rows, PAGES)
        positions = jnp.full((rows,), POSITION, jnp.int32)
        angles = jnp.zeros((rows, 1, HEAD_DIM // 2), jnp.float32)
        rope = (jnp.cos(angles), jnp.sin(angles))
        for layer, (keys, values) in zip(layers, pools, strict=True):
            qkv = product("qkv", x, layer, norm=layer["qkv norm"])
            options = {"num_q_heads": HEADS, "scale": HEAD_DIM**-0.5}
            heads, *pool = decode_attention(qkv[:, None], keys, values, table, positions, *rope, **options)
            after.append(tuple(pool))
            x = product("o", heads[:, 0], layer, residual=x)
            x = x + product("down", product("gate_up", x, layer, norm=layer["gate_up norm"]), layer)
        # Every step begins with the same x, and waits for the one before.
        return (jnp.where(jnp.isnan(x), x, start), after), x

    def loop(x: jax.Array, pools: Any, layers: Any) -> jax.Array:
        return lax.scan(lambda carry, _: step(carry, layers), (x, pools), None, length=STEPS)[1]

    return jax.jit(loop)


def inputs(rows: int) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """x, and each layer's keys and values."""
    keys = jax.random.split(jax.random.key(5), 2 * LAYERS + 1)
    shape = (rows * PAGES, KV_HEADS, PAGE, HEAD_DIM)
    pools = [tuple(jax.random.normal(key, shape, BF16) for key in keys[2 * i : 2 * i + 2]) for i in range(LAYERS)]
    return jax.random.normal(keys[-1], (rows, QKV[0]), BF16), pools


def measure(recorder: Recorder, way: str, rows: int, function: Any, layers: Any) -> None:
    x, pools = inputs(rows)
    outs, times = jax.block_until_ready(function(x, pools, layers)), []
    same = bool((outs == outs[:1]).all())  # false where something is not a number, too
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(x, pools, layers))
        times.append((time.perf_counter() - started) / STEPS / LAYERS * 1e6)
    predicted = PREDICTED.get((rows, way), "nothing")
    print(f"predicted {predicted} us, best {min(times):.2f}, {'same bits' if same else 'OTHER BITS'}")
    case: dict[str, object] = {"op": "int4 layer", "m": rows, "way": way}
    recorder.record(case, {"us_per_layer": (statistics.median(times), "us")})


def show_kernels(rows: int, function: Any, layers: Any) -> None:
    """Prints each kernel's own time by CUPTI, in order, the median of all layers."""
    _, timings = profiler.measure(function, aggregate=False)(*inputs(rows), layers)
    if not timings:
        raise RuntimeError("CUPTI saw no kernel")
    anchors = [i for i, (name, _) in enumerate(timings) if "attention" in name][1:-1]
    for offset in range(-1, 5):
        times = [timings[i + offset][1] * 1e3 for i in anchors]
        print(f"  {timings[anchors[0] + offset][0][:30]} {statistics.median(times):.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder, make = Recorder("kernels", arguments.results), jax.jit(random_layer)
    layers = [make(seed) for seed in range(LAYERS)]
    jobs = [(way, rows) for rows in arguments.rows for way in WAYS]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        lowered = [program(WAYS[way], rows).lower(*inputs(rows), layers) for way, rows in jobs]
        compiled = list(pool.map(lambda one: one.compile(), lowered))
    for (way, rows), function in zip(jobs, compiled, strict=True):
        measure(recorder, way, rows, function, layers)
        if arguments.kernels:
            show_kernels(rows, function, layers)


if __name__ == "__main__":
    main()
