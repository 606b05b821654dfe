"""Serving: streams, callbacks, aborts, bad input, interrupts, and that nobody is hurt by anybody else."""

import asyncio
import collections
import dataclasses
import gc
import json
import threading
import weakref
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine, check_submission
from jaxinfer.engine.errors import DuplicateRequest, EngineClosed, EngineError, RequestTooLong, UnknownRequest
from jaxinfer.engine.metrics import Meter
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.settings import settle
from jaxinfer.outputs import Delta
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization import TextStream

SHORT, LONG = cases.REQUESTS[14], cases.REQUESTS[0]
"""A prompt of 4 and one of 5 tokens, both with 20 tokens of output, greedy."""
SHORT_ANSWER, LONG_ANSWER = 14, 0


def answer(index: int) -> tuple[int, ...]:
    return cases.expected()[index].token_ids


def drain(engine: Engine) -> dict[str | None, list[Delta]]:
    """Runs until nothing is left; deltas by request."""
    said: dict[str | None, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            said.setdefault(delta.request_id, []).append(delta)
    return said


def tokens(deltas: list[Delta]) -> tuple[int, ...]:
    return sum((delta.token_ids for delta in deltas), ())


def assert_serves(engine: Engine) -> None:
    """The engine is well: it answers, and nothing is left over."""
    (output,) = engine.generate([SHORT[0]], SHORT[1])
    assert output.token_ids == answer(SHORT_ANSWER)
    metrics = engine.metrics()
    assert (metrics.waiting, metrics.prefilling, metrics.decoding, metrics.pages_owned) == (0, 0, 0, 0)
    assert not engine.has_work


# --- Streams


def test_stream_joins_to_the_result_and_several_mix() -> None:
    with cases.engine() as engine:
        first, second = engine.stream([LONG[0]], LONG[1]), engine.stream([SHORT[0]], SHORT[1])
        got: tuple[list[Delta], list[Delta]] = ([], [])
        for one, other in zip(first, second, strict=False):
            got[0].append(one)
            got[1].append(other)
        got[0].extend(first)
        got[1].extend(second)
        for deltas, index in zip(got, (LONG_ANSWER, SHORT_ANSWER), strict=True):
            assert tokens(deltas) == answer(index)
            assert len(deltas) > 4, "a stream must not wait for the end"


def test_next_chunk_is_dispatched_before_the_last_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tokens: one from prefill, then 7 chunks of 3. The device has a chunk to run while the host waits for one."""
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        dispatch, read, events = runner.dispatch, runner.read, []

        def noted_dispatch(*arguments):
            works = dispatch(*arguments)
            events.extend("dispatch" for work in works if work.kind == "decode")
            return works

        def noted_read(work, requests):
            if work.kind == "decode":
                events.append("read")
            return read(work, requests)

        monkeypatch.setattr(runner, "dispatch", noted_dispatch)
        monkeypatch.setattr(runner, "read", noted_read)
        engine.generate([LONG[0]], LONG[1])
        assert events == ["dispatch", *["dispatch", "read"] * 6, "read"]


def test_cancelled_stream_ends_alone() -> None:
    """Trap G5: a stream broken off after two deltas, beside another request."""
    with cases.engine() as engine:
        engine.submit(*LONG, request_id="kept")
        stream = engine.stream([SHORT[0], cases.prompt(9)], SHORT[1])
        next(stream), next(stream)
        stream.close()
        never_started = engine.stream([SHORT[0]], SHORT[1])
        never_started.close()
        assert tokens(drain(engine)["kept"]) == answer(LONG_ANSWER)
        assert engine.metrics().finished == {"abort": 2, "length": 1}
        assert_serves(engine)


def test_async_streams_share_the_engine_with_each_other_and_the_loop() -> None:
    async def read(engine: Engine, index: int) -> tuple[int, ...]:
        ids, row = cases.REQUESTS[index]
        return tokens([delta async for delta in engine.stream_async([ids], row)])

    async def cancel(engine: Engine) -> None:
        stream = engine.stream_async([SHORT[0]], SHORT[1])
        async for _ in stream:
            break
        await stream.aclose()

    async def everything(engine: Engine) -> list:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        said = await asyncio.gather(read(engine, 0), read(engine, 14), read(engine, 1), cancel(engine))
        ticking.cancel()
        assert ticks > 3, "the event loop stood still"
        return list(said)

    with cases.engine() as engine:
        assert asyncio.run(everything(engine)) == [answer(0), answer(14), answer(1), None]
        assert_serves(engine)


def test_threads_share_the_engine() -> None:
    with cases.engine() as engine:
        said = {}

        def run(index: int) -> None:
            ids, row = cases.REQUESTS[index]
            said[index] = engine.generate([ids], row)[0].token_ids

        threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1, 7, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == {index: answer(index) for index in (0, 1, 7, 14)}


# --- Aborts, callbacks, failures


def test_abort_while_waiting_prefilling_decoding_and_done() -> None:
    with cases.engine() as engine:
        for number in range(6):  # two more than slots
            engine.submit(cases.prompt(30, number), cases.params(max_tokens=30), request_id=str(number))
        engine.submit(*LONG, request_id="kept")
        engine.abort("0")  # nothing has run yet
        assert [delta.finish_reason for delta in engine.step()] == ["abort"]
        deltas = engine.step()
        engine.abort("5")
        engine.abort("1")
        with pytest.raises(UnknownRequest, match="no unfinished request has the id '1'; it may have ended already"):
            engine.abort("1")
        with pytest.raises(UnknownRequest, match="'nobody'"):
            engine.abort("nobody")
        said = drain(engine)
        assert [said[key][-1].finish_reason for key in "15"] == ["abort"] * 2
        before = collections.Counter(delta.request_id for delta in deltas for _ in delta.token_ids)
        assert all(before[key] + len(tokens(said[key])) == 30 for key in "234")
        assert tokens(said["kept"]) == answer(LONG_ANSWER)
        assert_serves(engine)


def test_callback_gets_every_delta_and_its_exception_ends_its_request_only() -> None:
    heard: list[Delta] = []

    def fails(delta: Delta) -> None:
        if len(delta.token_ids) == 3:
            raise KeyError("lost")

    with cases.engine() as engine:
        engine.submit(*LONG, request_id="heard", callback=heard.append)
        engine.submit(*SHORT, request_id="broken", callback=fails)
        said = drain(engine)
        assert heard == said["heard"] and tokens(heard) == answer(LONG_ANSWER)
        last = said["broken"][-1]
        assert (last.finish_reason, last.stop_reason) == ("error", "the request's callback raised KeyError('lost')")
        assert tokens(said["broken"]) == answer(SHORT_ANSWER)[: len(tokens(said["broken"]))]
        assert len(tokens(said["broken"])) < 20
        assert_serves(engine)


def test_exception_of_a_callback_need_not_have_a_repr() -> None:
    class Unspeakable(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    def fail(_: Delta) -> None:
        raise Unspeakable

    with cases.engine() as engine:
        engine.submit(*SHORT, request_id="bad", callback=fail)
        engine.submit(*LONG, request_id="good")
        said = drain(engine)
        assert said["bad"][-1].stop_reason == "the request's callback raised Unspeakable"
        assert tokens(said["good"]) == answer(LONG_ANSWER)


def test_callback_may_submit_and_abort_but_not_step() -> None:
    with cases.engine() as engine:
        engine.submit(*LONG, request_id="victim")
        done = []

        def meddle(_: Delta) -> None:
            if not done:
                done.append(engine.submit(*SHORT, request_id="child"))
                engine.abort("victim")
                with pytest.raises(EngineError, match="a callback asked the engine for a round"):
                    engine.step()

        engine.submit(*SHORT, callback=meddle, request_id="parent")
        said = drain(engine)
        assert said["victim"][-1].finish_reason == "abort"
        assert tokens(said["parent"]) == tokens(said["child"]) == answer(SHORT_ANSWER)
        assert_serves(engine)


def test_nan_ends_only_the_row_that_has_it() -> None:
    """Token 90 has an embedding of NaN: whoever reads it ends with an error, and its pages are trusted by nobody."""
    sound = cases.model()
    assert sound.params.lm_head is not None
    embed = sound.params.embed_tokens.at[90].set(jnp.nan)
    model = dataclasses.replace(sound, params=dataclasses.replace(sound.params, embed_tokens=embed))
    bad = [*cases.prompt(20, 3), 90, *cases.prompt(5)]
    with cases.engine(model) as engine:
        outputs = engine.generate([SHORT[0], bad, LONG[0]], [SHORT[1], SHORT[1], LONG[1]])
        assert [outputs[0].token_ids, outputs[2].token_ids] == [answer(SHORT_ANSWER), answer(LONG_ANSWER)]
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", ())
        assert "not finite" in str(outputs[1].stop_reason)
        cached = engine.metrics().pages_cached
        assert engine.generate([bad], SHORT[1])[0].finish_reason == "error"
        assert engine.metrics().pages_cached == cached
        # In the middle of an answer: forced by a bias.
        forced = cases.params(logit_bias={90: 100.0}, max_tokens=10)
        outputs = engine.generate([SHORT[0], cases.prompt(6)], [SHORT[1], forced])
        assert outputs[0].token_ids == answer(SHORT_ANSWER)
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", (90,))
        assert_serves(engine)


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefix_cache": False}, {"prefill_tile": 4, "prefill_lengths": (8, 24), "decode_order": "longest"}],
    ids=str,
)
def test_pages_of_others_are_never_seen(changes: dict) -> None:
    """Every page that nobody owns, and the scratch page, is filled with NaN before every round."""
    prompts, rows = [ids for ids, _ in cases.REQUESTS], [row for _, row in cases.REQUESTS]
    with cases.engine(**changes) as engine:
        names = [engine.submit(ids, row) for ids, row in zip(prompts, rows, strict=True)]
        said: dict[str | None, list[Delta]] = {}
        while engine.has_work:
            pool, runner = engine._scheduler.pool, engine._runner
            assert runner is not None
            known = set(pool._idle)
            unused = [page for page in range(pool.num_pages) if not pool.references[page] and page not in known]
            poison = np.zeros(pool.num_pages, bool)
            poison[unused] = True
            mask = jnp.asarray(poison)[:, None, None, None]
            runner.cache = jax.tree.map(lambda leaf, mask=mask: jnp.where(mask, jnp.float32("nan"), leaf), runner.cache)
            for delta in engine.step():
                if delta.sample_index == 0:
                    said.setdefault(delta.request_id, []).append(delta)
        assert engine.metrics().preemptions > 0
        for name, reference in zip(names, cases.expected(), strict=True):
            assert tokens(said[name]) == reference.token_ids


# --- Interrupts


@pytest.mark.parametrize("where", ["prefill", "decode", "start", "read"])
def test_g5_interrupt_in_the_middle_of_a_round(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap G5: after the interrupt the buffers given to the program are gone; everybody is computed again."""
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        engine.submit(*LONG, request_id="kept")
        engine.submit(*cases.REQUESTS[1], request_id="drawn")
        deltas = engine.step() + engine.step()
        engine.submit(*SHORT, request_id="late")

        def interrupted(*_: object, **__: object) -> None:
            runner.free()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if where == "read":
                patch.setattr(runner, "read", interrupted)
            else:
                whole = runner.programs.get
                patch.setattr(runner.programs, "get", lambda size: interrupted if size.kind == where else whole(size))
            interrupts = 0
            for _ in range(3):
                try:
                    deltas += engine.step()
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts
        said: dict[str | None, list[Delta]] = {}
        while engine.has_work:
            deltas += engine.step()
        for delta in deltas:
            said.setdefault(delta.request_id, []).append(delta)
        assert tokens(said["kept"]) == answer(LONG_ANSWER)
        assert tokens(said["drawn"]) == answer(1)
        assert tokens(said["late"]) == answer(SHORT_ANSWER)
        assert_serves(engine)


@pytest.mark.parametrize("where", ["push", "tokens", "read", "finish", "finished"])
def test_interrupt_while_results_are_handed_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt finds the host in the middle of a request's news, at any place of it: all of it is told, once, with
    its text and its log-probabilities, and the request ends."""
    with cases.engine() as engine:
        engine.generate(*map(list, zip(*cases.REQUESTS[:2], strict=True)))  # compiles, and caches prefixes
        for fails_at in range(1, 8):
            chosen = (3, 5, 9, 14)
            names = {engine.submit(*cases.REQUESTS[index]): cases.expected()[index] for index in chosen}
            calls = 0

            def interrupted(whole: Any, fails_at: int = fails_at) -> Any:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == fails_at:
                        raise KeyboardInterrupt
                    return whole(*arguments, **options)

                return call

            places = {
                "push": (TextStream, "push"),
                "tokens": (Meter, "add_tokens"),
                "read": (Scheduler, "read"),
                "finish": (Scheduler, "finish"),
                "finished": (Meter, "add_finished"),
            }
            said: dict[str | None, list[Delta]] = {}
            interrupts = 0
            with monkeypatch.context() as patch:
                owner, name = places[where]
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
                for _ in range(200):
                    try:
                        for delta in engine.step() if engine.has_work else ():
                            said.setdefault(delta.request_id, []).append(delta)
                    except KeyboardInterrupt:
                        interrupts += 1
            assert not engine.has_work and interrupts == (calls >= fails_at)
            for name, reference in names.items():
                assert (tokens(said[name]), "".join(delta.text for delta in said[name])) == (
                    reference.token_ids,
                    reference.completions[0].text,
                )
                reasons = [delta.finish_reason for delta in said[name] if delta.finish_reason is not None]
                assert reasons == [reference.finish_reason]
                if reference.logprobs is not None:
                    told = sum((delta.logprobs or () for delta in said[name]), ())
                    cases.assert_same_tables(told, reference.logprobs)
        assert_serves(engine)


def test_interrupted_submit_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with cases.engine() as engine:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.submit(*SHORT, request_id="lost")
        assert not engine.has_work
        assert_serves(engine)


def test_interrupt_between_the_prompts_of_a_batch_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with cases.engine() as engine:
        for call in (engine.generate, lambda *batch: list(engine.stream(*batch))):

            def interrupted(track: Any, add: Any = engine._scheduler.add) -> None:
                if engine._scheduler.waiting:
                    raise KeyboardInterrupt
                add(track)

            with monkeypatch.context() as patch:
                patch.setattr(engine._scheduler, "add", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call([SHORT[0], LONG[0]], SHORT[1])
            assert not engine.has_work
            assert_serves(engine)


def test_interrupted_generate_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with cases.engine() as engine:
        rounds = []

        def advance() -> None:
            rounds.append(1)
            if len(rounds) == 3:
                raise KeyboardInterrupt
            whole()

        whole = engine._advance
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_advance", advance)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([LONG[0], SHORT[0]], LONG[1])
        assert_serves(engine)


# --- Bad input


def test_what_cannot_run_is_refused_by_name_and_the_rest_goes_on() -> None:
    """Traps C9 and F1 among them: a bias on an id that there is not, and an empty prompt."""
    with cases.engine() as engine:
        engine.submit(*LONG, request_id="kept")
        before = tokens(engine.step())
        with pytest.raises(DuplicateRequest, match="request id 'kept' belongs to an unfinished request"):
            engine.submit(*SHORT, request_id="kept")
        with pytest.raises(RequestTooLong, match="prompt 0 has 65 tokens, more than max_context=64"):
            engine.submit(cases.prompt(65), SHORT[1])
        with pytest.raises(RequestTooLong, match="prompt 0 has 129 tokens, but the context of"):
            engine.submit(cases.prompt(129), SHORT[1])
        with pytest.raises(ValueError, match="max_tokens is 0; expected an integer of at least 1"):
            engine.submit(SHORT[0], SamplingParams(max_tokens=0))
        with pytest.raises(ValueError, match="logit_bias has token id 96"):
            engine.submit(SHORT[0], SamplingParams(logit_bias={96: 1.0}))
        with pytest.raises(ValueError, match="prompt 0 is an empty list"):
            engine.submit([])
        with pytest.raises(ValueError, match="prompt 1 holds token id 96"):
            engine.generate([SHORT[0], [96]], SHORT[1])
        with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
            engine.generate([SHORT[0]], [SHORT[1]] * 2)
        said = drain(engine)
        assert list(said) == ["kept"] and before + tokens(said["kept"]) == answer(LONG_ANSWER)
        engine.submit(*SHORT, request_id="kept")  # the id is free again
        assert tokens(drain(engine)["kept"]) == answer(SHORT_ANSWER)


def test_g3_request_at_the_wall_of_the_pool() -> None:
    """Trap G3 with page 4 and 16 usable pages, 64 tokens: prompt 60 with 5 more needs 64, with 6 more 65."""
    small = {"num_pages": 17, "max_context": None, "sampling": (SHORT[1],), "prefill_rows": (1,)}
    with cases.engine(**small) as engine:
        assert engine.settings.max_context == 64
        engine.submit(*SHORT, request_id="other")
        with pytest.raises(
            RequestTooLong, match="prompt 0 has 60 tokens, and max_tokens=6 more need more than the pool"
        ):
            engine.submit(cases.prompt(60), cases.params(max_tokens=6))
        with pytest.raises(
            RequestTooLong, match="prompt 0 has 65 tokens, more than the pool's 64 tokens; shorten it or raise num_p"
        ):
            engine.submit(cases.prompt(65), cases.params())
        engine.submit(cases.prompt(60), cases.params(max_tokens=5), request_id="exact")
        engine.submit(cases.prompt(60, 1), cases.params(max_tokens=None), request_id="open")
        said: dict[str | None, list[Delta]] = {}
        for _ in range(500):
            for delta in engine.step():
                said.setdefault(delta.request_id, []).append(delta)
        assert not engine.has_work
        assert {key: (len(tokens(deltas)), deltas[-1].finish_reason) for key, deltas in said.items()} == {
            "other": (20, "length"),
            "exact": (5, "length"),
            "open": (5, "length"),
        }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_decode_batch": 0}, "max_decode_batch=0; expected an integer of at least 1"),
        ({"decode_chunk": 2.0}, "decode_chunk=2.0; expected an integer of at least 1"),
        ({"decode_chunk": 10**30}, "decode_chunk=1000000000000000000000000000000; expected at most 4096"),
        ({"max_context": 2**31}, "max_context=2147483648; expected at most 2147483647"),
        ({"num_pages": 1}, "num_pages=1; expected an integer of at least 2: page 0 is scratch"),
        ({"num_pages": "many"}, "num_pages='many'; expected an integer of at least 2"),
        ({"page_size": None}, "page_size=None; expected an integer of at least 1"),
        ({"memory_fraction": "half"}, r"memory_fraction='half'; expected a number in \(0, 1\]"),
        ({"prefill_lengths": 64}, "prefill_lengths=64; expected ascending integers"),
        ({"prefill_tile": 0}, "prefill_tile=0; expected an integer of at least 1"),
        ({"decode_rows": ("1", "2")}, r"decode_rows=\('1', '2'\); expected ascending integers"),
        ({"prefix_cache": 1}, "prefix_cache=1; expected True or False"),
        ({"decode_order": ["shortest"]}, r"decode_order=\['shortest'\]; expected one of"),
        ({"sampling": 3}, "sampling=3; give at least one SamplingParams"),
        ({"sampling": ({},)}, "sampling holds something else than SamplingParams"),
        ({"memory_fraction": 0.0}, r"memory_fraction=0.0; expected a number in \(0, 1\]"),
        ({"prefill_lengths": (64, 32)}, r"prefill_lengths=\(64, 32\); expected ascending integers of at least 1"),
        ({"decode_order": "newest"}, "decode_order='newest'; expected one of shortest, arrival, longest"),
        ({"policy": "both"}, "policy='both'; expected one of separate, mixed"),
        ({"decode_stall_ms": -1.0}, "decode_stall_ms=-1.0; expected a number above 0"),
        ({"decode_stall_ms": float("inf")}, "decode_stall_ms=inf; expected a number above 0"),
        ({"sampling": ()}, r"sampling=\(\); give at least one SamplingParams"),
        (
            {"max_batch": 4},
            r"no engine option 'max_batch' \(did you mean max_decode_batch\?\); engine options are max_dec",
        ),
        ({"xyz": 4}, r"no engine option 'xyz'; engine options are max_decode_batch, "),
    ],
    ids=str,
)
def test_bad_configurations_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_context": 129, "num_pages": 33}, None),  # the model's own context is 128: that is what holds
        ({"num_pages": 10**9}, r"num_pages=1000000000 take [\d,]+ GB, and .* GB are free; lower it to at most \d+"),
        ({"max_context": 128, "num_pages": 20}, "max_context=128 needs more than the 20 pages of 4 tokens"),
        ({"decode_rows": (2,)}, r"decode_rows=\(2,\): the largest is below max_decode_batch=4"),
        ({"max_prefill_tokens": 8}, r"max_prefill_tokens=8 is below the shortest of prefill_lengths=\(16,\)"),
        ({"prefill_tile": 5}, r"prefill_lengths=\(16,\): expected multiples of prefill_tile=5"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit_the_model(fields: dict, message: str | None) -> None:
    config = dataclasses.replace(cases.CONFIG, **fields)
    if message is None:
        assert settle(config, cases.model()).max_context == 128
        return
    with pytest.raises(ValueError, match=message):
        settle(config, cases.model())


def test_options_are_in_the_docstring() -> None:
    assert EngineConfig.__doc__ is not None
    for field in dataclasses.fields(EngineConfig):
        assert f"        {field.name}: " in EngineConfig.__doc__
    loose: dict[str, Any] = {"sampling": SamplingParams(), "decode_rows": [1, 4]}
    assert EngineConfig(**loose) == EngineConfig(sampling=(SamplingParams(),), decode_rows=(1, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrived": "now"}, "arrived='now'; expected seconds"),
        ({"arrived": float("nan")}, "arrived=nan; expected seconds"),
        ({"callback": "print"}, "callback='print'; expected a function"),
        ({"request_id": 7}, "request_id=7; expected a string"),
        ({"request_id": "a\udcff"}, r"request_id='a\\udcff' is not Unicode: character 1"),
    ],
    ids=str,
)
def test_bad_arguments_of_submit_are_named(fields: dict, message: str) -> None:
    """By the function that `submit` calls first: the run-time type checks of the tests would come before."""
    with pytest.raises(ValueError, match=message):
        check_submission(**{"request_id": None, "callback": None, "arrived": None} | fields)


# --- Closing


def test_close_in_a_callback_waits_for_the_round() -> None:
    engine = cases.engine()
    told: list[Delta] = []

    def close(delta: Delta) -> None:
        told.append(delta)
        engine.close()
        assert repr(engine) != "Engine(closed)"

    engine.submit(*SHORT, request_id="closing", callback=close)
    engine.submit(*LONG, request_id="other")
    while engine.has_work:
        engine.step()
    assert repr(engine) == "Engine(closed)"
    assert told[-1].finish_reason == "abort"
    with pytest.raises(EngineClosed):
        engine.submit(*SHORT)


def test_close_while_another_thread_generates() -> None:
    engine = cases.engine()
    outputs = []
    started = threading.Event()
    whole = engine._advance

    def advance() -> None:
        whole()
        started.set()

    engine._advance = advance
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate([LONG[0]], cases.params(max_tokens=60))))
    thread.start()
    assert started.wait(60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert outputs[0].finish_reason in ("abort", "length")


def test_round_of_others_does_not_hold_up_the_event_loop() -> None:
    """A thread keeps the engine's lock: streams begin, go on and end without the loop waiting for it."""

    async def everything(engine: Engine) -> list[tuple[int, ...]]:
        async def read() -> tuple[int, ...]:
            return tokens([delta async for delta in engine.stream_async([SHORT[0]], SHORT[1])])

        async def cancel() -> None:
            stream = engine.stream_async([SHORT[0]], SHORT[1])
            await anext(stream)
            ticked = asyncio.create_task(tick())
            await stream.aclose()
            ticked.cancel()

        async def tick() -> None:
            while True:
                await asyncio.sleep(0)
                if threading.get_ident() in holders:
                    raise AssertionError("the loop's thread took the engine's lock")

        ticking = asyncio.create_task(tick())
        said = await asyncio.gather(read(), read(), cancel())
        ticking.cancel()
        return list(said[:2])

    with cases.engine() as engine:
        holders: set[int] = set()
        lock = engine._lock
        enter = type(lock).__enter__

        class Watched(type(lock)):
            def __enter__(self) -> None:
                holders.add(threading.get_ident())
                enter(self)

        engine._lock = Watched()
        assert asyncio.run(everything(engine)) == [answer(SHORT_ANSWER)] * 2
        assert threading.get_ident() not in holders
        assert_serves(engine)


def test_closed_engine_refuses_and_has_freed_its_memory() -> None:
    def live_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    model = dataclasses.replace(cases.model())
    before = live_bytes()
    with cases.engine(model) as engine:
        page_bytes = 2 * 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, tokens, size of a head, float32
        assert live_bytes() >= before + 25 * page_bytes
        engine.submit(*LONG, request_id="unfinished")
        engine.step()
        stream = engine.stream([SHORT[0]], SHORT[1])
        next(stream)
    assert live_bytes() == before, "the pool or the state is still there"
    engine.close()
    assert engine.step()[-1].finish_reason == "abort", "what closing ended is news"
    assert not engine.has_work
    for call in (engine.step, engine.metrics, engine.warmup, lambda: engine.submit(*SHORT)):
        with pytest.raises(EngineClosed, match="the engine is closed; make a new one"):
            call()
    with pytest.raises(EngineClosed):
        engine.generate([SHORT[0]], SHORT[1])
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    assert repr(engine) == "Engine(closed)"
    gone = weakref.ref(model)
    del model, stream
    gc.collect()
    assert gone() is None, "the closed engine, or one of its programs, holds the model"


def test_second_engine_after_the_first_in_one_process() -> None:
    for _ in range(2):
        with cases.engine() as engine:
            assert_serves(engine)


def test_deltas_are_plain_data() -> None:
    """Everything a delta of an engine holds can be written as JSON, logprobs included."""
    with cases.engine() as engine:
        engine.submit(*cases.REQUESTS[5], request_id="logged")
        for delta in drain(engine)["logged"]:
            json.dumps(dataclasses.asdict(delta), allow_nan=False)
