"""A kernel that stays on the card for all layers of one row: what it takes, and what its exchanges and weights cost.

    python -m benchmarks.resident            # Qwen3-0.6B's shapes, 28 layers, bfloat16

Time is that of a loop of steps on the device by the host's clock, so that it has in it all that a step needs.

The cases: the whole step with fewer or more slots of weights under way; without exchange (wrong results: memory and
arithmetic alone); without weights (exchanges and arithmetic alone); clocks written by the kernel.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.harness import RESULTS, Recorder
from pallas_kernels.paged_attention.warp import Value, Words
from pallas_kernels.resident import api
from pallas_kernels.resident.layers import run_layers
from pallas_kernels.resident.plan import Plan
from pallas_kernels.resident.products import Arguments
from pallas_kernels.resident.warp import ResidentWarp

type Pools = tuple[list[jax.Array], list[jax.Array]]

PAGES, PAGE_SIZE, STEPS = 300, 16, 50
CONTEXTS = (100, 1000, 3500)
PREDICTED_US = {"whole": 12.5, "no exchange": 8.0, "no weights": 10.5, "stamps": 12.5}
"""Of a layer, with 1000 tokens before."""


def step_plan(tokens: int = 1, window: int = 4) -> Plan:
    return Plan(28, 1024, 16, 8, 3072, tokens, PAGE_SIZE, 256, 128**-0.5, 1e-6, True, window=window)


class NoExchange(ResidentWarp):
    """Takes the words as they are."""

    def poll(self, ref: ir.Value, pairs: Sequence[tuple[Value, int]], tag: Value, wanted: Value | None = None) -> Words:
        words = []
        for place, constant in pairs:
            offset = place * 8 + 8 * constant
            got = self.global_words(ref, offset if wanted is None else self.select(wanted, offset, self.integer(0)), 4)
            words += [got[0], got[2]]
        return tuple(words)


class NoWeights(ResidentWarp):
    """Multiplies what is in shared memory."""

    def barrier_wait(self, barrier: Value, parity: Value) -> None: ...

    def expect_bytes(self, barrier: Value, nbytes: int, predicate: Value) -> None: ...

    def copy_to_cluster(
        self, address: Value, ref: ir.Value, offset: Value, nbytes: int, barrier: Value, blocks: int, predicate: Value
    ) -> None: ...


class StampedWarp(ResidentWarp):
    """Writes clocks, of blocks 0 and 64, in place of the results; those of the last layer remain."""

    labels: ClassVar[list[str]] = []
    out: Any
    place: Value
    lead: Value

    def begin(self, plan: Plan, out: Any, block: Value) -> None:
        StampedWarp.labels.clear()
        self.out, self.place = out, block // (plan.blocks // 2) * 256
        self.lead = (self.warp < 1) & (self.lane < 1) & (block % (plan.blocks // 2) < 1)

    def stamp(self, label: str) -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], "mov.u32 $0, %clock;", "=r,~{memory}", has_side_effects=True)
        pointer = self._pointer(self.out, self.place + len(self.labels), 4)
        self._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", pointer, bits, self.lead.ir)
        self.labels.append(label)

    def poll(self, ref: ir.Value, pairs: Sequence[tuple[Value, int]], tag: Value, wanted: Value | None = None) -> Words:
        self.stamp("waits")
        words = super().poll(ref, pairs, tag, wanted)
        self.stamp("x there")
        return words

    def some_warps_barrier(self, warps: int) -> None:
        super().some_warps_barrier(warps)
        self.stamp("all warps")

    def publish(self, ref: ir.Value, place: Value, word: Value, tag: Value, predicate: Value) -> None:
        super().publish(ref, place, word, tag, predicate)
        self.stamp("out")

    def store_number(self, ref: ir.Value, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


def stamped(w: StampedWarp, plan: Plan, arguments: Arguments, block: Any) -> None:
    w.begin(plan, arguments.out, block)
    run_layers(w, plan, arguments, block)


CASES: list[tuple[str, Plan, dict[str, Any]]] = [
    ("whole", step_plan(), {}),
    ("stamps", step_plan(), {"warp": StampedWarp, "program": stamped}),
    ("whole", step_plan(tokens=2), {}),
    ("whole", step_plan(window=12), {}),
    ("whole", step_plan(window=2), {}),
    ("no exchange", step_plan(), {"warp": NoExchange}),
    ("no weights", step_plan(), {"warp": NoWeights}),
]
"""Those without something write nonsense to the pages, so they come last."""


@jax.jit
def step_arrays() -> tuple[tuple[api.Layer, ...], Pools, jax.Array]:
    plan = step_plan()

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5).astype(jnp.bfloat16)

    def norm(key: jax.Array, size: int) -> jax.Array:
        return jax.random.uniform(key, (size,), jnp.float32, 0.5, 1.5)

    def layer(key: jax.Array) -> api.Layer:
        keys = jax.random.split(key, 10)
        pools = [jax.random.normal(k, (PAGES, plan.kv_heads, PAGE_SIZE, 128), jnp.bfloat16) for k in keys[8:]]
        weights = [normal(k, m.parts * m.outputs, m.inputs) for k, m in zip(keys, plan.matrices, strict=False)]
        norms = [norm(k, size) for k, size in zip(keys[4:8], (plan.hidden, plan.hidden, 128, 128), strict=True)]
        return api.Layer(*weights, *norms, *pools)

    stacked = jax.lax.map(layer, jax.random.split(jax.random.key(1), plan.layers))
    table = jax.random.permutation(jax.random.key(2), jnp.arange(1, PAGES, dtype=jnp.int32))[: plan.pages_per_row]
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(plan.layers)]
    pools = [layer.keys for layer in layers], [layer.values for layer in layers]
    return tuple(layer._replace(keys=None, values=None) for layer in layers), pools, table


def with_pools(layers: tuple[api.Layer, ...], pools: Pools) -> tuple[api.Layer, ...]:
    both = zip(layers, *pools, strict=True)
    return tuple(layer._replace(keys=keys, values=values) for layer, keys, values in both)


def lowered(plan: Plan, variant: dict[str, Any], *data: Any) -> Any:
    """`steps` steps, each with the last one's result for its input; the pools are given up."""

    @functools.partial(jax.jit, donate_argnames="pools")
    def loop(pools: Pools, steps: jax.Array, x: jax.Array, layers: Any, *rest: jax.Array) -> tuple[jax.Array, Pools]:
        def one(_: jax.Array, carry: tuple[jax.Array, Pools]) -> tuple[jax.Array, Pools]:
            x, pools = carry
            x, *new = api.run(x, with_pools(layers, pools), *rest, plan=plan, **variant)
            return x, (new[0], new[1])

        return jax.lax.fori_loop(0, steps, one, (x, pools))

    return loop.lower(*data)


