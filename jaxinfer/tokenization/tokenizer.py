"""Tokenizer: text to token ids and back, with the model's own rules for special tokens and chats."""

import contextlib
import logging
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers

from jaxinfer.surrogates import not_unicode
from jaxinfer.tokenization import chat_template as chat
from jaxinfer.tokenization.token_bytes import TokenBytes

logger = logging.getLogger(__name__)


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a language model needs around it.

    Attributes:
        backend: the `tokenizers` object. Its post-processor is the rule for the tokens that open a text.
        bos_token_id: the token that opens a text, whether or not `encode` adds it; None if the model has
        none.
        eos_token_ids: every token that ends a generation (end of text, of turn, of message), the main one
        first.
        num_tokens: highest token id + 1. A model's logits may be longer: ids from here on are padding.
        special_ids: ids without text of their own (control tokens).
        chat_templates: by name; the one used when nothing is asked for is "default".
        special_tokens: the text of those that chat templates know by a name ("bos_token", "eos_token", ...).
        prepare_text: what is done to a text before `backend` encodes it, None for nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[SupportsIndex] = (),
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        prepare_text: Callable[[str], str] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Wraps `backend`.

        `special_tokens` are the names that a chat template sees ("bos_token", "eos_token", ...).
        `prepare_text` is applied to a text before `backend` encodes it. `num_tokens` overrides the count
        where the vocabulary ends in entries that stand for nothing.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_templates = dict(chat_templates or {})
        self.special_tokens = dict(special_tokens or {})
        self.prepare_text = prepare_text
        self._bytes = TokenBytes(backend)
        self.num_tokens = num_tokens or max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        named = [backend.token_to_id(token) for token in self.special_tokens.values()]
        self.special_ids = frozenset(
            [token for token, added in backend.get_added_tokens_decoder().items() if added.special]
            + [token for token in named if token is not None]
            + ([] if bos_token_id is None else [bos_token_id])
            + list(self.eos_token_ids)
        )
        self._prefix, self._suffix = added_by_post_processor(backend)
        self._suffix_reported = False

    def __repr__(self) -> str:
        return (
            f"Tokenizer(num_tokens={self.num_tokens}, bos_token_id={self.bos_token_id}, "
            f"eos_token_ids={self.eos_token_ids}, chat_templates={sorted(self.chat_templates)})"
        )

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Tokens that `encode` puts before a text: usually BOS or nothing."""
        return tuple(self._prefix)

    @property
    def chat_template(self) -> str | None:
        """The chat template used by default, or None."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, opened by BOS if the model's own rule says so.

        A text that already starts with the opening tokens does not get them twice. A closing EOS is never
        added: after it a model has nothing to continue. Special tokens written out in the text are
        recognised. Raises ValueError for a text that is not Unicode (half a surrogate pair, which stands for bytes that
        were not UTF-8) and for one that the vocabulary has no tokens for.
        """
        if not isinstance(text, str):
            raise ValueError(f"the text is {reprlib.repr(text)}; expected a string, one at a time")
        problem = not_unicode(text)
        if problem is not None:
            raise ValueError(f"the text {problem}")
        if self.prepare_text is not None:
            text = self.prepare_text(text)
        with backend_errors("the tokenizer cannot encode this text"):
            ids = self.backend.encode(text, add_special_tokens=False).ids
        if not add_special_tokens:
            return ids
        if self._suffix and not self._suffix_reported:
            self._suffix_reported = True
            logger.warning(
                "the tokenizer closes texts with token %s; left out, as a prompt is there to be continued",
                self._suffix,
            )
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of token ids; bytes that are not UTF-8 become U+FFFD.

        Exactly the tokens' bytes: no space is cleaned up. Only the leading space that a SentencePiece encoder
        put there itself is taken off. `TextStream` is for text that continues a prompt.
        """
        text = self.decode_bytes(ids, skip_special_tokens).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._bytes.strips_leading_space else text

    def decode_bytes(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> bytes:
        """Bytes of a sequence of token ids, joined."""
        try:
            spelled = list(map(operator.index, ids))
        except TypeError as error:
            raise ValueError(f"the token ids are {reprlib.repr(ids)}; expected a list of integers") from error
        if skip_special_tokens and not self.special_ids.isdisjoint(spelled):
            spelled = [token for token in spelled if token not in self.special_ids]
        known = self._bytes.joined(spelled)
        return b"".join(map(self.token_bytes, spelled)) if known is None else known

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that a token stands for, often part of a character; of a special token, its name."""
        if not 0 <= token_id < self.num_tokens:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.num_tokens} tokens")
        return self._bytes(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the text that the model was trained on.

        `messages` are dicts with "role" and "content"; `tools` are JSON schemas. `chat_template` is the name
        of one of `chat_templates` or a template itself; without it "tool_use" (if `tools` are given and it
        exists) or "default". `kwargs` reach the template, such as enable_thinking=False. Raises ValueError if
        there is no template or it refuses the messages.
        """
        if not isinstance(chat_template, str | None):
            raise ValueError(f"chat_template={reprlib.repr(chat_template)}; expected a template or the name of one")
        name, template = self._choose_template(chat_template, tools is not None)
        return chat.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            template_name=name,
            **kwargs,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`. The template writes BOS itself, so none is added."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template=chat_template,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def _choose_template(self, asked: str | None, has_tools: bool) -> tuple[str | None, str]:
        """Name, unless it is the caller's own, and text."""
        name = asked or ("tool_use" if has_tools and "tool_use" in self.chat_templates else "default")
        if name in self.chat_templates:
            return name, self.chat_templates[name]
        if asked is not None:
            if "{" in asked:
                return None, asked
            raise ValueError(
                f"chat_template={asked!r} is neither a Jinja template nor one of "
                f"{', '.join(sorted(self.chat_templates))}"
            )
        if self.chat_templates:
            raise ValueError(
                f"no default chat template; pass chat_template= one of {', '.join(sorted(self.chat_templates))}"
            )
        raise ValueError(
            "this model has no chat template (a base model?); give one (Python: chat_template=, a Jinja template), "
            "or encode a plain text"
        )


@contextlib.contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Turns what `tokenizers` raises in the block into a ValueError that begins with `what`.

    For what it cannot do it raises a bare Exception, and where a file misleads it, its Rust code panics, which Python
    sees as a BaseException of no importable type.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(f"{what} ({error})") from error
        raise


def added_by_post_processor(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the backend puts before and after a text."""
    if backend.post_processor is None:
        return [], []
    for probe in ("a", "1", ".", " "):
        with backend_errors("the tokenizer is damaged: it cannot encode a single character"):
            plain = backend.encode(probe, add_special_tokens=False).ids
            full = backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if plain and full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
    # No probe has tokens (a toy vocabulary): all that can be said of an empty text is what opens it.
    return backend.encode("", add_special_tokens=True).ids, []
