"""Weights of 8 bits, int8 and float8_e4m3fn with a scale an output: codes, plans, heads, models and benchmarks."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import families
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_packed_weights import CONFIG

from benchmarks import decode
from jaxinfer.generation import generate, logits
from jaxinfer.layers.linear import linear
from jaxinfer.layers.weights import ScaledCodes, StackedOutputs
from jaxinfer.model import Model, load
from jaxinfer.params import least_bytes
from jaxinfer.quantization.api import quantize
from jaxinfer.quantization.plan import PRESETS, Plan, Precision, Rule, from_mapping
from jaxinfer.quantization.scaled import scale_outputs
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8, dequantize

CASES = {case.name: case for case in families.CASES}
HEAD = Plan((Rule(("lm_head",), Precision(8)),), "head")
METHODS = {"int8": "int8", "fp8": "float8_e4m3fn"}

ROUNDING = {"int8": 2.6 / 127 / 12**0.5, "fp8": 0.125 / 12**0.5 / (7 / 3) ** 0.5}
"""Root mean square of the error, relative to that of the weights, if these are normal.

int8: uniform within half a step either way, the step being 1/127 of an output's largest weight, which is about 2.6
standard deviations with 64 inputs. float8: the same of steps of 1/8 of the power of two below the weight, whose
mantissa, uniform from 1 to 2, has a mean square of 7/3."""


def values(weight: Any) -> np.ndarray:
    """A weight in float64."""
    if isinstance(weight, StackedOutputs):
        return np.concatenate([values(part) for part in weight.parts])
    if isinstance(weight, ScaledCodes):
        codes = np.asarray(weight.codes.astype(jnp.float32)).astype(np.float64)
        return codes * np.asarray(weight.scales, np.float64)[:, None]
    return np.asarray(weight, np.float64)


def steps(weight: ScaledCodes) -> np.ndarray:
    """Distances of neighbouring codes where each weight is."""
    scales = np.asarray(weight.scales, np.float64)[:, None]
    if weight.codes.dtype == jnp.int8:
        return np.broadcast_to(scales, weight.shape)
    exponent = np.floor(np.log2(np.maximum(abs(values(weight)) / scales, 2.0**-6) * (1 + 1e-9)))
    return scales * 2.0 ** (exponent - 3)


def dense_weight(weight: Any) -> jax.Array:
    assert isinstance(weight, jax.Array)
    return weight


def load_case(name: str, **options: Any) -> Model:
    return load(CASES[name].folder, dtype="float32", progress=False, **options)


def relative(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# --- Codes


def test_codes_by_hand() -> None:
    """Halves go to the even neighbour. 448 and 1.9375 are float8's largest and a number between 1.875 and 2."""
    weight = jnp.array([[127.0, -127.0, 0.5, 1.5, -2.5, 126.4], [0.0] * 6], jnp.float32)
    packed = scale_outputs(weight, dtype="int8")
    np.testing.assert_array_equal(packed.codes, np.array([[127, -127, 0, 2, -2, 126], [0] * 6], np.int8))
    np.testing.assert_array_equal(packed.scales, np.ones(2, np.float32))
    packed = scale_outputs(jnp.array([[-448.0, 1.9375, 1.0625, 2.0**-9, 2.0**-10]]), dtype="float8_e4m3fn")
    expected = np.array([[-448, 2, 1, 2.0**-9, 0]], np.float32)
    np.testing.assert_array_equal(packed.codes.astype(jnp.float32), expected)
    np.testing.assert_array_equal(packed.scales, np.ones(1, np.float32))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_codes_are_as_near_as_documented(method: str, size: float, rng: np.random.Generator) -> None:
    weight = (rng.standard_t(3, (64, 96)) * size).astype(np.float32)
    packed = scale_outputs(jnp.asarray(weight), dtype=METHODS[method])
    scales, error = np.asarray(packed.scales)[:, None], abs(values(packed) - weight)
    least = scales / 2 if method == "int8" else np.maximum(abs(weight) / 16, scales * 2.0**-10)
    assert (error <= least * (1 + 1e-5)).all()
    largest = abs(values(packed)).max(1)
    np.testing.assert_allclose(largest, abs(weight).max(1), rtol=1e-6)


