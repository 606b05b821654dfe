"""The engine over a cache in tiers: `generate`'s tokens, every page of every tier given back, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_tiers import CHUNK, LONGEST, load_case

from jaxinfer.batch import Limits
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.generation import generate
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tiers import TierPools

CONFIG = EngineConfig(
    max_decode_batch=3,
    max_context=LONGEST,
    tier_pages=TierPools(recent=14, int8=8, int4=20, window=20),
    max_prefill_tokens=128,
    prefill_lengths=(CHUNK,),
    prefill_rows=(1,),
    decode_rows=(3,),
    decode_chunk=4,
)


def engine(name: str = "llama", **changes: Any) -> Engine:
    return Engine(load_case(name), dataclasses.replace(CONFIG, **changes))


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 90, length).tolist() for length in lengths]


@pytest.fixture(autouse=True)
def same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` cuts prompts and decoding as these engines do: what a query still saw as it was depends on that."""
    limits = Limits(prefill_chunk=CHUNK, prefill_tokens=CHUNK, decode_chunk=4)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: limits))


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_tokens_are_those_of_generate_and_nothing_is_compiled_late(case: str):
    """Prompts in up to three pieces, of all tiers; more requests than rows; gemma2 has windows in every other layer."""
    model = load_case(case)
    texts, params = prompts(150, 20, 70, 33, 1), [greedy(24), greedy(60), greedy(9), greedy(40), greedy(30)]
    expected = generate(model, texts, params)
    with engine(case) as tiered:
        tiered.warmup(progress=False)
        for _ in range(2):
            outputs = tiered.generate(texts, params, progress=False)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        metrics = tiered.metrics()
        assert metrics.compilations_after_warmup == 0
        assert metrics.pages_owned == 0 and set(metrics.tier_pages_owned.values()) == {0}
        windows = {"window": 20} if case == "gemma2" else {}
        assert metrics.tier_pages == {"recent": 14, "int8": 8, "int4": 20} | windows
        assert metrics.pages == 42 + sum(windows.values())
