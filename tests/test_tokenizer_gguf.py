"""Byte-level BPE from GGUF metadata: same ids as the tokenizer that the metadata was written from."""

import json
import logging

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizer_training import PUBLISHED, SPECIAL, gguf_metadata, texts, trained

from jaxinfer.tokenization import TextStream, Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from jaxinfer.tokenization.pre_tokenizers import PRE_TOKENIZATIONS, pre_tokenization
from jaxinfer.tokenization.token_bytes import BYTE_LEVEL_ALPHABET

BUILT = {name: tokenizer_from_gguf(gguf_metadata(name)) for name in PUBLISHED}


def built(name: str = "smollm", **keys) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(gguf_metadata(name, **keys))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", PUBLISHED)
@settings(deadline=None)
@given(text=texts())
def test_encodes_as_the_original(name: str, text: str):
    tokenizer = BUILT[name]
    assert tokenizer is not None
    assert tokenizer.encode(text) == trained(name).encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(text=texts())
def test_decodes_exactly(text: str):
    tokenizer = built()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    for special in SPECIAL:
        text = text.replace(special, "")
    assert tokenizer.decode(ids) == text


WORDS = {
    "gpt-2": ["I", "'", "M", " 12345", " x", "!=", "y", "\n\n", " 中文", "。", "ok", " "],
    "smollm": ["I", "'", "M", " ", "1", "2", "3", "4", "5", " x", "!=", "y", "\n\n", " 中文", "。", "ok", " "],
    "llama-bpe": ["I", "'M", " ", "123", "45", " x", "!=", "y", "\n\n", " 中文", "。ok", " "],
    "qwen2": ["I", "'M", " ", "1", "2", "3", "4", "5", " x", "!=", "y", "\n\n", " 中文", "。ok", " "],
    "tekken": ["I", "'M", " ", "1", "2", "3", "4", "5", " x", "!=", "y", "\n\n", " 中文", "。ok", " "],
    "gpt-4o": ["I'M", " ", "123", "45", " x", "!=", "y", "\n\n", " 中文", "。ok", " "],
    "deepseek-llm": ["I", "'", "M", *" 12345", " x", "!=", "y", "\n", "\n", " ", "中文", "。", "ok", " "],
    "deepseek-coder": ["I", "'", "M", *" 12345", " x", "!", "=", "y", "\n", "\n", " ", "中文", "。", "ok", " "],
    "deepseek-v3": ["I", "'M", " ", "123", "45", " x", "!=", "y", "\n\n", " ", "中文", "。", "ok", " "],
    "falcon": ["I", "'", "M", " ", "123", "45", " x", "!=", "y", "\n\n", " 中文", "。", "ok", " "],
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str):
    text = "I'M 12345 x!=y\n\n 中文。ok "
    words = [word for word, _ in pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)]
    assert [bytes(BYTE_LEVEL_ALPHABET[c] for c in word).decode() for word in words] == WORDS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZATIONS)
def test_words_lose_no_byte(name: str):
    text = "I'M 12345 x!=y\r\n\n 中文。ok  \u3000é<|x|>½ \t"
    words = [word for word, _ in pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)]
    assert bytes(BYTE_LEVEL_ALPHABET[c] for c in "".join(words)).decode() == text


def test_qwen_composes_characters():
    assert built("qwen2").encode("e\u0301") == built("qwen2").encode("é")
    assert built("smollm").encode("e\u0301") != built("smollm").encode("é")


@pytest.mark.parametrize("keys", [{"pre": "no-such-model"}, {"pre": None}])
def test_unknown_pre_tokenizer_is_refused_by_name(keys):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is .*llama-bpe.*qwen2.*smollm"):
        built(**keys)


def test_trap_a1_word_in_vocabulary_beats_merges(tmp_path):
    """llama.cpp#7193: a whole word that is a token must not be merged from its parts."""
    alphabet = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}
    word = "".join(alphabet[byte] for byte in " Việt".encode())
    merges = [(word[0], word[1]), (word[0] + word[1], word[2])]
    tokens = [*BYTE_LEVEL_ALPHABET, *("".join(merge) for merge in merges), word]
    whole = len(tokens) - 1
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
    original = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True)
    )
    original.pre_tokenizer = PRE_TOKENIZATIONS["llama-bpe"].pre_tokenizer()
    original.decoder = tokenizers.decoders.ByteLevel()
    original.save(str(tmp_path / "tokenizer.json"))
    from_folder, from_gguf = tokenizer_from_folder(tmp_path), tokenizer_from_gguf(metadata)
    assert from_folder is not None
    assert from_gguf is not None
    assert from_gguf.encode(" Việt") == from_folder.encode(" Việt") == original.encode(" Việt").ids == [whole]
    merging = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "smaug-bpe"})
    assert merging is not None
    assert merging.encode(" Việt") == [tokens.index(word[:3]), *(tokens.index(c) for c in word[3:])]


