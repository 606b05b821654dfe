"""score and perplexity: values by transformers and lm-eval, the token boundary, what is in memory, bad input."""

import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence

import families
import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest

import jaxinfer.scoring
import jaxinfer.scoring_run
from jaxinfer import kv_cache
from jaxinfer.batch import Limits
from jaxinfer.generation import logits
from jaxinfer.model import Model, load
from jaxinfer.scoring import encode_pair, perplexity, score
from jaxinfer.scoring_plan import TokenPair
from jaxinfer.scoring_run import head_rows_for, prefill_targets, row_tokens

LM_EVAL = pathlib.Path(__file__).parent / "fixtures" / "lm_eval"
EXPECTED = json.loads((LM_EVAL / "expected.json").read_text(encoding="utf-8"))["requests"]


@functools.cache
def load_case(name: str) -> Model:
    return load(families.BY_NAME[name].folder, dtype=jnp.float32, progress=False)


LLAMA = load_case("llama")


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def expected_logprobs(model: Model, context: Sequence[int], continuation: Sequence[int]) -> np.ndarray:
    """From the logits of the whole sequence, in float64."""
    rows = log_softmax(np.asarray(logits(model, [[*context, *continuation][:-1]]))[0])
    return rows[np.arange(len(context) - 1, len(rows)), list(continuation)]


