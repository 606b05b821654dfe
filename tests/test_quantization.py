"""Quantising: the codes that RTN and HQQ choose, plans, and models quantised from arrays and from files."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_checkpoints

from checkpoints.safetensors import SafetensorsFolder
from jaxinfer.generation import logits
from jaxinfer.layers.weights import StackedOutputs
from jaxinfer.model import Model, load
from jaxinfer.quantization.api import quantize
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.checks import check_tensors
from jaxinfer.quantization.hqq import half_quadratic
from jaxinfer.quantization.plan import PRESETS, Plan, Precision, Rule, from_mapping, resolve, uniform
from jaxinfer.quantization.rtn import CLIP_RATIOS, ERROR_EXPONENT, round_to_nearest
from pallas_kernels.int4_matmul import Packed, PackedInt4, dequantize, unpack_codes

WEIGHTS = {
    "normal": np.random.default_rng(0).normal(0, 0.05, (256, 512)).astype(np.float32),
    "outliers": (np.random.default_rng(1).standard_t(3, (256, 512)) * 0.03).astype(np.float32),
}


def error(weight: np.ndarray, packed: Packed) -> np.ndarray:
    return np.asarray(dequantize(packed)) - weight


# --- Round to nearest


def test_rtn_by_hand() -> None:
    """-1 to 14 in steps of 1: scale 1, zero 1, every weight a code, nothing to clip."""
    weight = jnp.arange(-1.0, 15.0, dtype=jnp.float32)[None, :]
    packed = round_to_nearest(weight, bits=4, group_size=16, symmetric=False)
    np.testing.assert_array_equal(unpack_codes(packed), np.arange(16, dtype=np.uint8)[None, :])
    np.testing.assert_array_equal(packed.scales, np.ones((1, 1), np.float16))
    np.testing.assert_array_equal(packed.offsets, np.ones((1, 1), np.uint8))
    symmetric = round_to_nearest(jnp.arange(-7.0, 9.0)[None, :] / 2, bits=4, group_size=16, symmetric=True)
    assert symmetric.kind == "symmetric"
    assert symmetric.scales.dtype == jnp.float16


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rtn_takes_the_ratio_of_least_error(bits: int, symmetric: bool) -> None:
    """Group by group and ratio by ratio in NumPy."""
    weight = WEIGHTS["outliers"][:3, :64]
    packed = round_to_nearest(jnp.asarray(weight), bits=bits, group_size=32, symmetric=symmetric)
    actual = (abs(error(weight, packed).reshape(3, 2, 32)) ** ERROR_EXPONENT).sum(-1)
    largest = 2**bits - 1
    for row, group in itertools.product(range(3), range(2)):
        w = weight[row, 32 * group : 32 * group + 32].astype(np.float64)
        errors = []
        for ratio in CLIP_RATIOS:
            low, high = (-abs(w).max(), abs(w).max()) if symmetric else (min(w.min(), 0), max(w.max(), 0))
            span = high * largest / (2 ** (bits - 1) - 1) if symmetric else high - low
            scale = float(np.float16(span * ratio / largest))
            zero = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low * ratio / scale), 0, largest)
            codes = np.clip(np.round(w / scale) + zero, 0, largest)
            errors.append((abs(scale * (codes - zero) - w) ** ERROR_EXPONENT).sum())
        np.testing.assert_allclose(actual[row, group], min(errors), rtol=2e-3)


def test_clipping_helps() -> None:
    for weight in WEIGHTS.values():
        for bits, most in ((4, 0.97), (3, 0.9), (2, 0.75)):
            clipped = round_to_nearest(jnp.asarray(weight), bits=bits, group_size=64, symmetric=False)
            grouped = weight.reshape(256, -1, 64)
            low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
            scale = ((high - low) / (2**bits - 1))[..., None]
            zero = np.round(-low[..., None] / scale)
            plain = scale * (np.clip(np.round(grouped / scale) + zero, 0, 2**bits - 1) - zero) - grouped
            assert (error(weight, clipped) ** 2).mean() < most * (plain**2).mean()


@pytest.mark.parametrize(("in_features", "group_size"), [(72, 64), (48, 64)])
def test_last_groups_may_be_shorter(in_features: int, group_size: int) -> None:
    weight = WEIGHTS["normal"][:70, :in_features]
    for packed in (
        round_to_nearest(jnp.asarray(weight), bits=4, group_size=group_size, symmetric=False),
        half_quadratic(jnp.asarray(weight), bits=4, group_size=group_size),
    ):
        assert packed.shape == weight.shape
        assert packed.scales.shape == (70, -(-in_features // group_size))
        assert abs(error(weight, packed)).mean() < 0.006
        last = in_features // group_size * group_size
        assert abs(error(weight, packed)[:, last:]).mean() < 0.006


@pytest.mark.parametrize("value", [0.0, 3.25, -3.25, 1e-9])
def test_constant_weights(value: float) -> None:
    weight = np.full((2, 64), value, np.float32)
    for packed in (
        round_to_nearest(jnp.asarray(weight), bits=4, group_size=64, symmetric=False),
        round_to_nearest(jnp.asarray(weight), bits=4, group_size=64, symmetric=True),
        half_quadratic(jnp.asarray(weight), bits=4, group_size=64),
    ):
        np.testing.assert_allclose(dequantize(packed), weight, rtol=1e-3, atol=1e-8)


# --- HQQ


LIBRARY_ERRORS = {
    ("normal", 4): (1.858e-05, 3.659e-03),
    ("normal", 3): (8.602e-05, 7.871e-03),
    ("normal", 2): (4.688e-04, 1.838e-02),
}
"""Mean squared and mean absolute error of the authors' library (hqq 0.2.8, optimize=True, axis 1, groups of 64) on the
same weights."""


@pytest.mark.parametrize(("name", "bits"), LIBRARY_ERRORS)
def test_hqq_is_no_worse_than_its_authors(name: str, bits: int) -> None:
    weight = WEIGHTS[name]
    packed = half_quadratic(jnp.asarray(weight), bits=bits, group_size=64)
    squared, absolute = LIBRARY_ERRORS[name, bits]
    assert (error(weight, packed) ** 2).mean() < squared
    assert abs(error(weight, packed)).mean() < absolute
    assert packed.kind == "minimum"
    assert int(jnp.max(unpack_codes(packed))) == 2**bits - 1


def test_quantising_is_deterministic() -> None:
    weight = jnp.asarray(WEIGHTS["outliers"])
    for _ in range(2):
        first, second = (half_quadratic(weight, bits=4, group_size=64) for _ in range(2))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(a, b)


# --- Plans


def test_the_first_rule_that_names_a_weight_decides(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        [[rules]]
        weights = ["layers.0.*", "*.down_proj"]
        bits = 16
        [[rules]]
        weights = "*.o_proj"
        bits = 3
        group_size = 128
        method = "hqq"
        [[rules]]
        weights = "*"
        symmetric = true
        """
    )
    plan = resolve(path)
    assert plan.precision("layers.0.q_proj") is None
    assert plan.precision("layers.1.down_proj") is None
    assert plan.precision("layers.1.o_proj") == Precision(3, 128, False, "hqq")
    assert plan.precision("layers.1.q_proj") == Precision(4, 64, True, "rtn")
    assert resolve("int4") is PRESETS["int4"]
    six = from_mapping({"rules": [{"weights": "*", "bits": 6}]}, "six")
    assert six.rules[0].precision == Precision(8) and six.to_mapping()["rules"][0]["bits"] == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"p: expected \[\[rules\]\] and nothing else"),
        ({"rules": [], "rule": 1}, r"p: expected \[\[rules\]\] and nothing else, found \['rule'\]"),
        ({"rules": [{"bits": 4}]}, "p: rule 1 has weights None; expected a pattern or a list of patterns"),
        ({"rules": [{"weights": "*", "bit": 4}]}, r"p: rule 1 has \['bit'\]; expected weights, bits, group_size"),
        ({"rules": [{"weights": "*", "bits": 5}]}, "p: rule 1: bits is 5; expected 2, 3, 4, 6, 8, 16"),
        ({"rules": [{"weights": "*", "group_size": 40}]}, "p: rule 1: group_size is 40; expected a multiple of 16"),
        ({"rules": [{"weights": "*", "method": "exl2"}]}, "p: rule 1: method is 'exl2'; expected rtn or hqq or awq"),
        ({"rules": [{"weights": "*", "symmetric": 1}]}, "p: rule 1: symmetric is 1; expected true or false"),
        ({"rules": [{"weights": "*", "symmetric": True, "method": "hqq"}]}, "hqq chooses a zero; symmetric must be"),
    ],
)
def test_plans_that_are_wrong(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_mapping(content, "p")


def test_names_of_plans_that_are_wrong(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"quantize='int5': expected int4, int4-g128.*, or the path of a .toml"):
        resolve("int5")
    with pytest.raises(ValueError, match=r"--plan 'int5': expected int4"):
        resolve("int5", "--plan ")
    with pytest.raises(FileNotFoundError, match=r"none.toml"):
        resolve(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rules = [")
    with pytest.raises(ValueError, match=r"bad.toml is not TOML"):
        resolve(tmp_path / "bad.toml")


# --- Models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return quantized_checkpoints.make("awq gemm", tmp_path_factory.mktemp("model")).dense


def load_dense(folder: pathlib.Path, **options: Any) -> Model:
    return load(folder, dtype="float32", progress=False, **options)


def test_from_a_path_and_from_a_model_alike(folder: pathlib.Path) -> None:
    dense = load_dense(folder)
    from_model = quantize(dense, "int4")
    from_path = quantize(folder, "int4", dtype="float32", progress=False)
    loaded = load_dense(folder, quantize="int4")
    for a, b, c in zip(*(jax.tree.leaves(m.params) for m in (from_model, from_path, loaded)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    layer = from_model.params.layers[0]
    assert all(isinstance(weight, PackedInt4) for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert from_model.params.embed_tokens is dense.params.embed_tokens
    assert isinstance(dense.params.layers[0].qkv, jax.Array)
    fields = ("qkv", "o", "gate_up", "down")
    decoded = dataclasses.replace(layer, **{field: dequantize(getattr(layer, field)) for field in fields})
    expected = dataclasses.replace(dense, params=dataclasses.replace(dense.params, layers=[decoded]))
    tokens = np.arange(12, dtype=np.int32)[None, :]
    np.testing.assert_allclose(logits(from_model, tokens), logits(expected, tokens), rtol=1e-4, atol=1e-4)


def test_a_plan_that_splits_a_fused_weight(folder: pathlib.Path) -> None:
    """v left alone, k in HQQ, q by RTN: three parts, each as if quantised alone."""
    plan = Plan(
        (
            Rule(("*.v_proj", "*.down_proj"), Precision(16)),
            Rule(("*.k_proj",), Precision(4, 32, method="hqq")),
            Rule(("*",), Precision(4, 32)),
        )
    )
    dense = load_dense(folder)
    layer, original = quantize(dense, plan).params.layers[0], dense.params.layers[0]
    assert isinstance(layer.qkv, StackedOutputs)
    q, k, v = layer.qkv.parts
    assert (q.kind, k.kind, q.shape, k.shape) == ("zero_point", "minimum", (64, 64), (32, 64))
    np.testing.assert_array_equal(v, original.qkv[96:])
    alone = round_to_nearest(original.qkv[:64], bits=4, group_size=32, symmetric=False)
    np.testing.assert_array_equal(q.codes, alone.codes)
    assert layer.down is original.down


def test_what_cannot_be_quantised(folder: pathlib.Path) -> None:
    model = quantize(load_dense(folder), "int4")
    with pytest.raises(
        ValueError, match=r"layers\.0\.qkv is packed already; quantise the original model, or load it with packed=False"
    ):
        quantize(model, "int4")
    typo = uniform("typo", Precision())
    typo = Plan((Rule(("*.q_porj",), Precision()), *typo.rules), "typo")
    with pytest.raises(ValueError, match=r"typo: no weight is named \*\.q_porj; names are like layers\.0\.q_proj and"):
        quantize(folder, typo, progress=False)
    with pytest.raises(ValueError, match="dtype is for a path"):
        quantize(load_dense(folder), "int4", dtype="float32")
    with pytest.raises(ValueError, match="packed keeps the codes of the checkpoint, quantize makes new ones"):
        load(folder, quantize="int4", packed=True)
    with pytest.raises(ValueError, match="3-bit rtn codes: random ones have 4 bits with zero points by rtn, or 8 bits"):
        load(folder, quantize="int3", random_weights=0)


INT4, INT8, GROUPED, BY_HALVES = Precision(), Precision(8), Precision(8, 64), Precision(method="hqq")


@pytest.mark.parametrize(
    ("value", "precision", "message"),
    [
        (np.nan, INT4, "layers.3.k_proj holds NaN or infinity: the checkpoint is damaged"),
        (np.nan, INT8, "layers.3.k_proj holds NaN or infinity: the checkpoint is damaged"),
        (-np.inf, INT4, "layers.3.k_proj holds NaN or infinity: the checkpoint is damaged"),
        (np.nan, None, None),
        (1e6, INT4, "layers.3.k_proj: its largest number, 1e.06, is too large for the float16 scales of int4 g64 rtn"),
        (1e5, INT4, None),
        (1e5, BY_HALVES, "too large for the float16 scales of int4 g64 hqq"),
        (1e-8, INT4, "too small for the float16 scales of int4 g64 rtn; give layers.3.k_proj 8 bits without groups"),
        (1e-5, GROUPED, "too small for the float16 scales of int8 g64"),
        (1e-5, Precision(3), None),
        (1e-8, INT8, None),
        (1e6, INT8, None),
        (0.0, INT4, None),
    ],
)
def test_numbers_that_codes_cannot_stand_for(value: float, precision: Precision | None, message: str | None) -> None:
    """One of a tensor's numbers, its neighbours' rows being fine; a small one is the tensor's largest."""
    weight = np.full((6, 64), 0.1, np.float32)
    weight[2:4] = 0.0 if np.isfinite(value) else 0.1
    weight[3, 5] = value
    names = [f"layers.3.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_tensors(jnp.asarray(weight), names, (2, 2, 2), [INT4, precision, INT4])


def test_a_damaged_weight_is_refused_and_leaves_no_store(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Which made a finite model of it; one that the plan leaves alone is kept."""
    with contextlib.closing(SafetensorsFolder(folder)) as checkpoint:
        tensors = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    damaged, out = tmp_path / "damaged", tmp_path / "store"
    quantized_checkpoints.write(damaged, tensors, quantized_checkpoints.CONFIG)
    message = r"layers\.0\.up_proj holds NaN or infinity: the checkpoint is damaged; get it anew, or keep "
    windows = Windows(np.full((2, 16), 7, np.int32), np.full((1, 16), 7, np.int32), "sevens")
    for calibration in (None, windows):
        with pytest.raises(ValueError, match=message):
            quantize(damaged, "int8", out=out, calibration=calibration, progress=False)
        assert list(tmp_path.iterdir()) == [damaged]
    model = load_dense(damaged)
    with pytest.raises(ValueError, match=message):
        quantize(model, "int8")
    kept = Plan((Rule(("*.gate_proj", "*.up_proj"), Precision(16)), Rule(("*",), Precision(8))))
    assert quantize(model, kept).params.layers[0].gate_up is model.params.layers[0].gate_up
    with pytest.raises(ValueError, match="sevens: layer 0 of the model holds or gives NaN or infinity, so nothing can"):
        quantize(model, kept, calibration=windows)


def test_a_quantised_checkpoint_can_be_quantised_anew(tmp_path: pathlib.Path, caplog) -> None:
    """Which costs quality twice, and is said: of what the plan quantises, whoever reads it."""
    case = quantized_checkpoints.make("fp8 channel", tmp_path)
    again = load_dense(case.quantized, quantize="int4").params
    said = "weights to be quantised are codes already (FP8), which are decoded and rounded again"
    assert f"7 of 7 {said}" in caplog.text
    caplog.clear()
    expected = load_dense(case.dense, quantize="int4").params
    windows = Windows(np.full((2, 16), 7, np.int32), np.full((1, 16), 7, np.int32), "sevens")
    quantize(case.dense, "int4", calibration=windows, progress=False)
    load_dense(case.quantized, quantize=uniform("as it is", Precision(16)))
    assert not caplog.records
    quantize(case.quantized, "int4", calibration=windows, out=tmp_path / "store", progress=False)
    assert f"7 of 7 {said}" in caplog.text
    assert "quality is not measured" not in caplog.text
    caplog.clear()
    quantize(tmp_path / "store", Plan((Rule(("*.o_proj",), Precision()),)), dtype="float32", progress=False)
    assert "1 of 1 weights to be quantised are codes already (int4, groups of 64)" in caplog.text
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    (tmp_path / "plan.toml").write_text(f"[[rules]]\nweights = {json.dumps('*')}\nbits = 2\n")
    two = load_dense(case.quantized, quantize=tmp_path / "plan.toml").params.layers[0]
    assert int(jnp.max(unpack_codes(two.down))) == 3
