"""Tokenizers from model folders: the files that can hold each part, and which of them wins."""

import json
import logging
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizer_training import PUBLISHED, texts, trained
from tokenizers import processors

from checkpoints.errors import CheckpointError
from jaxinfer.tokenization import TextStream, Tokenizer, tokenizer_from_folder

SENTENCE = "The fox 12 x != y"


def write(folder: Path, config: dict | None = None, post_processor=None, name: str = "smollm") -> Path:
    """A model folder with `trained(name)`; <|im_start|> is 1, <|im_end|> 2, <|endoftext|> 0."""
    backend = tokenizers.Tokenizer.from_str(trained(name).to_str())
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def plain_ids(text: str = SENTENCE) -> list[int]:
    return trained("smollm").encode(text, add_special_tokens=False).ids


def template(single: str, **ids: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))


@pytest.mark.parametrize("name", PUBLISHED)
@settings(deadline=None)
@given(text=texts())
def test_encodes_and_decodes_as_tokenizers(name: str, text: str):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained(name).to_str()))
    ids = trained(name).encode(text).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == trained(name).decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == trained(name).decode(ids)


def test_named_tokens(tmp_path):
    tokenizer = load(write(tmp_path, {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.num_tokens == trained("smollm").get_vocab_size()
    assert tokenizer.encode(SENTENCE) == plain_ids()


def test_named_tokens_from_the_older_file(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load(tmp_path).eos_token_ids == (0,)


def test_stop_set_is_the_union_of_all_files(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0, "text_config": {"eos_token_id": null}}')
    assert load(tmp_path).eos_token_ids == (2, 7, 0)


def test_post_processor_is_the_bos_rule(tmp_path):
    tokenizer = load(write(tmp_path, post_processor=template("<|im_start|> $A", **{"<|im_start|>": 1})))
    assert tokenizer.encode(SENTENCE) == [1, *plain_ids()]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("<|im_start|>" + SENTENCE) == [1, *plain_ids()]


def test_tokenizer_config_overrides_the_bos_rule(tmp_path):
    byte_level = processors.ByteLevel(trim_offsets=False)
    assert load(write(tmp_path, {"add_bos_token": True}, byte_level)).encode(SENTENCE) == [1, *plain_ids()]
    opening = template("<|im_start|> $A", **{"<|im_start|>": 1})
    assert load(write(tmp_path, {"add_bos_token": False}, opening)).encode(SENTENCE) == plain_ids()
    assert load(write(tmp_path, {"add_bos_token": None}, opening)).encode(SENTENCE) == [1, *plain_ids()]


def test_other_opening_tokens_stay(tmp_path):
    """As in GLM-4, whose texts open with two tokens."""
    opening = template("<|endoftext|> <|im_start|> $A", **{"<|im_start|>": 1, "<|endoftext|>": 0})
    tokenizer = load(write(tmp_path, {"add_bos_token": False}, opening))
    assert tokenizer.encode(SENTENCE) == [0, 1, *plain_ids()]
    assert tokenizer.encode("<|endoftext|><|im_start|>" + SENTENCE) == [0, 1, *plain_ids()]


BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_trap_b1_exactly_one_bos(tmp_path):
    """llama-cpp-python#1501: the template writes BOS, and the tokenizer would add another."""
    tokenizer = load(write(tmp_path, {"add_bos_token": True, "chat_template": BOS_TEMPLATE}))
    messages = [{"role": "user", "content": "The fox"}]
    chat = tokenizer.apply_chat_template(messages)
    assert chat[0] == 1
    assert chat.count(1) == 1
    rendered = tokenizer.render_chat(messages)
    assert rendered == "<|im_start|>user: The fox\n"
    assert tokenizer.encode(rendered) == chat
    assert tokenizer.encode(SENTENCE).count(1) == 1


def test_trap_b3_no_eos_at_the_end_of_a_prompt(tmp_path, caplog):
    """vllm#7492: after EOS a model has nothing to say. The post-processor appends id 0, the config asks for EOS."""
    closing = template("$A <|endoftext|>", **{"<|endoftext|>": 0})
    tokenizer = load(write(tmp_path, {"add_eos_token": True}, closing))
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode(SENTENCE) == plain_ids()
        assert tokenizer.encode("") == []
    assert len([record for record in caplog.records if "closes texts with token [0]" in record.message]) == 1
    assert tokenizer.encode(SENTENCE + "<|endoftext|>") == [*plain_ids(), 0]  # written out by the caller: kept


def test_trap_a3_spaces_stay_whatever_the_config_says(tmp_path):
    """transformers#32575: clean_up_tokenization_spaces turned `x != y` into `x!= y`."""
    tokenizer = load(write(tmp_path, {"clean_up_tokenization_spaces": True}))
    for text in ("x != y and a.b == c", "': 'search"):
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer)
        assert tokenizer.decode(ids) == text
        assert "".join(stream.push([token]) for token in ids) + stream.finish() == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    write(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode(SENTENCE * 3) == plain_ids(SENTENCE * 3)


def test_added_tokens_of_the_config(tmp_path, caplog):
    count = trained("smollm").get_vocab_size()
    added = {
        str(count + 1): {"content": "<|b|>", "special": True},
        str(count): {"content": "<|a|>", "special": False},
        "2": {"content": "<|im_end|>", "special": True, "lstrip": True},
        "5": {"content": "<|c|>", "special": False},
    }
    with caplog.at_level(logging.WARNING):
        tokenizer = load(write(tmp_path, {"added_tokens_decoder": added}))
    assert tokenizer.token_bytes(tokenizer.encode("<|a|>")[0]) == b"<|a|>"
    assert count + 2 in tokenizer.special_ids
    assert tokenizer.encode("x  <|im_end|>") == [*plain_ids("x"), 2]
    assert "'<|c|>' the id 5" in caplog.text


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_from_folder(tmp_path) is None


def test_other_formats_are_refused_by_name(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"only as vocab\.json, merges\.txt; write a tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"version": "1.0"', "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "Unheard"}}', "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{not json", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json holds a JSON list"),
        ("generation_config.json", "", "generation_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "added_tokens_decoder .* 'x'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"special": 1}}}', "added_tokens_decoder .* '7'"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "expected a name and a template"),
    ],
)
def test_broken_files_are_named(tmp_path, name: str, content: str, message: str):
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("merge", [["a", "é"], "a é", ["a", ""]])
def test_a_merge_without_its_prefix_never_reaches_the_library(tmp_path, monkeypatch, merge):
    """`tokenizers` 0.23 ends the process over ["a", "é"]."""
    model = {"type": "BPE", "continuing_subword_prefix": "x", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [merge]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}), encoding="utf-8")
    monkeypatch.setattr(tokenizers, "Tokenizer", None)
    message = (
        f"{tmp_path / 'tokenizer.json'}: the second part of the merge {merge!r} lacks the continuing_subword_prefix 'x'"
    )
    with pytest.raises(CheckpointError, match=re.escape(message) + "; download it again"):
        tokenizer_from_folder(tmp_path)


