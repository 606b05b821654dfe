"""The INT4 product of a small matrix: each block has a strip of results or two, and fetches its weights all at once.

What such a kernel takes is latency: a launch, the first words from memory, one sum over its warps. So weights are asked
for with the first instructions, x is brought into its form while they come, and there is neither ring nor loop.
"""

from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.operands import Digits, Halves, Tokens
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import Row, RowDigits
from pallas_kernels.int4_matmul.stream import Stream
from pallas_kernels.int4_matmul.strip import (
    Arguments,
    Operand,
    factors_of,
    pieces_of,
    put,
    residual_of,
    results_of,
    totals_of,
    write,
)


def multiply(w: Any, plan: Plan, a: Arguments, slice_: Any, block: Any) -> None:
    """One warp's work, as `mosaic.multiply`."""
    stream = Stream(w, plan, a.weights, slice_, block)
    stream.fill()
    w.warp_barrier()  # without it, ptxas would move the copies behind what waits for x
    x = operand(w, plan, a, stream)
    strips = plan.schedule.strips
    results = results_of(w, plan, slice_, stream.first_strip, w.integer(strips), w.integer(0), strips)
    residuals = [residual_of(w, plan, a, result) for result in results]
    x.prepare(None if a.weights.book is None else Book(w, a.weights.book, as_bytes=plan.schedule.digits))

    def with_weights(index: Any, carry: Any) -> Any:
        w.copy_wait(0)
        w.warp_barrier()
        for strip, places in enumerate(stream.places()):
            factors = [factors_of(w, plan, a, x.code_bias, places, segment) for segment in range(plan.segments)]
            totals = totals_of(w, plan, x, pieces_of(w, plan, places), factors.__getitem__)
            put(w, plan, x, totals, w.integer(strip * plan.strip_bytes))
        w.block_barrier()
        if warps < plan.schedule.warps:
            w.when(w.warp < warps, write_all)  # the others would only be in their way
        else:
            write_all()
        return carry

    def write_all() -> None:
        for result, residual in zip(results, residuals, strict=True):
            write(w, plan, a, result, lambda residual=residual: residual)

    warps = -(-plan.rows * STRIP * strips // plan.strip_parts // 32)
    # A loop of one turn: what is before it stays before the wait for weights, where ptxas would move it behind.
    w.loop(w.one(), (), with_weights)


def operand(w: Any, plan: Plan, a: Arguments, stream: Stream) -> Operand:
    """The warp's share of x, on its way."""
    if plan.row_bytes:
        row = Row(w, plan, a.x, a.norm, stream.first_tile, w.warp * plan.row_bytes + plan.row_start)
        return RowDigits(w, plan, row)
    way = Digits if plan.schedule.digits else Halves
    return way(w, plan, Tokens(w, plan, a.x, a.norm, stream.first_tile))
