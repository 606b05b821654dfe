"""What generation returns: whole results, and the pieces of a stream."""

import dataclasses
from typing import Literal

from jaxinfer.sampling_logprobs import Logprob

type FinishReason = Literal["stop", "length", "error", "abort"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    `finish_reason` is "stop" (an end-of-text or stop id, or a stop string), "length" (`max_tokens` or the end of the
    context), "error" (the model's logits were not finite) or "abort" (it was taken back from an engine); `stop_reason`
    is the stop string or stop token id that matched, None for the model's own end-of-text, or what went wrong.
    `token_ids` includes the id that ended it, `text` does not. `logprobs` has one table for each token if they were
    asked for: token id to `Logprob`.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities; None unless logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(table[token].logprob for token, table in zip(self.token_ids, self.logprobs, strict=True))


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All completions of one prompt; `text`, `token_ids`, `logprobs`, `finish_reason` are those of the first.

    `prompt_logprobs`, if asked for, has one entry for each prompt token: None for the first, then a table.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def text(self) -> str | None:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.completions[0].stop_reason


@dataclasses.dataclass(frozen=True)
class Delta:
    """New tokens of one completion, as they come. `text` is what became certain with them, often empty.

    Joined over a stream, `text` and `token_ids` are those of the `Completion`. The last delta of a completion has a
    `finish_reason`. `request_id` says whose it is where requests have ids: in an engine.
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    request_id: str | None = None
