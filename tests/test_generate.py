"""generate, stream and logits on random models: company, seeds, logprobs, prefill in pieces, batches that fit."""

import dataclasses
import functools
import json
import math
import re
import weakref
from collections.abc import Sequence

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxinfer.batch
import jaxinfer.generation
import jaxinfer.memory
from jaxinfer.batch import Batch, Limits, bucket, pages_for, plan_prefill
from jaxinfer.generation import generate, logits, stream
from jaxinfer.model import Model, load
from jaxinfer.outputs import Completion
from jaxinfer.request import Request
from jaxinfer.sampling_params import SamplingParams

CASE = families.BY_NAME["llama"]
PROMPTS = [CASE.tokens[0, :5].tolist(), CASE.tokens[1, :17].tolist(), CASE.tokens[2].tolist(), [7], [3, 2, 1]]


@functools.cache
def load_case(name: str) -> Model:
    return load(families.BY_NAME[name].folder, dtype=jnp.float32, progress=False)


LLAMA = load_case("llama")


def params(**fields: object) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 9, "ignore_eos": True} | fields)


def tokens_of(prompts: Sequence[list[int]], options: SamplingParams | list[SamplingParams]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in generate(LLAMA, prompts, options)]


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


# --- Company


@functools.cache
def alone(index: int) -> tuple[int, ...]:
    return tokens_of([PROMPTS[index]], params())[0]


def test_greedy_tokens_do_not_depend_on_the_batch_size():
    for size in (2, 3, 5):
        assert tokens_of(PROMPTS[:size], params()) == [alone(index) for index in range(size)]
    assert tokens_of(PROMPTS[::-1], params()) == [alone(index) for index in range(5)][::-1]
    outputs = generate(LLAMA, PROMPTS, params(), max_batch_size=2)
    assert [output.token_ids for output in outputs] == [alone(index) for index in range(5)]


def test_alone_tokens_are_those_of_a_dense_forward():
    """Without any cache: the argmax of teacher-forced logits of prompt and continuation."""
    for index, prompt in enumerate(PROMPTS):
        whole = [*prompt, *alone(index)]
        scores = np.asarray(logits(LLAMA, [whole[:-1]]))[0, len(prompt) - 1 :]
        assert scores.argmax(-1).tolist() == list(alone(index))


def test_c9_every_row_keeps_its_own_parameters():
    """Eight prompts with eight settings and lengths, each as beside one neighbour, also when others have finished.

    The neighbour asks for everything, so that one program serves all eight; two rows also run alone.
    """
    settings = [
        params(max_tokens=2),
        params(max_tokens=12, temperature=1.0, seed=1),
        params(max_tokens=9, temperature=2.0, top_k=1, seed=2),
        params(max_tokens=7, temperature=1.5, top_k=4, seed=3),
        params(max_tokens=11, temperature=1.0, top_p=0.5, seed=4),
        params(max_tokens=5, logit_bias={11: 100.0}),
        params(max_tokens=8, repetition_penalty=1.8, frequency_penalty=1.0),
        params(max_tokens=10, temperature=1.0, min_p=0.3, seed=5, stop_token_ids=[5, 6, 7, 8]),
    ]
    prompts = [*PROMPTS, *PROMPTS[:3]]
    together = tokens_of(prompts, settings)
    everything = params(temperature=1.0, top_k=9, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={3: 1.0})
    for prompt, setting, tokens in zip(prompts, settings, together, strict=True):
        assert tokens_of([prompt, PROMPTS[1]], [setting, everything])[0] == tokens
    for row in (1, 6):
        assert tokens_of([prompts[row]], settings[row])[0] == together[row]
    assert together[2] == alone(2)  # top_k=1 is greedy at any temperature
    assert together[5] == (11,) * 5
    assert len(set(together)) == 8


