"""A single token's inputs on their way into a warp's registers."""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.int4_matmul.operands import normalised, squares_stored
from pallas_kernels.int4_matmul.packing import COLUMNS, steps_per_run
from pallas_kernels.int4_matmul.plan import Plan

EIGHT = 8
"""Inputs of a token that a lane loads at once."""
ROUND = 32 * EIGHT
"""Those that a warp does."""


class Row:
    """The warp's x of one token on its way into registers.

    Every lane loads eight neighbouring inputs, normalises and perhaps scales them; through shared memory they get into
    the order of an mma's small operand. `Tokens` would do that for all eight columns of the operand, each by itself.
    """

    def __init__(self, w: Any, plan: Plan, x: Any, norm: Any, first_tile: Any, buffer: Any, row: int = 0):
        """`norm`: float32 [in_features], or None. `buffer`: where `in_order` may write 2 x inputs bytes, of more than a
        `ROUND` those of whole rounds."""
        self.w, self.plan, self._buffer, self._row = w, plan, buffer, row
        self._lanes = min(32, plan.warp_columns // EIGHT)
        self.place = w.lane % self._lanes * EIGHT
        self._words: list[Any] = []
        self._norm: list[Any] | None = None if norm is None or plan.norm_bytes else []
        for first in range(0, plan.warp_columns, ROUND):
            place = self.place + first
            column = first_tile * COLUMNS + place
            inside = column < plan.in_features if plan.ragged else None
            if first and plan.warp_columns - first < ROUND:  # zeros where others have the last inputs
                inside = place < plan.warp_columns if inside is None else inside & (place < plan.warp_columns)
            self._words += self._read(x, column, inside)
            if self._norm is not None:
                self._norm += [number for i in (0, 4) for number in w.load_four(norm, column, inside, i)]

    def _read(self, x: Any, column: Any, inside: Any) -> Sequence[Any]:
        return self.w.load_words(x, column + self._row * self.plan.in_features, 4, inside)

    def read_norm(self, start: Any) -> None:
        """Reads the norm's weights of the warp's inputs from shared memory, `start` on."""
        w, start = self.w, start + self.place * 4
        self._norm = [w.as_number(word) for i in (0, 16) for word in w.shared_words(start, i)]

    @staticmethod
    def serves(plan: Plan) -> bool:
        return plan.rows == 1 and (plan.warp_columns <= ROUND or not plan.norm_bytes)

    @property
    def masks(self) -> list[int]:
        """Bits in which the numbers of lanes with different inputs differ."""
        return [mask for mask in (1, 2, 4, 8, 16) if mask < self._lanes]

    def numbers(self) -> list[Any]:
        """This lane's inputs, normalised, two in a word."""
        w, plan = self.w, self.plan
        if self._norm is None:
            return list(self._words)
        words, square = normalised(w, self._words, self._norm)
        squares_stored(w, plan, square, self.masks, w.lane < 1, w.integer(4 * self._row))
        return words

    def in_order(self, words: Sequence[Any]) -> list[list[list[Any]]]:
        """[tile][step][token block], two words a lane."""
        w, plan = self.w, self.plan
        for i in range(0, len(words), 4):
            w.shared_store_words(self._buffer + self.place * 2, words[i : i + 4], i // 4 * (2 * ROUND))
        w.warp_barrier()
        run = steps_per_run(plan.group_size)
        address, steps = self._buffer + w.lane % 4 * (2 * plan.lane_columns), []
        for first in plan.run_columns:
            words = w.shared_words(address, 2 * first, 2 * run)
            steps += [[words[2 * i : 2 * i + 2]] for i in range(run)]
        per_tile = COLUMNS // 16
        return [steps[t : t + per_tile] for t in range(0, len(steps), per_tile)]

    def words(self) -> list[list[list[Any]]]:
        """The same of the inputs in bfloat16, as `Tokens` has them."""
        return self.in_order(self.numbers())
