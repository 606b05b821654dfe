"""The engine with a draft says what it says without one: preempted, with cached prefixes, forked, interrupted."""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterator
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest
import sampling_reference
from scipy import stats

import jaxinfer.generation
from benchmarks.soak import Soak
from jaxinfer import kv_cache
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.drafting import Drafting
from jaxinfer.engine.drafting_programs import DraftingPrograms
from jaxinfer.engine.drafting_rows import DraftingState
from jaxinfer.engine.drafting_runner import DraftingRunner
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import RequestTooLong
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.programs import Size
from jaxinfer.engine.sequence import Chunk, Sequence, Status
from jaxinfer.engine.settings import settle
from jaxinfer.engine.work import Work
from jaxinfer.generation import logits
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk
from jaxinfer.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.drafts import Draft, ModelDraft, NgramDraft, SelfDraft
from jaxinfer.speculative.loop import Method, StepCounts
from jaxinfer.speculative.model_draft import DraftCache
from jaxinfer.speculative.policy import Adaptive, FixedLength, LengthByContext
from jaxinfer.speculative.speculation import Speculation

PROMPTS = [ids for ids, _ in cases.REQUESTS]
PARAMS = [row for _, row in cases.REQUESTS]
K = 2
CONFIG = dataclasses.replace(cases.CONFIG, prefill_rows=(2,))
COMPILED: list[str] = []


