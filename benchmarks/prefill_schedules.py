"""The prefill kernel on the GPU: is it right, which schedule is fastest, where does the route through cuDNN spend time?

    python -m benchmarks.prefill_schedules [--seconds 40] [--results FOLDER]

Times the kernel's schedules as `kernels_attention` does, prints every kernel of one call of it and of the route through
cuDNN, by CUPTI, and checks the kernel against float32 attention over the same pages: the same bits on every run.
"""

import argparse
import dataclasses
import pathlib
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.attention_prefill import WINDOW, Chunk, Work, chunk_timing
from benchmarks.harness import Recorder
from jaxinfer.layers import attention

CHECKS = [
    Chunk("kernel", 512, 1024),
    Chunk("kernel windowed", 512, 1536),
]
AFTER_2048 = Chunk("kernel", 2048, 2048)
SCHEDULES = [{}, {"blocks": 132}]
OTHERS = [
    Chunk("kernel", 2048, 2048, "int8"),
    Chunk("kernel", 2048, 30720),
    Chunk("kernel", 512, 3584),
    Chunk("kernel", 4096),
    Chunk("whole", 4096),
    Chunk("kernel windowed", 2048, 2048),
    Chunk("kernel", 2048, 2048, head_dim=64),
    Chunk("kernel", 2048, 2048, head_dim=256),
]


def check(case: Chunk) -> None:
    work = Work(case)
    run = jax.jit(work.route)
    got = [np.asarray(run(*work.arrays)).astype(np.float32) for _ in range(3)]
    wide: list[Any] = [jnp.asarray(x, jnp.float32) for x in (work.query, *work.pools)]
    stored = (wide[1], wide[2], work.positions, work.table)
    window = WINDOW if case.route.endswith("windowed") else None
    options = {"scale": case.head_dim**-0.5, "window": window, "softcap": None}
    with jax.default_matmul_precision("highest"):
        want = np.asarray(attention.prefill_attention(wide[0], *stored, **options))
    error = np.linalg.norm(got[0] - want) / np.linalg.norm(want)
    same = all((again == got[0]).all() for again in got[1:])
    print(f"{case}: relative error {error:.2e}, {'same bits' if same else 'BITS DIFFER'}", flush=True)


def profile(case: Chunk) -> None:
    """Prints the time of every kernel of one call."""
    work = Work(case)
    run = jax.jit(work.route)
    jax.block_until_ready(run(*work.arrays))
    _, kernels = profiler.measure(run, aggregate=False)(*work.arrays)
    times: dict[str, float] = {}
    for name, ms in kernels or []:
        times[name] = times.get(name, 0.0) + ms * 1e3
    print(f"{case}: {sum(times.values()):.1f} us in {len(kernels or [])} kernels", flush=True)
    for name, us in sorted(times.items(), key=lambda item: -item[1]):
        print(f"    {us:7.1f} us  {name[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="start no new case after this long")
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    options = parser.parse_args()
    recorder = Recorder("kernels", options.results) if options.results else Recorder("kernels")
    start = time.perf_counter()
    schedules = [dataclasses.replace(AFTER_2048, schedule=tuple(changes.items())) for changes in SCHEDULES]
    timed = [(lambda case: chunk_timing(recorder, case), case) for case in [*schedules, *OTHERS]]
    profiled = [(profile, AFTER_2048), (profile, Chunk("chunk", 2048, 2048))]
    steps = [*timed, *profiled, *[(check, case) for case in CHECKS]]
    for step, case in steps:
        if time.perf_counter() - start > options.seconds:
            print(f"out of time: {case}", flush=True)
            continue
        try:
            step(case)
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AssertionError):
            print(f"failed: {case}", flush=True)
            traceback.print_exc(limit=-3)
        print(f"  {time.perf_counter() - start:.1f} s in all", flush=True)


if __name__ == "__main__":
    main()
