"""A small model's feed-forward block of few rows in one kernel: norm, gate and up, silu, down.

Such a model's products are 1 to 3 MB: what a kernel takes is latency, and what lies between two kernels is as long as a
third of one. Here a cluster of blocks has some of the hidden features: its blocks ask for all their weights of both
products at once, compute strips of gate or of up with all inputs (as once.py does), send them to each other, and
multiply all of the cluster's hidden features with their strips of the second weight. Each cluster leaves a slice of the
result; slices that the attention before it left are added to x first, see cluster_sum.py.

Sums are made in an order that is always the same: results are reproducible.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.cluster_sum import Addend
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.once import ask, fetch_norm, given, norm_of_warp, read_all
from pallas_kernels.int4_matmul.operands import Halves
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.shared_rows import SharedTokens
from pallas_kernels.int4_matmul.stream import Stream, Weights, arrays_of
from pallas_kernels.int4_matmul.strip import Arguments, arguments_of, over_warps, put, root_of, totals_of


class GateStream(Stream):
    """A block's strips of gate and up: a cluster's are those of its features' gates, then of as many others."""

    def __init__(self, w: Any, plan: GatedPlan, weights: Weights, block: Any):
        cluster, rank = block // plan.cluster, block % plan.cluster
        self._first, self._half = rank * plan.strips, plan.features // STRIP
        self._skipped = plan.gate_up.strips // 2 - self._half
        own = plan.gate_up
        first_tile, ring = w.warp * own.warp_tiles, w.warp * own.ring_bytes
        self._begin(w, own, weights, first_tile, cluster * self._half, w.integer(plan.strips), ring)

    def strip(self, index: Any) -> Any:
        w, strip = self.w, self._first + index
        return strip + w.select(strip < self._half, w.integer(0), w.integer(self._skipped))


class DownStream(Stream):
    """A warp's strips of the second product, of the cluster's features."""

    def __init__(self, w: Any, plan: GatedPlan, weights: Weights, block: Any):
        cluster, rank = block // plan.cluster, block % plan.cluster
        own, each = plan.down, plan.down.schedule.strips
        self.mine = w.warp * each < plan.down_strips
        first = rank * plan.down_strips + w.select(self.mine, w.warp, w.integer(0)) * each
        count = w.select(self.mine, w.integer(each), w.integer(0))
        ring = w.warp * own.ring_bytes + plan.down_start
        self._begin(w, own, weights, cluster * own.tiles_each, first, count, ring)


class Hidden:
    """The cluster's hidden features on their way into a warp's registers, read when they are asked for."""

    def __init__(self, w: Any, plan: GatedPlan):
        self._w, self._plan = w, plan

    def words(self) -> list[list[list[Any]]]:
        return SharedTokens(self._w, self._plan.down, self._plan.hidden, None, self._w.integer(0)).words()


