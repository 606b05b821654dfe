"""Generation where every token is known beforehand: stopping, lengths, text, failures, streams (`tests/markov.py`)."""

import asyncio
import dataclasses
import math
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest
from markov import EOS, chain

import jaxinfer.batch
from jaxinfer.batch import Batch, Limits
from jaxinfer.generation import generate, logits, stream
from jaxinfer.model import Model, load
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.ngram import NgramDraft

LADDER = markov.model(chain(*range(62), EOS))
"""Counts: after token i comes i + 1, after 61 end of text."""


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 8} | fields)


def one(model: Model, prompt: str | Sequence[int], **fields: object) -> RequestOutput:
    """The greedy completion of one prompt, whose stream is checked to say the same."""
    params = greedy(**fields)
    [output] = generate(model, [prompt], params)
    deltas = list(stream(model, [prompt], params))
    assert [token for delta in deltas for token in delta.token_ids] == list(output.token_ids)
    if model.tokenizer is not None:
        assert "".join(delta.text for delta in deltas) == output.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (output.finish_reason, output.stop_reason)
    return output


# --- What is said


def test_the_forced_sequence_comes_out():
    output = one(LADDER, [5], max_tokens=7)
    assert output.token_ids == (6, 7, 8, 9, 10, 11, 12)
    assert output.text == " w6 w7 w8 w9 w10 w11 w12"
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.prompt_token_ids == (5,)


def test_a_saved_folder_says_the_same_from_text(tmp_path):
    model = load(markov.save(tmp_path / "model", chain(0, 1, 2, 3, EOS)), progress=False)
    output = one(model, "A")
    assert output.token_ids == (1, 2, 3, EOS)
    assert output.text == "BCDEFG"
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_probability_of_the_next_token_by_hand():
    """exp(8) / (exp(8) + 63) = 0.97930; the other 63 share the rest evenly."""
    model = markov.model(chain(0, 1, 2), scale=1.0)
    [output] = generate(model, [[0]], greedy(max_tokens=1, logprobs=2))
    assert output.logprobs is not None
    table = output.logprobs[0]
    assert table[1].logprob == pytest.approx(-0.020916, abs=1e-5)
    assert table[0].logprob == pytest.approx(-8.020916, abs=1e-5)
    assert (table[1].rank, table[0].rank) == (1, 2)


# --- Stopping


@pytest.mark.parametrize("place", range(1, 10))
def test_end_of_text_at_every_place_of_a_chunk(place: int):
    model = markov.model(chain(*range(place), EOS))
    output = one(model, [0], max_tokens=20)
    assert output.token_ids == (*range(1, place), EOS)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == "".join(markov.WORDS[1:place])


def test_ignore_eos_goes_on():
    model = markov.model(chain(0, 1, EOS, 2, 3))
    assert one(model, [0], max_tokens=4, ignore_eos=True).token_ids == (1, EOS, 2, 3)
    assert one(model, [0], max_tokens=4).token_ids == (1, EOS)


def test_d3_a_stop_on_the_last_allowed_token_is_a_stop():
    output = one(LADDER, [50], max_tokens=5, stop_token_ids=[55])
    assert output.token_ids == (51, 52, 53, 54, 55)
    assert (output.finish_reason, output.stop_reason) == ("stop", 55)
    assert output.text == " w51 w52 w53 w54"
    output = one(LADDER, [58], max_tokens=4)
    assert output.token_ids == (59, 60, 61, EOS)
    assert output.finish_reason == "stop"
    output = one(LADDER, [50], max_tokens=5, stop="w55")
    assert len(output.token_ids) == 5
    assert (output.finish_reason, output.stop_reason) == ("stop", "w55")
    assert output.text == " w51 w52 w53 w54 "


@pytest.mark.parametrize("token", range(11, 21))
def test_a_stop_token_at_every_place_of_a_chunk(token: int):
    output = one(LADDER, [10], max_tokens=15, stop_token_ids=[token, 5])
    assert output.token_ids == tuple(range(11, token + 1))
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


@pytest.mark.parametrize(
    ("stop", "matched", "text", "tokens"),
    [
        (["DE"], "DE", "ABC", 3),  # inside a token
        (["CDEFG"], "CDEFG", "AB", 4),  # over three tokens
        (["BCD"], "BCD", "A", 3),
        (["F", "EF"], "EF", "ABCD", 3),  # both end at one character: the longer
        (["G", "CD"], "CD", "AB", 3),  # the first match in the text, not in the list
        (["G"], "G", "ABCDEF", 4),
        (["never"], None, "ABCDEFG", 5),
    ],
)
def test_d1_stop_strings_inside_and_across_tokens(stop: list[str], matched: str | None, text: str, tokens: int):
    model = markov.model(chain(4, 0, 1, 2, 3, EOS))
    output = one(model, [4], stop=stop)
    assert (output.text, len(output.token_ids)) == (text, tokens)
    assert (output.finish_reason, output.stop_reason) == ("stop", matched)


