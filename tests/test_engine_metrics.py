"""What the engine compiles and when, what it measures, and the picture of it."""

import dataclasses
import itertools
import pathlib
import re
import sys
from typing import Literal

import engine_cases as cases
import IPython.core.formatters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import kv_cache
from jaxinfer.engine.calls import calls_for
from jaxinfer.engine.layout import Layouts, SamplerLayout, listed
from jaxinfer.engine.metrics import Latency, Meter, Span
from jaxinfer.engine.programs import Programs, Size
from jaxinfer.engine.sequence import Piece, Sequence
from jaxinfer.engine.settings import settle
from jaxinfer.engine.timeline import plot_timeline
from jaxinfer.generation import requests_for
from jaxinfer.sampling_params import SamplingParams

PROMPTS = [ids for ids, _ in cases.REQUESTS]
PARAMS = [row for _, row in cases.REQUESTS]
COMPILED: list[str] = []


def note_compilation(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


# --- Compilation


def test_nothing_compiles_after_warmup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of requests, chunked, preempted, scored, forked: no program of the engine's, and none of JAX's own."""
    monkeypatch.setattr("checkpoints.progress.is_watched", lambda: True)  # in a log the bars come now and then only
    with cases.engine() as engine:
        engine.warmup(progress=True, threads=2)
        assert "Compiling" in capsys.readouterr().err
        expected = len(list(engine._runner.programs.expected()))  # type: ignore[union-attr]  # it is open
        assert expected == 1 + 2 * (1 + 1 + 1) + 2 + 1 + 1  # decode; prefill and scored prefill; start; blank; copy
        cases.expected()  # compiles where no test of this process has asked for it
        COMPILED.clear()
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert COMPILED, "the listener hears nothing"
        COMPILED.clear()
        engine.generate(PROMPTS, PARAMS, progress=True)
        assert not COMPILED
        assert engine.metrics().compilations_after_warmup == 0
        assert "of all threads, 0 after warm-up\n" in f"{engine.metrics()}\n"
        assert re.search(r"prefill \d+ tok/s, decode \d+ tok/s", capsys.readouterr().err)
        engine.warmup(progress=False)  # again: nothing to do
        assert not COMPILED


def test_a_rehearsal_in_the_middle_of_serving_changes_no_token() -> None:
    """What `warmup` does on a GPU: every program runs on empty rows, whoever has slots and pages."""
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        names = [engine.submit(ids, row) for ids, row in cases.REQUESTS]
        said: dict[str | None, list[int]] = {name: [] for name in names}
        for round_number in itertools.count():
            for delta in engine.step():
                if delta.sample_index == 0:
                    said[delta.request_id] += delta.token_ids
            if round_number in (2, 9):
                assert engine.metrics().decoding > 0
                runner.rehearse(runner.programs.expected())
            if not engine.has_work:
                break
        assert [tuple(tokens) for tokens in said.values()] == [output.token_ids for output in cases.expected()]


def test_warmup_rehearses_on_a_gpu_what_it_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there, only programs that are new; and the engine survives a rehearsal that is broken off."""
    with cases.engine() as engine:
        runner = engine._runner
        assert runner is not None
        engine.warmup(progress=False)  # so that nothing is compiled for a platform that is not there
        new = list(runner.programs.expected())[:2]
        rehearsed: list[list[Size]] = []
        rehearse = runner.rehearse

        def record(sizes: list[Size]) -> None:
            rehearsed.append(sizes)
            if len(rehearsed) == 2:
                runner.cache.keys[0].delete()  # as a program that was stopped leaves it
                raise KeyboardInterrupt
            rehearse(sizes)

        monkeypatch.setattr(runner, "rehearse", record)
        monkeypatch.setattr(runner.programs, "warmup", lambda **_: new)
        engine.warmup(progress=False)
        assert rehearsed == []
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(jax, "default_backend", lambda: "gpu")
            engine.warmup(progress=False)
            assert rehearsed == [new]
            with pytest.raises(KeyboardInterrupt):
                engine.warmup(progress=False)
        outputs = engine.generate(PROMPTS[:1], PARAMS[:1], progress=False)
        assert outputs[0].token_ids == cases.expected()[0].token_ids


def test_programs_of_several_rows_are_for_short_pieces() -> None:
    """Four rows of 2048 tokens keep a device no busier than one does: there is no program for them."""
    config = dataclasses.replace(
        cases.CONFIG, prefill_lengths=(64, 1024, 2048), prefill_rows=(1, 4), max_prefill_tokens=8192
    )
    chosen = settle(config, cases.model())
    programs = Programs(cases.model(), chosen, kv_cache.create(cases.model().config, 2, 4, jnp.float32))
    assert programs.prefill_sizes() == [(1, 64), (1, 1024), (1, 2048), (4, 64), (4, 1024)]


def test_rows_that_a_call_would_compute_anyway_are_given_to_shorter_pieces() -> None:
    config = dataclasses.replace(cases.CONFIG, prefill_lengths=(4, 8, 16), prefill_rows=(1, 4), max_prefill_tokens=64)
    programs = Programs(
        cases.model(), settle(config, cases.model()), kv_cache.create(cases.model().config, 2, 4, jnp.float32)
    )

    def calls(*lengths: int, start: int = 0) -> list[tuple[int, int, list[int]]]:
        pieces, requests = [], {}
        for length in lengths:
            sequence = Sequence(cases.prompt(start + length), start + length, 1, 0)
            requests[sequence] = requests_for(cases.model(), [sequence.tokens], cases.params(max_tokens=1))[0]
            pieces.append(Piece(sequence, start, length, True))
        made = list(calls_for(pieces, requests, programs))
        assert all(call.size.from_empty == (start == 0) for call in made)
        return [(call.size.rows, call.size.length, [piece.length for piece in call.pieces]) for call in made]

    # Three of 9 to 16 tokens are more than half a call, whose last row goes to the next longest; one alone is not.
    assert calls(3, 16, 9, 7, 12) == [(4, 16, [16, 12, 9, 7]), (1, 4, [3])]
    # Two fill half a call of four, which is not more than half: each is computed alone.
    assert calls(16, 15) == [(1, 16, [16]), (1, 16, [15])]
    assert calls(16, 15, 14) == [(4, 16, [16, 15, 14])]
    assert calls(16, 3, 4, 2, start=4) == [(1, 16, [16]), (4, 4, [4, 3, 2])]
    assert calls(5, 6, 7, 8, 8, 1) == [(4, 8, [8, 8, 7, 6]), (1, 8, [5]), (1, 4, [1])]


def test_pieces_are_laid_into_calls_row_by_row() -> None:
    """Calls of 8 tokens in up to 3 rows of 4, or of 24 in up to 7: a piece goes on in the next call, and only its last
    row ends it. A short row costs a row, not four tokens."""
    config = dataclasses.replace(cases.CONFIG, prefill_tile=4, prefill_lengths=(8, 24))
    chosen = settle(config, cases.model())
    assert chosen.rules.prefill_lengths == (4, 8, 12, 16, 20, 24)
    assert chosen.rules.padded(13) == 16
    programs = Programs(cases.model(), chosen, kv_cache.create(cases.model().config, 2, 4, jnp.float32))
    pieces, requests = [], {}
    for start, length, last in ((0, 13, True), (8, 9, False), (0, 5, True), (0, 2, True)):
        sequence = Sequence(cases.prompt(start + length), start + length, 1, 0)
        requests[sequence] = requests_for(cases.model(), [sequence.tokens], cases.params(max_tokens=1))[0]
        pieces.append(Piece(sequence, start, length, last))
    calls = list(calls_for(pieces, requests, programs))
    assert [call.size for call in calls] == [
        Size("prefill", 7, 4, num_ordered=24),
        Size("prefill", 3, 4, num_ordered=8),
    ]
    assert [[(row.start, row.length, row.last) for row in call.pieces] for call in calls] == [
        [(0, 4, False), (4, 4, False), (8, 4, False), (12, 1, True), (8, 4, False), (12, 4, False), (16, 1, False)],
        [(0, 4, False), (4, 1, True), (0, 2, True)],
    ]
    assert {size.kind for size in programs.expected()} == {
        *("decode", "prefill", "prefill_scored", "start", "blank", "copy")
    }


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((19,), [(16, 16), (3, 8)]),  # 24 places instead of 32
        ((21, 4), [(25, 32)]),  # 16 and 16 would be no fewer
        ((16, 1, 1, 1), [(16, 16), (3, 8)]),
        ((16, 1, 1, 1, 1), [(20, 32)]),  # a call of 8 tokens has three rows
        ((32, 9), [(32, 32), (9, 16)]),
        ((32, 32, 17), [(32, 32), (32, 32), (16, 16), (1, 8)]),
    ],
)
def test_what_is_left_is_split_where_that_saves_a_quarter(lengths, sizes) -> None:
    config = dataclasses.replace(cases.CONFIG, prefill_tile=4, prefill_lengths=(8, 16, 32), max_prefill_tokens=256)
    programs = Programs(
        cases.model(), settle(config, cases.model()), kv_cache.create(cases.model().config, 2, 4, jnp.float32)
    )
    pieces, requests = [], {}
    for length in lengths:
        sequence = Sequence(cases.prompt(length), length, 1, 0)
        requests[sequence] = requests_for(cases.model(), [sequence.tokens], cases.params(max_tokens=1))[0]
        pieces.append(Piece(sequence, 0, length, True))
    calls = list(calls_for(pieces, requests, programs))
    assert [(sum(row.length for row in call.pieces), call.size.num_ordered) for call in calls] == sizes
    assert [row.start for call in calls for row in call.pieces] == [
        start for length in lengths for start in range(0, length, 4)
    ]


