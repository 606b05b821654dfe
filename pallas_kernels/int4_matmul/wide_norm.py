"""The RMS norm before a product of many rows, which brings x into the product's order as well.

Where the product before it left its sums in slices, they are added to the residual here: what XLA would do in a kernel
of its own, and then given up: what of them is in the L2 cache only need not go to memory while attention reads from it.
A block has all inputs of one token or two, a thread eight of them at a time. What it has normalised goes through shared
memory, from where threads of neighbouring tokens write pieces of 16 bytes that are neighbours.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.packing import steps_per_run
from pallas_kernels.int4_matmul.wide_arrange import shape_of
from pallas_kernels.int4_matmul.wide_plan import WidePlan
from pallas_kernels.int4_matmul.wide_tuning import L2_BYTES
from pallas_kernels.token_order import STAGE

FEW_TOKENS = 132
"""Up to so many each has a block of its own, and half of a sector is written at a time."""
SHARE = 256
"""Inputs of a warp's turn: 16 bytes a thread."""
LINE = 128
"""Bytes that the L2 cache gives up at once."""
MOST_GIVEN_UP = L2_BYTES // 2
"""Bytes of slices: of more, most are in memory already."""
MOST_WARPS, EARLY_TURNS = 32, 2
MOST_INPUTS = 2**14
"""What threads hold of so many inputs, in several turns, fits into their registers."""
QUAD, GAP = 64 + 16, 64
"""Bytes in shared memory from 32 inputs to the next ones, and more from a token to the next: in other banks."""


def slice_size(slices: int) -> int:
    """Bytes of a number of so many slices: float32, or bfloat16 of one."""
    return 4 if slices > 1 else 2


