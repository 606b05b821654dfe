"""Progress in a log: lines that can be read, now and then, and none for work that is short."""

import functools
import pathlib
import re

import markov
import pytest

import jaxinfer as ji
from checkpoints import progress
from checkpoints.progress import progress_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Seconds that pass when a test says so, for tqdm."""
    monkeypatch.setattr(progress, "LOG_INTERVAL", 10.0)  # which `conftest.py` has made endless
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_in_a_log_a_line_is_written_each_interval(clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(total=8, unit="layer", desc="Quantising (int4)", shown=True, leave=False) as outer:
        for _ in range(7):
            clock(5.5)
            outer.update()
            with progress_bar(total=1, unit="B", desc="Short", shown=True) as inner:
                inner.update()
    lines = capsys.readouterr().err.splitlines()
    assert [re.split(r",|, ", line)[0] for line in lines] == [
        f"Quantising (int4): {percent}%" for percent in (25, 50, 75)
    ]
    assert lines[0].startswith("Quantising (int4): 25%, 2 of 8 after 00:11, 00:33 left, 5.50s/layer")


def test_nothing_is_written_where_it_is_not_to_be(clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(total=2, shown=False) as bar:
        for _ in range(2):
            clock(60)
            bar.update()
    assert capsys.readouterr().err == ""


def test_where_somebody_watches_it_is_drawn_over_itself(clock, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    with progress_bar(total=2, desc="Loading", shown=True, leave=False) as bar:
        clock(1)
        bar.update()
    drawn = capsys.readouterr().err
    assert "\rLoading:  50%|" in drawn
    assert "\n" not in drawn


class Interrupted(Exception):
    """Raised where programs would be compiled."""


@pytest.mark.parametrize("place", ["jaxinfer.generation._run", "jaxinfer.Engine._advance"])
def test_before_the_first_token_a_bar_says_what_is_waited_for(
    place: str, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Programs of new sizes are compiled in a call that draws nothing; on a large model that takes a while."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setattr(place, interrupt)
    model = ji.load(markov.save(tmp_path, markov.chain(0, 1, 2, 3)), progress=False)
    with ji.Engine(model, ji.EngineConfig(num_pages=5, max_decode_batch=1)) as engine:
        generate = engine.generate if "Engine" in place else functools.partial(ji.generate, model)
        with pytest.raises(Interrupted):
            generate([[0]], ji.SamplingParams(max_tokens=2), progress=True)
    assert "0/1 [00:00<?, ?request/s, no tokens yet: programs of new sizes are compiled" in capsys.readouterr().err
