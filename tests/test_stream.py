"""Incremental text and stop strings against whole-text decoding and a character-by-character reference."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_training import gguf_metadata

from jaxinfer.tokenization import TextStream, Tokenizer, tokenizer_from_gguf


def word_tokenizer(*words: str) -> Tokenizer:
    """Token i is words[i], and text is the words joined: the alphabet of the Markov test models."""
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)})))


def built() -> Tokenizer:
    tokenizer = tokenizer_from_gguf(gguf_metadata("smollm"))
    assert tokenizer is not None
    return tokenizer


BYTE_LEVEL = built()
MARKOV = word_tokenizer("A", "BC", "DEF", "G")


def run(stream: TextStream, tokens: list[int], sizes: list[int] | None = None) -> list[str]:
    """Deltas for pushes of the given sizes (all of size one by default), and the end."""
    deltas, start = [], 0
    for size in sizes or [1] * len(tokens):
        deltas.append(stream.push(tokens[start : start + size]))
        start += size
    deltas.append(stream.push(tokens[start:]))
    return [*deltas, stream.finish()]


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, BYTE_LEVEL.num_tokens - 1), max_size=40),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    skip=st.booleans(),
)
def test_joined_deltas_are_the_whole_text(tokens: list[int], sizes: list[int], skip: bool):
    """Random tokens are mostly not valid UTF-8, which has to come out as when decoded at once."""
    stream = TextStream(BYTE_LEVEL, skip_special_tokens=skip)
    deltas = run(stream, tokens, sizes)
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)
    assert "".join(deltas) == stream.text == whole
    assert stream.num_tokens == len(tokens)
    assert stream.stop_reason is None
    assert not stream.stopped


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_no_delta_is_part_of_a_character(text: str):
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    deltas = run(TextStream(BYTE_LEVEL, skip_special_tokens=False), tokens)
    assert "".join(deltas) == text
    assert all(delta in text for delta in deltas)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_character_comes_out_with_its_last_byte():
    tokens = [BYTE_LEVEL.backend.token_to_id(c) for c in "ðŁĺĢ"]  # the four bytes of an emoji, spelled
    stream = TextStream(BYTE_LEVEL)
    assert [stream.push([token]) for token in tokens] == ["", "", "", "😀"]
    stream = TextStream(BYTE_LEVEL)
    assert [stream.push(tokens[:3]), stream.finish()] == ["", "\ufffd"]


def test_trap_a5_prompt_that_ends_within_a_character_does_not_leak():
    """vllm#48853: the prompt ends with the first bytes of a character, generation brings the others."""
    emoji = [BYTE_LEVEL.backend.token_to_id(c) for c in "ðŁĺĢ"]
    prompt = BYTE_LEVEL.encode("Hello world ") + emoji[:2]
    generated = emoji[2:] + BYTE_LEVEL.encode("The fox")
    assert BYTE_LEVEL.decode(prompt + generated) == "Hello world 😀The fox"
    stream = TextStream(BYTE_LEVEL, stop=["Hello"])
    deltas = run(stream, generated)
    assert "".join(deltas) == stream.text == BYTE_LEVEL.decode(generated) == "\ufffd\ufffdThe fox"
    assert stream.stop_reason is None


def test_sentencepiece_keeps_the_space_of_the_first_token():
    """A generated token follows a prompt, so its space is real; only a whole text starts with the encoder's own."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -1.0, *[0.0] * 256],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, *[6] * 256],
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer is not None
    tokens = tokenizer.encode("a é", add_special_tokens=False)
    assert tokens == [6, 3, pieces.index("<0xC3>"), pieces.index("<0xA9>")]
    assert run(TextStream(tokenizer), tokens) == [" a", " ", "", "é", "", ""]
    assert tokenizer.decode(tokens) == "a é"


@pytest.mark.parametrize(
    ("stop", "text", "included", "reason", "num_tokens"),
    [
        (["DE"], "ABC", "ABCDE", "DE", 3),
        (["CDEFG"], "AB", "ABCDEFG", "CDEFG", 4),
        (["F", "EF"], "ABCD", "ABCDEF", "EF", 3),
        (["FG", "CD", "B"], "A", "AB", "B", 2),
        ("DEF", "ABC", "ABCDEF", "DEF", 3),
        (["X", "GG"], "ABCDEFG", "ABCDEFG", None, 4),
        (["bcd", "BCX", "ABCDEFGH"], "ABCDEFG", "ABCDEFG", None, 4),
    ],
)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4], [2, 2], [0, 3, 1]])
def test_trap_d1_stop_text_inside_and_across_tokens(stop, text: str, included: str, reason, num_tokens: int, sizes):
    """vllm#3572: the stop text is hidden in a token or spans several."""
    for include, expected in ((False, text), (True, included)):
        stream = TextStream(MARKOV, stop, include_stop_str_in_output=include)
        deltas = run(stream, [0, 1, 2, 3], sizes)
        assert "".join(deltas) == stream.text == expected
        assert stream.stop_reason == reason
        assert stream.stopped == (reason is not None)
        assert stream.num_tokens == num_tokens
        for position in range(len(deltas)):
            assert expected.startswith("".join(deltas[: position + 1]))