def step_inputs(tokens: int, position: int) -> tuple[jax.Array, ...]:
    places = position + jnp.arange(tokens, dtype=jnp.float32)[:, None]
    angles = places * (1e6 ** (-jnp.arange(64, dtype=jnp.float32) / 64))[None, :]
    x = jax.random.normal(jax.random.key(3), (tokens, step_plan().hidden), jnp.bfloat16)
    return x, jnp.array([position], jnp.int32), jnp.cos(angles), jnp.sin(angles)


@jax.jit
def step_reference(x: Any, layers: Any, table: Any, positions: Any, cos: Any, sin: Any) -> jax.Array:
    """In float32, nothing rounded but what is cached."""
    plan = step_plan(x.shape[0])
    tokens, cached = x.shape[0], plan.pages_per_row * PAGE_SIZE
    dot = functools.partial(jnp.einsum, precision="highest")

    def normed(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + plan.norm_eps) * jnp.broadcast_to(factor, x.shape)

    def turned(x: jax.Array, norm: jax.Array | None) -> jax.Array:
        assert norm is not None
        first, second = jnp.split(normed(x, norm), 2, -1)
        c, s = (jnp.broadcast_to(a[:, None], first.shape) for a in (cos, sin))
        return jnp.concatenate([first * c - second * s, second * c + first * s], -1)

    def layer(hidden: jax.Array, a: api.Layer) -> tuple[jax.Array, None]:
        qkv, o, gate_up, down = (weight.astype(jnp.float32) for weight in (a.qkv, a.o, a.gate_up, a.down))
        heads = dot("ti,oi->to", normed(hidden, a.attn_norm), qkv).reshape(tokens, -1, 128)
        q, k, v = jnp.split(heads, [plan.q_heads, plan.q_heads + plan.kv_heads], 1)
        q, k = turned(q, a.q_norm), turned(k, a.k_norm)

        def with_new(pool: jax.Array, new: jax.Array) -> jax.Array:
            old = pool[table].swapaxes(1, 2).reshape(cached, plan.kv_heads, 128).astype(jnp.float32)
            return jnp.concatenate([old, new.astype(jnp.bfloat16).astype(jnp.float32)])

        keys, values = with_new(a.keys, k), with_new(a.values, v)
        grouped = q.reshape(tokens, plan.kv_heads, plan.group, 128)
        scores = dot("thgd,khd->thgk", grouped, keys) * plan.scale
        place = jnp.arange(cached + tokens)
        seen = jnp.where(place < cached, place < positions[0], False)[None, :] | (
            (place >= cached)[None, :] & (place[None, :] - cached <= jnp.arange(tokens)[:, None])
        )
        scores = jnp.where(jnp.broadcast_to(seen[:, None, None], scores.shape), scores, -1e30)
        out = dot("thgk,khd->thgd", jax.nn.softmax(scores, -1), values).reshape(tokens, -1)
        hidden = hidden + dot("ti,oi->to", out, o)
        gate, up = jnp.split(dot("ti,oi->to", normed(hidden, a.mlp_norm), gate_up), 2, -1)
        return hidden + dot("ti,oi->to", jax.nn.silu(gate) * up, down), None

    return jax.lax.scan(layer, x.astype(jnp.float32), jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))[0]


