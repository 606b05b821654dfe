"""Blocks of a small draft's decoder layer, one kernel each: are they right, and what do they save?

    python -m benchmarks.kernels_block             # Qwen3-0.6B's shapes, 1 and 2 tokens of one sequence
    python -m benchmarks.kernels_block --stamps    # and where the time of a block goes, by clocks that it writes

A step's layers have weights of their own (past the L2 cache) and run in a loop on the device, timed by the host's
clock: what counts is from the first kernel's start to the last one's end. Kernels by themselves are timed by CUPTI.
Pages that are not the row's, and places after its last token, are NaN.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks import block_stamps
from benchmarks.harness import RESULTS, Recorder
from benchmarks.kernels_int4 import BF16, Case, random_weight
from pallas_kernels.decoder_block import attention_block, attention_block_refusal
from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul import (
    int4_gated_mlp_of_sum,
    int4_matmul,
    int4_matmul_fused,
    int4_matmul_of_sum,
    sum_slices,
)
from pallas_kernels.paged_attention import decode_attention
from pallas_kernels.paged_attention.new_token import DecodePlan
from pallas_kernels.paged_attention.plan import Plan

LAYERS, STEPS, CALLS, EPS = 28, 16, 6, 1e-6
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 1024, 3072, 16, 8, 128, 16, 32
FIRST = ("qkv", "o", "norm", "q_norm", "k_norm")
"""What the attention's half of a layer has."""
POSITIONS = (256, 0, 17, 500)
"""The first is that of the chain, unless others are asked for."""
ATTENTION = {"norm_eps": EPS, "num_q_heads": HEADS, "scale": HEAD_DIM**-0.5}