def test_d1_the_stop_string_can_stay_in_the_text():
    model = markov.model(chain(4, 0, 1, 2, 3, EOS))
    assert one(model, [4], stop="DE", include_stop_str_in_output=True).text == "ABCDE"


def test_d1_no_delta_holds_part_of_a_stop_string_that_matched():
    """Tokens come in chunks of 1, 4, 4: "BC" is the last of its chunk, and waits for the next."""
    model = markov.model(chain(4, 10, 11, 12, 13, 1, 2, 3, EOS))
    deltas = list(stream(model, [[4]], greedy(max_tokens=12, stop="CDEFG")))
    assert [delta.text for delta in deltas] == [" w10", " w11 w12 w13B", ""]


def test_d1_the_prompt_is_not_searched():
    model = markov.model(chain(0, 1, 2, 3, EOS))
    assert one(model, [2, 3, 0], stop=["FGA", "AB", "G"]).text == "BCDEF"


def test_d1_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop"):
        greedy(stop=[""])


@pytest.mark.parametrize(
    ("minimum", "expected"),
    [(0, (1, 2, EOS)), (2, (1, 2, EOS)), (3, (1, 2, 0, 1, 2, EOS)), (5, (1, 2, 0, 1, 2, EOS)), (6, (1, 2, 0, 1, 2, 0))],
)
def test_min_tokens_forbids_the_end_until_then(minimum: int, expected: tuple[int, ...]):
    """After token 2 the end is most probable; where it is forbidden, token 0, the lowest id among equals."""
    model = markov.model({0: 1, 1: 2, 2: EOS}, scale=1.0)
    assert one(model, [0], max_tokens=6, min_tokens=minimum).token_ids == expected


def test_min_tokens_holds_for_stop_strings_and_stop_ids():
    model = markov.model(chain(4, 0, 1, 2, 3, 10, 0))
    output = one(model, [4], max_tokens=10, min_tokens=4, stop="BC")
    assert output.token_ids == (0, 1, 2, 3, 10, 0, 1)
    assert output.text == "ABCDEFG w10A"
    # 11 is forbidden as the first token, so 0 comes, and 0 leads to 14.
    output = one(markov.model(chain(10, 11) | chain(0, 14)), [10], min_tokens=1, stop_token_ids=[11, 14])
    assert output.token_ids == (0, 14)
    assert output.stop_reason == 14


# --- Lengths at the end of the context


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "generated"),
    [
        (63, 1, 1),
        (63, 2, 2),
        (63, 3, 2),
        (64, 1, 1),
        (64, 2, 1),
        (1, 63, 63),
        (1, 64, 64),
        (1, 1000, 64),
        (1, None, 64),
    ],
)
def test_f3_lengths_at_the_end_of_the_context(prompt_length: int, max_tokens: int | None, generated: int):
    """The context holds 64 tokens; the last new one needs no place in it."""
    cycle = {token: (token + 1) % 60 for token in range(60)}
    output = one(markov.model(cycle), [token % 60 for token in range(prompt_length)], max_tokens=max_tokens)
    assert output.token_ids == tuple((prompt_length + step) % 60 for step in range(generated))
    assert output.finish_reason == "length"


def test_f3_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"prompt 1 has 65 tokens, but the context of markov is 64; shorten it"):
        generate(LADDER, [[1], [1] * 65], greedy())


def test_f3_no_tokens_asked_for_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        greedy(max_tokens=0)


def test_rows_of_one_batch_end_at_their_own_lengths():
    lengths = [1, 2, 4, 5, 6, 9, 13]
    prompts = [[10] * (1 + row) for row in range(len(lengths))]
    outputs = generate(LADDER, prompts, [greedy(max_tokens=length) for length in lengths])
    assert [len(output.token_ids) for output in outputs] == lengths
    assert all(output.token_ids == tuple(range(11, 11 + n)) for output, n in zip(outputs, lengths, strict=True))


# --- Text


def test_a5_nothing_of_the_prompt_leaks_into_the_text():
    """The prompt ends in the first byte of a character; the model supplies the second, then text."""
    tokenizer = markov.byte_tokenizer([b"Hello world ", b"\xc3", b"\xa9", b"t", b"e", b"\xe2\x82", b"\xac"])
    model = markov.model(chain(1, 2, 3, 5, 6, 4, EOS), tokenizer=tokenizer)
    output = one(model, [0, 1])
    assert output.text == "\ufffdt€e"  # the second half of a character whose first is the prompt's; the rest whole