# --- Values


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_sliding", "llama_rope_dynamic"])
def test_scores_are_those_of_transformers_logits(name: str) -> None:
    """Every way to cut the recorded sequences in two, so rows share prefixes of all lengths."""
    case, model = families.BY_NAME[name], load_case(name)
    rows, length = case.tokens.shape
    cuts = [1, length // 2, length - 1]
    prompts = [row[:cut].tolist() for row in case.tokens for cut in cuts]
    continuations = [row[cut:].tolist() for row in case.tokens for cut in cuts]
    expected = log_softmax(case.logits if not case.length_dependent else np.asarray(logits(model, case.tokens[:, :-1])))
    for index, got in enumerate(score(model, prompts, continuations)):
        row, cut = index // len(cuts), cuts[index % len(cuts)]
        targets = case.tokens[row, cut:]
        wanted = expected[row, np.arange(cut - 1, length - 1), targets]
        assert got.num_tokens == length - cut
        np.testing.assert_allclose(got.token_logprobs, wanted, atol=2e-3, rtol=0)
        assert got.logprob == pytest.approx(sum(got.token_logprobs), abs=1e-9)
    assert rows > 1


def test_random_pairs_against_whole_logits(rng: np.random.Generator) -> None:
    """With a RoPE that has other frequencies beyond 16 tokens."""
    model = load_case("phi3_longrope")
    header = rng.integers(0, 90, 44).tolist()
    prompts = [[*header[:cut], *rng.integers(0, 90, cut % 5).tolist()] for cut in (3, 12, 33, 37, 44, 44)]
    continuations = [rng.integers(0, 90, length).tolist() for length in (9, 5, 1, 10, 2, 7)]
    for prompt, continuation, got in zip(prompts, continuations, score(model, prompts, continuations), strict=True):
        wanted = expected_logprobs(model, prompt, continuation)
        np.testing.assert_allclose(got.token_logprobs, wanted, atol=1e-4, rtol=0)


def test_scores_do_not_depend_on_company_nor_on_memory(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-evaluation-harness#704: four, one or all at once; in a pool so small that trees are computed in parts."""
    header = rng.integers(0, 90, 48).tolist()
    prompts = [[*header, *rng.integers(0, 90, 5 + index).tolist()] for index in range(5)]
    continuations = rng.integers(0, 90, (5, 6)).tolist()
    together = score(LLAMA, prompts, continuations)
    four, one = score(LLAMA, prompts[:4], continuations[:4]), score(LLAMA, prompts[4:], continuations[4:])
    limits = Limits(prefill_chunk=32, prefill_tokens=32, decode_chunk=1)
    monkeypatch.setattr(jaxinfer.scoring_run, "FEWEST_PAGES", 1)
    monkeypatch.setattr(jaxinfer.scoring_run, "POOL_CALLS", 1)
    monkeypatch.setattr(Limits, "default", lambda: limits)
    cramped = score(LLAMA, prompts, continuations)
    for answers in (four + one, cramped):
        for got, wanted in zip(answers, together, strict=True):
            np.testing.assert_allclose(got.token_logprobs, wanted.token_logprobs, atol=1e-4, rtol=0)
            assert got.is_greedy == wanted.is_greedy


def test_greedy_means_that_generation_would_say_it() -> None:
    case = families.BY_NAME["llama"]
    prompt, said = case.prompt.tolist(), case.continuation.tolist()
    wrong = [*said[:5], (said[5] + 1) % 90, *said[6:]]
    answers = score(LLAMA, prompt, [said, said[:1], wrong, wrong[:5], wrong[5:6]])
    assert [answer.is_greedy for answer in answers] == [True, True, False, True, False]
    assert [answer.num_tokens for answer in answers] == [24, 1, 24, 5, 1]


def test_one_prompt_for_all_and_one_prompt_each() -> None:
    model = markov.model(markov.chain(0, 1, 2, 3))
    for answers in (score(model, "A", ["|BC", "|DEF"]), score(model, ["A", "A"], ["|BC", "|DEF"])):
        assert [answer.is_greedy for answer in answers] == [True, False]
    assert score(model, [0], [[1], [1, 2, 3]])[1].is_greedy
    assert score(model, [], []) == []


# --- Where the prompt ends


@functools.cache
def text_model(tokenizer: str) -> Model:
    """The model that `tests/oracle/make_lm_eval.py` asked, with a tokenizer that adds BOS ("bos") or does not."""
    with tempfile.TemporaryDirectory() as folder:
        for source in (LM_EVAL / "model", LM_EVAL / tokenizer):
            shutil.copytree(source, folder, dirs_exist_ok=True)
        return dataclasses.replace(load(folder, dtype=jnp.float32, progress=False), name="text")


@pytest.mark.parametrize("tokenizer", ["plain", "bos"])
def test_text_is_encoded_and_scored_as_lm_eval_does_it(tokenizer: str) -> None:
    """lm-evaluation-harness#1465 and its like: spaces that move, BOS once, empty prompts, characters cut in two."""
    model = text_model(tokenizer)
    recorded = [one for one in EXPECTED[tokenizer]["loglikelihood"] if sum(map(len, one["ids"])) <= 97]
    prompts, continuations = zip(*(one["arguments"] for one in recorded), strict=True)
    for one in recorded:
        pair = encode_pair(model, *one["arguments"])
        assert [list(pair.context), list(pair.continuation)] == one["ids"]
    for one, got in zip(recorded, score(model, list(prompts), list(continuations)), strict=True):
        assert got.logprob == pytest.approx(one["answer"][0], abs=1e-3)
        assert got.is_greedy == one["answer"][1]
    assert len(recorded) > 12


def test_text_and_ids_mix() -> None:
    model = text_model("bos")
    assert model.tokenizer is not None
    four = tuple(model.tokenizer.encode(" four", add_special_tokens=False))
    assert encode_pair(model, [7, 8], " four") == TokenPair((7, 8), four)  # no BOS in the middle
    assert encode_pair(model, " four", [5, 6]) == TokenPair((0, *four), (5, 6))
    assert encode_pair(model, "", [5, 6]) == TokenPair((0,), (5, 6))
    assert encode_pair(model, " \n", "four").context == (0,)  # white space alone belongs to the continuation
    assert encode_pair(model, np.array([7, 8]), jnp.array([9])) == TokenPair((7, 8), (9,))
    ends = markov.model(markov.chain(0, 1))
    assert encode_pair(ends, "", "A").context == (markov.EOS,)  # a model without BOS


# --- Perplexity


@pytest.mark.parametrize(("window", "stride"), [(128, 64), (32, 8), (2, 1)])
def test_perplexity_scores_every_token_but_the_first_once(window: int, stride: int, rng: np.random.Generator) -> None:
    """Against the whole logits of each window, by the recipe of transformers' guide to perplexity."""
    tokens = rng.integers(0, 90, 100).tolist()
    expected, previous = [], 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        rows = log_softmax(np.asarray(logits(LLAMA, [tokens[begin:end]]))[0])
        expected += [rows[position - begin - 1, tokens[position]] for position in range(previous, end)]
        previous = end
        if end == len(tokens):
            break
    got = perplexity(LLAMA, tokens, window=window, stride=stride)
    assert got.num_tokens == len(expected) == 99
    assert got.logprob == pytest.approx(sum(expected), abs=1e-3)
    assert got.perplexity == pytest.approx(math.exp(-sum(expected) / 99), rel=1e-5)


def test_perplexity_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """BOS opens the text if the tokenizer says so, and is not scored; windows are the context and half of it."""
    plain, bos = (perplexity(text_model(name), "The horse has four legs") for name in ("plain", "bos"))
    assert (plain.num_tokens, bos.num_tokens) == (7, 8)
    assert bos.logprob == pytest.approx(score(text_model("bos"), "", ["The horse has four legs"])[0].logprob, abs=1e-4)
    text = "The horse ran over the hill. " * 30
    assert perplexity(text_model("bos"), text) == perplexity(text_model("bos"), text, window=96, stride=48)
    monkeypatch.setattr(jaxinfer.scoring, "LONGEST_WINDOW", 40)
    assert perplexity(text_model("bos"), text) == perplexity(text_model("bos"), text, window=40, stride=20)


# --- Memory and programs


def test_logits_of_all_positions_never_exist() -> None:
    """No array of the compiled program has more than `head_rows` rows of the vocabulary; the head runs in a loop."""
    model, head_rows = text_model("plain"), 8
    config = model.config  # 400 words; no other size of this model is 400
    cache = jax.eval_shape(lambda: kv_cache.create(config, 33, 16, jnp.float32))
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    places = jax.ShapeDtypeStruct((256,), jnp.int32)
    compiled = prefill_targets.lower(
        model.params,
        cache,
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        rows,
        rows,
        jax.ShapeDtypeStruct((4, 8), jnp.int32),
        rows,
        places,
        places,
        jax.ShapeDtypeStruct((), jnp.int32),
        config=config,
        head_rows=head_rows,
        from_empty=True,
    ).compile()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())}
    with_words = {shape for shape in shapes if config.vocab_size in shape}
    weights = {(config.vocab_size, config.hidden_size), (config.hidden_size, config.vocab_size)}
    assert (head_rows, config.vocab_size) in with_words
    assert all(math.prod(shape) <= head_rows * config.vocab_size for shape in with_words - weights)


