"""SamplingParams: defaults, normalisation, and an error that names the field for everything else."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "max_tokens": 16,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
    }


def test_fields_are_normalised_to_hashable_plain_values():
    params = SamplingParams(
        stop="END",
        stop_token_ids=[np.int64(7), 3, 7],
        logit_bias={9: 1, np.int32(2): -0.5},
        top_k=-1,
        seed=-1,
        temperature=np.float32(0.5),
        max_tokens=np.int64(4),
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7, 3)
    assert params.logit_bias == ((2, -0.5), (9, 1.0))
    assert (params.top_k, params.seed, params.temperature, params.max_tokens) == (0, None, 0.5, 4)
    assert {type(params.temperature), type(params.max_tokens)} == {float, int}
    assert hash(params) == hash(dataclasses.replace(params))
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_a_field_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n", 0, "an integer from 1 to 16384"),
        ("n", 1.0, "an integer from 1 to 16384"),
        ("n", True, "an integer from 1 to 16384"),
        ("max_tokens", 0, "an integer of at least 1"),
        ("max_tokens", [4], "an integer of at least 1"),
        ("max_tokens", 2**31, "an integer from 1 to 2147483647"),
        ("min_tokens", -1, "an integer of at least 0"),
        ("temperature", -0.1, "a number in [0, 1e+06]"),
        ("temperature", float("nan"), "a number in [0, 1e+06]"),
        ("temperature", float("inf"), "a number in [0, 1e+06]"),
        ("temperature", "1", "a number in [0, 1e+06]"),
        ("temperature", None, "a number in [0, 1e+06]"),
        ("top_k", -2, "an integer of at least -1"),
        ("top_k", 0.5, "an integer of at least -1"),
        ("top_p", 0.0, "a number in (0, 1]"),
        ("top_p", 1.01, "a number in (0, 1]"),
        ("min_p", -0.1, "a number in [0, 1]"),
        ("min_p", 1.5, "a number in [0, 1]"),
        ("seed", 2**64, "an integer from"),
        ("seed", "0", "an integer from"),
        ("stop", "", "non-empty strings only"),
        ("stop", [""], "non-empty strings only"),
        ("stop", ["a", 3], "non-empty strings only"),
        ("stop", 3, "a string or a sequence of strings"),
        ("stop", {"a": 1}, "a string or a sequence of strings"),
        ("stop_token_ids", [-1], "an integer of at least 0"),
        ("stop_token_ids", "12", "a sequence of token ids"),
        ("stop_token_ids", 12, "a sequence of token ids"),
        ("stop_token_ids", {12: 1}, "a sequence of token ids"),
        ("ignore_eos", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("logprobs", -1, "an integer of at least 0"),
        ("logprobs", True, "an integer of at least 0"),
        ("prompt_logprobs", -1, "an integer of at least 0"),
        ("presence_penalty", 2.1, "a number in [-2, 2]"),
        ("frequency_penalty", -2.1, "a number in [-2, 2]"),
        ("repetition_penalty", 0.0, "a number in [0.0001, 10000]"),
        ("logit_bias", {3: 101.0}, "a number in [-100, 100]"),
        ("logit_bias", {3: "1"}, "a number in [-100, 100]"),
        ("logit_bias", {-3: 1.0}, "an integer of at least 0"),
        ("logit_bias", {"AI": 1.0}, "an integer of at least 0"),
        ("logit_bias", [(3, 1.0), (3, 2.0)], "each token id once"),
        ("logit_bias", 3, "a dict of token id to bias"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_field(field, value, expected):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert f"expected {expected}" in str(error.value)
    assert "\n" not in str(error.value)


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="min_tokens 5 is greater than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="n is 2 with greedy temperature"):
        SamplingParams(n=2, temperature=0.0)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    assert SamplingParams(n=2, temperature=0.01).n == 2


def test_greedy_begins_where_vllm_has_it():
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_from_dict_names_unknown_fields_and_close_matches():
    with pytest.raises(ValueError, match=r"no sampling field 'top-k' \(did you mean top_k") as error:
        SamplingParams.from_dict({"top-k": 3, "zzz": 1, "temperature": 0.5})
    assert "'zzz'" in str(error.value)
    assert "repetition_penalty" in str(error.value)


def test_from_dict_reads_json():
    text = '{"logit_bias": {"12": -100, "3": 1.5}, "stop": ["\\n"], "seed": 4, "top_p": 1}'
    expected = SamplingParams(logit_bias={3: 1.5, 12: -100.0}, stop="\n", seed=4)
    assert SamplingParams.from_dict(json.loads(text)) == expected
    with pytest.raises(ValueError, match="logit_bias is 'AI'"):
        SamplingParams.from_dict({"logit_bias": {"AI": 1.0}})
    with pytest.raises(ValueError, match="each token id once"):
        SamplingParams.from_dict({"logit_bias": {"1": 1.0, "01": 2.0}})


@pytest.mark.parametrize("string", ["\ud800", "a\udcff"])
def test_a_stop_string_that_no_text_can_hold_is_refused(string):
    with pytest.raises(ValueError, match=r"^stop: .* is not Unicode: character [01] is"):
        SamplingParams(stop=["end", string])


@pytest.mark.parametrize("token", [191222, 129280])
def test_c9_token_ids_outside_the_vocabulary_are_refused(token):
    for params in (SamplingParams(logit_bias={5: 1.0, token: 1.0}), SamplingParams(stop_token_ids=[token])):
        with pytest.raises(ValueError, match=f"token id {token}.*expected 0 to 129279"):
            params.validate_for(129280)
    SamplingParams(logit_bias={129279: 1.0}, stop_token_ids=[129279]).validate_for(129280)


def test_more_logprobs_than_tokens_are_refused():
    SamplingParams(logprobs=64, prompt_logprobs=64).validate_for(64)
    with pytest.raises(ValueError, match="prompt_logprobs is 65; expected at most the vocabulary's 64 tokens"):
        SamplingParams(prompt_logprobs=65).validate_for(64)


def test_unknown_names_are_refused_with_those_that_were_meant():
    with pytest.raises(ValueError, match=r"no sampling field 'max_token' \(did you mean max_tokens"):
        SamplingParams(max_token=5)  # pyright: ignore[reportCallIssue]  # that is the point
    params = SamplingParams(max_tokens=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
