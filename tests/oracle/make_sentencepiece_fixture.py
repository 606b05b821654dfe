"""Trains tiny SentencePiece models and records how SentencePiece itself encodes many texts.

    python tests/oracle/make_sentencepiece_fixture.py        # needs sentencepiece; writes tests/fixtures/sentencepiece/

`llama`: byte fallback, dummy prefix, text taken as it is; with user-defined pieces.
`gemma`: no dummy prefix, runs of spaces and newlines as user-defined pieces.
`rules`: SentencePiece's defaults with a handful of normalisation rules instead of all of NFKC (which are 240 kB):
spaces collapsed, and no byte fallback, so that characters can be unknown.
`unigram` is of another kind, which has to be refused.
"""

import io
import json
import os
import random
from pathlib import Path

import sentencepiece

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sentencepiece"

SENTENCES = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A tokenizer cuts text into pieces, and a model reads the pieces one by one.",
    "def add(left, right):\n    return left + right  # the sum",
    "Every page of the cache holds sixteen tokens; page zero is scratch.",
    "Größe, naïve façade, déjà vu, smörgåsbord, señor, œuvre.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "敏捷的棕色狐狸跳过懒狗。素早い茶色の狐が怠け者の犬を飛び越える。",
    "Numbers: 0 1 2 3 10 11 12 100 1000 3.14159 2,718,281 and 42.",
    "She said: 'it's ours', they'd replied, \"we're not sure it'll fit\".",
    "if (x != y && a[i] == b[j]) { return f(x, y); }",
]
MODELS = {
    "llama": {
        "vocab_size": 480,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>", "ing", "▁▁▁"],
    },
    "gemma": {
        "vocab_size": 480,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁" * n for n in range(2, 6)] + ["\n", "\n\n", "\n\n\n", "<table>"],
    },
    "rules": {"vocab_size": 260, "user_defined_symbols": ["<sep>"]},
}
RULES = {"ﬁ": "fi", "\u3000": " ", "\u00a0": " ", "\t": " ", "\n": " ", "\uff21": "A", "e\u0301": "é"}
NASTY = [
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "Hello",
    " Hello",
    "  Hello",
    "a  b   c    d     e      f",
    "tabs\tand\r\nnew\n\nlines\n\n\n\n",
    "the<sep>quick <sep> brown<sep>",
    "<sep>",
    "running<sep><sep>  jumping",
    "<table>\n\n\n\n\n  <table>",
    "😀 and 👩‍👩‍👧 and 🇨🇭!",
    "e\u0301 versus é, ﬁne ① \uff21 ½ \u00a0\u3000\u200b.",
    "▁ already ▁▁ there ▁",
    "<0x41> <0x0A>",
    "\x00\x01\x7f",
    "Ωμέγα हिन्दी العربية 한국어",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the the the the",
]


def texts() -> list[str]:
    """The nasty ones, the training sentences, and random mixtures of pieces of both."""
    random_ = random.Random(0)
    fragments = [word for sentence in SENTENCES for word in sentence.split(" ")]
    fragments += ["", " ", "  ", "    ", "\n", "\n\n", "\t", "<sep>", "ing", "▁", "é", "😀", "ᚠ", "the", "<table>"]
    mixtures = [
        "".join(random_.choice(fragments) + random_.choice(["", "", " "]) for _ in range(random_.randrange(1, 12)))
        for _ in range(150)
    ]
    return NASTY + SENTENCES + mixtures


def main() -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    os.chdir(FIXTURES)  # a model remembers the name of its rule file, which should be no path of one machine
    rules = Path("rules.tsv")
    codes = [[" ".join(f"{ord(c):X}" for c in side) for side in rule] for rule in RULES.items()]
    rules.write_text("".join(f"{source}\t{target}\n" for source, target in codes))
    expected: dict[str, object] = {"texts": texts()}
    for name, options in MODELS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3),
            model_writer=model,
            model_type="bpe",
            character_coverage=1.0 if name != "rules" else 0.98,
            normalization_rule_tsv="rules.tsv" if name == "rules" else "",
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        (FIXTURES / f"{name}.model").write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        expected[name] = {
            "pieces": [processor.id_to_piece(i) for i in range(processor.vocab_size())],
            "ids": [processor.encode(text) for text in texts()],
        }
    unigram = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=unigram,
        vocab_size=150,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    rules.unlink()
    (FIXTURES / "unigram.model").write_bytes(unigram.getvalue())
    path = FIXTURES / "expected.json"
    path.write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