def test_the_head_takes_what_fits_its_share_of_memory() -> None:
    wide = dataclasses.replace(LLAMA.config, vocab_size=128_256)
    assert head_rows_for(wide, 16384) == 512  # 512 * 128256 * 4 bytes = 263 MB
    assert head_rows_for(wide, 100) == 128
    assert head_rows_for(LLAMA.config, 256) == 256


def test_calls_of_the_same_sizes_share_their_programs(rng: np.random.Generator) -> None:
    """And what is compiled ahead, side by side, is what the calls then find."""
    compiled: list[str] = []

    def note(event: str, *_: object, **details: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(details.get("fun_name")))

    def run() -> list[str]:
        compiled.clear()
        prompts = rng.integers(0, 90, (2, 100)).tolist()
        score(LLAMA, [prompts[0], prompts[0], prompts[1]], rng.integers(0, 90, (3, 4)).tolist())
        return [name for name in compiled if "prefill_targets" in name]

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jaxinfer.scoring_run._COMPILED.clear()
        prefill_targets.clear_cache()
        names = run()
        # A prompt that two answers share and one with its answer; then the two answers. XLA compiles each once.
        assert len(names) == len(jaxinfer.scoring_run._COMPILED) == 2
        assert not run()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_rows_are_padded_to_few_lengths_that_kernels_take() -> None:
    lengths = (1, 16, 17, 33, 49, 65, 97, 129, 385)
    assert [row_tokens(n, 0, gpu=False) for n in lengths] == [16, 16, 32, 48, 64, 96, 128, 192, 512]
    assert [row_tokens(n, 0, gpu=True) for n in lengths] == [64, 64, 64, 64, 64, 128, 128, 192, 512]
    assert [row_tokens(n, 512, gpu=True) for n in lengths] == [16, 16, 32, 48, 64, 128, 128, 192, 512]
    assert [row_tokens(n, 4096, gpu=True) for n in lengths] == [64, 64, 64, 64, 64, 128, 128, 192, 512]