def show_stamps(out: jax.Array, labels: Sequence[str]) -> None:
    for block, row in enumerate(np.asarray(out).reshape(-1).view(np.uint32).reshape(2, -1)[:, : len(labels)]):
        steps = np.diff(row.astype(np.int64), prepend=row[:1].astype(np.int64)) % (1 << 32)
        shown = ", ".join(f"{label} {step}" for label, step in zip(labels, steps, strict=True))
        print(f"  block {64 * block}, clocks since the stamp before: {shown}")


def run(
    recorder: Recorder, layers: Any, pools: Pools, table: jax.Array, kind: str, plan: Plan, program: Any, labels: Any
) -> Pools:
    """One case; the pools come back changed."""
    for position in CONTEXTS if kind == "whole" and plan.window == 4 else (1000,):
        x, positions, cos, sin = step_inputs(plan.tokens, position)
        rest = (table, positions, cos, sin)
        expected = step_reference(x, with_pools(layers, pools), *rest) if kind == "whole" else x
        before = jnp.copy(pools[0][0])
        out, pools = program(pools, jnp.int32(1), x, layers, *rest)
        changed = int(jnp.sum(jnp.any(pools[0][0] != before, axis=-1)))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            last, pools = program(pools, jnp.int32(STEPS), x, layers, *rest)
            jax.block_until_ready(last)
            times.append((time.perf_counter() - start) / STEPS * 1e6)
        us = statistics.median(times)
        verdict = f"predicted {PREDICTED_US[kind]} us a layer at 1000, slowest {max(times) / plan.layers:.2f}"
        if labels:
            show_stamps(out, labels)
        if kind == "whole":
            error = float(jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
            same = True
            for _ in range(10):
                again, pools = program(pools, jnp.int32(1), x, layers, *rest)
                same &= bool(jnp.array_equal(out, again))
            verdict += f" error {error:.1e} {'repeatable' if same else 'NOT REPEATABLE'} rows written {changed}"
            verdict += "" if error < 3e-2 and changed == 8 * plan.tokens else " WRONG"
        print(verdict)
        case = {"case": kind, "tokens": plan.tokens, "context": position, "window": plan.window}
        recorder.record(case, {"us_per_layer": (us / plan.layers, "us"), "us": (us, "us")})
    return pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    parser.add_argument("--seconds", type=float, default=30, help="no case is begun after so many seconds")
    given = parser.parse_args()
    start, recorder = time.monotonic(), Recorder("resident", given.results)
    layers, pools, table = step_arrays()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = []
        for kind, plan, variant in CASES:
            x, *rest = step_inputs(plan.tokens, 1000)
            program = lowered(plan, variant, pools, jnp.int32(1), x, layers, table, *rest)
            jobs.append(
                (kind, plan, pool.submit(program.compile), list(StampedWarp.labels) if kind == "stamps" else None)
            )
        for kind, plan, compiled, labels in jobs:
            if time.monotonic() - start > given.seconds:
                print(f"{kind} {plan.tokens} {plan.window}: no time left", flush=True)
                compiled.cancel()
                continue
            try:
                pools = run(recorder, layers, pools, table, kind, plan, compiled.result(), labels)
            except Exception:  # one failing case must not cost the others
                print(f"{kind}: FAILED", flush=True)
                traceback.print_exc()
                break  # it may have taken the pools with it
            print(f"{time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