def random_layer(seed: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 5)
    norm = functools.partial(jax.random.uniform, dtype=jnp.float32, minval=0.5, maxval=1.5)

    def weight(key: jax.Array, inputs: int, outputs: int) -> Any:
        made = random_weight(key, Case(1, inputs, outputs, 0))
        return dataclasses.replace(made, scales=made.scales * jnp.asarray(0.2 / inputs**0.5, made.scales.dtype))

    mlp = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), 3)
    return {
        "gate_up": weight(mlp[0], HIDDEN, 2 * INTERMEDIATE),
        "down": weight(mlp[1], INTERMEDIATE, HIDDEN),
        "mlp_norm": norm(mlp[2], (HIDDEN,)),
        "qkv": weight(keys[0], HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "o": weight(keys[1], HEADS * HEAD_DIM, HIDDEN),
        "norm": norm(keys[2], (HIDDEN,)),
        "q_norm": norm(keys[3], (HEAD_DIM,)),
        "k_norm": norm(keys[4], (HEAD_DIM,)),
    }


def inputs(tokens: int, position: int, pages: int = PAGES) -> dict[str, Any]:
    """Of one call: x, slices before it, the row's place, angles and its table of `pages`."""
    rng = np.random.default_rng(tokens)
    angles = rng.uniform(0, 6, (1, tokens, HEAD_DIM // 2))
    return {
        "x": jnp.asarray(rng.standard_normal((1, tokens, HIDDEN)), BF16),
        "partial": jnp.asarray(rng.standard_normal((KV_HEADS, 1, tokens, HIDDEN)), jnp.float32),
        "page_table": jnp.asarray(1 + rng.permutation(pages)[None], jnp.int32),
        "positions": jnp.array([position], jnp.int32),
        "cos": jnp.asarray(np.cos(angles), jnp.float32),
        "sin": jnp.asarray(np.sin(angles), jnp.float32),
    }


def pools(layers: int, position: int, table: np.ndarray) -> list[dict[str, jax.Array]]:
    """Each layer's keys and values: NaN where nothing is stored."""
    count = table.shape[1] + 8
    stored = np.zeros((count, PAGE), bool)
    for place in range(max(position, 0)):
        stored[table[0, place // PAGE], place % PAGE] = True
    keep = jnp.asarray(stored)[:, None, :, None]

    @jax.jit
    def make(seed: jax.Array) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), (count, KV_HEADS, PAGE, HEAD_DIM), BF16)
        return jnp.where(keep, values, jnp.asarray(jnp.nan, BF16))

    return [{"k_pages": make(2 * i), "v_pages": make(2 * i + 1)} for i in range(layers)]


# A way takes (x, partial or None, a layer's weights and pools, the call's other inputs, the next layer's weights) and
# returns the residual stream as x and slices, and the pools.
def block(x: Any, partial: Any, layer: Any, pool: Any, call: Any, ahead: Sequence[jax.Array] = ()) -> Any:
    weights = {name: layer[name] for name in FIRST}
    left, y, *after = attention_block(x, partial, **weights, **pool, **call, **ATTENTION, ahead=ahead)
    return y, left, after


def one_kernel(x: Any, partial: Any, layer: Any, pool: Any, call: Any, following: Any = None) -> Any:
    del following
    return block(x, partial, layer, pool, call)


def one_kernel_ahead(x: Any, partial: Any, layer: Any, pool: Any, call: Any, following: Any) -> Any:
    """And it brings the next layer's weights into the L2 cache."""
    return block(x, partial, layer, pool, call, jax.tree.leaves([following[name] for name in FIRST]))


def three_kernels(
    x: Any, partial: Any, layer: Any, pool: Any, call: Any, following: Any = None, backend: Any = None
) -> Any:
    del following
    if partial is not None:
        x = (x.astype(jnp.float32) + partial.sum(0)).astype(x.dtype)
    qkv = int4_matmul_fused(x, layer["qkv"], norm=layer["norm"], norm_eps=EPS, backend=backend)
    norms = {name: layer[name] for name in ("q_norm", "k_norm")}
    heads, *after = decode_attention(qkv, **pool, **call, **norms, **ATTENTION, backend=backend)
    if backend is not None:
        return x, int4_matmul(heads, layer["o"], out_dtype=jnp.float32, backend=backend)[None], after
    return int4_matmul_fused(heads, layer["o"], residual=x), None, after


def whole_now(x: Any, partial: Any, layer: Any, pool: Any, call: Any, following: Any) -> Any:
    """A whole layer as the library has it without this block."""
    if partial is None:
        qkv = int4_matmul_fused(x, layer["qkv"], norm=layer["norm"], norm_eps=EPS)
    else:
        qkv, x = int4_matmul_of_sum(x, partial, layer["qkv"], norm=layer["norm"], norm_eps=EPS)
    norms = {name: layer[name] for name in ("q_norm", "k_norm")}
    heads, *after = decode_attention(qkv, **pool, **call, **norms, **ATTENTION)
    return *mlp(int4_matmul_fused(heads, layer["o"], residual=x), None, layer, following), after


def whole(x: Any, partial: Any, layer: Any, pool: Any, call: Any, following: Any) -> Any:
    """A whole layer in two kernels, each of which brings the other's weights into the L2 cache."""
    ahead = jax.tree.leaves([layer[name] for name in ("gate_up", "down", "mlp_norm")])
    y, left, after = block(x, partial, layer, pool, call, ahead)
    return *mlp(y, left, layer, following), after


def mlp(x: Any, partial: Any, layer: Any, following: Any) -> Any:
    weights = (layer["gate_up"], layer["down"])
    ahead = jax.tree.leaves([following[name] for name in FIRST])
    left, y = int4_gated_mlp_of_sum(x, partial, *weights, norm=layer["mlp_norm"], norm_eps=EPS, ahead=ahead)
    return y, left


WAYS: dict[str, Callable[..., Any]] = {
    "three kernels": three_kernels,
    "one kernel": one_kernel,
    "one kernel, ahead": one_kernel_ahead,
    "layer now": whole_now,
    "layer of two kernels": whole,
}
PREDICTED = {
    ("three kernels", 1): 11.0,
    ("one kernel", 1): 8.4,
    ("one kernel, ahead", 1): 8.3,
    ("layer now", 1): 17.6,
    ("layer of two kernels", 1): 14.0,
    ("three kernels", 2): 11.3,
    ("one kernel", 2): 9.4,
    ("one kernel, ahead", 2): 9.5,
    ("layer now", 2): 19.0,
    ("layer of two kernels", 2): 16.1,
}
"""Microseconds a layer of the chain."""


def chain(way: Callable[..., Any]) -> Any:
    """jit of (layers, pools, call) -> the residual stream behind the last layer, of every step."""

    def loop(layers: Any, pools: Any, call: dict[str, Any]) -> jax.Array:
        rest = {name: value for name, value in call.items() if name not in ("x", "partial")}

        def step(carry: Any, _: Any) -> Any:
            start, pools = carry
            x, partial, after = start, None, []
            for layer, pool, following in zip(layers, pools, (*layers[1:], layers[0]), strict=True):
                x, partial, new = way(x, partial, layer, pool, rest, following)
                after.append(dict(zip(pool, new, strict=True)))
            x = x if partial is None else x + sum_slices(partial, x.dtype)
            # Every step begins with the same x, and waits for the one before.
            return (jnp.where(jnp.isnan(x), x, start), after), x

        return lax.scan(step, (call["x"], pools), None, length=STEPS)[1]

    return jax.jit(loop)


def check(tokens: int, position: int, pages: int, block: Any, reference: Any, layer: Any) -> None:
    """Prints the errors of one call, and whether twenty more give the same bits."""
    call = inputs(tokens, position, pages)
    (pool,) = pools(1, position, np.asarray(call["page_table"]))
    y, left, after = block(call, layer, pool)
    want_y, want, want_after = reference(call, layer, pool)
    error = _error(left.sum(0), want.sum(0))
    errors = []
    for new, want_new, before in zip(after, want_after, pool.values(), strict=True):
        bits, was = (np.asarray(array).view(np.uint16) for array in (want_new, before))
        written = np.broadcast_to((bits != was).any((1, 3))[:, None, :, None], bits.shape)
        kept = np.array_equal(np.asarray(new).view(np.uint16)[~written], was[~written])
        errors.append(_error(np.asarray(new)[written], np.asarray(want_new)[written]) if kept else float("inf"))
    first = [np.asarray(array).view(np.uint8) for array in (y, left, *after)]
    same = True
    for _ in range(20):
        y2, left2, after2 = block(call, layer, pool)
        again = [np.asarray(array).view(np.uint8) for array in (y2, left2, *after2)]
        same = same and all(map(np.array_equal, first, again))
    right = error < 1e-2 and max(errors) < 2e-2 and bool((np.asarray(y) == np.asarray(want_y)).all())
    shown = " ".join(f"{e:.1e}" for e in (error, *errors))
    print(
        f"{tokens} tokens at {position}: errors {shown} (o, new keys, values) {'' if right else 'WRONG '}"
        f"{'repeatable' if same else 'NOT REPEATABLE'}",
        flush=True,
    )


def _error(got: Any, want: Any) -> float:
    got, want = (np.asarray(array).astype(np.float64) for array in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(recorder: Recorder, name: str, tokens: int, position: int, function: Any, layers: Any, arrays: Any) -> None:
    outs, times = jax.block_until_ready(function(layers, *arrays)), []
    same = bool((outs == outs[:1]).all())  # false where something is not a number, too
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(function(layers, *arrays))
        times.append((time.perf_counter() - started) / STEPS / LAYERS * 1e6)
    predicted = f"{PREDICTED[name, tokens]} us" if position == POSITIONS[0] else "nothing"
    bits = "same bits" if same else "OTHER BITS"
    print(f"{tokens} tokens at {position}, {name}: predicted {predicted}, best {min(times):.2f}, {bits}")
    case: dict[str, object] = {
        "op": "attention block",
        "m": tokens,
        "way": name,
        "hidden": HIDDEN,
        "position": position,
    }
    recorder.record(case, {"us_per_layer": (statistics.median(times), "us")})
    _, timings = profiler.measure(function, aggregate=False)(layers, *arrays)
    kernels: dict[str, list[float]] = {}
    for kernel, ms in timings or []:
        kernels.setdefault(kernel[:32], []).append(ms * 1e3)
    shown = [f"{k} {len(us) / STEPS:.0f} of {statistics.median(us):.2f}" for k, us in kernels.items()]
    print("  kernels a step, us:", ", ".join(shown), flush=True)


def plan_of(tokens: int, layer: dict[str, Any], pages: int = PAGES) -> BlockPlan:
    """As `attention_block` has it."""
    sizes = (1, tokens, HEADS, KV_HEADS, HEAD_DIM, PAGE, pages, HEAD_DIM**-0.5)
    attention = Plan(*sizes, splits=BLOCKS, warps=WARPS, depth=1)
    return BlockPlan.of(DecodePlan(attention, HEAD_DIM, False, EPS), layer["qkv"], layer["o"], KV_HEADS, EPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--pages", type=int, default=PAGES, help="of the page table; a page is 16 tokens")
    parser.add_argument("--positions", type=int, nargs="*", default=POSITIONS[:1], help="of the chain's new tokens")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder, make = Recorder("kernels", arguments.results), jax.jit(random_layer)
    layers = [make(i) for i in range(LAYERS)]

    def one(way: Callable[..., Any]) -> Any:
        def run(call: dict[str, Any], layer: Any, pool: Any) -> Any:
            rest = {name: value for name, value in call.items() if name not in ("x", "partial")}
            return way(call["x"], call["partial"], layer, pool, rest)

        return jax.jit(run)

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        compiled: dict[Any, Any] = {}
        for tokens in arguments.tokens:
            call = inputs(tokens, POSITIONS[0], arguments.pages)
            given = pools(LAYERS, POSITIONS[0], np.asarray(call["page_table"]))
            refused = attention_block_refusal(
                call["x"],
                KV_HEADS,
                layers[0]["qkv"],
                layers[0]["o"],
                given[0]["k_pages"],
                call["page_table"],
                num_q_heads=HEADS,
                rotary_dim=HEAD_DIM,
            )
            if refused is not None:
                raise SystemExit(refused)
            lowered = {"block": one(one_kernel).lower(call, layers[0], given[0])}
            lowered["reference"] = one(functools.partial(three_kernels, backend="reference")).lower(
                call, layers[0], given[0]
            )
            for name in arguments.ways:
                lowered[name] = chain(WAYS[name]).lower(layers, given, call)
            if arguments.stamps:
                lowered["stamps"] = jax.jit(
                    functools.partial(block_stamps.layers_stamped, plan_of(tokens, layers[0], arguments.pages))
                ).lower(layers, given, call)
            compiled |= {(tokens, name): executor.submit(program.compile) for name, program in lowered.items()}
        for tokens in arguments.tokens:
            program = {name: future.result() for (of, name), future in compiled.items() if of == tokens}
            for position in (*POSITIONS, *(set(arguments.positions) - set(POSITIONS))):
                check(tokens, position, arguments.pages, program["block"], program["reference"], layers[0])
            for position in arguments.positions:
                call = inputs(tokens, position, arguments.pages)
                given = pools(LAYERS, position, np.asarray(call["page_table"]))
                for name in arguments.ways:
                    measure(recorder, name, tokens, position, program[name], layers, (given, call))
            if arguments.stamps:
                call = inputs(tokens, POSITIONS[0], arguments.pages)
                given = pools(LAYERS, POSITIONS[0], np.asarray(call["page_table"]))
                program["stamps"](layers, given, call)
                print(f"{tokens} tokens")
                block_stamps.show(program["stamps"](layers, given, call), KV_HEADS)


if __name__ == "__main__":
    main()
