"""A decoder layer's kernels one behind the other, as a decode step has them.

    python -m benchmarks.kernels_int4_layers                    # an 8B model's at 1 and at 8 rows
    python -m benchmarks.kernels_int4_layers --model 0.6b       # a small draft's at 1, 2 and 16 rows
    python -m benchmarks.kernels_int4_layers --kernels          # and each kernel's own time, by CUPTI

Layers with weights of their own (870 MB, 133 MB), in a loop on the device, timed by the host's clock: what counts is
from the first kernel's start to the last one's end. A step's results must have the same bits every time: a kernel that
read something before the one before had written it would show here.
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
from benchmarks.kernels_int4 import BF16, DOWN, GATE_UP, NORM, NORM_GATE, OUT, QKV, TALL, Case, random_weight
from pallas_kernels.int4_matmul import int4_matmul_of_sum, int4_slices, mosaic, sum_slices, tuning
from pallas_kernels.int4_matmul.mlp import gated_slices
from pallas_kernels.int4_matmul.plan import PART, PLAIN, Fusion, Plan, Schedule
from pallas_kernels.paged_attention import decode_attention

STEPS, CALLS = 24, 6
HEAD_DIM, PAGE, PAGES, POSITION = 128, 16, 32, 256
RESIDUAL = Fusion(residual=True)


def at_once(shape: tuple[int, int], fusion: Fusion, *, parts: int, each: int = 1) -> Schedule:
    """Blocks of `each` strips of results, all of it fetched at once; warps of `parts` x 128 inputs."""
    (inputs, outputs), strips = shape, (2 if fusion.gated else 1) * each
    return Schedule(inputs // PART // parts, parts, strips, strips, outputs // 16 // strips, once=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Products by name: (inputs, outputs) and what surrounds them."""

    layers: int
    heads: int
    kv_heads: int
    products: dict[str, tuple[tuple[int, int], Fusion]]
    ways: dict[str, dict[str, Schedule]]
    """Schedules by product; tuning's where there is none."""
    predicted: dict[tuple[int, str], float]
    """Microseconds a layer, by rows and way: what is measured."""


NOW = "as tuning has it"
DIGITS = Schedule(digits=True)
LARGE = Model(
    layers=8,
    heads=32,
    kv_heads=8,
    products={"qkv": (QKV, NORM), "o": (OUT, RESIDUAL), "gate_up": (GATE_UP, NORM_GATE), "down": (DOWN, RESIDUAL)},
    ways={NOW: {}, "slices added by XLA": {"down": TALL}, "version 7 for qkv and o": {"qkv": DIGITS, "o": DIGITS}},
    predicted={
        (1, NOW): 48.0,
        (1, "slices added by XLA"): 48.9,
        (1, "version 7 for qkv and o"): 50.1,
        (8, NOW): 58.0,
        (8, "slices added by XLA"): 59.4,
    },
)
DRAFT = {
    "qkv": ((1024, 4096), NORM),
    "o": ((2048, 1024), RESIDUAL),
    "gate_up": ((1024, 6144), NORM_GATE),
    "down": ((3072, 1024), RESIDUAL),
}
NORMED = ("qkv", "gate_up")
WIDER = {"o", "down"}
"""Products with 256 inputs a warp, so that the sum over warps is short."""


def small(*, narrow: int = 1, qkv: int = 1) -> dict[str, Schedule]:
    """`narrow`: parts of the products that are not wider; `qkv`: strips of a block of qkv."""
    schedules = {}
    for name, product in DRAFT.items():
        each = qkv if name == "qkv" else 1
        schedules[name] = at_once(*product, parts=2 if name in WIDER else narrow, each=each)
    return schedules


RING, MANY = "a ring", "the kernels for many rows"
SMALL = Model(
    layers=16,
    heads=16,
    kv_heads=8,
    products=DRAFT,
    ways={
        NOW: {},
        RING: {
            "qkv": Schedule(8, 1, blocks=264, digits=True),
            "o": Schedule(16, 1, digits=True),
            "gate_up": Schedule(8, 1, blocks=264, digits=True),
            "down": Schedule(16, 2, digits=True),
        },
        "qkv two strips": small(qkv=2),
        "256 inputs a warp": small(narrow=2),
        MANY: {},
    },
    predicted={
        (1, RING): 20.7,
        (1, NOW): 18.2,
        (1, "qkv two strips"): 18.5,
        (1, "256 inputs a warp"): 18.8,
        (2, RING): 22.4,
        (2, NOW): 20.5,
        (8, RING): 26.0,
        (8, NOW): 24.0,
        (16, NOW): 29.3,
        (16, "qkv two strips"): 29.0,
        (32, MANY): 46.3,
        (32, NOW): 38.1,
    },
)
MODELS = {"8b": LARGE, "0.6b": SMALL}


