"""Checks and times the INT4 matrix product: kernel by kernel by CUPTI, and as a chain such as decoding runs.

    python -m benchmarks.kernels_int4            # every case, most telling first, until --seconds (75) are over
    python -m benchmarks.kernels_int4 chain      # the cases whose name contains the word

Weights are rotated past the L2 cache. TB/s counts the codes only. Every case prints its prediction, its relative error
against a float32 product and whether its bits repeat.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks import kernels_triton
from benchmarks.harness import RESULTS, Recorder, read_rate, run_each
from pallas_kernels.int4_matmul import PackedInt4, dequantize, mosaic, strip, tuning
from pallas_kernels.int4_matmul.bulk_stream import BulkStream
from pallas_kernels.int4_matmul.operands import Tokens
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, PLAIN, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.stream import Stream

ROTATED_BYTES = 256 << 20
BF16 = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    predicted_us: float
    schedule: Schedule | None = None  # None: what tuning chooses
    group: int = 128
    kind: str = "zero_point"
    only: str = ""  # "read": fetch the weights and nothing else; "read x": and x; "": everything
    fusion: Fusion = PLAIN

    @property
    def chosen(self) -> Schedule:
        weight = jax.eval_shape(lambda: random_weight(jax.random.key(0), self))
        return self.schedule or tuning.plan_for(self.m, weight, fusion=self.fusion).schedule

    @property
    def part(self) -> str:
        fused = {"norm": self.fusion.norm_eps is not None, "gate": self.fusion.gated, "residual": self.fusion.residual}
        return self.only or " ".join(["all", *(name for name, given in fused.items() if given)])

    @property
    def record(self) -> dict[str, object]:
        s = self.chosen
        way = "scaled" if s.scaled else "digits" if s.digits else "halves"
        way += (" bulk" if s.bulk else "") + (" once" if s.once else "") + (" joined" if s.joined else "")
        way += " apart" if s.apart else ""
        return {
            "op": "int4_matmul",
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "group": self.group,
            "zero": self.kind,
            "schedule": f"{s.warps}w{s.parts}p{s.strips}s{s.depth}d {s.blocks}b {way}",
            "part": self.part,
        }

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.record.items())


UP, DOWN = (4096, 14336), (14336, 4096)
GATE_UP, QKV, OUT = (4096, 28672), (4096, 6144), (4096, 4096)
WIDE = Schedule(warps=16, parts=2, strips=2, depth=3, scaled=True, bulk=True)
TALL = Schedule(warps=8, parts=2, strips=2, depth=3, blocks=264, scaled=True, bulk=True)
HALVES = Schedule(warps=16, parts=2, strips=4, depth=3)
NORM, NORM_GATE = Fusion(norm_eps=1e-5), Fusion(norm_eps=1e-5, gated=True)
CASES = [
    Case(1, *UP, 9.5),
    Case(8, *UP, 10.7),
    Case(1, *DOWN, 9.2),
    Case(8, *DOWN, 10.1),
    Case(1, *OUT, 4.3),
    Case(8, *OUT, 5.5),
    Case(1, *QKV, 5.5),
    Case(8, *QKV, 7.0),
    Case(1, *GATE_UP, 16.2),
    Case(1, *GATE_UP, 16.7, fusion=NORM_GATE),
    Case(1, *QKV, 5.6, fusion=NORM),
    Case(1, *OUT, 4.3, fusion=Fusion(residual=True)),
    Case(8, *GATE_UP, 20.9, fusion=NORM_GATE),
    Case(8, *GATE_UP, 18.5, WIDE, fusion=NORM_GATE),
    Case(16, *GATE_UP, 28.7, fusion=NORM_GATE),
    Case(16, *UP, 15.1),
    Case(16, *DOWN, 14.6),
    Case(8, *UP, 12.4, dataclasses.replace(HALVES, digits=True)),
    Case(8, *UP, 12.4, HALVES),
    Case(8, *UP, 8.6, WIDE, only="read"),
    Case(8, *UP, 9.5, WIDE, only="read x"),
]
CHAIN_AFTER = 12


def random_weight(key: jax.Array, case: Case) -> PackedInt4:
    """A weight in the kernel's layout: any bits are valid codes."""
    codes_key, scales_key, offsets_key = jax.random.split(key, 3)
    groups = -(-case.k // case.group)
    words = jax.random.bits(codes_key, (case.n // 16, case.k // 64, 128), jnp.uint32)
    shape = (case.n // 16, groups, 16)
    scales = jax.random.uniform(scales_key, shape, jnp.float32, 0.5, 1.5).astype(BF16)
    offsets = None
    if case.kind == "zero_point":
        offsets = jax.random.randint(offsets_key, shape, 0, 16, jnp.int32).astype(jnp.uint8)
    elif case.kind == "minimum":
        offsets = (-8.0 * jax.random.uniform(offsets_key, shape, jnp.float32, 0.5, 1.5)).astype(BF16)
    codes = lax.bitcast_convert_type(words, jnp.int32)
    return PackedInt4(codes, scales, offsets, None, (case.n, case.k), case.group, "mosaic")


@functools.cache
def weights_of(k: int, n: int, group: int, kind: str) -> list[PackedInt4]:
    """As many weights as it takes to pass the L2 cache."""
    case = Case(1, k, n, 0.0, group=group, kind=kind)
    make = jax.jit(lambda seed: random_weight(jax.random.key(seed), case))
    return [make(seed) for seed in range(max(2, -(-ROTATED_BYTES // (n * k // 2))))]


@functools.cache
def inputs(
    m: int, k: int, n: int, group: int, kind: str, fusion: Fusion
) -> tuple[jax.Array, dict[str, jax.Array | None], jax.Array]:
    """Tokens, what else the product takes, and the float32 result for the first weight."""
    keys = jax.random.split(jax.random.key(99), 3)
    x = jax.random.normal(keys[0], (m, k), BF16)
    norm = None if fusion.norm_eps is None else jax.random.uniform(keys[1], (k,), jnp.float32, 0.5, 1.5)
    residual = jax.random.normal(keys[2], (m, n), BF16) if fusion.residual else None

    @jax.jit
    def product(x: jax.Array, w: PackedInt4) -> jax.Array:
        x = x.astype(jnp.float32)
        root = jnp.float32(1.0)
        if norm is not None:
            root = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + jnp.float32(1e-5))
            x = (x * norm[None, :]).astype(BF16).astype(jnp.float32)
        out = jnp.dot(x, dequantize(w).T, precision="highest") * root
        if fusion.gated:
            gate, other = jnp.split(out, 2, axis=1)
            out = jax.nn.silu(gate) * other
        return out if residual is None else out + residual.astype(jnp.float32)

    return x, {"norm": norm, "residual": residual}, product(x, weights_of(k, n, group, kind)[0])


def read(w: Any, plan: Plan, a: strip.Arguments, slice_: Any, block: Any, *, with_x: bool) -> None:
    """One warp's part of a kernel that fetches the weights as `mosaic.multiply` does, and only adds up their bits."""
    stream = (BulkStream if plan.schedule.bulk else Stream)(w, plan, a.weights, slice_, block)
    zero, total = w.integer(0), w.integer(0)
    stream.begin()
    tokens = Tokens(w, plan, a.x, None, stream.first_tile).words() if with_x else []
    stream.open()
    stream.fill()
    for words in (words for steps in tokens for blocks in steps for words in blocks):
        total = total + words[0] + words[1]
    stream.spare_is_free()

    def turn(index: Any, carry: Any) -> Any:
        total, *slots = carry
        places = stream.arrived(index, slots)
        for piece in range(plan.warp_tiles):
            for word in w.shared_words(places.words + w.lane * 16, piece * PIECE_BYTES):
                total = total + word
        return total, *stream.read(slots)

    carry = w.loop(stream.count, (total, *stream.first()), turn)
    # Something has to depend on the words; this stores once in a million runs.
    w.store_number(a.out, zero, w.number(1.0), a.out_dtype, carry[0] < -2147483000)


def timed(function: Callable[..., Any], *arguments: Any, iterations: int = 6) -> tuple[list[float], float]:
    """Microseconds of every run of our kernel, and of all other kernels together per run of ours."""
    _, timings = profiler.measure(jax.jit(function), aggregate=False, iterations=iterations)(*arguments)
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    kernels = [(name, t * 1e3) for iteration in timings[1:] for name, t in iteration]
    ours = [t for name, t in kernels if "int4_matmul" in name or "mosaic" in name]
    if not ours:
        raise RuntimeError(f"CUPTI saw no int4_matmul among {sorted({name for name, _ in kernels})}")
    return ours, (sum(t for _, t in kernels) - sum(ours)) / len(ours)


def run(recorder: Recorder, rate: float, case: Case) -> None:
    weights = weights_of(case.k, case.n, case.group, case.kind)
    x, given, expected = inputs(case.m, case.k, case.n, case.group, case.kind, case.fusion)
    schedule = case.chosen

    @jax.jit  # traced and lowered once, however often the timed function calls it
    def product(w: PackedInt4, x: jax.Array) -> jax.Array:
        if case.only:
            program = functools.partial(read, with_x=case.only == "read x")
            return mosaic.partial_sums(x, w, schedule=schedule, out_dtype=BF16, program=program)
        return mosaic.int4_matmul(x, w, **given, schedule=schedule, out_dtype=BF16, fusion=case.fusion)

    started = time.perf_counter()
    first = jax.block_until_ready(product(weights[0], x))
    compile_seconds = time.perf_counter() - started
    note = ""
    if not case.only:
        error = float(jnp.linalg.norm(first.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
        same = all(bool(jnp.array_equal(first, product(weights[0], x))) for _ in range(3))
        note = f"error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'} "
        if not same or not error < 1e-2:
            raise AssertionError(f"{case.name}: {note}")
    times, others = timed(lambda x, weights: [product(w, x) for w in weights], x, weights)
    spread = statistics.quantiles(times, n=10)
    note += f"p10-p90 {spread[0]:.1f}-{spread[-1]:.1f} sum {others:.1f} us compile {compile_seconds:.1f}s"
    report(recorder, rate, case.record, statistics.median(times), case.predicted_us, case.k * case.n / 2, note)


def chain(recorder: Recorder, rate: float, m: int, up: Schedule, down: Schedule, predicted_us: float) -> None:
    """A loop in which every product waits for the one before, as in decoding: 4096 -> 14336 -> 4096 -> ..."""
    pairs = list(zip(weights_of(*UP, 128, "zero_point")[:4], weights_of(*DOWN, 128, "zero_point")[:4], strict=True))

    def multiply(x: jax.Array, w: PackedInt4, schedule: Schedule) -> jax.Array:
        product = mosaic.int4_matmul(x, w, schedule=schedule, out_dtype=jnp.dtype(jnp.float32))
        return (product * (0.15 * w.shape[1] ** -0.5)).astype(BF16)

    def step(_: int, x: jax.Array, pairs: list[tuple[PackedInt4, PackedInt4]]) -> jax.Array:
        for w_up, w_down in pairs:
            x = multiply(multiply(x, w_up, up), w_down, down)
        return x

    rounds = 50
    loop = jax.jit(lambda x, pairs: lax.fori_loop(0, rounds, functools.partial(step, pairs=pairs), x))
    x = jax.random.normal(jax.random.key(5), (m, UP[0]), BF16)
    first = jax.block_until_ready(loop(x, pairs))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(loop(x, pairs))
        times.append((time.perf_counter() - started) / rounds / 8 * 1e6)
    case: dict[str, object] = {"op": "int4_matmul", "m": m, "part": "chain"}
    note = f"norm {float(jnp.linalg.norm(first.astype(jnp.float32))):.4g} best {min(times):.2f}"
    report(recorder, rate, case, statistics.median(times), predicted_us, UP[0] * UP[1] / 2, note)


def report(
    recorder: Recorder, rate: float, case: dict[str, object], us: float, predicted: float, nbytes: float, note: str
) -> None:
    """`rate`: the bytes per second at which this card reads memory."""
    print(f"predicted {predicted:.1f} us, {note}")
    read = nbytes / us * 1e6
    recorder.record(case, {"us": (us, "us"), "tb_per_s": (read / 1e12, "TB/s"), "hbm_share": (read / rate, "")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the cases whose name contains one of them")
    parser.add_argument("--seconds", type=float, default=75.0, help="start no case after this time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    parser.add_argument("--backend", choices=("mosaic", "triton"), default="mosaic", help="triton: kernels_triton.py's")
    arguments = parser.parse_args()
    if arguments.backend == "triton":
        return kernels_triton.run(arguments.words, arguments.seconds, arguments.results, "int4_matmul")
    started = time.perf_counter()
    recorder, rate = Recorder("kernels", arguments.results), read_rate()
    jobs: list[tuple[str, Callable[[], None]]] = [
        (case.name, functools.partial(run, recorder, rate, case)) for case in CASES
    ]
    jobs.insert(CHAIN_AFTER, ("chain", functools.partial(chain, recorder, rate, 8, WIDE, TALL, 11.5)))
    if arguments.words:
        jobs = [job for job in jobs if any(word in job[0] for word in arguments.words)]
    run_each(jobs, started, arguments.seconds)


if __name__ == "__main__":
    main()
