"""A small model's feed-forward block of few rows in one kernel: norm, gate and up, silu, down.

Such a model's products are 1 to 3 MB: what a kernel takes is latency, and what lies between two kernels is as long as a
third of one. Here a cluster of blocks has some of the hidden features: its blocks ask for all their weights of both
products at once, compute strips of gate and of up with all inputs (as once.py does), send features to each other, and
multiply all of the cluster's with their strips of the second weight. Each cluster leaves a slice of the
result; slices that the attention before it left are added to x first, see cluster_sum.py.

Sums are made in an order that is always the same: results are reproducible.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.ahead import Ahead, fetch_ahead
from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.cluster_sum import Addend, ClusterSum
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.gated_weights import DownWeights, gate_weights
from pallas_kernels.int4_matmul.operands import Halves
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.planes import Planes
from pallas_kernels.int4_matmul.row import Row
from pallas_kernels.int4_matmul.shared_rows import SharedRow, SharedTokens
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.strip import Arguments, arguments_of, put, root_of, sum_over_warps, totals_of


class Hidden:
    """The cluster's hidden features on their way into a warp's registers, read when they are asked for."""

    def __init__(self, w: Any, plan: GatedPlan):
        self._w, self._plan = w, plan

    def words(self) -> list[list[list[Any]]]:
        return SharedTokens(self._w, self._plan.down, self._plan.hidden, None, self._w.integer(0)).words()


def feed_forward(
    w: Any,
    plan: GatedPlan,
    gate_up: Arguments,
    down: Arguments,
    block: Any,
    addend: Addend | None = None,
    ahead: Sequence[Ahead] = (),
) -> None:
    """One warp's work: the instructions are emitted through `w`, a ClusterWarp (or its NumPy twin in the tests).

    `block` counts all blocks; those of a cluster have neighbouring numbers. `ahead` is what later kernels read first.
    """
    first, first_tile = plan.gate_up, w.warp * plan.gate_up.warp_tiles
    w.expect_sent(plan.barriers.hidden, 2 * plan.rows * plan.features)
    if addend is not None:
        addend.expect(w, warp=1)
    w.cluster_arrive()
    addition, rows = None, []
    if addend is None:
        rows = [Row(w, first, gate_up.x, None, first_tile, None, row) for row in range(plan.rows)]
    else:
        addition = ClusterSum(w, addend, gate_up.x, block)
    norm = None if gate_up.norm is None else Row.norm_of(w, first, gate_up.norm, first_tile)
    gates = gate_weights(w, plan, gate_up, block)
    w.cluster_wait()
    if addition is not None:
        # All warps do, but ptxas may not put what waits for x in front of the loads above.
        w.when(w.warp < plan.warps, addition.send)
    later = DownWeights(w, plan, down, block)  # not in front of what is to be added
    w.warp_barrier()
    if addition is not None:
        x = addition.arrived()
        rows = [SharedRow(w, first, x, None, first_tile, None, row) for row in range(plan.rows)]
    if norm is not None:
        for row in rows:
            row.take_norm(norm)
    x, hidden = Planes(w, first, rows, plan.planes_of(w.warp)), Halves(w, plan.down, Hidden(w, plan))
    x.prepare()
    read = gates.strips(x.code_bias)
    # All sums before the first is stored: products of different strips need not wait for each other.
    totals = [totals_of(w, first, x, pieces, factors.__getitem__) for pieces, factors in read]
    for strip, sums in enumerate(totals):
        put(w, first, x, sums, w.integer(strip * first.strip_bytes))
    w.block_barrier()
    _send_hidden(w, plan, block % plan.cluster)
    read = later.strips(hidden.code_bias)
    # Memory has nothing to do from here on.
    fetch_ahead(w, ahead, block * plan.warps + w.warp, plan.blocks * plan.warps)
    w.warp_barrier()  # nor shall it read them behind what waits for the features
    w.wait_sent(plan.barriers.hidden)
    hidden.prepare()
    for strip, (pieces, factors) in enumerate(read):
        sums = totals_of(w, plan.down, hidden, pieces, factors.__getitem__)
        _write(w, plan, down, hidden.finished(sums)[0], block // plan.cluster, later.first_strip + strip, later.mine)


def _send_hidden(w: Any, plan: GatedPlan, rank: Any) -> None:
    """silu(gate) * other of the block's features, to every block of the cluster: a thread one of a token to one.

    That is the same work for many threads: it takes less time than four of them in a fourth of the threads.
    """
    first, half = plan.gate_up, plan.strips // 2
    tasks = plan.rows * half * STRIP * plan.cluster
    for start in range(0, tasks, plan.threads):
        index, sends = w.thread + start, w.lane % 2 < 1
        if start + plan.threads > tasks:
            inside = index < tasks
            index, sends = w.select(inside, index, w.integer(0)), sends & inside
        row, strip, block = index % STRIP, index // STRIP % half, index // (STRIP * half) % plan.cluster
        token = index // (STRIP * half * plan.cluster)
        sums = strip * first.strip_bytes + token * first.token_bytes + row * 4
        gate, other = (
            sum_over_warps(w, first, sums, first.sums_start + part, first.sums_bytes)
            for part in (0, half * first.strip_bytes)
        )
        if first.fusion.norm_eps is not None:
            root = root_of(w, first, token)
            gate, other = gate * root, other * root
        number = gate * w.sigmoid(gate) * other
        pair = w.pair(number, w.shuffle_xor(number, 1))
        place = token * plan.hidden.stride + (rank * half + strip) * (2 * STRIP) + row * 2
        w.send_words(place + plan.hidden.start, [pair], block, plan.barriers.hidden, sends)


def _write(w: Any, plan: GatedPlan, a: Arguments, total: Any, cluster: Any, strip: Any, mine: Any) -> None:
    """A warp's results of a strip, to the cluster's slice."""
    group, quad = w.lane // 4, w.lane % 4
    for e in range(4):
        if e % 2 >= plan.rows:
            continue
        token, feature = quad * 2 + e % 2, strip * STRIP + group + 8 * (e // 2)
        place = (cluster * plan.rows + token) * plan.down.out_features + feature
        w.store_number(a.out, place, total[e], a.out_dtype, mine & (token < plan.rows))


@functools.partial(jax.jit, static_argnames=("clusters", "cluster", "sharing", "norm_eps", "program"))
def gated_mlp(
    x: jax.Array,
    partial: jax.Array | None,
    gate_up: Packed,
    down: Packed,
    norm: jax.Array | None,
    ahead: Sequence[jax.Array] = (),
    *,
    clusters: int,
    cluster: int,
    sharing: int = 1,
    norm_eps: float,
    program: Callable[..., None] = feed_forward,
) -> tuple[jax.Array, jax.Array]:
    """Slices [clusters, rows, outputs] float32 of the block's result for y [rows, inputs], and y.

    y is x (bfloat16), or x plus the sum of `partial` [slices, rows, inputs] float32, rounded once; `norm` float32.
    `sharing` blocks, 1 or a cluster's, share the additions. `ahead`: arrays that kernels behind this one read, which it
    brings into the L2 cache. `program` is what each warp does; benchmarks pass one that writes clocks.
    """
    refusal = GatedPlan.refusal(x.shape[0], gate_up, down, clusters, cluster)
    if refusal is not None:
        raise ValueError(f"a feed-forward block in one kernel: {refusal}")
    slices = 0 if partial is None else len(partial)
    plan = GatedPlan.of(
        x.shape[0], gate_up, down, None if norm is None else norm_eps, clusters, cluster, sharing, slices
    )
    first, second = arrays_of(gate_up), arrays_of(down)
    others = [array for array in (norm, partial) if array is not None]

    def emit(w: Any, references: Any, block: Any) -> None:
        given = iter(references)
        weights = [
            Weights.of(weight, [next(given) for _ in arrays]) for weight, arrays in ((gate_up, first), (down, second))
        ]
        x_ref, norm_ref = next(given), None if norm is None else next(given)
        partial_ref = None if partial is None else next(given)
        ahead_refs = [Ahead(next(given), array.nbytes) for array in ahead]
        out, total = next(given), next(given) if slices else None
        arguments = (
            arguments_of(gate_up, weights=weights[0], x=x_ref, norm=norm_ref, out=None, out_dtype="float32"),
            arguments_of(down, weights=weights[1], x=None, out=out, out_dtype="float32"),
        )
        addend = Addend(plan.sum, partial_ref, total) if slices else None
        program(w, plan, *arguments, block, addend, ahead_refs)

    out, *total = run_blocks(
        emit,
        [*first, *second, x, *others, *ahead],
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
