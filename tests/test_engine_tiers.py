"""The engine over a cache in tiers: `generate`'s tokens, every page of every tier given back, and what is refused."""

import collections
import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine_scheduler as simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tiers import CHUNK, KV, LONGEST, PAGE, load_case

from jaxinfer.batch import Limits
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import RequestTooLong
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.sequence import Fork, Plan, Sequence, Status
from jaxinfer.engine.settings import settle
from jaxinfer.engine.tiered_scheduler import TieredScheduler
from jaxinfer.engine.tiering import Demand, given_pools, share_out
from jaxinfer.generation import generate
from jaxinfer.model import Model
from jaxinfer.outputs import Delta
from jaxinfer.params import random_params
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.ngram import NgramDraft
from jaxinfer.tier_pages import TierRules
from jaxinfer.tiers import TieredKVCache, TierPools

POOLS = TierPools(recent=15, int8=9, int4=12, window=20)
"""int4 holds the longest sequence, and not two of the long ones below."""
CONFIG = EngineConfig(
    max_decode_batch=3,
    max_context=LONGEST,
    tier_pages=POOLS,
    max_prefill_tokens=128,
    prefill_lengths=(CHUNK,),
    prefill_rows=(1,),
    decode_rows=(3,),
    decode_chunk=4,
    sampling=(SamplingParams(temperature=1.0),),
)


def engine(**changes: Any) -> Engine:
    return Engine(load_case("gemma2"), dataclasses.replace(CONFIG, **changes))


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 90, length).tolist() for length in lengths]


@functools.partial(jax.jit, donate_argnums=0)
def poisoned(cache: TieredKVCache, unused: dict[str, jax.Array]) -> TieredKVCache:
    """NaN in unused pages of floats and of scales, and in those of codes what no code is."""

    def wrong(leaf: jax.Array, mask: jax.Array) -> jax.Array:
        value = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 0x7F
        return jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.asarray(value, leaf.dtype), leaf)

    tiers = {
        name: jax.tree.map(functools.partial(wrong, mask=mask), getattr(cache, name)) for name, mask in unused.items()
    }
    return dataclasses.replace(cache, **tiers)


def poison(engine: Engine) -> None:
    """Makes every page that nobody owns unreadable."""
    runner = engine._runner
    assert runner is not None and isinstance(runner.cache, TieredKVCache)
    pools = engine._scheduler.pools.items()
    runner.cache = poisoned(runner.cache, {name: jnp.asarray(np.array(pool.references) == 0) for name, pool in pools})


def interrupt(engine: Engine) -> None:
    """As if Ctrl-C came when a program has taken the cache, and the round that makes up for it."""
    runner = engine._runner
    assert runner is not None
    dispatch = runner.dispatch

    def interrupted(*arguments: Any) -> None:
        dispatch(*arguments)
        runner.free()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine._news += engine.step()


