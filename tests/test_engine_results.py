"""The engine says what `ji.generate` says: in any company and order, after preemptions, with and without cached
prefixes."""

import dataclasses
import random
from typing import Any

import engine_cases as cases
import families
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.generation import generate
from jaxinfer.model import Model, load
from jaxinfer.outputs import Delta
from jaxinfer.params import random_params
from jaxinfer.scoring import score

PROMPTS = [ids for ids, _ in cases.REQUESTS]
PARAMS = [row for _, row in cases.REQUESTS]


def check_all(engine: Engine) -> None:
    for output, reference in zip(engine.generate(PROMPTS, PARAMS), cases.expected(), strict=True):
        cases.assert_same(output, reference)
    metrics = engine.metrics()
    assert (metrics.waiting, metrics.prefilling, metrics.decoding, metrics.pages_owned) == (0, 0, 0, 0)


def test_generate_twice_with_preemptions_and_cached_prefixes() -> None:
    with cases.engine() as engine:
        check_all(engine)
        first = engine.metrics()
        assert first.preemptions > 0, "the pool is too large for this test"
        check_all(engine)
        assert engine.metrics().prefix_hit_rate > first.prefix_hit_rate > 0
        # Whoever comes alone gets the same.
        for index in (1, 4, 8, 12):
            (alone,) = engine.generate([PROMPTS[index]], PARAMS[index])
            cases.assert_same(alone, cases.expected()[index])


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache": False, "policy": "mixed"},
        {"decode_order": "arrival", "decode_stall_tokens": 8},
        {"max_decode_batch": 2, "max_sequences": 4},
        {"decode_order": "longest", "max_decode_batch": 2, "max_sequences": 4},
        {"prefill_tile": 4, "prefill_lengths": (8, 24)},
    ],
    ids=str,
)
def test_no_rule_of_the_scheduler_changes_a_token(changes: dict) -> None:
    with cases.engine(**changes) as engine:
        check_all(engine)


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals(seed: int) -> None:
    """Requests submitted between rounds, in any order and with repeats: the same deltas when joined."""
    rng = random.Random(seed)
    with cases.engine() as engine:
        arrivals = rng.choices(range(len(PROMPTS)), k=20)
        waiting, said = list(enumerate(arrivals)), {}
        while waiting or engine.has_work:
            for _ in range(min(rng.choice([0, 0, 1, 4]), len(waiting))):
                number, index = waiting.pop(0)
                engine.submit(PROMPTS[index], PARAMS[index], request_id=str(number))
            for delta in engine.step():
                said.setdefault((delta.request_id, delta.sample_index), []).append(delta)
        for number, index in enumerate(arrivals):
            for sample, completion in enumerate(cases.expected()[index].completions):
                check_deltas(said.pop((str(number), sample)), completion)
        assert not said


def check_deltas(deltas: list[Delta], completion) -> None:
    assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)
    tables = None if completion.logprobs is None else sum((delta.logprobs or () for delta in deltas), ())
    cases.assert_same_tables(tables, completion.logprobs)


def test_g7_short_request_beside_a_long_one_s_chunked_prefill() -> None:
    """Trap G7 with prompts of 4 and 60 and pieces of 16: as many tokens as alone, and no token 0 in between."""
    short, row = cases.REQUESTS[14]
    long, expected = cases.prompt(60, 11), cases.expected()[14]
    with cases.engine(max_prefill_tokens=16) as engine:
        beside, _ = engine.generate([short, long], [row, cases.params(max_tokens=4)])
        cases.assert_same(beside, expected)
        engine.submit(short, row)
        events = engine.step()
        engine.submit(long, cases.params(max_tokens=4))
        while engine.has_work:
            events += engine.step()
        mine = [delta for delta in events if delta.request_id == "request-2"]
        assert sum((delta.token_ids for delta in mine), ()) == expected.token_ids