def test_c7_a_seeded_row_is_the_same_in_any_company():
    """Six arrangements: alone, first, last, beside greedy, seeded and unseeded rows."""
    seeded = params(temperature=1.2, seed=42, max_tokens=12)
    unseeded, greedy, other = params(temperature=1.2), params(), params(temperature=1.2, seed=43, max_tokens=12)
    prompt = PROMPTS[1]
    expected = tokens_of([prompt], seeded)[0]
    assert len(set(expected)) > 3  # noise differs from step to step
    arrangements = [[seeded, unseeded], [unseeded, seeded], [greedy, other, seeded], [seeded, greedy]]
    for arrangement in arrangements:
        place = arrangement.index(seeded)
        prompts = [PROMPTS[(0, 2, 3)[row]] for row in range(len(arrangement))]
        prompts[place] = prompt
        assert tokens_of(prompts, arrangement)[place] == expected
    first, second = tokens_of([prompt] * 2, [seeded, seeded])
    assert first == second == expected
    assert tokens_of([prompt], other)[0] != expected


def test_unseeded_rows_differ_from_each_other_and_from_call_to_call():
    options = params(temperature=1.5, max_tokens=12)
    drawn = {*tokens_of([PROMPTS[1]] * 4, options), *tokens_of([PROMPTS[1]] * 4, options)}
    assert len(drawn) == 8


def test_n_completions_differ_and_the_first_is_that_of_n_1():
    options = params(temperature=1.5, seed=9)
    [output] = generate(LLAMA, [PROMPTS[1]], dataclasses.replace(options, n=4))
    assert len({completion.token_ids for completion in output.completions}) == 4
    assert output.token_ids == tokens_of([PROMPTS[1]], options)[0]
    [again] = generate(LLAMA, [PROMPTS[1]], dataclasses.replace(options, n=4), max_batch_size=3)
    assert again == output


def test_g7_a_short_row_waits_for_a_long_one_s_prefill_unharmed(monkeypatch: pytest.MonkeyPatch):
    """Prompts of 4 and 100 tokens, prefill in chunks of 64: no token appears in between."""
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: Limits(64, 128, 4)))
    long = (CASE.tokens.ravel()[:100]).tolist()
    together = tokens_of([PROMPTS[0][:4], long], params())
    assert together == [tokens_of([PROMPTS[0][:4]], params())[0], tokens_of([long], params())[0]]
    deltas = [delta for delta in stream(LLAMA, [PROMPTS[0][:4], long], params()) if delta.prompt_index == 0]
    assert [token for delta in deltas for token in delta.token_ids] == list(together[0])


# --- Logprobs


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_e1_prompt_logprobs_are_those_of_transformers(name: str):
    case, model = families.BY_NAME[name], load_case(name)
    lengths = [5, 40, 1]
    prompts = [case.tokens[row, :length].tolist() for row, length in enumerate(lengths)]
    expected = log_softmax(case.logits)
    for row, output in enumerate(generate(model, prompts, params(max_tokens=1, prompt_logprobs=3, logprobs=3))):
        assert output.prompt_logprobs is not None and output.logprobs is not None
        assert len(output.prompt_logprobs) == lengths[row]
        assert output.prompt_logprobs[0] is None
        for place, table in enumerate(output.prompt_logprobs[1:]):
            assert table is not None
            check_table(table, case.tokens[row, place + 1], expected[row, place], 3)
        [table] = output.logprobs  # the last prefill logits belong to the first new token
        check_table(table, output.token_ids[0], expected[row, lengths[row] - 1], 3)


def check_table(table: dict, token: int, reference: np.ndarray, count: int) -> None:
    """The token first, then the most probable; as many entries as were asked for, or one more."""
    assert next(iter(table)) == token
    rank = 1 + int((reference > reference[token]).sum())
    assert len(table) == (count if rank <= count else count + 1)
    assert table[token].rank == rank
    for listed, entry in table.items():
        assert entry.logprob == pytest.approx(reference[listed], abs=1e-4)
    best = np.argsort(-reference, kind="stable")[:count]
    assert {*best.tolist(), int(token)} == set(table)


