"""What a warp does with one strip of 16 outputs: products with its share of x, scales, the sum over a block's warps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.int4_matmul.columns import Columns
from pallas_kernels.int4_matmul.lifted import Lifted
from pallas_kernels.int4_matmul.operands import Digits, Halves, Sums, bias_of
from pallas_kernels.int4_matmul.packing import STRIP, Kind
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, Plan
from pallas_kernels.int4_matmul.rows import Bytes
from pallas_kernels.int4_matmul.stream import Places, Weights

type Operand = Halves | Digits | Columns | Lifted | Bytes
type Factors = tuple[Sequence[Any], Sequence[Any] | None]
"""Scale and bias, of this lane's two rows."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; `out` is [slices, rows, results]."""

    weights: Weights
    x: Any
    out: Any
    scale_dtype: str
    offset_dtype: str | None
    out_dtype: str
    kind: Kind
    bits: int
    norm: Any = None
    residual: Any = None


def arguments_of(weight: Packed, *, out_dtype: str, **arrays: Any) -> Arguments:
    """The kernel's arguments, for the arrays (or references) of a weight, of x and of the result."""
    return Arguments(
        **arrays,
        scale_dtype=str(weight.scales.dtype),
        offset_dtype=None if weight.offsets is None else str(weight.offsets.dtype),
        out_dtype=out_dtype,
        kind=weight.kind,
        bits=weight.bits,
    )


def pieces_of(w: Any, plan: Plan, places: Places) -> list[list[Any]]:
    """[tile] a lane's words: 4, or 8 of codes of 8 bits."""
    return [_words_of(w, plan, places.words + w.lane * 16, t * plan.tile_bytes) for t in range(plan.warp_tiles)]


def _words_of(w: Any, plan: Plan, address: Any, place: int) -> list[Any]:
    places = range(place, place + plan.tile_bytes, PIECE_BYTES)
    return [word for piece in places for word in w.shared_words(address, piece)]


def factors_of(w: Any, plan: Plan, a: Arguments, code_bias: float, places: Places, segment: int) -> Factors:
    """Of a segment of inputs."""
    group, offset = w.lane // 4, None
    place = segment * STRIP * plan.scale_bytes
    scale = w.shared_pair(places.scales + group * (2 * plan.scale_bytes), a.scale_dtype, place)
    if a.offset_dtype is not None:
        place = segment * STRIP * plan.offset_bytes
        offset = w.shared_pair(places.offsets + group * (2 * plan.offset_bytes), a.offset_dtype, place)
    return scale, bias_of(w, plan, a.kind, code_bias, scale, offset)


