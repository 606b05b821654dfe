"""`Engine.score`: the results of `jaxinfer.score`, prefixes computed once and kept, other requests unharmed."""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import engine_cases as cases
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineClosed, RequestTooLong
from jaxinfer.engine.scoring import Scorer
from jaxinfer.model import load
from jaxinfer.scoring import Score, score, scored_pairs
from jaxinfer.scoring_plan import TokenPair
from jaxinfer.scoring_run import Scored

RNG = np.random.default_rng(0)


def ids(length: int) -> list[int]:
    return RNG.integers(3, cases.VOCAB, length).tolist()


SHARED = [ids(22), ids(30), ids(24)]
PROMPTS = [SHARED[row % 3] + ids(row % 4) for row in range(12)]
CONTINUATIONS = [ids(1 + row % 5) for row in range(12)]


@functools.cache
def expected() -> list[Score]:
    return score(cases.model(), PROMPTS, CONTINUATIONS)


def assert_scores(got: list[Score], reference: list[Score]) -> None:
    assert len(got) == len(reference)
    for mine, theirs in zip(got, reference, strict=True):
        assert mine.num_tokens == theirs.num_tokens
        assert mine.is_greedy == theirs.is_greedy
        assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-4)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def computed(engine: Engine) -> int:
    return engine.metrics().prompt_tokens


def assert_balanced(engine: Engine) -> None:
    metrics = engine.metrics()
    assert (metrics.pages_owned, metrics.waiting, metrics.decoding) == (0, 0, 0)


@pytest.mark.parametrize("changes", [{}, {"prefix_cache": False}])
def test_scores_are_those_of_score(changes: dict) -> None:
    """24 pages of 4 tokens for prefixes of 76: some are evicted before all their rows are through; or none are kept."""
    with cases.engine(**changes) as engine:
        assert_scores(engine.score(PROMPTS, CONTINUATIONS, progress=False), expected())
        before = engine.metrics().compilations
        assert_scores(engine.score(PROMPTS[::-1], CONTINUATIONS[::-1], progress=False), expected()[::-1])
        assert engine.metrics().compilations <= before + 2, "shapes are few"
        assert_balanced(engine)


def test_shared_prefixes_are_computed_once_and_kept_for_later_calls() -> None:
    """Two prefixes of 32 tokens, in 8 of 24 pages each, four continuations of 4 tokens after either."""
    prefixes = [ids(32), ids(32)]
    prompts = [prefix for prefix in prefixes for _ in range(4)]
    continuations = [ids(4) for _ in prompts]
    reference = score(cases.model(), prompts, continuations)
    with cases.engine() as engine:
        assert_scores(engine.score(prompts, continuations, progress=False), reference)
        # The prefix's last token is scored after, so each row computes the last page's tokens that are not shared.
        assert computed(engine) <= 2 * 32 + 8 * (4 + 3)
        first = computed(engine)
        assert_scores(engine.score(prompts, continuations, progress=False), reference)
        assert computed(engine) - first <= 8 * (4 + 3), "prefixes stayed in the cache"
        (one,) = engine.score(prefixes[1], [continuations[7]], progress=False)
        assert one.logprob == pytest.approx(reference[7].logprob, abs=1e-4)


def test_requests_and_scoring_share_prefixes() -> None:
    """What a request computed is known to scoring, and the other way round."""
    prompt, continuation = ids(33), ids(3)
    (reference,) = score(cases.model(), prompt, [continuation])
    with cases.engine() as engine:
        (plain,) = engine.generate([prompt], cases.params())
    with cases.engine() as engine:
        engine.generate([prompt], cases.params())
        before = computed(engine)
        assert_scores(engine.score(prompt, [continuation], progress=False), [reference])
        assert computed(engine) - before == 1 + 2, "32 of 33 tokens of the prompt were known; the last is only scored"
    with cases.engine() as engine:
        engine.score(prompt, [continuation], progress=False)
        before = computed(engine)
        (output,) = engine.generate([prompt], cases.params())
        assert output.token_ids == plain.token_ids
        assert computed(engine) - before == 1


