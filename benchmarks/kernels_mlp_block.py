"""A small model's feed-forward block for few rows: norm, gate and up, silu, down.

    python -m benchmarks.kernels_mlp_block              # a 0.6B draft's at 1 and at 2 rows, every way
    python -m benchmarks.kernels_mlp_block --rows 1
    python -m benchmarks.kernels_mlp_block --stamps     # and where the kernel's time goes, by clocks that it writes

Blocks of 16 layers with weights of their own (75 MB) one behind the other, in a loop on the device: by the host's clock
microseconds a block, what lies between the kernels included, and each kernel's own time by CUPTI. Beforehand one block
is compared with float32, and a loop's steps must have the same bits. Then the product behind it, qkv, of x and of x and
slices, by CUPTI.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, Case, random_weight, timed
from pallas_kernels.int4_matmul import PackedInt4, dequantize, gated_once, mosaic, once_of_sum, tuning
from pallas_kernels.int4_matmul.cluster_warp import ClusterWarp
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.plan import Fusion
from pallas_kernels.int4_matmul.warp import Value

HIDDEN, INTERMEDIATE, LAYERS, STEPS, CALLS = 1024, 3072, 16, 24, 6
EPS = 1e-6

type Layer = tuple[PackedInt4, PackedInt4, jax.Array]
"""Gate and up, down, the norm's weights."""
type Stream = tuple[jax.Array, jax.Array | None]
"""x, and slices that are to be added to it."""


def apart(stream: Stream, layer: Layer, following: Layer) -> Stream:
    """A kernel for each product; the second adds the residual."""
    del following
    (x, _), (gate_up, down, norm) = stream, layer
    gated, residual = Fusion(norm_eps=EPS, gated=True), Fusion(residual=True)
    options: dict[str, Any] = {"out_dtype": BF16}
    schedule = tuning.plan_for(len(x), gate_up, fusion=gated).schedule
    hidden = mosaic.int4_matmul(x, gate_up, norm, schedule=schedule, fusion=gated, **options)
    schedule = tuning.plan_for(len(x), down, fusion=residual).schedule
    return mosaic.int4_matmul(hidden, down, residual=x, schedule=schedule, fusion=residual, **options), None


def together(
    clusters: int, cluster: int, *, settled: bool = False, ahead: bool = True
) -> Callable[[Stream, Layer, Layer], Stream]:
    """One kernel; `settled`: XLA adds its slices; `ahead`: it brings the next one's weights into the L2 cache."""

    def block(stream: Stream, layer: Layer, following: Layer) -> Stream:
        (x, partial), (gate_up, down, norm) = stream, layer
        options = {"clusters": clusters, "cluster": cluster, "norm_eps": EPS}
        arrays = jax.tree.leaves(following) if ahead else []
        out, y = gated_once.gated_mlp(x, partial, gate_up, down, norm, arrays, **options)
        return (settle((y, out)), None) if settled else (y, out)

    return block


def settle(stream: Stream) -> jax.Array:
    x, partial = stream
    return x if partial is None else (x.astype(jnp.float32) + partial.sum(0)).astype(BF16)


APART = "a kernel a product"
WAYS: dict[str, Callable[[Stream, Layer, Layer], Stream]] = {
    APART: apart,
    "12 clusters of 8": together(12, 8),
    "12 clusters of 8, not ahead": together(12, 8, ahead=False),
    "24 clusters of 4": together(24, 4),
    "12 clusters of 8, added by XLA": together(12, 8, settled=True),
}
PREDICTED = {
    (1, APART): 7.8,
    (1, "12 clusters of 8"): 5.3,
    (1, "12 clusters of 8, not ahead"): 5.7,
    (1, "24 clusters of 4"): 5.3,
    (1, "12 clusters of 8, added by XLA"): 6.3,
    (2, APART): 8.3,
    (2, "12 clusters of 8"): 5.8,
    (2, "24 clusters of 4"): 5.8,
}
"""Microseconds a block, with what lies between kernels."""


def random_layer(seed: jax.Array) -> Layer:
    """Scales are so small that gates are in the range where they do something."""
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = []
    for key, (inputs, outputs) in zip(keys, ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)), strict=False):
        weight = random_weight(key, Case(1, inputs, outputs, 0))
        weights.append(dataclasses.replace(weight, scales=weight.scales * jnp.asarray(0.003, weight.scales.dtype)))
    return weights[0], weights[1], jax.random.uniform(keys[2], (HIDDEN,), jnp.float32, 0.5, 1.5)


def reference(stream: Stream, layer: Layer) -> jax.Array:
    """What the block adds to x, in float32."""
    gate_up, down, norm = layer
    x = settle(stream).astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + jnp.float32(EPS))
    gate, up = jnp.split(jnp.dot(x * root * norm[None], dequantize(gate_up).T, precision="highest"), 2, axis=1)
    return jnp.dot(jax.nn.silu(gate) * up, dequantize(down).T, precision="highest")