@settings(max_examples=60, deadline=None)
@given(
    tile=st.sampled_from([None, 4]),
    two_weights=st.booleans(),
    shapes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 16), st.booleans(), st.booleans(), st.booleans()), max_size=9
    ),
)
def test_calls_hold_every_token_once_in_order(tile, two_weights, shapes) -> None:
    """Pieces (start, length, last, after others, scored) of prompts of 12 tokens and what was generated after them. No
    call needs a program that `warmup` does not know."""
    model = dataclasses.replace(cases.model(), prefill_params=cases.model().params if two_weights else None)
    lengths = (8, 16, 32) if tile else (4, 8, 16)
    config = dataclasses.replace(cases.CONFIG, prefill_tile=tile, prefill_lengths=lengths, max_prefill_tokens=64)
    programs = Programs(model, settle(config, model), kv_cache.create(model.config, 2, 4, jnp.float32))
    pieces, requests = [], {}
    for start, length, last, after, scored in shapes:
        if two_weights and start < 12:
            length = min(length, 12 - start)
        sequence = Sequence(cases.prompt(start + length), 12, 9, 0)
        params = cases.params(prompt_logprobs=2 if scored and start < 12 and length <= 12 - start else None)
        requests[sequence] = requests_for(model, [cases.prompt(12)], params)[0]
        pieces.append(Piece(sequence, start, length, last, after and start > 0))
    calls = list(calls_for(pieces, requests, programs))
    known = set(programs.expected())
    found: dict[Sequence, list[Piece]] = {}
    for call in calls:
        assert call.size in known
        assert len(call.pieces) <= call.size.rows
        assert all(piece.length <= call.size.length for piece in call.pieces)
        if call.size.num_ordered:
            assert (
                sum(piece.length for piece in call.pieces) <= call.size.num_ordered < call.size.rows * call.size.length
            )
        for piece in call.pieces:
            found.setdefault(piece.sequence, []).append(piece)
    assert len(found) == len(pieces)
    for piece in pieces:
        rows = found[piece.sequence]
        assert [row.start for row in rows] == [piece.start, *(row.start + row.length for row in rows[:-1])]
        assert sum(row.length for row in rows) == piece.length
        assert [row.last for row in rows] == [False] * (len(rows) - 1) + [piece.last]
    if tile:
        assert list(found) == [piece.sequence for piece in pieces]