def test_scoring_beside_requests_that_are_preempted() -> None:
    """Threads: requests of all kinds that fill the pool, two scorings. Nobody's result changes."""
    results: dict[str, list[Score]] = {}
    with cases.engine() as engine:

        def scoring(name: str, step: int) -> None:
            results[name] = engine.score(PROMPTS[::step], CONTINUATIONS[::step], progress=False)

        threads = [threading.Thread(target=scoring, args=case) for case in (("forward", 1), ("backward", -1))]
        for thread in threads:
            thread.start()
        outputs = engine.generate([prompt for prompt, _ in cases.REQUESTS], [row for _, row in cases.REQUESTS])
        for thread in threads:
            thread.join()
        for output, reference in zip(outputs, cases.expected(), strict=True):
            cases.assert_same(output, reference)
        assert_scores(results["forward"], expected())
        assert_scores(results["backward"], expected()[::-1])
        assert_balanced(engine)


def test_readers_wait_for_no_more_than_the_bound() -> None:
    """A reader's chunks go on while 12 pairs are scored: between two of them there are 16 tokens of prefill at most."""
    with cases.engine() as engine:
        stream = engine.stream([cases.REQUESTS[0][0]], cases.REQUESTS[0][1])
        told = [next(stream)]
        engine.reset_metrics()
        pairs = [TokenPair(tuple(one), tuple(two)) for one, two in zip(PROMPTS, CONTINUATIONS, strict=True)]
        scored = list(engine._run_pairs(pairs))
        assert sum(len(part.slots) for part in scored) == sum(map(len, CONTINUATIONS))
        told += list(stream)
        assert sum((delta.token_ids for delta in told), ()) == cases.expected()[0].token_ids
        between = [0]
        for span in engine._meter.spans:
            if span.kind == "decode":
                between.append(0)
            else:
                between[-1] += span.num_tokens
        # A call may compute a row's beginning again if its pages are gone; here the reader and one prefix fit.
        assert all(0 < count <= 16 for count in between[2:6]), between
        assert_balanced(engine)


def test_pages_of_others_are_never_seen_by_scoring() -> None:
    """Every page that nobody has turns to NaN before each round."""
    with cases.engine() as engine:
        whole = engine._advance

        def poisoned() -> None:
            pool, runner = engine._scheduler.pool, engine._runner
            assert runner is not None
            known = set(pool._idle)
            unused = [page for page in range(pool.num_pages) if not pool.references[page] and page not in known]
            poison = np.zeros(pool.num_pages, bool)
            poison[unused] = True
            mask = jnp.asarray(poison)[:, None, None, None]
            runner.cache = jax.tree.map(lambda leaf, mask=mask: jnp.where(mask, jnp.float32("nan"), leaf), runner.cache)
            whole()

        engine._advance = poisoned
        for _ in range(2):
            assert_scores(engine.score(PROMPTS, CONTINUATIONS, progress=False), expected())


def test_interrupted_round_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's round breaks off while calls are on their way and others are being dispatched."""
    pairs = [TokenPair(tuple(one), tuple(two)) for one, two in zip(PROMPTS, CONTINUATIONS, strict=True)]
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        running = engine._run_pairs(pairs)
        scored = [next(running)]
        whole = runner.programs.get

        def interrupted(*_: object, **__: object) -> None:
            runner.free()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(runner.programs, "get", lambda size: interrupted if size.kind == "score" else whole(size))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        scored += running
        slots = np.concatenate([part.slots for part in scored])
        assert sorted(slots.tolist()) == list(range(sum(map(len, CONTINUATIONS)))), "each token once"
        logprobs = np.zeros(len(slots), np.float32)
        for part in scored:
            logprobs[part.slots] = part.logprobs
        flat = [value for row in expected() for value in row.token_logprobs]
        np.testing.assert_allclose(logprobs, flat, atol=1e-4)
        assert_balanced(engine)


