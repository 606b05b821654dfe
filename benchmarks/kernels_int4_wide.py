"""Checks and times the INT4 matrix product for many rows, kernel by kernel by CUPTI, beside cuBLAS with bf16 weights.

    python -m benchmarks.kernels_int4_wide                  # every case until --seconds (120) are over
    python -m benchmarks.kernels_int4_wide --rows 64        # of these numbers of rows only
    python -m benchmarks.kernels_int4_wide --best 6         # what tuning chooses, and five others it likes
    python -m benchmarks.kernels_int4_wide --tried          # the cases of TRIED

Weights are rotated past the L2 cache and every product has its own x. "rest" is what XLA does around the kernel:
bringing x into order. Every case prints its prediction, its relative error against cuBLAS' product
and whether its bits repeat; a wrong result is timed and printed, not recorded, and fails the run.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import RESULTS, Recorder, read_rate, run_each
from benchmarks.kernels_int4 import BF16, DOWN, ROTATED_BYTES, UP, Case, random_weight
from pallas_kernels.int4_matmul import PackedInt4, wide, wide_dequantize, wide_tuning
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule

SHAPES = {
    "up": UP,
    "down": DOWN,
    "o": (4096, 4096),
    "qkv": (4096, 6144),
    "gate_up": (4096, 28672),
    "gate_up_12288": (4096, 24576),
    "down_12288": (12288, 4096),
    "gate_up_3072": (1024, 6144),
    "down_3072": (3072, 1024),
}
CASES = [
    *((64, name) for name in ("up", "down", "o", "qkv", "gate_up")),
    *((32, name) for name in ("up", "down")),
    *((rows, "up") for rows in (128, 256, 512, 1024, 2048, 24, 96, 4096, 8192)),
    *((rows, "down") for rows in (128, 256, 512, 1024, 2048)),
]


ALONE: dict[str, Any] = {"cluster": 1, "blocks": 132}
JOINED: dict[str, Any] = {"warpgroups": 3, "cluster": 2, "blocks": 132, "joined": True}
TRIED: list[tuple[int, str, list[dict[str, Any]]]] = [
    (256, "qkv", [{}, JOINED | {"tokens": 128}]),
    (240, "qkv", [{}, JOINED | {"tokens": 128}]),
    (208, "qkv", [{}, JOINED | {"tokens": 112}]),
    (384, "qkv", [{}, ALONE, JOINED | {"tokens": 192}]),
    (352, "qkv", [ALONE, JOINED | {"tokens": 176}]),
    (432, "o", [{}]),
    (224, "qkv", [JOINED | {"tokens": 112}]),
]
"""Changes to the schedules that tuning chooses."""
BLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}
"""Trying Triton's kernels beside cuBLAS' takes a second for each product, and none of them wins at these sizes."""


class Matrix:
    """A matrix' random weights, packed, and as many of them in bfloat16 as pass the L2 cache."""

    def __init__(self, shape: str):
        weight = described(shape)
        case, count = Case(1, *SHAPES[shape], 0.0), rotated(weight.codes.size * 4)
        self.packed = jax.jit(lambda: [random_weight(jax.random.key(seed), case) for seed in range(count)])()
        some = self.packed[: rotated(2 * weight.shape[0] * weight.shape[1])]
        self.dense = jax.jit(lambda ws: [wide_dequantize.dequantize(w) for w in ws])(some)


class Rows:
    """Tokens for each of a matrix' weights, and what cuBLAS does of them."""

    def __init__(self, rows: int, matrix: Matrix):
        k = matrix.packed[0].shape[1]
        x = jax.random.normal(jax.random.key(rows), (rows, k), BF16)
        self.xs = [jnp.roll(x, i, axis=0) for i in range(len(matrix.packed))]
        some = self.xs[: len(matrix.dense)]
        multiply = jax.jit(each(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))))
        self.multiply = multiply.lower(some, matrix.dense).compile(compiler_options=BLAS_ONLY)
        self.expected = self.multiply(some, matrix.dense)[0].astype(jnp.float32)
        self.dense = some, matrix.dense

    @functools.cached_property
    def cublas_us(self) -> float:
        """Microseconds of the same product with bfloat16 weights."""
        return sum(t for _, t in times(self.multiply, *self.dense)) / RUNS / len(self.dense[0])


