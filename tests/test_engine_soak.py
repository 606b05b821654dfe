"""The soak of `benchmarks/soak.py` in short: random submits, aborts, failing callbacks, interrupts and preemptions,
each answer compared with what the request gets alone."""

import gc
import logging

import engine_cases as cases
import jax
import pytest

from benchmarks.soak import Soak
from jaxinfer.engine.sequence import Sequence
from jaxinfer.scoring import score


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_nothing_is_lost_mixed_up_or_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxinfer")  # of failing callbacks there are many
    prompts = [cases.prompt(1 + 7 * index % 50, index) for index in range(24)]
    with cases.engine() as engine:
        soak = Soak(engine, prompts)
        for _ in range(100):
            soak.round()
        memory = live_bytes()
        for _ in range(900):
            soak.round()
        assert live_bytes() == memory
        soak.drain()
        assert engine.metrics().preemptions > 10
        assert soak.totals.ended.keys() >= {"length", "abort", "error"}


def test_the_same_with_a_host_tier_and_scoring_in_between(caplog: pytest.LogCaptureFixture) -> None:
    """Pages of preempted sequences and of scored prompts go to the host and back all the time."""
    caplog.set_level(logging.ERROR, "jaxinfer")
    prompts = [cases.prompt(1 + 7 * index % 50, index) for index in range(24)]
    answer = [5, 7, 11]
    scores = {tuple(prompt): score(cases.model(), prompt, [answer])[0].logprob for prompt in prompts[:4]}
    with cases.engine(host_pages=30) as engine:
        soak = Soak(engine, prompts)
        for number in range(200):
            soak.round()
            if number % 10 == 0:
                prompt = prompts[number // 10 % 4]
                (got,) = engine.score(prompt, [answer], progress=False)
                assert got.logprob == pytest.approx(scores[tuple(prompt)], abs=1e-4)
                for delta in engine._news:  # of rounds that scoring took
                    soak.hear(delta)
                engine._news.clear()
        soak.drain()
        metrics = engine.metrics()
        assert metrics.pages_restored > 100
        assert (metrics.pages_owned, metrics.host_pages_used) == (0, 30)


def test_sequence_that_comes_back_to_its_slot_has_its_new_pages_in_the_table() -> None:
    """After a preemption a sequence may get the slot it had, with other pages. A longer soak caught it."""
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        track = Sequence([1, 2, 3], num_prompt=3, max_tokens=9, group=0)
        track.slot, track.pages, track.pages_version = 2, [7, 8, 9], 1
        runner.tables.update([track])
        track.pages = [7, 8, 9, 10]
        runner.tables.update([track])
        assert runner.tables.array[2, :6].tolist() == [7, 8, 9, 10, 0, 0]
        track.pages, track.pages_version = [4, 8], 2
        runner.tables.update([track])
        assert runner.tables.array[2, :6].tolist() == [4, 8, 0, 0, 0, 0]