def feed_forward(
    w: Any, plan: GatedPlan, gate_up: Arguments, down: Arguments, block: Any, addend: Addend | None = None
) -> None:
    """One warp's work: the instructions are emitted through `w`, a ClusterWarp (or its NumPy twin in the tests).

    `block` counts all blocks; those of a cluster have neighbouring numbers.
    """
    first, gates_barrier = plan.gate_up, plan.barriers[1]
    stream, later = GateStream(w, plan, gate_up.weights, block), DownStream(w, plan, down.weights, block)
    w.expect_sent(gates_barrier, plan.gates_bytes)
    asked = ask(w, first, gate_up, stream, block, addend)
    if addend is None:
        w.cluster_arrive()
    w.warp_barrier()  # without it, ptxas would move these loads behind the wait for the weights
    stream.fill()
    if first.norm_bytes:
        fetch_norm(w, first, gate_up, stream)
    later.fill()
    if addend is None:
        w.cluster_wait()
    tokens = given(w, first, gate_up, stream, asked)
    x, hidden = Halves(w, first, tokens), Halves(w, plan.down, Hidden(w, plan))
    w.copy_wait(plan.down.schedule.depth)
    w.warp_barrier()
    if first.norm_bytes:
        tokens.read_norm(norm_of_warp(w, first))
    read = read_all(w, first, gate_up, x, stream)
    w.warp_barrier()  # nor shall it read them behind what waits for x
    x.prepare()
    # All sums before the first is stored: products of different strips need not wait for each other.
    totals = [totals_of(w, first, x, pieces, factors.__getitem__) for pieces, factors in read]
    for strip, sums in enumerate(totals):
        put(w, first, x, sums, w.integer(strip * first.strip_bytes))
    w.block_barrier()
    _send_gates(w, plan, block % plan.cluster)
    w.copy_wait(0)
    w.warp_barrier()
    read = read_all(w, plan.down, down, hidden, later)
    w.warp_barrier()
    w.wait_sent(gates_barrier)
    _activate(w, plan)
    w.block_barrier()
    hidden.prepare()
    for strip, (pieces, factors) in enumerate(read):
        sums = totals_of(w, plan.down, hidden, pieces, factors.__getitem__)
        _write(w, plan, down, hidden.finished(sums)[0], block // plan.cluster, later.first_strip + strip, later.mine)


def _send_gates(w: Any, plan: GatedPlan, rank: Any) -> None:
    """Adds the warps' sums of the block's strips and sends them to every block: a thread four of a token to one."""
    first, pieces = plan.gate_up, STRIP // 4
    tasks = plan.rows * plan.strips * pieces * plan.cluster
    for start in range(0, tasks, plan.threads):
        index, inside = _task(w, start, tasks, plan.threads)
        block, piece = index % plan.cluster, index // plan.cluster % pieces
        strip, token = index // (plan.cluster * pieces) % plan.strips, index // (plan.cluster * pieces * plan.strips)
        sums = strip * first.strip_bytes + token * first.token_bytes + piece * 16
        totals = over_warps(first, lambda place, sums=sums: _four(w, sums, place), first.sums_start, first.sums_bytes)
        if first.fusion.norm_eps is not None:
            root = root_of(w, first, token)
            totals = [number * root for number in totals]
        place = token * (8 * plan.features) + (rank * plan.strips + strip) * (4 * STRIP) + piece * 16
        w.send_words(place + plan.gates_start, totals, block, plan.barriers[1], inside)


def _activate(w: Any, plan: GatedPlan) -> None:
    """silu(gate) * other of the cluster's features, a thread two of them."""
    tasks = plan.rows * plan.features // 2
    for start in range(0, tasks, plan.threads):
        index, inside = _task(w, start, tasks, plan.threads)
        token, two = index // (plan.features // 2), index % (plan.features // 2)
        gates = token * (8 * plan.features) + two * 8
        gate, other = (
            [w.as_number(word) for word in w.shared_words(gates, plan.gates_start + half * 4 * plan.features, 2)]
            for half in (0, 1)
        )
        pair = w.pair(*(g * w.sigmoid(g) * u for g, u in zip(gate, other, strict=True)))
        w.shared_store(token * plan.hidden.stride + two * 4, w.as_number(pair), inside, plan.hidden.start)


def _write(w: Any, plan: GatedPlan, a: Arguments, total: Any, cluster: Any, strip: Any, mine: Any) -> None:
    """A warp's results of a strip, to the cluster's slice."""
    group, quad = w.lane // 4, w.lane % 4
    for e in range(4):
        if e % 2 >= plan.rows:
            continue
        token, feature = quad * 2 + e % 2, strip * STRIP + group + 8 * (e // 2)
        place = (cluster * plan.rows + token) * plan.down.out_features + feature
        w.store_number(a.out, place, total[e], a.out_dtype, mine & (token < plan.rows))


def _task(w: Any, start: int, tasks: int, threads: int) -> tuple[Any, Any]:
    """A thread's index among tasks from `start` on, and whether it has one (None: all have); else the index is 0."""
    index = w.thread + start
    if start + threads <= tasks:
        return index, None
    inside = index < tasks
    return w.select(inside, index, w.integer(0)), inside


def _four(w: Any, address: Any, constant: int) -> list[Any]:
    return [w.as_number(word) for word in w.shared_words(address, constant)]


@functools.partial(jax.jit, static_argnames=("clusters", "cluster", "norm_eps"))
def gated_mlp(
    x: jax.Array,
    partial: jax.Array | None,
    gate_up: Packed,
    down: Packed,
    norm: jax.Array | None,
    *,
    clusters: int,
    cluster: int,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Slices [clusters, rows, outputs] float32 of the block's result for y [rows, inputs], and y.

    y is x (bfloat16), or x plus the sum of `partial` [slices, rows, inputs] float32, rounded once; `norm` float32.
    """
    refusal = GatedPlan.refusal(x.shape[0], gate_up, down, clusters, cluster)
    if refusal is not None:
        raise ValueError(f"a feed-forward block in one kernel: {refusal}")
    slices = 0 if partial is None else len(partial)
    plan = GatedPlan.of(x.shape[0], gate_up, down, None if norm is None else norm_eps, clusters, cluster, slices)
    first, second = arrays_of(gate_up), arrays_of(down)
    others = [array for array in (norm, partial) if array is not None]

    def program(w: Any, references: Any, block: Any) -> None:
        given = iter(references)
        weights = [
            Weights.of(weight, [next(given) for _ in arrays]) for weight, arrays in ((gate_up, first), (down, second))
        ]
        x_ref, norm_ref = next(given), None if norm is None else next(given)
        partial_ref = None if partial is None else next(given)
        out, total = next(given), next(given) if slices else None
        arguments = (
            arguments_of(gate_up, weights=weights[0], x=x_ref, norm=norm_ref, out=None, out_dtype="float32"),
            arguments_of(down, weights=weights[1], x=None, out=out, out_dtype="float32"),
        )
        feed_forward(w, plan, *arguments, block, Addend(plan.sum, partial_ref, total) if slices else None)

    out, *total = run_blocks(
        program,
        [*first, *second, x, *others],
        [
            jax.ShapeDtypeStruct((clusters, x.shape[0], down.shape[0]), jnp.float32),
            *([jax.ShapeDtypeStruct(x.shape, x.dtype)] * bool(slices)),
        ],
        blocks=plan.blocks,
        cluster=cluster,
        warps=plan.warps,
        name="int4_gated_mlp",
        shared_floats=plan.shared_bytes // 4,
    )
    return out, total[0] if slices else x
