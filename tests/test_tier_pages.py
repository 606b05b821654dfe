"""Tiers on the host: when pages leave which tier, by hand; that no page is lost, shared or early, by simulation."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch import Limits
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.kv_cache import SCRATCH_PAGE
from jaxinfer.tier_pages import Moves, TierPages, TierRules
from jaxinfer.tiered_batch import pools_for
from jaxinfer.tiers import MOVED_AT_ONCE, TieredKV, TierPools, num_bytes, resolve

PAGE = 16


def rules(recent: int = 1024, int8: int = 4096, window: int | None = None, full: bool = True) -> TierRules:
    return TierRules(recent, int8, window, full, PAGE)


def test_what_kv_dtype_may_be():
    assert resolve("tiered") == TieredKV(1024, 4096)
    assert resolve("tiered:512,0") == TieredKV(512, 0)
    assert str(TieredKV(512, 64)) == "tiered:512,64"
    assert resolve(TieredKV(1, 2)) == TieredKV(1, 2)
    assert resolve("int8") == np.dtype("int8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("tiered:5", 'expected "tiered" or "tiered:RECENT,INT8", such as tiered:1024,4096'),
        ("tiered:0,64", r"TieredKV\(recent=0\): expected an integer of at least 1"),
        ("int3", "a cache can be float32, bfloat16, float16, int8, float8_e4m3fn, int4, or tiered"),
    ],
)
def test_what_it_may_not_be(wrong: str, message: str):
    with pytest.raises(ValueError, match=message):
        resolve(wrong)


def test_distances_that_make_no_sense():
    for fields in ({"recent": 0}, {"int8": -1}, {"recent": True}):
        with pytest.raises(ValueError, match="expected an integer of at least"):
            TieredKV(**fields)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, (0, 0, 0)),
        (1024 + 15, (0, 0, 0)),
        (1024 + 16, (1, 0, 1)),  # token 15 has 1024 tokens behind it
        (5120 + 15, (256, 0, 256)),
        (5120 + 16, (257, 1, 257)),
    ],
)
def test_pages_age_when_their_last_token_does(num_tokens: int, expected: tuple[int, int, int]):
    """The window of 1025 sees 1024 tokens before the next: it loses pages as the newest tier does."""
    assert rules(window=1025).first_pages(num_tokens) == expected


def test_room_by_hand():
    """32768 tokens, 16 at a time: 1024 + 15 + 16 tokens are newest at most, 4096 in int8, 27648 in int4."""
    assert rules(window=100).room(32768, 16) == TierPools(recent=66, int8=256, int4=1728, window=9)
    assert rules(full=False, window=100).room(32768, 16) == TierPools(0, 0, 0, 9)
    assert rules().room(1000, 16) == TierPools(63, 0, 0, 0)


def test_bytes_of_the_8b_shape_at_32768_tokens():
    """32 layers, 8 heads of 128: a token takes 131072 bytes in bfloat16, 67584 in int8, 34816 in int4."""
    config = from_hugging_face({**shape_config(), "max_position_embeddings": 32768}, {})
    limits = Limits(prefill_chunk=2048, prefill_tokens=4096, decode_chunk=16)
    pools = pools_for(rules(), 8, 32768, limits)
    # A prefill call of 4096 tokens has 256 pages beside those of 8 rows.
    assert pools == TierPools(recent=8 * 66 + 256, int8=8 * 256, int4=8 * 1728, window=0)
    expected = PAGE * ((8 * 66 + 257) * 131072 + (8 * 256 + 1) * 67584 + (8 * 1728 + 1) * 34816)
    assert num_bytes(config, pools, PAGE, np.dtype("bfloat16")) == expected
    assert expected < 0.34 * 8 * 32768 * 131072


def shape_config() -> dict[str, object]:
    folder = pathlib.Path(__file__).parent.parent / "benchmarks" / "shapes" / "llama-3-8b"
    return json.loads((folder / "config.json").read_text())


@dataclasses.dataclass
class Simulation:
    """Pools whose pages remember which page of which row they hold, and what precision it has had."""

    pages: TierPages
    rules: TierRules
    sizes: TierPools

    def __post_init__(self) -> None:
        names = dataclasses.asdict(self.sizes)
        self.settled = [0] * len(self.pages.rows)
        self.content: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in names}

    def move(self, calls: list[Moves]) -> None:
        for call in calls:
            assert len(call.pages) in MOVED_AT_ONCE
            moved = {}
            for source, target in call.pages.tolist():
                if target != SCRATCH_PAGE:
                    moved[target] = self.content[call.source].pop(source)
            assert not moved.keys() & self.content[call.target].keys()  # nothing that is in use is overwritten
            self.content[call.target] |= moved

    def append(self, row: int, count: int) -> None:
        before = {name: set(getattr(self.pages.rows[row], name)) for name in self.content}
        self.pages.append(row, count)
        own = self.pages.rows[row]
        for name, first in (("recent", own.first_recent), ("window", own.first_window)):
            for place, page in enumerate(getattr(own, name)):
                if page not in before[name]:
                    self.content[name][page] = (row, first + place)

    def check(self) -> None:
        """Tables have each row's pages in order, in the tier that its length says; no page has two owners."""
        tables = self.pages.tables(range(len(self.pages.rows)), TierPools(200, 200, 200, 200))
        owned: dict[str, list[int]] = {name: [] for name in self.content}
        for row, own in enumerate(self.pages.rows):
            recent, int8, window = self.rules.first_pages(self.settled[row])
            pages = -(-own.num_tokens // PAGE)
            spans = {"window": (window, pages if self.rules.window is not None else window)}
            if self.rules.has_full_layers:
                spans |= {"int4": (0, int8), "int8": (int8, recent), "recent": (recent, pages)}
                assert (tables.recent_start[row], tables.int8_start[row]) == (recent * PAGE, int8 * PAGE)
            for name, (first, last) in spans.items():
                ids = getattr(tables, name)[row].tolist()
                assert [self.content[name].get(page) for page in ids[: last - first]] == [
                    (row, page) for page in range(first, last)
                ]
                assert set(ids[last - first :]) <= {SCRATCH_PAGE}
                owned[name] += ids[: last - first]
        for name, ids in owned.items():
            assert len(ids) == len(set(ids))
            assert len(ids) + self.pages._available(name) == getattr(self.sizes, name)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_page_is_lost_shared_or_early(data: st.DataObject):
    """Rows that grow by chunks and by steps, end and begin again, in pools of the size that batches make."""
    kinds = st.tuples(st.integers(1, 100), st.integers(0, 100), st.none() | st.integers(1, 90), st.booleans())
    recent, int8, window, full = data.draw(kinds)
    own_rules = rules(recent, int8, window, full or window is None)
    limits = Limits(prefill_chunk=64, prefill_tokens=64, decode_chunk=data.draw(st.sampled_from([1, 4, 16])))
    num_tokens, num_rows = 512, data.draw(st.integers(1, 4))
    sizes = pools_for(own_rules, num_rows, num_tokens, limits)
    simulation = Simulation(TierPages(own_rules, sizes, num_rows), own_rules, sizes)
    for _ in range(data.draw(st.integers(1, 25))):
        simulation.move(simulation.pages.settle())
        simulation.settled = [row.num_tokens for row in simulation.pages.rows]
        action = data.draw(st.sampled_from(["prefill", "decode", "decode", "release"]))
        row = data.draw(st.integers(0, num_rows - 1))
        if action == "release":
            for name in simulation.content:
                for page in getattr(simulation.pages.rows[row], name):
                    del simulation.content[name][page]
            simulation.pages.release(row)
            simulation.settled[row] = 0
        for one in [row] if action == "prefill" else range(num_rows) if action == "decode" else []:
            most = limits.prefill_chunk if action == "prefill" else limits.decode_chunk
            simulation.append(one, min(most, num_tokens - simulation.pages.rows[one].num_tokens))
        simulation.check()


def test_a_pool_that_is_too_small_says_so():
    pages = TierPages(rules(), TierPools(2, 0, 0, 0), 1)
    with pytest.raises(RuntimeError, match="a tier of the cache has no free page"):
        pages.append(0, 33)


def test_rows_that_begin_alike_share_pages_in_all_tiers():
    """Three rows of 5 pages and a half; when all are 8 tokens longer 5 pages have aged, and each moves once for all."""
    pages = TierPages(rules(recent=16, int8=32), TierPools(12, 9, 9, 0), 3)
    pages.append(0, 88)
    for child in (1, 2):
        (copy,) = pages.fork(0, child, 88).values()
        assert copy[0] == pages.rows[0].recent[-1] and copy[1] == pages.rows[child].recent[-1]
    assert pages.pools["recent"].num_owned == 5 + 3
    assert not pages.has_room(pages.rows[0], 88, 88 + 16 * 6) and pages.has_room(pages.rows[0], 88, 96 + 16 * 4)
    for row in range(3):
        pages.append(row, 8)
    # 96 - 48 tokens are 3 pages of int4, 96 - 16 are 5 that are not newest.
    moved = {(call.source, call.target): (call.pages[:, 1] != SCRATCH_PAGE).sum() for call in pages.settle()}
    assert moved == {("recent", "int4"): 3, ("recent", "int8"): 2}
    assert [pages.pools[name].num_owned for name in ("recent", "int8", "int4")] == [3, 2, 3]
    # One that goes on alone has a page of its own in int4, and the others share theirs.
    pages.append(0, 16)
    assert sum((call.pages[:, 1] != SCRATCH_PAGE).sum() for call in pages.settle()) == 2
    assert [pages.pools[name].num_owned for name in ("recent", "int8", "int4")] == [3, 3, 4]
    for row in (1, 2):
        pages.append(row, 16)
    assert {(call.source, call.target) for call in pages.settle()} == {("recent", "int8")}  # of int4 row 0 has made it
    for row in range(3):
        pages.release(row)
    assert not any(pool.num_owned for pool in pages.pools.values())
    assert not pages._moved_to and not pages._moved_from
