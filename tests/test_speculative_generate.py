"""generate and stream with a draft: the tokens of plain decoding for every family and option; nothing left behind."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import families
import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest
import sampling_reference
from scipy import stats

import jaxinfer.generation
import jaxinfer.speculative.batch
import jaxinfer.speculative.model_draft
from jaxinfer import kv_cache, steps
from jaxinfer.batch import Limits
from jaxinfer.generation import generate, logits, requests_for, stream
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model, load
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.batch import InFlight, SpeculativeBatch
from jaxinfer.speculative.drafts import Draft, ModelDraft, NgramDraft, SelfDraft
from jaxinfer.speculative.model_draft import DraftCache
from jaxinfer.speculative.null_draft import NullDraft
from jaxinfer.speculative.policy import FixedLength, LengthByContext
from jaxinfer.speculative.report import SpeculationReport
from jaxinfer.speculative.speculation import Speculation, as_speculation

CASE = families.BY_NAME["llama"]
PROMPTS = [CASE.tokens[0, :5].tolist(), CASE.tokens[1, :17].tolist(), [7, 7, 7]]
DRAFTS_OF_FAMILIES = {
    "model": ("gemma2", "glm4", "llama", "mistral_sliding", "phi3_longrope", "qwen2"),
    "self": ("gemma3_text", "phi3_longrope", "qwen3", "smollm3"),
    "n-gram": ("granite", "olmo2"),
}
"""Every family with one kind; that which depends on the length with both that have caches. A self-draft's windows are
in the test of trap H7. That verification is decoding, whoever drafts, `test_families.py` shows for every family."""


@functools.cache
def load_case(name: str) -> Model:
    """The case's model, its padding ids known as they would be from a tokenizer."""
    case = families.BY_NAME[name]
    model = load(case.folder, dtype=jnp.float32, progress=False)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, num_tokens=case.num_tokens))


def perturbed(model: Model, size: float) -> Model:
    """The same architecture with other weights: it agrees with the model now and then."""
    leaves, structure = jax.tree.flatten(model.params)
    rng = np.random.default_rng(0)
    noisy = [leaf * (1 + size * rng.standard_normal(leaf.shape).astype(leaf.dtype)) for leaf in leaves]
    return dataclasses.replace(model, params=jax.tree.unflatten(structure, noisy))


def fixed(draft: Draft) -> Speculation:
    return Speculation(draft, policy=FixedLength())


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | fields)


# --- All families


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in DRAFTS_OF_FAMILIES.items() for name in names]
)
def test_greedy_tokens_are_those_of_transformers(name: str, kind: str):
    """Drafts: a model that is often wrong; lower layers in 4 bits on shared pages; n-grams, which know no family.

    The llama's is a qwen2: another architecture with the same 96 tokens, and an embedding of 112 rows.
    """
    case, model = families.BY_NAME[name], load_case(name)
    drafts = {
        "n-gram": lambda: NgramDraft(k=3, min_n=1, max_n=2),
        "model": lambda: ModelDraft(load_case("qwen2") if name == "llama" else perturbed(model, 0.3), k=2),
        "self": lambda: SelfDraft(model, k=2, num_layers=max(1, model.config.num_layers - 1)),
    }
    speculation = fixed(drafts[kind]())
    length = len(case.continuation)
    [output] = generate(model, case.prompt.tolist(), greedy(max_tokens=length), draft=speculation)
    assert list(output.token_ids) == case.continuation.tolist()
    assert sum(speculation.report.judged) > 0 or kind == "n-gram"


