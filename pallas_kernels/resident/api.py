"""A decode step of one row through all decoder layers as one kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.dispatch import hopper_refusal, in_memory
from pallas_kernels.resident.layers import run_layers
from pallas_kernels.resident.plan import HEAD_DIM, MULTIPROCESSORS, Plan
from pallas_kernels.resident.products import Arguments
from pallas_kernels.resident.warp import ResidentWarp

MAX_TOKENS = 2


class Layer(NamedTuple):
    """A layer's arrays. Weights are bfloat16 [out, in], norms float32; `q_norm` and `k_norm` both or neither."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array
    attn_norm: jax.Array
    mlp_norm: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    keys: Any
    values: Any


def refusal(
    x: Any, layers: Sequence[Layer], pages_per_row: int, *, q_heads: int, scale: float, norm_eps: float
) -> str | None:
    """Why `decode_layers` does not take such arrays in this process; None if it does."""
    batch, tokens, _ = x.shape
    first = layers[0]
    if batch != 1 or tokens > MAX_TOKENS:
        return f"it takes one row of up to {MAX_TOKENS} tokens, not {batch} of {tokens}"
    for name, dtype in (*[(name, jnp.bfloat16) for name in ("qkv", "o", "gate_up", "down", "keys", "values")],
                        *[(name, jnp.float32) for name in ("attn_norm", "mlp_norm")]):  # fmt: skip
        for layer in layers:
            array = getattr(layer, name)
            if not isinstance(array, jax.Array) or array.dtype != dtype or array.shape != getattr(first, name).shape:
                return f"{name} must be an array of {jnp.dtype(dtype)} of one shape in all layers"
    if x.dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {x.dtype}"
    if first.keys.shape[3] != HEAD_DIM:
        return f"it takes heads of {HEAD_DIM} dimensions, not {first.keys.shape[3]}"
    reason = _plan(x, layers, pages_per_row, q_heads, scale, norm_eps).refusal()
    return reason or hopper_refusal()


def _plan(x: Any, layers: Sequence[Layer], pages: int, q_heads: int, scale: float, norm_eps: float) -> Plan:
    first = layers[0]
    return Plan(
        layers=len(layers),
        hidden=x.shape[2],
        q_heads=q_heads,
        kv_heads=first.keys.shape[1],
        ff=first.down.shape[1],
        tokens=x.shape[1],
        page_size=first.keys.shape[2],
        pages_per_row=pages,
        scale=scale,
        norm_eps=norm_eps,
        qk_norm=first.q_norm is not None,
    )


def decode_layers(
    x: BFloat16[Array, "1 tokens hidden"],
    layers: Sequence[Layer],
    page_table: Int32[Array, "1 pages"],
    positions: Int32[Array, " 1"],
    cos: Float32[Array, "1 tokens half"],
    sin: Float32[Array, "1 tokens half"],
    *,
    q_heads: int,
    scale: float,
    norm_eps: float,
) -> tuple[BFloat16[Array, "1 tokens hidden"], list[jax.Array], list[jax.Array]]:
    """Takes new tokens' embeddings through all layers: llama's, with q and k norms before the rotation if given.

    `positions` is the place of the first new token in its row; -1 is an idle row: nothing is written, and the result
    has no meaning. The tokens see what is cached before them and each other causally. Activations are bfloat16 between
    products and the residual float32 throughout; all sums have one order, so the result has the same bits each time.

    Returns the hidden states before the last norm, and keys and values of all layers, updated in place where the
    caller gives them up. Call `refusal` first.
    """
    plan = _plan(x, layers, page_table.shape[1], q_heads, scale, norm_eps)
    x, page_table, positions, cos, sin = in_memory((x, page_table, positions, cos, sin))
    out, keys, values = run(x[0], tuple(layers), page_table[0], positions, cos[0], sin[0], plan=plan)
    return out[None], keys, values


@functools.partial(jax.jit, static_argnames=("plan", "warp", "program"))
def run(
    x: jax.Array,
    layers: tuple[Layer, ...],
    page_table: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    plan: Plan,
    warp: type[ResidentWarp] = ResidentWarp,
    program: Callable[[Any, Plan, Arguments, Any], None] = run_layers,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """The kernel's call; benchmarks pass instructions and a program that leave something out."""
    reason = plan.refusal()
    if reason is not None or plan.blocks > MULTIPROCESSORS:
        raise ValueError(f"decode_layers cannot run: {reason or 'more blocks than multiprocessors'}")
    pools = [[jax.new_ref(layer.keys) for layer in layers], [jax.new_ref(layer.values) for layer in layers]]
    weights = [[getattr(layer, kind) for kind in plan.kinds[:-2]] for layer in layers]
    words = jax.new_ref(jnp.zeros((plan.words["end"], 2), jnp.int32))
    operands = [x, page_table, positions, cos, sin, words]
    count = len(operands)
    for arrays, keys, values in zip(weights, *pools, strict=True):
        operands += [*arrays, keys, values]

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT(())))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *inputs, out, shared, block = values
            kinds, rest = len(plan.kinds), inputs[count:]
            by_layer = [rest[i : i + kinds] for i in range(0, len(rest), kinds)]
            x_ref, table, places, cosines, sines, exchange = inputs[:count]
            w = warp(shared)
            arguments = Arguments(x_ref, table, places, cosines, sines, by_layer, exchange, out)
            program(w, plan, arguments, w.scalar(block))

        emit(*refs, lax.axis_index("block"))

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.tokens, plan.hidden), jnp.dtype(jnp.bfloat16)),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warps // 4 + 1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="resident_decode",
    )(*operands)
    keys, values = ([jax.freeze(pool) for pool in of_layers] for of_layers in pools)
    return out, keys, values
