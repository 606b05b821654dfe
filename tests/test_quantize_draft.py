"""Drafts quantised for a target: calibrated on what it writes, judged against it, and not warned of."""

import logging
import pathlib
from types import SimpleNamespace

import families
import numpy as np
import pytest

import jaxinfer as ji
import jaxinfer.cli
from checkpoints import progress
from jaxinfer.quantization import pair
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.pair import continued
from jaxinfer.quantization.plan import Plan, Precision, Rule, uniform
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
            assert not caplog.text  # nothing was drafted yet
            speculation.report.add(4, np.array([[4]]), np.array([[3]]), 4, None)
            speculation.warn_of_plans(target)
        assert ("quantised differently" in caplog.text) == warned


def test_what_is_no_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the target writes a token."""
    target = ji.load(families.BY_NAME["llama"].folder)
    written = []
    monkeypatch.setattr(pair, "stream", lambda *given: written.append(given))
    windows = Windows(np.full((2, 16), 7, np.int32), np.full((1, 16), 7, np.int32), "sevens")
    eight = uniform("eight", Precision(8))
    unknown = Plan((*eight.rules, Rule(("nope",), Precision(8))), "wrong")
    for draft, plan, options, message in (
        (target, "int44", {}, "plan='int44': expected int4, "),
        (target, unknown, {}, "wrong: no weight is named nope"),
        (ji.quantize(target, Plan((Rule(("layers.1.o_proj",), Precision(8)),))), eight, {}, "o is packed already"),
        (target, eight, {"promote_above": "x"}, "promote_above is 'x'; expected a share"),
        (target, eight, {"promote_above": float("nan")}, "promote_above is nan; expected a share"),
        (target, eight, {"seed": "1"}, "seed is '1'; expected a whole number from 0 to"),
        (target, eight, {"seed": -1}, "seed is -1; expected"),
        (target, eight, {"seed": 2**64}, "seed is 18446744073709551616; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            ji.quantize_draft(draft, target, plan, calibration=windows, **options)
    with pytest.raises(FileNotFoundError, match=r"nosuch\.toml"):
        ji.quantize_draft(target, target, "nosuch.toml", calibration=windows)
    assert not written
    with pytest.raises(ValueError, match="it has 112 tokens, the target 96"):
        ji.quantize_draft(ji.load(families.BY_NAME["qwen2"].folder), target, "int4")
    with pytest.raises(ValueError, match="the target is the string 'a path'; expected a model"):
        ji.quantize_draft(target, "a path", "int4")


def test_what_can_be_told_without_weights_is_told_before_they_are_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (str(families.BY_NAME[name].folder) for name in ("llama", "qwen2"))
    monkeypatch.setattr(pair, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    windows = Windows(np.full((2, 16), 7, np.int32), np.full((1, 16), 7, np.int32), "sevens")
    eight, out = uniform("eight", Precision(8)), tmp_path / "out"
    unknown = Plan((Rule(("nope",), Precision(8)),), "wrong")
    for plan, options, other, message in (
        (unknown, {}, target, "wrong: no weight is named nope"),
        (eight, {"promote_above": -1.0}, target, r"promote_above is -1\.0; expected a share"),
        (eight, {"dtype": "float7"}, target, "float7"),
        (eight, {"calibration": Windows(windows.calibration + 500, windows.evaluation, "far")}, target, "far"),
        (eight, {}, draft, "it has 112 tokens, the target 96"),
        (eight, {}, str(tmp_path / "nowhere"), "nowhere"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            pair.write_draft(other, target, plan, out, **{"calibration": windows, **options})
    assert not out.exists()


def test_writing_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted in tokens: the rows of a batch end together."""
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setattr(pair, "stream", lambda *_: [SimpleNamespace(prompt_index=0, token_ids=[1, 2])] * 4)
    target = ji.load(families.BY_NAME["llama"].folder)
    continued(target, np.zeros((1, 16), np.int32), seed=0, progress=True)
    printed = capsys.readouterr().err
    assert "llama writes" in printed and "0/8 [" in printed and "token/s" in printed
    continued(target, np.zeros((1, 16), np.int32), seed=0)
    assert not capsys.readouterr().err


def test_rows_of_the_largest_seed_go_on_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def noted(model: object, prompts: list[list[int]], params: list[ji.SamplingParams]) -> list[SimpleNamespace]:
        seeds.extend(one.seed for one in params)
        return [SimpleNamespace(prompt_index=index, token_ids=[1]) for index in range(len(prompts))]

    monkeypatch.setattr(pair, "stream", noted)
    target = ji.load(families.BY_NAME["llama"].folder)
    assert continued(target, np.zeros((3, 2), np.int32), seed=2**64 - 1).tolist() == [[0, 1]] * 3
    assert seeds == [2**64 - 1, 0, 1]
