"""Compiled programs on disk: a second process compiles nothing, and what the user has configured stays."""

import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator

import jax
import markov
import pytest

from jaxinfer.compilation import SWITCH, enable_persistent_cache

COUNT_CACHE_EVENTS = """
import collections, json, sys
import jax
import jaxinfer as ji

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
model = ji.load(sys.argv[1], progress=False)
ji.generate(model, [[0], [1, 2]], ji.SamplingParams(max_tokens=4, temperature=0.0))
ji.generate(model, [0], ji.SamplingParams(max_tokens=4, top_p=0.5, logprobs=2, seed=1))
ji.logits(model, [[0, 1]])
print(json.dumps(events))
"""


def count_cache_events(model: pathlib.Path, cwd: pathlib.Path, **environment: str) -> dict[str, int]:
    """Runs the program above in a fresh process, which must have nothing to say on standard error."""
    inherited = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_CACHE_EVENTS, str(model)],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_second_process_compiles_nothing(tmp_path: pathlib.Path) -> None:
    """The first is told of the folder by JAX's own variable, the second by ours, and from another folder."""
    model = markov.save(tmp_path / "model", {0: 1, 1: 2})
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = count_cache_events(model, tmp_path, JAX_COMPILATION_CACHE_DIR=str(cache / "xla"))
    assert first["cache_misses"] == first["compile_requests_use_cache"] > 5
    files = sorted(path.name for path in cache.rglob("*-cache"))
    assert len(files) == first["cache_misses"]
    second = count_cache_events(model, elsewhere, JAXINFER_CACHE=str(cache))
    assert second["cache_hits"] == second["compile_requests_use_cache"] == first["compile_requests_use_cache"]
    assert "cache_misses" not in second
    assert sorted(path.name for path in cache.rglob("*-cache")) == files


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """JAX as a user finds it, with an empty cache folder; put back afterwards. Nothing is compiled meanwhile."""
    options = {
        "jax_compilation_cache_dir": None,
        "jax_compilation_cache_max_size": -1,
        "jax_persistent_cache_min_compile_time_secs": 1.0,
        "jax_enable_compilation_cache": True,
    }
    before = {option: getattr(jax.config, option) for option in options}
    for option, value in options.items():
        monkeypatch.delenv(option.upper(), raising=False)
        jax.config.update(option, value)
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for option, value in before.items():
        jax.config.update(option, value)


def test_cache_is_private_and_has_no_minimum_compile_time(fresh: pathlib.Path) -> None:
    assert enable_persistent_cache() == fresh / "xla"
    assert (fresh / "xla").stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(fresh / "xla")
    assert jax.config.jax_compilation_cache_max_size == -1  # JAX's own bound makes threads wait for each other
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert enable_persistent_cache() == fresh / "xla"


def test_what_was_used_least_recently_goes_when_the_cache_has_become_too_large(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh / "xla"
    (folder / "autotuning").mkdir(parents=True)
    for age, name in enumerate(("new-cache", "used-cache", "old-cache", "oldest-cache")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    os.utime(folder / "used-cache", (2e9, 1e9 - 1))  # written before "new", read after

    def left_of(most_bytes: int) -> set[str]:
        monkeypatch.setattr("jaxinfer.compilation.MAX_BYTES", most_bytes)
        jax.config.update("jax_compilation_cache_dir", None)
        enable_persistent_cache()
        return {file.name for file in folder.iterdir()} - {"autotuning"}

    assert left_of(400) == {"new-cache", "used-cache", "old-cache", "oldest-cache"}
    assert left_of(399) == {"new-cache", "used-cache", "old-cache"}
    jax.config.update("jax_compilation_cache_max_size", 1000)  # the user's own bound, to which JAX keeps
    assert left_of(100) == {"new-cache", "used-cache", "old-cache"}
    jax.config.update("jax_compilation_cache_max_size", -1)
    assert left_of(100) == {"used-cache"}
    assert (folder / "autotuning").is_dir()


def test_folder_and_options_of_the_user_stay(fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1.0")
    assert enable_persistent_cache() == pathlib.Path("/elsewhere")
    assert jax.config.jax_compilation_cache_dir == "/elsewhere"
    assert jax.config.jax_compilation_cache_max_size == -1
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    assert not fresh.exists()


def test_cache_can_be_switched_off(fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert enable_persistent_cache() is None
    monkeypatch.delenv(SWITCH)
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_persistent_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv(SWITCH, "no")
    with pytest.raises(ValueError, match=r"^JAXINFER_COMPILATION_CACHE='no': expected on or off$"):
        enable_persistent_cache()


def test_a_full_disk_and_a_path_that_xla_cannot_take_cost_one_warning(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
        assert enable_persistent_cache() is None
    assert f"{fresh / 'xla'}: No space left on device; JAXINFER_CACHE chooses another folder" in caplog.text
    monkeypatch.setenv("JAXINFER_CACHE", f"{fresh}\udcff")
    assert enable_persistent_cache() is None
    assert "is not Unicode: character" in caplog.text and len(caplog.records) == 2
    assert jax.config.jax_compilation_cache_dir is None


def test_folder_that_cannot_be_made_costs_a_warning(fresh: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.write_text("a file where the folder should be")
    assert enable_persistent_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept" in caplog.text