@pytest.mark.parametrize(("name", "k"), [("llama", 4), ("qwen3", 1), ("phi3_longrope", 2)])
def test_passes_of_one_row_chained_as_a_kernel_chains_them(name: str, k: int, monkeypatch):
    """The draft's tokens are those of passes that each begin by themselves; padding ids are no tokens."""
    model, proposer = load_case(name), jaxinfer.speculative.model_draft.ModelProposer
    draft, calls, chained = ModelDraft(perturbed(model, 0.2), k=k), [], proposer._chained

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return chained(*arguments)

    def run() -> tuple[tuple[int, ...], SpeculationReport]:
        jax.clear_caches()
        speculation = fixed(draft)
        [output] = generate(model, [PROMPTS[1]], greedy(), draft=speculation)
        return output.token_ids, speculation.report

    monkeypatch.setattr(proposer, "_chained", counted)
    tokens, report = run()
    assert not calls  # this process has no GPU
    monkeypatch.setattr(jaxinfer.speculative.model_draft, "next_token_refusal", lambda *_: None)
    chained_tokens, chained_report = run()
    assert calls
    assert chained_tokens == tokens
    assert chained_report.histogram == report.histogram
    assert 0.0 < report.acceptance_rate < 1.0


# --- Every option


def test_h5_every_option_and_logprobs_as_in_plain_decoding():
    """Trap H5: tokens, logprobs, ranks and tables of greedy and seeded rows, each row with settings of its own."""
    model = load_case("llama")
    settings = [
        greedy(logprobs=3),
        greedy(temperature=1.0, seed=1, logprobs=2),
        greedy(temperature=1.5, seed=3, top_k=4, min_p=0.1, max_tokens=7),
        greedy(temperature=1.0, seed=4, logit_bias={11: 2.0, 12: -100.0}),
        greedy(repetition_penalty=1.8, frequency_penalty=1.0, presence_penalty=0.5, max_tokens=9, logprobs=0),
        greedy(temperature=0.7, seed=5, frequency_penalty=0.8, min_tokens=6, stop_token_ids=[3, 4, 5, 6], logprobs=3),
    ]
    prompts = [*PROMPTS, *PROMPTS]
    plain = generate(model, prompts, settings)
    speculation = fixed(ModelDraft(perturbed(model, 0.2), k=3))
    drafted = generate(model, prompts, settings, draft=speculation)
    for expected, output in zip(plain, drafted, strict=True):
        assert output.token_ids == expected.token_ids
        assert (output.finish_reason, output.completions[0].stop_reason) == (
            expected.finish_reason,
            expected.completions[0].stop_reason,
        )
        assert (output.logprobs is None) == (expected.logprobs is None)
        for table, other in zip(output.logprobs or (), expected.logprobs or (), strict=True):
            assert table.keys() == other.keys()
            for token, score in table.items():
                assert score.logprob == pytest.approx(other[token].logprob, abs=1e-4)
                assert score.rank == other[token].rank
    assert 0.1 < speculation.report.acceptance_rate < 0.95


def test_c7_seeded_and_greedy_rows_keep_their_tokens_beside_rows_that_draw():
    """Trap C7: in such a batch the draft's distributions are judged, of the row without a seed alone."""
    model = load_case("llama")
    rows = [greedy(temperature=1.0, seed=42), greedy(temperature=1.0), greedy()]
    expected = generate(model, PROMPTS, rows)
    speculation = fixed(ModelDraft(perturbed(model, 0.2), k=3))
    for order in ((0, 1, 2), (2, 1, 0)):
        prompts, params = [PROMPTS[row] for row in order], [rows[row] for row in order]
        outputs = generate(model, prompts, params, draft=speculation)
        for row, output in zip(order, outputs, strict=True):
            assert row == 1 or output.token_ids == expected[row].token_ids
    assert 0.1 < speculation.report.acceptance_rate < 0.95


LIKELY = range(4)
"""The tokens that a bias leaves: with so few, three of them can be counted. Filters are tested with the acceptance."""


@functools.cache
def prefix_probabilities(prompt: tuple[int, ...], temperature: float, depth: int) -> dict[tuple, float]:
    """Exact probabilities of the first `depth` tokens of the llama case, LIKELY ones alone, by teacher forcing."""
    model = load_case("llama")
    chances: dict[tuple, float] = {(): 1.0}
    for _ in range(depth):
        scores = np.asarray(logits(model, [[*prompt, *path] for path in chances]))[:, -1]
        rows = [sampling_reference.probabilities(row[: len(LIKELY)], temperature) for row in scores]
        chances = {
            (*path, int(token)): chance * row[token]
            for (path, chance), row in zip(chances.items(), rows, strict=True)
            for token in np.flatnonzero(row)
        }
    return chances