def test_g7_and_k3_with_the_lengths_reported() -> None:
    """Trap G7 with prompts of 4 and 100 and pieces of 8; trap K3 with pages of 16, pieces of 32 and a prompt of 100:
    cold, again, a third time and preempted."""
    short, row = cases.REQUESTS[14]
    shape = {"max_context": 112, "num_pages": 65, "prefill_rows": (1,), "sampling": (row,)}
    with cases.engine(prefill_lengths=(8,), max_prefill_tokens=8, decode_stall_tokens=8, **shape) as engine:
        beside, _ = engine.generate([short, cases.prompt(100, 11)], [row, cases.params(max_tokens=4)])
        cases.assert_same(beside, cases.expected()[14])
    model = dataclasses.replace(cases.model(), kv_dtype=jnp.dtype("int8"))
    row, first, second = cases.params(max_tokens=20), cases.prompt(100), cases.prompt(100, 3)
    expected = [output.token_ids for output in generate(model, [first, second], row)]
    shape |= {"page_size": 16, "num_pages": 16, "prefill_lengths": (32,), "max_context": 120}
    with cases.engine(model, **shape) as engine:
        assert [engine.generate([first], row)[0].token_ids for _ in range(3)] == [expected[0]] * 3
        assert engine.metrics().prefix_hit_rate == pytest.approx(2 * 96 / 300)
        assert [output.token_ids for output in engine.generate([second, first], row)] == expected[::-1]
        assert engine.metrics().preemptions > 0


