"""One row of a batch on the host: its prompt, its limits, and what it has said so far."""

import dataclasses
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set

import jax
import numpy as np

from jaxinfer.model import Model
from jaxinfer.outputs import Completion, Delta, FinishReason
from jaxinfer.sampling_logprobs import Logprob
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import TextStream

type Prompt = str | Sequence[int] | np.ndarray | jax.Array
"""Text, or token ids: a sequence of integers or an array [tokens]."""


_NO_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""Can be iterated over, but are neither text nor a sequence of token ids, whatever they hold."""


class RequestTooLong(ValueError):
    """A prompt, or what was asked for with it, does not fit in the context or in the memory there is."""


def list_prompts(prompts: object) -> list[object]:
    """The prompts one by one; a string or integers are a single one. Raises ValueError for what holds no prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):  # elements of JAX's and PyTorch's arrays are arrays, not numbers
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Iterable) or isinstance(prompts, _NO_PROMPTS):
        raise ValueError(
            f"prompts is {reprlib.repr(prompts)}; expected a string, a list of token ids, or a list of either"
        )
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], numbers.Integral) else listed


def encode_prompt(model: Model, prompt: object, index: int) -> tuple[int, ...]:
    """Token ids of a prompt, checked. Raises ValueError naming the prompt and the remedy."""
    where = f"prompt {index}"
    if hasattr(prompt, "__array__"):
        prompt = np.asarray(prompt).tolist()
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{where} is text, but {model.name} has no tokenizer; give token ids instead")
        try:
            ids = model.tokenizer.encode(prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not ids:
            raise ValueError(f"{where} is empty: {prompt!r} gives no tokens with this tokenizer; give some text")
    elif isinstance(prompt, Iterable) and not isinstance(prompt, _NO_PROMPTS):
        ids = list(prompt)
        if not ids:
            raise ValueError(f"{where} is an empty list of token ids; give at least one")
    else:
        raise ValueError(f"{where} is {reprlib.repr(prompt)}; a prompt is a string or a list of int token ids")
    known = model.config.num_tokens
    # The usual case costs no Python call a token: a long prompt would wait for a millisecond of them.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= known:
        _check_ids(ids, known, where)
    longest = model.config.max_position_embeddings
    if len(ids) > longest:
        raise RequestTooLong(f"{where} has {len(ids)} tokens, but the context of {model.name} is {longest}; shorten it")
    return tuple(map(int, ids))


def _check_ids(ids: Sequence[object], known: int, where: str) -> None:
    """Raises ValueError for the first that is no token id."""
    for token in ids:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool):
            raise ValueError(f"{where} holds {reprlib.repr(token)}; a prompt is a string or a list of int token ids")
        if not 0 <= int(token) < known:
            raise ValueError(f"{where} holds token id {reprlib.repr(token)}; this model's ids are 0 to {known - 1}")


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
    request_id: str | None = None
    """What its deltas say of whose they are."""
    num_sure: int = 0
    """Tokens that were taken in completely. An interrupt may leave those behind half-taken, until `rewind`."""
    end_is_sure: bool = False
    """So is the reason why it ended."""

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
        forbidden = {*params.stop_token_ids, *model.config.eos_token_ids}
        if params.min_tokens > 0 and forbidden.issuperset(range(model.config.num_tokens)):
            raise ValueError(
                f"prompt {prompt_index}: min_tokens={params.min_tokens} forbids the end-of-text and stop token ids, "
                "which are the whole vocabulary; give fewer stop_token_ids"
            )
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
        """`add`, and the news if there is any."""
        if self.finished:
            return None
        taken, text = self.add(tokens, tables, failed)
        if taken == 0 and not self.finished:
            return None
        return self.delta(tokens[:taken], text, tables[:taken])

    def add(self, tokens: Sequence[int], tables: Sequence[dict[int, Logprob]], failed: bool) -> tuple[int, str]:
        """Adds the tokens of one chunk and decides whether they end the completion, which must not have ended.

        `failed`: the device found logits that were not finite after these tokens. Returns how many tokens were taken,
        and their text.
        """
        if self._goes_on(tokens):
            taken, text = len(tokens), ""
            self.token_ids += tokens
            if self.stream is not None:
                text = self.stream.push(tokens)
        else:
            taken, text = self._take_each(tokens)
        if failed and not self.finished:
            self._finish("error", "the model's logits are not finite (NaN or infinity) for this request")
        if self.finished and self.stream is not None:
            text += self.stream.finish()
            if self.finish_reason == "length" and self.stream.stopped:  # U+FFFD for half a character can complete one
                self._finish("stop", self.stream.stop_reason)
        if tables:
            self.tables.extend(tables[:taken])
        return taken, text

    def rewind(self) -> None:
        """Forgets what an interrupt may have left half-taken: all behind the first `num_sure` tokens."""
        if self.end_is_sure:
            return
        tokens, tables = self.token_ids[: self.num_sure], self.tables[: self.num_sure]
        stream = None if self.stream is None else self.stream.fresh()
        if stream is not None:
            stream.push(tokens)
        self.token_ids, self.tables, self.stream = tokens, tables, stream
        self.finish_reason = self.stop_reason = None

    def delta(self, tokens: Sequence[int], text: str, tables: Sequence[dict[int, Logprob]]) -> Delta:
        """News of tokens that were added, and of the end if it has come."""
        return Delta(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=tuple(tokens),
            text=text,
            logprobs=None if self.params.logprobs is None else tuple(tables),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            request_id=self.request_id,
        )

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether no token of a chunk can end the completion: then they are taken all at once, ten times as fast."""
        if len(self.token_ids) + len(tokens) >= self.max_tokens or (self.stream is not None and self.stream.stop):
            return False
        return not self.stop_ids or self.stop_ids.isdisjoint(tokens)

    def _take_each(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Takes tokens until one ends the completion; returns how many that were, and their text."""
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
        return taken, text

    def end(self, reason: FinishReason, stop_reason: str | None) -> Delta:
        """Ends the completion from outside, and returns the news: text held back so far, and the reason."""
        if self.finished:
            raise ValueError(f"the completion has ended already ({self.finish_reason})")
        self._finish(reason, stop_reason)
        return self.delta((), "" if self.stream is None else self.stream.finish(), ())

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


def per_prompt(params: object, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises ValueError for a list of another length and for anything else."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Iterable) or isinstance(params, str | Mapping) or getattr(params, "ndim", 1) == 0:
        raise ValueError(
            f"params is {reprlib.repr(params)}; expected a SamplingParams or a list with one for each prompt"
        )
    listed = list(params)
    for row in listed:
        if not isinstance(row, SamplingParams):
            raise ValueError(f"params holds {reprlib.repr(row)}; expected SamplingParams only")
    if len(listed) != num_prompts:
        raise ValueError(f"{len(listed)} sampling parameters for {num_prompts} prompts; give one each, or one for all")
    return listed
