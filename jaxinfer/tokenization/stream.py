"""Tokens to text, one request at a time: incremental detokenisation and stop strings."""

import codecs
import copy
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from jaxinfer.tokenization.tokenizer import Tokenizer


class TextStream:
    """The text of one request's generated tokens, as they come.

    The joined return values of `push` and `finish` are the decoding of the tokens given (up to a stop
    string), and are available at any time as `text`. A character is returned once all its bytes are there;
    bytes that can no longer become one turn into U+FFFD. The prompt is never given to the stream, so nothing
    of it can come out or match.

    With `stop`, text that may yet turn out to be the beginning of a stop string is held back. The match that
    is complete first counts; among those that end at the same character, the longest. It ends the stream:
    `stop_reason` is the string that matched, `num_tokens` the number of tokens up to and including the one
    that completed it, and the rest of that push is dropped (a step may bring several tokens). The text ends
    before the stop string, or after it with `include_stop_str_in_output`. Matches completed within the first
    `min_tokens` tokens do not count.

    Special tokens have no text unless `skip_special_tokens` is False. Raises ValueError for an empty stop
    string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stop: tuple[str, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self.stop:
            raise ValueError("stop contains an empty string, which matches everywhere; leave it out")
        self._tokenizer = tokenizer
        self._include_stop = include_stop_str_in_output
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._begin()

    def _begin(self) -> None:
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._returned: list[str] = []
        self._finished = False

    def fresh(self) -> "TextStream":
        """Another one for the same request, which has been given no tokens yet."""
        other = copy.copy(self)
        other._begin()
        return other

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._returned)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has matched; tokens pushed from then on are ignored."""
        return self.stop_reason is not None

    def push(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Takes the next tokens and returns the text that is certain now, often empty."""
        if self._finished:
            raise ValueError("push after finish: a TextStream serves one request; make a new one for the next")
        if not self.stop:  # nothing can match half-way: all at once
            ids = list(map(int, token_ids))
            self.num_tokens += len(ids)
            return self._give(self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_special_tokens)))
        delta = ""
        for token in map(int, token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            if self._skip_special_tokens and token in self._tokenizer.special_ids:
                continue
            delta += self._advance(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return self._give(delta)

    def finish(self) -> str:
        """Returns the text still held back, U+FFFD for an incomplete character, and closes the stream."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        delta = self._advance(self._utf8.decode(b"", final=True))
        delta += self._held
        self._held = ""
        return self._give(delta)

    def _give(self, delta: str) -> str:
        if delta:
            self._returned.append(delta)
        return delta

    def _advance(self, new: str) -> str:
        """Text that is certain after `new`, in which a stop string may have ended."""
        if not self.stop or not new:
            return new
        window = self._held + new
        if self.num_tokens > self._min_tokens:
            match = self._first_match(window)
            if match is not None:
                start, end, self.stop_reason = match
                self._held = ""
                return window[: end if self._include_stop else start]
        held = self._num_held(window)
        self._held = window[len(window) - held :]
        return window[: len(window) - held]

    def _first_match(self, window: str) -> tuple[int, int, str] | None:
        """The match in `window` that ends first, beyond the text that was there before."""
        matches = []
        for stop in self.stop:
            start = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        end, start, stop = min(matches)
        return start, end, stop

    def _num_held(self, window: str) -> int:
        """Length of the longest end of `window` that is the beginning of a stop string."""
        longest = min(len(window), max(map(len, self.stop)) - 1)
        for length in range(longest, 0, -1):
            end = window[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.stop):
                return length
        return 0