@pytest.mark.parametrize("text", ["x != y and a.b == c", "': 'search", "a , b . c ! d ' e"])
def test_trap_a3_decoding_keeps_spaces(text: str):
    """transformers#32575: no space before punctuation is ever eaten."""
    assert built().decode(built().encode(text)) == text


def test_bos_by_the_models_rule():
    plain = built().encode("The fox")
    assert built(add_bos_token=True).encode("The fox") == [1, *plain]
    assert built(add_bos_token=True).encode("The fox", add_special_tokens=False) == plain
    without_key = gguf_metadata("llama-bpe")
    del without_key["tokenizer.ggml.add_bos_token"]
    llama = tokenizer_from_gguf(without_key)
    assert llama is not None
    assert llama.encode("The fox")[0] == 1
    assert llama.opening_ids == (1,)


def test_raw_text_that_has_bos_gets_no_second():
    tokenizer = built(add_bos_token=True)
    assert tokenizer.encode("<|im_start|>The fox") == tokenizer.encode("The fox")


def test_bos_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="no valid bos_token_id"):
        built(add_bos_token=True, bos_token_id=5000)


def test_eos_is_never_appended(caplog):
    with caplog.at_level(logging.INFO):
        tokenizer = built(add_eos_token=True)
    assert tokenizer.encode("The fox") == built().encode("The fox")
    assert "add_eos_token is set and ignored" in caplog.text


def test_stop_set_has_named_and_known_end_tokens():
    assert built().eos_token_ids == (2, 0)  # eos, then <|endoftext|>, which the keys do not name
    tool = trained("smollm").token_to_id("<tool>")
    assert built(eos_token_id=0, eot_token_id=2, eom_token_id=tool).eos_token_ids == (0, 2, tool)
    ordinary = [1] * len(gguf_metadata("smollm")["tokenizer.ggml.tokens"])
    assert built(token_type=ordinary).eos_token_ids == (2,)


def test_harmony_end_of_message_does_not_stop():
    tokens = ["<|end|>", "<|return|>", "<|call|>", *gguf_metadata("smollm")["tokenizer.ggml.tokens"][3:]]
    assert built(tokens=tokens, eos_token_id=1, bos_token_id=None).eos_token_ids == (1, 2)


def test_special_and_user_defined_tokens():
    tokenizer = built()
    tool = trained("smollm").token_to_id("<tool>")
    assert tokenizer.encode("<|im_start|><tool>") == [1, tool]
    assert tokenizer.decode([1, tool]) == "<tool>"
    assert tokenizer.decode([1, tool], skip_special_tokens=False) == "<|im_start|><tool>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(1) == b"<|im_start|>"


def test_added_tokens_are_spelled_as_they_are():
    """Only trained tokens spell bytes as characters: the ö of an added token is an ö."""
    metadata = gguf_metadata("smollm")
    tokens = ["<töol>" if token == "<tool>" else token for token in metadata["tokenizer.ggml.tokens"]]
    tokenizer = built(tokens=tokens)
    assert tokenizer.encode("<töol>") == [tokens.index("<töol>")]
    assert tokenizer.decode(tokenizer.encode("ö<töol>")) == "ö<töol>"


def test_padding_entries_are_no_tokens():
    metadata = gguf_metadata("smollm")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    padded = built(tokens=[*tokens, "[PAD701]", "[PAD702]"], token_type=[*types, 5, 5])
    assert padded.num_tokens == built().num_tokens == len(tokens)
    assert padded.encode("[PAD701]") == built().encode("[PAD701]")
    for token in (len(tokens), -1):
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of {len(tokens)} tokens"):
            padded.token_bytes(token)


def test_ids_may_be_an_array():
    tokenizer = built()
    ids = np.asarray(tokenizer.encode("The fox"), np.int32)
    assert tokenizer.decode(ids) == "The fox"
    assert TextStream(tokenizer).push(ids) == "The fox"


def test_no_tokenizer_is_none():
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None
    assert tokenizer_from_gguf({"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; expected one of gpt2, llama, gemma4"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["Ġthe"]}, "merges has 'Ġthe'"),
        ({"merges": ["Ġ zzz"]}, "merges has 'Ġ zzz'"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for"),
    ],
)
def test_contradictory_keys_are_refused(keys, message: str):
    with pytest.raises(ValueError, match=message):
        built(**keys)


def test_repeated_token_is_refused():
    tokens = gguf_metadata("smollm")["tokenizer.ggml.tokens"]
    with pytest.raises(ValueError, match="'<tool>' twice"):
        built(tokens=["<tool>", *tokens[1:]])


def test_chat_templates_by_name():
    metadata = gguf_metadata("smollm") | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer is not None
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


def test_description_survives_json():
    """The backend is an ordinary `tokenizers` object: it can be saved and read again."""
    tokenizer = built()
    again = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    assert json.loads(again.to_str())["model"]["type"] == "BPE"
    assert again.encode("The fox 12").ids == tokenizer.encode("The fox 12")