@pytest.mark.parametrize("tile", [None, 4])
def test_pieces_of_prompts_and_of_output_share_no_call_where_they_have_two_weights(tile: int | None) -> None:
    model = dataclasses.replace(cases.model(), prefill_params=cases.model().params)
    config = dataclasses.replace(cases.CONFIG, prefill_tile=tile)
    programs = Programs(model, settle(config, model), kv_cache.create(model.config, 2, 4, jnp.float32))
    pieces, requests = [], {}
    for start, length in (
        (0, 9),
        (9, 5),
        (4, 3),
        (9, 2),
    ):  # a whole prompt, two outputs, the end of a prompt
        sequence = Sequence(cases.prompt(start + length), 9, 9, 0)
        requests[sequence] = requests_for(model, [sequence.tokens[:9]], cases.params(max_tokens=9))[0]
        pieces.append(Piece(sequence, start, length, True))
    calls = list(calls_for(pieces, requests, programs))
    of_output = [({piece.start >= 9 for piece in call.pieces}, call.size.of_output) for call in calls]
    assert all(starts == {flag} for starts, flag in of_output)
    assert sum(piece.length for call in calls for piece in call.pieces) == 19
    assert any(size.of_output for size in programs.expected())


def test_needs_beyond_the_examples_compile_once_and_are_counted() -> None:
    """From greedy alone to all parts of the sampler to a longer list of biases, while others run on."""
    greedy = cases.params()
    wide = dataclasses.replace(PARAMS[6], logit_bias=dict.fromkeys(range(80), 0.0) | {11: 100.0})
    with cases.engine(sampling=(greedy,), prefill_rows=(1,)) as engine:
        engine.warmup(progress=False)
        long = engine.stream([PROMPTS[0]], PARAMS[0])
        said = [next(long)]
        for row in (PARAMS[13], wide):
            index = 13 if row is PARAMS[13] else 6
            before = engine.metrics().compilations_after_warmup
            for _ in range(2):
                (output,) = engine.generate([PROMPTS[index]], row)
                assert output.token_ids == cases.expected()[index].token_ids
            assert len(engine._runner.layouts.known) == (2 if index == 13 else 3)  # type: ignore[union-attr]
            if row is wide:
                assert engine.metrics().compilations_after_warmup > before
            said.append(next(long))
        said += long
        assert sum((delta.token_ids for delta in said), ()) == cases.expected()[0].token_ids


