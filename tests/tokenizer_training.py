"""Small byte-level BPE tokenizers trained by `tokenizers`, as its own objects and as GGUF metadata."""

import functools
import json
from typing import Any

import tokenizers
from hypothesis import strategies as st

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and we're sure it'll be fine; I'M not, they'd've said.",
    "def add(left, right):\n    return left + right  # x != y and a.b == c\n\n\nprint(add(1, 2345))",
    "Größe, naïve façade, déjà vu, Tiếng Việt, smörgåsbord, Ελληνικά, Быстрая лиса прыгает через собаку.",
    "敏捷的棕色狐狸跳过懒狗。素早い茶色の狐が怠け者の犬を飛び越える。빠른 갈색 여우가 게으른 개를 뛰어넘는다.",
    "2024-11-30: 3.14159 2,718,281 and 42%; $9.99 (ten) [x] {y} <z> \t tabs\r\nand   spaces    😀👍🏽 ½ ² ①",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = _BYTE_LEVEL | {"use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _sequence(*steps: str | dict[str, Any]) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        if isinstance(step, str)
        else step
        for step in steps
    ]
    return {"type": "Sequence", "pretokenizers": splits}


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": _GPT2},
    "smollm": {"pre_tokenizer": _sequence(_DIGITS, _GPT2)},
    "llama-bpe": {
        "pre_tokenizer": _sequence(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SPACES}", _BYTE_LEVEL),
        "ignore_merges": True,
    },
    "qwen2": {
        "pre_tokenizer": _sequence(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SPACES}", _BYTE_LEVEL),
        "normalizer": {"type": "NFC"},
    },
    "deepseek-coder": {
        "pre_tokenizer": _sequence(
            "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGITS, _BYTE_LEVEL
        )
    },
    "deepseek-v3": {
        "pre_tokenizer": _sequence(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
            _BYTE_LEVEL,
        )
    },
}
"""What the tokenizer.json files of these families say of cutting text into words."""


@functools.cache
def trained(name: str) -> tokenizers.Tokenizer:
    """A tokenizer of 700 tokens that cuts words as family `name` does; the first three are special."""
    rules = PUBLISHED[name]
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": rules.get("normalizer"),
        "pre_tokenizer": rules["pre_tokenizer"],
        "post_processor": None,
        "decoder": _GPT2,
        "model": {"type": "BPE", "ignore_merges": rules.get("ignore_merges", False), "vocab": {}, "merges": []},
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def gguf_metadata(name: str, **keys: Any) -> dict[str, Any]:
    """`trained(name)` as the keys of a GGUF file; `keys` are more of them, without "tokenizer.ggml."."""
    description = json.loads(trained(name).to_str())
    vocabulary = trained(name).get_vocab(with_added_tokens=True)
    added = {token["id"]: token for token in description["added_tokens"]}
    types = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(vocabulary))]
    metadata = {
        "model": "gpt2",
        "pre": name,
        "tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "token_type": types,
        "merges": [" ".join(merge) for merge in description["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def texts() -> st.SearchStrategy[str]:
    """Text with much of what tokenizers get wrong."""
    fragments = st.sampled_from(
        [
            *(
                " ",
                "  ",
                "\n",
                "\r\n",
                "\n\n\n",
                "\t",
                "'s",
                "'LL",
                "don't",
                "x != y",
                "12345",
                "½",
                "Việt",
                "e\u0301",
                "é",
            ),
            *("中文", "日本語", "한국어", "😀", "👍🏽", "🇨🇭", "\u00a0", "\u3000", "\u200b", "…", "<tool>", *SPECIAL),
            *(
                "the",
                " the",
                "The",
                "def",
                "):\n    ",
                "#!",
                "==",
                "\x00",
                "Ġ",
                "▁",
                "Ā",
                "ﬁ",
                "٣٤",
                "\U0001d400",
                "\u212a",
            ),
        ]
    )
    return st.lists(st.one_of(fragments, st.text(max_size=8)), max_size=12).map("".join)
