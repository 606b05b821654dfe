"""Conversations as text for lm-evaluation-harness, whose last message may be left open, to be continued."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.tokenization import Tokenizer

log = logging.getLogger("jaxinfer")

MARK = "\u2060continue here\u2060 "
"""Stands where an unfinished last message ends. Its space shows whether the template trims messages."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, **options: Any
) -> str:
    """The conversation as text; without a generation prompt it ends where the last message does.

    A template that refuses a system message is given the conversation without it, with a warning. Raises ValueError if
    it refuses that too, or leaves out the message that is to be continued.
    """
    history = [dict(message) for message in messages]
    if not add_generation_prompt:
        history[-1]["content"] += MARK
    try:
        text = tokenizer.render_chat(history, add_generation_prompt=add_generation_prompt, **options)
    except ValueError as error:
        rest = [message for message in history if message["role"] != "system"]
        if len(rest) == len(history):
            raise
        log.warning("the chat is rendered without its system message: %s", error)
        text = tokenizer.render_chat(rest, add_generation_prompt=add_generation_prompt, **options)
    if add_generation_prompt:
        return text
    before, found, after = text.rpartition(MARK.rstrip())
    if not found:
        raise ValueError("the chat template leaves out the last message, which was to be continued")
    return before if after.startswith(" ") else before.rstrip()
