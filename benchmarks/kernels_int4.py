"""Times (kernel by kernel, by CUPTI, weights rotated past the L2 cache) and checks the INT4 matrix product.

    python -m benchmarks.kernels_int4            # every case, about two minutes on an H200
    python -m benchmarks.kernels_int4 n14336     # the cases whose name contains the word

Prints a line a case; with $OUT set, also appends JSON lines to $OUT/kernels_int4.jsonl.
"""

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
import traceback

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul import PackedInt4, dequantize, mosaic
from pallas_kernels.int4_matmul.mosaic import Schedule

STARTED = time.perf_counter()
BUDGET_SECONDS = float(os.environ.get("BUDGET_SECONDS", "170"))
ROTATED_BYTES = 256 << 20
L2_BYTES = 50 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    schedule: Schedule
    predicted_us: float
    group: int = 128
    kind: str = "zero_point"

    @property
    def name(self) -> str:
        s = self.schedule
        problem = f"k{self.k} n{self.n} m{self.m} g{self.group} {self.kind}"
        return f"{problem} {s.rows}r{s.splits}s{s.cluster}c{s.depth}d {s.stream}"


def ring(*numbers: int) -> Schedule:
    return Schedule(*numbers, stream="ring")


CASES = [
    Case(8, 4096, 14336, Schedule(1, 2, 1, 4), 9.4),
    Case(8, 4096, 14336, ring(1, 2, 1, 4), 9.2),
    Case(8, 4096, 14336, ring(7, 1, 4, 4), 8.8),
    Case(8, 4096, 14336, Schedule(7, 1, 4, 2), 9.6),
    Case(8, 14336, 4096, Schedule(1, 4, 2, 4), 9.3),
    Case(8, 14336, 4096, ring(2, 2, 4, 4), 9.3),
    Case(8, 4096, 4096, Schedule(1, 4, 2, 4), 4.0),
    Case(8, 4096, 6144, Schedule(3, 1, 4, 8), 4.9),
    Case(16, 4096, 14336, ring(7, 1, 4, 4), 10.0),
    Case(16, 4096, 14336, Schedule(2, 2, 1, 4), 11.0),
    Case(16, 14336, 4096, ring(2, 2, 4, 4), 10.3),
    Case(8, 4096, 4096, Schedule(1, 4, 2, 4), 4.6, 32, "minimum"),
]