def test_merges_with_a_prefix(tmp_path):
    """ "##" is there in the vocabulary and in the merges, as `tokenizers` itself writes them."""
    model = tokenizers.models.BPE(
        {"a": 0, "##b": 1, "##c": 2, "ab": 3, "##bc": 4}, [("##b", "##c"), ("a", "##b")], continuing_subword_prefix="##"
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("abc") == [0, 4]


def test_decoder_without_bytes_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="decoder is WordPiece"):
        tokenizer_from_folder(tmp_path)


def test_chat_template_places(tmp_path):
    """Files of their own win over tokenizer_config.json, that over chat_template.json."""
    write(tmp_path)
    assert load(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from chat_template.json"}')
    assert load(tmp_path).chat_template == "from chat_template.json"
    write(tmp_path, {"chat_template": "from tokenizer_config.json"})
    assert load(tmp_path).chat_template == "from tokenizer_config.json"
    (tmp_path / "chat_template.jinja").write_text("from chat_template.jinja é", encoding="utf-8")
    assert load(tmp_path).chat_template == "from chat_template.jinja é"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("from rag.jinja")
    assert load(tmp_path).chat_templates == {"default": "from chat_template.jinja é", "rag": "from rag.jinja"}


def test_named_list_of_chat_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = load(write(tmp_path, {"chat_template": named}))
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], tools=[{}]) == "1 tools"
    assert tokenizer.render_chat([], tools=[{}], chat_template="default") == "plain"
    assert tokenizer.render_chat([], chat_template="{{ eos_token }}!") == "<|im_end|>!"
    with pytest.raises(ValueError, match="'tooluse' is neither a Jinja template nor one of default, tool_use"):
        tokenizer.render_chat([], chat_template="tooluse")
    named.pop(0)
    with pytest.raises(ValueError, match="no default chat template; pass chat_template= one of tool_use"):
        load(write(tmp_path, {"chat_template": named})).render_chat([])


def test_no_chat_template_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"no chat template .*Python: chat_template="):
        load(write(tmp_path)).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_nothing_in_the_folder_is_run(tmp_path):
    write(tmp_path, {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert load(tmp_path).encode(SENTENCE) == plain_ids()
    assert not (tmp_path / "ran").exists()
