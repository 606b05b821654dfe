"""Inputs that once ended in a traceback, a hang or a wrong result, found by attacking the library from outside."""

import json
import pathlib

import markov
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from checkpoints.safetensors import read_json
from jaxinfer.generation import generate
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