@pytest.mark.parametrize("kind", ["n-gram", "model", "self"])
def test_unseeded_rows_have_the_target_s_distribution(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The first three tokens of 512 completions against their exact probabilities, a chi-square test at 1e-4.

    Each batch has rows that draw with other options.
    """
    monkeypatch.setattr(jaxinfer.generation, "request_seed", lambda params: 11)
    model = load_case("llama")
    prompt = (5, 9, 5, 9, 5)
    drafts = {
        "n-gram": lambda: NgramDraft(k=2, min_n=1, max_n=2),
        "model": lambda: ModelDraft(perturbed(model, 0.2), k=2),
        "self": lambda: SelfDraft(model, k=2),
    }
    kinds = [{"temperature": 1.0}, {"temperature": 0.6}]
    bias = dict.fromkeys(range(len(LIKELY), model.config.num_tokens), -100.0)
    params = [SamplingParams(max_tokens=4, ignore_eos=True, n=256, logit_bias=bias, **options) for options in kinds]
    speculation = fixed(drafts[kind]())
    outputs = generate(model, [prompt, prompt], params, draft=speculation, max_batch_size=512)
    for output, options in zip(outputs, kinds, strict=True):
        chances = prefix_probabilities(prompt, **options, depth=3)
        counts = dict.fromkeys(chances, 0)
        for completion in output.completions:
            counts[completion.token_ids[:3]] += 1
        likely = [path for path, chance in chances.items() if chance * 256 >= 5]
        observed = [counts[path] for path in likely]
        expected = [256 * chances[path] for path in likely]
        if len(likely) < len(chances):
            observed.append(256 - sum(observed))
            expected.append(256 - sum(expected))
        assert stats.chisquare(observed, expected).pvalue > 1e-4
    assert sum(speculation.report.tokens.values()) == 3 * 512
    if kind != "n-gram":
        assert speculation.report.acceptance_rate > 0.2


# --- Ends. All on one model, in batches of eight rows with k = 4, which share their programs.


def markov_model() -> Model:
    """Token c is followed by c + 1, up to 60; then comes the end of text."""
    return markov.model({**{token: token + 1 for token in range(60)}, 60: markov.EOS})


def wrong_markov_model() -> Model:
    return markov.model({token: (token + 7) % 62 for token in range(62)})


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        for completion, plain in zip(output.completions, other.completions, strict=True):
            assert completion == plain


def test_h1_d3_blocks_end_at_an_end_of_text_inside_them():
    """Traps H1 and D3: the end at every offset of a block, with room behind it and as the last token allowed."""
    model = markov_model()
    prompts = [[60 - distance] for distance in range(7)]
    for draft in (ModelDraft(model, k=4), ModelDraft(wrong_markov_model(), k=4)):
        for room in (0, 3):
            params = [SamplingParams(temperature=0.0, max_tokens=distance + 1 + room) for distance in range(7)]
            speculation = fixed(draft)
            outputs = generate(model, prompts, params, draft=speculation)
            for distance, output in enumerate(outputs):
                assert output.token_ids == (*range(61 - distance, 61), markov.EOS)
                assert output.finish_reason == "stop"
            # On the device too: what it counted ends there, and first tokens are not of a step.
            assert sum(speculation.report.tokens.values()) == sum(len(output.token_ids) - 1 for output in outputs)


def test_h1_n_grams_find_an_end_of_text_and_go_on_behind_it():
    """Trap H1: the prompt holds the whole answer, its end and what came after it, all of which is proposed."""
    prompts = [[*range(54, 61), markov.EOS, 54, 55, 60 - distance] for distance in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = generate(markov_model(), prompts, params, draft=fixed(NgramDraft(k=4, min_n=1, max_n=1)))
    for distance, output in enumerate(outputs):
        assert output.token_ids == (*range(61 - distance, 61), markov.EOS)
        assert output.finish_reason == "stop"


def test_h3_min_tokens_as_in_plain_decoding():
    """Trap H3: the end of text would come fourth; min_tokens 0, 3, 4, 5, and a draft that proposes it."""
    model = markov_model()
    params = [SamplingParams(temperature=0.0, max_tokens=9, min_tokens=count) for count in (0, 3, 4, 5)]
    expected = generate(model, [[57]] * 4, params)
    assert [output.token_ids for output in expected[:2]] == [(58, 59, 60, markov.EOS)] * 2
    assert markov.EOS not in expected[2].token_ids[:4] and markov.EOS not in expected[3].token_ids[:5]
    assert_same(generate(model, [[57]] * 4, params, draft=fixed(ModelDraft(model, k=4))), expected)


def test_f3_lengths_at_the_end_of_the_context():
    """Trap F3: (prompt, max_tokens) around a context of 64, with drafted tokens that would lie beyond it."""
    model = markov_model()
    sizes = [(63, 1), (63, 2), (64, 1), (64, 2), (1, 63), (1, 64), (1, 1000), (5, 1)]
    prompts = [[61] * (length - 1) + [0] for length, _ in sizes]
    params = [greedy(max_tokens=most) for _, most in sizes]
    expected = generate(model, prompts, params)
    assert_same(generate(model, prompts, params, draft=fixed(ModelDraft(model, k=4))), expected)


def test_stop_strings_and_streams_as_in_plain_decoding():
    """Deltas joined are the whole completion, and no text or token follows a stop that falls within a block.

    Trap D3: a stop string that the last allowed token completes, at two places of a block, is a stop.
    """
    model = markov_model()
    params = [greedy(stop=["DEF"]), greedy(stop=["w5 w6"]), greedy(max_tokens=5), greedy(stop=[" w9"]), greedy()]
    params += [greedy(stop=["DEF"], max_tokens=2), greedy(stop=["w6"], max_tokens=6)]
    prompts = [[0], [0], [8], [3], [9], [0], [0]]
    expected = generate(model, prompts, params)
    assert expected[0].text == "BC"
    assert [(output.finish_reason, len(output.token_ids)) for output in expected[5:]] == [("stop", 2), ("stop", 6)]
    draft = ModelDraft(model, k=4)
    assert_same(generate(model, prompts, params, draft=fixed(draft)), expected)
    texts, tokens, endings = [""] * 7, [()] * 7, [None] * 7
    for delta in stream(model, prompts, params, draft=fixed(draft)):
        texts[delta.prompt_index] += delta.text
        tokens[delta.prompt_index] += delta.token_ids
        endings[delta.prompt_index] = delta.finish_reason
    assert texts == [output.text for output in expected]
    assert tokens == [output.token_ids for output in expected]
    assert endings == [output.finish_reason for output in expected]


def test_k1_a_row_that_fails_leaves_its_neighbours_alone():
    """Trap K1: NaN reaches one row through its prompt; the others' tokens are as without it."""
    model = markov.with_nan_token(markov_model(), 62)
    prompts, params = [[1], [62], [2], [3], [4]], greedy(max_tokens=9)
    expected = generate(model, prompts, params)
    assert [output.finish_reason for output in expected] == ["length", "error", "length", "length", "length"]
    for draft in (ModelDraft(model, k=4), NgramDraft(k=4)):
        assert_same(generate(model, prompts, params, draft=fixed(draft)), expected)


def test_k1_nan_in_a_head_or_a_layer_is_an_error_of_the_target_s_and_nothing_of_the_draft_s():
    """Trap K1: NaN in one row of the head, and in one weight of a layer; of the target, then of its draft."""
    model = markov_model()
    layer = model.params.layers[0]
    layers = [dataclasses.replace(layer, down=layer.down.at[3, 3].set(jnp.nan))]
    ill = dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))
    prompts, params = [[1], [2], [3], [4], [5]], greedy(max_tokens=9)
    expected = generate(model, prompts, params)
    for broken in (markov.with_nan_logit(model, 50), ill):
        outputs = generate(broken, prompts, params, draft=fixed(ModelDraft(model, k=4)))
        assert [(output.finish_reason, output.token_ids) for output in outputs] == [("error", ())] * 5
        assert_same(generate(model, prompts, params, draft=fixed(ModelDraft(broken, k=4))), expected)


