"""The host's copy of the page tables: a row for every slot, written to only where it changes."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.engine.pages import SCRATCH_PAGE
from jaxinfer.engine.sequence import Sequence as Track


class PageTables:
    """Which page holds which tokens of the sequence in each slot: int32 [slots, width], the scratch page behind them.

    `width` is that of the widest table of any program.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.array = np.full((num_slots, width), SCRATCH_PAGE, np.int32)
        self._owners: list[Track | None] = [None] * num_slots
        self._versions = [0] * num_slots
        """Of the owner's pages, as its row has them, and how many those are."""
        self._counts = [0] * num_slots

    def forget(self) -> None:
        """Every row will be written anew."""
        self._owners = [None] * len(self._owners)

    def update(self, sequences: Iterable[Track]) -> None:
        """Brings the rows of sequences up to date: pages that were added, or all of them where others were taken."""
        slots: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        for sequence in sequences:
            slot, count = sequence.slot, len(sequence.pages)
            known = self._counts[slot]
            if self._owners[slot] is not sequence or self._versions[slot] != sequence.pages_version:
                self.array[slot] = SCRATCH_PAGE
                self._owners[slot], self._versions[slot] = sequence, sequence.pages_version
                known = 0
            if count > known:
                slots += [slot] * (count - known)
                places += range(known, count)
                pages += sequence.pages[known:]
            self._counts[slot] = count
        if pages:
            self.array[slots, places] = pages

    def width_for(self, sequences: Iterable[Track], widths: Sequence[int]) -> int:
        """The narrowest of some widths, ascending, that holds everybody."""
        if len(widths) == 1:
            return widths[0]
        longest = max(len(sequence.pages) for sequence in sequences)
        return next(width for width in widths if width >= longest)

    def chosen(self, sequences: Sequence[Track], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots int32 [rows] and page table int32 [rows, width] of some sequences; padding has no slot."""
        slots = np.full(rows, len(self.array), np.int32)
        slots[: len(sequences)] = [sequence.slot for sequence in sequences]
        table = np.full((rows, width), SCRATCH_PAGE, np.int32)
        table[: len(sequences)] = self.array[slots[: len(sequences)], :width]
        return slots, table
