"""Tokens' inputs that other blocks of a cluster sent, or this one made, on their way from shared memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.int4_matmul.operands import Tokens
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.row import Row

PADDING = 16
"""Bytes between rows, so that eight rows' pieces of 16 bytes fall into different banks."""


class Rows(NamedTuple):
    """Rows of bfloat16 in shared memory: byte address of the first, and bytes from one to the next."""

    start: int
    stride: int

    @classmethod
    def at(cls, start: int, features: int) -> "Rows":
        return cls(start, row_bytes(features))

    def read(self, w: Any, row: Any, column: Any, constant: int, count: int) -> Sequence[Any]:
        """2 or 4 words of element `column + constant` on."""
        return w.shared_words(row * self.stride + column * 2, self.start + 2 * constant, count)


def row_bytes(features: int) -> int:
    return 2 * features + PADDING


class SharedRow(Row):
    """`Row` of shared memory; `x` are `Rows`."""

    def _read(self, x: Rows, column: Any, inside: Any) -> Sequence[Any]:
        del inside  # rows are whole here
        return x.read(self.w, self.w.integer(0), column, 0, 4)


class SharedTokens(Tokens):
    """`Tokens` of shared memory; `x` are `Rows`."""

    def _read(self, x: Rows, row: Any, first: int) -> Sequence[Any]:
        return x.read(self.w, row, self._column, first, 2 * self._run)


def tokens_in(w: Any, plan: Plan, rows: Rows, norm: Any, first_tile: Any, buffer: Any) -> Row | Tokens:
    """The warp's inputs from tile `first_tile` on; arguments as of `Row`."""
    if plan.norm_bytes and Row.serves(plan):
        return SharedRow(w, plan, rows, norm, first_tile, buffer)
    return SharedTokens(w, plan, rows, norm, first_tile)
