"""The INT4 product of a small matrix: each block has a strip of results or two, and fetches its weights all at once.

What such a kernel takes is latency: of a launch, of the first words, of x, of the sum over its warps. So there is
neither ring nor loop, chains of products are short, and warps that have no result to write leave.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.cluster_sum import Addend, ClusterSum
from pallas_kernels.int4_matmul.operands import Halves, Tokens
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, Plan
from pallas_kernels.int4_matmul.row import Row
from pallas_kernels.int4_matmul.shared_rows import tokens_in
from pallas_kernels.int4_matmul.stream import Places, Stream
from pallas_kernels.int4_matmul.strip import (
    Arguments,
    Factors,
    factors_of,
    pieces_of,
    put,
    residual_of,
    results_of,
    totals_of,
    write,
)


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any, addend: Addend | None = None) -> None:
    """One warp's work, as `mosaic.multiply`; where there is something to add to x, of a block of a cluster."""
    first_row = w.integer(0)
    tiles = plan.schedule.tiles
    if tiles > 1:
        tile, block = block % tiles, block // tiles
        first_row, last = tile * plan.rows, w.integer(plan.all_rows - plan.rows)
        first_row = w.select(first_row < last, first_row, last)
    stream = Stream(w, plan, a.weights, slice_, block)
    if addend is not None:
        addend.expect(w)
        w.cluster_arrive()
    asked = ask(w, plan, a, stream, block, addend, first_row if tiles > 1 else None)
    strips = plan.schedule.strips
    results = results_of(w, plan, first_row, stream.first_strip, w.integer(strips), w.integer(0), strips)
    residuals = [residual_of(w, plan, a, result) for result in results]
    w.warp_barrier()  # without it, ptxas would move these loads behind the wait for the weights
    if plan.norm_bytes:
        fetch_norm(w, plan, a.norm, stream.first_tile)
    stream.fill()
    # x is there before the weights are: what is to be done to it is done while they are waited for.
    if addend is not None:
        w.cluster_wait()
    tokens = given(w, plan, a, stream, asked)
    if plan.norm_bytes:
        w.copy_wait(strips)
        w.warp_barrier()
        tokens.read_norm(norm_of_warp(w, plan))
    x = Halves(w, plan, tokens)
    x.prepare(None if a.weights.book is None else Book(w, a.weights.book, as_bytes=False))
    w.copy_wait(0)
    w.warp_barrier()
    fetched = read_all(w, plan, a, x, stream.places())
    for strip, (pieces, factors) in enumerate(fetched):
        put(w, plan, x, totals_of(w, plan, x, pieces, factors.__getitem__), w.integer(strip * plan.strip_bytes))
    w.block_barrier()

    def write_all() -> None:
        for result, residual in zip(results, residuals, strict=True):
            write(w, plan, a, result, lambda residual=residual: residual)

    warps = -(-plan.rows * STRIP * strips // plan.strip_parts // 32)
    if warps < plan.schedule.warps:
        w.when(w.warp < warps, write_all)  # the others would only be in their way
    else:
        write_all()


def ask(
    w: Any, plan: Plan, a: Arguments, stream: Stream, block: Any, addend: Addend | None = None, first_row: Any = None
) -> ClusterSum | Row | Tokens:
    """Starts the way of the warp's x into registers, which `given` ends when the weights have been asked for."""
    if addend is not None:
        return ClusterSum(w, addend, a.x, block)
    # What several lanes would have to normalise is normalised once, and then passed around.
    if plan.norm_bytes and Row.serves(plan):
        return Row(w, plan, a.x, a.norm, stream.first_tile, norm_of_warp(w, plan))
    return Tokens(w, plan, a.x, a.norm, stream.first_tile, first_row)


def given(w: Any, plan: Plan, a: Arguments, stream: Stream, asked: ClusterSum | Row | Tokens) -> Row | Tokens:
    """The warp's x."""
    if not isinstance(asked, ClusterSum):
        return asked
    asked.send()
    return tokens_in(w, plan, asked.arrived(), a.norm, stream.first_tile, norm_of_warp(w, plan))


def norm_of_warp(w: Any, plan: Plan) -> Any:
    """Where a warp's weights of the norm are in shared memory."""
    return w.warp * plan.norm_bytes + plan.norm_start


def read_all(
    w: Any, plan: Plan, a: Arguments, x: Halves, strips: Sequence[Places]
) -> list[tuple[list[Any], list[Factors]]]:
    """Each strip's words by tile, and factors by segment, once they are in shared memory."""
    read = []
    for places in strips:
        factors = [factors_of(w, plan, a, x.code_bias, places, segment) for segment in range(plan.segments)]
        read.append((pieces_of(w, plan, places), factors))
    return read


def fetch_norm(w: Any, plan: Plan, norm: Any, first_tile: Any) -> None:
    """Starts copies of the norm's weights of the warp's inputs, a group."""
    first, place = first_tile * (4 * COLUMNS) + w.lane * 16, norm_of_warp(w, plan) + w.lane * 16
    for start in range(0, plan.norm_bytes, PIECE_BYTES):
        w.copy_async(place, norm, first, w.lane < 32, to=start, source=start)
    w.copy_commit()