@dataclasses.dataclass(frozen=True)
class NormPlan:
    """How the tokens of a product are spread over blocks and warps."""

    product: WidePlan

    def gives_up(self, slices: int) -> bool:
        """Whether slices are given up: lines of the cache must be of one token each, and not in memory already."""
        size, inputs = slice_size(slices), self.product.in_features
        return slices > 0 and inputs * size % LINE == 0 and slices * self.product.rows * inputs * size <= MOST_GIVEN_UP

    @property
    def tokens(self) -> int:
        """Of a block."""
        return 1 if self.product.rows <= FEW_TOKENS else 2

    @property
    def blocks(self) -> int:
        return -(-self.product.rows // self.tokens)

    @property
    def shares(self) -> int:
        """Of a token."""
        return -(-self.product.steps * STAGE // SHARE)

    @property
    def turns(self) -> int:
        return -(-self.tokens * self.shares // MOST_WARPS)

    @property
    def warps(self) -> int:
        """Of a block: whole warpgroups."""
        return 4 * -(-self.tokens * self.shares // (4 * self.turns))

    # Shared memory: each share's numbers, then its sum of squares.
    @property
    def share_bytes(self) -> int:
        return SHARE // 32 * QUAD

    @property
    def squares(self) -> int:
        return self.turns * self.warps * (self.share_bytes + GAP)

    @property
    def shared_bytes(self) -> int:
        return self.squares + self.turns * self.warps * 4


class Turn:
    """A warp's share of a token, and its lane's eight inputs; past the last token's there may be shares of none."""

    def __init__(self, w: Any, plan: NormPlan, block: Any, index: int):
        self.share = w.warp + index * plan.warps
        self.in_block = self.share // plan.shares
        token = block * plan.tokens + self.in_block
        self.first = self.share % plan.shares * SHARE
        self.column = self.first + w.lane * 8
        self.has_inputs = self.column < plan.product.in_features
        self.has_token = (self.in_block < plan.tokens) & (token < plan.product.rows)
        self.there = self.has_inputs & self.has_token
        self.start = token * plan.product.in_features
        self.place = self.start + self.column


def normalise(
    w: Any, plan: NormPlan, x: Any, norm: Any, partial: Any, slices: int, eps: float, outs: Sequence[Any], block: Any
) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests).

    `partial` holds the slices of the product before: of float32, or one of bfloat16; they are lost. `outs` are the
    image, and where there are slices what x becomes by them.
    """
    turns = [Turn(w, plan, block, i) for i in range(plan.turns)]
    words = []
    for turn in turns:
        found = w.load_words(x, turn.place, 4, turn.there)
        if slices:
            sums = _slices(w, plan, partial, slices, turn)
            found = _pairs(w, [a + b for a, b in zip(_floats(w, found), sums, strict=True)])
            w.store_words(outs[1], turn.place, found, turn.there)
        words.append(found)
    # Asked for before they are needed, as far as there are registers: the barrier is between.
    weights = [_eight(w, norm, turn.column, turn.has_inputs) for turn in turns[:EARLY_TURNS]]
    for turn, found in zip(turns, words, strict=True):
        square = w.number(0.0)
        for number in _floats(w, found):
            square = w.fma(number, number, square)
        for mask in (1, 2, 4, 8, 16):
            square = square + w.shuffle_xor(square, mask)
        w.shared_store(turn.share * 4 + plan.squares, square, w.lane < 1)
    w.block_barrier()
    for i, (turn, found) in enumerate(zip(turns, words, strict=True)):
        factors = weights[i] if i < len(weights) else _eight(w, norm, turn.column, turn.has_inputs)
        token = w.select(turn.in_block < plan.tokens, turn.in_block, w.integer(0))
        squares = [w.shared_number(token * (4 * plan.shares) + plan.squares, 4 * i) for i in range(plan.shares)]
        total = squares[0]
        for square in squares[1:]:
            total = total + square
        root = w.rsqrt(total * (1.0 / plan.product.in_features) + eps)
        scaled = [number * root * factor for number, factor in zip(_floats(w, found), factors, strict=True)]
        place = turn.share * plan.share_bytes + turn.in_block * GAP + w.lane // 4 * QUAD + w.lane % 4 * 16
        w.shared_store_words(place, _pairs(w, scaled))
    w.block_barrier()
    _write(w, plan, outs[0], block)
    if plan.gives_up(slices):
        _give_up(w, plan, partial, slices, turns)


def _give_up(w: Any, plan: NormPlan, partial: Any, slices: int, turns: Sequence[Turn]) -> None:
    """Gives up the block's part of all slices, which all its warps have read.

    Whole lines of one token each, and nobody else's: XLA aligns arrays to lines. It knows that the slices are lost.
    """
    rows, inputs, size = plan.product.rows, plan.product.in_features, slice_size(slices)
    numbers = LINE // size
    for turn in turns:
        column = turn.first + w.lane * numbers
        there = turn.has_token & (w.lane < SHARE // numbers) & (column < inputs)
        for i in range(slices):
            w.give_up(partial, turn.start + column + i * (rows * inputs), size, there)


def _slices(w: Any, plan: NormPlan, partial: Any, slices: int, turn: Turn) -> list[Any]:
    """The sum of a lane's numbers of all slices."""
    if slices == 1:
        return _floats(w, w.load_words(partial, turn.place, 4, turn.there))
    size = plan.product.rows * plan.product.in_features
    found = [_eight(w, partial, turn.place + i * size, turn.there) for i in range(slices)]
    sums = found[0]
    for more in found[1:]:
        sums = [a + b for a, b in zip(sums, more, strict=True)]
    return sums


def _eight(w: Any, array: Any, place: Any, there: Any) -> list[Any]:
    """Eight float32."""
    return [number for first in (0, 4) for number in w.load_four(array, place, there, first)]


def _floats(w: Any, words: Sequence[Any]) -> list[Any]:
    return [number for word in words for number in w.numbers_of(word)]


def _pairs(w: Any, numbers: Sequence[Any]) -> list[Any]:
    return [w.pair(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def _write(w: Any, plan: NormPlan, out: Any, block: Any) -> None:
    """The block's tokens as pieces of the image, see `wide_arrange`: a thread's are four words of 64 bytes."""
    product, threads = plan.product, plan.warps * 32
    tokens, pieces = product.schedule.tokens, product.steps * 16
    for first in range(0, plan.tokens * pieces, threads):
        index = w.thread + first
        in_block, piece = index % plan.tokens, index // plan.tokens
        token = block * plan.tokens + in_block
        there = (piece < pieces) & (token < product.rows)
        within = piece % 4
        start, stride = within, 4
        if steps_per_run(product.group_size) == 1:
            start, stride = within // 2 * 8 + within % 2, 2
        # Past the last piece is something else in shared memory, or the next token's: read, but not written.
        quad = w.select(piece < pieces, piece // 4, w.integer(0))
        source = in_block * (plan.shares * plan.share_bytes + GAP) + quad * QUAD + start * 4
        words = [w.shared_word(source, 4 * stride * q) for q in range(4)]
        place = (token // tokens * pieces + piece) * tokens + token % tokens
        w.store_words(out, place * 8, words, there)


def arrange_normalised(
    x: jax.Array, plan: WidePlan, norm: jax.Array, eps: float, partial: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """y [rows, in_features], divided by the root of its mean square and times `norm` (float32), see `arrange`; and y.

    y is x (bfloat16), or where there is `partial` [slices, rows, in_features], of float32 or one slice of bfloat16, the
    sum of both, rounded once.
    """
    slices = 0 if partial is None else partial.shape[0]
    if partial is not None:
        partial = partial.astype(jnp.float32 if slices > 1 else jnp.bfloat16)  # as the kernel reads it
    own = NormPlan(plan)
    given = [] if partial is None else [partial]
    if partial is not None and own.gives_up(slices):
        given = [jax.new_ref(partial)]  # XLA is to know that they change

    def program(w: Any, references: Sequence[Any], block: Any) -> None:
        x_ref, norm_ref, *rest = references
        partial_ref, outs = (rest[0], rest[1:]) if slices else (None, rest)
        normalise(w, own, x_ref, norm_ref, partial_ref, slices, eps, outs, block)

    image, *total = run_blocks(
        program,
        [x, norm, *given],
        [jax.ShapeDtypeStruct(shape_of(plan), jnp.int32), *([jax.ShapeDtypeStruct(x.shape, x.dtype)] * bool(slices))],
        blocks=own.blocks,
        warps=own.warps,
        name="int4_normalise",
        shared_floats=own.shared_bytes // 4,
    )
    return image, total[0] if slices else x
