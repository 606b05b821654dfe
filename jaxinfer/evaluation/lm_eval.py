"""The model `jaxinfer` of lm-evaluation-harness. Token ids, windows and stop texts are those of its `hf` model.

Releases of the harness after 0.4.13 find it by its entry point. With earlier ones, import this module, or run
`python -m jaxinfer.evaluation`. From Python: `lm_eval.simple_evaluate(model=JaxinferLM(model), tasks=...)`.
"""

import collections
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  (fills the harness' registry, as happens later only if that is still empty)
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxinfer.evaluation.answers import collect
from jaxinfer.evaluation.generation_options import GenerationOptions
from jaxinfer.evaluation.open_chat import render_chat
from jaxinfer.evaluation.sample_log import SampleLog, weights_key
from jaxinfer.generation import stream
from jaxinfer.model import Model, load
from jaxinfer.scoring import opening_id, scored_pairs
from jaxinfer.scoring_plan import TokenPair
from jaxinfer.tokenization import Tokenizer

log = logging.getLogger("jaxinfer")

NAME = "jaxinfer"


class JaxinferLM(TemplateLM):
    """A jaxinfer model as the harness sees it.

    `pretrained` is a loaded `Model` or what `jaxinfer.load` takes, then with `dtype`, `packed` and `kv_dtype`.
    `max_length` makes the context shorter than the model's. `add_bos_token` and `prefix_token_id` overrule the
    tokenizer on what opens a text and what an empty context is. `chat_template_args` reach the chat template,
    `enable_thinking` among them; answers begin after `think_end_token`. `seed` is for tasks that sample. `samples_file`
    keeps every answer as a JSON line as soon as it is known, and a run that finds answers there does not compute them
    again.

    Work is batched by tokens and memory, whatever `batch_size` says; a number above 1 bounds the answers that are
    generated at once. `device` and `max_batch_size`, which the harness passes on to every model, choose nothing:
    JAX_PLATFORMS chooses the device.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | Model,
        *,
        dtype: str = "auto",
        packed: bool = False,
        kv_dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        seed: int = 0,
        samples_file: str | os.PathLike[str] | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        # The harness' bootstrap forks a pool of processes, which deadlock on locks that JAX's threads hold.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        if not isinstance(pretrained, Model):
            pretrained = load(pretrained, dtype=None if dtype == "auto" else dtype, packed=packed, kv_dtype=kv_dtype)
        if pretrained.tokenizer is None:
            raise ValueError(f"{pretrained.name} has no tokenizer, and the harness asks in text; add a tokenizer.json")
        context = pretrained.config.max_position_embeddings
        if max_length is not None and not 1 < max_length <= context:
            raise ValueError(f"max_length={max_length}: expected 2 to the context of {pretrained.name}, {context}")
        self.model = pretrained
        self.tokenizer = pretrained.tokenizer
        self.max_length = max_length or context
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.think_end_token = think_end_token
        self.seed = seed
        self._prefix_token_id = prefix_token_id
        self._batch_size = int(batch_size) if str(batch_size).isdecimal() and int(batch_size) > 1 else 64
        self._chat_template: str | None = None
        self._chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_template_args["enable_thinking"] = enable_thinking
        self._samples = None if samples_file is None else SampleLog(samples_file)
        self._weights = None if samples_file is None else weights_key(self.model)

    # --- Text and tokens

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's main end-of-text token."""
        if not self.tokenizer.eos_token_ids:
            raise ValueError(f"{self.model.name} names no end-of-text token, which the harness needs")
        return int(self.tokenizer.eos_token_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: BOS, or EOS where there is no BOS."""
        return opening_id(self.model) if self._prefix_token_id is None else self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.model.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. With `add_special_tokens=None`, BOS by `add_bos_token` or the tokenizer's rule, never twice."""
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        ids = self.tokenizer.encode(string, add_special_tokens=add is not False)
        bos = self.tokenizer.bos_token_id
        if add_special_tokens is None and add and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without a generation prompt its last message is left open, to be continued."""
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            chat_template=self._chat_template,
            **self._chat_template_args,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Chooses a chat template by name (True: the default one) and returns its source, None if there is none."""
        if chat_template is False:
            return None
        self._chat_template = chat_template if isinstance(chat_template, str) else None
        return self.tokenizer.chat_templates.get(self._chat_template or "default")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {"model_num_parameters": self.model.num_parameters, "model_dtype": str(self.model.dtype)}

    # --- Requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of continuations."""

        def run(positions: Sequence[int]) -> Iterator[tuple[int, tuple[float, bool]]]:
            pairs = [self._encode(*requests[position].args) for position in positions]
            for index, answer in self._score(pairs):
                yield positions[index], answer

        answers = self._answer("loglikelihood", requests, run, disable_tqdm)
        return [(logprob, is_greedy) for logprob, is_greedy in answers]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, cut into windows as long as the context, each token scored once."""

        def run(positions: Sequence[int]) -> Iterator[tuple[int, float]]:
            windows: list[tuple[list[int], list[int]]] = []
            owners: list[int] = []
            for position in positions:
                cut = get_rolling_token_windows(
                    token_list=self.tok_encode(*requests[position].args),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                windows += [make_disjoint_window(window) for window in cut]
                owners += [position] * (len(windows) - len(owners))
            missing = collections.Counter(owners)
            parts: dict[int, list[float]] = {position: [] for position in positions}
            yield from ((position, 0.0) for position in positions if not missing[position])  # an empty text is certain
            for index, (logprob, _) in self._score(windows):
                position = owners[index]
                parts[position].append(logprob)
                if len(parts[position]) == missing[position]:
                    yield position, math.fsum(parts[position])

        return self._answer("loglikelihood_rolling", requests, run, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts generated up to each request's own stop texts."""

        def run(positions: Sequence[int]) -> Iterator[tuple[int, str | float]]:
            options = [
                GenerationOptions.create(
                    self.tokenizer, requests[position].arguments[1], self.eot_token_id, self.max_gen_toks
                )
                for position in positions
            ]
            prompts = [
                self._prompt(requests[position].args[0], own.max_tokens)
                for position, own in zip(positions, options, strict=True)
            ]
            num_cut = sum(is_cut for _, is_cut in prompts)
            if num_cut:
                log.warning("%d prompts are cut on the left, to leave room in the context for the answer", num_cut)
            order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index][0]))
            tokens: list[list[int]] = [[] for _ in order]
            deltas = stream(
                self.model,
                [prompts[index][0] for index in order],
                [options[index].params(self.seed + positions[index]) for index in order],
                max_batch_size=self._batch_size,
            )
            for delta in deltas:
                index = order[delta.prompt_index]
                tokens[index] += delta.token_ids
                if delta.finish_reason == "error":
                    yield positions[index], math.nan
                elif delta.finish_reason is not None:
                    text = self.tokenizer.decode(tokens[index])
                    yield positions[index], options[index].trim(text, self.think_end_token)

        return self._answer("generate_until", requests, run, disable_tqdm)

    def _answer(
        self,
        kind: str,
        requests: Sequence[Instance],
        run: Callable[[Sequence[int]], Iterable[tuple[int, Any]]],
        disable_tqdm: bool,
    ) -> list[Any]:
        """Answers in order; `run` yields those that the samples file has not, by position, as they become known."""
        numbers = (str(self.model.dtype), str(self.model.kv_dtype or self.model.dtype), self._weights)
        settings = (self.model.name, numbers, self.max_length, self.add_bos_token, self._prefix_token_id)
        return collect(
            kind,
            requests,
            run,
            samples=self._samples,
            identity=(settings, (self.max_gen_toks, self.think_end_token, self.seed)),
            remember=self.cache_hook.add_partial,
            disable_tqdm=disable_tqdm,
        )

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and its continuation, neither empty."""
        if context == "":
            before, after = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            after = after[1:] if after[:1] == before else after
        else:
            before, after = self._encode_pair(context, continuation)
            before = before or [self.prefix_token_id]  # white space alone, which has moved to the continuation
        if not after:
            raise ValueError(f"the continuation {continuation!r} adds no token to its context {context[-40:]!r}")
        return before, after

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Scores token pairs, cutting contexts on the left where the model's context ends, as they become known."""
        fitting = []
        num_cut = 0
        for context, continuation in pairs:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and the context of {self.model.name} is "
                    f"{self.max_length}; leave the document out"
                )
            kept = context[-(self.max_length + 1 - len(continuation)) :]
            num_cut += len(kept) < len(context)
            fitting.append(TokenPair(tuple(kept), tuple(continuation)))
        if num_cut:
            log.warning("%d contexts are cut on the left, to fit the context of %d tokens", num_cut, self.max_length)
        for index, score in scored_pairs(self.model, fitting):
            yield index, (score.logprob, score.is_greedy)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers = dict(self._score([(context, continuation) for _, context, continuation in requests]))
        return [answers[index] for index in range(len(requests))]

    def _prompt(self, context: str, max_tokens: int) -> tuple[list[int], bool]:
        """Token ids to generate from, and whether they are cut on the left to leave room for `max_tokens`."""
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={max_tokens} leaves no room for a prompt in a context of {self.max_length}; lower it"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return ids[-room:], len(ids) > room


def register() -> None:
    """Makes the model known to the harness as `jaxinfer`; happens when this module is imported."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=JaxinferLM)


register()
