"""Which pages hold the beginnings of texts that were computed before."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence

from jaxinfer.engine.host_pages import HostPool, Move
from jaxinfer.engine.pages import PagePool

type Key = tuple[Hashable, tuple[int, ...]]
"""The node before, and the tokens of a page."""


@dataclasses.dataclass(frozen=True)
class Cursor:
    """How far a sequence's pages have been told to the cache: `num_pages`, the last of them at `node`."""

    node: Hashable
    num_pages: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """A known page of some text. Its contents are in a page of the pool or of the host, never in both."""

    number: int
    page: int | None
    host_page: int | None = None


class PrefixCache:
    """A tree of full pages. An edge is the tokens of one page, so a page is found by everything up to its end.

    A node is a dictionary entry under (parent, tokens): the hash finds it and Python compares the tokens themselves, so
    two texts with equal hashes never share a page. Numbers of nodes are not used again: what hung on a forgotten node
    cannot be reached through a later one. `salt` separates texts whose keys and values differ though their tokens do
    not (RoPE that depends on the length of the request).

    With a host pool, what the device's pool evicts goes there, and comes back when a text that begins so is looked for
    and `is_worth_restoring(number of pages)`. `moves` lists what has to be copied, in order, before anything that is
    dispatched later; whoever carries it out takes it away.
    """

    def __init__(self, pool: PagePool, page_size: int, host: HostPool | None = None) -> None:
        self.pool, self.page_size, self.host = pool, page_size, host or HostPool(0)
        self.moves: list[Move] = []
        self.is_worth_restoring: Callable[[int], bool] = lambda num_pages: True
        pool.on_evict, self.host.on_evict = self._evicted, self._evicted_from_host
        self._numbers = itertools.count(1)
        self._nodes: dict[Key, Node] = {}
        self._keys: dict[int, Key] = {}  # page -> its key
        self._host_keys: dict[int, Key] = {}
        self._reachable: set[Hashable] = set()
        """Numbers of the nodes there are."""

    def __len__(self) -> int:
        """Pages known, of both tiers."""
        return len(self._nodes)

    @staticmethod
    def root(salt: Hashable = None) -> Cursor:
        """Where a sequence starts."""
        return Cursor(("root", salt))

    def match(self, tokens: Sequence[int], limit: int, salt: Hashable = None) -> tuple[list[int], Cursor]:
        """Pages that hold the first tokens, at most `limit` of them, and where the match ended. Shares nothing yet.

        Pages on the host come back to the device first, as far as there is room, and are then idle as the others.
        """
        cursor, found = self.root(salt), []
        for start in range(0, limit - self.page_size + 1, self.page_size):
            node = self._nodes.get((cursor.node, tuple(tokens[start : start + self.page_size])))
            if node is None:
                break
            found.append(node)
            cursor = Cursor(node.number, cursor.num_pages + 1)
        on_host = sum(node.page is None for node in found)
        if on_host:
            found = self._restored(found, self.is_worth_restoring(on_host))
            cursor = Cursor(found[-1].number, len(found)) if found else self.root(salt)
        return [node.page for node in found if node.page is not None], cursor

    def extend(self, cursor: Cursor, tokens: Sequence[int], pages: Sequence[int], num_written: int) -> Cursor:
        """Tells the cache of the pages of a sequence that are full now: `num_written` tokens are in them.

        A page whose contents another page has already stays with its owner alone; one whose contents are on the host
        takes their place.
        """
        parent, number = cursor.node, cursor.num_pages
        while (number + 1) * self.page_size <= num_written:
            key = (parent, tuple(tokens[number * self.page_size : (number + 1) * self.page_size]))
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(next(self._numbers), None)
                self._reachable.add(node.number)
            if node.page is None:
                if node.host_page is not None:
                    self._leave_host(node)
                node.page = pages[number]
                self.pool.keep(node.page)
                self._keys[node.page] = key
            parent, number = node.number, number + 1
        return Cursor(parent, number)

    def forget(self, pages: Sequence[int]) -> None:
        """Removes pages whose contents cannot be trusted."""
        for page in pages:
            if page in self._keys:
                self._remove(self._keys.pop(page))
                self.pool.forget(page)

    def clear(self) -> None:
        """Removes everything."""
        self.forget(list(self._keys))
        for host_page in list(self._host_keys):
            self._evicted_from_host(host_page)
            self.host.free(host_page)

    def take_moves(self) -> list[Move]:
        """What is to be copied before anything else is dispatched."""
        moves, self.moves = self.moves, []
        return moves

    # --- Between the tiers

    def _evicted(self, page: int) -> None:
        """The pool gives this page to somebody else: what it holds goes to the host, if it can be found there."""
        key = self._keys.pop(page)
        parent, node = key[0], self._nodes[key]
        is_reachable = isinstance(parent, tuple) or parent in self._reachable
        host_page = self.host.take() if is_reachable else None
        if host_page is None:
            self._remove(key)
            return
        node.page, node.host_page = None, host_page
        self._host_keys[host_page] = key
        self.moves.append(Move("demote", page, host_page))

    def _evicted_from_host(self, host_page: int) -> None:
        self._remove(self._host_keys.pop(host_page))

    def _restored(self, found: list[Node], is_worth_it: bool) -> list[Node]:
        """Brings nodes back to the device, in order, as far as there is room; returns those that are there then."""
        held: list[int] = []
        """Owned meanwhile, so that what is found is not evicted for what follows it."""
        for index, node in enumerate(found):
            if node.page is not None:
                self.pool.share([node.page])
                held.append(node.page)
                continue
            if not is_worth_it or self.pool.num_available == 0:
                found = found[:index]
                break
            # What this evicts may need room on the host, at the cost of this very node or of one after it.
            (page,) = self.pool.allocate(1)
            if node.host_page is None:
                self.pool.release([page])
                found = found[:index]
                break
            self._keys[page] = self._host_keys[node.host_page]
            self.moves.append(Move("restore", page, node.host_page))
            self._leave_host(node)
            node.page = page
            self.pool.keep(page)
            held.append(page)
        self.pool.release(held)
        return found

    def _leave_host(self, node: Node) -> None:
        """Its contents are in a page of the pool again, or will be when the moves are done."""
        assert node.host_page is not None
        del self._host_keys[node.host_page]
        self.host.free(node.host_page)
        node.host_page = None

    def _remove(self, key: Key) -> None:
        node = self._nodes.pop(key)
        node.page = node.host_page = None
        self._reachable.discard(node.number)