def random_weight(key: jax.Array, case: Case) -> PackedInt4:
    """A weight in the kernel's layout: any bits are valid codes."""
    codes_key, scales_key, offsets_key = jax.random.split(key, 3)
    groups = -(-case.k // case.group)
    words = jax.random.bits(codes_key, (case.n // 64, case.k // 64, 4, 128), jnp.uint32)
    scales = jax.random.uniform(scales_key, (groups, case.n), jnp.float32, 0.5, 1.5).astype(jnp.bfloat16)
    offsets = None
    if case.kind == "zero_point":
        offsets = jax.random.randint(offsets_key, (groups, case.n), 0, 16, jnp.int32).astype(jnp.uint8)
    elif case.kind == "minimum":
        offsets = (-8.0 * jax.random.uniform(offsets_key, (groups, case.n), jnp.float32, 0.5, 1.5)).astype(jnp.bfloat16)
    codes = lax.bitcast_convert_type(words, jnp.int32)
    return PackedInt4(codes, scales, offsets, None, (case.n, case.k), case.group, "mosaic")


@functools.cache
def inputs(m: int, k: int, n: int, group: int, kind: str) -> tuple[list[PackedInt4], jax.Array, jax.Array]:
    """Weights enough to pass the L2 cache, tokens, and the float32 product with the first weight."""
    case = Case(m, k, n, Schedule(1, 1, 1, 1), 0.0, group, kind)
    count = max(2, -(-ROTATED_BYTES // (n * k // 2)))
    make = jax.jit(lambda seed: random_weight(jax.random.key(seed), case))
    weights = [make(seed) for seed in range(count)]
    x = jax.random.normal(jax.random.key(99), (m, k), jnp.bfloat16)
    product = jax.jit(lambda x, w: jnp.dot(x.astype(jnp.float32), dequantize(w).T, precision="highest"))
    return weights, x, product(x, weights[0])


def kernel_times(function, *arguments, keep="mosaic", iterations: int = 6) -> list[float]:
    """Microseconds of every kernel whose name contains `keep`, the first iteration left out."""
    _, timings = profiler.measure(jax.jit(function), aggregate=False, iterations=iterations)(*arguments)
    times = [t * 1e3 for iteration in timings[1:] for name, t in iteration if keep in name]
    if not times:
        raise RuntimeError(f"no kernel named {keep}: {sorted({name for name, _ in timings[0]})}")
    return times


def run(case: Case) -> None:
    weights, x, expected = inputs(case.m, case.k, case.n, case.group, case.kind)

    @jax.jit  # traced and lowered once, however often the timed function calls it
    def product(w: PackedInt4, x: jax.Array) -> jax.Array:
        return mosaic.int4_matmul(w.codes, w.scales, w.offsets, x, group_size=w.group_size, schedule=case.schedule)

    started = time.perf_counter()
    first = jax.block_until_ready(product(weights[0], x))
    compile_seconds = time.perf_counter() - started
    error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    same = all(bool(jnp.array_equal(first, product(weights[0], x))) for _ in range(3))
    times = kernel_times(lambda x, weights: [product(w, x) for w in weights], x, weights)
    us = statistics.median(times)
    spread = statistics.quantiles(times, n=10)
    report(
        case.name,
        us,
        case.k * case.n / 2,
        f"predicted {case.predicted_us:5.1f} p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} error {error:.1e} "
        f"{'repeatable' if same else 'NOT REPEATABLE'} compile {compile_seconds:.1f}s",
        dataclasses.asdict(case),
    )


def report(name: str, us: float, nbytes: float, note: str, record: dict) -> None:
    print(f"{name:58s} {us:7.2f} us {nbytes / us / 1e6:5.2f} TB/s  {note}", flush=True)
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "kernels_int4.jsonl"), "a") as file:
            file.write(
                json.dumps({"name": name, "us": us, "tb_per_s": nbytes / us / 1e6, "note": note, **record}) + "\n"
            )


def read_only(words: jax.Array, blocks: int, warpgroups: int, depth: int) -> jax.Array:
    """Reads int32[blocks, warpgroups, tiles, 4, 128] as the matrix kernel does, and does nothing else."""
    tiles = words.shape[2]
    layout = plgpu.Layout.WG_STRIDED((4, 128), vec_size=4)

    def kernel(words_ref, out_ref):
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        mine = words_ref.at[block, warpgroup]
        pending = [plgpu.load(mine.at[t], layout=layout, optimized=False) for t in range(depth)]
        total = pending[0] ^ pending[0]
        for t in range(tiles):
            if t + depth < tiles:
                pending.append(plgpu.load(mine.at[t + depth], layout=layout, optimized=False))
            total = total ^ pending.pop(0)
        out_ref.at[block, warpgroup][...] = total

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((blocks, warpgroups, 4, 128), jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
    )(words)


def ceilings() -> None:
    for blocks, warpgroups, tiles, depth in ((1, 1, 1, 1), (224, 2, 32, 8), (128, 8, 14, 7), (128, 4, 8, 8)):
        shape = (blocks, warpgroups, tiles, 4, 128)
        nbytes = blocks * warpgroups * (tiles + 1) * 2048
        count = max(2, min(64, ROTATED_BYTES // nbytes))
        words = [jax.random.bits(jax.random.key(i), shape, jnp.uint32).view(jnp.int32) for i in range(count)]
        single = jax.jit(functools.partial(read_only, blocks=blocks, warpgroups=warpgroups, depth=depth))
        us = statistics.median(kernel_times(lambda words, single=single: [single(w) for w in words], words))
        report(f"read only: {blocks} blocks x {warpgroups} x {tiles} tiles, depth {depth}", us, nbytes, "", {})


def main() -> None:
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    wanted = sys.argv[1:]
    for function, name in [(ceilings, "read")] + [(functools.partial(run, case), case.name) for case in CASES]:
        if wanted and not any(word in name for word in wanted):
            continue
        if time.perf_counter() - STARTED > BUDGET_SECONDS:
            print(f"{name}: left out, the time is up", flush=True)
            continue
        try:
            function()
        except Exception as error:  # one failing case must not cost the run on a lent machine
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:400]}", flush=True)
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
    print(f"total {time.perf_counter() - STARTED:.0f} s", flush=True)


if __name__ == "__main__":
    main()