def test_a_character_cut_off_by_the_last_token_is_marked():
    tokenizer = markov.byte_tokenizer([b"a", b"b", b"\xe2\x82", b"\xac"])
    model = markov.model(chain(0, 1, 2, 3, EOS), tokenizer=tokenizer)
    assert one(model, [0], max_tokens=2).text == "b\ufffd"
    assert one(model, [0], max_tokens=3).text == "b€"


def test_special_tokens_can_be_kept_in_the_text():
    model = markov.model(chain(0, 1, EOS, 2))
    kept = one(model, [0], max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert kept.text == "BC<eos>DEF"
    assert one(model, [0], max_tokens=3, ignore_eos=True).text == "BCDEF"


# --- A model without a tokenizer


def test_without_a_tokenizer_ids_go_in_and_come_out():
    model = markov.model(chain(0, 1, 2, 3, EOS), text=False)
    output = one(model, [0])
    assert output.token_ids == (1, 2, 3, EOS)
    assert output.text is None
    assert [delta.text for delta in stream(model, [[0]], greedy())] == [""] * 2


def test_without_a_tokenizer_text_is_refused():
    model = markov.model({}, text=False)
    with pytest.raises(ValueError, match="prompt 0 is text, but markov has no tokenizer; give token ids instead"):
        generate(model, ["A"], greedy())
    with pytest.raises(ValueError, match="stop strings need a tokenizer and markov has none; use stop_token_ids"):
        generate(model, [[0]], greedy(stop="A"))


# --- Bad input


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["A", ""], "prompt 1 is empty: '' gives no tokens"),
        ([[0], []], "prompt 1 is an empty list of token ids; give at least one"),
        ([[0], [1, 64]], "prompt 1 holds token id 64; this model's ids are 0 to 63"),
        ([[-1]], "prompt 0 holds token id -1; this model's ids are 0 to 63"),
        ([[True]], "prompt 0 holds True"),
    ],
)
def test_f1_bad_prompts_are_refused_before_anything_runs(prompts: list, message: str, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "run", lambda self: pytest.fail("a batch ran"))
        for function in (generate, stream):
            with pytest.raises(ValueError, match=message):
                function(LADDER, prompts, greedy())
    assert one(LADDER, [1], max_tokens=2).token_ids == (2, 3)


def test_f3_a_list_of_parameters_must_be_as_long_as_that_of_prompts():
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} sampling parameters for 2 prompts"):
            generate(LADDER, [[1], [2]], [greedy()] * count)


def test_bad_batch_sizes_are_refused_at_the_call():
    for function in (generate, stream):
        with pytest.raises(ValueError, match="max_batch_size=0"):
            function(LADDER, [[1]], greedy(), max_batch_size=0)


