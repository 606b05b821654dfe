"""The second tier of pages: numbered places in host memory for what the pool evicts. Plain Python, no arrays."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Move:
    """The contents of one page go from the device to the host, or back. Moves are carried out in order."""

    kind: Literal["demote", "restore"]
    page: int
    host_page: int


class HostPool:
    """Host pages 0 to `num_pages - 1`, each free or in use. One that is in use holds what somebody may ask for.

    The page that has been in use longest gives way to a new one, after `on_evict(host_page)` has been told.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self) -> int | None:
        """A page for new contents; None if there are none at all."""
        if not self._free:
            if not self._used:
                return None
            oldest = next(iter(self._used))
            if self.on_evict is not None:
                self.on_evict(oldest)
            self.free(oldest)
        page = self._free.pop()
        self._used[page] = None
        return page

    def free(self, page: int) -> None:
        """The contents of a page are of no use here any more."""
        if page not in self._used:
            raise ValueError(f"host page {page} is free already")
        del self._used[page]
        self._free.append(page)
