"""Shapes, arrays and calls of the attention benchmarks, and how their kernels are timed."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.harness import median, seconds
from pallas_kernels.paged_attention import decode_mosaic, decode_reference, mosaic
from pallas_kernels.paged_attention.formats import FORMATS
from pallas_kernels.paged_attention.plan import Plan, plan_for

REPEATS = 6  # calls of a program that is timed by CUPTI
LOOP_ROUNDS, LOOP_CALLS = 64, 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """`table` is how many tokens the page table has room for, by default the context; `kv` is what pages hold; `norm`
    says whether the decode op normalises queries and keys. Ragged lengths start at `shortest`, by default a sixteenth
    of the context, and come in any order, or the longest first, as the engine has them. `written` is how many MB the
    kernels before have left in the L2 cache that are not in memory yet.
    """

    batch: int
    context: int
    tokens: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    table: int = 0
    ragged: bool = False
    kv: str = "bfloat16"
    shortest: int = 0
    norm: bool = False
    longest_first: bool = False
    written: int = 0

    @property
    def pages_per_row(self) -> int:
        return -(-max(self.table, self.context) // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.batch * self.pages_per_row + 1

    @property
    def lengths(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        shortest = self.shortest or self.context // 16
        lengths = np.random.default_rng(0).integers(shortest, self.context + 1, self.batch).astype(np.int32)
        return np.sort(lengths)[::-1].copy() if self.longest_first else lengths

    @property
    def bytes_read(self) -> int:
        """Keys, values and their scales, once."""
        form = FORMATS.get(self.kv)
        row = 2 * self.head_dim if form is None else form.width(self.head_dim) + 4
        return int(self.lengths.sum()) * self.kv_heads * row * 2

    def plan(self, **changes: Any) -> Plan:
        names = ("batch", "tokens", "q_heads", "kv_heads", "head_dim", "page_size", "pages_per_row", "kv")
        plan = plan_for(**{name: getattr(self, name) for name in names}, scale=self.head_dim**-0.5)
        return dataclasses.replace(plan, **changes)


class Workload:
    """One shape's arrays: a pool, and page tables that point all over it."""

    def __init__(self, shape: Shape):
        self.shape = shape
        form = FORMATS.get(shape.kv)
        pool = (shape.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        dtype: Any = jnp.bfloat16
        if form is not None:
            pool, dtype = (*pool[:3], form.width(shape.head_dim)), form.storage

        def fill() -> jax.Array:
            return (jax.lax.iota(jnp.int32, math.prod(pool)).reshape(pool) % 251 - 125).astype(dtype)

        count = 2 if form is None else 4
        made = [jax.jit(fill)() for _ in range(2)]
        self.pools = (made + [jnp.full(pool[:3], 0.01, jnp.float32) for _ in range(2)])[:count]
        order = np.random.default_rng(0).permutation(shape.num_pages - 1).astype(np.int32) + 1
        self.table = jnp.asarray(order.reshape(shape.batch, -1))
        self.lengths = jnp.asarray(shape.lengths)
        heads = (shape.batch, shape.tokens, shape.q_heads, shape.head_dim)
        self.q = jnp.ones(heads, jnp.bfloat16)
        rows = (shape.batch, shape.tokens)
        self.qkv = jnp.ones((*rows, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim), jnp.bfloat16)
        self.rope = (jnp.ones((*rows, shape.head_dim // 2)),) * 2


# An op takes (x, pools, table, lengths, rope) and returns (output, pools).
type Op = Callable[..., tuple[jax.Array, list[jax.Array]]]


def decode_op(plan: Plan, norm: bool = False) -> Op:
    whole = decode_mosaic.DecodePlan(plan, plan.head_dim, False, 1e-6 if norm else None)

    @jax.jit
    def op(qkv, pools, table, lengths, rope):
        k_pages, v_pages, *scales = pools
        norms = (jnp.ones(plan.head_dim),) * 2 if norm else None
        step = (qkv, k_pages, v_pages, table, lengths - plan.tokens, rope, norms, None, tuple(scales) or None)
        out, *pools = decode_mosaic.decode_attention(*step, plan=whole)
        return out, pools

    return op


def attention_op(plan: Plan) -> Op:
    @jax.jit
    def op(q, pools, table, lengths, rope):
        del rope
        k_pages, v_pages, *scales = pools
        call = (q, k_pages, v_pages, table, lengths, None, tuple(scales) or None)
        out, _ = mosaic.paged_attention(*call, plan=plan, return_lse=False)
        return out, pools

    return op


def separate_ops(plan: Plan) -> Op:
    """RoPE and append of one token through XLA, attention through its own kernel; bfloat16 pages."""

    @jax.jit
    def op(qkv, pools, table, lengths, rope):
        # Not the same in every round, or XLA would take the rotation out of the loop.
        qkv = qkv + pools[0][0, 0, 0, :1][None, None, :] * jnp.bfloat16(1e-30)
        heads = qkv.reshape(plan.batch, 1, -1, plan.head_dim)
        q, k, v = jnp.split(heads, [plan.q_heads, plan.q_heads + plan.kv_heads], axis=2)
        q, k = (decode_reference.rotate(x, *rope, interleaved=False) for x in (q, k))
        slots = lengths - 1
        pages = jnp.take_along_axis(table, slots[:, None] // plan.page_size, axis=1)[:, 0]
        pools = [
            pool.at[pages, :, slots % plan.page_size].set(new[:, 0]) for pool, new in zip(pools, (k, v), strict=True)
        ]
        out, _ = mosaic.paged_attention(q, *pools, table, lengths, None, plan=plan, return_lse=False)
        return out.reshape(plan.batch, 1, -1), pools

    return op


def flushed_calls(op: Op, written: int = 0) -> Callable[..., Any]:
    """A program of `REPEATS` calls, the L2 cache flushed by a 256 MB read before each, and `written` MB in it then."""

    def program(x, pools, table, lengths, rope, junk):
        outs = []  # all returned, or XLA would leave calls out
        results = jnp.zeros(written * 2**19, jnp.bfloat16)
        for i in range(REPEATS):
            fresh = jnp.max(junk * jnp.bfloat16(i + 1)) * jnp.bfloat16(1e-30)
            if written:
                results = jax.lax.optimization_barrier(results + fresh)
                fresh += results[0] * jnp.bfloat16(1e-30)
            out, pools = op(x + fresh, pools, table, lengths, rope)
            x, junk, results, out = jax.lax.optimization_barrier((x, junk, results, out))
            outs.append(out)
        return outs, pools

    return program


def looped_calls(op: Op) -> Callable[..., Any]:
    def program(x, pools, table, lengths, rope):
        def round_(_, carry):
            _, pools = carry
            outs = []
            for _ in range(LOOP_CALLS):
                out, pools = op(x, pools, table, lengths, rope)
                outs.append(out)
            return outs, pools

        shape = jax.eval_shape(op, x, pools, table, lengths, rope)[0]
        outs = [jnp.zeros(shape.shape, shape.dtype)] * LOOP_CALLS
        return jax.lax.fori_loop(0, LOOP_ROUNDS, round_, (outs, pools))

    return program


def lowered_calls(op: Op, shape: Shape, junk: jax.Array, projections: bool) -> jax.stages.Lowered:
    """`flushed_calls` for a workload of this shape, its op taking the projections or else the queries."""

    def operands() -> tuple[Any, ...]:
        work = Workload(shape)
        return work.qkv if projections else work.q, work.pools, work.table, work.lengths, work.rope

    x, pools, table, lengths, rope = jax.eval_shape(operands)
    return jax.jit(flushed_calls(op, shape.written)).lower(x, pools, table, lengths, rope, junk)


def kernel_us(work: Workload, program: jax.stages.Compiled, x: jax.Array, junk: jax.Array) -> float:
    """Median time of the kernel alone."""
    _, kernels = profiler.measure(program, aggregate=False)(x, work.pools, work.table, work.lengths, work.rope, junk)
    times = [ms for name, ms in kernels or [] if "_attention" in name]
    if len(times) != REPEATS:
        raise RuntimeError(f"CUPTI saw {len(times)} of {REPEATS} calls among {sorted({n for n, _ in kernels or []})}")
    return median(times) * 1e3


def loop_us(work: Workload, op: Op) -> float:
    """Time per call in a device loop."""
    program = jax.jit(looped_calls(op), donate_argnums=1)

    def run() -> None:
        _, work.pools = program(work.qkv, work.pools, work.table, work.lengths, work.rope)
        work.pools[0].block_until_ready()

    seconds(run, 2)
    return median(seconds(run, 5)) / (LOOP_ROUNDS * LOOP_CALLS) * 1e6