@pytest.mark.parametrize("field", [{"stop_token_ids": [64]}, {"logit_bias": {64: 1.0}}, {"logprobs": 65}])
def test_c9_parameters_that_do_not_fit_the_model_are_refused(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        generate(LADDER, [[1], [2]], [greedy(), greedy(**field)])
    assert one(LADDER, [1], max_tokens=2).token_ids == (2, 3)


def test_no_prompts_give_no_outputs():
    assert generate(LADDER, [], greedy()) == []
    assert list(stream(LADDER, [], greedy())) == []


def test_a_prompt_may_stand_alone():
    for prompt in ([5], (5,), np.array([5]), np.array([5], np.int32)):
        [output] = generate(LADDER, prompt, greedy(max_tokens=2))
        assert output.token_ids == (6, 7)
        assert output.prompt_token_ids == (5,)
    assert [output.token_ids for output in generate(LADDER, [np.array([5]), [7]], greedy(max_tokens=1))] == [(6,), (8,)]
    [output] = generate(LADDER, "A", greedy(max_tokens=1))
    assert output.token_ids == (1,)
    with pytest.raises(ValueError, match=r"prompt 0 holds .*1\.5"):
        generate(LADDER, [np.array([1.5])], greedy())


# --- K1: logits that are not finite


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k1_a_row_with_nan_ends_with_an_error_and_hurts_no_other(temperature: float):
    """Token 20 has a NaN embedding. Row 1 starts with it, row 2 runs into it after three tokens."""
    model = markov.with_nan_token(LADDER, 20)
    params = greedy(max_tokens=6, temperature=temperature, seed=1)
    outputs = generate(model, [[5], [20, 30], [17], [40, 41, 42]], params)
    assert outputs[0].token_ids == (6, 7, 8, 9, 10, 11)
    assert outputs[3].token_ids == (43, 44, 45, 46, 47, 48)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert outputs[1].token_ids == ()
    assert outputs[1].text == ""
    assert outputs[2].token_ids == (18, 19, 20)
    assert outputs[2].text == " w18 w19 w20"
    assert "not finite" in str(outputs[2].stop_reason)


def test_k1_nan_in_the_head_is_an_error_for_all():
    outputs = generate(markov.with_nan_logit(LADDER, 50), [[5], [6]], greedy())
    assert [(output.finish_reason, output.token_ids) for output in outputs] == [("error", ())] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k1_logits_are_capped_once_and_in_float32(dtype: str):
    """30 * tanh(120 / 30) = 29.98 for a logit of 120. Next to that bfloat16 has 30 and 29.875 alone; twice is 22.83."""
    model = markov.model({token: token + 1 for token in range(60)}, scale=15.0)  # times sqrt(VOCAB) = 8
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    config = dataclasses.replace(model.config, logits_softcap=30.0)
    capped = dataclasses.replace(model, params=params, config=config, dtype=jnp.dtype(dtype))
    found = np.asarray(logits(capped, [[5]]))
    assert found.dtype == np.float32
    assert found[0, 0, 6] == pytest.approx(29.98, abs=2e-3)


def test_k1_an_activation_beyond_float16_is_an_error_of_its_row():
    """Token 20 makes 280 * 250 = 7e4 in the MLP, infinite in float16, and inf * 0 is NaN. Greedy and sampled rows."""
    layer, scale = LADDER.params.layers[0], math.sqrt(markov.VOCAB)
    gate_up = layer.gate_up.at[0, 20].set(280 / scale).at[32, 20].set(250 / scale)
    params = dataclasses.replace(LADDER.params, layers=[dataclasses.replace(layer, gate_up=gate_up)])
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16) if leaf.ndim > 1 else leaf, params)
    model = dataclasses.replace(LADDER, params=params, dtype=jnp.dtype(jnp.float16))
    rows = [greedy(max_tokens=6, temperature=temperature, seed=1) for temperature in (0.0, 1.0) for _ in range(2)]
    for draft in (None, NgramDraft(k=2)):
        outputs = generate(model, [[18], [40]] * 2, rows, draft=draft)
        assert [output.finish_reason for output in outputs] == ["error", "length"] * 2
        assert [output.token_ids for output in outputs] == [(19, 20), (41, 42, 43, 44, 45, 46)] * 2


def test_k1_nan_in_a_layer_is_an_error_for_all():
    layer = LADDER.params.layers[0]
    layers = [dataclasses.replace(layer, down=layer.down.at[3, 3].set(jnp.nan))]
    model = dataclasses.replace(LADDER, params=dataclasses.replace(LADDER.params, layers=layers))
    outputs = generate(model, [[5], [6]], greedy())
    assert [(output.finish_reason, output.token_ids, output.text) for output in outputs] == [("error", (), "")] * 2


def test_k1_nan_in_the_embedding_of_padding_hurts_nobody():
    """Prompts are padded with token 0, whose embedding is NaN here; no prompt holds it."""
    model = markov.with_nan_token(LADDER, 0)
    outputs = generate(model, [[5], [6, 7, 8]], greedy(max_tokens=3))
    assert [output.token_ids for output in outputs] == [(6, 7, 8), (9, 10, 11)]


# --- The loop: dispatch, early stop, interruption