def test_e1_prefill_in_pieces_gives_the_same_scores_and_tokens(monkeypatch: pytest.MonkeyPatch):
    """Prompts that end one before, at and one after the edge of a piece of 8, four rows a call."""
    prompts = [CASE.tokens[row % 3, :length].tolist() for row, length in enumerate((7, 8, 9, 16, 17, 33, 40, 1))]
    options = params(max_tokens=5, prompt_logprobs=2, logprobs=1)
    whole = generate(LLAMA, prompts, options)
    monkeypatch.setattr(jaxinfer.batch, "MIN_PREFILL", 8)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: Limits(8, 32, 4)))
    pieces = generate(LLAMA, prompts, options)
    for one, other in zip(whole, pieces, strict=True):
        assert other.token_ids == one.token_ids
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert one.logprobs is not None and other.logprobs is not None
        for a, b in zip(
            (*one.prompt_logprobs[1:], *one.logprobs), (*other.prompt_logprobs[1:], *other.logprobs), strict=True
        ):
            assert a is not None and b is not None and a.keys() == b.keys()
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_e3_logprobs_are_raw_whatever_the_temperature_and_filters(temperature: float):
    options = params(temperature=temperature, top_k=50, seed=5, max_tokens=6, logprobs=2, logit_bias={9: 3.0})
    [output] = generate(LLAMA, [PROMPTS[0]], options)
    whole = [*PROMPTS[0], *output.token_ids]
    expected = log_softmax(np.asarray(logits(LLAMA, [whole[:-1]]))[0, len(PROMPTS[0]) - 1 :])
    assert output.logprobs is not None
    for step, (token, table) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        check_table(table, token, expected[step], 2)
    total = output.completions[0].cumulative_logprob
    assert total == pytest.approx(sum(expected[step, token] for step, token in enumerate(output.token_ids)), abs=1e-3)


def test_e3_counts_of_listed_tokens_and_rows_that_ask_for_none():
    options = [params(logprobs=count, prompt_logprobs=count, max_tokens=3) for count in (0, 1, 5, None)]
    outputs = generate(LLAMA, [PROMPTS[0]] * 4, options)
    assert [output.token_ids for output in outputs] == [outputs[0].token_ids] * 4
    for output, count in zip(outputs[:3], (0, 1, 5), strict=True):
        assert output.logprobs is not None and output.prompt_logprobs is not None
        assert [len(table) for table in output.logprobs] == [max(1, count)] * 3  # greedy tokens are the best
        assert all(len(table) in (count, count + 1) for table in output.prompt_logprobs[1:] if table is not None)
    assert outputs[3].logprobs is None and outputs[3].prompt_logprobs is None
    assert outputs[3].completions[0].cumulative_logprob is None
    everything = [dataclasses.asdict(output) for output in outputs]
    json.dumps(everything, allow_nan=False)


