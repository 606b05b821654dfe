"""The matrix products of all decoder layers for one row, in one kernel whose blocks never leave.

    x -> [norm, q k v] -> [o, + residual] -> [norm, gate up, silu] -> [down, + residual] -> the next layer

(the first query outputs stand for the attention's). Each of the blocks, one a multiprocessor, holds whole outputs:
rows / blocks rows of every matrix. Its warps share the inputs: warp w multiplies columns 64 w + (0..63) of every piece
of 64 x warps columns, and the block adds the warps' sums in order: the same bits on every run.

Weights: a warp of its own fetches, slot by slot (8 rows x a piece), into a ring as large as shared memory, layer after
layer; it waits for no other block, so memory is read on while blocks wait for each other's outputs. Outputs travel as
tagged words (`warp.py`). A block may write a buffer again when all blocks have read it: every block has outputs in
every phase, and a block that has written those of the next phase has read this one's.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.warp import Words
from pallas_kernels.resident.warp import ResidentWarp

ROWS, LANES = 8, 8
"""Rows of a slot, and lanes that share one of them: each has 8 inputs of its warp's 64."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Which array, [layers, outputs, inputs] bfloat16, and its sizes."""

    index: int
    outputs: int
    inputs: int


@dataclasses.dataclass(frozen=True)
class Chain:
    """Sizes of a model and of the launch."""

    layers: int
    hidden: int
    queries: int
    keys: int
    ff: int
    eps: float = 1e-6
    blocks: int = 128
    warps: int = 16
    slots: int = 13
    window: int = 13
    """Slots that may be under way at a time."""

    @property
    def phases(self) -> list[list[Matrix]]:
        """The matrices of each phase; all of a phase have the same inputs."""
        h, q, k, ff = self.hidden, self.queries, self.keys, self.ff
        sizes = [[(q, h), (k, h), (k, h)], [(h, q)], [(ff, h), (ff, h)], [(h, ff)]]
        count = iter(range(7))
        return [[Matrix(next(count), *size) for size in phase] for phase in sizes]

    @property
    def piece(self) -> int:
        return 64 * self.warps

    @property
    def slot_bytes(self) -> int:
        return ROWS * self.piece * 2

    def rows(self, matrix: Matrix) -> int:
        return matrix.outputs // self.blocks

    @property
    def most_rows(self) -> int:
        return max(sum(self.rows(matrix) for matrix in phase) for phase in self.phases)

    # Shared memory: the ring, two sets of the warps' sums, two of their sums of squares, the residual, barriers.
    @property
    def sums_start(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def squares_start(self) -> int:
        return self.sums_start + 2 * self.warps * self.most_rows * 4

    @property
    def residual_start(self) -> int:
        return self.squares_start + 2 * self.warps * 4

    @property
    def barriers_start(self) -> int:
        return self.residual_start + 32 * 4

    @property
    def shared_bytes(self) -> int:
        return self.barriers_start + 2 * 8 * self.slots

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """Where each phase's inputs start, in words, and the end."""
        h, q, ff = self.hidden // 2, self.queries // 2, self.ff // 2
        return 0, h, h + q, 2 * h + q, 2 * h + q + ff

    def check(self) -> None:
        for phase in self.phases:
            for matrix in phase:
                if self.rows(matrix) > 32:
                    raise ValueError(f"{matrix.outputs} outputs are more than 32 for each of {self.blocks} blocks")
                if matrix.outputs % (ROWS * self.blocks) or matrix.inputs % self.piece:
                    raise ValueError(
                        f"{matrix.outputs} outputs of {matrix.inputs} inputs do not divide into {self.blocks} blocks' "
                        f"{ROWS} rows and pieces of {self.piece} inputs"
                    )


@dataclasses.dataclass(frozen=True)
class Arguments:
    weights: Sequence[Any]
    norms: Sequence[Any]
    x: Any
    words: Any
    out: Any


def run_layers(w: Any, plan: Chain, a: Arguments, block: Any) -> None:
    """What one warp does, with `w` a `ResidentWarp` or its NumPy twin."""
    thread = (w.warp < 1) & (w.lane < 1)
    for slot in range(plan.slots):
        w.barrier_init(full(w, plan, w.integer(slot)), 1, thread)
        w.barrier_init(empty(w, plan, w.integer(slot)), plan.warps, thread)
    w.barriers_ready()
    w.block_barrier()
    w.when(w.warp < plan.warps, lambda: consume(w, plan, a, block))
    w.when((w.integer(plan.warps - 1) < w.warp) & (w.warp < plan.warps + 1), lambda: produce(w, plan, a, block))


def full(w: Any, plan: Chain, slot: Any) -> Any:
    return slot * 16 + plan.barriers_start


def empty(w: Any, plan: Chain, slot: Any) -> Any:
    return slot * 16 + (plan.barriers_start + 8)


def after(w: Any, plan: Chain, slot: Any, parity: Any) -> tuple[Any, Any]:
    around = w.integer(plan.slots - 1) <= slot
    return w.select(around, w.integer(0), slot + 1), w.select(around, w.integer(1) - parity, parity)


def produce(w: Any, plan: Chain, a: Arguments, block: Any) -> None:
    """The fetching warp."""

    def one(matrix: Matrix, layer: Any, eight: int, piece: int, carry: Sequence[Any]) -> tuple[Any, ...]:
        slot, parity, old, old_parity = carry
        if plan.window < plan.slots:
            w.barrier_wait(full(w, plan, old), old_parity)
        w.barrier_wait(empty(w, plan, slot), w.integer(1) - parity)
        w.expect_bytes(full(w, plan, slot), plan.slot_bytes, w.lane < 1)
        row = layer * matrix.outputs + block * plan.rows(matrix) + eight * ROWS
        whole = matrix.inputs == plan.piece  # rows follow each other: one copy
        if not whole:
            row = row + w.lane % ROWS
        offset = row * (2 * matrix.inputs) + piece * (2 * plan.piece)
        place, nbytes = slot * plan.slot_bytes, plan.slot_bytes
        if not whole:
            place, nbytes = place + w.lane % ROWS * (2 * plan.piece), 2 * plan.piece
        w.copy_to_cluster(
            place, a.weights[matrix.index], offset, nbytes, full(w, plan, slot), 1, w.lane < (1 if whole else ROWS)
        )
        return *after(w, plan, slot, parity), *after(w, plan, old, old_parity)

    def layer(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
        for phase in plan.phases:
            for matrix in phase:
                for eight in range(plan.rows(matrix) // ROWS):
                    for piece in range(matrix.inputs // plan.piece):
                        carry = one(matrix, index, eight, piece, carry)
        return carry

    start = [w.integer(i) for i in (0, 0, (plan.slots - plan.window) % plan.slots, 1)]
    w.loop(w.integer(plan.layers), start, layer)


def consume(w: Any, plan: Chain, a: Arguments, block: Any) -> None:
    """A multiplying warp."""
    hidden_rows = plan.hidden // plan.blocks
    owns = w.lane < hidden_rows
    row = block * hidden_rows + w.lane
    residual = w.lane * 4 + plan.residual_start
    hidden, attended, middle, activated, _ = plan.places

    def start() -> None:
        value = w.load_number(a.x, row, "bfloat16", owns)
        w.shared_store(residual, value, owns)
        publish(w, a, hidden, row, value, w.integer(1), owns)

    def add_residual(to: int, tag: Any, total: Any) -> None:
        value = w.shared_number(residual) + total
        w.shared_store(residual, value, owns)
        publish(w, a, to, row, value, tag, owns)

    def layer(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
        tag = index + 1
        qkv, _, gate_up, _ = plan.phases

        def after_qkv(sums: Any) -> None:
            rows = plan.rows(qkv[0])
            publish(w, a, attended, block * rows + w.lane, sums(0), tag, w.lane < rows)

        def after_gate_up(sums: Any) -> None:
            rows = plan.rows(gate_up[0])
            gate, up = sums(0), sums(rows)
            value = gate * w.sigmoid(gate) * up
            publish(w, a, activated, block * rows + w.lane, value, tag, w.lane < rows)

        carry = phase(w, plan, a, 0, carry, index, tag, a.norms[0], after_qkv)
        carry = phase(w, plan, a, 1, carry, index, tag, None, lambda sums: add_residual(middle, tag, sums(0)))
        carry = phase(w, plan, a, 2, carry, index, tag, a.norms[1], after_gate_up)
        return phase(w, plan, a, 3, carry, index, tag, None, lambda sums: add_residual(hidden, tag + 1, sums(0)))

    w.when(w.warp < 1, start)
    w.loop(w.integer(plan.layers), (w.integer(0), w.integer(0)), layer)
    w.when(w.warp < 1, lambda: w.store_number(a.out, row, w.shared_number(residual), "float32", owns))


def publish(w: Any, a: Arguments, start: int, row: Any, value: Any, tag: Any, predicate: Any) -> None:
    """Each lane's value, of neighbouring rows; the even lanes write."""
    word = w.pack(value, w.shuffle_xor(value, 1), "bfloat16")
    w.publish(a.words, row // 2 + start, word, tag, predicate & (w.lane % 2 < 1))


def phase(
    w: Any, plan: Chain, a: Arguments, index: int, carry: Sequence[Any], layer: Any, tag: Any, norm: Any, finish: Any
) -> Sequence[Any]:
    """One phase's products; `finish` gets a function from a first row to each lane's sum, in one warp of the block."""
    matrices = plan.phases[index]
    pieces = matrices[0].inputs // plan.piece
    eights = sum(plan.rows(matrix) for matrix in matrices) // ROWS
    share, group = w.lane % LANES, w.lane // LANES
    # Weights into registers first: they do not depend on x.
    words: list[list[Words]] = []
    slot, parity = carry
    source = group * (2 * plan.piece) + w.warp * 128 + share * 16
    for _ in range(eights * pieces):
        w.barrier_wait(full(w, plan, slot), parity)
        place = slot * plan.slot_bytes + source
        words.append([w.shared_words(place, half * 4 * 2 * plan.piece) for half in range(2)])
        w.warp_barrier()
        w.arrive_in(empty(w, plan, slot), None, w.lane < 1)
        slot, parity = after(w, plan, slot, parity)
    column = w.warp * 64 + share * 8
    factors = []
    if norm is not None:
        for piece in range(pieces):
            offset = (layer * matrices[0].inputs + column + piece * plan.piece) * 2
            factors += [number for word in w.global_words(norm, offset, 4) for number in w.numbers_of(word)]
    starts = [plan.places[index] + piece * (plan.piece // 2) for piece in range(pieces)]
    first = column // 2
    pairs = [(first, start + i) for start in starts for i in (0, 2)]
    x = [number for word in w.poll(a.words, pairs, tag) for number in w.numbers_of(word)]
    squares = None
    if norm is not None:
        squares = functools.reduce(lambda total, number: w.fma(number, number, total), x, w.number(0.0))
        x = [number * factor for number, factor in zip(x, factors, strict=True)]
    sums = []
    for eight in range(eights):
        for half in range(2):
            total = w.number(0.0)
            for piece in range(pieces):
                numbers = [n for word in words[eight * pieces + piece][half] for n in w.numbers_of(word)]
                for i, number in enumerate(numbers):
                    total = w.fma(number, x[8 * piece + i], total)
            sums.append(total)
    store_sums(w, plan, index % 2, sums, squares)
    w.some_warps_barrier(plan.warps)

    def last() -> None:
        factor = None
        if squares is not None:
            place = w.integer(plan.squares_start + index % 2 * plan.warps * 4)
            mean = in_order([w.shared_number(place, 4 * warp) for warp in range(plan.warps)]) * (1 / plan.hidden)
            factor = w.rsqrt(mean + plan.eps)

        def sums_from(first: int) -> Any:
            base = plan.sums_start + index % 2 * (plan.warps * plan.most_rows * 4)
            # Lanes beyond the rows read other sums, which nobody uses.
            place = (w.lane + first) % plan.most_rows * 4 + base
            total = in_order([w.shared_number(place, warp * plan.most_rows * 4) for warp in range(plan.warps)])
            return total if factor is None else total * factor

        finish(sums_from)

    w.when(w.warp < 1, last)
    return slot, parity


def in_order(values: list[Any]) -> Any:
    """Their sum, as a tree: always the same."""
    while len(values) > 1:
        values = [
            operator.add(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)
        ]
    return values[0]


def store_sums(w: Any, plan: Chain, parity: int, sums: list[Any], squares: Any) -> None:
    """Adds over the eight lanes that share a row and stores the warp's sums; sum i of lane group g is row 4 i + g."""
    share, group = w.lane % LANES, w.lane // LANES
    values, spread = sums, 1  # after each step a lane holds sum `spread * n + share % spread` in value n
    for bit in (1, 2, 4):
        odd = w.integer(0) < share // bit % 2
        halved = []
        if len(values) == 1:
            halved = [values[0] + w.shuffle_xor(values[0], bit)]
        else:
            for first in range(0, len(values), 2):
                a = values[first]
                b = values[first + 1] if first + 1 < len(values) else a
                halved.append(w.select(odd, b, a) + w.shuffle_xor(w.select(odd, a, b), bit))
            spread *= 2
        values = halved
    base = w.warp * (plan.most_rows * 4) + (plan.sums_start + parity * plan.warps * plan.most_rows * 4)
    for n, value in enumerate(values):
        index = share % spread + n * spread
        w.shared_store(base + (index * 4 + group) * 4, value, (share < spread) & (index < len(sums)))
    if squares is not None:
        for bit in (1, 2, 4):
            squares = squares + w.shuffle_xor(squares, bit)
        place = w.warp * 4 + (plan.squares_start + parity * plan.warps * 4)
        w.shared_store(place, squares, w.lane < 1)


@functools.partial(jax.jit, static_argnames=("plan", "warp", "program"))
def chain(
    x: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, ...],
    *,
    plan: Chain,
    warp: Any = ResidentWarp,
    program: Any = run_layers,
) -> jax.Array:
    """x [hidden] bf16, norms [layers, hidden], weights [layers, outputs, inputs] in order of use -> [hidden] f32."""
    plan.check()

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT(())))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            x_ref, *rest, words, out, shared, block = values
            w = warp(shared)
            program(w, plan, Arguments(rest[2:], rest[:2], x_ref, words, out), w.scalar(block))

        emit(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.hidden,), jnp.dtype(jnp.float32)),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warps // 4 + 1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((plan.shared_bytes // 4,), jnp.float32)],
        kernel_name="resident_layers",
    )(x, *norms, *weights, jax.new_ref(jnp.zeros((plan.places[-1], 2), jnp.int32)))
