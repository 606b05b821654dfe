"""SentencePiece BPE against ids that SentencePiece itself gave, and against the algorithm written out naively."""

import functools
import itertools
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenization import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from jaxinfer.tokenization.sentencepiece import PieceType, SentencePieceModel, read_model

FIXTURES = Path(__file__).parent / "fixtures" / "sentencepiece"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))


@functools.cache
def model(name: str) -> SentencePieceModel:
    return read_model(FIXTURES / f"{name}.model")


def metadata(name: str, **keys) -> dict:
    """The model as a GGUF converter writes it."""
    pieces = {
        "model": "llama",
        "tokens": list(model(name).pieces),
        "scores": list(model(name).scores),
        "token_type": list(model(name).types),
        "add_space_prefix": model(name).add_space_prefix,
        "remove_extra_whitespaces": model(name).remove_extra_whitespaces,
        "precompiled_charsmap": list(model(name).charsmap),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (pieces | keys).items() if value is not None}


def built(name: str = "llama", **keys) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata(name, **keys))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", ["llama", "gemma", "rules"])
def test_encodes_as_sentencepiece(name: str):
    assert list(model(name).pieces) == EXPECTED[name]["pieces"]
    tokenizer = built(name)
    for text, ids in zip(EXPECTED["texts"], EXPECTED[name]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


def naive(vocabulary: SentencePieceModel, text: str) -> list[int]:
    """SentencePiece's algorithm: user-defined pieces stand, then the best neighbours join, the leftmost first."""
    if text and vocabulary.add_space_prefix:
        text = " " + text
    text = text.replace(" ", "▁")
    typed = dict(zip(vocabulary.pieces, zip(vocabulary.types, vocabulary.scores, strict=True), strict=True))
    normal = {piece: score for piece, (kind, score) in typed.items() if kind == PieceType.NORMAL}
    symbols: list[tuple[str, bool]] = []
    while text:
        defined = [p for p, (kind, _) in typed.items() if kind == PieceType.USER_DEFINED and text.startswith(p)]
        symbols.append((max(defined, key=len), True) if defined else (text[0], False))
        text = text[len(symbols[-1][0]) :]
    while True:
        candidates = [
            (-normal[left + right], i)
            for i, ((left, fixed), (right, fixed_too)) in enumerate(itertools.pairwise(symbols))
            if not fixed and not fixed_too and left + right in normal
        ]
        if not candidates:
            break
        _, i = min(candidates)
        symbols[i : i + 2] = [(symbols[i][0] + symbols[i + 1][0], False)]
    index = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    return [
        token
        for symbol, _ in symbols
        for token in ([index[symbol]] if symbol in index else [index[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_naive_algorithm_is_sentencepiece(name: str):
    for text, ids in zip(EXPECTED["texts"], EXPECTED[name]["ids"], strict=True):
        assert naive(model(name), text) == ids, repr(text)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "  ", "     ", "\n", "\n\n", "<sep>", "<table>", "ing", "▁", "▁▁", "the", "aaa", "running"]
        ),
        st.sampled_from(["é", "😀", "狐", "лиса", "\t", "\x00", "  the", "add(left", "'it's", "<0x0A>"]),
        st.text(max_size=5),
    ),
    max_size=14,
).map("".join)
BUILT = {name: built(name) for name in ("llama", "gemma")}


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(deadline=None)
@given(text=TEXTS)
def test_encodes_as_the_naive_algorithm(name: str, text: str):
    assert BUILT[name].encode(text, add_special_tokens=False) == naive(model(name), text)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(deadline=None)
@given(text=TEXTS)
def test_decodes_exactly(name: str, text: str):
    """A literal U+2581 is the spelling of a space, in SentencePiece as here."""
    tokenizer = BUILT[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text.replace("▁", " ")


def test_gemma4_has_ranked_merges_over_the_whole_text():
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "▁",
        "a",
        "b",
        "\n",
        "▁a",
        "▁ab",
        "b\n",
        "<turn|>",
        *map("<0x{:02X}>".format, range(256)),
    ]
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3, *[6] * 256],
            "tokenizer.ggml.merges": ["▁ a", "▁a b", "b \n"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    assert tokenizer is not None
    ids = tokenizer.encode(" ab  ab\nb\né<turn|>")
    assert [tokens[token] for token in ids] == (
        ["<bos>", "▁ab", "▁", "▁ab", "\n", "b\n", "<0xC3>", "<0xA9>", "<turn|>"]
    )
    assert tokenizer.decode(ids) == " ab  ab\nb\né"
    assert tokenizer.eos_token_ids == (1, 10)


def test_token_bytes():
    tokenizer = built()
    index = {piece: i for i, piece in enumerate(model("llama").pieces)}
    assert tokenizer.token_bytes(index["<0xF0>"]) == b"\xf0"
    assert tokenizer.token_bytes(index["▁the"]) == b" the"
    assert tokenizer.token_bytes(index["▁▁▁"]) == b"   "
    assert tokenizer.token_bytes(index["<sep>"]) == b"<sep>"
    assert tokenizer.token_bytes(index["</s>"]) == b"</s>"


def test_defaults_of_the_kind():
    """Without keys: <s> is 1 and opens every text, </s> is 2, <unk> is 0, and a space is put before the text."""
    tokenizer = built(add_space_prefix=None)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("the") == [1, list(model("llama").pieces).index("▁the")]
    assert tokenizer.encode("") == [1]
    assert built(add_bos_token=False).encode("the") == tokenizer.encode("the")[1:]


def test_space_after_control_tokens_but_not_after_user_defined_pieces():
    tokenizer = built()
    pieces = list(model("llama").pieces)
    the, plain, sep = (
        pieces.index("▁the"),
        tokenizer.backend.encode("the", add_special_tokens=False).ids,
        pieces.index("<sep>"),
    )
    assert tokenizer.encode("</s>the</s></s>") == [1, 2, the, 2, 2]
    assert tokenizer.encode("the<sep>the") == [1, the, sep, *plain]
    assert tokenizer.encode("<s>the") == [1, the]


def test_token_added_by_fine_tuning_is_followed_by_a_space():
    """Converters give such tokens the score -1000; their tokenizer.json puts a space after them."""
    pieces, types = list(model("llama").pieces), list(model("llama").types)
    tokenizer = built(tokens=[*pieces, "<|user|>"], token_type=[*types, 4], scores=[*model("llama").scores, -1000.0])
    assert tokenizer.encode("the<|user|>the") == [1, pieces.index("▁the"), len(pieces), pieces.index("▁the")]


@pytest.mark.parametrize("kind", [PieceType.CONTROL, PieceType.USER_DEFINED])
@pytest.mark.parametrize("with_pieces", [False, True])
def test_phi3_tokens_swallow_white_space(kind: PieceType, with_pieces: bool):
    """Also where there are user-defined pieces of the model's own, which need another way."""
    pieces, types = list(model("llama").pieces), list(model("llama").types)
    if not with_pieces:
        types = [PieceType.NORMAL if other == PieceType.USER_DEFINED else other for other in types]
    keys = metadata(
        "llama", tokens=[*pieces, "<|user|>"], token_type=[*types, kind], scores=[*model("llama").scores, -1000.0]
    )
    tokenizer = tokenizer_from_gguf(keys | {"general.architecture": "phi3"})
    assert tokenizer is not None
    the = pieces.index("▁the")
    assert tokenizer.encode("<|user|>\n the <s>  ")[:4] == [1, len(pieces), the, pieces.index("▁")]
    other = tokenizer_from_gguf(keys)
    assert other is not None
    assert pieces.index("\n") in other.encode("<|user|>\nthe")


def test_unknown_characters_without_byte_fallback():
    tokenizer = built("rules")
    assert tokenizer.encode("ᚠᚠᚠ", add_special_tokens=False) == [list(model("rules").pieces).index("▁"), 0]


@pytest.mark.parametrize("scores", [None, "constant"])
def test_file_without_scores_uses_ids_and_says_so(scores, caplog):
    values = None if scores is None else [-1000.0] * len(model("llama").pieces)
    with caplog.at_level(logging.WARNING):
        tokenizer = built(scores=values)
    assert "ranking merges by token id" in caplog.text
    for text, ids in zip(EXPECTED["texts"], EXPECTED["llama"]["ids"], strict=True):
        if "<sep>" not in text:  # a late user-defined piece counts as added by fine-tuning
            assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_scores_rank_and_not_ids():
    """The same vocabulary with its ids turned round."""
    count = len(model("llama").pieces)
    keys = {"tokens": model("llama").pieces, "scores": model("llama").scores, "token_type": model("llama").types}
    tokenizer = built(
        **{key: list(values)[::-1] for key, values in keys.items()},
        **{f"{name}_token_id": count - 1 - i for i, name in enumerate(("unknown", "bos", "eos"))},
    )
    assert tokenizer.opening_ids == (count - 2,)
    for text, ids in zip(EXPECTED["texts"], EXPECTED["llama"]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [count - 1 - token for token in ids]


def test_file_without_types_guesses_them():
    tokenizer = built("gemma", token_type=None, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("ᚠ the lazy dog")) == "ᚠ the lazy dog"


def test_model_file_gives_the_same_as_gguf(tmp_path):
    for name in ("llama", "gemma", "rules"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes((FIXTURES / f"{name}.model").read_bytes())
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        tokenizer = tokenizer_from_folder(folder)
        assert tokenizer is not None
        from_gguf = built(name)
        for text in EXPECTED["texts"]:
            assert tokenizer.encode(text) == from_gguf.encode(text)


def test_model_file_with_added_tokens(tmp_path):
    count = len(model("llama").pieces)
    (tmp_path / "tokenizer.model").write_bytes((FIXTURES / "llama.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": count, "<tool>": count + 2}))
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "<|user|>",
        "add_bos_token": False,
        "added_tokens_decoder": {str(count): {"content": "<|user|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("<|user|><tool>") == [count, count + 2]
    assert tokenizer.eos_token_ids == (count,)
    assert tokenizer.decode([count, count + 2]) == "<tool>"
    assert tokenizer.num_tokens == count + 3


@pytest.mark.parametrize("position", [-1, 5, 10**12])
def test_added_token_with_an_impossible_id_is_refused(position: int):
    with pytest.raises(ValueError, match=f"added token '<|x|>' .*id {position}"):
        model("llama").extended({"<|x|>": position}, ())


@given(cut=st.integers(0, 1100), junk=st.binary(max_size=8), offset=st.integers(0, 1100))
@settings(deadline=None)
def test_damaged_charsmap_is_refused_or_harmless(cut: int, junk: bytes, offset: int):
    """`tokenizers` would panic on a trie that leads outside itself."""
    charsmap = bytearray(model("rules").charsmap)
    charsmap[offset : offset + len(junk)] = junk
    for damaged in (bytes(charsmap), bytes(charsmap[:cut])):
        try:
            tokenizer = built("rules", precompiled_charsmap=list(damaged))
        except ValueError as error:
            assert "precompiled_charsmap" in str(error)  # noqa: PT017 (some damage does no harm)
            continue
        for text in ("the ﬁne é", "\u3000e\u0301 \u00a0\t\nA"):
            tokenizer.encode(text)


def test_unigram_model_is_refused():
    with pytest.raises(ValueError, match=r"not a BPE model; .*jaxinfer\[sentencepiece\]"):
        read_model(FIXTURES / "unigram.model")


@settings(deadline=None)
@given(cut=st.integers(0, 6000), junk=st.binary(max_size=8))
def test_damaged_model_file_is_a_clear_error(cut: int, junk: bytes, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "tokenizer.model"
    path.write_bytes((FIXTURES / "llama.model").read_bytes()[:cut] + junk)
    try:
        read_model(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (a cut between two fields leaves a smaller but valid model)