def each(product: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """The products of pairs from two lists."""
    return lambda xs, ws: [product(x, w) for x, w in zip(xs, ws, strict=True)]


RUNS = 5


def times(products: jax.stages.Compiled, *arrays: Any) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel of RUNS runs."""
    _, timings = profiler.measure(products, aggregate=False, iterations=RUNS + 1)(*arrays)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    return [(kernel, t * 1e3) for iteration in timings[1:] for kernel, t in iteration]


def compiled(rows: int, shape: str, schedule: WideSchedule) -> jax.stages.Compiled:
    """Products of lists of tokens and weights, without running anything."""
    weight = described(shape)
    weights = [weight] * rotated(weight.codes.size * 4)
    product = functools.partial(wide.int4_matmul, schedule=schedule, out_dtype=BF16)
    x = jax.ShapeDtypeStruct((rows, weight.shape[1]), BF16)
    return jax.jit(each(product)).lower([x] * len(weights), weights).compile()


def run(
    recorder: Recorder,
    rate: float,
    rows: int,
    shape: str,
    schedule: WideSchedule,
    products: jax.stages.Compiled,
    tokens: Rows,
    matrix: Matrix,
) -> None:
    k, n = SHAPES[shape]
    plan = WidePlan.of(rows, matrix.packed[0], schedule)
    first, *others = [products(tokens.xs, matrix.packed)[0] for _ in range(4)]
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - tokens.expected) / jnp.linalg.norm(tokens.expected))
    same = all(bool(jnp.array_equal(first, other)) for other in others)
    s = schedule
    name = (
        f"{s.tokens}t{s.warpgroups}x{s.tiles} {s.slices}s{s.cluster}c{s.stages}d"
        + " turns" * s.turns
        + " natural" * s.natural
        + " joined" * s.joined
    )
    right = same and error < 1e-2
    note = f"{rows} {shape} {name}: error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}"
    note += "" if right else " WRONG"
    kernels = times(products, tokens.xs, matrix.packed)
    found = [t for kernel, t in kernels if "int4_matmul" in kernel]
    rest = (sum(t for _, t in kernels) - sum(found)) / len(found)
    us, cublas = statistics.median(found), tokens.cublas_us
    spread = statistics.quantiles(found, n=10)
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


def rotated(nbytes: int) -> int:
    """Weights of so many bytes that together pass the L2 cache."""
    return max(2, -(-ROTATED_BYTES // nbytes))


def chosen(best: int) -> list[tuple[int, str, WideSchedule]]:
    """The `best` schedules of every case, by prediction."""
    return [(*case, s) for case in CASES for s in wide_tuning.schedules(case[0], described(case[1]))[:best]]


def tried() -> list[tuple[int, str, WideSchedule]]:
    cases = []
    for rows, shape, changes in TRIED:
        weight = described(shape)
        for change in changes:
            schedule = dataclasses.replace(wide_tuning.wide_schedule(rows, weight, natural=True), **change)
            plan = wide_tuning.fitted(WidePlan.of(rows, weight, schedule), schedule)
            if plan is not None:
                # With few stages several blocks are resident at once.
                stages = change.get("stages", plan.schedule.stages)
                cases.append((rows, shape, dataclasses.replace(plan.schedule, stages=stages)))
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
    cases = [
        case
        for case in (tried() if arguments.tried else chosen(arguments.best))
        if (not arguments.rows or case[0] in arguments.rows) and case[1] in arguments.shapes
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        kernels = [pool.submit(compiled, *case) for case in cases]
        shapes = {shape for _, shape, _ in cases}
        matrices = dict(zip(shapes, pool.map(Matrix, shapes), strict=True))
        tokens = {case[:2]: pool.submit(Rows, case[0], matrices[case[1]]) for case in cases}
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def job(rows: int, shape: str, schedule: WideSchedule, kernel: concurrent.futures.Future) -> None:
        run(recorder, rate, rows, shape, schedule, kernel.result(), tokens[rows, shape].result(), matrices[shape])

    jobs = [
        (f"{case[0]} {case[1]}", functools.partial(job, *case, kernel))
        for case, kernel in zip(cases, kernels, strict=True)
    ]
    run_each(jobs, started, arguments.seconds)


if __name__ == "__main__":
    main()