@pytest.fixture(autouse=True)
def same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` cuts prompts and decoding as these engines do: what a query still saw as it was depends on that."""
    limits = Limits(prefill_chunk=CHUNK, prefill_tokens=CHUNK, decode_chunk=4)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: limits))


TEXTS = prompts(150, 20, 70, 33, 1)
PARAMS = [greedy(24), greedy(60), greedy(9), greedy(40, temperature=1.0, seed=5, n=3), greedy(30)]


def test_tokens_are_those_of_generate_and_nothing_is_compiled_late() -> None:
    """Prompts in up to three pieces, of all tiers, and three answers to one; more completions than rows.

    gemma2 has windows in every other layer. Pages that nobody owns are poison.
    """
    expected = [
        completion.token_ids
        for output in generate(load_case("gemma2"), TEXTS, PARAMS)
        for completion in output.completions
    ]
    with engine() as tiered:
        tiered.warmup(progress=False)
        whole, held = tiered._advance, collections.Counter[str]()

        def advance() -> None:
            poison(tiered)
            whole()
            held.update(tiered.metrics().tier_pages_owned)

        tiered._advance = advance
        for _ in range(2):
            outputs = tiered.generate(TEXTS, PARAMS, progress=False)
            assert [completion.token_ids for output in outputs for completion in output.completions] == expected
        metrics = tiered.metrics()
        assert (metrics.compilations_after_warmup, metrics.preemptions) == (0, 0)
        assert all(held[name] for name in ("recent", "int8", "int4", "window"))
        assert metrics.tier_pages == dataclasses.asdict(POOLS)
        assert metrics.pages == sum(metrics.tier_pages.values())
        assert metrics.pages_owned == metrics.pages_cached == 0 and set(metrics.tier_pages_owned.values()) == {0}
        assert 'jaxinfer_tier_pages_owned{tier="int8"} 0' in metrics.prometheus()
        assert "recent 0 of 15, int8 0 of 9, int4 0 of 12, window 0 of 20" in str(metrics)


@pytest.mark.gpu
def test_gpu() -> None:
    """The engine's programs over the kernels, in bfloat16: log-probabilities are those of `generate` as far as the
    tokens are the same, and where those part, two had nearly the same."""
    rope = RopeConfig("default", 1e4, 64)
    layers = (LayerConfig(rope), LayerConfig(rope, window=40), LayerConfig(rope))
    config = ModelConfig("llama", 512, 500, 256, 512, 8, 2, 64, layers, LONGEST, 1e-5, attention_scale=0.5)
    model = Model(config, random_params(config, jnp.bfloat16, 0), None, jnp.dtype(jnp.bfloat16), "random", KV)
    params = [dataclasses.replace(row, temperature=0.0, n=1, logprobs=0) for row in PARAMS]
    with Engine(model, dataclasses.replace(CONFIG, sampling=(params[0],))) as tiered:
        tiered.warmup(progress=False)
        outputs = tiered.generate(TEXTS, params, progress=False)
        metrics = tiered.metrics()
    assert (metrics.compilations_after_warmup, metrics.pages_owned) == (0, 0)
    for output, reference in zip(outputs, generate(model, TEXTS, params), strict=True):
        for mine, theirs in zip(output.completions, reference.completions, strict=True):
            assert mine.logprobs is not None and theirs.logprobs is not None
            assert len(mine.token_ids) == len(theirs.token_ids)
            for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
                (token, mine_of), (same, theirs_of) = *one.items(), *other.items()
                assert abs(mine_of.logprob - theirs_of.logprob) < 0.1
                if token != same:
                    break


def test_pages_come_back_whatever_happens() -> None:
    """Preemptions, aborts, interrupts and forks at random; each answer has the length that was asked for."""
    rng = random.Random(0)
    with engine() as tiered:
        left: dict[str, int] = {}

        def hear(deltas: list[Delta]) -> None:
            for delta in deltas:
                name = str(delta.request_id)
                left[name] = left.get(name, 0) - len(delta.token_ids)
                assert delta.finish_reason != "error", delta
                if delta.finish_reason == "abort":
                    left[name] = 0

        for number in range(60):
            if number < 40 and rng.random() < 0.5:
                most, count = rng.randint(1, 90), rng.choice([1, 1, 2])
                name = tiered.submit(
                    rng.choice(TEXTS[:3]), greedy(most, n=count, temperature=1.0), request_id=str(number)
                )
                left[name] = most * count
            if tiered._jobs and rng.random() < 0.1:
                tiered.abort(rng.choice([*tiered._jobs]))
            if number in (11, 23):
                interrupt(tiered)
            else:
                poison(tiered)
                hear(tiered.step())
            rows = [sequence.tiers for sequence in tiered._scheduler.running]
            for name, pool in tiered._scheduler.pools.items():
                owned = collections.Counter(page for row in rows for page in getattr(row, name))
                assert pool.references == [owned[page] for page in range(pool.num_pages)]
        while tiered.has_work:
            hear(tiered.step())
        assert not any(left.values())
        metrics = tiered.metrics()
        assert metrics.preemptions > 0 and metrics.pages_owned == 0
        assert (metrics.waiting, metrics.prefilling, metrics.decoding) == (0, 0, 0)


# --- In simulation


@dataclasses.dataclass
class Simulation(simulated.Simulation):
    """Contents by tier; moves are carried out before the round's programs."""

    tiers: collections.defaultdict[str, dict] = dataclasses.field(default_factory=lambda: collections.defaultdict(dict))

    @property
    def tiered(self) -> TieredScheduler:
        assert isinstance(self.scheduler, TieredScheduler)
        return self.scheduler

    def submit(self, prompt: Any, max_tokens: int, stops_after: int = 10**9, group: int = -1, **options) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt), max_tokens, len(self.lengths) if group < 0 else group, **options)
        self.scheduler.add(sequence)
        self.lengths[sequence] = min(stops_after, max_tokens)
        return sequence

    def check_plan(self, plan: Plan, waiting: list, running: list, was_ready: list) -> None:
        super().check_plan(plan, waiting, running, was_ready)
        together = [piece.sequence for piece in plan.pieces] + [fork.child for fork in plan.forks] + plan.decode
        assert len(together) == len(set(together)), "a sequence takes part in one program of a round"
        for moves in plan.moves:
            contents = {}
            for source, target in moves.pages.tolist():
                if target:
                    contents[target] = list(self.tiers[moves.source][source])
            self.tiers[moves.target] |= contents

    def newest(self, sequence: Sequence) -> list[tuple[str, int, Any]]:
        row, rules = sequence.tiers, self.tiered.pages.rules
        assert row is not None
        tiers = [("recent", row.first_recent, row.recent)] if rules.has_full_layers else []
        return tiers + ([("window", row.first_window, row.window)] if rules.window is not None else [])

    def write(self, sequence: Sequence, position: int, token: int) -> None:
        size = self.scheduler.rules.page_size
        for name, first, pages in self.newest(sequence):
            page = pages[position // size - first]
            assert position // size >= first and page != 0
            self.tiers[name].setdefault(page, [None] * size)[position % size] = token

    def copy(self, fork: Fork) -> None:
        for name, (source, target) in fork.copies.items():
            self.tiers[name][target] = list(self.tiers[name][source])

    def check_readable(self, sequence: Sequence, tokens: Any) -> None:
        size, rules, row = self.scheduler.rules.page_size, self.tiered.pages.rules, sequence.tiers
        assert row is not None

        def held(name: str) -> list[int | None]:
            return [token for page in getattr(row, name) for token in self.tiers[name].get(page, [None] * size)]

        if rules.has_full_layers:
            assert (len(row.int4), len(row.int8)) == (row.first_int8, row.first_recent - row.first_int8)
            assert (held("int4") + held("int8") + held("recent"))[: len(tokens)] == list(tokens)
        if rules.window is not None:
            first = row.first_window * size
            assert held("window")[: len(tokens) - first] == list(tokens)[first:]
            assert first <= max(0, len(tokens) - rules.window + 1)

    def check_pages(self) -> None:
        for name, pool in self.scheduler.pools.items():
            rows = [sequence.tiers for sequence in self.scheduler.running]
            counted = collections.Counter(page for row in rows for page in getattr(row, name))
            assert pool.references == [counted[page] for page in range(pool.num_pages)]


@settings(max_examples=30, deadline=None)
@given(
    chosen=simulated.ALL_RULES,
    requests=st.lists(simulated.arrivals(), min_size=1, max_size=8),
    distances=st.tuples(st.integers(1, 20), st.integers(0, 20), st.none() | st.integers(1, 12), st.booleans()),
    spare=st.integers(0, 6),
)
def test_sequences_find_their_tokens_in_all_tiers(chosen, requests, distances, spare) -> None:
    """The scheduler's simulation over pools that hold the longest sequence, and a few pages more."""
    rules = Rules(**chosen)
    recent, int8, window, full = distances
    tier_rules = TierRules(recent, int8, window, full or window is None, rules.page_size)
    largest = max(len(prompt) + most - 1 for _, prompt, most, *_ in requests)
    room = tier_rules.room(largest, max(rules.decode_chunk, rules.prefill_lengths[-1]))
    pools = TierPools(*(pages and pages + spare for pages in dataclasses.astuple(room)))
    simulation = Simulation(TieredScheduler(rules, tier_rules, pools))
    sequences = []
    for number in range(13):
        for group, (when, prompt, most, stops, completions, interactive) in enumerate(requests):
            if when == number:
                options = {"group": group, "interactive": interactive}
                sequences += [simulation.submit(prompt, most, stops, **options) for _ in range(completions)]
        simulation.round()
    simulation.run()
    assert not any(pool.num_owned for pool in simulation.scheduler.pools.values())
    for sequence in sequences:
        assert sequence.status is Status.FINISHED
        assert sequence.tokens == simulation.text(sequence, simulation.lengths[sequence])


# --- How large, and what not


def test_memory_is_shared_out_by_hand() -> None:
    """A page is 100 bytes, in int8 50, in int4 25. 64 sequences of 1024 tokens have up to 5 newest pages and, for
    prompts in pieces of 64, 8; 4 pages in int8 and 58 in int4: 1650 bytes."""
    rules = TierRules(recent=32, int8=64, window=None, has_full_layers=True, page_size=16)
    demand = Demand(sequences=64, longest=1024, decode_chunk=16, piece=64, round_tokens=128)

    def num_bytes(pools: TierPools) -> int:
        return 100 * pools.recent + 50 * pools.int8 + 25 * pools.int4

    assert rules.room(1024, 64) == TierPools(7, 4, 58, 0) and rules.room(1024, 16).recent == 4
    whole = share_out(rules, demand, num_bytes, 10**9)
    assert whole.pools == TierPools(64 * 4 + 8, 64 * 4, 64 * 58, 0) and whole.num_pages == 264 + 256 + 3712
    # Half of 20000 bytes are 100 pages, 8 of them for prompts; the rest is 6 sequences' older pages.
    tight = share_out(rules, demand, num_bytes, 20_000)
    assert tight.pools == TierPools(23 * 4 + 8, 6 * 4, 6 * 58, 0) and tight.longest == 1024
    # Too little for one of 1024 tokens: as many as there is room for.
    small = share_out(rules, demand, num_bytes, 1000)
    assert small.longest < 1024 and num_bytes(small.pools) <= 1000
    assert small.pools == rules.room(small.longest, 64) and num_bytes(rules.room(small.longest + 16, 64)) > 1000
    with pytest.raises(ValueError, match="99 bytes are left for the KV cache, less than a page"):
        share_out(rules, demand, num_bytes, 99)
    assert given_pools(rules, demand, TierPools(7, 9, 20, 3)).longest == 20 * 16 + 96 + 15
    assert given_pools(rules, demand, TierPools(7, 9, 20, 3)).pools.window == 0
    with pytest.raises(ValueError, match="hold no sequence of one token; one needs TierPools"):
        given_pools(rules, demand, TierPools(0, 9, 9, 0))


def test_pools_are_chosen_where_nothing_is_said() -> None:
    found = settle(dataclasses.replace(CONFIG, tier_pages=None), load_case("gemma2"))
    assert found.tiers is not None and not found.prefix_cache
    room = TierRules.of(load_case("gemma2").config, KV, PAGE).room(LONGEST, CHUNK)
    assert found.tiers.widths == room and found.tiers.pools.int4 == 3 * room.int4
    assert found.num_pages == 1 + sum(dataclasses.astuple(found.tiers.pools)) and found.max_context == LONGEST


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 9}, "num_pages=9 with a tiered cache, which has a pool for each tier; give tier_pages instead"),
        ({"host_pages": 4}, "host_pages=4 with a tiered cache, whose pages stay on the device"),
        (
            {"prefix_cache": True},
            "prefix_cache=True with a tiered cache, whose pages hold what their",
        ),
        ({"prefill_tile": 16}, "prefill_tile=16 with a tiered cache"),
        ({"tier_pages": TierPools(7, 3, 2, 20)}, "max_context=256 needs more than the 33 pages"),
    ],
)
def test_what_does_not_go_with_tiers_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**changes)


def test_so_are_drafts_scores_and_pools_of_what_is_not_tiered() -> None:
    with pytest.raises(ValueError, match="speculative decoding does not work with a tiered cache"):
        Engine(load_case("gemma2"), CONFIG, draft=NgramDraft())
    with engine() as tiered:
        with pytest.raises(ValueError, match="score does not work with a tiered cache"):
            tiered.score([[5, 6]], [[7]])
        with pytest.raises(RequestTooLong, match="prompt 0 has 257 tokens"):
            tiered.submit([5] * 257, greedy(1))
    too_long = r"more than the pool's \d+ tokens; shorten it or raise tier_pages"
    with (
        engine(max_context=None, tier_pages=TierPools(7, 3, 2, 20)) as small,
        pytest.raises(ValueError, match=too_long),
    ):
        small.submit([5] * 250, greedy(1))
    with pytest.raises(ValueError, match="tier_pages are for a tiered cache: load the model with kv_dtype='tiered'"):
        Engine(dataclasses.replace(load_case("gemma2"), kv_dtype=None), CONFIG)
    for wrong, message in (
        (5, "expected jaxinfer.tiers.TierPools"),
        (TierPools(-1, 0, 0, 0), "integers of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, tier_pages=wrong)