def test_k1_a_drafted_token_of_nan_is_not_the_rows_fault():
    """Trap K1: token 62 is proposed, never said, and its keys and values are NaN: 0 * NaN reaches the tokens before it.

    The draft says 62 after 5 and after 20, where the target says 6 and 21.
    """
    successors = {token: token + 1 for token in range(1, 40)}
    target = markov.with_nan_token(markov.model(successors), 62)
    astray = markov.model(successors | {5: 62, 20: 62, 62: 6})
    prompts, params = [[3], [11]], greedy(max_tokens=12)
    expected = generate(target, prompts, params)
    assert expected[0].token_ids == tuple(range(4, 16))
    assert expected[1].token_ids == tuple(range(12, 24))
    speculation = fixed(ModelDraft(astray, k=4))
    assert_same(generate(target, prompts, params, draft=speculation), expected)
    assert speculation.report.acceptance_rate < 1


# --- Rollback


def poisoned(cache: PagedKVCache, positions: jax.Array, width: int) -> PagedKVCache:
    """NaN in every place at or behind a row's newest token, in pages without a row and in the scratch page."""
    pages = jnp.arange(cache.num_pages) - 1
    ends = positions[jnp.clip(pages // width, 0, positions.shape[0] - 1)]
    places = (pages % width)[:, None] * cache.page_size + jnp.arange(cache.page_size)[None, :]
    behind = ((places >= ends[:, None]) | (pages < 0)[:, None])[:, None, :, None]

    def poison(pool: jax.Array) -> jax.Array:
        return jnp.where(behind, jnp.asarray(jnp.nan, pool.dtype), pool)

    return dataclasses.replace(
        cache, keys=[poison(pool) for pool in cache.keys], values=[poison(pool) for pool in cache.values]
    )


class PoisonedBatch(SpeculativeBatch):
    """Before each chunk, which is one step, everything that is not of accepted tokens becomes NaN in both caches."""

    def _dispatch_next(self) -> InFlight:
        state, width = self.speculative_state, self.page_table.shape[1]
        self.cache = poisoned(self.cache, state.decode.positions, width)
        if isinstance(state.draft, DraftCache):
            pages = poisoned(state.draft.cache, jnp.minimum(state.draft.lengths, state.decode.positions), width)
            self.speculative_state = dataclasses.replace(state, draft=dataclasses.replace(state.draft, cache=pages))
        return super()._dispatch_next()


ONE_STEP = Limits(prefill_chunk=64, prefill_tokens=64, decode_chunk=1)


@pytest.mark.parametrize("kind", ["model", "self"])
def test_h7_rejected_positions_are_never_read(kind: str):
    """Trap H7 on a model with a sliding window: rejected and unwritten places hold NaN, and the tokens are the same."""
    model = load_case("mistral_sliding")
    prompts = [families.BY_NAME["mistral_sliding"].tokens[0, :20].tolist(), [3, 1, 4]]
    params = greedy(max_tokens=20)
    expected = [output.token_ids for output in generate(model, prompts, params)]
    draft = ModelDraft(perturbed(model, 0.2), k=3) if kind == "model" else SelfDraft(model, k=3)
    batch = PoisonedBatch(model, requests_for(model, prompts, params), ONE_STEP, fixed(draft))
    for _ in batch.run():
        pass
    assert [tuple(request.token_ids) for request in batch.requests] == expected
    assert 0.05 < batch.speculation.report.acceptance_rate < 0.95


def test_h7_long_runs_past_the_window_with_bad_and_perfect_drafts():
    """Trap H7: as many tokens as the context holds, far beyond the window; drafts accepted hardly ever and always."""
    model = load_case("mistral_sliding")
    prompt = families.BY_NAME["mistral_sliding"].tokens[0, :9].tolist()
    length = min(model.config.max_position_embeddings - len(prompt), 250)
    windows = [layer.window for layer in model.config.layers if layer.window is not None]
    assert windows and length > 2 * max(windows)
    params = greedy(max_tokens=length)
    [expected] = generate(model, prompt, params)
    for draft in (model, perturbed(model, 2.0)):
        speculation = fixed(ModelDraft(draft, k=6))
        assert_same(generate(model, prompt, params, draft=speculation), [expected])
        assert speculation.report.acceptance_rate > 0.99 if draft is model else speculation.report.acceptance_rate < 0.3


def test_a_self_draft_of_nan_changes_nothing():
    """What a draft writes to shared pages, NaN here, is written again before the target reads it."""
    model = load_case("llama")
    draft = SelfDraft(model, k=3, int4=False, num_layers=1)
    draft.params = dataclasses.replace(draft.params, norm=jnp.full_like(draft.params.norm, jnp.nan))
    draft.params.layers[0] = dataclasses.replace(draft.params.layers[0], qkv=draft.params.layers[0].qkv * jnp.nan)
    expected = generate(model, PROMPTS, greedy())
    assert_same(generate(model, PROMPTS, greedy(), draft=fixed(draft)), expected)


def test_quantised_caches_as_in_plain_decoding():
    """Keys and values in int8, in the target's cache and in the draft's."""
    model = dataclasses.replace(load_case("llama"), kv_dtype=jnp.dtype(jnp.int8))
    speculation = fixed(ModelDraft(perturbed(model, 0.1), k=3))
    expected = generate(model, PROMPTS, greedy())
    assert_same(generate(model, PROMPTS, greedy(), draft=speculation), expected)
    assert speculation.report.acceptance_rate > 0.2


def test_bfloat16_tokens_are_those_of_the_same_program_without_proposals():
    """Plain decoding through the program that verifies rounds as verification does: no tie falls another way."""
    case = families.BY_NAME["qwen3"]
    model = load(case.folder, dtype=jnp.bfloat16, progress=False)
    prompts = [case.tokens[0, :5].tolist(), case.tokens[1, :17].tolist(), [7]]
    expected = generate(model, prompts, greedy(max_tokens=60), draft=fixed(NullDraft(k=4)))
    speculation = fixed(NgramDraft(k=4))
    assert_same(generate(model, prompts, greedy(max_tokens=60), draft=speculation), expected)
    assert speculation.report.acceptance_rate > 0.2


# --- The draft's own cache


def test_long_prompts_reach_the_draft_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """A prompt of 100 tokens, 64 at a time, beside shorter ones: the draft, the target itself, is always right."""
    pieces = Limits(prefill_chunk=64, prefill_tokens=64, decode_chunk=4)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: pieces))
    model = load_case("llama")
    prompts = [np.tile(CASE.tokens[0], 9)[:100].tolist(), *PROMPTS[1:]]
    speculation = fixed(ModelDraft(model, k=2))
    expected = generate(model, prompts, greedy(max_tokens=10))
    assert_same(generate(model, prompts, greedy(max_tokens=10), draft=speculation), expected)
    assert speculation.report.acceptance_rate == 1.0


