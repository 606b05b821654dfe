"""Which page of which tier a token is in: the host's side of a tiered cache, plain Python and NumPy.

The host knows how many tokens each row has before a program starts, so it decides which pages are old enough to move,
has them moved (`tiers.move_pages`), and takes the pages that this frees into the pool again. All pages of a tier are
alike: a row takes any that is free, and keeps only the list.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.kv_cache import SCRATCH_PAGE
from jaxinfer.tiers import MOVED_AT_ONCE, Tier, TieredKV, TierPools, TierTables


@dataclasses.dataclass(frozen=True)
class TierRules:
    """When pages move. `recent` and `int8` are `TieredKV`'s; `window` is the widest of the layers that have one."""

    recent: int
    int8: int
    window: int | None
    has_full_layers: bool
    page_size: int

    @classmethod
    def of(cls, config: ModelConfig, tiers: TieredKV, page_size: int) -> "TierRules":
        windows = [layer.window for layer in config.layers]
        widest = max((window for window in windows if window is not None), default=None)
        return cls(tiers.recent, tiers.int8, widest, None in windows, page_size)

    def first_pages(self, num_tokens: int) -> tuple[int, int, int]:
        """The first page of the newest tier, of int8 and of the window, of a row with so many tokens."""

        def aged(distance: int) -> int:
            return max(0, num_tokens - distance) // self.page_size

        # The next token sees itself and window - 1 before it.
        return aged(self.recent), aged(self.recent + self.int8), aged((self.window or 1) - 1)

    def room(self, num_tokens: int, appended: int) -> TierPools:
        """Pages that a row of up to `num_tokens` tokens has at most; a program appends up to `appended` to it."""
        page = self.page_size

        def newest(distance: int) -> int:
            return min(-(-num_tokens // page), -(-(distance + page - 1 + appended) // page))

        recent, int8, _ = self.first_pages(num_tokens)
        return TierPools(
            recent=newest(self.recent) if self.has_full_layers else 0,
            int8=min(recent, -(-self.int8 // page)) if self.has_full_layers else 0,
            int4=int8 if self.has_full_layers else 0,
            window=newest(self.window - 1) if self.window is not None else 0,
        )


@dataclasses.dataclass(frozen=True)
class Moves:
    """One call of `tiers.move_pages`: int32 [n, 2], n of `MOVED_AT_ONCE`, padded with moves to the scratch page."""

    source: Tier
    target: Tier
    pages: np.ndarray


class Pool:
    """The free pages of one tier. Page 0 is scratch and belongs to nobody."""

    def __init__(self, num_pages: int) -> None:
        self.free = collections.deque(range(1, 1 + num_pages))

    def take(self) -> int:
        if not self.free:
            raise RuntimeError("a tier of the cache has no free page: rows have more tokens than it was made for")
        return self.free.popleft()

    def give(self, page: int) -> None:
        self.free.append(page)


@dataclasses.dataclass
class Row:
    """A row's pages: page i of `recent` holds the row's page `first_recent` + i, and so on; int4 begins with page 0."""

    num_tokens: int = 0
    first_recent: int = 0
    first_int8: int = 0
    first_window: int = 0
    recent: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    int8: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    int4: list[int] = dataclasses.field(default_factory=list)
    window: collections.deque[int] = dataclasses.field(default_factory=collections.deque)


class TierPages:
    """Pages of `num_rows` rows in pools of the given sizes."""

    def __init__(self, rules: TierRules, pools: TierPools, num_rows: int) -> None:
        self.rules = rules
        self.pools = {name: Pool(size) for name, size in dataclasses.asdict(pools).items()}
        self.rows = [Row() for _ in range(num_rows)]

    def settle(self) -> list[Moves]:
        """Decides for all rows which pages leave their tier; the moves are to be made, in this order, before the next
        program. RuntimeError for a pool that is too small."""
        moved: dict[tuple[Tier, Tier], list[tuple[int, int]]] = {
            # int8 pages that become free here may be targets of the last.
            ("int8", "int4"): [],
            ("recent", "int4"): [],
            ("recent", "int8"): [],
        }
        for row in self.rows:
            first_recent, first_int8, first_window = self.rules.first_pages(row.num_tokens)
            while row.window and row.first_window < first_window:
                self.pools["window"].give(row.window.popleft())
                row.first_window += 1
            if not self.rules.has_full_layers:
                continue
            while row.first_int8 < first_int8:
                source: Tier = "int8" if row.int8 else "recent"
                self._move(row, source, "int4", moved[source, "int4"])
                row.first_int8 += 1
                row.first_recent = max(row.first_recent, row.first_int8)
            while row.first_recent < first_recent:
                self._move(row, "recent", "int8", moved["recent", "int8"])
                row.first_recent += 1
        calls = []
        for (source, target), pairs in moved.items():
            for some in itertools.batched(pairs, MOVED_AT_ONCE[-1]):
                size = next(size for size in MOVED_AT_ONCE if size >= len(some))
                pages = np.full((size, 2), SCRATCH_PAGE, np.int32)
                pages[: len(some)] = some
                calls.append(Moves(source, target, pages))
        return calls

    def _move(self, row: Row, source: Tier, target: Tier, pairs: list[tuple[int, int]]) -> None:
        """Moves the oldest page of a row's tier."""
        page = getattr(row, source).popleft()
        new = self.pools[target].take()
        getattr(row, target).append(new)
        self.pools[source].give(page)
        pairs.append((page, new))

    def append(self, row: int, count: int) -> None:
        """Gives a row places for `count` tokens that the next program appends."""
        own = self.rows[row]
        own.num_tokens += count
        pages = -(-own.num_tokens // self.rules.page_size)
        if self.rules.has_full_layers:
            while own.first_recent + len(own.recent) < pages:
                own.recent.append(self.pools["recent"].take())
        if self.rules.window is not None:
            while own.first_window + len(own.window) < pages:
                own.window.append(self.pools["window"].take())

    def release(self, row: int) -> None:
        """Gives all pages of a row back; it is empty then."""
        own, self.rows[row] = self.rows[row], Row()
        for name, pool in self.pools.items():
            for page in getattr(own, name):
                pool.give(page)

    def tables(self, rows: Sequence[int], widths: TierPools) -> TierTables:
        """NumPy tables of these rows (-1: padding), as wide as asked for."""
        own = [self.rows[row] if row >= 0 else Row() for row in rows]

        def table(name: str, width: int) -> np.ndarray:
            out = np.full((len(own), width), SCRATCH_PAGE, np.int32)
            for place, row in enumerate(own):
                pages = list(itertools.islice(getattr(row, name), width))
                out[place, : len(pages)] = pages
            return out

        def starts(name: str) -> np.ndarray:
            return np.array([getattr(row, name) * self.rules.page_size for row in own], np.int32)

        tables = {name: table(name, width) for name, width in dataclasses.asdict(widths).items()}
        return TierTables(
            **tables,
            recent_start=starts("first_recent"),
            int8_start=starts("first_int8"),
            window_start=starts("first_window"),
        )
