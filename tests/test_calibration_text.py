"""Calibration texts: what is read, how it is split by content, and the windows of tokens that are made of it."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from tokenizer_training import trained

from jaxinfer.quantization.calibration import Calibration, Windows
from jaxinfer.tokenization import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer(chat: bool = False) -> Tokenizer:
    return Tokenizer(trained("gpt-2"), chat_templates={"default": TEMPLATE} if chat else None)


def paragraphs(first: int, last: int) -> str:
    return "\n\n".join(f"Paragraph {number} says something about the number {number}." for number in range(first, last))


def words(documents: tuple) -> set[str]:
    """The paragraphs of texts and of messages."""
    texts = [d if isinstance(d, str) else "\n\n".join(m["content"] for m in d) for d in documents]
    return {paragraph for text in texts for paragraph in text.split("\n\n")}


def test_texts_are_split_by_content(tmp_path: pathlib.Path) -> None:
    """Order and number of the files decide nothing: a passage is on the same side wherever it comes from."""
    whole = tmp_path / "whole.txt"
    whole.write_text(paragraphs(0, 6000))
    split = Calibration.from_files(whole, evaluation_share=0.25)
    assert words(split.documents) | words(split.evaluation) == set(whole.read_text().split("\n\n"))
    assert not words(split.documents) & words(split.evaluation)
    share = sum(map(len, split.evaluation)) / len(whole.read_text())
    assert 0.1 < share < 0.4
    again = Calibration.from_files([whole, whole], evaluation_share=0.25)
    assert words(again.evaluation) == words(split.evaluation)
    assert not words(again.documents) & words(again.evaluation)
    assert Calibration.from_files(whole, evaluation_share=0.0).evaluation == ()


def test_short_texts_have_both_sides_and_one_passage_says_what_is_missing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    short, single = tmp_path / "short.txt", tmp_path / "single.txt"
    for last in range(2, 12):
        short.write_text(paragraphs(0, last))
        split = Calibration.from_files(short)
        assert split.documents and split.evaluation
        assert words(split.documents) | words(split.evaluation) == set(short.read_text().split("\n\n"))
    for number in range(30):  # whatever its place: it is never all kept for evaluation
        single.write_text(f"A text of one paragraph, which has the number {number}, and not much else to say.")
        alone = Calibration.from_files(single)
        assert len(alone.documents) == 1 and alone.evaluation == ()
    assert len(Calibration.from_files(single).windows(tokenizer(), 64).evaluation) == 0
    assert "single.txt: no text is kept apart to judge by" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "a calibration file is ''; expected the path"),
        ((3,), "a calibration file is 3; expected the path"),
        (([None],), "a calibration file is None; expected the path"),
    ],
)
def test_files_of_a_wrong_type_are_refused_in_one_line(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calibration.from_files(*arguments)
    text: Any = "a text"
    with pytest.raises(ValueError, match="documents is str; expected a tuple of texts"):
        Calibration(text, (), "a text")
    with pytest.raises(ValueError, match="samples=True; expected a whole number"):
        Calibration(("a text",), (), "a text", samples=True)


def test_what_evaluation_has_is_taken_out(tmp_path: pathlib.Path) -> None:
    """A paragraph in other spacing and case, and a conversation that quotes one; system prompts are shared by all."""
    system = {"role": "system", "content": "You are a helpful assistant of a library in Paris."}
    shared = "The opening hours of the library are from nine to five."
    lines = [
        {"messages": [system, {"role": "user", "content": "When is it open, and on which days of the week?"}]},
        {"messages": [system, {"role": "user", "content": shared.upper()}]},
        {"text": f"Something that is nowhere else at all, really.\n\n{shared.replace(' ', '  ')}\n\nYes."},
        {"prompt": "What is this?", "completion": "Nothing that has been said before, I think."},
    ]
    calibration, evaluation = tmp_path / "own.jsonl", tmp_path / "held.jsonl"
    calibration.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    held = {"messages": [system, {"role": "user", "content": "Hours?"}, {"role": "assistant", "content": shared}]}
    evaluation.write_text(json.dumps(held))
    split = Calibration.from_files(calibration, evaluation=evaluation)
    assert split.documents == (
        tuple(lines[0]["messages"]),
        "Something that is nowhere else at all, really.\n\nYes.",
        (
            {"role": "user", "content": "What is this?"},
            {"role": "assistant", "content": "Nothing that has been said before, I think."},
        ),
    )
    with pytest.raises(ValueError, match=r"held.jsonl: no text is left to calibrate with"):
        Calibration.from_files(evaluation, evaluation=evaluation)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"bad.jsonl: line 1 is not JSON"),
        ('{"text": 3}', r'bad.jsonl: line 1 has no "messages", no "text", and no "prompt" with "completion"'),
        (
            '{"text": "a"}\n{"messages": [{"role": "user"}]}',
            r'line 2 has the message .* expected a "role"',
        ),
        ('{"messages": []}', r'line 1 has no "messages"'),
    ],
)
def test_files_that_are_wrong(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Calibration.from_files(path)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        Calibration.from_files(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 text: byte 3"):
        Calibration.from_files(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match="no calibration files are given"):
        Calibration.from_files([])
    with pytest.raises(ValueError, match=r"length=1; expected a whole number from 2"):
        Calibration.bundled(length=1)


def test_windows_are_the_documents_tokens() -> None:
    """Whole windows, one document after the other; too many are thinned out evenly."""
    text = tokenizer()
    documents = (paragraphs(0, 30), paragraphs(30, 60))
    stream = [token for document in documents for token in text.encode(document)]
    every = Calibration(documents, (), "x", samples=10_000, length=16).windows(text, 2048)
    count = len(stream) // 16
    np.testing.assert_array_equal(every.calibration, np.array(stream[: count * 16]).reshape(count, 16))
    assert len(every.evaluation) == 0
    some = Calibration(documents, (), "x", samples=5, length=16).windows(text, 2048)
    np.testing.assert_array_equal(some.calibration, every.calibration[[index * count // 5 for index in range(5)]])
    assert Calibration(documents, (), "x", samples=5, length=16).windows(text, 8).calibration.shape == (5, 8)
    short = Calibration(("a few words",), (), "x").windows(text, 2048)
    assert short.calibration.tolist() == [text.encode("a few words")]


def test_conversations_are_written_as_the_template_has_them() -> None:
    messages = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"})
    calibration = Calibration((messages,), (), "x")
    chat, plain = tokenizer(chat=True), tokenizer()
    with_template = calibration.windows(chat, 2048).calibration[0]
    assert chat.decode(with_template, skip_special_tokens=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nGood day<|im_end|>\n"
    )
    assert plain.decode(calibration.windows(plain, 2048).calibration[0]) == "Hello\n\nGood day"


def test_bundled_texts() -> None:
    """Long enough for what is asked of them, plain text, and apart."""
    bundled = Calibration.bundled()
    assert len(bundled.documents[0]) > 140_000
    assert sum(map(len, bundled.evaluation)) > 500_000
    assert str(bundled.documents[0]).startswith("CHAPTER I\n\nDown the Rabbit-Hole\n\nAlice was beginning")
    assert not {p for p in words(bundled.documents) & words(bundled.evaluation) if len(p) > 32}
    assert isinstance(bundled.windows(tokenizer(), 64), Windows)
    assert repr(bundled).startswith(
        'Calibration("Alice\'s Adventures in Wonderland (bundled)", 1 documents, 2 for eval'
    )


def test_lines_of_jsonl_end_with_line_feeds_alone(tmp_path: pathlib.Path) -> None:
    """JSON may hold U+2028 and its like as they are; a byte order mark is no part of the first line."""
    file = tmp_path / "texts.jsonl"
    texts = [f"Document {k}.\u2028It goes on\u0085and on." for k in range(40)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    calibration = Calibration.from_files(file)
    assert sorted((*calibration.documents, *calibration.evaluation)) == sorted(texts)
    file.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Calibration.from_files(file)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 50]], "ids: calibration holds 50; token ids of this model are 0 to 49"),
        ([[-1, 0]], "ids: calibration holds -1"),
        ([[0] * 9], "ids: calibration has rows of 9 tokens; the context is 8"),
    ],
)
def test_token_ids_that_a_model_cannot_read_are_refused(ids: list[list[int]], message: str) -> None:
    """They would be looked up in the embedding all the same: XLA takes the nearest row."""
    nothing = np.zeros((0, 0), np.int32)
    Windows(np.array([[0, 49]], np.int32), nothing, "ids").check(num_tokens=50, longest=8)
    with pytest.raises(ValueError, match=message):
        Windows(np.array(ids, np.int32), nothing, "ids").check(num_tokens=50, longest=8)
    with pytest.raises(ValueError, match=message.replace("calibration", "evaluation")):
        Windows(nothing, np.array(ids, np.int32), "ids").check(num_tokens=50, longest=8)