@pytest.mark.parametrize("kind", ["decode", "copy"])
def test_the_engine_s_programs_update_the_cache_in_place(kind: Literal["decode", "copy"]) -> None:
    """A pool of 65,536 pages that is only described: no temporary of that size, and everything aliased."""
    settings = dataclasses.replace(settle(cases.CONFIG, cases.model()), num_pages=1 << 16)
    model = cases.model()
    cache = jax.eval_shape(lambda: kv_cache.create(model.config, 1 << 16, 4, model.dtype))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    greedy = SamplerLayout.required(cases.params(), model.config)
    lowered = Programs(model, settings, cache)._lower(Size(kind, rows=4, width=16, layout=greedy))
    memory = lowered.compile().memory_analysis()
    assert size > 6 * 10**7
    assert memory.temp_size_in_bytes < size // 50
    assert 0 <= memory.alias_size_in_bytes - size < 10_000  # the decode state is donated too


def test_layouts_choose_the_narrowest_that_serves() -> None:
    config = cases.model().config
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(logprobs=3),
        SamplingParams(logit_bias=dict.fromkeys(range(70), 1.0)),
    ]
    greedy, drawn, filtered, logged, biased = (SamplerLayout.required(row, config) for row in rows)
    assert logged.variant.num_logprobs == 5 and biased.places == 128
    assert [listed(count, config) for count in (0, 1, 6, 21, 96)] == [0, 5, 20, 32, 96]
    layouts = Layouts([filtered, greedy])
    assert layouts.known == [greedy, filtered]
    assert layouts.choose([]) == layouts.choose([greedy]) == greedy
    assert layouts.choose([drawn]) == layouts.choose([greedy, filtered]) == filtered
    assert layouts.choose([logged]) == filtered | logged
    assert layouts.choose([biased, drawn]) == filtered | logged | biased
    assert len(layouts.known) == 4


