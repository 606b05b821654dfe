"""The Hopper kernel's weights as bytes in the order of [out, in], as checkpoints of FP8 and of int8 have them.

A warp's share of a strip are 16 rows of 128 or 256 bytes: four lanes fetch 64 neighbouring bytes of a row, and a lane's
16 bytes are 16 neighbouring inputs, of which x is taken in the same order (`Plan.run_columns`). So nothing is repacked,
and the scales, one for a block of rows and inputs or one for a row, stay one number each: every lane fetches its own
copy.

Products are made in float16 as scaled.py has it, which holds every code: e4m3 and e5m2 are converted by two, NaN
included, and a signed byte s is the low one of 1024 + 128 + s.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.operands import Sums, Tokens, segments_of, summed
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.plan import PIECE_BYTES, Plan
from pallas_kernels.int4_matmul.row import Row
from pallas_kernels.int4_matmul.scaled import scaled_row, scaled_tokens
from pallas_kernels.int4_matmul.stream import Copy, Stream, Weights

EIGHT = 8
"""Rows of a piece of a tile."""
KINDS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}
"""What PTX calls the types of codes."""


class RowStream(Stream):
    """The strips of one warp from rows of bytes; outputs are a multiple of 16, inputs of 64."""

    def __init__(self, w: Any, plan: Plan, weights: Weights, slice_: Any, block: Any):
        assert plan.in_rows is not None
        self._block_rows = plan.in_rows.block_rows
        self._scales = weights.scales
        super().__init__(w, plan, weights, slice_, block)

    def _words(self, array: Any) -> list[Copy]:
        plan, w = self.plan, self.w
        row, chunk = w.lane // 4, w.lane % 4 * 16
        offset = (self.first_strip * STRIP + row) * plan.in_features + self.first_tile * COLUMNS + chunk
        copies = []
        for t in range(plan.warp_tiles):
            inside = self.first_tile + t < plan.column_tiles if plan.ragged else None
            for half in range(STRIP // EIGHT):
                place = t * plan.tile_bytes + half * PIECE_BYTES
                constant = half * EIGHT * plan.in_features + t * COLUMNS
                copies.append(Copy(array, offset, STRIP * plan.in_features, place, constant, inside))
        return copies

    def _rows(self, array: Any, itemsize: int, place: int) -> list[Copy]:
        """There are no rows of 16 scales: `_start` asks for the blocks'."""
        return []

    def _start(self, index: Any, slot: Any) -> None:
        """What lies past the last input is zero: unlike codes of integers, any bits could be NaN."""
        w, plan = self.w, self.plan
        left, strip = index < self.count, self.strip(index)
        address = self._ring + slot + w.lane * 16
        for copy in self._copies:
            offset = copy.offset + strip * copy.stride
            options = {"to": copy.place, "source": copy.constant, "inside": copy.predicate}
            w.copy_async(address, copy.array, offset, left, **options)
        # A strip's scales lie in pairs, those of rows 0 and 8 first: a lane has the two of its own rows.
        row = (self.first_strip + strip) * STRIP + w.lane % STRIP // 2 + w.lane % 2 * EIGHT
        block = row // self._block_rows
        address = self._ring + slot + w.lane * 4
        for base in range(0, plan.segments * STRIP, 32):
            segment = (w.lane + base) // STRIP
            group = (self.first_tile * COLUMNS + segment * plan.segment) // plan.group_size
            group = w.select(group < plan.groups, group, w.integer(plan.groups - 1))
            offset = (block * plan.groups + group) * 4
            inside = left & (segment < plan.segments)
            w.copy_async(address, self._scales, offset, inside, to=plan.words_bytes + base * 4, nbytes=4)
        w.copy_commit()


class Bytes:
    """x in float16, for codes of a byte."""

    code_bias = 0.0
    of_tokens: Sequence[Any] = ()  # codes have no offsets

    def __init__(self, w: Any, plan: Plan, tokens: Tokens | Row):
        self.w, self.plan, self._tokens = w, plan, tokens
        self._segments = segments_of(plan)

    def prepare(self, book: Book | None = None) -> None:
        assert book is None and self.plan.in_rows is not None, "codes are their own numbers here"
        self._kind = KINDS[self.plan.in_rows.dtype]
        self._words, self._back = (
            scaled_row(self._tokens) if isinstance(self._tokens, Row) else scaled_tokens(self._tokens)
        )

    def product(self, pieces: Sequence[Any], segment: int) -> Sums:
        """x times code over the inputs of a segment, in units of the token's factor."""
        pairs = functools.partial(self._pairs, pieces)
        return summed(self.w, self.plan, self._words, self._segments[segment], pairs, "f16")

    def _pairs(self, pieces: Sequence[Any], tile: int, step: int) -> Sequence[Any]:
        """A step's codes: four of each of this lane's two rows."""
        words = pieces[tile]
        upper, lower = (self.w.byte_pairs(word, self._kind) for word in (words[step], words[step + 4]))
        return upper[0], lower[0], upper[1], lower[1]

    def finished(self, totals: Sums) -> Sums:
        """Back to the scale of x."""
        return [
            [total * factor[e % 2] for e, total in enumerate(block)]
            for block, factor in zip(totals, self._back, strict=True)
        ]
