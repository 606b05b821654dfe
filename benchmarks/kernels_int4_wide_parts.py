"""Where the INT4 kernel for many rows spends its time: what it takes with parts of its work left out.

    python -m benchmarks.kernels_int4_wide_parts            # about 40 s

64 rows, groups of 128 with zero points. A kernel without some of its work computes nonsense; only its time counts.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, DOWN, UP, weights_of
from benchmarks.kernels_int4_wide import times
from pallas_kernels.int4_matmul import wide
from pallas_kernels.int4_matmul.wide_arrange import arrange
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule
from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.int4_matmul.wide_weights import RowPair

ROWS = 64
NARROW, BROAD = WideSchedule(ROWS, cluster=2, stages=8), WideSchedule(ROWS, tiles=2, slices=8, stages=6)
CASES: list[tuple[str, tuple[int, int], WideSchedule]] = [
    ("", UP, NARROW),
    ("unpacking", UP, NARROW),
    ("products", UP, NARROW),
    ("weights", UP, NARROW),
    ("x", UP, NARROW),
    ("", DOWN, BROAD),
    ("unpacking", DOWN, BROAD),
    ("products", DOWN, BROAD),
    ("weights", DOWN, BROAD),
    ("x", DOWN, BROAD),
]


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """The kernel's instructions without those of a part."""
    nothing = mock.Mock(return_value=None)
    arrive = WideWarp.expect_bytes
    patches: dict[str, list[tuple[Any, str, Any]]] = {
        "": [],
        "unpacking": [(RowPair, "weights", lambda self, words: [words[0]] * 4)],
        "products": [(WideWarp, "wgmma", lambda self, acc, a, matrix, advance: acc)],
        "weights": [(WideWarp, "copy_or_clear", nothing)],
        "x": [
            (WideWarp, "copy_to_cluster", nothing),
            (WideWarp, "expect_bytes", lambda self, barrier, nbytes, predicate: arrive(self, barrier, 0, predicate)),
        ],
    }
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in patches[part]:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def lowered(part: str, shape: tuple[int, int], schedule: WideSchedule) -> jax.stages.Lowered:
    """Products of one x with a list of weights; lowering writes the kernel's instructions."""
    k, n = shape
    weights = jax.eval_shape(lambda: weights_of.__wrapped__(k, n, 128, "zero_point"))

    def products(x: jax.Array, weights: Any) -> list[jax.Array]:
        plans = [WidePlan.of(ROWS, w, schedule) for w in weights]
        return [wide.launch(arrange(x, p), w, p, BF16) for p, w in zip(plans, weights, strict=True)]

    with without(part):
        return jax.jit(products).lower(jax.ShapeDtypeStruct((ROWS, k), BF16), weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    started, recorder = time.perf_counter(), Recorder("kernels", arguments.results)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        kernels = [pool.submit(lowered(*case).compile) for case in CASES]
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for (part, (k, n), schedule), kernel in zip(CASES, kernels, strict=True):
        if time.perf_counter() - started > arguments.seconds:
            print(f"{k} {n} without {part}: left out, the time is up", flush=True)
            continue
        x = jax.random.normal(jax.random.key(k), (ROWS, k), BF16)
        found = times(kernel.result(), x, weights_of(k, n, 128, "zero_point"))
        case: dict[str, object] = {"op": "int4_matmul", "m": ROWS, "k": k, "n": n, "without": part}
        case["tiles"] = schedule.tiles
        us = statistics.median(t for name, t in found if "int4_matmul" in name)
        recorder.record(case, {"us": (us, "us")})
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