def test_codes_are_those_of_ml_dtypes(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((64, 96)).astype(np.float32)
    packed = scale_outputs(jnp.asarray(weight), dtype="float8_e4m3fn")
    expected = np.clip(weight / np.asarray(packed.scales)[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(packed.codes).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("method", METHODS)
def test_products_are_those_of_the_values(method: str, rng: np.random.Generator) -> None:
    """Against float64, and as far from the original as theory has it."""
    weight = rng.normal(0, 0.05, (512, 64)).astype(np.float32)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    packed = scale_outputs(jnp.asarray(weight), dtype=METHODS[method])
    product = linear(jnp.asarray(x), packed)
    assert relative(product, x.astype(np.float64) @ values(packed).T) < 1e-6
    assert relative(product, x.astype(np.float64) @ weight.T.astype(np.float64)) == pytest.approx(
        ROUNDING[method], rel=0.15
    )


# --- Plans


def test_only_a_rule_that_says_lm_head_names_the_head() -> None:
    assert Plan((Rule(("*", "lm_*", "lm_hea?"), Precision()),)).precision("lm_head") is None
    plan = from_mapping({"rules": [{"weights": ["lm_head", "*.o_proj"], "bits": 8}, {"weights": "*"}]}, "p")
    assert plan.precision("lm_head") == plan.precision("layers.1.o_proj") == Precision(8)
    assert plan.precision("layers.1.q_proj") == Precision(4, 64)
    names = ["q_proj", "k_proj", "o_proj", "x.o_proj", "lm_head"]
    assert plan.runs(names) == [(Precision(4), slice(0, 3)), (Precision(8), slice(3, 5))]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"bits": 8, "symmetric": False}, "8 bits with one scale an output have no zero points: give a group_size"),
        ({"bits": 8, "group_size": 100}, "group_size is 100; expected a multiple of 16, such as 64 or 128"),
        ({"bits": 8, "group_size": 64, "method": "fp8"}, "fp8 has no groups and no zero points: leave group_size"),
        ({"bits": 16, "group_size": 64}, "16 bits have no groups and no zero points: leave group_size"),
        ({"bits": 8, "method": "hqq"}, "method is 'hqq'; expected rtn or fp8 or gptq with 8 bits"),
        ({"bits": 4, "method": "fp8"}, "method is 'fp8'; expected rtn or hqq or awq or gptq with 4 bits"),
        ({"bits": 16, "method": "fp8"}, "method is 'fp8'; expected rtn with 16 bits"),
    ],
)
def test_rules_of_8_bits_that_are_wrong(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_mapping({"rules": [{"weights": "*", **rule}]}, "p")


def test_what_is_left_out_makes_no_other_precision() -> None:
    assert Precision() == Precision(4, 64, False, "rtn")
    assert Precision(8) == Precision(8, symmetric=True)
    assert Precision(8) != Precision(8, method="fp8")
    assert Precision(8, 64) == Precision(6, 64, True) != Precision(8, 64, False)
    assert [str(Precision(8, size, zero)) for size, zero in ((None, None), (64, None), (64, False))] == [
        *("int8", "int8 g64", "int8 g64 zero points"),
    ]
    assert str(Precision(8, 64, method="gptq")) == "int8 g64 gptq"


def test_the_mixed_plan_of_the_seed() -> None:
    params = load_case("llama", quantize="seed-mixed").params
    for layer in params.layers:
        assert isinstance(layer.qkv, PackedInt4)
        assert isinstance(layer.gate_up, PackedInt4)
        for weight in (layer.o, layer.down):
            assert isinstance(weight, ScaledCodes)
            assert weight.codes.dtype == jnp.int8
    assert isinstance(params.lm_head, jax.Array)


# --- Models


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_models_are_near_the_original(name: str, method: str) -> None:
    """As near as with noise in place of rounding, and within the errors of four products a layer, all added up."""
    original, model = load_case(name), load_case(name, quantize=method)
    layer = model.params.layers[0]
    for field in ("qkv", "o", "gate_up", "down"):
        weight = getattr(layer, field)
        assert isinstance(weight, ScaledCodes)
        assert weight.codes.dtype == METHODS[method]
        assert weight.scales.dtype == jnp.float32
    tokens = CASES[name].tokens[:1]
    error = relative(logits(model, tokens), logits(original, tokens))
    assert error < ROUNDING[method] * 4 * len(model.params.layers)
    rng = np.random.default_rng(0)
    layers = []
    for layer, dense in zip(model.params.layers, original.params.layers, strict=True):
        fields = {field: getattr(layer, field) for field in ("qkv", "o", "gate_up", "down")}
        noise = {field: rng.uniform(-0.5, 0.5, weight.shape) * steps(weight) for field, weight in fields.items()}
        noisy = {field: getattr(dense, field) + noise[field].astype(np.float32) for field in fields}
        layers.append(dataclasses.replace(dense, **noisy))
    noisy = dataclasses.replace(original, params=dataclasses.replace(original.params, layers=layers))
    assert 0.5 < error / relative(logits(noisy, tokens), logits(original, tokens)) < 2
    again = quantize(original, method)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_int8_in_groups() -> None:
    """Nearer the original than one scale for 32 inputs: 16 normal ones have a largest that is 0.86 times as large."""
    plan = Plan((Rule(("*.o_proj", "*.down_proj"), Precision(8, 16)), Rule(("*",), Precision(8, 16, symmetric=False))))
    original, model = load_case("llama"), load_case("llama", quantize=plan)
    for layer, dense in zip(model.params.layers, original.params.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight, values_before = getattr(layer, field), dense_weight(getattr(dense, field))
            assert isinstance(weight, PackedInt8) and weight.group_size == 16
            assert weight.kind == ("symmetric" if field in ("o", "down") else "zero_point")
            whole = values(scale_outputs(values_before, dtype="int8"))
            assert relative(dequantize(weight), values_before) < 0.95 * relative(whole, values_before)
    tokens = CASES["llama"].tokens[:1]
    assert relative(logits(model, tokens), logits(original, tokens)) < ROUNDING["int8"] * 4 * len(model.params.layers)


def test_codes_of_one_dtype_are_joined_and_others_stacked() -> None:
    """q and k in int8, v in float8, gate left alone, up in int8."""
    fp8 = Rule(("*.v_proj",), Precision(8, method="fp8"))
    plan = Plan((fp8, Rule(("*.gate_proj",), Precision(16)), Rule(("*.?_proj", "*.up_proj"), Precision(8))))
    original, model = load_case("llama"), load_case("llama", quantize=plan)
    qkv, gate_up = model.params.layers[1].qkv, model.params.layers[1].gate_up
    dense = original.params.layers[1]
    assert isinstance(qkv, StackedOutputs)
    assert [part.codes.dtype for part in qkv.parts] == [jnp.int8, jnp.float8_e4m3fn]
    assert relative(values(qkv), dense.qkv) < ROUNDING["fp8"]
    assert isinstance(gate_up, StackedOutputs)
    np.testing.assert_array_equal(gate_up.parts[0], dense_weight(dense.gate_up)[: gate_up.shape[0] // 2])
    assert relative(values(gate_up), dense.gate_up) < ROUNDING["int8"]
    x = np.random.default_rng(0).standard_normal((3, dense.qkv.shape[1])).astype(np.float32)
    for weight in (qkv, gate_up):
        assert relative(linear(jnp.asarray(x), weight), x @ values(weight).T) < 1e-6


# --- Heads


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_head_of_its_own(name: str, bits: int) -> None:
    """Untied and tied; the embedding stays as it is, and logits are those of the head's values."""
    plan = Plan((Rule(("lm_head",), Precision(bits)),), "head")
    original, model = load_case(name), load_case(name, quantize=plan)
    dense = original.params.embed_tokens if original.params.lm_head is None else dense_weight(original.params.lm_head)
    assert isinstance(model.params.lm_head, ScaledCodes if bits == 8 else PackedInt4)
    np.testing.assert_array_equal(model.params.embed_tokens, original.params.embed_tokens)
    tokens = CASES[name].tokens[:1]
    actual, expected = logits(model, tokens), logits(original, tokens)
    assert actual.dtype == jnp.float32
    assert 0 < relative(actual, expected) < (0.01 if bits == 8 else 0.15)
    from_model = quantize(original, plan)
    assert from_model.params.embed_tokens is original.params.embed_tokens
    assert from_model.params.layers[0].qkv is original.params.layers[0].qkv
    for a, b in zip(jax.tree.leaves(from_model.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(a, b)
    if bits == 8:
        assert relative(values(model.params.lm_head), dense) < ROUNDING["int8"]
        extra = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params.lm_head))
        assert extra == dense.size + 4 * len(dense)


def test_padded_ids_of_a_head_are_not_sampled() -> None:
    """qwen2's fixture has 112 rows for 96 tokens; the padding's logits would win."""
    original = load_case("qwen2")
    config = dataclasses.replace(original.config, num_tokens=CASES["qwen2"].num_tokens)
    original = dataclasses.replace(original, config=config)
    assert config.num_tokens < len(original.params.embed_tokens)
    prompt = CASES["qwen2"].prompt.tolist()
    model = quantize(original, HEAD)
    assert isinstance(model.params.lm_head, ScaledCodes)
    scales = jnp.asarray(model.params.lm_head.scales)
    loud = ScaledCodes(model.params.lm_head.codes, scales.at[config.num_tokens :].mul(1e4))
    model = dataclasses.replace(model, params=dataclasses.replace(model.params, lm_head=loud))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens = generate(model, [prompt], params)[0].token_ids
    assert max(tokens) < config.num_tokens
    assert list(tokens) == CASES["qwen2"].continuation[:12].tolist()


def test_the_head_of_a_packed_model_can_be_quantised(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    packed = load(tmp_path, random_weights=0, quantize="int4", dtype="float32")
    model = quantize(packed, HEAD)
    assert isinstance(model.params.lm_head, ScaledCodes)
    assert model.params.layers[0].down is packed.params.layers[0].down
    with pytest.raises(ValueError, match="lm_head is packed already; quantise the original model"):
        quantize(model, HEAD)


# --- Random weights and benchmarks


@pytest.mark.parametrize(
    ("preset", "tied", "num_eight"),
    [("int8", True, 4), ("fp8", False, 4), ("seed-mixed", False, 2), ("int4-int8-head", True, 1)],
)
def test_random_weights_of_plans(preset: str, tied: bool, num_eight: int, tmp_path: pathlib.Path) -> None:
    config = CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, random_weights=0, quantize=preset, dtype="bfloat16")
    eight = [
        leaf
        for leaf in jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, ScaledCodes))
        if isinstance(leaf, ScaledCodes)
    ]
    assert len(eight) == num_eight
    for weight in eight:
        assert np.isfinite(values(weight)).all()
        assert 0.015 < values(weight).std() < 0.027
    scales = sum(4 * len(weight.scales) for weight in eight)
    scales += sum(
        leaf.scales.nbytes + leaf.offsets.nbytes
        for leaf in jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, PackedInt4))
        if isinstance(leaf, PackedInt4)
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert isinstance(model.params.lm_head, ScaledCodes) == (preset == "int4-int8-head")
    assert total == scales + least_bytes(model.config, jnp.bfloat16, plan=PRESETS[preset])


def test_random_weights_of_int8_in_groups(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    plan = Plan((Rule(("*.down_proj",), Precision(8, 32)), Rule(("*.o_proj",), Precision(8, 32, symmetric=False))))
    layer = load(tmp_path, random_weights=0, quantize=plan, dtype="bfloat16").params.layers[0]
    for weight, kind in ((layer.down, "symmetric"), (layer.o, "zero_point")):
        assert isinstance(weight, PackedInt8) and (weight.group_size, weight.kind) == (32, kind)
        assert 0.018 < np.asarray(dequantize(weight)).std() < 0.024


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"int4": False, "quantize": None, "head": None, "dtype": None} | given))


def test_the_benchmark_names_and_counts_what_it_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SHAPES", tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    sizes = {}
    for given, name in (
        ({"head": "fp8"}, "bfloat16, fp8 head"),
        ({"int4": True}, "int4"),
        ({"int4": True, "head": "int8"}, "int4, int8 head"),
    ):
        weights = decode.weights_of("tiny", options(dtype="bfloat16", **given))
        assert weights.name == name
        sizes[name] = decode.bytes_per_step(decode.load("tiny", weights, None), 1, 0.0)
    assert decode.weights_of("tiny", options(dtype="bfloat16")).name == "bfloat16"
    assert decode.weights_of("tiny", options(quantize="seed-mixed")).name == "seed-mixed"
    assert sizes["int4"] - sizes["int4, int8 head"] == 64 * 128 - 4 * 64
    linear_weights = 256 * 128 + 128 * 128 + 2 * 256 * 128 + 128 * 256
    norms = 3 * 128 * 4
    assert sizes["bfloat16, fp8 head"] == 2 * linear_weights + norms + 64 * 128 + 4 * 64
    with pytest.raises(ValueError, match="--head and --quantize are for the shapes"):
        decode.weights_of("model.gguf", options(head="int8"))
