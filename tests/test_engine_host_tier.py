"""The host tier: what the pool evicts comes back from pinned memory, and no token changes."""

import dataclasses

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine_scheduler as simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.host_pages import HostPool, Move
from jaxinfer.engine.host_store import MOVES, HostStore, together
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Status
from jaxinfer.engine.settings import settle

COMPILED: list[str] = []


def note_compilation(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


def runner_of(engine: Engine) -> tuple[Runner, HostStore]:
    runner = engine._runner
    assert runner is not None and runner.store is not None
    return runner, runner.store


# --- In simulation


@settings(max_examples=60, deadline=None)
@given(
    chosen=simulated.ALL_RULES,
    requests=st.lists(simulated.arrivals(), min_size=1, max_size=8),
    host_pages=st.integers(1, 12),
    spare=st.integers(0, 6),
    worth=st.integers(0, 3),
)
def test_sequences_read_their_own_tokens_from_both_tiers(chosen, requests, host_pages, spare, worth) -> None:
    """The scheduler's simulation, with moves carried out before each round; `worth` pages and more come back."""
    rules = Rules(**chosen)
    largest = max(len(prompt) + most - 1 for _, prompt, most, *_ in requests)
    pool = PagePool(1 + -(-largest // rules.page_size) + spare)
    prefixes = PrefixCache(pool, rules.page_size, HostPool(host_pages))
    prefixes.is_worth_restoring = lambda num_pages: num_pages >= worth
    simulation = simulated.Simulation(Scheduler(rules, pool, prefixes))
    host: dict[int, list] = {}
    whole = simulation.scheduler.plan

    def plan():
        planned = whole()
        for out, back in together(prefixes.take_moves()):
            returning = [host.pop(move.host_page) for move in back]
            host.update((move.host_page, list(simulation.pages[move.page])) for move in out)
            simulation.pages.update((move.page, tokens) for move, tokens in zip(back, returning, strict=True))
        return planned

    simulation.scheduler.plan = plan
    sequences = []
    for number in range(13):
        for group, (when, prompt, most, stops, completions, interactive) in enumerate(requests):
            if when == number:
                options = {"group": group, "interactive": interactive}
                sequences += [simulation.submit(prompt, most, stops, **options) for _ in range(completions)]
        simulation.round()
        nodes = prefixes._nodes.values()
        assert all((node.page is None) != (node.host_page is None) for node in nodes)
        assert set(prefixes.host._used) == {node.host_page for node in nodes} - {None}
    simulation.run()
    for sequence in sequences:
        assert sequence.status is Status.FINISHED
        assert sequence.tokens == simulation.text(sequence, simulation.lengths[sequence])


def test_pages_that_take_turns_share_programs() -> None:
    """A full pool's moves come as out, back, out, back: 3 * MOVES of each are 3 programs of each. On an H200 a prompt
    of 512 pages took 568 ms to come back when each page had two programs of its own, and 73 ms to compute."""
    turns = [
        move
        for page in range(1, 1 + 3 * MOVES)
        for move in (Move("demote", page, 999 + page), Move("restore", page, page))
    ]
    assert [(len(out), len(back)) for out, back in together(turns)] == 3 * [(MOVES, MOVES)]
    # One that was brought back and leaves again, and one that left and comes back, wait for the move before.
    again = [Move("restore", 1, 7), Move("demote", 1, 7), Move("restore", 2, 7), Move("demote", 3, 8)]
    assert [(len(out), len(back)) for out, back in together(again)] == [(0, 1), (1, 0), (1, 1)]


# --- On the device


def test_nothing_changes_with_poison_in_every_unused_page_of_both_tiers() -> None:
    """All kinds of requests twice, preempted and evicted to the host; what nobody owns or knows is NaN, there too."""
    with cases.engine(host_pages=150) as engine:
        engine.warmup(progress=False)
        runner, store = runner_of(engine)
        whole = engine._advance

        def poisoned() -> None:
            pool, prefixes = engine._scheduler.pool, engine._scheduler.prefixes
            assert prefixes is not None
            poison = np.array([not pool.references[page] and page not in pool._idle for page in range(pool.num_pages)])
            mask = jnp.asarray(poison)[:, None, None, None]
            runner.cache = jax.tree.map(lambda leaf, mask=mask: jnp.where(mask, jnp.float32("nan"), leaf), runner.cache)
            for host_page, contents in store._contents.items():
                if host_page not in prefixes.host._used:
                    nans = [jax.device_put(np.full(one.shape, np.nan, np.float32), one.sharding) for one in contents]
                    store._contents[host_page] = nans
            whole()

        engine._advance = poisoned
        for _ in range(2):
            outputs = engine.generate([prompt for prompt, _ in cases.REQUESTS], [row for _, row in cases.REQUESTS])
            for output, reference in zip(outputs, cases.expected(), strict=True):
                cases.assert_same(output, reference)
        metrics = engine.metrics()
        assert metrics.preemptions > 0
        assert metrics.pages_restored > 10 and metrics.pages_demoted > metrics.pages_restored
        assert metrics.host_hit_rate == metrics.pages_restored / metrics.pages_demoted
        assert 0 < metrics.host_pages_used <= metrics.host_pages == 150
        assert "host pages" in str(metrics) and "pages_restored" in metrics.prometheus()
        assert all(array.sharding.memory_kind == "pinned_host" for page in store._contents.values() for array in page)


def test_preempted_sequences_come_back_without_prefill_or_compilation() -> None:
    """Two sequences of 48 tokens in 24 pages of 4, and a third that takes their place: the first's pages come back."""
    prompts = [cases.prompt(48, row) for row in (0, 1, 2)]
    with cases.engine(host_pages=60) as engine:
        engine.warmup(progress=False)
        _, store = runner_of(engine)
        assert store.seconds_for(1) == store.seconds_for(MOVES) == store.seconds_a_call
        store.seconds_a_call = 0.0
        reference = [engine.generate([prompt], cases.params(max_tokens=2))[0].token_ids for prompt in prompts]
        COMPILED.clear()
        before = engine.metrics()
        for prompt, expected in zip(prompts, reference, strict=True):
            assert engine.generate([prompt], cases.params(max_tokens=2))[0].token_ids == expected
        after = engine.metrics()
        assert after.prompt_tokens - before.prompt_tokens == 3 * 4, (
            "11 of 12 pages are known: the last token is computed"
        )
        assert after.pages_restored - before.pages_restored >= 2 * 11
        assert not COMPILED and after.compilations_after_warmup == 0
        scores = engine.score(prompts[0][:40], [prompts[0][40:44]], progress=False)
        assert np.isfinite(scores[0].logprob), "scoring finds them too"
        # Copying that takes longer than computing is not done.
        store.seconds_a_call = 1e9
        before = engine.metrics()
        for prompt, expected in zip(prompts, reference, strict=True):
            assert engine.generate([prompt], cases.params(max_tokens=2))[0].token_ids == expected
        assert engine.metrics().pages_restored == before.pages_restored
    assert not store._contents, "closing gives the host's memory back"


def test_interrupted_round_forgets_the_host_s_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with cases.engine(host_pages=60) as engine:
        prompts = [cases.prompt(48, row) for row in (0, 1, 2)]
        reference = [engine.generate([prompt], cases.params(max_tokens=2))[0].token_ids for prompt in prompts]
        runner, store = runner_of(engine)

        def interrupted(*_: object, **__: object) -> None:
            runner.free()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(store, "carry_out", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([prompts[0]], cases.params(max_tokens=2))
        for prompt, expected in zip(prompts, reference, strict=True):
            assert engine.generate([prompt], cases.params(max_tokens=2))[0].token_ids == expected
        assert engine.metrics().pages_owned == 0


def numbered(leaf: jax.Array) -> jax.Array:
    """Each page full of its own number."""
    numbers = jnp.arange(leaf.shape[0]).astype(leaf.dtype)
    return jnp.broadcast_to(numbers.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)


def test_moves_in_order_with_more_than_one_call_holds() -> None:
    """20 pages out, 20 others overwritten, 20 back: contents by page, quantised caches with their scales too."""
    for dtype in (None, "int8"):
        model = cases.model() if dtype is None else dataclasses.replace(cases.model(), kv_dtype=jnp.dtype(dtype))
        with cases.engine(model, host_pages=24) as engine:
            runner, store = runner_of(engine)
            runner.cache = jax.tree.map(numbered, runner.cache)
            out = [Move("demote", page, page + 2) for page in range(1, 21)]
            back = [Move("restore", 1 + page % 20, page + 2) for page in range(1, 21)]
            runner.move([*out, *back])
            expected = [0, 20, *range(1, 20), *range(21, 25)]
            for leaf in jax.tree.leaves(runner.cache):
                found = np.asarray(leaf.astype(jnp.float32))
                for extreme in (np.min, np.max):
                    assert extreme(found.reshape(25, -1), axis=1)[1:].tolist() == expected[1:]
            assert not store._contents and store.num_moved == {"demote": 20, "restore": 20}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_pages": -1}, "host_pages=-1; expected an integer of at least 0"),
        ({"host_pages": 1.5}, "host_pages=1.5; expected an integer"),
        ({"host_pages": 4, "prefix_cache": False}, "without prefix_cache"),
    ],
)
def test_bad_options_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_more_host_pages_than_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"host_pages=2147483647 take .* GB of host memory"):
        settle(dataclasses.replace(cases.CONFIG, host_pages=2**31 - 1), cases.model())
