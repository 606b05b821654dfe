"""A kernel that stays on the card for all layers of one row: what its exchanges cost, and whether memory waits.

    python -m benchmarks.resident            # Qwen3-0.6B's matrices, 28 layers, bfloat16; timed by CUPTI

The cases: the whole kernel with fewer or more slots under way; without exchange (wrong results: memory alone); without
weights (exchanges and arithmetic alone); a barrier of all blocks by a counter; clocks written by the kernel.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.harness import RESULTS, Recorder, read_rate
from pallas_kernels.paged_attention.warp import Value, Words
from pallas_kernels.resident.chain import Arguments, Chain, chain, run_layers
from pallas_kernels.resident.warp import ResidentWarp

PLAN = Chain(layers=28, hidden=1024, queries=2048, keys=1024, ff=3072)
BARRIERS = 1000
SITES = ("weights there", "x there", "sums there", "published")
PREDICTED_US = {"whole": 9.0, "no exchange": 7.5, "no weights": 6.5, "barrier": 1.6}
"""Of a layer, and of one barrier."""


class NoExchange(ResidentWarp):
    """Takes the words as they are."""

    def poll(self, ref: ir.Value, pairs: Sequence[tuple[Value, int]], tag: Value, wanted: Value | None = None) -> Words:
        words = []
        for place, constant in pairs:
            got = self.global_words(ref, place * 8 + 8 * constant, 4)
            words += [got[0], got[2]]
        return tuple(words)


class NoWeights(ResidentWarp):
    """Multiplies what is in shared memory."""

    def barrier_wait(self, barrier: Value, parity: Value) -> None: ...

    def expect_bytes(self, barrier: Value, nbytes: int, predicate: Value) -> None: ...

    def copy_to_cluster(
        self, address: Value, ref: ir.Value, offset: Value, nbytes: int, barrier: Value, blocks: int, predicate: Value
    ) -> None: ...


class BarrierWarp(ResidentWarp):
    """A barrier of all blocks: one thread of each adds to a counter and waits for the sum."""

    def everyone(self, ref: ir.Value, target: Value) -> None:
        ptx = (
            "{ .reg .b32 v, n; .reg .pred there; mov.b32 n, 0; @!$2 bra done; red.release.gpu.global.add.u32 [$0], 1; "
            "again: ld.acquire.gpu.global.u32 v, [$0]; setp.ge.u32 there, v, $1; @there bra done; add.u32 n, n, 1; "
            "setp.gt.u32 there, n, 2097152; @there trap; bra again; done: }"
        )
        first = (self.warp < 1) & (self.lane < 1)
        self.block_barrier()
        self._emit(ptx, "l,r,b", self._pointer(ref, self.integer(0), 4), target.ir, first.ir)
        self.block_barrier()


def barriers(w: Any, plan: Chain, a: Arguments, block: Any) -> None:
    def one(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
        w.everyone(a.words, (index + 1) * plan.blocks)
        return carry

    w.loop(w.integer(BARRIERS), (), one)
    rows = plan.hidden // plan.blocks
    value = w.number(1.0)
    w.store_number(a.out, block * rows + w.lane, value, "float32", (w.warp < 1) & (w.lane < rows))


class StampedWarp(ResidentWarp):
    """Writes clocks, of blocks 0 and 64, in place of the results; those of the last layer remain."""

    out: Any
    place: Value
    lead: Value
    site = 0

    def stamp(self) -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], "mov.u32 $0, %clock;", "=r,~{memory}", has_side_effects=True)
        pointer = self._pointer(self.out, self.place + self.site, 4)
        self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", pointer, bits, self.lead.ir)
        self.site += 1

    def poll(self, ref: ir.Value, pairs: Sequence[tuple[Value, int]], tag: Value, wanted: Value | None = None) -> Words:
        self.stamp()
        words = super().poll(ref, pairs, tag, wanted)
        self.stamp()
        return words

    def some_warps_barrier(self, warps: int) -> None:
        super().some_warps_barrier(warps)
        self.stamp()

    def publish(self, ref: ir.Value, place: Value, word: Value, tag: Value, predicate: Value) -> None:
        super().publish(ref, place, word, tag, predicate)
        self.stamp()

    def store_number(self, ref: ir.Value, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


def stamped(w: StampedWarp, plan: Chain, a: Arguments, block: Any) -> None:
    w.out, w.place = a.out, block * (plan.hidden // plan.blocks)
    w.lead = (w.warp < 1) & (w.lane < 1) & (block % (plan.blocks // 2) < 1)
    run_layers(w, plan, a, block)


def with_window(window: int) -> Chain:
    return Chain(**{**PLAN.__dict__, "window": window})


CASES: list[tuple[str, str, Chain, dict[str, Any]]] = [
    *[("whole", f"window {n}", with_window(n), {}) for n in (2, 3, 4, 6, 8, 13)],
    *[("no exchange", f"window {n}", with_window(n), {"warp": NoExchange}) for n in (2, 4, 13)],
    ("no weights", "", PLAN, {"warp": NoWeights}),
    ("barrier", "", PLAN, {"warp": BarrierWarp, "program": barriers}),
    ("stamps", "window 4", with_window(4), {"warp": StampedWarp, "program": stamped}),
    ("stamps", "window 13", with_window(13), {"warp": StampedWarp, "program": stamped}),
]


@jax.jit
def arrays() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 10))
    x = jax.random.normal(next(keys), (PLAN.hidden,), jnp.bfloat16)
    shape = (PLAN.layers, PLAN.hidden)
    norms = tuple(jax.random.uniform(next(keys), shape, jnp.bfloat16, 0.5, 1.5) for _ in range(2))
    weights = tuple(
        jax.random.normal(next(keys), (PLAN.layers, m.outputs, m.inputs), jnp.bfloat16) * m.inputs**-0.5
        for phase in PLAN.phases
        for m in phase
    )
    return x, norms, jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)


@jax.jit
def reference(x: jax.Array, norms: Any, weights: Any) -> jax.Array:
    """In float32, nothing rounded between."""

    def product(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.dot(weight.astype(jnp.float32), x, precision="highest")

    def normed(hidden: jax.Array, factor: jax.Array) -> jax.Array:
        return hidden * jax.lax.rsqrt(jnp.mean(hidden**2) + PLAN.eps) * factor.astype(jnp.float32)

    def layer(hidden: jax.Array, given: Any) -> tuple[jax.Array, None]:
        (first, second), (q, _, _, o, gate, up, down) = given
        hidden = hidden + product(o, product(q, normed(hidden, first)))
        inner = normed(hidden, second)
        return hidden + product(down, jax.nn.silu(product(gate, inner)) * product(up, inner)), None

    return jax.lax.scan(layer, x.astype(jnp.float32), (norms, weights))[0]


def kernel_us(function: Callable[[], Any], repeats: int = 5) -> tuple[float, float, list[str]]:
    """Median and largest time of the kernel, and the names of the others of a call."""
    _, timings = profiler.measure(function, aggregate=False, iterations=repeats + 1)()
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    ours = [ms * 1e3 for call in timings[1:] for name, ms in call if "resident" in name or "mosaic" in name]
    others = sorted({f"{name[:40]} {ms * 1e3:.1f}" for name, ms in timings[-1] if "resident" not in name})
    return statistics.median(ours), max(ours), others


def show_stamps(out: np.ndarray) -> None:
    clocks = out.view(np.uint32).reshape(2, -1)[:, 1:17].astype(np.int64)
    for block, row in enumerate(clocks):
        steps = np.diff(row, prepend=row[:1]) % (1 << 32)
        print(f"  block {64 * block}, clocks since the stamp before: " + "; ".join(
            f"phase {phase} " + " ".join(f"{site} {n}" for site, n in zip(SITES, steps[4 * phase :][:4], strict=True))
            for phase in range(4)
        ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=30, help="no case is begun after so many seconds")
    given = parser.parse_args()
    start, recorder = time.monotonic(), Recorder("resident", given.results)
    data = arrays()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        lowered = [chain.lower(*data, plan=plan, **variant) for _, _, plan, variant in CASES]
        programs = list(pool.map(lambda program: program.compile(), lowered))
        expected = pool.submit(reference, *data).result()
    rate = read_rate()
    nbytes = sum(weight.nbytes for weight in data[2])
    print(f"{time.monotonic() - start:.1f} s to here; weights at the read rate, {rate / 1e12:.2f} TB/s: "
          f"{nbytes / rate / PLAN.layers * 1e6:.2f} us a layer")  # fmt: skip
    for (kind, name, _, _), program in zip(CASES, programs, strict=True):
        if time.monotonic() - start > given.seconds:
            print(f"{kind} {name}: no time left")
            continue
        try:
            function = functools.partial(program, *data)
            out = function()
            us, most, others = kernel_us(function)
            if kind == "stamps":
                print(f"stamps {name}: {us / PLAN.layers:.2f} us a layer")
                show_stamps(np.asarray(out))
                continue
            count = BARRIERS if kind == "barrier" else PLAN.layers
            verdict = f"predicted {PREDICTED_US[kind]} us, slowest call {most / count:.2f} us; others {others}"
            if kind == "whole":
                error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
                same = all(bool(jnp.array_equal(out, function())) for _ in range(20))
                verdict += f" error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'}"
                verdict += "" if error < 2e-2 else " WRONG"
            print(verdict)
            per = "barrier" if kind == "barrier" else "layer"
            recorder.record({"case": kind, "variant": name}, {f"us_per_{per}": (us / count, "us")})
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
