"""Calibrated quantising of whole models: what layers are given, scales folded into them, reports, and promotions."""

import dataclasses
import pathlib
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_checkpoints

from jaxinfer import decoder
from jaxinfer.generation import logits
from jaxinfer.layers.weights import ScaledCodes, StackedOutputs
from jaxinfer.model import Model, load
from jaxinfer.params import layer_specs, linear_names
from jaxinfer.quantization.api import quantize
from jaxinfer.quantization.calibrated import CalibratedQuantizer
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.folding import FIELDS, can_fold, fold, tie
from jaxinfer.quantization.layer_pass import input_moments, pass_through, representative
from jaxinfer.quantization.moments import share_of_output, values_of
from jaxinfer.quantization.plan import HEAD, PRESETS, Plan, Precision, Rule, from_mapping, resolve, uniform
from jaxinfer.quantization.quality import measure, row_batches
from jaxinfer.quantization.report import Quality, QuantizationReport, WeightError
from pallas_kernels.int4_matmul import PackedInt4


def random_windows(vocab: int, rows: int = 8, length: int = 32) -> Windows:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, vocab, (count, length)).astype(np.int32) for count in (rows, rows // 2)]
    return Windows(ids[0], ids[1], "random ids")


# --- Layers


@pytest.mark.parametrize("name", ["llama_biases", "gemma2", "olmo2"])
def test_folded_scales_change_nothing(name: str) -> None:
    """Norms with an offset, biases, shared heads of v, no norm before at all: whatever the family has."""
    model = load(families.BY_NAME[name].folder, dtype="float32", progress=False)
    config, layer = model.config, model.params.layers[0]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 16, config.hidden_size)).astype(np.float32))
    expected = pass_through(layer, x, config=config, index=0)
    moments = input_moments(layer, [x[:1], x[1:]], config=config, index=0)
    folded, changed = layer, moments
    for field in FIELDS:
        if can_fold(layer, field):
            size = getattr(layer, field).shape[1]
            scales = tie(jnp.asarray(rng.uniform(0.5, 2, size).astype(np.float32)), field, config)
            folded, changed = fold(folded, changed, field, scales, config)
    assert can_fold(layer, "qkv") == (name != "olmo2")
    assert float(jnp.max(jnp.abs(values_of(folded.down) - values_of(layer.down)))) > 0.01
    np.testing.assert_allclose(pass_through(folded, x, config=config, index=0), expected, rtol=2e-4, atol=2e-4)
    # The moments after folding are those that the folded layer's projections are given.
    measured = input_moments(folded, [x], config=config, index=0)
    for mine, theirs in zip(jax.tree.leaves(changed), jax.tree.leaves(measured), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4 * float(jnp.max(theirs)))


def test_layers_are_those_of_the_model() -> None:
    """A layer after the other is the whole model; layers with and without a window need a program each."""
    model = load(families.BY_NAME["gemma2"].folder, dtype="float32", progress=False)
    config = model.config
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.num_tokens, (2, 24)).astype(np.int32))
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32)[None, :], (2, 24))
    expected, _ = decoder.forward(model.params, tokens, positions, None, None, config=config, stage="first")
    x = decoder.embed(tokens, model.params.embed_tokens, config)
    for index, layer in enumerate(model.params.layers):
        x = pass_through(layer, x, config=config, index=representative(config, index))
    np.testing.assert_allclose(decoder.rms_norm(x, model.params.norm, config.norm_eps), expected, rtol=1e-4, atol=1e-4)
    kinds = [representative(config, index) for index in range(config.num_layers)]
    assert len(set(kinds)) == len(set(config.layers)) == 2


# --- Models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return quantized_checkpoints.make("awq gemm", tmp_path_factory.mktemp("model")).dense


