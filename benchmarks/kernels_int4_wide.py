"""Checks and times the INT4 matrix product for many rows, kernel by kernel by CUPTI, beside cuBLAS with bf16 weights.

    python -m benchmarks.kernels_int4_wide                  # every case until --seconds (120) are over
    python -m benchmarks.kernels_int4_wide --rows 64        # of these numbers of rows only
    python -m benchmarks.kernels_int4_wide --best 6         # what tuning chooses, and five others it likes
    python -m benchmarks.kernels_int4_wide --tried          # 64 rows under the schedules listed in TRIED

Weights are rotated past the L2 cache and every product has its own x. "rest" is what XLA does around the kernel:
bringing x into order. Every case prints its prediction, its relative error against a float32 product
and whether its bits repeat; a wrong result is timed and printed, not recorded, and fails the run.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
import traceback

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder, read_rate
from benchmarks.kernels_int4 import BF16, DOWN, ROTATED_BYTES, UP, Case, inputs, random_weight, timed, weights_of
from pallas_kernels.int4_matmul import PackedInt4, wide, wide_tuning
from pallas_kernels.int4_matmul.plan import PLAIN
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule

SHAPES = {"up": UP, "down": DOWN, "o": (4096, 4096), "qkv": (4096, 6144), "gate_up": (4096, 28672)}
CASES = [
    *((64, name) for name in ("up", "down", "o", "qkv", "gate_up")),
    *((32, name) for name in ("up", "down")),
    *((rows, "up") for rows in (128, 256, 512, 1024, 2048, 24, 96, 4096, 8192)),
    *((rows, "down") for rows in (128, 256, 512, 1024, 2048)),
]
TRIED = [
    ("up", WideSchedule(64, cluster=2, stages=8)),
    ("down", WideSchedule(64, tiles=2, slices=8, cluster=2, stages=6)),
    ("down", WideSchedule(64, tiles=2, slices=4, added=2, stages=6)),
    ("o", WideSchedule(64, slices=2, added=2, stages=8)),
    ("o", WideSchedule(64, added=3, stages=8)),
    ("qkv", WideSchedule(64, added=2, stages=8)),
]
"""Slices that a cluster adds, beside those that XLA adds."""


@functools.cache
def cublas_us(rows: int, k: int, n: int) -> float:
    """Microseconds of the same product with bfloat16 weights."""
    weights = [
        jax.random.normal(jax.random.key(i), (n, k), BF16) for i in range(max(2, -(-ROTATED_BYTES // (2 * n * k))))
    ]
    x = jax.random.normal(jax.random.key(9), (rows, k), BF16)

    def multiply(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))) for w in weights]

    _, timings = profiler.measure(jax.jit(multiply), aggregate=False, iterations=6)(x, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    totals = [sum(t for _, t in iteration) * 1e3 / len(weights) for iteration in timings[1:]]
    return statistics.median(totals)


def run(recorder: Recorder, rate: float, rows: int, shape: str, schedule: WideSchedule) -> None:
    k, n = SHAPES[shape]
    weights = weights_of(k, n, 128, "zero_point")
    x, _, expected = inputs(rows, k, n, 128, "zero_point", PLAIN)
    plan = WidePlan.of(rows, weights[0], schedule)

    @jax.jit  # traced and lowered once, however often the timed function calls it
    def product(w: PackedInt4, x: jax.Array) -> jax.Array:
        return wide.int4_matmul(x, w, schedule=schedule, out_dtype=BF16)

    started = time.perf_counter()
    first = jax.block_until_ready(product(weights[0], x))
    compile_seconds = time.perf_counter() - started
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, product(weights[0], x))) for _ in range(3))
    s = schedule
    name = f"{s.tokens}t{s.warpgroups}x{s.tiles} {s.slices}s{s.added}a{s.cluster}c{s.stages}d"
    right = same and error < 1e-2
    note = f"{rows} {shape} {name}: error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}"
    note += "" if right else " WRONG"
    tokens = [jnp.roll(x, i, axis=0) for i in range(len(weights))]
    times, rest = timed(lambda xs, ws: [product(w, x) for w, x in zip(ws, xs, strict=True)], tokens, weights)
    us, cublas = statistics.median(times), cublas_us(rows, k, n)
    spread = statistics.quantiles(times, n=10)
    print(
        f"predicted {wide_tuning.predicted_seconds(plan) * 1e6:.1f} us, {note} median {us:.2f}"
        f" p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} rest {rest:.1f} cuBLAS {cublas:.1f} us"
        f" compile {compile_seconds:.1f}s",
        flush=True,
    )
    if not right:
        raise AssertionError(f"{note}, {us:.2f} us")
    case: dict[str, object] = {
        "op": "int4_matmul",
        "m": rows,
        "k": k,
        "n": n,
        "group": 128,
        "zero": "zero_point",
        "schedule": name,
        "part": "all",
    }
    read = k * n / 2 / us * 1e6
    recorder.record(
        case,
        {
            "us": (us, "us"),
            "tb_per_s": (read / 1e12, "TB/s"),
            "hbm_share": (read / rate, ""),
            "rest_us": (rest, "us"),
            "cublas_us": (cublas, "us"),
        },
    )


def chosen(best: int) -> list[tuple[int, str, WideSchedule]]:
    """The `best` schedules of every case, by prediction."""
    cases = []
    for rows, shape in CASES:
        k, n = SHAPES[shape]
        weight = jax.eval_shape(functools.partial(random_weight, case=Case(1, k, n, 0.0)), jax.random.key(0))
        cases += [(rows, shape, schedule) for schedule in wide_tuning.schedules(rows, weight)[:best]]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="only cases of these numbers of rows")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--best", type=int, default=1, help="how many schedules of each case: the chosen one, then by prediction"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    parser.add_argument("--tried", action="store_true", help="the schedules of TRIED instead")
    arguments = parser.parse_args()
    started = time.perf_counter()
    recorder, rate = Recorder("kernels", arguments.results), read_rate()
    failed: list[str] = []
    cases = [(64, *tried) for tried in TRIED] if arguments.tried else chosen(arguments.best)
    for rows, shape, schedule in cases:
        if (arguments.rows and rows not in arguments.rows) or shape not in arguments.shapes:
            continue
        if time.perf_counter() - started > arguments.seconds:
            print(f"{rows} {shape}: left out, the time is up", flush=True)
            continue
        try:
            run(recorder, rate, rows, shape, schedule)
        except Exception:  # one failing case must not cost the others
            failed.append(f"{rows} {shape} {schedule}")
            traceback.print_exc()
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"{len(failed)} cases failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
