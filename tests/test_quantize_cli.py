"""`jaxinfer quantize`: quality is measured, printed and kept, unless it is not wanted or cannot be."""

import pathlib

import families
import markov
import pytest

import jaxinfer.cli
import jaxinfer.store.create
import jaxinfer.store.export
from jaxinfer.cli import command_line, quantize
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.store.reader import Store


def test_quality_is_reported_and_stored(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also of a plan that needs no text; not without a tokenizer, nor with one that does not know the text's words."""
    folder = str(markov.save(tmp_path / "model", {token: (token + 1) % 62 for token in range(62)}))
    bare = str(families.BY_NAME["llama"].folder)
    words = "|".join(f" w{4 + number % 50}" for number in range(200))
    known = Calibration((words,), (f"A|{words}",), "words", 1, 32, 2)
    bundled = Calibration.bundled
    for name, model, options, measured in (
        ("judged", folder, [], True),
        ("not", folder, ["--no-judge"], False),
        ("unknown", folder, [], False),
        ("bare", bare, [], False),
    ):
        monkeypatch.setattr(Calibration, "bundled", bundled if name == "unknown" else lambda **_: known)
        out = tmp_path / name
        assert jaxinfer.cli.main(["quantize", model, "--plan", "int8", *options, "--out", str(out)]) == 0
        said, quality = capsys.readouterr().err, Store(out).manifest.quality
        assert ("quality: perplexity" in said and "nats" in said) == (quality is not None) == measured
        assert (said.splitlines()[-1:] == ["quality: not measured"]) != measured
        if quality is not None:
            assert quality["quality"]["kl_p99"] >= 0 and quality["source"] == "words"
            assert len(quality["weights"]) == 7
    assert "model: quality is not measured: the tokenizer cannot encode this text" in caplog.text
    assert f"{bare}: quality is not measured: it has no tokenizer to read text with" in caplog.text
    for options in (["--judge"], ["--calibration", str(pathlib.Path(__file__))]):
        command = ["quantize", bare, "--plan", "int8", *options, "--out", str(tmp_path / "none")]
        assert jaxinfer.cli.main(command) == 2
        assert f"error: {bare} has no tokenizer to read calibration texts with; add its" in capsys.readouterr().err


def test_stores_go_to_unicode_paths_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the folder that one is in counts; what needs no TensorStore goes anywhere."""
    source = families.BY_NAME["llama"].folder
    with pytest.raises(ValueError, match=r"no store can be written to '.*o\\udcff': the path is not Unicode"):
        jaxinfer.quantize(source, "int8", out=tmp_path / "o\udcff")
    (tmp_path / "here\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "here\udcff")
    with pytest.raises(ValueError, match=r"here\\udcff/store': the path is not Unicode"):
        jaxinfer.store.create.create(source, "store")
    with pytest.raises(ValueError, match=r"here\\udcff/store': the path is not Unicode"):
        jaxinfer.store.create.save(jaxinfer.load(source), "store")
    jaxinfer.store.export.export(source, "folder", progress=False)
    assert [path.name for path in pathlib.Path.cwd().iterdir()] == ["folder"]


def test_calibrating_without_judging(tmp_path: pathlib.Path) -> None:
    """--no-judge leaves out the text to judge by, not that to calibrate with."""
    parser = command_line.parser()
    options = parser.parse_args(["quantize", "MODEL", "--plan", "int4-gptq", "--out", "x", "--no-judge"])
    found = quantize.calibration_for(options, quantize.resolve("int4-gptq"))
    assert isinstance(found, Calibration) and (found.samples, found.evaluation_samples) == (128, 0)
    options.samples, options.length = 9, 100
    found = quantize.calibration_for(options, quantize.resolve("int4-gptq"))
    assert isinstance(found, Calibration) and (found.samples, found.length) == (9, 100)
    (tmp_path / "a.txt").write_text("\n\n".join(f"Paragraph {number}, of some words." for number in range(400)))
    options.calibration = [str(tmp_path / "a.txt")]
    found = quantize.calibration_for(options, quantize.resolve("int4"))
    assert isinstance(found, Calibration) and (found.source, found.evaluation_samples) == ("a.txt", 0)
    assert (found.samples, found.length) == (9, 100)