@dataclasses.dataclass
class Trace:
    events: list[str]
    dispatched: int = 0
    read: int = 0


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Records when chunks are dispatched and read; chunk 0 is the first token."""
    seen = Trace([])
    dispatch, read = jaxinfer.batch.decode_chunk, Batch._read

    def recorded_dispatch(*arguments, **options):
        seen.dispatched += 1
        seen.events.append(f"dispatch {seen.dispatched}")
        return dispatch(*arguments, **options)

    def recorded_read(self, chunk):
        seen.events.append(f"read {seen.read}")
        seen.read += 1
        yield from read(self, chunk)

    monkeypatch.setattr(jaxinfer.batch, "decode_chunk", recorded_dispatch)
    monkeypatch.setattr(Batch, "_read", recorded_read)
    return seen


def test_a_chunk_is_dispatched_before_the_one_before_it_is_read(trace: Trace):
    generate(LADDER, [[0]], greedy(max_tokens=13))
    assert trace.events == [
        "dispatch 1", "read 0", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3",
    ]  # fmt: skip


def test_no_chunk_is_dispatched_once_all_rows_are_known_to_have_ended(trace: Trace):
    """The end comes with token 6, in chunk 2 (tokens 6 to 9); chunk 3 is under way when that is read."""
    model = markov.model(chain(0, 1, 2, 3, 4, 5, EOS))
    generate(model, [[0], [1]], greedy(max_tokens=60))
    assert trace.dispatched == 3


def test_a_stop_string_stops_dispatching(trace: Trace):
    generate(LADDER, [[0]], greedy(max_tokens=60, stop="w6"))
    assert trace.dispatched == 3


def test_rows_that_have_ended_do_not_keep_the_batch_going(trace: Trace):
    """Row 0 could have had 60 tokens and ends after 2; row 1 needs 5, which is one chunk after the first token."""
    model = markov.model(chain(0, 1, EOS) | chain(*range(10, 60)))
    outputs = generate(model, [[0], [10]], [greedy(max_tokens=60), greedy(max_tokens=9)])
    assert [len(output.token_ids) for output in outputs] == [2, 9]
    assert trace.dispatched == 2


def test_one_token_needs_no_decoding(trace: Trace):
    generate(LADDER, [[0]], greedy(max_tokens=1))
    assert trace.events == ["read 0"]


def test_g5_a_closed_stream_stops_the_work_and_leaves_the_next_call_right(trace: Trace):
    deltas = stream(LADDER, [[0], [1]], greedy(max_tokens=60))
    assert next(deltas).token_ids == (1,)
    assert next(deltas).token_ids == (2,)
    deltas.close()
    assert trace.dispatched == 1
    assert one(LADDER, [20], max_tokens=6).token_ids == (21, 22, 23, 24, 25, 26)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_g5_an_exception_in_the_middle_leaves_the_next_call_right(error: type[BaseException], monkeypatch):
    read = Batch._read
    calls = []

    def failing_read(self, chunk):
        calls.append(None)
        if len(calls) == 3:
            raise error
        yield from read(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_read", failing_read)
        with pytest.raises(error):
            generate(LADDER, [[0], [1]], greedy(max_tokens=60))
    assert one(LADDER, [20], max_tokens=6).token_ids == (21, 22, 23, 24, 25, 26)


def test_g5_two_streams_at_once_do_not_mix():
    first, second = stream(LADDER, [[0]], greedy(max_tokens=9)), stream(LADDER, [[30]], greedy(max_tokens=9))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for one_delta, other_delta in zip(first, second, strict=True):
        tokens[0] += one_delta.token_ids
        tokens[1] += other_delta.token_ids
    assert tokens == {0: list(range(1, 10)), 1: list(range(31, 40))}


def test_l3_inside_a_running_event_loop_and_from_threads():
    async def call() -> tuple[int, ...]:
        return generate(LADDER, [[5]], greedy(max_tokens=3))[0].token_ids

    assert asyncio.run(call()) == (6, 7, 8)
    results: dict[int, tuple[int, ...]] = {}

    def work(start: int) -> None:
        results[start] = generate(LADDER, [[start]], greedy(max_tokens=9))[0].token_ids

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {start: tuple(range(start + 1, start + 10)) for start in (0, 20, 40)}


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_the_length_of_a_chunk_does_not_show(chunk: int, monkeypatch: pytest.MonkeyPatch):
    limits = Limits(prefill_chunk=64, prefill_tokens=64, decode_chunk=chunk)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: limits))
    prompts, params = [[0], [20], [55]], [greedy(max_tokens=5), greedy(max_tokens=12), greedy(max_tokens=30)]
    outputs = generate(LADDER, prompts, params)
    assert [output.token_ids for output in outputs] == [
        tuple(range(1, 6)), tuple(range(21, 33)), (*range(56, 62), EOS)
    ]  # fmt: skip
    assert [output.finish_reason for output in outputs] == ["length", "length", "stop"]


# --- Several completions


def test_n_completions_come_back_under_their_prompt():
    """Row 1 is certain (scale 4), so its completions are equal; the prompts stay apart."""
    outputs = generate(LADDER, [[5], [30]], SamplingParams(n=3, max_tokens=3, temperature=1.0, seed=3))
    assert [[c.token_ids for c in output.completions] for output in outputs] == [[(6, 7, 8)] * 3, [(31, 32, 33)] * 3]
    deltas = list(stream(LADDER, [[5], [30]], SamplingParams(n=2, max_tokens=3, seed=3)))
    assert {(delta.prompt_index, delta.sample_index) for delta in deltas} == {(0, 0), (0, 1), (1, 0), (1, 1)}
