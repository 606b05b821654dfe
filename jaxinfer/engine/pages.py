"""Who owns which page of the key-value cache. Plain Python: numbers and counts, no arrays."""

import collections
from collections.abc import Callable, Sequence

SCRATCH_PAGE = 0
"""Takes the writes of padding; never given to anybody."""


class OutOfPages(Exception):
    """Fewer pages are available than were asked for; nothing has changed."""


class PagePool:
    """Pages 1 to `num_pages - 1` of a cache, each in exactly one of three places.

    Free: of no use to anybody. Owned: `references[page]` sequences read it, or one writes it. Idle: nobody owns it, but
    the prefix cache knows what it holds (`keep`), so that `share` can bring it back; the page that has been idle
    longest is evicted when free ones run out, after `on_evict(page)` has been told.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: page {SCRATCH_PAGE} is scratch, so a pool needs at least 2 pages")
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self.on_evict = on_evict
        self.on_allocate: Callable[[list[int]], object] | None = None
        """Told which pages have been given away: their contents mean nothing from then on."""
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._kept: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Pages that sequences can have: all but the scratch page."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_available

    def allocate(self, count: int) -> list[int]:
        """`count` pages of unknown contents, each owned once. Raises OutOfPages, giving nothing, if there are fewer."""
        if count > self.num_available:
            raise OutOfPages(f"{count} pages asked for, {self.num_available} available")
        kept = max(len(self._free) - count, 0)
        pages = self._free[kept:][::-1]
        del self._free[kept:]
        pages += [self._evict() for _ in range(count - len(pages))]
        for page in pages:
            self.references[page] = 1
        if self.on_allocate is not None:
            self.on_allocate(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one owner to each page, which must be owned or idle."""
        for page in pages:
            if self.references[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free; only owned and idle pages can be shared")
                del self._idle[page]
            self.references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page of a sequence; the last one leaves it idle if it is kept, else free.

        Later pages go first, so that of a prefix the end is evicted before what it continues.
        """
        for page in reversed(pages):
            if self.references[page] < 1:
                raise ValueError(f"page {page} has no owner; it cannot be released")
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """An owned page has contents worth keeping when its last owner leaves."""
        if self.references[page] < 1:
            raise ValueError(f"page {page} has no owner; only owned pages can be kept")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The contents of a kept page are worth nothing any more."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.discard(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page