# --- Wrong and odd


def test_not_finite_logits_are_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """JustVugg/colibri#369: NaN in one row is that row's; the others' scores are what they are."""
    model = markov.with_nan_token(markov.model(markov.chain(0, 1, 2, 3)), 5)
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        good, bad, also_good = score(model, [[0], [0, 5], [1]], [[1, 2], [1], [2]])
    assert math.isnan(bad.logprob)
    assert not bad.is_greedy
    assert good.is_greedy and also_good.is_greedy
    assert good.logprob == pytest.approx(0, abs=1e-5)
    assert "not finite (NaN or infinity) for 1 pairs: [1]" in caplog.text


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.progress.LOG_INTERVAL", 0.0)  # a line each time
    score(LLAMA, [1, 2], [[3], [4]])
    assert capsys.readouterr().err == ""
    score(LLAMA, [1, 2], [[3], [4]], progress=True)
    assert "Scoring" in capsys.readouterr().err


def test_progress_within_a_window(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of one window, 100 tokens in calls of 32, has four steps of progress with the time that is left."""
    monkeypatch.setattr("checkpoints.progress.LOG_INTERVAL", 0.0)  # a line each time
    monkeypatch.setattr(jaxinfer.scoring.Limits, "default", lambda: Limits(32, 32, 4))
    perplexity(LLAMA, [token % 50 for token in range(100)], progress=True)
    shown = re.findall(r"Scoring: \d+%, (\d+) of 99 after .* left, .*token", capsys.readouterr().err)
    assert sorted(set(map(int, shown))) == [0, 32, 64, 96, 99]


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[1], [2]], [[3]], "2 prompts for 1 continuations; give one each, or a single prompt"),
        ([[1], []], [[3], [4]], "prompt 1 is an empty list of token ids; give at least one"),
        ([[1]], [[]], r"continuation 0, \[\], adds no token to its prompt; give at least one token to score"),
        ([[1], [2]], [[3], [96]], "continuation 1 holds 96; token ids of this model are 0 to 95"),
        ([[1]], [[-1]], "continuation 0 holds -1; token ids of this model are 0 to 95"),
        ("text", [[1]], "prompt 0 is text, but .* has no tokenizer; give token ids instead"),
        ([[1] * 100], [[1] * 30], "pair 0 has 130 tokens, of which the context of .* holds 128 and one more; shorten"),
    ],
)
def test_bad_pairs(prompts: object, continuations: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(LLAMA, prompts, continuations)


def test_a_pair_that_fills_the_context_to_its_end(rng: np.random.Generator) -> None:
    """The last token is scored and needs no place."""
    tokens = rng.integers(0, 90, 129).tolist()
    (got,) = score(LLAMA, [tokens[:100]], [tokens[100:]])
    np.testing.assert_allclose(
        got.token_logprobs, expected_logprobs(LLAMA, tokens[:100], tokens[100:]), atol=1e-4, rtol=0
    )


def test_a_continuation_that_merges_into_its_prompt_is_refused() -> None:
    model = text_model("plain")
    with pytest.raises(ValueError, match="continuation 0, 'e', adds no token to its prompt"):
        score(model, "Th", "e")  # "The" is one token


def test_pairs_that_no_memory_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxinfer.scoring_run, "free_host_bytes", lambda: 50_000)
    with pytest.raises(ValueError, match=r"pair 1 has 111 tokens, whose KV cache takes .* kB of at most .* kB"):
        score(LLAMA, [[1], [2] * 100], [[3], [4] * 11])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 129}, "window=129; expected an integer from 2 to the context of .*, 128"),
        ({"window": 1}, "window=1; expected an integer from 2"),
        ({"window": 32, "stride": 32}, "stride=32; expected an integer from 1 to 31, so that windows of 32 overlap"),
        ({"stride": 0}, "stride=0; expected an integer from 1 to 127"),
    ],
)
def test_bad_windows(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(LLAMA, [1, 2, 3], **options)
    with pytest.raises(ValueError, match=r"the text has 1 token\(s\); perplexity needs at least 2"):
        perplexity(LLAMA, [1])