@pytest.mark.parametrize("where", ["place", "compute", "keep", "turn", "read"])
def test_interrupts_at_any_place_lose_no_pair_and_count_none_twice(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds break off between what is taken from the queue and what is filed, at each of the first calls."""
    pairs = [TokenPair(tuple(one), tuple(two)) for one, two in zip(PROMPTS, CONTINUATIONS, strict=True)]
    with cases.engine() as engine:
        for fails_at in range(1, 5):
            prefixes = engine._scheduler.prefixes
            assert prefixes is not None
            prefixes.clear()
            calls = 0

            def once(whole: Any, fails_at: int = fails_at) -> Any:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    result = whole(*arguments, **options)
                    if calls == fails_at:
                        raise KeyboardInterrupt
                    return result

                return call

            class Turns(collections.deque):
                def remove(self, value: Any) -> None:
                    once(super().remove)(value)

            def run(pairs: Sequence[TokenPair]) -> Iterator[Scored]:
                job = engine._scorer.add(pairs, engine._live()[1])
                if where == "turn":
                    engine._scorer._jobs = Turns(engine._scorer._jobs)
                for _ in range(200):
                    with contextlib.suppress(KeyboardInterrupt):
                        engine.step()
                    yield from job.scored
                    job.scored.clear()
                assert job.done
                engine._scorer.remove(job)
                assert not engine._scorer._jobs

            with monkeypatch.context() as patch:
                names = {"place": "_place", "compute": "_compute", "keep": "_keep", "read": "_distrust"}
                if where in names:
                    wrapped = once(getattr(Scorer, names[where]))
                    is_static = where in ("keep", "read")
                    patch.setattr(Scorer, names[where], staticmethod(wrapped) if is_static else wrapped)
                scored = sorted(scored_pairs(cases.model(), pairs, run=run))
            assert calls >= fails_at
            assert [index for index, _ in scored] == list(range(len(pairs)))
            assert_scores([score for _, score in scored], expected())
        assert_balanced(engine)


def test_scores_that_an_interrupt_ended_are_not_computed_for_nobody() -> None:
    """It came while the job was at both ends of the queue."""

    class Turns(collections.deque):
        def remove(self, value: Any) -> None:
            raise KeyboardInterrupt

    with cases.engine() as engine:
        engine._scorer._jobs = Turns()
        with pytest.raises(KeyboardInterrupt):
            engine.score(PROMPTS[0], [CONTINUATIONS[0]], progress=False)
        assert not engine._scorer._jobs
        assert_scores(engine.score(PROMPTS[0], [CONTINUATIONS[0]], progress=False), expected()[:1])


def test_keys_that_depend_on_the_length_are_not_shared() -> None:
    """Dynamic RoPE beyond 32 tokens: equal prompts of pairs of different lengths have different keys."""
    model = load(families.BY_NAME["llama_rope_dynamic"].folder, dtype=jnp.float32, progress=False)
    assert model.config.layers[0].rope is not None
    prompt = RNG.integers(3, model.config.num_tokens, 40).tolist()
    continuations = [RNG.integers(3, model.config.num_tokens, length).tolist() for length in (1, 2, 9, 2)]
    with cases.engine(model) as engine:
        for _ in range(2):
            got = engine.score(prompt, continuations, progress=False)
            assert_scores(got, score(model, prompt, continuations))


def test_nan_is_told_and_not_kept() -> None:
    """The embedding of token 90 is NaN: pairs that hold it have no score, and nobody reads their pages."""
    sound = cases.model()
    embed = sound.params.embed_tokens.at[90].set(jnp.nan)
    model = dataclasses.replace(sound, params=dataclasses.replace(sound.params, embed_tokens=embed))
    with cases.engine(model) as engine:
        bad, good = engine.score([[90, *ids(11)], PROMPTS[0]], [ids(2), CONTINUATIONS[0]], progress=False)
        assert np.isnan(bad.logprob) and not bad.is_greedy
        assert_scores([good], expected()[:1])
        assert engine.metrics().pages_cached == len(PROMPTS[0]) // 4


def test_bad_pairs_are_named_and_closing_ends_scoring() -> None:
    engine = cases.engine()
    with pytest.raises(RequestTooLong, match="pair 1 has 66 tokens, more than max_context=64"):
        engine.score([ids(4), ids(60)], [ids(1), ids(6)], progress=False)
    with pytest.raises(ValueError, match=r"continuation 0, .*adds no token"):
        engine.score(ids(4), [[]], progress=False)
    assert engine.score([], [], progress=False) == []
    (edge,) = engine.score(ids(60), [ids(5)], progress=False)
    assert edge.num_tokens == 5, "64 tokens are read; the last one is only scored"
    running = engine._run_pairs([TokenPair((1, 2), (3,))] * 2)
    engine.close()
    with pytest.raises(EngineClosed):
        next(running)
    with pytest.raises(EngineClosed):
        engine.score(ids(4), [ids(1)], progress=False)