class Alternating:
    """Two chunks with the draft, then three without, and again."""

    def __init__(self) -> None:
        self.chunks = itertools.cycle((2, 2, 0, 0, 0))

    def lengths(self, k: int) -> tuple[int, ...]:
        return (0, 2)

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "Alternating":
        return self

    def choose(self, context: int) -> int:
        return next(self.chunks)

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        pass


def test_a_draft_catches_up_after_plain_steps():
    model = load_case("llama")
    speculation = Speculation(ModelDraft(model, k=2), policy=Alternating())
    expected = generate(model, PROMPTS, greedy(max_tokens=60))
    assert_same(generate(model, PROMPTS, greedy(max_tokens=60), draft=speculation), expected)
    assert speculation.report.acceptance_rate == 1.0
    assert set(speculation.report.steps) == {0, 2}


def test_a_draft_quantised_apart_from_its_target_is_warned_of_after_a_run(caplog: pytest.LogCaptureFixture):
    model = markov_model()
    packed = dataclasses.replace(model, params=SelfDraft(model).params)
    generate(model, [[1]], greedy(max_tokens=4), draft=fixed(ModelDraft(packed, k=2)))
    assert caplog.text.count("target and draft are quantised differently (float32 and 4 bits") == 1


def test_what_is_drafted_beyond_a_full_table_has_places_of_its_own():
    """Rows that end with the last place of 16 pages, and one before; a draft that is always right goes beyond it.

    Olmo 2's keys are written by `kv_cache.append`: beyond a table's end that would be the table's last page.
    """
    model = load_case("olmo2")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=300))
    prompts = [np.tile(CASE.tokens[row], 30)[: 240 - row].tolist() for row in range(2)]
    params = greedy(max_tokens=17, logprobs=0)
    expected = generate(model, prompts, params)
    outputs = generate(model, prompts, params, draft=fixed(ModelDraft(model, k=6)))
    for output, plain in zip(outputs, expected, strict=True):
        assert output.token_ids == plain.token_ids
        scores = [completion.completions[0].cumulative_logprob for completion in (output, plain)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_time_of_compilations_is_not_reported():
    """The program of plain steps is compiled while steps with the draft are in flight, and these end unseen."""
    speculation = Speculation(NgramDraft(k=2, min_n=3, max_n=5), policy=Alternating())
    generate(load_case("llama"), PROMPTS, greedy(max_tokens=60), draft=speculation)
    report = speculation.report
    assert report.timed_steps.get(2, 0) < report.steps[2]
    speculation.reset()
    generate(load_case("llama"), PROMPTS, greedy(max_tokens=60), draft=speculation)
    assert speculation.report.timed_steps == speculation.report.steps


def test_h7_rejected_tokens_leave_no_trace_in_either_cache():
    """After steps with a draft that is often wrong and plain ones in turn, both caches hold of all tokens that they
    are said to hold what a prefill of the output gives."""
    model = load_case("llama")
    draft = ModelDraft(perturbed(model, 0.2), k=2)
    requests = requests_for(model, PROMPTS, greedy(max_tokens=45))
    batch = SpeculativeBatch(model, requests, Limits.default(), Speculation(draft, policy=Alternating()))
    for _ in batch.run():
        pass
    assert 0.1 < batch.speculation.report.acceptance_rate < 0.9
    state, table = batch.speculative_state, jnp.asarray(batch.page_table)
    ends = jnp.where(jnp.arange(batch.size) < len(PROMPTS), state.decode.positions, 0)
    assert isinstance(batch.cache, PagedKVCache)
    for one, cache, lengths in (
        (model, batch.cache, ends),
        (draft.model, state.draft.cache, jnp.minimum(state.draft.lengths, ends)),
    ):
        assert int(lengths.max()) > 45
        empty = kv_cache.create(one.config, cache.num_pages, cache.page_size, one.dtype)
        starts = jnp.zeros_like(lengths)
        _, fresh = steps.prefill(one.params, empty, state.history[:, :64], lengths, starts, table, config=one.config)
        for pool, expected in zip([*cache.keys, *cache.values], [*fresh.keys, *fresh.values], strict=True):
            for pages, length in zip(batch.page_table, lengths.tolist(), strict=True):
                held, wanted = (np.asarray(x[pages]).swapaxes(1, 2) for x in (pool, expected))
                held, wanted = (x.reshape(-1, *x.shape[2:])[:length] for x in (held, wanted))
                np.testing.assert_allclose(held, wanted, atol=1e-4)


def test_lengths_follow_the_context():
    """Two drafted tokens up to 19 tokens, none from 20 on: a prompt of 5 crosses the bound, one of 20 is above it."""
    model = load_case("llama")
    for length, expected in ((5, {0, 2}), (20, {0})):
        speculation = Speculation(ModelDraft(model, k=2), policy=LengthByContext(((0, 2), (20, 0))))
        generate(model, [CASE.tokens.reshape(-1)[:length].tolist()], greedy(max_tokens=60), draft=speculation)
        assert set(speculation.report.steps) == expected


# --- Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: NgramDraft(k=0), "NgramDraft: k=0; expected 1 to 15 drafted tokens a step"),
        (lambda model: ModelDraft(model, k=16), "ModelDraft: k=16; expected 1 to 15"),
        (lambda model: SelfDraft(model, k=True), "SelfDraft: k=True; expected 1 to 15"),
        (lambda model: NgramDraft(min_n=3, max_n=2), "min_n=3 is above max_n=2"),
        (lambda model: NgramDraft(min_n=0), "min_n=0; expected 1 to 16 tokens"),
        (lambda model: SelfDraft(model, num_layers=9), "num_layers=9; .* has 1 layers"),
        (lambda model: SelfDraft(model, int4=False), "costs what the target costs"),
        (lambda model: Speculation(NgramDraft(k=2), policy=FixedLength(3)), "length=3; expected 0 to the draft's k=2"),
        (lambda model: SelfDraft(wrong_markov_model()), "which is not the target"),
        (lambda model: ModelDraft(load_case("llama")), "does not fit the target markov"),
    ],
)
def test_unfit_drafts_are_refused_before_anything_runs(make, message: str):
    model = markov_model()
    with pytest.raises(ValueError, match=message):
        stream(model, [[1]], greedy(), draft=make(model))