def error_of(way: str, rows: int, layer: Layer) -> float:
    """Of what one block adds, relative; the memory that it writes to held NaN before."""
    keys = jax.random.split(jax.random.key(7), 2)
    x = jax.random.normal(keys[0], (rows, HIDDEN), BF16)
    slices = None if way == APART or "XLA" in way else jax.random.normal(keys[1], (8, rows, HIDDEN))
    block = jax.jit(lambda stream, layer: settle(WAYS[way](stream, layer, layer)).astype(jnp.float32))
    jax.block_until_ready([jnp.full((1 << 16,), jnp.nan) for _ in range(32)])
    got = block((x, slices), layer) - settle((x, slices)).astype(jnp.float32)
    want = reference((x, slices), layer)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def program(way: str) -> Any:
    """jit of (x [rows, hidden], layers) -> x behind the last layer, of every step."""

    def step(carry: jax.Array, layers: list[Layer]) -> tuple[jax.Array, jax.Array]:
        stream: Stream = (carry, None)
        for layer, following in zip(layers, [*layers[1:], layers[0]], strict=True):
            stream = WAYS[way](stream, layer, following)
        out = settle(stream)
        # Every step begins with the same x, and waits for the one before.
        return jnp.where(jnp.isnan(out), out, carry), out

    return jax.jit(lambda x, layers: lax.scan(lambda carry, _: step(carry, layers), x, None, length=STEPS)[1])


def measure(recorder: Recorder, way: str, rows: int, function: Any, layers: list[Layer]) -> jax.Array:
    x = jax.random.normal(jax.random.key(5), (rows, HIDDEN), BF16)
    outs, times = jax.block_until_ready(function(x, layers)), []
    same = bool((outs == outs[:1]).all())  # false where something is not a number, too
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(x, layers))
        times.append((time.perf_counter() - started) / STEPS / LAYERS * 1e6)
    print(
        f"predicted {PREDICTED.get((rows, way), 'nothing')} us, best {min(times):.2f}, "
        f"error of a block {error_of(way, rows, layers[0]):.1e}, {'same bits' if same else 'OTHER BITS'}"
    )
    case: dict[str, object] = {"op": "int4 mlp block", "m": rows, "way": way, "hidden": HIDDEN}
    recorder.record(case, {"us_per_block": (statistics.median(times), "us")})
    _, timings = profiler.measure(function, aggregate=False)(x, layers)
    by_name: dict[str, list[float]] = {}
    for i, (name, t) in enumerate(timings or []):
        key = f"{name[:24]} {i % 2}" if way == APART else name[:24]
        by_name.setdefault(key, []).append(t * 1e3)
    shown = [f"{name} {len(t)} of {statistics.median(t):.2f}" for name, t in by_name.items() if len(t) >= STEPS]
    print("  us:", ", ".join(shown))
    return outs[0]


QKV = 4096
PRODUCTS = {(0, 1): 2.9, (8, 4): 3.3, (16, 4): 3.4, (16, 8): 3.4}
"""Predicted microseconds of qkv at one row, by slices and blocks of a cluster."""


def measure_product(recorder: Recorder, slices: int, cluster: int, predicted: float) -> None:
    """A qkv product of x, or of x and slices, of weights past the L2 cache."""
    fusion, keys = Fusion(norm_eps=EPS), jax.random.split(jax.random.key(3), 4)
    make = jax.jit(lambda key: random_weight(key, Case(1, HIDDEN, QKV, 0)))
    weights = [make(key) for key in jax.random.split(keys[0], 2 * LAYERS)]
    x, norm = jax.random.normal(keys[1], (1, HIDDEN), BF16), jax.random.uniform(keys[2], (HIDDEN,), jnp.float32, 0.5)
    partial = jax.random.normal(keys[3], (slices, 1, HIDDEN)) if slices else None
    options: dict[str, Any] = {"schedule": tuning.plan_for(1, weights[0], fusion=fusion).schedule, "out_dtype": BF16}

    @jax.jit
    def product(w: PackedInt4, x: jax.Array, partial: jax.Array | None) -> jax.Array:
        if partial is None:
            return mosaic.int4_matmul(x, w, norm, fusion=fusion, **options)
        return once_of_sum.int4_matmul_of_sum(x, partial, w, norm, norm_eps=EPS, cluster=cluster, **options)[0]

    got = product(weights[0], x, partial)
    same = all(bool(jnp.array_equal(got, product(weights[0], x, partial))) for _ in range(20))
    y = settle((x, partial)).astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + jnp.float32(EPS))
    want = jnp.dot(y * root * norm[None], dequantize(weights[0]).T, precision="highest")
    error = float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))
    times, _ = timed(lambda x, weights, partial: [product(w, x, partial) for w in weights], x, weights, partial)
    print(f"predicted {predicted} us, error {error:.1e}, {'repeatable' if same else 'NOT REPEATABLE'}")
    case: dict[str, object] = {"op": "int4_matmul", "m": 1, "k": HIDDEN, "n": QKV, "slices": slices, "cluster": cluster}
    recorder.record(case, {"us": (statistics.median(times), "us")})