@pytest.fixture(scope="module")
def dense(folder: pathlib.Path) -> Model:
    return load(folder, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def made(dense: Model) -> dict[str, Model]:
    windows = random_windows(dense.config.num_tokens)
    return {plan: quantize(dense, plan, calibration=windows) for plan in ("int4", "int4-awq", "int4-gptq")}


def report_of(model: Model) -> QuantizationReport:
    assert model.quantization is not None
    return model.quantization


def test_calibrated_methods_beat_rounding(made: dict[str, Model], dense: Model) -> None:
    """For every weight, on the calibration; for the model, on other tokens. Nothing becomes larger."""
    reports = {plan: report_of(model) for plan, model in made.items()}
    rtn = {weight.name: weight.error for weight in reports["int4"].weights}
    assert list(rtn) == linear_names(dense.config)[:-1]
    for plan in ("int4-awq", "int4-gptq"):
        assert all(weight.error < rtn[weight.name] for weight in reports[plan].weights), reports[plan]
        assert sum(weight.error for weight in reports[plan].weights) < 0.8 * sum(rtn.values())
        shapes = [leaf.shape for leaf in jax.tree.leaves(made[plan].params)]
        assert shapes == [leaf.shape for leaf in jax.tree.leaves(made["int4"].params)]
        better, plain = reports[plan].quality, reports["int4"].quality
        assert better is not None and plain is not None
        assert better.kl_mean < plain.kl_mean
    assert isinstance(made["int4-gptq"].params.layers[0].qkv, PackedInt4)


def test_quality_is_that_of_the_finished_model(made: dict[str, Model], dense: Model) -> None:
    """What streams beside the layers is what the models' own logits give."""
    windows = random_windows(dense.config.num_tokens)
    for plan, model in made.items():
        reported = report_of(model).quality
        assert reported is not None
        measured = measure(model, dense, windows.evaluation)
        for key, value in dataclasses.asdict(measured).items():
            np.testing.assert_allclose(getattr(reported, key), value, rtol=2e-3, err_msg=f"{plan} {key}")
        tokens = windows.evaluation
        logprobs, original = (
            np.asarray(jax.nn.log_softmax(logits(m, tokens)), np.float64)[:, :-1] for m in (model, dense)
        )
        chosen = np.take_along_axis(logprobs, tokens[:, 1:, None].astype(np.int64), axis=2)
        np.testing.assert_allclose(measured.perplexity, np.exp(-chosen.mean()), rtol=1e-4)
        divergence = (np.exp(original) * (original - logprobs)).sum(-1)
        np.testing.assert_allclose(measured.kl_mean, divergence.mean(), rtol=1e-3)
        np.testing.assert_allclose(measured.kl_p99, np.quantile(divergence, 0.99), rtol=1e-3)


def test_from_a_path_and_again_alike(made: dict[str, Model], folder: pathlib.Path, dense: Model) -> None:
    windows = random_windows(dense.config.num_tokens)
    for plan in ("int4-awq", "int4-gptq"):
        from_path = quantize(folder, plan, calibration=windows, dtype="float32", progress=False)
        for a, b in zip(jax.tree.leaves(from_path.params), jax.tree.leaves(made[plan].params), strict=True):
            np.testing.assert_array_equal(a, b)
        assert from_path.quantization == made[plan].quantization


def test_weights_that_err_too_much_are_promoted(dense: Model, made: dict[str, Model]) -> None:
    errors = {weight.name: weight.error for weight in report_of(made["int4"]).weights}
    limit = min(errors[f"layers.0.{name}_proj"] for name in "qkv")
    worst = [name for name, error in errors.items() if error > limit]
    assert [weight.name for weight in report_of(made["int4"]).over(limit)] == sorted(worst, key=lambda n: -errors[n])
    model = quantize(dense, "int4", calibration=random_windows(dense.config.num_tokens), promote_above=limit)
    report = report_of(model)
    assert not report.over(limit)
    assert set(worst) <= {weight.name for weight in report.weights if weight.promoted}
    assert report.plan.name == "int4, promoted"
    names = [weight.name for weight in report.weights if weight.promoted]
    assert f"promoted for larger errors: {', '.join(names[:5])}" in str(report)
    for weight in report.weights:
        assert weight.precision == ("int8" if weight.promoted else "int4 g64 rtn")
        assert str(report.plan.precision(weight.name)) == weight.precision
    assert isinstance(model.params.layers[0].qkv, StackedOutputs)
    assert quantize(dense, "int4", promote_above=1e-9, calibration=random_windows(64)).quantization is not None


def test_mixed_plans_and_heads(dense: Model) -> None:
    """AWQ scales what other methods have beside it; a rounded head is judged as they are."""
    plan = Plan(
        (
            Rule((HEAD,), Precision(8)),
            Rule(("*.v_proj", "*.up_proj"), Precision(16)),
            Rule(("*.k_proj",), Precision(method="hqq")),
            Rule(("*.o_proj",), Precision(3, symmetric=True, method="gptq")),
            Rule(("*",), Precision(method="awq")),
        ),
        "mixed",
    )
    model = quantize(dense, plan, calibration=random_windows(dense.config.num_tokens))
    report = report_of(model)
    assert {weight.name.split(".")[-1]: weight.precision for weight in report.weights} == {
        "q_proj": "int4 g64 awq",
        "k_proj": "int4 g64 hqq",
        "o_proj": "int3 g64 symmetric gptq",
        "gate_proj": "int4 g64 awq",
        "down_proj": "int4 g64 awq",
        "lm_head": "int8",
    }
    assert report.quality is not None and report.quality.kl_mean < 0.5
    assert isinstance(model.params.lm_head, ScaledCodes)
    assert QuantizationReport.from_mapping(report.to_mapping()) == report


def test_a_head_is_fitted_to_what_the_layers_make(dense: Model, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """By GPTQ, and by AWQ, whose scales go into the last norm; embedding and layers are left alone."""
    windows = random_windows(dense.config.num_tokens)
    errors, models = {}, {}
    for method in ("rtn", "gptq", "awq"):
        models[method] = quantize(dense, Plan((Rule((HEAD,), Precision(3, method=method)),)), calibration=windows)
        report = report_of(models[method])
        (errors[method],) = [weight.error for weight in report.weights]
        assert report.quality is not None and report.quality.kl_mean > 0
        head = models[method].params.lm_head
        assert isinstance(head, PackedInt4)
        assert models[method].params.embed_tokens is dense.params.embed_tokens
    assert errors["gptq"] < 0.9 * errors["rtn"]
    assert errors["awq"] <= errors["rtn"]
    plan, options = Plan((Rule((HEAD,), Precision(3, method="gptq")),)), {"calibration": windows, "dtype": "float32"}
    expected, stored = quantize(folder, plan, **options), quantize(folder, plan, out=tmp_path / "store", **options)
    for a, b in zip(jax.tree.leaves(stored.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert stored.quantization == expected.quantization


def test_what_cannot_be_calibrated(dense: Model, folder: pathlib.Path, made: dict[str, Model]) -> None:
    windows = random_windows(dense.config.num_tokens)
    with pytest.raises(ValueError, match="qkv is packed already; quantise the original model"):
        quantize(made["int4"], "int4-awq", calibration=windows)
    with pytest.raises(ValueError, match="has no tokenizer to read calibration texts with; add its tokenizer"):
        quantize(dense, "int4-awq")
    with pytest.raises(ValueError, match=r"promote_above is 0.0; expected a share of the output, such as 0.01"):
        quantize(dense, "int4", promote_above=0.0, calibration=windows)
    with pytest.raises(ValueError, match="random ids has no tokens to calibrate with; give more text"):
        quantize(dense, "int4-awq", calibration=dataclasses.replace(windows, calibration=windows.calibration[:0]))
    with pytest.raises(ValueError, match=r"method awq needs calibration: use jaxinfer.quantize"):
        load(folder, quantize="int4-awq", progress=False)


def test_quality_is_not_measured_without_text(dense: Model) -> None:
    windows = random_windows(dense.config.num_tokens)
    report = report_of(
        quantize(dense, "int8", calibration=dataclasses.replace(windows, evaluation=np.zeros((0, 32), np.int32)))
    )
    assert report.quality is None
    assert "quality: not measured, no text was kept apart to judge by" in repr(report)


@pytest.mark.parametrize(
    ("tokens", "plan", "warned"), [(1023, "int4-gptq", True), (1024, "int4-awq", False), (1, "int4", False)]
)
def test_few_tokens_are_said(tokens: int, plan: str, warned: bool, dense: Model, caplog) -> None:
    """GPTQ fitted to 256 tokens or fewer was worse than rounding (`FEW_TOKENS`)."""
    windows = Windows(np.zeros((1, tokens), np.int32), np.zeros((0, 2), np.int32), "a note")
    CalibratedQuantizer(dense.config, resolve(plan), windows, jnp.dtype(jnp.float32))
    message = f"a note: {tokens} tokens to calibrate with; codes fitted to fewer than 1024 can be worse than rounded"
    assert (message in caplog.text) == warned
    assert bool(caplog.records) == warned


# --- Plans and reports


@pytest.mark.parametrize("plan", PRESETS.values(), ids=list(PRESETS))
def test_plans_survive_json(plan: Plan) -> None:
    assert from_mapping(plan.to_mapping(), plan.name) == plan


def test_promotion_ends_at_16_bits() -> None:
    plan, seen = uniform("two", Precision(2, 32, method="awq")), []
    for _ in range(4):
        plan = plan.promote(["layers.0.q_proj"])
        precision = plan.precision("layers.0.q_proj")
        seen.append("16 bits" if precision is None else str(precision))
    assert seen == ["int3 g32 awq", "int4 g32 awq", "int8", "16 bits"]
    assert str(plan.precision("layers.0.k_proj")) == "int2 g32 awq"
    assert plan.name == "two, promoted"


def test_a_quality_by_hand() -> None:
    """Two tokens of probability 1/2 and 1/8: perplexity 4; the original held both for sure."""
    arrays: list[Any] = [np.log([2.0, 8.0]), np.zeros(2), np.array([0.0, 1.0]), np.array([True, False])]
    quality = Quality.from_positions(*(array.astype(np.float32) if array.dtype != bool else array for array in arrays))
    assert dataclasses.astuple(quality) == pytest.approx((4.0, 1.0, 0.5, 0.99, 0.5, 2))
    report = QuantizationReport(PRESETS["int8"], "x", 8, (WeightError("layers.0.q_proj", "int8", 0.25),), quality)
    assert "layers.0.q_proj 25 % (int8)" in repr(report)
    small = dataclasses.replace(report, weights=(WeightError("layers.0.q_proj", "int8", 3.4e-5),))
    assert "layers.0.q_proj 0.0034 % (int8)" in repr(small)  # and not 0.00 %
    assert "perplexity 4 (original 1), KL mean 0.5000, 99th percentile 0.9900 nats" in repr(report)


def test_a_perplexity_that_json_cannot_hold() -> None:
    surprise = np.array([800.0, 900.0], np.float32)
    quality = Quality.from_positions(surprise, surprise / 900, np.zeros(2, np.float32), np.array([True, False]))
    assert quality.perplexity == np.inf
    assert not quality.is_finite
    with pytest.raises(ValueError, match=r"layers\.0\.o_proj: squares of its outputs are beyond float32"):
        share_of_output(np.inf, np.inf, "layers.0.o_proj.weight")


def test_rows_are_taken_a_few_at_a_time() -> None:
    windows = np.arange(20 * 1000, dtype=np.int32).reshape(20, 1000)
    batches = list(row_batches(windows))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    np.testing.assert_array_equal(np.concatenate(batches), windows)


def test_specs_of_moments() -> None:
    """Every projection of a layer has moments under its own name."""
    config = load(families.BY_NAME["llama"].folder, dtype="float32", progress=False).config
    assert {field for field, spec in layer_specs(config, 0).items() if spec.is_linear} == set(FIELDS)
