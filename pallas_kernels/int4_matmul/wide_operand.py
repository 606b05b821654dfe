"""The two operands of the kernel for many rows as a multiplying warp reads them from a stage in shared memory."""

from typing import Any

from pallas_kernels.int4_matmul.packing import COLUMNS, steps_per_run
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.int4_matmul.wide_plan import WidePlan

type Words = list[Any]
"""A lane's of 16 inputs: one, or two of codes of 8 bits."""


class Arranged:
    """Words as they are packed, x in their order (`wide_arrange`)."""

    def __init__(self, w: Any, plan: WidePlan, strip: Any):
        """`strip`: the warp's first, of its block."""
        self.w, self.plan, self.strip = w, plan, strip

    def words(self, base: Any, tile: int, steps: range) -> list[Words]:
        """Of the four steps of a column tile, from the stage at `base`."""
        plan = self.plan
        address = base + self.strip * plan.words_bytes + self.w.lane * 16
        place = plan.x_bytes + 4 * plan.words_bytes * tile + plan.tile_bytes * (steps.start * 16 // COLUMNS)
        pieces = range(place, place + plan.tile_bytes, PIECE_BYTES)
        words = [word for piece in pieces for word in self.w.shared_words(address, piece)]
        return [words[i : i + len(pieces)] for i in range(0, len(words), len(pieces))]

    def ready(self, words: Words) -> Words:
        return words

    def matrix(self, base: Any) -> Any:
        return self.w.token_matrix(base, self.plan.schedule.tokens)

    def advance(self, step: int) -> int:
        """Bytes from the stage's first inputs of x to a step's."""
        return step * 32 * self.plan.schedule.tokens


class Plain:
    """x in its own order, of which a lane needs inputs 2 quad and 2 quad + 1 of every eight.

    As packed, lane `quad` has all of some eight, in two words. So each word here is put together from halves of two.
    """

    def __init__(self, w: Any, plan: WidePlan, strip: Any):
        self.w, self.plan, self.strip = w, plan, strip
        self._run, self._per_step = steps_per_run(plan.group_size), plan.bits // 4
        group, half = w.lane // 4, w.lane % 4 // 2
        quads = [half, half + 2] if self._run == 1 else list(range(4))
        within = half * (4 * self._per_step) if self._run == 2 else 0
        self._lanes = [place_of(group, quad) + within for quad in quads]
        self._selector = w.lane % 2 * 0x1111 + 0x6240

    def words(self, base: Any, tile: int, steps: range) -> list[Words]:
        """For each word the two that have its halves."""
        return [self._halves(base, tile, step) for step in steps]

    def _halves(self, base: Any, tile: int, step: int) -> Words:
        plan, address = self.plan, base + self.strip * self.plan.words_bytes
        unit, within = divmod(step, 4 // self._per_step)
        start = plan.x_bytes + 4 * plan.words_bytes * tile + 512 * unit
        start += 8 * (within // 2) if self._run == 2 else 4 * self._per_step * within
        lanes = self._lanes[step % 2 * 2 :][:2] if self._run == 2 else self._lanes
        places = range(start, start + 4 * self._per_step, 4)
        return [[self.w.shared_word(address + lane, place) for lane in lanes] for place in places]

    def ready(self, words: Words) -> Words:
        return [self.w.pick_bytes(*halves, self._selector) for halves in words]

    def matrix(self, base: Any) -> Any:
        return self.w.swizzled_matrix(base)

    def advance(self, step: int) -> int:
        return step // 4 * self.plan.x_bytes // 2 + step % 4 * 32


def place_of(group: Any, quad: Any) -> Any:
    """Where in 512 bytes of words those lie that are of lane 4 group + quad when they are packed.

    Those of a group are written, and those of a quad are read, at a time: neither meet in a bank.
    """
    return (group + quad * 2) % 8 * 16 + quad * 128
