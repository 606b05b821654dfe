"""Traps H7 and H1 with their numbers: 256 tokens far beyond a sliding window, in small pages; ends inside a block."""

import dataclasses
import itertools
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model, load
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.proposer import KeepsNothing, LearnsNothing, Rows, Wanted
from jaxinfer.speculative.speculation import Speculation

WINDOW, PAGE, TOKENS, MOST = 16, 4, 256, 6
PROMPT = families.BY_NAME["mistral_sliding"].tokens[0, :9].tolist()


class InTurn:
    """Chunks of up to 4 drafted tokens a step, of up to 6, and again; or always of one length."""

    def __init__(self, always: int | None = None) -> None:
        self.turns, self.always = itertools.cycle((4, MOST)), always

    def lengths(self, k: int) -> tuple[int, ...]:
        return (0, 4, k)

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "InTurn":
        return self

    def choose(self, context: int) -> int:
        return next(self.turns) if self.always is None else self.always

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        """Learns nothing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Foretold(KeepsNothing):
    """Proposes what stands at the next places of a text: one token or more, up to all that are wanted.

    `params` is the text, prompt and output, and a last number that is 1 for proposals that are always whole: all drafts
    share their programs.
    """

    params: jax.Array
    k: int = MOST
    name = "foretold"
    draws = False

    def check(self, target: Model, longest: int) -> None:
        """Drafts for any model."""

    def proposer(self, target: Model) -> "Foreteller":
        return Foreteller()


@dataclasses.dataclass(frozen=True)
class Foreteller(LearnsNothing):
    def propose(
        self, params: Any, state: tuple[()], cache: PagedKVCache, rows: Rows, wanted: Wanted
    ) -> tuple[Proposal, tuple[()], PagedKVCache]:
        count, end = wanted.num_drafted, params.shape[0] - 1
        places = rows.positions[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None, :]
        tokens = params[jnp.clip(places, 0, end - 1)]
        some = 1 + (rows.positions * 7919 >> 5) % count  # of all sizes, in no order
        lengths = jnp.where(params[-1] > 0, jnp.int32(count), some)
        lengths = jnp.clip(lengths, 0, end - 1 - rows.positions)
        return Proposal(tokens, lengths), state, cache


def foretold(output: tuple[int, ...], *, whole: bool = False) -> Foretold:
    return Foretold(jnp.array([*PROMPT, *output, int(whole)], jnp.int32))


def with_window() -> Model:
    """Two random layers, both with a window of 16, and a context that 256 tokens fit in."""
    model = load(families.BY_NAME["mistral_sliding"].folder, dtype=jnp.float32, progress=False)
    layers = tuple(dataclasses.replace(layer, window=WINDOW) for layer in model.config.layers)
    config = dataclasses.replace(model.config, layers=layers, max_position_embeddings=300)
    return dataclasses.replace(model, config=config)


def test_h7_h1_rejected_drafts_leave_nothing_behind_a_window_and_ends_are_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap H7: 256 tokens in float32, window 16, pages of 4, one to six drafted tokens; a draft that is never right and
    one that always is. Then the prefix cache has accepted tokens only: plain decoding goes on from them as if cold.

    Trap H1: the draft says what the target says, k = 4, and tokens of the output are named as its end, one for each
    place of a block. What is counted ends there too.
    """
    monkeypatch.setattr("jaxinfer.engine.settings.reads_lengths", lambda *_: True)  # a program a length, not three
    model, policy = with_window(), InTurn(always=0)
    row = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    config = EngineConfig(
        max_decode_batch=1,
        max_context=290,
        page_size=PAGE,
        prefill_lengths=(64,),
        prefill_rows=(1,),
        decode_rows=(1,),
        decode_chunk=6,
        sampling=(dataclasses.replace(row, stop_token_ids=[1]),),
    )
    with Engine(model, config, draft=Speculation(foretold(()), policy=policy)) as engine:
        expected = engine.generate([PROMPT], row)[0].token_ids
    assert len(expected) == TOKENS
    wrong = tuple((token + 1) % model.config.num_tokens for token in expected)
    for said, share in ((wrong, 0.0), (expected, 1.0)):
        policy = InTurn()
        speculation = Speculation(foretold(said), policy=policy)
        with Engine(model, config, draft=speculation) as engine:
            assert engine.generate([PROMPT], row)[0].token_ids == expected
            assert speculation.report.acceptance_rate == share
            assert set(speculation.report.steps) == {4, 6}
            assert share == 0.0 or all(speculation.report.histogram[1 : MOST + 1])
            policy.always = 0
            for known in (100, 200):
                [later] = engine.generate([[*PROMPT, *expected[:known]]], dataclasses.replace(row, max_tokens=20))
                assert later.token_ids == expected[known : known + 20]
            assert engine.metrics().prefix_hit_rate > 0.9
    policy = InTurn(always=4)
    with Engine(model, config, draft=Speculation(foretold(expected, whole=True), policy=policy)) as engine:
        for place in range(1, 6):  # token 0 comes from the prompt, and a block is the five after it
            assert expected[place] not in expected[:place]
            engine.reset_metrics()
            [cut] = engine.generate([PROMPT], dataclasses.replace(row, stop_token_ids=[expected[place]]))
            assert cut.token_ids == expected[: place + 1]
            assert (cut.finish_reason, engine.metrics().output_tokens) == ("stop", place + 1)