def totals_of(
    w: Any, plan: Plan, x: Operand, pieces: Sequence[Any], factors: Callable[[int], Factors]
) -> list[list[Any]]:
    """The warp's sums of a strip, [token block][element of an mma's result]; factors(i) are those of segment i."""
    totals = [[w.number(0.0)] * 4] * plan.token_blocks
    for i in range(plan.segments):
        products = x.product(pieces, i)
        scale, bias = factors(i)
        if bias is not None:
            totals = [
                [w.fma(bias[e // 2], of_tokens[e], total[e]) for e in range(4)]
                for total, of_tokens in zip(totals, x.of_tokens[i], strict=True)
            ]
        totals = [
            [w.fma(scale[e // 2], product[e], total[e]) for e in range(4)]
            for total, product in zip(totals, products, strict=True)
        ]
    return totals


def put(w: Any, plan: Plan, x: Operand, totals: Sums, strip: Any) -> None:
    """The warp's sums to shared memory, from byte `strip` of the sums on."""
    group, quad = w.lane // 4, w.lane % 4
    sums = strip + (w.warp * plan.sums_bytes + plan.sums_start)
    sums = sums + quad * (2 * plan.token_bytes) + group * 4
    for b, total in enumerate(x.finished(totals)):
        for e in range(4):
            inside = None if 8 * b + 8 <= plan.rows else quad * 2 + (8 * b + e % 2) < plan.rows
            w.shared_store(sums, total[e], inside, (8 * b + e % 2) * plan.token_bytes + 32 * (e // 2))


@dataclasses.dataclass(frozen=True)
class Result:
    """The number that a thread adds up and writes: where its sums are, where it goes, and whether it exists."""

    token: Any
    sums: Any
    place: Any
    inside: Any


def results_of(
    w: Any, plan: Plan, first_row: Any, first_strip: Any, strips: Any, buffer: Any, most_strips: int
) -> list[Result]:
    """A thread's results among those of `strips` strips, at most `most_strips`, from `first_strip` of results on.

    `first_row` is where the block's rows of the result begin, among those of all slices.
    """
    return [
        result_of(w, plan, first_row, first_strip, strips, buffer, base) for base in first_results(plan, most_strips)
    ]


def first_results(plan: Plan, strips: int) -> range:
    """The numbers of the first thread's results among those of so many strips."""
    return range(0, strips // plan.strip_parts * plan.rows * STRIP, plan.threads)


def result_of(w: Any, plan: Plan, first_row: Any, first_strip: Any, strips: Any, buffer: Any, base: int) -> Result:
    """The thread's result, `base` after its own number."""
    index = w.thread + base
    row, token, strip = index % STRIP, index // STRIP % plan.rows, index // (STRIP * plan.rows)
    if plan.rows == 8:  # a warp's two tokens are four apart: their sums are in different banks
        token = index // STRIP % 2 * 4 + index // (2 * STRIP) % 4
    feature = (first_strip + strip) * STRIP + row
    inside = (strip * plan.strip_parts < strips) & (feature < plan.results)
    address = strip * (plan.strip_parts * plan.strip_bytes) + token * plan.token_bytes + row * 4
    address = w.select(inside, buffer + address, w.integer(0))
    return Result(token, address, (first_row + token) * plan.results + feature, inside)


def residual_of(w: Any, plan: Plan, a: Arguments, result: Result) -> Any:
    """What is to be added to a result, or None."""
    return w.load_number(a.residual, result.place, a.out_dtype, result.inside) if plan.fusion.residual else None


def write(w: Any, plan: Plan, a: Arguments, result: Result, residual: Callable[[], Any]) -> None:
    """Adds the warps' sums of a result, in order, and writes what becomes of them."""
    totals = [
        sum_over_warps(w, plan, result.sums, plan.sums_start + part * plan.strip_bytes, plan.sums_bytes)
        for part in range(plan.strip_parts)
    ]
    if plan.fusion.norm_eps is not None:
        root = root_of(w, plan, result.token)
        totals = [total * root for total in totals]
    total = totals[0]
    if plan.fusion.gated:
        total = total * w.sigmoid(total) * totals[1]
    addend = residual()
    w.store_number(a.out, result.place, total if addend is None else total + addend, a.out_dtype, result.inside)


def root_of(w: Any, plan: Plan, token: Any) -> Any:
    """What a token's sums are to be multiplied by: one over the root of its mean square."""
    total = sum_over_warps(w, plan, token * 4, plan.squares_start, plan.squares_bytes)
    return w.rsqrt(total * (1.0 / plan.in_features) + plan.fusion.norm_eps)


def sum_over_warps(w: Any, plan: Plan, address: Any, start: int, nbytes: int) -> Any:
    """The sum of every warp's number, at `address + start` and each `nbytes` later."""
    total = w.shared_number(address, start)
    for other in range(1, plan.schedule.warps):
        total = total + w.shared_number(address, start + other * nbytes)
    return total


def store(w: Any, plan: Plan, a: Arguments, slice_: Any, first_strip: Any, strips: Any, buffer: Any) -> None:
    """Adds up and writes the results of some strips; a warp that has none goes on."""

    def one(base: int) -> None:
        result = result_of(w, plan, slice_ * plan.rows, first_strip, strips, buffer, base)
        write(w, plan, a, result, lambda: residual_of(w, plan, a, result))

    results = strips // plan.strip_parts * (plan.rows * STRIP)
    for base in first_results(plan, plan.schedule.strips):
        w.when(w.warp * 32 + base < results, functools.partial(one, base))