# --- Figures


def test_counts_and_rates() -> None:
    """Two prompts of 20 and 9 tokens with 7 tokens each; then the first again, 16 tokens of which are cached."""
    with cases.engine() as engine:
        first, second = cases.prompt(20, 1), cases.prompt(9, 2)
        row = cases.params(max_tokens=7)
        engine.generate([first, second], row)
        engine.generate([first], row)
        metrics = engine.metrics()
        assert (metrics.submitted, metrics.finished, metrics.preemptions) == (3, {"length": 3}, 0)
        assert (metrics.prompt_tokens, metrics.output_tokens) == (20 + 9 + 4, 21)
        assert metrics.prefix_hit_rate == pytest.approx(16 / 49)
        # Full pages of prompt and output stay: 26 and 15 tokens are in the cache, 6 and 3 pages of 4.
        assert (metrics.pages, metrics.pages_owned, metrics.pages_cached) == (24, 0, 9)
        # Chunks of 3 after the first token: two of 2 of 4 rows, two of 1.
        assert metrics.batch_occupancy == pytest.approx((2 + 2 + 1 + 1) / 16)
        assert metrics.output_tokens_per_s == pytest.approx(21 / metrics.seconds)
        assert 0 < metrics.prefill_share < 1 and 0 < metrics.busy_share <= 1
        times = (metrics.time_to_first_token, metrics.time_per_output_token, metrics.end_to_end)
        assert all(0 < one.p50 <= one.p95 <= one.p99 for one in times)
        assert metrics.time_to_first_token.mean + 6 * metrics.time_per_output_token.mean == pytest.approx(
            metrics.end_to_end.mean
        )
        assert "21 tokens" in str(metrics) and "of all threads, without a warm-up" in str(metrics)
        engine._interrupted = True  # a round that did not end: the cache is lost, what was counted is not
        engine.generate([second], row)
        assert engine.metrics().prefix_hit_rate == pytest.approx(16 / 58)
        engine.reset_metrics()
        assert (engine.metrics().output_tokens, engine.metrics().prefix_hit_rate) == (0, 0.0)


def test_queue_lengths_while_running() -> None:
    with cases.engine() as engine:
        for number in range(6):
            engine.submit(cases.prompt(30, number), cases.params(max_tokens=5), request_id=str(number))
        assert engine.metrics().waiting == 6
        engine.step()
        metrics = engine.metrics()
        assert (metrics.waiting, metrics.prefilling, metrics.decoding) == (5, 0, 1)  # 30 tokens fill a round of 32
        assert metrics.pages_owned == 9  # 30 tokens and a chunk of 3
        while engine.has_work:
            engine.step()


def test_latency_of_known_values() -> None:
    """1 to 100: the percentiles lie between neighbours, as NumPy defines them."""
    latency = Latency.of(float(value) for value in range(1, 101))
    assert (latency.mean, latency.p50) == (50.5, 50.5)
    assert (latency.p95, latency.p99) == pytest.approx((95.05, 99.01))
    assert Latency.of([]) == Latency(0.0, 0.0, 0.0, 0.0)


