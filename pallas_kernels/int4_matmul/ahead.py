"""What the kernels behind this one read first, brought into the L2 cache while memory has nothing else to do.

A small model's kernel asks for all it needs at once, waits, and then computes: memory is idle for more than half of the
time. Launches do not overlap in a CUDA graph, so the next kernel cannot ask earlier; this one can.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

UNIT = 16
"""Bytes of which a bulk prefetch takes a multiple."""


class Ahead(NamedTuple):
    """An array in global memory, and its bytes."""

    array: Any
    nbytes: int


def fetch_ahead(w: Any, arrays: Sequence[Ahead], share: Any, shares: int) -> None:
    """Asks for this warp's share of each array; what is left of the last 16 bytes is not asked for."""
    for array, nbytes in arrays:
        units = nbytes // UNIT
        each = -(-units // shares)
        first = share * each
        left = w.integer(units) - first
        count = w.select(left < each, left, w.integer(each))
        w.prefetch(array, first * UNIT, count * UNIT, (w.lane < 1) & (first < units))
