"""Which page of which tier a token is in: the host's side of a tiered cache, plain Python and NumPy.

The host knows how many tokens each row has before a program starts, so it decides which pages are old enough to move,
has them moved (`tiers.move_pages`), and takes the pages that this frees into the pool again. All pages of a tier are
alike: a row takes any that is free, and keeps only the list.

Rows that begin alike may share pages (`fork`): full pages are only read. When one row's page moves, the others keep the
source; those that come to move it, too, share the target, as long as both are there.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.engine.pages import OutOfPages, PagePool
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


type Moved = dict[tuple[Tier, Tier], list[tuple[int, int]]]
"""Pages that leave a tier for another, (from, to), in the order in which they are to be moved."""


def no_moves() -> Moved:
    # int8 pages that become free may be targets of the last.
    return {("int8", "int4"): [], ("recent", "int4"): [], ("recent", "int8"): []}


def calls_for(moved: Moved) -> list[Moves]:
    """The calls that make these moves, in order."""
    calls = []
    for (source, target), pairs in moved.items():
        for some in itertools.batched(pairs, MOVED_AT_ONCE[-1]):
            size = next(size for size in MOVED_AT_ONCE if size >= len(some))
            pages = np.full((size, 2), SCRATCH_PAGE, np.int32)
            pages[: len(some)] = some
            calls.append(Moves(source, target, pages))
    return calls


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
        self.pools = {name: PagePool(1 + size) for name, size in dataclasses.asdict(pools).items() if size}
        """Of the tiers that rows can reach."""
        self.rows = [Row() for _ in range(num_rows)]
        self._moved_to: dict[tuple[str, int], tuple[str, int]] = {}
        """Of pages (tier, page) that one row has moved down and others still have, where to."""
        self._moved_from: dict[tuple[str, int], tuple[str, int]] = {}

    def settle(self) -> list[Moves]:
        """Decides for all rows which pages leave their tier; the moves are to be made, in this order, before the next
        program. RuntimeError for a pool that is too small."""
        moved = no_moves()
        for row in range(len(self.rows)):
            self.age(row, moved)
        return calls_for(moved)

    def age(self, row: int, moved: Moved) -> None:
        """Takes the pages of a row that leave their tier to the next one, and adds what that moves."""
        own = self.rows[row]
        first_recent, first_int8, first_window = self.rules.first_pages(own.num_tokens)
        while own.window and own.first_window < first_window:
            self._give("window", [own.window.popleft()])
            own.first_window += 1
        if not self.rules.has_full_layers:
            return
        while own.first_int8 < first_int8:
            source: Tier = "int8" if own.int8 else "recent"
            self._move(own, source, "int4", moved[source, "int4"])
            own.first_int8 += 1
            own.first_recent = max(own.first_recent, own.first_int8)
        while own.first_recent < first_recent:
            self._move(own, "recent", "int8", moved["recent", "int8"])
            own.first_recent += 1

    def _move(self, row: Row, source: Tier, target: Tier, pairs: list[tuple[int, int]]) -> None:
        """Moves the oldest page of a row's tier."""
        page = getattr(row, source).popleft()
        tier, new = known = self._moved_to.get((source, page), ("", 0))
        if tier == target:
            self.pools[target].share([new])
        else:
            new = self._take(target)
            pairs.append((page, new))
            self._moved_from.pop(known, None)
            if self.pools[source].references[page] > 1:
                self._moved_to[source, page], self._moved_from[target, new] = (target, new), (source, page)
        getattr(row, target).append(new)
        self._give(source, [page])

    def _take(self, name: str) -> int:
        try:
            (page,) = self.pools[name].allocate(1)
        except OutOfPages:
            raise RuntimeError(
                "a tier of the cache has no free page: rows have more tokens than it was made for"
            ) from None
        return page

    def _give(self, name: str, pages: list[int]) -> None:
        """Takes one owner from pages. What is known of pages that have none then is forgotten."""
        self.pools[name].release(pages)
        for page in pages if self._moved_to else ():
            if not self.pools[name].references[page]:
                self._moved_from.pop(self._moved_to.pop((name, page), ("", 0)), None)
                self._moved_to.pop(self._moved_from.pop((name, page), ("", 0)), None)

    def append(self, row: int, count: int) -> None:
        """Gives a row places for `count` tokens that the next program appends."""
        self.rows[row].num_tokens += count
        self.cover(row, self.rows[row].num_tokens)

    def cover(self, row: int, num_tokens: int) -> None:
        """Gives a row the pages of its first `num_tokens` tokens, as far as it has none."""
        own, pages = self.rows[row], -(-num_tokens // self.rules.page_size)
        if self.rules.has_full_layers:
            while own.first_recent + len(own.recent) < pages:
                own.recent.append(self._take("recent"))
        if self.rules.window is not None:
            while own.first_window + len(own.window) < pages:
                own.window.append(self._take("window"))

    def has_room(self, row: Row, num_tokens: int, reach: int) -> bool:
        """Whether there are pages to `age` a row of `num_tokens` tokens and to `cover` it up to `reach` then."""
        first_recent, first_int8, first_window = self.rules.first_pages(num_tokens)
        last = -(-reach // self.rules.page_size)
        wanted = dict.fromkeys(self.pools, 0)
        if self.rules.has_full_layers:
            into_int4 = max(first_int8 - row.first_int8, 0)
            from_int8 = min(into_int4, len(row.int8))
            from_recent = max(first_recent - row.first_recent, 0)
            wanted["recent"] = last - row.first_recent - len(row.recent) - self._freed("recent", row, from_recent)
            if into_int4:
                wanted["int4"] = into_int4
            if from_recent or from_int8:
                into_int8 = from_recent - (into_int4 - from_int8)
                wanted["int8"] = into_int8 - self._freed("int8", row, from_int8)
        if self.rules.window is not None:
            gone = max(first_window - row.first_window, 0)
            wanted["window"] = last - row.first_window - len(row.window) - self._freed("window", row, gone)
        return all(count <= 0 or count <= self._available(name) for name, count in wanted.items())

    def has(self, pages: TierPools) -> bool:
        """Whether each pool has so many."""
        return all(count <= self._available(name) for name, count in dataclasses.asdict(pages).items())

    def _available(self, name: str) -> int:
        return self.pools[name].num_available if name in self.pools else 0

    def _freed(self, name: str, row: Row, count: int) -> int:
        """How many of a row's oldest `count` pages of a tier are free when the row has left them."""
        if not count:
            return 0
        references = self.pools[name].references
        return sum(references[page] == 1 for page in itertools.islice(getattr(row, name), count))

    def fork(self, parent: int, child: int, num_tokens: int) -> dict[str, tuple[int, int]]:
        """Gives an empty row all pages of another of `num_tokens` tokens, but for the last page if it is not full, as
        both will write to it: its contents are to be copied, (from, to) by tier."""
        own = self.rows[parent]
        self.rows[child] = Row(
            num_tokens,
            own.first_recent,
            own.first_int8,
            own.first_window,
            own.recent.copy(),
            own.int8.copy(),
            own.int4.copy(),
            own.window.copy(),
        )
        copies = {}
        for name, pool in self.pools.items():
            pages = getattr(self.rows[child], name)
            if pages and name in ("recent", "window") and num_tokens % self.rules.page_size:
                copies[name] = (pages.pop(), self._take(name))
            pool.share(list(pages))
            if name in copies:
                pages.append(copies[name][1])
        return copies

    def release(self, row: int) -> None:
        """Gives all pages of a row back; it is empty then."""
        own, self.rows[row] = self.rows[row], Row()
        for name in self.pools:
            self._give(name, list(getattr(own, name)))

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