def test_what_is_no_draft_is_refused():
    with pytest.raises(ValueError, match="draft is str; expected a draft such as"):
        as_speculation("n-gram")


def test_drafts_with_other_tokens_are_refused_with_the_differences():
    """The same size of vocabulary is not enough."""
    model = markov_model()
    words = ["X", *markov.WORDS[1:]]
    other = markov.model({}, tokenizer=markov.word_tokenizer(words))
    with pytest.raises(ValueError, match=r"markov: token 0 is b'X', the target's b'A'; take a draft that was trained"):
        generate(model, [[1]], greedy(), draft=ModelDraft(other))
    bare = markov.model({}, text=False)
    with pytest.raises(ValueError, match="markov has no tokenizer to compare"):
        generate(model, [[1]], greedy(), draft=ModelDraft(bare))
    ending = dataclasses.replace(other, tokenizer=markov.word_tokenizer())
    assert ending.tokenizer is not None
    ending.tokenizer.eos_token_ids = (62,)
    with pytest.raises(ValueError, match=r"its end-of-text ids are \[62\], the target's \[63\]"):
        generate(model, [[1]], greedy(), draft=ModelDraft(ending))


def test_h7_requests_beyond_the_draft_s_context_are_refused():
    """Trap H7: a draft whose context is shorter than the target's; 32 tokens fit and 33 do not."""
    model = markov_model()
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=32))
    draft = ModelDraft(short, k=4)
    with pytest.raises(ValueError, match="reaches 33 tokens, but the context of the draft markov is 32"):
        generate(model, [[1]], greedy(max_tokens=33), draft=draft)
    prompts = [[token] for token in range(5)]
    expected = generate(model, prompts, greedy(max_tokens=32))
    assert_same(generate(model, prompts, greedy(max_tokens=32), draft=fixed(draft)), expected)


def test_out_of_memory_for_the_draft_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    model = markov_model()
    own = 17 * 16 * 2 * 8 * 4  # the scratch page and 16 pages of 16 tokens, keys and values of one head of 8 floats
    monkeypatch.setattr(jaxinfer.generation, "free_device_bytes", lambda: int(own * 1.5))
    generate(model, [[1]], greedy(max_tokens=2))
    with pytest.raises(ValueError, match="kB of KV cache"):
        generate(model, [[1]], greedy(max_tokens=2), draft=ModelDraft(model))