def test_empty_stop_string_is_refused():
    for stop in ([""], ["DE", ""], ""):
        with pytest.raises(ValueError, match="empty string"):
            TextStream(MARKOV, stop)


def test_only_what_may_become_a_stop_is_held_back():
    stream = TextStream(MARKOV, ["CDX"])
    assert [stream.push([token]) for token in (0, 1, 2, 3)] == ["A", "B", "CDEF", "G"]
    stream = TextStream(MARKOV, ["CDEFX"])
    assert [stream.push([token]) for token in (0, 1, 2)] == ["A", "B", ""]
    assert stream.text == "AB"
    assert stream.finish() == "CDEF"
    assert stream.text == "ABCDEF"


def test_stop_completed_by_the_end_of_the_bytes():
    stream = TextStream(BYTE_LEVEL, ["\ufffd"])
    assert stream.push([BYTE_LEVEL.backend.token_to_id("ð")]) == ""
    assert stream.finish() == ""
    assert stream.stop_reason == "\ufffd"


def test_special_tokens_have_no_text_and_break_no_match():
    stop = BYTE_LEVEL.encode("fox")
    stream = TextStream(BYTE_LEVEL, ["fox"])
    assert run(stream, [1, *stop[:1], 2, *stop[1:]])[-1] == ""
    assert (stream.text, stream.stop_reason, stream.num_tokens) == ("", "fox", len(stop) + 2)
    assert run(TextStream(BYTE_LEVEL, skip_special_tokens=False), [1]) == ["<|im_start|>", "", ""]


def test_min_tokens():
    """Matches completed by the first tokens do not count, one that only begins there does."""
    for min_tokens, text, reason in ((0, "A", "BC"), (1, "A", "BC"), (2, "ABCDEFGA", "BC"), (6, "ABCDEFGABC", None)):
        stream = TextStream(MARKOV, ["BC"], min_tokens=min_tokens)
        run(stream, [0, 1, 2, 3, 0, 1])
        assert (stream.text, stream.stop_reason) == (text, reason)
    stream = TextStream(MARKOV, ["CD"], min_tokens=2)
    run(stream, [0, 1, 2, 3])
    assert (stream.text, stream.stop_reason) == ("AB", "CD")


def test_stop_completed_too_early_stays_ignored():
    """BC, complete within the first two tokens, is still held back as part of ABCX when the third comes."""
    stream = TextStream(MARKOV, ["ABCX", "BC"], min_tokens=2)
    assert [stream.push([token]) for token in (0, 1, 3)] == ["", "", "ABCG"]
    assert not stream.stopped


def test_after_the_end():
    stream = TextStream(MARKOV, ["DE"])
    assert stream.push([0, 1, 2, 3, 3, 3]) == "ABC"
    assert stream.push([3]) == ""
    assert stream.finish() == stream.finish() == ""
    with pytest.raises(ValueError, match="push after finish"):
        stream.push([0])


LETTERS = word_tokenizer("a", "b", "ab", "ba", "aab", "c", "bca", "é")
STOPS = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3)


def reference(words: list[str], stops: list[str], min_tokens: int) -> tuple[int, int, str] | None:
    """(start, end, stop) of the match that is complete first, reading one character at a time."""
    text = "".join(words)
    least = len("".join(words[:min_tokens]))
    for end in range(least + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return end - len(stop), end, stop
    return None


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), max_size=15),
    stops=STOPS,
    sizes=st.lists(st.integers(0, 4), max_size=8),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stops_as_the_reference(tokens, stops, sizes, include: bool, min_tokens: int):
    words = [LETTERS.token_bytes(token).decode() for token in tokens]
    text, match = "".join(words), reference(words, stops, min_tokens)
    stream = TextStream(LETTERS, stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    deltas = run(stream, tokens, sizes)
    if match is None:
        expected, num_tokens = text, len(tokens)
    else:
        start, end, stop = match
        expected = text[: end if include else start]
        num_tokens = next(n for n in range(len(words) + 1) if len("".join(words[:n])) >= end)
        assert stream.stop_reason == stop
    assert stream.stopped == (match is not None)
    assert "".join(deltas) == stream.text == expected
    assert stream.num_tokens == num_tokens
