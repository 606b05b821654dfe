"""A decoder layer's kernels one behind the other, as a decode step has them: what starts early, what L2 has by then.

    python -m benchmarks.kernels_int4_layers                        # every way at 1 row, the most telling at 8
    python -m benchmarks.kernels_int4_layers --rows 1 --kernels 2   # and of way 2 each kernel's own time, by CUPTI

Eight layers of an 8B model's shapes with weights of their own (870 MB), in a loop on the device. A way's time is that
of the whole loop by the host's clock, for a layer: what counts is from the first kernel's start to the last one's end,
and kernels overlap. Every way must give the same bits as the first of its arithmetic.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, DOWN, GATE_UP, NORM, NORM_GATE, OUT, QKV, Case, random_weight
from pallas_kernels.int4_matmul import PackedInt4, mosaic, tuning
from pallas_kernels.int4_matmul.ahead import Next
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.slices import added
from pallas_kernels.paged_attention import decode_attention, decode_mosaic
from pallas_kernels.paged_attention import mosaic as paged_mosaic

LAYERS, STEPS, CALLS = 8, 24, 6
HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES, POSITION = 32, 8, 128, 16, 32, 256
RESIDUAL = Fusion(residual=True)
SHAPES: dict[str, tuple[tuple[int, int], Fusion]] = {
    "qkv": (QKV, NORM),
    "o": (OUT, RESIDUAL),
    "gate_up": (GATE_UP, NORM_GATE),
    "down": (DOWN, PLAIN),
}
NAMES = list(SHAPES)
SCALED = {
    "qkv": Schedule(strips=4, depth=3, scaled=True, bulk=True),
    "o": Schedule(strips=4, depth=3, scaled=True),
    "gate_up": Schedule(strips=4, depth=3, scaled=True, bulk=True),
    "down": Schedule(warps=8, strips=2, depth=3, blocks=264, scaled=True, bulk=True),
}
SCALED_MANY = {name: dataclasses.replace(schedule, strips=2) for name, schedule in SCALED.items()}
"""For up to 8 rows, as `SCALED` for one."""


@dataclasses.dataclass(frozen=True)
class Way:
    """`early` strips of each product before the kernel before it has ended, `ahead` strips of the next into L2.

    scaled: float16 for x everywhere; otherwise as tuning chooses.
    """

    name: str
    predicted_us: float
    scaled: tuple[str, ...] = tuple(NAMES)
    early: dict[str, int] = dataclasses.field(default_factory=dict)
    ahead: dict[str, int] = dataclasses.field(default_factory=dict)
    at_once: bool = False
    hinted: dict[str, int] = dataclasses.field(default_factory=dict)
    norm_hinted: bool = False
    pace: int = 0


SPLIT: list[bool] = []
"""Not empty: a multiprocessor keeps its split into L1 and shared memory, since all kernels ask for as much."""
IDLE = {"o": 3, "qkv": 3}
"""Products whose blocks are on the card while a small kernel runs."""
WAYS = [
    Way("as tuning has it", 50.1, scaled=("gate_up", "down")),
    Way("all scaled", 48.5),
    Way("early o", 46.0, early={"o": 3}),
    Way("early o, qkv", 44.5, early=IDLE),
    Way("hinted o, qkv", 45.2, hinted={"o": 2, "qkv": 3}),
    Way("hinted o slowly", 46.0, hinted={"o": 2}, pace=60),
    Way("early o, qkv; one of the others", 43.5, early=IDLE | {"gate_up": 1, "down": 1}),
    Way("early o, qkv; hinted one of the others", 43.7, early=IDLE, hinted={"gate_up": 1, "down": 1}),
    Way("early o with 4 MB of gate_up, qkv", 43.7, early=IDLE, ahead={"o": 1}, at_once=True),
    Way("early o, qkv; ahead 4 MB", 43.0, early=IDLE, ahead={"o": 1, "gate_up": 1}),
]
PREDICTED_MANY = {1: 58.9, 3: 55.0}
"""Which of them at 8 rows, and what was predicted of them."""


def schedules_of(way: Way, rows: int) -> dict[str, Schedule]:
    scaled, schedules = SCALED if rows == 1 else SCALED_MANY, {}
    for name, (shape, fusion) in SHAPES.items():
        schedule = scaled[name]
        if name not in way.scaled:
            weight = jax.eval_shape(
                lambda shape=shape: random_weight(jax.random.key(0), Case(rows, shape[0], shape[1], 0))
            )
            schedule = dataclasses.replace(tuning.plan_for(rows, weight, fusion=fusion).schedule, early=0)
        schedules[name] = dataclasses.replace(
            schedule,
            early=way.early.get(name, 0),
            hinted=way.hinted.get(name, 0),
            norm_hinted=way.norm_hinted,
            pace=way.pace,
        )
    return schedules


def attention(qkv: Any, pools: Any, table: Any, positions: Any, angles: Any) -> Any:
    tables = (jnp.cos(angles), jnp.sin(angles))
    options = {"num_q_heads": HEADS, "scale": 0.09}
    try:
        out, *pool = decode_attention(qkv[:, None], *pools, table, positions, *(t[:, None] for t in tables), **options)
    except ValueError:  # before the op took several tokens a row
        return decode_attention(qkv, *pools, table, positions, *tables, **options)
    return out[:, 0], *pool


def keep_the_split() -> None:
    """From here on every kernel asks for as much shared memory, the attention too."""
    SPLIT.append(True)

    def launch(program: Any, plan: Any, operands: Any, out_type: Any, smem_bytes: int, name: str) -> Any:
        return paged_mosaic.launch(program, plan, operands, out_type, max(smem_bytes, shared_bytes(plan.batch)), name)

    decode_mosaic.launch = launch


def shared_bytes(rows: int) -> int:
    """What the products ask for."""
    return 148480 if rows == 1 else 179200


@functools.partial(jax.jit, static_argnames="schedule")
def partial_sums(x: jax.Array, weight: PackedInt4, schedule: Schedule) -> jax.Array:
    return mosaic.partial_sums(x, weight, schedule=schedule, out_dtype=BF16)


def weights() -> list[dict[str, Any]]:
    """Scales so small that gates are in the range where they do something."""

    @jax.jit
    def layer(seed: jax.Array) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for i, (name, (shape, _)) in enumerate(SHAPES.items()):
            weight = random_weight(jax.random.fold_in(jax.random.key(seed), i), Case(1, shape[0], shape[1], 0))
            made[name] = dataclasses.replace(weight, scales=weight.scales * jnp.asarray(0.003, weight.scales.dtype))
            made[f"{name} norm"] = jax.random.uniform(
                jax.random.fold_in(jax.random.key(seed), 9 + i), (4096,), jnp.float32, 0.5, 1.5
            )
        return made

    return [layer(seed) for seed in range(LAYERS)]


def program(way: Way, rows: int) -> Any:
    """jit of (x, pools, layers) -> (x after all layers, pools)."""
    schedules = schedules_of(way, rows)

    def product(
        name: str, x: jax.Array, layer: dict[str, Any], following: PackedInt4 | None, **given: jax.Array
    ) -> jax.Array:
        fusion, options = SHAPES[name][1], {}
        strips = way.ahead.get(name, 0)
        if strips and following is not None:
            after = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
            plan = Plan.of(rows, following, schedules[after], SHAPES[after][1])
            given, options = given | {"following": following.codes}, {"ahead": Next(plan, strips, way.at_once)}
        return mosaic.int4_matmul(
            x, layer[name], **given, **options, schedule=schedules[name], out_dtype=BF16, fusion=fusion
        )

    def step(carry: Any, layers: list[dict[str, Any]]) -> tuple[Any, jax.Array]:
        x, pools = carry
        start, after = x, []
        table = jnp.arange(rows * PAGES, dtype=jnp.int32).reshape(rows, PAGES)
        positions = jnp.full((rows,), POSITION, jnp.int32)
        angles = jnp.zeros((rows, HEAD_DIM // 2), jnp.float32)
        for i, layer in enumerate(layers):
            last = i == len(layers) - 1
            qkv = product("qkv", x, layer, layer["o"], norm=layer["qkv norm"])
            heads, *pool = attention(qkv, pools[i], table, positions, angles)
            after.append(tuple(pool))
            x = product("o", heads, layer, layer["gate_up"], residual=x)
            hidden = product("gate_up", x, layer, layer["down"], norm=layer["gate_up norm"])
            if SPLIT:
                partial = partial_sums(hidden, layer["down"], schedules["down"])
                x = added(partial, x, shared_bytes=shared_bytes(rows))
            else:
                x = x + product("down", hidden, layer, None if last else layers[i + 1]["qkv"])
        # Every step begins with the same x, and waits for the one before.
        return (jnp.where(jnp.isnan(x), x, start), after), x

    def loop(x: jax.Array, pools: Any, layers: Any) -> Any:
        (_, pools), outs = lax.scan(lambda carry, _: step(carry, layers), (x, pools), None, length=STEPS)
        return outs, pools

    return jax.jit(loop)


def given(rows: int) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    keys = jax.random.split(jax.random.key(5))
    shape = (rows * PAGES, KV_HEADS, PAGE, HEAD_DIM)
    pools = [
        tuple(jax.random.normal(jax.random.fold_in(keys[1], 2 * i + j), shape, BF16) for j in range(2))
        for i in range(LAYERS)
    ]
    return jax.random.normal(keys[0], (rows, 4096), BF16), pools


def measure(
    recorder: Recorder, way: Way, rows: int, function: Any, layers: Any, expected: dict[Any, Any], predicted: float
) -> None:
    x, pools = given(rows)
    outs, _ = jax.block_until_ready(function(x, pools, layers))
    first = expected.setdefault((rows, way.scaled), outs[0])
    same = bool(jnp.array_equal(outs, jnp.broadcast_to(first[None], outs.shape)))
    finite = bool(jnp.isfinite(outs.astype(jnp.float32)).all())
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(x, pools, layers))
        times.append((time.perf_counter() - started) / STEPS / LAYERS * 1e6)
    verdict = f"{'same bits' if same else 'OTHER BITS'}{'' if finite else ', NOT FINITE'}"
    print(f"{way.name}: predicted {predicted} us, best {min(times):.2f}, {verdict}")
    case: dict[str, object] = {"op": "int4 layer", "m": rows, "way": way.name}
    recorder.record(case, {"us_per_layer": (statistics.median(times), "us")})


def kernels(way: Way, rows: int, function: Any, layers: Any) -> None:
    """Prints each kernel's own time by CUPTI, in order, the median of all layers."""
    x, pools = given(rows)
    _, timings = profiler.measure(function, aggregate=False)(x, pools, layers)
    if not timings:
        raise RuntimeError("CUPTI saw no kernel")
    anchors = [i for i, (name, _) in enumerate(timings) if "attention" in name][1:-1]
    total = sum(ms for _, ms in timings) / STEPS / LAYERS * 1e3
    print(f"{way.name}, {rows} rows: {len(timings)} kernels, {total:.2f} us a layer by themselves")
    for offset in range(-1, 5):
        times = [timings[i + offset][1] * 1e3 for i in anchors]
        print(f"  {timings[anchors[0] + offset][0][:30]} {statistics.median(times):.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--ways", type=int, nargs="*", help="only these of WAYS")
    parser.add_argument("--kernels", type=int, nargs="*", default=[], help="these kernel by kernel as well, at one row")
    parser.add_argument("--together", action="store_true", help="all kernels ask for as much shared memory")
    parser.add_argument("--seconds", type=float, default=45.0, help="measure nothing more after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    if arguments.together:
        keep_the_split()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    layers = weights()
    expected: dict[Any, Any] = {}
    chosen = {rows: arguments.ways or (range(len(WAYS)) if rows == 1 else PREDICTED_MANY) for rows in arguments.rows}
    jobs = [(index, rows) for rows, ways in chosen.items() for index in ways]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        compiling = [
            pool.submit(program(WAYS[index], rows).lower(*given(rows), layers).compile) for index, rows in jobs
        ]
        print(f"lowered after {time.perf_counter() - started:.0f} s", flush=True)
        # Launches are timed by the host, so nothing is compiled beside them.
        done, late = concurrent.futures.wait(compiling, arguments.seconds - 8 - (time.perf_counter() - started))
        for future in late:
            future.cancel()
        print(f"{len(done)} compiled after {time.perf_counter() - started:.0f} s", flush=True)
    for (index, rows), compiled in zip(jobs, compiling, strict=True):
        way = WAYS[index]
        if compiled not in done or time.perf_counter() - started > arguments.seconds:
            print(f"{way.name}, {rows} rows: left out, the time is up", flush=True)
            continue
        try:
            predicted = way.predicted_us if rows == 1 else PREDICTED_MANY[index]
            measure(recorder, way, rows, compiled.result(), layers, expected, predicted)
            if rows == 1 and index in arguments.kernels:
                kernels(way, rows, compiled.result(), layers)
        except Exception:  # one failing way must not cost the others
            print(f"{way.name}, {rows} rows: FAILED", flush=True)
            traceback.print_exc()
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