def test_logprobs_of_a_stream_are_those_of_the_result():
    options = params(logprobs=2, max_tokens=10)
    [output] = generate(LLAMA, [PROMPTS[1]], options)
    deltas = list(stream(LLAMA, [PROMPTS[1]], options))
    assert [len(delta.logprobs or ()) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
    assert tuple(table for delta in deltas for table in delta.logprobs or ()) == output.logprobs


def test_cumulative_logprob_is_none_without_logprobs():
    assert Completion((1,), None, "length").cumulative_logprob is None


# --- logits


def test_logits_are_those_of_transformers_for_any_rows_and_lengths():
    for rows, length in ((3, 40), (1, 1), (2, 33)):
        actual = np.asarray(logits(LLAMA, CASE.tokens[:rows, :length]))
        np.testing.assert_allclose(actual, CASE.logits[:rows, :length], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3]], "rows of different lengths"),
        ([], "expected integers [batch, tokens], not empty"),
        ([[]], "expected integers [batch, tokens], not empty"),
        (np.array([[1.5]]), "float64[1, 1]"),
        ([[96]], "prompt 0 holds token id 96; this model's ids are 0 to 95"),
        ([[1] * 129], "prompt 0 has 129 tokens, but the context of"),
    ],
)
def test_logits_refuse_bad_ids(ids: list | np.ndarray, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        logits(LLAMA, ids)


# --- Batches that fit


def test_a_request_that_does_not_fit_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch):
    """A row of up to 512 tokens, with the scratch page, takes 33 pages of 16 tokens of 256 bytes: 135,168 bytes."""
    monkeypatch.setattr(jaxinfer.generation, "_free_bytes", lambda: 135_167)
    model = dataclasses.replace(LLAMA, config=WIDE)
    message = r"prompt 1 with max_tokens=300 needs 135 kB of KV cache and 135 kB are free; lower max_tokens"
    for function in (generate, stream):
        with pytest.raises(ValueError, match=message):
            function(model, [[1], [1] * 2], [params(max_tokens=9), params(max_tokens=300)])


WIDE = dataclasses.replace(LLAMA.config, max_position_embeddings=4096)


def test_what_does_not_fit_at_once_runs_in_turn(monkeypatch: pytest.MonkeyPatch):
    """Room for two rows. No cache is alive any more when the next is allocated."""
    expected = [alone(index) for index in range(5)]
    monkeypatch.setattr(jaxinfer.generation, "_free_bytes", lambda: 33 * 16 * 256)
    create = Batch.__init__
    pools: list[weakref.ref] = []
    sizes = []

    def watched(self: Batch, model: Model, requests: Sequence[Request], limits: Limits) -> None:
        assert [pool for pool in pools if pool() is not None] == []
        create(self, model, requests, limits)
        sizes.append(self.size)
        pools.append(weakref.ref(self.cache.keys[0]))

    monkeypatch.setattr(Batch, "__init__", watched)
    assert tokens_of(PROMPTS, params()) == expected
    assert sizes == [2, 2, 1]
    pools.clear()
    list(stream(LLAMA, PROMPTS, params()))
    assert sizes == [2, 2, 1] * 2


def test_free_memory_is_that_of_the_system():
    """Half of what is available; the other half is for what runs beside the cache."""
    free = jaxinfer.generation._free_bytes()
    assert 10**6 < free < 2**50
    if jax.default_backend() == "cpu":
        assert free == pytest.approx(jaxinfer.memory.free_host_bytes() / 2, rel=0.2)


# --- Plans


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    chunk=st.sampled_from([64, 512, 2048]),
    calls=st.sampled_from([1, 2, 8, 10]),
)
def test_every_row_is_prefilled_once_in_calls_of_bounded_size(lengths: list[int], chunk: int, calls: int):
    limits = Limits(prefill_chunk=chunk, prefill_tokens=chunk * calls, decode_chunk=4)
    groups = plan_prefill(lengths, limits)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(lengths)))
    for group in groups:
        assert group.chunk % 64 == 0 and group.chunk <= chunk
        assert bucket(len(group.rows)) * group.chunk <= limits.prefill_tokens
        for row in group.rows:
            # Not more than half of a call is padding, but for the last call of a long prompt and the shortest bucket.
            assert lengths[row] > group.chunk // 2 or group.chunk == 64


@given(value=st.integers(0, 10**6), smallest=st.sampled_from([1, 16, 64]))
def test_buckets_are_powers_of_two_times_the_smallest(value: int, smallest: int):
    size = bucket(value, smallest)
    assert size >= value and math.log2(size // smallest).is_integer()
    assert size == smallest or size // 2 < value


@pytest.mark.parametrize(("tokens", "pages"), [(1, 16), (256, 16), (257, 32), (512, 32), (513, 64), (4096, 256)])
def test_widths_of_page_tables(tokens: int, pages: int):
    assert pages_for(tokens) == pages
