"""One row of a batch on the host: its prompt, its limits, and what it has said so far."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.model import Model
from jaxinfer.outputs import Completion, Delta, FinishReason
from jaxinfer.sampling_logprobs import Logprob
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import TextStream

type Prompt = str | Sequence[int] | np.ndarray
"""Text, or token ids: a sequence of integers or a NumPy array [tokens]."""


def encode_prompt(model: Model, prompt: Prompt, index: int) -> tuple[int, ...]:
    """Token ids of a prompt, checked. Raises ValueError naming the prompt and the remedy."""
    where = f"prompt {index}"
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{where} is text, but {model.name} has no tokenizer; give token ids instead")
        ids = model.tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"{where} is empty: {prompt!r} gives no tokens with this tokenizer; give some text")
    else:
        ids = list(prompt)
        if not ids:
            raise ValueError(f"{where} is an empty list of token ids; give at least one")
    longest = model.config.max_position_embeddings
    if len(ids) > longest:
        raise ValueError(f"{where} has {len(ids)} tokens, but the context of {model.name} is {longest}; shorten it")
    if set(map(type, ids)) != {int}:  # one pass in C: asking each token costs 3 ms for 2048 of them
        for token in ids:
            if not isinstance(token, numbers.Integral) or isinstance(token, bool):
                raise ValueError(f"{where} holds {token!r}; a prompt is a string or a list of int token ids")
        ids = [int(token) for token in ids]
    known = model.config.num_tokens
    for token in (min(ids), max(ids)):
        if not 0 <= token < known:
            raise ValueError(f"{where} holds token id {token}; this model's ids are 0 to {known - 1}")
    return tuple(ids)


@dataclasses.dataclass
class Request:
    """One completion in the making. Fed with tokens by `take`, which returns what to tell the caller."""

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    stream: TextStream | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    tables: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_tables: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    """Tables of the prompt's tokens from the second on, if they were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @classmethod
    def create(
        cls,
        model: Model,
        prompt: tuple[int, ...],
        params: SamplingParams,
        prompt_index: int,
        sample_index: int,
        seed: int,
    ) -> "Request":
        """`max_tokens` is what was asked for, cut where the context ends (the last token needs no place in it)."""
        room = model.config.max_position_embeddings - len(prompt) + 1
        eos_ids = frozenset() if params.ignore_eos else frozenset(model.config.eos_token_ids)
        stream = None
        if model.tokenizer is not None:
            stream = TextStream(
                model.tokenizer,
                tuple(params.stop),
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        elif params.stop:
            raise ValueError(f"stop strings need a tokenizer and {model.name} has none; use stop_token_ids")
        return cls(
            prompt_index=prompt_index,
            sample_index=sample_index,
            prompt=prompt,
            params=params,
            seed=seed,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            eos_ids=eos_ids,
            stream=stream,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, tokens: Sequence[int], tables: Sequence[dict[int, Logprob]], failed: bool) -> Delta | None:
        """Adds the tokens of one chunk, decides whether they end the completion, and returns the news if any.

        `failed`: the device found logits that were not finite after these tokens.
        """
        if self.finished:
            return None
        text, taken = "", 0
        for token in tokens:
            taken += 1
            self.token_ids.append(token)
            ended_by_id = token in self.stop_ids
            if self.stream is not None and (not ended_by_id or self.params.include_stop_str_in_output):
                text += self.stream.push([token])
            if self.stream is not None and self.stream.stopped:
                self._finish("stop", self.stream.stop_reason)
            elif ended_by_id:
                self._finish("stop", None if token in self.eos_ids else token)
            elif len(self.token_ids) >= self.max_tokens:
                self._finish("length", None)
            if self.finished:
                break
        if failed and not self.finished:
            self._finish("error", "the model's logits are not finite (NaN or infinity) for this request")
        if self.finished and self.stream is not None:
            text += self.stream.finish()
        new_tables = tuple(tables[:taken])
        self.tables.extend(new_tables)
        if taken == 0 and not self.finished:
            return None
        return Delta(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=tuple(tokens[:taken]),
            text=text,
            logprobs=None if self.params.logprobs is None else new_tables,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def prompt_logprobs(self) -> tuple[dict[int, Logprob] | None, ...] | None:
        """None and then a table for each further prompt token, if they were asked for."""
        return None if self.params.prompt_logprobs is None else (None, *self.prompt_tables)

    def completion(self) -> Completion:
        """The finished completion."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            text=None if self.stream is None else self.stream.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.tables),
        )


def per_prompt(params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises ValueError if a list has another length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed = list(params)
    if len(listed) != num_prompts:
        raise ValueError(f"{len(listed)} sampling parameters for {num_prompts} prompts; give one each, or one for all")
    return listed
