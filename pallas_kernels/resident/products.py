"""The matrix products of the layers: weights on their way ahead of all exchanges, whole outputs in a block.

A block has rows / blocks rows of every matrix. Its warps share the inputs: warp w multiplies inputs 64 w + (0..63) of
every piece of 64 x warps, and the block adds the warps' sums as a tree: the same bits on every run.

A warp of its own fetches weights slot by slot (8 rows x a piece) into a ring as large as shared memory, layer after
layer. It waits for no other block, so memory is read on while blocks wait for each other's outputs.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.paged_attention.warp import Words
from pallas_kernels.resident.plan import ROWS, Matrix, Plan

EARLY = 4
"""Slots that a warp takes into registers while it waits for x."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; `layers` holds each layer's, in the order of `Plan.kinds`."""

    x: Any
    page_table: Any
    positions: Any
    cos: Any
    sin: Any
    layers: Sequence[Sequence[Any]]
    words: Any
    out: Any


class Block:
    """What a warp knows of its place, with `w` a `ResidentWarp` or its NumPy twin."""

    def __init__(self, w: Any, plan: Plan, arguments: Arguments, block: Any):
        self.w, self.plan, self.arguments, self.block = w, plan, arguments, block

    # Arrays of a layer
    def keep_pointers(self) -> None:
        w, plan = self.w, self.plan
        thread, start = (w.warp < 1) & (w.lane < 1), w.integer(plan.pointers_start)
        for layer, arrays in enumerate(self.arguments.layers):
            for kind, array in enumerate(arrays):
                w.keep_pointer(start, array, 8 * (layer * len(plan.kinds) + kind), thread)

    def array(self, layer: Any, kind: str) -> Any:
        kinds = self.plan.kinds
        return self.w.pointer_at(layer * (8 * len(kinds)) + self.plan.pointers_start, 8 * kinds.index(kind))

    # The ring
    def full(self, slot: Any) -> Any:
        return slot * 16 + self.plan.barriers_start

    def empty(self, slot: Any) -> Any:
        return slot * 16 + (self.plan.barriers_start + 8)

    def after(self, slot: Any, parity: Any) -> tuple[Any, Any]:
        w = self.w
        around = w.integer(self.plan.slots - 1) <= slot
        return w.select(around, w.integer(0), slot + 1), w.select(around, w.integer(1) - parity, parity)

    def open_ring(self) -> None:
        w = self.w
        thread = (w.warp < 1) & (w.lane < 1)
        for slot in range(self.plan.slots):
            w.barrier_init(self.full(w.integer(slot)), 1, thread)
            w.barrier_init(self.empty(w.integer(slot)), self.plan.warps, thread)
        w.barriers_ready()

    # Between blocks
    def publish(self, name: str, token: Any, size: int, row: Any, value: Any, tag: Any, predicate: Any) -> None:
        """Each lane's value, as bfloat16 `row` of a token's `size`; lanes have neighbouring rows, even ones write."""
        w = self.w
        word = w.pack(value, w.shuffle_xor(value, 1), "bfloat16")
        place = token * (size // 2) + row // 2 + self.plan.words[name]
        w.publish(self.arguments.words, place, word, tag, predicate & (w.lane % 2 < 1))


def fetch(b: Block) -> None:
    """The fetching warp: all weights, in the order of their use."""
    w, plan = b.w, b.plan
    ahead = min(plan.window, plan.slots)

    def one(matrix: Matrix, array: Any, eight: int, piece: int, carry: Sequence[Any]) -> tuple[Any, ...]:
        slot, parity, old, old_parity = carry
        w.barrier_wait(b.full(old), old_parity)
        w.barrier_wait(b.empty(slot), w.integer(1) - parity)
        w.expect_bytes(b.full(slot), ROWS * 2 * plan.piece, w.lane < 1)
        rows = plan.rows(matrix)
        part, first = divmod(eight * ROWS, rows)
        row = b.block * rows + w.lane % ROWS + (part * matrix.outputs + first)
        place = slot * plan.slot_bytes + w.lane % ROWS * plan.row_bytes + plan.ring_start
        offset = row * (2 * matrix.inputs) + piece * (2 * plan.piece)
        w.copy_to_cluster(place, array, offset, 2 * plan.piece, b.full(slot), 1, w.lane < ROWS)
        return *b.after(slot, parity), *b.after(old, old_parity)

    def layer(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
        for matrix in plan.matrices:
            array = b.array(index, matrix.kind)
            for eight in range(matrix.parts * plan.rows(matrix) // ROWS):
                for piece in range(matrix.inputs // plan.piece):
                    carry = one(matrix, array, eight, piece, carry)
        return carry

    w.loop(w.integer(plan.layers), [w.integer(i) for i in (0, 0, (plan.slots - ahead) % plan.slots, 1)], layer)


def product(
    b: Block,
    matrix: Matrix,
    source: str,
    carry: Sequence[Any],
    layer: Any,
    tag: Any,
    norm: str | None,
    finish: Callable[[Callable[[int], Any]], None],
) -> Sequence[Any]:
    """One matrix times the words of `source`, normalised if there is a norm, in all multiplying warps.

    In warp m `finish` gets a function from a first row (of the block's) to each lane's sum for token m.
    """
    w, plan = b.w, b.plan
    index = plan.matrices.index(matrix)
    pieces = matrix.inputs // plan.piece
    eights = matrix.parts * plan.rows(matrix) // ROWS
    group, quad = w.lane // 4, w.lane % 4  # the group is a row of a slot, and a token
    weights: list[Words] = []
    slot, parity = carry

    def take(count: int) -> None:
        nonlocal slot, parity
        for _ in range(count):
            w.barrier_wait(b.full(slot), parity)
            place = slot * plan.slot_bytes + group * plan.row_bytes + w.warp * 128 + quad * 16 + plan.ring_start
            weights.append((*w.shared_words(place), *w.shared_words(place, 64)))
            w.warp_barrier()
            w.arrive_in(b.empty(slot), None, w.lane < 1)
            slot, parity = b.after(slot, parity)

    # Weights do not wait for x, so they come into registers first, as far as there is room beside x.
    early = min(EARLY, eights * pieces)
    take(early)
    # Lane quad of four has inputs 8 quad + (0..7) of each 32: an order of the mma's inputs that suits both operands.
    column = w.warp * 64 + quad * 8
    offsets = [piece * plan.piece + half for piece in range(pieces) for half in (0, 32)]
    factors = []
    if norm is not None:
        array = b.array(layer, norm)
        for offset in offsets:
            for four in (0, 4):
                words = w.global_words(array, (column + (offset + four)) * 4, 4)
                factors += [w.as_number(word) for word in words]
    first = group * (matrix.inputs // 2) + column // 2
    pairs = [(first, plan.words[source] + offset // 2 + two) for offset in offsets for two in (0, 2)]
    x = w.poll(b.arguments.words, pairs, tag, group < plan.tokens)
    squares = None
    if norm is not None:
        numbers = [number for word in x for number in w.numbers_of(word)]
        squares = w.number(0.0)
        for number in numbers:
            squares = w.fma(number, number, squares)
        scaled = [number * factor for number, factor in zip(numbers, factors, strict=True)]
        x = [w.pack(scaled[i], scaled[i + 1], "bfloat16") for i in range(0, len(scaled), 2)]
    take(eights * pieces - early)
    zero, sums = w.integer(0), []
    for eight in range(eights):
        parts = []  # one a piece: shorter chains of products that wait for each other
        for piece in range(pieces):
            acc = (w.number(0.0),) * 4
            for i in range(0, 8, 2):
                a = (x[8 * piece + i], zero, x[8 * piece + i + 1], zero)
                acc = w.mma(acc, a, weights[eight * pieces + piece][i : i + 2])
            parts.append(acc)
        sums.append([as_tree([part[i] for part in parts]) for i in range(2)])
    store_sums(b, index % 2, sums, squares)
    w.some_warps_barrier(plan.warps)
    w.when(w.warp < plan.tokens, lambda: finish(lambda first: token_sum(b, index % 2, first, squares is not None)))
    return slot, parity


def as_tree(values: list[Any]) -> Any:
    """Their sum, always in the same order."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [operator.add(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
    return values[0]


def store_sums(b: Block, parity: int, sums: list[list[Any]], squares: Any) -> None:
    """This warp's sums [token][warp][row] and, of a normalised x, squares [token][warp] to shared memory."""
    w, plan = b.w, b.plan
    group, quad, mine = w.lane // 4, w.lane % 4, w.lane // 4 < plan.tokens
    base = (group * plan.warps + w.warp) * (plan.most_rows * 4) + quad * 8
    for eight, pair in enumerate(sums):
        for i, value in enumerate(pair):
            w.shared_store(base, value, mine, parity * plan.sums_bytes + eight * ROWS * 4 + i * 4)
    if squares is not None:
        for mask in (1, 2):
            squares = squares + w.shuffle_xor(squares, mask)
        place = (group * plan.warps + w.warp) * 4
        w.shared_store(place, squares, mine & (quad < 1), plan.squares_start + parity * plan.squares_bytes)


def token_sum(b: Block, parity: int, first: int, normalised: bool) -> Any:
    """Each lane's sum over the warps, of row `first` + lane, for the token that is this warp's number."""
    w, plan = b.w, b.plan
    # Lanes beyond the rows read other sums, which nobody uses.
    place = (w.lane + first) % plan.most_rows * 4 + w.warp * (plan.warps * plan.most_rows * 4)
    start = parity * plan.sums_bytes
    total = as_tree([w.shared_number(place, start + warp * plan.most_rows * 4) for warp in range(plan.warps)])
    if not normalised:
        return total
    place, start = w.warp * (plan.warps * 4), plan.squares_start + parity * plan.squares_bytes
    squares = as_tree([w.shared_number(place, start + 4 * warp) for warp in range(plan.warps)])
    return total * w.rsqrt(squares * (1 / plan.hidden) + plan.norm_eps)
