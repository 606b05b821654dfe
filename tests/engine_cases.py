"""What the engine's tests share: a tiny model with a word for every token, one configuration, and requests of all kinds
with what `ji.generate` answers to them.

All engines here have one shape, so that their programs are compiled once a process: 4 slots, 24 pages of 4 tokens (less
than half of what four requests can grow to, so that long ones are preempted), one sampler layout for everything.
"""

import dataclasses
import functools
from typing import Any

import families
import jax.numpy as jnp
import markov

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.generation import generate
from jaxinfer.model import Model, load
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import Tokenizer

CASE = families.BY_NAME["llama"]
VOCAB = 96
WORDS = tuple(f"<{token}>" for token in range(VOCAB))
"""Token 7 says "<7>"."""
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    logit_bias={1: 1.0},
    min_tokens=1,
    logprobs=5,
    max_tokens=4,
    seed=0,
)
CONFIG = EngineConfig(
    max_decode_batch=4,
    max_context=64,
    num_pages=25,
    page_size=4,
    max_prefill_tokens=32,
    prefill_lengths=(16,),
    prefill_rows=(1, 2),
    decode_rows=(4,),
    decode_chunk=3,
    decode_stall_tokens=16,
    sampling=(dataclasses.replace(EVERYTHING, prompt_logprobs=2),),
)


@functools.cache
def model() -> Model:
    loaded = load(CASE.folder, dtype=jnp.float32, progress=False)
    tokenizer = Tokenizer(markov.backend(WORDS), eos_token_ids=[2])
    return dataclasses.replace(loaded, tokenizer=tokenizer)


def engine(on: Model | None = None, **changes: Any) -> Engine:
    return Engine(on or model(), dataclasses.replace(CONFIG, **changes))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 9, "ignore_eos": True} | fields)


def prompt(length: int, row: int = 0) -> list[int]:
    """Some prompt of that length."""
    ids = CASE.tokens.reshape(-1).tolist()
    start = 7 * row
    return (ids * 3)[start : start + length]


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (prompt(5), params(max_tokens=20)),
    (prompt(17, 1), params(temperature=1.0, seed=1, max_tokens=12)),
    (prompt(40, 2), params(temperature=2.0, top_k=4, seed=2)),
    (prompt(1, 3), params(temperature=1.5, top_p=0.6, seed=3, max_tokens=33)),
    (prompt(30, 4), params(temperature=1.2, seed=4, n=3, max_tokens=14)),
    (prompt(33, 5), params(logprobs=3, prompt_logprobs=2, max_tokens=6)),
    (prompt(16, 6), params(logit_bias={11: 100.0}, max_tokens=5)),
    (prompt(21, 7), params(repetition_penalty=1.8, frequency_penalty=1.0, max_tokens=25)),
    (prompt(9, 8), params(temperature=1.0, min_p=0.2, seed=5, stop_token_ids=[*range(3, 40)])),
    (prompt(12, 9), params(temperature=1.0, seed=6, stop=["1>", "<3"], min_tokens=3, max_tokens=30)),
    (prompt(64, 10), params(max_tokens=1)),
    (prompt(60, 11), params(max_tokens=None)),
    (prompt(40, 2), params(temperature=1.0, seed=7, presence_penalty=1.5, max_tokens=22)),
    (prompt(4, 12), EVERYTHING),
    (prompt(4, 12), params(max_tokens=20)),
]


@functools.cache
def expected() -> list[RequestOutput]:
    """The answers of `ji.generate`, whose context is longer: the one that asks for all of it is cut here."""
    cut = [
        dataclasses.replace(row, max_tokens=CONFIG.max_context - len(ids) + 1) if row.max_tokens is None else row
        for ids, row in REQUESTS
    ]
    return generate(model(), [ids for ids, _ in REQUESTS], cut)


def assert_same(output: RequestOutput, reference: RequestOutput) -> None:
    """Equal tokens, texts and reasons; log-probabilities up to the rounding of another prefill."""
    assert output.prompt_token_ids == reference.prompt_token_ids
    for mine, theirs in zip(output.completions, reference.completions, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert_same_tables(mine.logprobs, theirs.logprobs)
    assert_same_tables(output.prompt_logprobs, reference.prompt_logprobs)


def assert_same_tables(mine: Any, theirs: Any) -> None:
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)