@pytest.mark.parametrize("length", [4, 8, 9])
def test_g1_prompts_that_are_cached_to_the_end(length: int) -> None:
    """Trap G1, page 4: lengths 4, 8 and 9, cold, again, a third time, eight at once, and without a cache."""
    ids, row = cases.prompt(length, 2), cases.params(max_tokens=6)
    with cases.engine() as engine, cases.engine(prefix_cache=False) as without:
        (reference,) = without.generate([ids], row)
        for copies in (1, 1, 1, 8):
            for output in engine.generate([ids] * copies, row):
                cases.assert_same(output, reference)
        assert engine.metrics().prefix_hit_rate == pytest.approx(10 * ((length - 1) // 4 * 4) / (11 * length))
        assert without.metrics().prefix_hit_rate == 0


def test_prompt_logprobs_of_a_run_that_ended_before_its_first_token() -> None:
    """The piece that is scored has 16 of 17 tokens; between it and the last one the request loses its pages to an older
    one that grows, and is computed again: each token is scored once all the same."""
    ids, row = cases.prompt(17, 3), cases.params(max_tokens=4, prompt_logprobs=2)
    (reference,) = generate(cases.model(), [ids], row)
    with cases.engine(num_pages=10, max_context=36, prefix_cache=False) as engine:
        engine.submit(cases.prompt(4, 1), cases.params(max_tokens=16))
        for _ in range(3):
            engine.step()
        engine.submit(ids, row, request_id="scored")
        request = engine._jobs["scored"].requests[0]
        before_last = 0
        while engine.has_work:
            engine.step()
            if engine.metrics().preemptions and not before_last:
                before_last = len(request.prompt_tables)
        assert before_last == 16, "it was preempted at another time"
        cases.assert_same_tables(request.prompt_logprobs(), reference.prompt_logprobs)


def test_rope_that_depends_on_the_length() -> None:
    """Cached keys of such a RoPE serve requests of their own length only."""
    case = families.BY_NAME["llama_rope_dynamic"]
    model = load(case.folder, dtype=jnp.float32, progress=False)
    prompt = case.prompt.tolist()
    rows = [cases.params(max_tokens=len(case.continuation)), cases.params(max_tokens=3)]
    shape = {"max_context": None, "num_pages": 65, "prefill_rows": (1,), "sampling": (rows[0],)}
    with cases.engine(model, **shape) as engine, cases.engine(model, prefix_cache=False, **shape) as without:
        for row in (rows[0], rows[1], rows[0]):
            (output,) = engine.generate([prompt], row)
            cases.assert_same(output, without.generate([prompt], row)[0])
        assert output.token_ids == tuple(case.continuation.tolist())
        # The second has another length; the third finds the pages of the first.
        share = ((len(prompt) - 1) // 4 * 4) / (3 * len(prompt))
        assert engine.metrics().prefix_hit_rate == pytest.approx(share)


def test_k3_int8_pages_with_pieces_and_prefixes() -> None:
    """Trap K3: three runs of one prompt over int8 pages agree, in pieces of 16, whole, with a prefix cached, and when
    it is preempted by another."""
    model = dataclasses.replace(cases.model(), kv_dtype=jnp.dtype("int8"))
    row = cases.params(max_tokens=10)
    shape = {"prefill_rows": (1,), "sampling": (row,)}
    said = []
    for lengths in ((16,), (64,)):
        with cases.engine(model, prefill_lengths=lengths, max_prefill_tokens=64, **shape) as engine:
            said += [engine.generate([cases.prompt(50)], row)[0].token_ids for _ in range(3)]
            assert engine.metrics().prefix_hit_rate == pytest.approx(2 * 48 / 150)
            pair = [cases.prompt(44), cases.prompt(44, 3)]
            together = [output.token_ids for output in engine.generate(pair, row)]
            assert engine.metrics().preemptions > 0
            assert together == [engine.generate([ids], row)[0].token_ids for ids in pair]
    assert len(set(said)) == 1


def test_unseeded_requests_differ() -> None:
    with cases.engine() as engine:
        outputs = engine.generate([cases.prompt(9)] * 4, cases.params(temperature=1.5, max_tokens=12))
        assert len({output.token_ids for output in outputs}) == 4


def test_more_completions_than_slots() -> None:
    """n=9 with 4 slots: the prompt is computed once, then shared as far as there is room."""
    ids, row = cases.REQUESTS[4]
    with cases.engine() as engine:
        (output,) = engine.generate([ids], dataclasses.replace(row, n=9))
        assert output.completions[:3] == cases.expected()[4].completions
        assert len({completion.token_ids for completion in output.completions}) == 9
        # 30 tokens for the first; those after the fourth find all but the last 2 in the cache.
        assert 30 <= engine.metrics().prompt_tokens <= 30 + 5 * 2


def random_model() -> Model:
    """Of a shape that the kernels take."""
    layers = (LayerConfig(RopeConfig("default", 1e4, 64)),) * 2
    config = ModelConfig("llama", 512, 500, 256, 512, 8, 2, 64, layers, 1024, 1e-5, attention_scale=0.125)
    return Model(config, random_params(config, jnp.bfloat16, 0), None, jnp.dtype(jnp.bfloat16), "random")


@pytest.mark.gpu
def test_gpu_scores_are_those_of_prompt_logprobs(rng: np.random.Generator) -> None:
    """The kernel for prompts reads from the pages what its own call has written, also of rows that share no prefix."""
    model = random_model()
    begun = rng.integers(0, 500, 90).tolist()
    rows = [rng.integers(0, 500, 60).tolist(), rng.integers(0, 500, 182).tolist()]
    rows += [begun + rng.integers(0, 500, more).tolist() for more in (20, 45)]
    cuts = [1, 100, 90, 90]
    prompts = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    continuations = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
    shape = {"num_pages": 257, "page_size": 16, "max_context": None, "max_prefill_tokens": 512}
    with cases.engine(model, prefill_lengths=(512,), prefill_rows=(1,), **shape) as engine:
        found = [engine.score(prompts, continuations, progress=False)]
    found.append(score(model, prompts, continuations, progress=False))
    outputs = generate(model, rows, cases.params(max_tokens=1, prompt_logprobs=1), progress=False)
    for place, (output, cut) in enumerate(zip(outputs, cuts, strict=True)):
        tables = (output.prompt_logprobs or ())[cut:]
        wanted = np.array(
            [(table or {})[token].logprob for table, token in zip(tables, rows[place][cut:], strict=True)]
        )
        assert wanted.std() > 0.1  # scores of other places would be told
        for scores in found:
            error = np.abs(np.array(scores[place].token_logprobs) - wanted)
            assert error.mean() < 0.1 * wanted.std(), place


@pytest.mark.gpu
def test_gpu_prompts_laid_into_calls_row_by_row() -> None:
    """The kernel for prompts, which reads what other rows of its own call have written: the logits of whole prompts."""
    model = random_model()
    row = cases.params(max_tokens=1, logprobs=20)
    prompts = [
        [(7 * place + number) % 500 for place in range(length)] for number, length in enumerate((5, 70, 33, 300))
    ]

    def tables(**options: Any) -> list[dict[int, float]]:
        shape = {"num_pages": 257, "page_size": 16, "max_context": None, "max_prefill_tokens": 512}
        with cases.engine(
            model, sampling=(row,), prefill_lengths=(512,), prefill_rows=(1,), **shape, **options
        ) as engine:
            found = [output.completions[0].logprobs or () for output in engine.generate(prompts, row)]
        return [{token: scored.logprob for token, scored in table.items()} for (table,) in found]

    for mine, whole in zip(tables(prefill_tile=32), tables(), strict=True):
        both = mine.keys() & whole.keys()
        assert len(both) > 10
        assert max(abs(mine[token] - whole[token]) for token in both) < 0.05
