"""Which pages hold the beginnings of texts that were computed before."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

from jaxinfer.engine.pages import PagePool


@dataclasses.dataclass(frozen=True)
class Cursor:
    """How far a sequence's pages have been told to the cache: `num_pages`, the last of them at `node`."""

    node: Hashable
    num_pages: int = 0


class PrefixCache:
    """A tree of full pages. An edge is the tokens of one page, so a page is found by everything up to its end.

    A node is a dictionary entry under (parent, tokens): the hash finds it and Python compares the tokens themselves, so
    two texts with equal hashes never share a page. Numbers of nodes are not used again: what hung on an evicted node
    cannot be reached through a later one. `salt` separates texts whose keys and values differ though their tokens do
    not (RoPE that depends on the length of the request).
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        pool.on_evict = self._evicted
        self._numbers = itertools.count(1)
        self._nodes: dict[tuple[Hashable, tuple[int, ...]], tuple[int, int]] = {}  # -> (node, page)
        self._keys: dict[int, tuple[Hashable, tuple[int, ...]]] = {}  # page -> its key

    def __len__(self) -> int:
        """Pages known."""
        return len(self._nodes)

    @staticmethod
    def root(salt: Hashable = None) -> Cursor:
        """Where a sequence starts."""
        return Cursor(("root", salt))

    def match(self, tokens: Sequence[int], limit: int, salt: Hashable = None) -> tuple[list[int], Cursor]:
        """Pages that hold the first tokens, at most `limit` of them, and where the match ended. Shares nothing yet."""
        cursor, pages = self.root(salt), []
        for start in range(0, limit - self.page_size + 1, self.page_size):
            found = self._nodes.get((cursor.node, tuple(tokens[start : start + self.page_size])))
            if found is None:
                break
            node, page = found
            pages.append(page)
            cursor = Cursor(node, cursor.num_pages + 1)
        return pages, cursor

    def extend(self, cursor: Cursor, tokens: Sequence[int], pages: Sequence[int], num_written: int) -> Cursor:
        """Tells the cache of the pages of a sequence that are full now: `num_written` tokens are in them.

        A page whose contents another page has already stays with its owner alone.
        """
        node, number = cursor.node, cursor.num_pages
        while (number + 1) * self.page_size <= num_written:
            key = (node, tuple(tokens[number * self.page_size : (number + 1) * self.page_size]))
            if key not in self._nodes:
                page = pages[number]
                self.pool.keep(page)
                self._nodes[key] = (next(self._numbers), page)
                self._keys[page] = key
            node, number = self._nodes[key][0], number + 1
        return Cursor(node, number)

    def forget(self, pages: Sequence[int]) -> None:
        """Removes pages whose contents cannot be trusted."""
        for page in pages:
            if page in self._keys:
                self._evicted(page)
                self.pool.forget(page)

    def clear(self) -> None:
        """Removes everything."""
        self.forget(list(self._keys))

    def _evicted(self, page: int) -> None:
        del self._nodes[self._keys.pop(page)]
