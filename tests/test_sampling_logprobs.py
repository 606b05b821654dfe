"""Log-probabilities: raw values, ranks, the shift of prompts, and tables that JSON can hold."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_reference import log_softmax

from jaxinfer.sampling import sample
from jaxinfer.sampling_logprobs import Logprob, logprob_tables, token_logprobs
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import SamplerVariant, build_sampling_state

score = jax.jit(token_logprobs, static_argnums=(2, 3))
step = jax.jit(sample, static_argnums=2)


def as_json(tables: list[dict[int, Logprob]]) -> str:
    plain = [{token: dataclasses.asdict(entry) for token, entry in table.items()} for table in tables]
    return json.dumps(plain, allow_nan=False)


def test_values_and_ranks_by_hand():
    # Probabilities .5, .25, .125, .125: two tokens are more probable than either of the last two.
    logits = np.tile(np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32), (4, 1))
    scores = score(logits, np.arange(4, dtype=np.int32), 3, 4)
    np.testing.assert_allclose(np.exp(scores.logprob), [0.5, 0.25, 0.125, 0.125], rtol=1e-6)
    np.testing.assert_array_equal(scores.rank, [1, 2, 3, 3])
    np.testing.assert_array_equal(scores.top_ids, [[0, 1, 2]] * 4)
    tables = logprob_tables([0, 1, 2, 3], scores, 3)
    assert [list(table) for table in tables] == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1, 2]]
    assert [entry.rank for entry in tables[3].values()] == [3, 1, 2, 3]


def test_e1_prompt_logprobs_are_shifted_by_one(rng):
    prompt = rng.integers(0, 50, 40)
    logits = rng.normal(size=(40, 50)).astype(np.float32) * 4
    expected = [log_softmax(logits[t - 1])[prompt[t]] for t in range(1, 40)]

    def tables_of_chunks(chunk: int) -> list:
        tables: list = [None]
        for start in range(0, 40, chunk):
            stop = min(start + chunk, 39)  # the last position's logits belong to the first generated token
            following = np.zeros(chunk, np.int32)
            following[: stop - start] = prompt[start + 1 : stop + 1]
            rows = np.zeros((chunk, 50), np.float32)
            rows[: min(chunk, 40 - start)] = logits[start : start + chunk]
            tables += logprob_tables(prompt[start + 1 : stop + 1].tolist(), score(rows, following, 2, 50), 2)
        return tables

    for chunk in (8, 40):
        tables = tables_of_chunks(chunk)
        assert len(tables) == 40
        got = [table[int(token)].logprob for table, token in zip(tables[1:], prompt[1:], strict=True)]
        np.testing.assert_allclose(got, expected, atol=1e-5)
        assert all(2 <= len(table) <= 3 for table in tables[1:])


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_e3_generated_logprobs_are_raw_and_have_k_or_k_plus_one_entries(rng, num_logprobs):
    logits = np.tile(rng.normal(size=(1, 40)).astype(np.float32) * 2, (100, 1))
    widest = SamplerVariant(40, False, True, True, True, True, True, True, num_logprobs)  # one program for all
    expected = log_softmax(logits[0])
    order = np.argsort(-logits[0])
    for options in (
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_p": 0.5, "min_p": 0.1},
        {"logit_bias": {int(order[-1]): 30.0}},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ):
        params = [SamplingParams(logprobs=num_logprobs, **options)] * 100
        state, variant = build_sampling_state(
            params, [[1]] * 100, vocab_size=40, num_tokens=40, eos_token_ids=[], seeds=range(100), variant=widest
        )
        output, _ = step(logits, state, variant, np.zeros(100, np.int32))
        tokens = np.asarray(output.tokens).tolist()
        tables = logprob_tables(tokens, output.logprobs, num_logprobs)
        assert len(tables) == 100
        for token, table in zip(tokens, tables, strict=True):
            rank = 1 + int(np.sum(logits[0] > logits[0, token]))
            assert table[token].logprob == pytest.approx(expected[token], abs=1e-5)
            assert table[token].rank == rank
            assert len(table) == (num_logprobs if rank <= num_logprobs else num_logprobs + 1)
            assert set(table) == {token, *order[:num_logprobs].tolist()}
        as_json(tables)


def test_rows_asking_for_fewer_logprobs_get_fewer(rng):
    logits = rng.normal(size=(3, 20)).astype(np.float32)
    params = [SamplingParams(temperature=0.0, logprobs=count) for count in (None, 0, 4)]
    state, variant = build_sampling_state(params, [[1]] * 3, vocab_size=20, num_tokens=20, eos_token_ids=[])
    assert variant.num_logprobs == 4
    output, _ = step(logits, state, variant, np.zeros(3, np.int32))
    for row, count in ((1, 0), (2, 4)):
        scores = jax.tree.map(lambda array, row=row: array[row : row + 1], output.logprobs)
        assert len(logprob_tables([int(output.tokens[row])], scores, count)[0]) == max(1, count)


def test_no_logprobs_are_computed_unless_asked_for():
    state, variant = build_sampling_state([SamplingParams()], [[1]], vocab_size=8, num_tokens=8, eos_token_ids=[])
    output, _ = step(np.zeros((1, 8), np.float32), state, variant, np.zeros(1, np.int32))
    assert output.logprobs is None


def test_padding_ids_count_in_the_normaliser_but_are_never_listed():
    logits = np.array([[1.0, 2.0, 0.0, 9.0, 9.0]], np.float32)  # ids 3 and 4 are padding
    scores = score(logits, np.array([1], np.int32), 3, 3)
    assert sorted(np.asarray(scores.top_ids)[0].tolist()) == [0, 1, 2]
    assert int(scores.rank[0]) == 1
    np.testing.assert_allclose(scores.logprob, [log_softmax(logits[0])[1]], rtol=1e-5)


def test_tokens_of_probability_zero_stay_out_of_tables_and_json():
    logits = np.array([[0.0, -np.inf, -np.inf, 1.0]], np.float32)
    tables = logprob_tables([1], score(logits, np.array([1], np.int32), 4, 4), 4)
    assert tables[0][1] == Logprob(-9999.0, 3)
    assert set(tables[0]) == {0, 1, 3}
    as_json(tables)


def test_stacked_steps_keep_their_shape():
    """A decode loop stacks the scores of its steps on a leading axis."""
    scores = functools.partial(token_logprobs, num_logprobs=2, num_tokens=6)
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3, 6)).astype(np.float32))
    _, stacked = jax.lax.scan(lambda carry, row: (carry, scores(row, jnp.zeros(3, jnp.int32))), 0, logits)
    assert (stacked.logprob.shape, stacked.top_ids.shape) == ((4, 3), (4, 3, 2))
