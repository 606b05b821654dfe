"""Generation options as lm-evaluation-harness' tasks write them, as `SamplingParams` and as rules for the text."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import Tokenizer

PASSED_ON = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """One request's limits. `until` are texts that end an answer and do not belong to it."""

    max_tokens: int
    until: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]

    @classmethod
    def create(
        cls, tokenizer: Tokenizer, given: Mapping[str, Any], eos: int, default_max_tokens: int
    ) -> "GenerationOptions":
        """From a task's `generation_kwargs`. Raises ValueError for an option that means nothing here."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), default_max_tokens))
        until = handle_stop_sequences(options.pop("until"), eos=tokenizer.decode([eos], skip_special_tokens=False))
        max_tokens = options.pop("max_gen_toks")
        do_sample = options.pop("do_sample")
        temperature = float(options.pop("temperature", 1.0))
        if options.pop("num_beams", 1) != 1:
            raise ValueError(f"num_beams={given['num_beams']}: there is no beam search; leave it out or set it to 1")
        unknown = sorted(options.keys() - set(PASSED_ON))
        if unknown:
            raise ValueError(
                f"generation option {unknown[0]!r} is not known; known are "
                + ", ".join(("do_sample", "temperature", "until", "max_gen_toks", *PASSED_ON))
            )
        # Special tokens are no part of the text, so that no text of theirs is ever found there.
        ids = [tokenizer.backend.token_to_id(text) for text in until]
        return cls(
            max_tokens=max_tokens,
            until=tuple(text for text in until if text),
            stop_token_ids=tuple(token for token in ids if token is not None and token in tokenizer.special_ids),
            sampling={"temperature": temperature, **options} if do_sample else {"temperature": 0.0},
        )

    def params(self, seed: int) -> SamplingParams:
        """`seed` holds where the task has none of its own."""
        return SamplingParams.from_dict(
            {
                "seed": seed,
                **self.sampling,
                "max_tokens": self.max_tokens,
                "stop": self.until,
                "stop_token_ids": self.stop_token_ids,
            }
        )

    def trim(self, text: str, think_end_token: str | None) -> str:
        """The answer in a generated text: after the end of thinking, before the first text that ends it."""
        return postprocess_generated_text(text, stop=list(self.until), think_end_token=think_end_token)