def random_layer(seed: jax.Array, model: Model) -> dict[str, Any]:
    """Scales are so small that gates are in the range where they do something."""
    layer: dict[str, Any] = {}
    for i, (name, (shape, fusion)) in enumerate(model.products.items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        weight = random_weight(key, Case(1, shape[0], shape[1], 0))
        layer[name] = dataclasses.replace(weight, scales=weight.scales * jnp.asarray(0.003, weight.scales.dtype))
        if fusion.norm_eps is not None:
            layer[f"{name} norm"] = jax.random.uniform(key, (shape[0],), jnp.float32, 0.5, 1.5)
    return layer


def program(model: Model, way: str, rows: int) -> Any:
    """jit of (x [rows, hidden], pools, layers) -> x behind the last layer, of every step."""
    schedules = model.ways[way]

    def product(name: str, x: jax.Array, layer: dict[str, Any], residual: jax.Array) -> jax.Array:
        fusion, weight = model.products[name][1], layer[name]
        given = {} if fusion.norm_eps is None else {"norm": layer[f"{name} norm"]}
        if fusion.residual:
            given["residual"] = residual
        schedule = schedules.get(name) or tuning.plan_for(rows, weight, fusion=fusion).schedule
        if Plan.of(rows, weight, schedule).partials > 1:
            fusion, given = PLAIN, {}
        out = mosaic.int4_matmul(x, weight, **given, schedule=schedule, out_dtype=BF16, fusion=fusion)
        return out if name in ("qkv", "gate_up") or fusion.residual else residual + out

    def step(carry: Any, layers: list[dict[str, Any]]) -> tuple[Any, jax.Array]:
        x, pools = carry
        start, after, pending = x, [], None
        table = jnp.arange(rows * PAGES, dtype=jnp.int32).reshape(rows, PAGES)
        positions = jnp.full((rows,), POSITION, jnp.int32)
        angles = jnp.zeros((rows, 1, HEAD_DIM // 2), jnp.float32)
        rope = (jnp.cos(angles), jnp.sin(angles))
        for layer, (keys, values) in zip(layers, pools, strict=True):
            before_qkv, before_gate_up = ({"norm": layer[f"{name} norm"], "norm_eps": 1e-5} for name in NORMED)
            if way == MANY:
                if pending is None:
                    pending = jnp.zeros((1, *x.shape), x.dtype)
                qkv, x = int4_matmul_of_sum(x, pending, layer["qkv"], **before_qkv)
            else:
                qkv = product("qkv", x, layer, x)
            options = {"num_q_heads": model.heads, "scale": HEAD_DIM**-0.5}
            heads, *pool = decode_attention(qkv[:, None], keys, values, table, positions, *rope, **options)
            after.append(tuple(pool))
            if way == MANY:
                slices = int4_slices(heads[:, 0], layer["o"])
                pending, x = gated_slices(x, slices, layer["gate_up"], layer["down"], **before_gate_up)
            else:
                x = product("o", heads[:, 0], layer, x)
                x = product("down", product("gate_up", x, layer, x), layer, x)
        if pending is not None:
            x = x + sum_slices(pending, x.dtype)
        # Every step begins with the same x, and waits for the one before.
        return (jnp.where(jnp.isnan(x), x, start), after), x

    def loop(x: jax.Array, pools: Any, layers: Any) -> jax.Array:
        return lax.scan(lambda carry, _: step(carry, layers), (x, pools), None, length=STEPS)[1]

    return jax.jit(loop)


def inputs(model: Model, rows: int) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """x, and each layer's keys and values."""
    keys = jax.random.split(jax.random.key(5), 2 * model.layers + 1)
    shape = (rows * PAGES, model.kv_heads, PAGE, HEAD_DIM)
    pools = [tuple(jax.random.normal(key, shape, BF16) for key in keys[2 * i : 2 * i + 2]) for i in range(model.layers)]
    return jax.random.normal(keys[-1], (rows, model.products["qkv"][0][0]), BF16), pools


def measure(recorder: Recorder, model: Model, way: str, rows: int, function: Any, layers: Any) -> jax.Array:
    x, pools = inputs(model, rows)
    outs, times = jax.block_until_ready(function(x, pools, layers)), []
    same = bool((outs == outs[:1]).all())  # false where something is not a number, too
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(x, pools, layers))
        times.append((time.perf_counter() - started) / STEPS / model.layers * 1e6)
    predicted = model.predicted.get((rows, way), "nothing")
    print(f"predicted {predicted} us, best {min(times):.2f}, {'same bits' if same else 'OTHER BITS'}")
    case: dict[str, object] = {"op": "int4 layer", "m": rows, "way": way, "hidden": x.shape[1]}
    recorder.record(case, {"us_per_layer": (statistics.median(times), "us")})
    return outs[0]


def show_kernels(model: Model, rows: int, function: Any, layers: Any) -> None:
    """Prints each kernel's own time by CUPTI, in order, the median of all layers."""
    _, timings = profiler.measure(function, aggregate=False)(*inputs(model, rows), layers)
    if not timings:
        raise RuntimeError("CUPTI saw no kernel")
    anchors = [i for i, (name, _) in enumerate(timings) if "attention" in name][1:-1]
    shown = []
    for offset in range(-1, anchors[1] - anchors[0] - 1):
        times = [timings[i + offset][1] * 1e3 for i in anchors]
        shown.append(f"{timings[anchors[0] + offset][0][:30]} {statistics.median(times):.2f}")
    print("  us:", ", ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--rows", type=int, nargs="*", help="by default those with a prediction")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder, model = Recorder("kernels", arguments.results), MODELS[arguments.model]
    make = jax.jit(random_layer, static_argnames="model")
    layers = [make(seed, model) for seed in range(model.layers)]
    jobs = list(model.predicted)
    if arguments.rows is not None:
        jobs = [job for job in jobs if job[0] in arguments.rows]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        lowered = [program(model, way, rows).lower(*inputs(model, rows), layers) for rows, way in jobs]
        compiled = list(pool.map(lambda one: one.compile(), lowered))
    first: dict[int, jax.Array] = {}
    for (rows, way), function in zip(jobs, compiled, strict=True):
        out = measure(recorder, model, way, rows, function, layers).astype(jnp.float32)
        expected = first.setdefault(rows, out)
        print(f"  from the first way {float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)):.1e}")
        if arguments.kernels:
            show_kernels(model, rows, function, layers)


if __name__ == "__main__":
    main()
