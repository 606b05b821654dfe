"""Inputs that once ended in a traceback, a hang or a wrong result, found by attacking the library from outside."""

import json
import pathlib
import time

import jax.numpy as jnp
import markov
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from checkpoints.safetensors import read_json
from jaxinfer.batch import Limits, plan_prefill
from jaxinfer.generation import _groups, generate, requests_for, stream
from jaxinfer.request import encode_prompt, list_prompts, per_prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import tokenizer_from_folder, tokenizer_from_gguf

ABC = markov.model(markov.chain(0, 1, 2, 3))
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)

# --- Tokenizers


@pytest.mark.parametrize(
    ("text", "message"),
    [("A\ud800", "not Unicode: character 1"), ("A\udcff", "not UTF-8"), ("A|\0", "cannot encode this text")],
)
def test_a_text_that_cannot_be_encoded_is_refused(text: str, message: str):
    """Command-line arguments and JSON can hold half a surrogate pair."""
    with pytest.raises(ValueError, match=message):
        generate(ABC, text, GREEDY)


def test_a_template_that_names_a_token_it_lacks_is_refused(tmp_path: pathlib.Path):
    """`tokenizers` reads such a file, and its Rust code panics at the first text."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "1": 2, ".": 3}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    file = json.loads(backend.to_str())
    file["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="the tokenizer is damaged"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": ["x"], "template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x", "template": 5}]}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("added_tokens.json", "[" * 100_000),
    ],
)
def test_tokenizer_files_of_the_wrong_shape_are_refused(tmp_path: pathlib.Path, name: str, content: str):
    markov.save(tmp_path, {})
    (tmp_path / name).write_text(content)
    if name == "added_tokens.json":  # read beside tokenizer.model alone
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01a\x12\x02\x18\x02")
    with pytest.raises(ValueError, match=r"tokens|template|JSON"):
        tokenizer_from_folder(tmp_path)


def test_a_text_config_that_is_no_object_names_no_stop_ids(tmp_path: pathlib.Path):
    markov.save(tmp_path, {})
    (tmp_path / "config.json").write_text('{"text_config": "x", "eos_token_id": 5}')
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.eos_token_ids == (markov.EOS, 5)


def test_a_chat_template_that_is_not_utf8_is_named(tmp_path: pathlib.Path):
    markov.save(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ["llama"]),
        ("pre", ["llama-bpe"]),
        ("tokens", 5),
        ("tokens", [[1], [2]]),
        ("token_type", True),
        ("token_type", [float("inf"), 1]),
        ("scores", [["x"], ["y"]]),
        ("merges", [1.5]),
        ("merges", "a b"),
        ("precompiled_charsmap", 1),
        ("padding_token_id", float("inf")),
        ("unknown_token_id", [0]),
    ],
)
def test_gguf_tokenizer_keys_of_the_wrong_type_are_refused(model: str, key: str, value: object):
    keys = {"model": model, "tokens": ["a", "b"], "scores": [0.0, -1.0], "merges": [], "token_type": [1, 1]}
    metadata = {f"tokenizer.ggml.{name}": kept for name, kept in (keys | {key: value}).items()}
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{key}"):
        tokenizer_from_gguf(metadata)


def test_a_json_file_that_is_a_device_is_refused(tmp_path: pathlib.Path):
    """A link to /dev/zero has no size, and reading it never ends."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is not a file"):
        read_json(tmp_path, "config.json")


# --- Prompts and parameters


@pytest.mark.parametrize(
    "prompts",
    [None, 3, 2.5, b"AB", bytearray(b"A"), memoryview(b"A"), {"prompt": [0]}, {0, 1}, np.array(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_prompts_is_refused(prompts: object):
    with pytest.raises(ValueError, match=r"prompts is .*; expected a string, a list of token ids, or a list of either"):
        list_prompts(prompts)


@pytest.mark.parametrize(
    "prompt", [None, 2.5, b"AB", {"prompt": [0]}, [0.5], [None], [[0]], np.array([0.0]), [np.bool_(True)], [True]]
)
def test_what_is_no_prompt_is_refused(prompt: object):
    with pytest.raises(ValueError, match=r"prompt 7 .*a prompt is a string or a list of int token ids"):
        encode_prompt(ABC, prompt, 7)


@pytest.mark.parametrize(
    "prompts",
    [
        (ids for ids in ([0], [1])),
        iter(["A", "BC"]),
        jnp.array([[0], [1]], jnp.int32),
        [jnp.array([0], jnp.int32), np.array([1], np.uint8)],
        np.array(["A", "BC"]),
    ],
    ids=["generator", "iterator", "jax", "arrays", "strings"],
)
def test_prompts_may_come_from_any_iterable_or_array(prompts):
    assert [output.token_ids for output in generate(ABC, prompts, GREEDY)] == [(1, 2, 3), (2, 3, markov.END)]


def test_a_jax_array_of_ids_is_one_prompt():
    (output,) = generate(ABC, jnp.array([0, 1], jnp.int32), GREEDY)
    assert output.prompt_token_ids == (0, 1)


@pytest.mark.parametrize("params", [3, "x", {"max_tokens": 2}, [None], [{}], SamplingParams])
def test_what_is_no_sampling_params_is_refused(params: object):
    with pytest.raises(ValueError, match=r"params (is|holds) .*; expected"):
        per_prompt(params, 1)


@pytest.mark.parametrize("fields", [{"temperature": 10**400}, {"top_p": 10**400}, {"logit_bias": {1: 10**400}}])
def test_numbers_beyond_float64_are_out_of_range(fields: dict):
    with pytest.raises(ValueError, match="expected a number in"):
        SamplingParams(**fields)


def test_forbidding_the_whole_vocabulary_is_refused():
    """All logits would be -inf, which would be reported as a model whose logits are not finite."""
    everything = range(markov.VOCAB - 1)  # and the end of text, which min_tokens forbids too
    with pytest.raises(ValueError, match=r"min_tokens=2 forbids .* are the whole vocabulary"):
        generate(ABC, [[0]], SamplingParams(min_tokens=2, stop_token_ids=everything))
    (output,) = generate(ABC, [[0]], SamplingParams(min_tokens=2, stop_token_ids=range(markov.VOCAB - 2)))
    assert output.token_ids[:2] == (markov.END,) * 2


def test_a_stop_string_completed_by_the_flush_is_a_stop():
    """The bytes cut off by max_tokens become U+FFFD, which a stop string may hold."""
    model = markov.model(markov.chain(0, 1), tokenizer=markov.byte_tokenizer([b"a", b"b\xe2\x82"]))
    params = SamplingParams(max_tokens=1, temperature=0.0, stop="b\ufffd")
    (output,) = generate(model, [[0]], params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "b\ufffd")
    (delta,) = stream(model, [[0]], params)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "b\ufffd")


def test_planning_ten_thousand_rows_takes_no_time():
    """Once quadratic twice over: half a minute for one batch of 16384."""
    start = time.perf_counter()
    groups = plan_prefill([1 + row % 7 for row in range(4096)], Limits(512, 1024, 4))
    requests = requests_for(ABC, [[0]], SamplingParams(max_tokens=1, n=10_000))
    (batch,) = _groups(ABC, requests, 10_000)
    assert sum(len(group.rows) for group in groups) == 4096 and len(batch) == 10_000
    assert time.perf_counter() - start < 10