STAMPS = 64
"""Of a warp; a block's first and last warp have some."""


class StampedWarp(ClusterWarp):
    """Writes clocks in place of the block's results: before and after whatever waits."""

    def begin(self, out: Any, block: Value) -> None:
        last = self.integer(6) < self.warp
        self._out, self._next = out, 0
        self._lead = (self.lane < 1) & self.select(last, last, self.warp < 1)
        self._base = block * (2 * STAMPS) + self.select(last, self.integer(STAMPS), self.integer(0))
        self.put("globaltimer_lo")
        self.put()

    def put(self, clock: str = "clock") -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], f"mov.u32 $0, %{clock};", "=r,~{memory}", has_side_effects=True)
        pointer = self._pointer(self._out, self._base + self._next, 4)
        self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", pointer, bits, self._lead.ir)
        self._next += 1

    def cluster_wait(self) -> None:
        self.put()
        super().cluster_wait()
        self.put()

    def copy_wait(self, pending: int) -> None:
        self.put()
        super().copy_wait(pending)
        self.put()

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        self.put()
        super().barrier_wait(barrier, parity)
        self.put()

    def wait_sent(self, barrier: int) -> None:
        self.put()
        super().wait_sent(barrier)
        self.put()

    def block_barrier(self) -> None:
        self.put()
        super().block_barrier()
        self.put()

    def store_number(self, ref: Any, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


NAMES = (
    "x asked for, cluster there; weights asked for, x there; sum sent, there; norm waited for, there; "
    "x prepared (twice); product made, by all; features sent or weights asked for ahead, down's there; unpacked, "
    "features there; end"
)


def stamped(w: ClusterWarp, plan: GatedPlan, gate_up: Any, down: Any, block: Value, *others: Any) -> None:
    own = StampedWarp.__new__(StampedWarp)
    own.__dict__.update(w.__dict__)
    own.begin(down.out, block)
    gated_once.feed_forward(own, plan, gate_up, down, block, *others)
    own.put()


def show_stamps(layers: list[Layer], clusters: int, cluster: int) -> None:
    """Medians over layers and blocks of clocks since a block's start, and when blocks start."""
    keys = jax.random.split(jax.random.key(7), 2)
    x, slices = jax.random.normal(keys[0], (1, HIDDEN), BF16), jax.random.normal(keys[1], (8, 1, HIDDEN))
    options = {"clusters": clusters, "cluster": cluster, "norm_eps": EPS, "program": stamped}

    @jax.jit
    def run(layers: list[Layer]) -> list[jax.Array]:
        outs, after = [], slices
        for layer, following in zip(layers, [*layers[1:], layers[0]], strict=True):
            arrays = jax.tree.leaves(following)
            outs.append(gated_once.gated_mlp(x, after, *layer, arrays, **options)[0])
            after, _ = lax.optimization_barrier((slices, outs[-1]))  # one after the other
        return outs

    run(layers)
    blocks, clocks = clusters * cluster, np.stack([np.asarray(out).reshape(-1) for out in run(layers)])
    clocks = clocks.view(np.uint32)[:, : blocks * 2 * STAMPS].reshape(len(layers), blocks, 2, STAMPS).astype(np.int64)
    starts = clocks[:, :, 0, 0] - clocks[:, :, 0, 0].min(1, keepdims=True)
    print(
        f"{clusters} clusters of {cluster}: blocks start after", np.percentile(starts, [0, 50, 90, 100]), "ns;", NAMES
    )
    for which, label in enumerate(("first warp", "last warp")):
        since = (clocks[:, :, which] - clocks[:, :, which, 1:2]) & 0xFFFFFFFF
        for share in (50, 95):
            shown = np.percentile(since, share, axis=(0, 1))[2:19]
            print(f"  {label}, {share} %:", " ".join(f"{value:.0f}" for value in shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="by default those with a prediction")
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder = Recorder("kernels", arguments.results)
    make = jax.jit(random_layer)
    layers = [make(seed) for seed in range(LAYERS)]
    if arguments.stamps:
        for shape in ((12, 8), (24, 4)):
            show_stamps(layers, *shape)
    jobs = list(PREDICTED)
    if arguments.rows is not None:
        jobs = [(rows, way) for rows in arguments.rows for way in WAYS]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        lowered = [program(way).lower(jnp.zeros((rows, HIDDEN), BF16), layers) for rows, way in jobs]
        compiled = list(pool.map(lambda one: one.compile(), lowered))
    first: dict[int, jax.Array] = {}
    for (rows, way), function in zip(jobs, compiled, strict=True):
        out = measure(recorder, way, rows, function, layers).astype(jnp.float32)
        expected = first.setdefault(rows, out)
        print(f"  from the first way {float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)):.1e}")
    for (slices, cluster), predicted in PRODUCTS.items():
        measure_product(recorder, slices, cluster, predicted)


if __name__ == "__main__":
    main()
