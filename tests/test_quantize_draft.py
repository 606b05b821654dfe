"""Drafts quantised for a target: calibrated on what it writes, judged against it, and not warned of."""

import logging
import pathlib

import families
import numpy as np
import pytest

import jaxinfer as ji
import jaxinfer.cli
from jaxinfer.quantization import pair
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.pair import continued
from jaxinfer.quantization.plan import Precision, uniform
from jaxinfer.quantization.report import QuantizationReport
from jaxinfer.quantization.sensitivity_table import to_toml

ROUNDED = uniform("int3", Precision(3, 16))


def expected(draft: ji.Model, target: ji.Model, rows: np.ndarray) -> tuple[float, float]:
    """Mean KL divergence and mean shared probability, in float64 from the logits of whole rows."""
    logits = (
        np.asarray(ji.logits(model, rows), np.float64)[:, :-1, : model.config.num_tokens] for model in (draft, target)
    )
    q, p = (np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in logits)
    return float(np.mean(np.sum(p * np.log(p / q), axis=-1))), float(np.mean(np.minimum(p, q).sum(axis=-1)))


def test_a_draft_of_another_size_is_calibrated_on_what_the_target_writes(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = (ji.load(families.BY_NAME[name].folder, dtype="float32") for name in ("llama", "phi3"))
    ids = np.random.default_rng(0).integers(0, 90, (6, 16)).astype(np.int32)
    windows = Windows(ids[:4], ids[4:], "random ids")
    made = ji.quantize_draft(draft, target, ROUNDED, calibration=windows)
    report = made.quantization
    assert report is not None and report.pair is not None and report.pair.before and report.pair.after
    assert report.source == f"what {target.name} writes after random ids" and report.pair.target == target.name
    written = continued(target, ids[4:], seed=4)
    assert (written[:, :8] == ids[4:, :8]).all() and (written[:, 8:] != ids[4:, 8:]).any()
    for model, found in ((draft, report.pair.before), (made, report.pair.after)):
        assert (found.kl_mean, found.acceptance) == pytest.approx(expected(model, target, written), rel=1e-3)
        assert found.num_tokens == 2 * 15
    assert "before: KL mean" in repr(report) and "after: KL mean" in repr(report)
    # A store keeps it, and reports that have none are read as before.
    assert QuantizationReport.from_mapping(report.to_mapping()) == report
    old = report.to_mapping()
    del old["pair"]
    assert QuantizationReport.from_mapping(old).pair is None
    monkeypatch.setattr(pair, "windows_for", lambda *_: windows)
    (tmp_path / "plan.toml").write_text(to_toml(ROUNDED))
    options = ["--target", target.name, "--plan", str(tmp_path / "plan.toml"), "--dtype", "float32"]
    assert jaxinfer.cli.main(["quantize", draft.name, *options, "--out", str(tmp_path / "store")]) == 0
    assert "before: KL mean" in capsys.readouterr().err
    stored = ji.load(tmp_path / "store", dtype="float32").quantization
    assert stored is not None and stored.pair == report.pair
    # Speculation says nothing of its plan, as it does of one that was rounded apart.
    for model, warned in ((made, False), (ji.quantize(draft, ROUNDED), True)):
        speculation = ji.Speculation(ji.ModelDraft(model))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxinfer"):
            speculation.warn_of_plans(target)
        assert ("quantised differently" in caplog.text) == warned


def test_what_is_no_pair_is_refused() -> None:
    target = ji.load(families.BY_NAME["llama"].folder)
    with pytest.raises(ValueError, match="it has 112 tokens, the target 96"):
        ji.quantize_draft(ji.load(families.BY_NAME["qwen2"].folder), target, "int4")
    with pytest.raises(ValueError, match="the target is the string 'a path'; expected a model"):
        ji.quantize_draft(target, "a path", "int4")
