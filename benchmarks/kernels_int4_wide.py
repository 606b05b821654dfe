"""Checks and times the INT4 matrix product for many rows, kernel by kernel by CUPTI, beside cuBLAS with bf16 weights.

    python -m benchmarks.kernels_int4_wide                  # every case until --seconds (120) are over
    python -m benchmarks.kernels_int4_wide --rows 64        # of these numbers of rows only
    python -m benchmarks.kernels_int4_wide --best 6         # what tuning chooses, and five others it likes
    python -m benchmarks.kernels_int4_wide --tried          # the cases of TRIED, with and without turns and x as it is

Weights are rotated past the L2 cache and every product has its own x. "rest" is what XLA does around the kernel:
bringing x into order. Every case prints its prediction, its relative error against a float32 product
and whether its bits repeat; a wrong result is timed and printed, not recorded, and fails the run.
"""

import argparse
import concurrent.futures
import dataclasses
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
from benchmarks.kernels_int4 import BF16, DOWN, ROTATED_BYTES, UP, Case, inputs, random_weight, weights_of
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
    (64, "up"),
    (256, "up"),
    (64, "down"),
    (64, "o"),
    (64, "qkv"),
    (128, "up"),
    (1024, "up"),
    (256, "o"),
    (512, "qkv"),
]
"""Where schedules with turns, and with x as it is, are timed beside those that tuning chooses."""


@functools.cache
def cublas_us(rows: int, k: int, n: int) -> float:
    """Microseconds of the same product with bfloat16 weights."""
    weights = [
        jax.random.normal(jax.random.key(i), (n, k), BF16) for i in range(max(2, -(-ROTATED_BYTES // (2 * n * k))))
    ]
    x = jax.random.normal(jax.random.key(9), (rows, k), BF16)

    def multiply(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))) for w in weights]

    # Trying Triton's kernels beside cuBLAS' takes a second for each, and none of them wins at these sizes.
    product = jax.jit(multiply).lower(x, weights).compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    _, timings = profiler.measure(product, aggregate=False, iterations=6)(x, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    totals = [sum(t for _, t in iteration) * 1e3 / len(weights) for iteration in timings[1:]]
    return statistics.median(totals)


def compiled(rows: int, shape: str, schedule: WideSchedule) -> jax.stages.Compiled:
    """Products of lists of tokens and weights, without running anything."""
    weight = described(shape)
    weights = [weight] * rotated(weight)

    def products(xs: list[jax.Array], ws: list[PackedInt4]) -> list[jax.Array]:
        pairs = zip(xs, ws, strict=True)
        return [wide.int4_matmul(x, w, schedule=schedule, out_dtype=BF16) for x, w in pairs]

    x = jax.ShapeDtypeStruct((rows, weight.shape[1]), BF16)
    return jax.jit(products).lower([x] * len(weights), weights).compile()


def run(
    recorder: Recorder, rate: float, rows: int, shape: str, schedule: WideSchedule, products: jax.stages.Compiled
) -> None:
    k, n = SHAPES[shape]
    weights = weights_of(k, n, 128, "zero_point")
    x, _, expected = inputs(rows, k, n, 128, "zero_point", PLAIN)
    plan = WidePlan.of(rows, weights[0], schedule)
    tokens = [jnp.roll(x, i, axis=0) for i in range(len(weights))]
    first, *others = [products(tokens, weights)[0] for _ in range(4)]
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, other)) for other in others)
    s = schedule
    name = f"{s.tokens}t{s.warpgroups}x{s.tiles} {s.slices}s{s.added}a{s.cluster}c{s.stages}d"
    name += " turns" * s.turns + " plain" * s.plain
    right = same and error < 1e-2
    note = f"{rows} {shape} {name}: error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}"
    note += "" if right else " WRONG"
    _, timings = profiler.measure(products, aggregate=False, iterations=6)(tokens, weights)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    times = [t * 1e3 for iteration in timings[1:] for name, t in iteration if "int4_matmul" in name]
    rest = sum(t * 1e3 for iteration in timings[1:] for _, t in iteration) / len(times) - statistics.mean(times)
    us, cublas = statistics.median(times), cublas_us(rows, k, n)
    spread = statistics.quantiles(times, n=10)
    print(
        f"predicted {wide_tuning.predicted_seconds(plan) * 1e6:.1f} us, {note} median {us:.2f}"
        f" p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} rest {rest:.1f} cuBLAS {cublas:.1f} us",
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


def described(shape: str) -> PackedInt4:
    """A weight without its numbers."""
    k, n = SHAPES[shape]
    return jax.eval_shape(functools.partial(random_weight, case=Case(1, k, n, 0.0)), jax.random.key(0))


def rotated(weight: PackedInt4) -> int:
    return max(2, -(-ROTATED_BYTES // (weight.codes.size * 4)))


def chosen(best: int) -> list[tuple[int, str, WideSchedule]]:
    """The `best` schedules of every case, by prediction."""
    return [(*case, s) for case in CASES for s in wide_tuning.schedules(case[0], described(case[1]))[:best]]


def tried() -> list[tuple[int, str, WideSchedule]]:
    """What never ran comes last."""
    cases = []
    for turns, plain in ((True, False), (False, False), (True, True)):
        for rows, shape in TRIED[: 3 if turns and not plain else None]:
            schedule = wide_tuning.wide_schedule(rows, described(shape))
            schedule = dataclasses.replace(schedule, turns=turns, plain=plain)
            plan = wide_tuning.fitted(WidePlan.of(rows, described(shape), schedule), schedule)
            if plan is not None:
                cases.append((rows, shape, plan.schedule))
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
    parser.add_argument("--tried", action="store_true", help="the cases of TRIED instead")
    arguments = parser.parse_args()
    started = time.perf_counter()
    recorder, rate = Recorder("kernels", arguments.results), read_rate()
    failed: list[str] = []
    cases = [
        case
        for case in (tried() if arguments.tried else chosen(arguments.best))
        if (not arguments.rows or case[0] in arguments.rows) and case[1] in arguments.shapes
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        kernels = [pool.submit(compiled, *case) for case in cases]
        concurrent.futures.wait(kernels)
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for (rows, shape, schedule), kernel in zip(cases, kernels, strict=True):
        if time.perf_counter() - started > arguments.seconds:
            print(f"{rows} {shape}: left out, the time is up", flush=True)
            continue
        try:
            run(recorder, rate, rows, shape, schedule, kernel.result())
        except Exception:  # one failing case must not cost the others
            failed.append(f"{rows} {shape} {schedule}")
            traceback.print_exc()
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"{len(failed)} cases failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
