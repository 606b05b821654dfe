"""Carries out plans over a cache in tiers: a round's moves first, then its programs, with a table for each tier."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer import tiers
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.pages import SCRATCH_PAGE
from jaxinfer.engine.programs import COPIES, Programs, Size, ints
from jaxinfer.engine.rows import copy_newest
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.sequence import Fork, Plan
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.work import Work
from jaxinfer.request import Request
from jaxinfer.tier_pages import Row, no_moves
from jaxinfer.tiers import MOVED_AT_ONCE, TieredKVCache, TierPools, TierTables


class TieredRunner(Runner):
    """A `Runner` of a model with a tiered cache."""

    def dispatch(self, plan: Plan, requests: Mapping[Track, Request], needs: Iterable[SamplerLayout]) -> list[Work]:
        for moves in plan.moves:
            program = self.programs.get(Size("move", rows=len(moves.pages), tiers=(moves.source, moves.target)))
            self.cache = program(self.cache, moves.pages)
        return super().dispatch(plan, requests, needs)

    def _new_programs(self) -> Programs:
        return TieredPrograms(self.model, self.settings, self.cache)

    def _new_tables(self) -> "TieredPageTables":
        assert self.settings.tiers is not None
        rules = self.settings.rules
        return TieredPageTables(rules.max_sequences, self.settings.tiers.widths, rules.page_size)

    def _new_cache(self) -> TieredKVCache:
        assert self.settings.tiers is not None
        pools, page_size = self.settings.tiers.pools, self.settings.rules.page_size
        return tiers.create(self.model.config, pools, page_size, self.model.dtype)

    def _copy(self, forks: Sequence[Fork]) -> None:
        copies = [fork.copies for fork in forks if fork.copies]
        for first in range(0, len(copies), COPIES):
            pairs = {name: np.full((COPIES, 2), SCRATCH_PAGE, np.int32) for name in ("recent", "window")}
            for place, some in enumerate(copies[first : first + COPIES]):
                for name, pair in some.items():
                    pairs[name][place] = pair
            self.cache = self.programs.get(Size("copy"))(self.cache, **pairs)

    def _length(self, sequence: Track) -> int:
        return sequence.cached_after(0)

    def _rehearse(self, size: Size) -> None:
        if size.kind == "move":
            self.cache = self.programs.get(size)(self.cache, np.full((size.rows, 2), SCRATCH_PAGE, np.int32))
        elif size.kind == "copy":
            scratch = np.full((COPIES, 2), SCRATCH_PAGE, np.int32)
            self.cache = self.programs.get(size)(self.cache, recent=scratch, window=scratch)
        else:
            super()._rehearse(size)


class TieredPrograms(Programs):
    """`Programs` over a tiered cache, with those that move pages down."""

    def expected(self) -> Iterable[Size]:
        yield from super().expected()
        assert self.settings.tiers is not None
        widths = self.settings.tiers.widths
        for source, target in no_moves():
            if getattr(widths, source) and getattr(widths, target):
                yield from (Size("move", rows=rows, tiers=(source, target)) for rows in MOVED_AT_ONCE)

    def _lower(self, size: Size) -> Any:
        if size.tiers is not None:
            source, target = size.tiers
            return tiers.move_pages.lower(self._cache, ints(size.rows, 2), source=source, target=target)
        if size.kind == "copy":
            return copy_newest.lower(self._cache, recent=ints(COPIES, 2), window=ints(COPIES, 2))
        return super()._lower(size)

    def _table(self, rows: int, width: int) -> TierTables:
        assert self.settings.tiers is not None
        widths = dataclasses.asdict(self.settings.tiers.widths)
        shapes: Any = {name: ints(rows, width) for name, width in widths.items()}
        starts: Any = {f"{name}_start": ints(rows) for name in ("recent", "int8", "window")}
        return TierTables(**shapes, **starts)


class TieredPageTables:
    """The host's copy of the page tables of all tiers, a row for every slot, written to only where it changes."""

    def __init__(self, num_slots: int, widths: TierPools, page_size: int) -> None:
        self._page_size = page_size
        self._tables = {
            name: np.full((num_slots, width), SCRATCH_PAGE, np.int32)
            for name, width in dataclasses.asdict(widths).items()
        }
        self._starts = {name: np.zeros(num_slots, np.int32) for name in ("recent", "int8", "window")}
        self._owners: list[Row | None] = [None] * num_slots
        self._spans: dict[str, list[tuple[int, int]]] = {name: [(0, 0)] * num_slots for name in self._tables}
        """Of each slot, the first page that its row of a table has, and how many."""

    def forget(self) -> None:
        """Every row will be written anew."""
        self._owners = [None] * len(self._owners)

    def update(self, sequences: Iterable[Track]) -> None:
        """Brings the rows of sequences up to date, those of the tiers that have changed."""
        for sequence in sequences:
            slot, row = sequence.slot, sequence.tiers
            assert row is not None
            is_new = self._owners[slot] is not row
            self._owners[slot] = row
            for name, first, pages in (
                ("recent", row.first_recent, row.recent),
                ("int8", row.first_int8, row.int8),
                ("int4", 0, row.int4),
                ("window", row.first_window, row.window),
            ):
                old, count = self._spans[name][slot]
                if is_new or (first, len(pages)) != (old, count):
                    # What lies behind a row's last page may be anything in range; of int4 only the end is new.
                    known = count if name == "int4" and not is_new else 0
                    table = self._tables[name][slot]
                    table[known : len(pages)] = row.int4[known:] if name == "int4" else list(pages)
                    self._spans[name][slot] = first, len(pages)
                    if name in self._starts:
                        self._starts[name][slot] = first * self._page_size

    def width_for(self, sequences: Iterable[Track], widths: Sequence[int]) -> int:
        """All programs have the widest tables."""
        return max(table.shape[1] for table in self._tables.values())

    def chosen(self, sequences: Sequence[Track], rows: int, width: int) -> tuple[np.ndarray, TierTables]:
        """Slots int32 [rows] and page tables of some sequences; padding has no slot. A width of 0 is no tables."""
        num_slots = len(self._owners)
        slots = np.full(rows, num_slots, np.int32)
        slots[: len(sequences)] = own = [sequence.slot for sequence in sequences]
        tables, starts = {}, {}
        for name, whole in self._tables.items():
            tables[name] = np.full((rows, whole.shape[1] if width else 0), SCRATCH_PAGE, np.int32)
            tables[name][: len(own)] = whole[own, : tables[name].shape[1]]
        for name, whole in self._starts.items():
            starts[f"{name}_start"] = np.zeros(rows, np.int32)
            starts[f"{name}_start"][: len(own)] = whole[own]
        return slots, TierTables(**tables, **starts)