def test_prometheus_text() -> None:
    with cases.engine() as engine:
        engine.generate([cases.prompt(5)], cases.params())
        metrics = engine.metrics()
        text = metrics.prometheus()
    for prefix in ("", "a b\n", "a\n", "1a", "a\udcff", "\u00e9"):
        with pytest.raises(ValueError, match=r"^prefix='.*'; expected ASCII letters"):
            metrics.prometheus(prefix)
    for line in text.splitlines():
        assert re.fullmatch(
            r"# TYPE [a-z0-9_]+ (counter|gauge|summary)|[a-z0-9_]+(\{[a-z]+=\"[a-z0-9.]+\"\})? \S+", line
        )
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['jaxinfer_finished{reason="length"}'] == "1"
    assert values["jaxinfer_output_tokens"] == "9"
    assert float(values['jaxinfer_time_to_first_token_seconds{quantile="0.95"}']) > 0
    assert "# TYPE jaxinfer_output_tokens counter" in text and "# TYPE jaxinfer_waiting gauge" in text


def test_stall_bound_in_milliseconds_follows_the_measured_rate() -> None:
    with cases.engine(decode_stall_ms=10.0) as engine:
        assert engine._scheduler.stall_tokens == 16  # nothing measured yet
        engine._meter.prefill_rate = 40_000.0
        engine.submit(cases.prompt(5), cases.params())
        engine.step()
        assert engine._scheduler.stall_tokens == 400


def test_meter_splits_the_time_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatched at 1 and 2, ended at 3 and 7: the second began when the first was over. A small prefill says nothing
    of what more tokens cost: the rest of a prompt whose pages came back from the host would make computing seem slow.
    """
    now = iter([0.0, 0.0, 3.0, 7.0, 8.0])
    monkeypatch.setattr("jaxinfer.engine.metrics.time.perf_counter", lambda: next(now))
    meter = Meter()
    meter.add_program("prefill", 1.0, 1, 1, 100)
    meter.add_program("decode", 2.0, 3, 4, 12)
    assert list(meter.spans) == [Span("prefill", 1.0, 3.0, 1, 100), Span("decode", 3.0, 7.0, 3, 12)]
    assert (meter.prefill_rate, meter.busy) == (50.0, {"prefill": 2.0, "decode": 4.0})
    meter.add_program("prefill", 7.0, 1, 1, 10)
    assert (meter.prefill_rate, meter.full_prefill_rate) == (pytest.approx(100 / 2.8), 50.0)


# --- The picture


def test_timeline_is_a_figure_and_a_file(tmp_path: pathlib.Path) -> None:
    with cases.engine() as engine:
        with pytest.raises(ValueError, match="no programs have run since the metrics were reset"):
            engine.plot_timeline()
        engine.generate([cases.prompt(20)], cases.params())
        figure = engine.plot_timeline(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    shown = IPython.core.formatters.PNGFormatter()(figure)
    assert shown is not None and shown[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["decode", "prefill"]
    decode, prefill = axes.collections
    assert (len(decode.get_paths()), len(prefill.get_paths())) == (3, 2)  # 8 tokens in chunks of 3, 20 in pieces of 16


def test_bars_lie_where_the_spans_do() -> None:
    figure = plot_timeline([Span("prefill", 1.0, 3.0, 1, 9), Span("decode", 3.0, 7.0, 4, 12)])
    decode, prefill = figure.axes[0].collections
    assert np.allclose(decode.get_paths()[0].get_extents().get_points(), [[2, 0.1], [6, 0.9]])
    assert np.allclose(prefill.get_paths()[0].get_extents().get_points(), [[0, 1.1], [2, 1.9]])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install jaxinfer\[plot\]"):
        plot_timeline([Span("decode", 0.0, 1.0, 1, 1)])
