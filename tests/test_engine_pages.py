"""The page pool and the prefix cache against a model of both: what each page holds, and who owns it."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jaxinfer.engine.host_pages import HostPool
from jaxinfer.engine.pages import OutOfPages, PagePool
from jaxinfer.engine.prefix_cache import PrefixCache

PAGE = 2
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
"""Few tokens, so that prefixes repeat."""


class Pages(RuleBasedStateMachine):
    """Sequences come with a text, take what is cached, write the rest, share, and go."""

    sequences = Bundle("sequences")
    host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.cache = PrefixCache(self.pool, PAGE, HostPool(self.host_pages))
        self.host_contents: dict[int, tuple[int, ...]] = {}
        self.held: dict[int, list[int]] = {}
        self.contents: dict[int, tuple[int, ...]] = {}
        """What was last written to each page: its tokens and all before them."""
        self.recency: list[int] = []
        """Pages in the order in which they last lost an owner."""

    def move(self) -> None:
        """Carries out moves between the tiers, in order."""
        for move in self.cache.take_moves():
            if move.kind == "demote":
                self.host_contents[move.host_page] = self.contents[move.page]
            else:
                self.contents[move.page] = self.host_contents[move.host_page]

    @rule(target=sequences, text=TEXTS, restores=st.booleans())
    def admit(self, text: list[int], restores: bool) -> int:
        self.cache.is_worth_restoring = lambda num_pages: restores
        reused, cursor = self.cache.match(text, len(text) - 1)
        self.move()
        assert len(reused) * PAGE < len(text), "at least one token is left to compute"
        for number, page in enumerate(reused):
            assert self.contents[page] == tuple(text[: (number + 1) * PAGE]), "a page of another text was matched"
        count = -(-len(text) // PAGE) - len(reused)
        self.pool.share(reused)
        before = self.pool.num_available
        owned = {page for page, references in enumerate(self.pool.references) if references}
        try:
            fresh = self.pool.allocate(count)
            self.move()
        except OutOfPages:
            assert before < count and self.pool.num_available == before
            self._release(reused)
            return -1
        assert before >= count and not set(fresh) & owned and 0 not in fresh and len(set(fresh)) == count
        pages = reused + fresh
        for number in range(len(reused), len(pages)):
            self.contents[pages[number]] = tuple(text[: (number + 1) * PAGE])
        assert self.cache.extend(cursor, text, pages, len(text)).num_pages == len(text) // PAGE
        key = len(self.held)
        self.held[key] = pages
        return key

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        if not self.held.get(parent):
            return -1
        key = len(self.held)
        self.held[key] = list(self.held[parent])
        self.pool.share(self.held[key])
        return key

    @rule(key=consumes(sequences))
    def leave(self, key: int) -> None:
        self._release(self.held.get(key, []))
        self.held[key] = []

    @rule(key=sequences)
    def distrust(self, key: int) -> None:
        pages = self.held.get(key, [])
        self.cache.forget(pages)
        assert not any(page in self.cache._keys for page in pages)

    def _release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        for page in reversed(pages):
            self.recency = [other for other in self.recency if other != page] + [page]

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        counted = collections.Counter(page for pages in self.held.values() for page in pages)
        assert self.pool.references == [counted[page] for page in range(self.pool.num_pages)]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free, idle = self.pool._free, list(self.pool._idle)
        owned = [page for page, references in enumerate(self.pool.references) if references]
        assert sorted(free + idle + owned) == list(range(1, self.pool.num_pages))
        assert set(idle) <= set(self.cache._keys), "a page is idle that nobody can find"
        nodes = self.cache._nodes.values()
        assert self.pool._kept == set(self.cache._keys) == {node.page for node in nodes} - {None}
        host = self.cache.host
        assert sorted([*host._free, *host._used]) == list(range(self.host_pages))
        assert set(host._used) == set(self.cache._host_keys) == {node.host_page for node in nodes} - {None}
        assert all((node.page is None) != (node.host_page is None) for node in nodes), "a node is in one tier"
        assert not self.cache.moves

    @invariant()
    def idle_pages_are_in_order_of_use(self) -> None:
        if self.host_pages == 0:  # what comes back from the host is as if just used
            assert list(self.pool._idle) == [page for page in self.recency if page in self.pool._idle]


class PagesOfTwoTiers(Pages):
    """With room on the host for some of what is evicted."""

    host_pages = 5


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPagesOfTwoTiers = PagesOfTwoTiers.TestCase
TestPagesOfTwoTiers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_least_recently_used_prefix_is_evicted_end_first() -> None:
    pool = PagePool(5)
    cache = PrefixCache(pool, PAGE)
    old, new = pool.allocate(2), pool.allocate(2)
    cache.extend(cache.root(), [1, 1, 1, 1], old, 4)
    cache.extend(cache.root(), [2, 2, 2, 2], new, 4)
    pool.release(old)
    pool.release(new)
    assert (pool.num_idle, pool.num_available, pool.num_owned) == (4, 4, 0)
    (page,) = pool.allocate(1)
    assert page == old[1]
    assert cache.match([1, 1, 1, 1], 4)[0] == old[:1]
    assert cache.match([2, 2, 2, 2], 4)[0] == new
    pool.share(old[:1])  # used again: now the other one is the oldest
    pool.release(old[:1])
    assert pool.allocate(1) == new[1:]


def test_equal_hashes_share_no_page() -> None:
    """Python's integers 0 and 2**61 - 1 have one hash, and so have tuples of them."""
    same = 2**61 - 1
    assert hash((0, 5)) == hash((same, 5))
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    pages = pool.allocate(1)
    cache.extend(cache.root(), [0, 5], pages, 2)
    assert cache.match([0, 5, 1], 2)[0] == pages
    assert cache.match([same, 5, 1], 2)[0] == []


def test_salt_separates_equal_texts() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    pages = pool.allocate(1)
    cache.extend(cache.root(100), [1, 2], pages, 2)
    assert cache.match([1, 2], 2, 100)[0] == pages
    assert cache.match([1, 2], 2, 200)[0] == cache.match([1, 2], 2)[0] == []


def test_what_hung_on_an_evicted_page_is_not_found_again() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    pages = pool.allocate(2)
    cache.extend(cache.root(), [1, 1, 2, 2], pages, 4)
    cache.forget(pages[:1])
    assert cache.match([1, 1, 2, 2], 4)[0] == []
    again = pool.allocate(1)
    cache.extend(cache.root(), [1, 1], again, 2)
    assert cache.match([1, 1, 2, 2], 4)[0] == again
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0
    pool.release(pages + again)
    assert (pool.num_idle, pool.num_available) == (0, 3)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="num_pages=1: page 0 is scratch"):
        PagePool(1)
    pool = PagePool(3)
    with pytest.raises(ValueError, match="page 1 is free; only owned and idle pages can be shared"):
        pool.share([1])
    with pytest.raises(ValueError, match="page 1 has no owner; it cannot be released"):
        pool.release([1])
    with pytest.raises(ValueError, match="page 1 has no owner; only owned pages can be kept"):
        pool.keep(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 available"):
        pool.allocate(3)