def note_compilation(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


@functools.cache
def perturbed() -> Model:
    """The model with other weights: as a draft it is right now and then."""
    leaves, structure = jax.tree.flatten(cases.model().params)
    rng = np.random.default_rng(0)
    noisy = [leaf * (1 + 0.2 * rng.standard_normal(leaf.shape).astype(leaf.dtype)) for leaf in leaves]
    return dataclasses.replace(cases.model(), params=jax.tree.unflatten(structure, noisy))


class Alternating:
    """Two chunks with the draft, then two without, and again."""

    def __init__(self) -> None:
        self.chunks = itertools.cycle((K, K, 0, 0))

    def lengths(self, k: int) -> tuple[int, ...]:
        return (0, k)

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "Alternating":
        return self

    def choose(self, context: int) -> int:
        return next(self.chunks)

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        """Learns nothing."""


def engine(draft: Draft, alternating: bool = False, **changes: Any) -> Engine:
    """All drafts of one kind share their programs."""
    speculation = Speculation(draft, policy=Alternating() if alternating else FixedLength())
    return Engine(cases.model(), dataclasses.replace(CONFIG, **changes), draft=speculation)


def drafting(engine: Engine) -> Drafting:
    assert engine._drafting is not None
    return engine._drafting


def runner(engine: Engine) -> DraftingRunner:
    assert isinstance(engine._runner, DraftingRunner)
    return engine._runner


def check_all(engine: Engine) -> None:
    for output, reference in zip(engine.generate(PROMPTS, PARAMS), cases.expected(), strict=True):
        cases.assert_same(output, reference)
    metrics = engine.metrics()
    assert (metrics.waiting, metrics.prefilling, metrics.decoding, metrics.pages_owned) == (0, 0, 0, 0)


# --- The same results


def test_a_model_draft_that_is_switched_off_and_on_and_nothing_compiles_after_warmup() -> None:
    """Every kind of request, preempted, cached, forked, scored, with stop strings, logprobs and penalties; twice."""
    with engine(ModelDraft(perturbed(), k=K), alternating=True) as drafted:
        drafted.warmup(progress=False)
        cases.expected()
        COMPILED.clear()
        check_all(drafted)
        first = drafted.metrics()
        assert first.preemptions > 0, "the pool is too large for this test"
        runner(drafted).rehearse(runner(drafted).programs.expected())  # on empty rows, as `warmup` does on a GPU
        COMPILED.clear()
        check_all(drafted)
        metrics = drafted.metrics()
        assert metrics.prefix_hit_rate > first.prefix_hit_rate > 0
        assert not COMPILED
        assert metrics.compilations_after_warmup == 0
        check_metrics(drafted)
        drafted.reset_metrics()
        assert drafting(drafted).report.steps == {}


def check_metrics(engine: Engine) -> None:
    metrics = engine.metrics().speculation
    assert metrics is not None
    report = drafting(engine).report
    assert set(metrics.steps) == {0, K} and metrics.steps == report.steps
    assert 0.1 < metrics.acceptance_rate < 0.9 and len(metrics.acceptance_by_position) == K
    assert 1.0 < metrics.tokens_per_step < 1.0 + K
    assert metrics.accepted_lengths == tuple(report.histogram) and len(report.histogram) == K + 1
    assert metrics.estimated_speedup is not None and metrics.estimated_speedup > 0
    assert metrics.catch_up_seconds > 0
    assert metrics.draft_seconds is not None and metrics.verify_seconds is not None
    assert metrics.draft_seconds > 0 and metrics.verify_seconds <= metrics.step_seconds[K]
    # A prefill gives the first token, also after a preemption; tokens behind a stop string are counted here alone.
    prefills = sum(engine.metrics().finished.values()) + engine.metrics().preemptions
    assert sum(report.tokens.values()) >= engine.metrics().output_tokens - prefills
    text = engine.metrics().prometheus()
    share = metrics.acceptance_by_position[1]
    assert f'jaxinfer_speculation_acceptance{{position="2"}} {share:.9g}\n' in text
    assert f'jaxinfer_speculation_steps{{drafted="{K}"}} {metrics.steps[K]}\n' in text
    assert f'jaxinfer_speculation_accepted_lengths{{accepted="0"}} {report.histogram[0]}\n' in text
    assert "# TYPE jaxinfer_speculation_draft_seconds counter" in text
    for line in text.splitlines():
        assert re.fullmatch(
            r"# TYPE [a-z0-9_]+ (counter|gauge|summary)|[a-z0-9_]+(\{[a-z]+=\"[a-z0-9.]+\"\})? \S+", line
        )
    assert "accepted by position: " in str(engine.metrics())


def test_a_draft_that_is_the_target_is_always_right() -> None:
    """So its pages hold what they should, after plain chunks, preemptions, forks and prefixes that were cached."""
    with engine(ModelDraft(cases.model(), k=K), alternating=True) as drafted:
        for _ in range(2):
            check_all(drafted)
            assert drafting(drafted).report.acceptance_rate == 1.0
        assert drafted.metrics().preemptions > 0


def test_a_cached_prefix_is_cached_for_the_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 50 tokens, page 4: the draft sees all of them once, then those behind the 48 that are cached."""
    seen: list[int] = []
    with engine(ModelDraft(cases.model(), k=K)) as drafted:
        whole = runner(drafted).dispatch

        def noted(*arguments: Any) -> list[Work]:
            works = whole(*arguments)
            seen.extend(work.num_tokens for work in works if work.kind == "draft")
            return works

        monkeypatch.setattr(runner(drafted), "dispatch", noted)
        said = []
        for copies, expected in ((1, 50), (1, 2), (3, 6)):
            seen.clear()
            row = cases.params(max_tokens=8, n=copies, temperature=1.0, seed=5)
            (output,) = drafted.generate([cases.prompt(50)], row)
            said.append(output.completions[0].token_ids)
            assert sum(seen) == expected
        assert len(set(said)) == 1
        # Three completions of a new prompt of 40: the first sees all of it, the others what is not in full pages.
        seen.clear()
        drafted.generate([cases.prompt(42, 3)], cases.params(max_tokens=8, n=3, temperature=1.0, seed=6))
        assert sum(seen) == 42 + 2 + 2
        assert drafting(drafted).report.acceptance_rate == 1.0


def test_an_n_gram_draft() -> None:
    with engine(NgramDraft(k=K, min_n=1, max_n=2)) as drafted:
        check_all(drafted)
        assert drafted.metrics().preemptions > 0
        check_all(drafted)
        assert 0.1 < drafting(drafted).report.acceptance_rate < 1.0
        check_time_of_compilations(drafted)


def check_time_of_compilations(engine: Engine) -> None:
    """Steps during which a program was compiled are counted, but their time is not: the host was late to see them."""
    engine.generate([PROMPTS[0]], PARAMS[0])  # what it may have to compile
    engine.reset_metrics()
    engine.generate([PROMPTS[0]], PARAMS[0])
    before = drafting(engine).metrics()
    assert before.timed_steps == before.steps != {}
    assert (before.draft_seconds, before.verify_seconds) == (0.0, before.step_seconds[K])  # it runs no model

    def compile_in_each_round() -> None:
        engine.submit(PROMPTS[0], PARAMS[0])
        while engine.has_work:
            engine.step()
            runner(engine).programs.num_compiled += 1

    compile_in_each_round()
    after = drafting(engine).metrics()
    assert after.steps[K] > before.steps[K]
    assert (after.timed_steps, after.step_seconds) == (before.timed_steps, before.step_seconds)
    engine.reset_metrics()
    compile_in_each_round()
    metrics = drafting(engine).metrics()
    assert metrics.estimated_speedup is None and f"of k = {K} (all while compiling)" in str(metrics)


def test_a_self_draft_on_the_target_s_own_pages() -> None:
    """Greedy requests alone: the program is smaller."""
    chosen = [
        index for index in range(len(PARAMS)) if PARAMS[index] == cases.params(max_tokens=PARAMS[index].max_tokens)
    ]
    with engine(SelfDraft(cases.model(), k=K), sampling=(cases.params(),)) as drafted:
        for _ in range(2):
            outputs = drafted.generate([PROMPTS[i] for i in chosen] * 2, [PARAMS[i] for i in chosen] * 2)
            for output, index in zip(outputs, chosen * 2, strict=True):
                cases.assert_same(output, cases.expected()[index])
        assert drafted.metrics().preemptions > 0 and drafted.metrics().prefix_hit_rate > 0
        assert 0.1 < drafting(drafted).report.acceptance_rate < 1.0


# --- Rollback


def poison(pools: PagedKVCache, bad: np.ndarray) -> PagedKVCache:
    """NaN in some places of all layers; `bad` is bool [pages, page_size]."""
    mask = jnp.asarray(bad)[:, None, :, None]
    return jax.tree.map(lambda pool: jnp.where(mask, jnp.float32("nan"), pool), pools)


def poison_all(engine: Engine) -> None:
    """NaN in both caches wherever there is nothing that anybody may read."""
    pool, on_device, size = engine._scheduler.pool, runner(engine), engine.settings.rules.page_size
    state, drafting_state = on_device.state, on_device.drafting
    positions = np.asarray(state.positions)
    cache: DraftCache = drafting_state.draft
    bad = np.ones((pool.num_pages, size), bool)
    bad[list(pool._idle)] = False
    bad_draft = np.ones((pool.num_pages, size), bool)
    bad_draft[[page for page in pool._idle if page in on_device.filled]] = False
    for sequence in engine._scheduler.running:
        decoding = sequence.status is Status.DECODING
        written = int(positions[sequence.slot]) if decoding else sequence.num_prefilled
        lengths = min(int(cache.lengths[sequence.slot]), written) if decoding else 0
        known = on_device._known(sequence)
        for place in range(len(sequence.pages) * size):
            page = sequence.pages[place // size]
            bad[page, place % size] &= place >= written
            bad_draft[page, place % size] &= place >= max(lengths, known)
    on_device.cache = poison(on_device.cache, bad)
    on_device.drafting = dataclasses.replace(
        drafting_state, draft=dataclasses.replace(cache, cache=poison(cache.cache, bad_draft))
    )


def test_h7_rejected_places_and_pages_of_nobody_are_never_read() -> None:
    """Trap H7 in the engine: before every round all places that hold no accepted token are NaN, in both caches."""
    with engine(ModelDraft(perturbed(), k=K), alternating=True) as drafted:
        names = [drafted.submit(ids, row) for ids, row in zip(PROMPTS, PARAMS, strict=True)]
        said: dict[tuple[str | None, int], tuple[int, ...]] = {}
        rounds = 0
        while drafted.has_work:
            if rounds % 3 == 0:
                poison_all(drafted)
            rounds += 1
            for delta in drafted.step():
                key = (delta.request_id, delta.sample_index)
                said[key] = said.get(key, ()) + delta.token_ids
        assert drafted.metrics().preemptions > 0
        for name, reference in zip(names, cases.expected(), strict=True):
            for sample, completion in enumerate(reference.completions):
                assert said[name, sample] == completion.token_ids


def test_table_follows_pages_that_were_taken_back() -> None:
    """A row shrinks over a boundary and grows again onto another page: no entry is left of the old one."""
    with engine(NgramDraft(k=K, min_n=1, max_n=2)) as drafted:
        scheduler = drafted._scheduler
        track = Sequence([1] * 6, num_prompt=6, max_tokens=30, group=0)
        scheduler.add(track)
        scheduler.chunk = Chunk(4, K)
        scheduler.plan()
        runner(drafted).tables.update([track])
        before = list(track.pages)
        for _ in range(2):
            scheduler.read(track, [1])
        scheduler.chunk = Chunk(1)
        scheduler.plan()
        assert len(track.pages) < len(before)
        freed = before[len(track.pages) :]
        assert all(scheduler.pool.references[page] == 0 for page in freed)
        runner(drafted).tables.update([track])
        row = runner(drafted).tables.array[track.slot].tolist()
        assert row == track.pages + [0] * (len(row) - len(track.pages))


def test_both_caches_are_updated_in_place() -> None:
    """Pools of 65,536 pages that are only described: no temporary of that size, and both are aliased."""
    model, draft = cases.model(), ModelDraft(cases.model(), k=K)
    speculation = Speculation(draft, policy=FixedLength())
    settings = dataclasses.replace(settle(CONFIG, model, speculation), num_pages=1 << 16)
    cache, state = jax.eval_shape(
        lambda: (
            kv_cache.create(model.config, 1 << 16, 4, model.dtype),
            DraftingState(
                history=jnp.zeros((4, 65), jnp.int32),
                hidden=jnp.zeros((4, model.config.hidden_size), model.dtype),
                coupled=jnp.zeros(4, bool),
                alone=jnp.zeros(4, bool),
                draft=draft.create_state(model, 1 << 16, 4, 4),
            ),
        )
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    method = Method(model.config, draft.proposer(model), speculation.acceptance)
    programs = DraftingPrograms(model, settings, cache, state, method, draft, draft.params)
    greedy = SamplerLayout.required(cases.params(), model.config)
    lowered = programs._lower(Size("decode", rows=4, width=17, layout=greedy, num_drafted=K))
    memory = lowered.compile().memory_analysis()
    assert size > 6 * 10**7
    assert memory.temp_size_in_bytes < size // 50
    assert 0 <= memory.alias_size_in_bytes - 2 * size < 10_000


def test_k1_a_drafted_token_of_nan_is_tried_without() -> None:
    """Trap K1: of a proposal that holds NaN, in a chunk of one step, the next chunk knows: it steps without a draft."""
    successors = {token: token + 1 for token in range(1, 40)}
    target = markov.with_nan_token(markov.model(successors), 62)
    speculation = Speculation(ModelDraft(markov.model(successors | {5: 62, 62: 6}), k=2), policy=FixedLength())
    config = EngineConfig(max_decode_batch=1, prefill_lengths=(64,), prefill_rows=(1,), decode_chunk=1)
    with Engine(target, config, draft=speculation) as drafted:
        (output,) = drafted.generate([[3]], SamplingParams(max_tokens=6, temperature=0.0))
    assert (output.token_ids, output.finish_reason) == ((4, 5, 6, 7, 8, 9), "length")
    assert speculation.report.acceptance_rate < 1


# --- The law of what is drawn


@functools.cache
def prefix_probabilities(prompt: tuple[int, ...], depth: int) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the first tokens at temperature 2 with top_k=4, by teacher forcing."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        paths = list(chances)
        padded = [[*prompt, *path, *[0] * (depth - len(path))] for path in paths]
        scores = np.asarray(logits(cases.model(), padded))
        rows = [
            sampling_reference.probabilities(scores[i, len(prompt) + len(path) - 1], 2.0, top_k=4)
            for i, path in enumerate(paths)
        ]
        chances = {
            (*path, int(token)): chances[path] * row[token]
            for path, row in zip(paths, rows, strict=True)
            for token in np.flatnonzero(row)
        }
    return chances


@pytest.mark.parametrize("kind", ["model", "n-gram"])
def test_unseeded_requests_have_the_target_s_distribution(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two tokens of 480 completions against their exact probabilities, a chi-square test at 1e-4. They share
    the engine with greedy and seeded requests."""
    monkeypatch.setattr(jaxinfer.generation, "request_seed", lambda params: 11 if params.seed is None else params.seed)
    prompt = (5, 9, 5, 9, 5)
    count = 480
    draft = ModelDraft(perturbed(), k=K) if kind == "model" else NgramDraft(k=K, min_n=1, max_n=2)
    drawn = SamplingParams(max_tokens=3, ignore_eos=True, n=count, top_k=4, temperature=2.0)
    with engine(draft, alternating=kind == "model") as drafted:
        outputs = drafted.generate([prompt, *PROMPTS[:2]], [drawn, *PARAMS[:2]])
    for output, reference in zip(outputs[1:], cases.expected()[:2], strict=True):
        cases.assert_same(output, reference)
    chances = prefix_probabilities(prompt, depth=2)
    counts = dict.fromkeys(chances, 0)
    for completion in outputs[0].completions:
        counts[completion.token_ids[:2]] += 1
    likely = [path for path, chance in chances.items() if chance * count >= 5]
    observed, expected = [counts[path] for path in likely], [count * chances[path] for path in likely]
    if len(likely) < len(chances):
        observed.append(count - sum(observed))
        expected.append(count - sum(expected))
    assert len(likely) > 5
    assert stats.chisquare(observed, expected).pvalue > 1e-4


# --- Random events, other caches


def test_random_submits_aborts_and_interrupts() -> None:
    """The soak in short: nothing lost or mixed up, memory flat, everything computed again after an interrupt."""
    prompts = [cases.prompt(1 + 7 * index % 50, index) for index in range(12)]
    logger = logging.getLogger("jaxinfer")
    logger.setLevel(logging.ERROR)  # of failing callbacks there are many
    try:
        with engine(ModelDraft(perturbed(), k=K), alternating=True) as drafted:
            soak = Soak(drafted, prompts)
            for _ in range(250):
                soak.round()
            with pytest.raises(KeyboardInterrupt):
                soak.interrupted_step()
            for _ in range(50):
                soak.round()
            soak.drain()
            assert drafted.metrics().preemptions > 0
            assert soak.totals.ended.keys() >= {"length", "abort"}
    finally:
        logger.setLevel(logging.NOTSET)


def test_int4_target_and_int8_pages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 4 bits and pages of 8, drafted for by the float model, itself with pages of 8: which is warned of."""
    monkeypatch.setattr("jaxinfer.engine.drafting.JUDGED_BEFORE_WARNING", 10)
    eight = jnp.dtype("int8")
    small = dataclasses.replace(cases.model(), kv_dtype=eight)
    packed = SelfDraft(cases.model(), k=1).params
    target = dataclasses.replace(small, params=packed)
    row = cases.params(max_tokens=12)
    config = dataclasses.replace(CONFIG, sampling=(row,))
    prompts = [cases.prompt(30), cases.prompt(9, 4)]
    with Engine(target, config) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, row)]
    with Engine(target, config, draft=Speculation(ModelDraft(small, k=K), policy=FixedLength())) as drafted:
        assert [output.token_ids for output in drafted.generate(prompts, row)] == expected
        assert drafting(drafted).report.acceptance_rate > 0.3
    assert caplog.text.count("target and draft are quantised differently (4 bits") == 1


# --- The policy


def work(rows: int, chunk: Chunk, accepted: int) -> Work:
    """A decode chunk that was read."""
    steps = chunk.num_steps
    counts = StepCounts(np.full((steps, rows), chunk.num_drafted), np.full((steps, rows), accepted))
    gained = np.full(rows, steps * (1 + accepted), np.int32)
    outputs = DecodedChunk(np.zeros((chunk.most, rows), np.int32), gained, np.zeros(rows, bool), None)
    return Work("decode", outputs, [None] * rows, 0, 0.0, chunk=chunk, counts=counts)


def ready(count: int) -> list[Sequence]:
    sequences = [Sequence([1], num_prompt=1, max_tokens=1000, group=0) for _ in range(count)]
    for sequence in sequences:
        sequence.status = Status.DECODING
    return sequences


def test_drafting_stops_for_large_batches_and_goes_on_for_small_ones(caplog: pytest.LogCaptureFixture) -> None:
    """A step that drafts costs 1.2 plain ones for a row alone, 4 for sixteen; 2 of 4 drafted tokens stay."""
    caplog.set_level(logging.INFO, logger="jaxinfer")
    config = dataclasses.replace(cases.CONFIG, decode_rows=(1, 16), max_decode_batch=16, decode_chunk=8, num_pages=400)
    speculation = Speculation(NgramDraft(k=4), policy=Adaptive((4,)))
    policy = Drafting(speculation, settle(config, cases.model(), speculation), cases.model())

    def run(rows: int, cost: float, chunks: int) -> Iterator[Chunk]:
        for _ in range(chunks):
            chunk = policy.plan(ready(rows))
            assert policy.plan(ready(rows)) == chunk, "a chunk that was put off is chosen anew"
            policy.dispatched()
            yield chunk
            size = next(size for size in (1, 16) if size >= rows)
            drafted = chunk.num_drafted
            seconds = (cost if drafted else 1.0) * chunk.num_steps
            policy.observe(work(size, chunk, min(2, drafted)), seconds, compiled=False)

    assert list(run(1, 1.2, 12))[-1] == Chunk(2, 4, 3.0)
    assert "speculation off" not in caplog.text
    assert list(run(9, 4.0, 12))[-1] == Chunk(8, 0, 1.0)
    assert "speculation off: drafting runs at 0.75 times plain decoding (67% of drafted tokens accepted, batch 16)" in (
        caplog.text
    )
    assert list(run(1, 1.2, 1))[-1].num_drafted == 4
    chunks = list(run(16, 1.2, 40))  # a text that is cheaper now: tried again after a while, and kept
    assert chunks[0].num_drafted == 0 and chunks[-1].num_drafted == 4
    assert "speculation on again: k = 4" in caplog.text


def test_lengths_follow_the_context_from_the_first_chunk_on() -> None:
    """Two drafted tokens below 20 tokens, none from there on: prompts of 40 find the engine idle and cost the draft
    nothing; one of 12 crosses the bound."""
    speculation = Speculation(ModelDraft(perturbed(), k=K), policy=LengthByContext(((0, K), (20, 0))))
    with Engine(cases.model(), CONFIG, draft=speculation) as drafted:
        for _ in range(2):
            drafted.generate([cases.prompt(40)], cases.params(max_tokens=9))
        assert set(speculation.report.steps) == {0}
        drafted.generate([cases.prompt(12)], cases.params(max_tokens=20))
        assert set(speculation.report.steps) == {0, K}


# --- Bad input


def test_what_cannot_run_is_refused_before_anything_does() -> None:
    model, ngram = cases.model(), NgramDraft(k=4)
    small: dict[str, Any] = {"max_context": None, "sampling": (cases.params(),)}
    for make, message in (
        (lambda: engine(ngram, num_pages=17), "max_context=64 and 4 drafted tokens need more than the 17 pages of 4"),
        (lambda: engine(ngram, num_pages=2, **small), "num_pages=2 of 4 tokens leave no place for a request beside 4"),
        (lambda: Engine(model, cases.CONFIG, draft=NgramDraft(k=0)), "NgramDraft: k=0; expected 1 to 15"),
        (lambda: engine(SelfDraft(perturbed())), "which is not the target"),
        (lambda: engine(ModelDraft(markov.model({}))), "does not fit the target"),
        (
            lambda: Engine(model, cases.CONFIG, draft=Speculation(ngram, policy=FixedLength(5))),
            "length=5; expected 0 to the draft's k=4",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_requests_that_the_draft_or_its_room_cannot_hold_are_refused_and_the_rest_goes_on() -> None:
    """A draft with a context of 32 (trap H7), and a pool of 24 pages of 4 in which 2 tokens are the draft's."""
    config = dataclasses.replace(cases.model().config, max_position_embeddings=32)
    short = dataclasses.replace(cases.model(), config=config)
    with engine(ModelDraft(short, k=K)) as drafted:
        with pytest.raises(RequestTooLong, match=r"reaches 33 tokens, but the context of the draft .* is 32"):
            drafted.submit(cases.prompt(20), cases.params(max_tokens=14))
        assert not drafted.has_work
    with engine(NgramDraft(k=K, min_n=1, max_n=2), max_context=None) as drafted:
        with pytest.raises(RequestTooLong, match="need more than the pool's 94 tokens beside the 2 that are drafted"):
            drafted.submit(cases.prompt(60), cases.params(max_tokens=36))
        with pytest.raises(RequestTooLong, match="has 95 tokens, more than the pool's 94 tokens beside the 2"):
            drafted.submit((cases.prompt(60) * 2)[:95], cases.params(max_tokens=1))
        assert not drafted.has_work


def test_pages_of_a_draft_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many bytes free the pool has half the pages if the draft is as large as the target."""
    monkeypatch.setattr("jaxinfer.engine.settings.free_device_bytes", lambda: 10**8)
    monkeypatch.setattr("jaxinfer.engine.settings.reads_lengths", lambda *_: True)
    config = EngineConfig(max_decode_batch=4, max_context=64, page_size=4, max_sequences=10**6)
    model = cases.model()
    plain = settle(config, model).num_pages
    for draft, share in ((NgramDraft(k=1), 1.0), (ModelDraft(model, k=1), 0.5)):
        speculation = Speculation(draft, policy=FixedLength())
        assert settle(config, model, speculation).num_pages == pytest.approx(share * plain, rel=0.02)


def test_a_closed_engine_lets_go_of_the_draft() -> None:
    drafted = engine(ModelDraft(perturbed(), k=K))
    pools = jax.tree.leaves(runner(drafted).drafting)
    drafted.close()
    assert all(leaf.is_deleted() for leaf in pools)
    assert drafted._drafting is None and drafted._runner is None
