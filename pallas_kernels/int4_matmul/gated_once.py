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
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.cluster_sum import Addend, FetchedSum
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.gated_weights import DownWeights, GateWeights
from pallas_kernels.int4_matmul.once import fetch_norm, norm_of_warp
from pallas_kernels.int4_matmul.operands import Halves
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.planes import Inputs, Planes, sum_of
from pallas_kernels.int4_matmul.row import EIGHT
from pallas_kernels.int4_matmul.shared_rows import SharedTokens
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.strip import Arguments, arguments_of, totals_of


class Hidden(Halves):
    """The cluster's hidden features as the second product's small operand."""

    def __init__(self, w: Any, plan: GatedPlan):
        super().__init__(w, plan.down, None)
        self._rows, self._chain = plan.hidden, 4

    def unpacked(self, pieces: Sequence[Any]) -> list[list[Any]]:
        """A strip's large operands, by tile and step: what can be done before the features come."""
        return [[self.w.codes(word) for word in words] for words in pieces]

    def prepare(self, book: Book | None = None) -> None:
        del book  # codes are linear
        w, plan = self.w, self.plan
        self._words = SharedTokens(w, plan, self._rows, None, w.integer(0)).words()
        # [segment][token block][element]; of each token, and the last one again.
        sums = [self._sums(row) for row in range(plan.rows)]
        self.of_tokens = [[[one[0], one[-1]] * 2] for one in zip(*sums, strict=True)]

    def _sums(self, row: int) -> list[Any]:
        """Of a token's features, by segment: eight lanes' or more have them, eight at a time."""
        w, plan = self.w, self.plan
        features, lanes, sums = plan.warp_columns, plan.segment // EIGHT, []
        for first in range(0, features, 32 * EIGHT):
            count = min(32, (features - first) // EIGHT)
            column = w.lane % count * EIGHT
            total = sum_of(w, self._rows.read(w, w.integer(row), column, first, 4))
            for bit in range(lanes.bit_length() - 1):
                total = total + w.shuffle_xor(total, 1 << bit)
            sums += [total if lanes >= count else w.shuffle(total, w.integer(i)) for i in range(0, count, lanes)]
        return sums

    def _operand(self, words: Sequence[Any], step: int) -> Sequence[Any]:
        return words[step]


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
    w.cluster_wait()  # not behind loads: it empties the L1 cache, and waits for them
    addition, rows, norm = None, [], None
    if addend is None:
        rows = [Inputs(w, first, gate_up.x, first_tile, row) for row in range(plan.rows)]
    else:
        addition = FetchedSum(w, addend, gate_up.x, block, later=2 if first.norm_bytes else 1)
    if first.norm_bytes:
        norm = norm_of_warp(w, first)
        fetch_norm(w, first, gate_up.norm, first_tile)
    w.warp_barrier()  # ptxas keeps to this order: x, then the weights that are needed first
    gates = GateWeights(w, plan, gate_up, block, Planes.sharers_of(first))
    w.warp_barrier()
    later = DownWeights(w, plan, down, block)
    if addition is not None:
        # All warps do, but ptxas may not put what waits for x in front of the loads above.
        w.when(w.warp < plan.warps, addition.send)
    w.warp_barrier()
    if addition is not None:
        rows = [Inputs(w, first, addition.arrived(), first_tile, row) for row in range(plan.rows)]
    if first.norm_bytes:
        w.copy_wait(1)
        w.warp_barrier()
    x, hidden = Planes(w, first, rows, plan.planes_of(w.warp)), Hidden(w, plan)
    x.prepare(norm, first.number_bytes)
    if addition is not None:
        addition.arrived()  # once more, for a branch: ptxas would wait for the weights in front of what needs none
    x.read()
    _put(w, plan, x.totals(gates.words, gates.factors(x.code_bias)))
    w.block_barrier()
    for start in range(0, plan.send_tasks, plan.threads):
        warps = -(-(plan.send_tasks - start) // 32)
        if warps < plan.warps:  # the others would only be in their way
            w.when(w.warp < warps, lambda start=start: _send_hidden(w, plan, block % plan.cluster, start))
        else:
            _send_hidden(w, plan, block % plan.cluster, start)
    read = [(hidden.unpacked(pieces), factors) for pieces, factors in later.read(hidden.code_bias)]
    # Memory has nothing to do from here on.
    fetch_ahead(w, ahead, block * plan.warps + w.warp, plan.blocks * plan.warps)
    for pieces, _ in read:
        w.computed([word for tile in pieces for step in tile for word in step])
    w.wait_sent(plan.barriers.hidden)
    hidden.prepare()
    for strip, (pieces, factors) in enumerate(read):
        sums = totals_of(w, plan.down, hidden, pieces, factors.__getitem__)
        _write(w, plan, down, hidden.finished(sums)[0], block // plan.cluster, later.first_strip + strip, later.mine)


def _put(w: Any, plan: GatedPlan, totals: Sequence[Any]) -> None:
    """The warp's sums of the lane's strips and token to shared memory."""
    first, sharers = plan.gate_up, plan.strips // len(totals)
    token = w.lane % 4 // 2 if plan.rows > 1 else w.integer(0)
    for j, total in enumerate(totals):
        strip = w.lane % sharers + j * sharers
        place = ((strip * plan.rows + token) * STRIP + w.lane // 4) * first.number_bytes + w.warp * 4
        for half, number in enumerate(total):
            w.shared_store(place, number, None, half * (STRIP // 2 * first.number_bytes))


def _send_hidden(w: Any, plan: GatedPlan, rank: Any, start: int) -> None:
    """silu(gate) * other of the block's features, to every block of the cluster.

    A thread adds up one feature of a token, and sends it and its neighbour's to some of the blocks.
    """
    first, half, shares = plan.gate_up, plan.strips // 2, plan.send_shares
    each, part = plan.cluster // (2 * shares), half * plan.rows * STRIP * first.number_bytes
    index, inside = w.thread + start, None
    if plan.send_tasks % 32:
        inside = index < plan.send_tasks
        index = w.select(inside, index, w.integer(0))
    row, strip, share = index % STRIP, index // STRIP % half, index // (STRIP * half) % shares
    token = index // (STRIP * half * shares)
    place = ((strip * plan.rows + token) * STRIP + row) * first.number_bytes
    gate, other = _over_warps(w, first, place, 0), _over_warps(w, first, place, part)
    if first.fusion.norm_eps is not None:
        square = _over_warps(w, first, token * first.number_bytes, first.squares_start)
        root = w.rsqrt(square * (1.0 / first.in_features) + first.fusion.norm_eps)
        gate, other = gate * root, other * root
    number = gate * w.sigmoid(gate) * other
    neighbour, even = w.shuffle_xor(number, 1), w.lane % 2 < 1
    pair = w.pair(w.select(even, number, neighbour), w.select(even, neighbour, number))
    to = token * plan.hidden.stride + (rank * half + strip) * (2 * STRIP) + row // 2 * 4 + plan.hidden.start
    for i in range(each):
        block = (share * 2 + w.lane % 2) * each + i
        w.send_words(to, [pair], block, plan.barriers.hidden, inside)


def _over_warps(w: Any, plan: Plan, address: Any, start: int) -> Any:
    """The sum of every warp's number."""
    words = [word for i in range(0, plan.schedule.warps, 4) for word in w.shared_words(address, start + 4 * i)]
    numbers = [w.as_number(word) for word in words]
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


def _write(w: Any, plan: GatedPlan, a: Arguments, total: Any, cluster: Any, strip: Any, mine: Any) -> None:
    """A warp's results of a strip, to the cluster's slice."""
    group, quad = w.lane // 4, w.lane % 4
    for e in range(4):
        if e % 2 >= plan.rows:
            continue
        token, feature = quad * 2 + e % 2, strip * STRIP + group + 8 * (e // 2)
        place = (cluster * plan.rows + token) * plan.down.out_features + feature
        w.store_number(a.out, place, total[e], a.out_dtype, mine & (token < plan.rows))


@functools.partial(jax.jit, static_argnames=("clusters", "cluster", "norm_eps", "program"))
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
    norm_eps: float,
    program: Callable[..., None] = feed_forward,
) -> tuple[jax.Array, jax.Array]:
    """Slices [clusters, rows, outputs] float32 of the block's result for y [rows, inputs], and y.

    y is x (bfloat16), or x plus the sum of `partial` [slices, rows, inputs] float32, rounded once; `norm` float32.
    `ahead`: arrays that kernels behind this one read, which it brings into the L2 cache. `program` is what each warp
    does; benchmarks pass one that writes clocks.
    """
    refusal = GatedPlan.refusal(x.shape[0], gate_up, down, clusters, cluster)
    if refusal is not None:
        raise ValueError(f"a feed-forward block in one kernel: {refusal}")
    slices = 0 if partial is None else len(partial)
    plan = GatedPlan.of(x.shape[0], gate_up, down, None if norm is None else norm_eps, clusters, cluster, slices)
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
