"""Folders with quantised weights end to end: every format, decoded and packed; exceptions; files that are wrong."""

import json
import logging
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_checkpoints as checkpoints_of
from quantized_checkpoints import FORMATS

from checkpoints.errors import CheckpointError
from checkpoints.quantized import QuantizedFolder, open_folder
from checkpoints.quantized_config import Announcement, find_announcement
from jaxinfer.decoder import Params
from jaxinfer.generation import logits
from jaxinfer.layers.linear import linear
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.model import load
from jaxinfer.quantization.moments import values_of
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8

TOKENS = np.arange(12, dtype=np.int32).reshape(1, 12) * 5 % checkpoints_of.VOCAB
FIELDS = ("qkv", "o", "gate_up", "down")


def load_params(folder: pathlib.Path, **options: Any) -> Params:
    return load(folder, dtype="float32", progress=False, **options).params


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_weights_are_those_of_the_dense_model(name: str, tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make(name, tmp_path)
    actual, expected = load_params(case.quantized), load_params(case.dense)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_those_of_the_dense_model(name: str, tmp_path: pathlib.Path, caplog) -> None:
    case = checkpoints_of.make(name, tmp_path)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        actual, expected = load_params(case.quantized, packed=True), load_params(case.dense)
    assert not caplog.records
    for field in FIELDS:
        weight, dense = getattr(actual.layers[0], field), np.asarray(getattr(expected.layers[0], field))
        assert not isinstance(weight, jax.Array)
        assert weight.shape == dense.shape
        product = linear(jnp.eye(dense.shape[1], dtype=jnp.float32), weight)
        np.testing.assert_allclose(product, dense.T, rtol=2e-6, atol=1e-6)


def test_groups_too_small_to_save_anything_are_decoded(tmp_path: pathlib.Path, caplog) -> None:
    """And said to be."""
    encode = checkpoints_of.fp8("weight_scale_inv", lambda o, i: (o // 8, i // 8), (8, 8))
    case = checkpoints_of.make("fp8 blocks", tmp_path)
    tensors, values = {k: v for k, v in case.tensors.items() if "_proj" not in k}, {}
    for module, (out, inputs) in checkpoints_of.LINEAR.items():
        parts, values[module] = encode(np.random.default_rng(0), out, inputs)
        tensors |= {f"model.layers.0.{module}.{part}": array for part, array in parts.items()}
    announced = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    folder = case.rewrite(tensors, case.config | {"quantization_config": announced})
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        layer = load_params(folder, packed=True).layers[0]
    np.testing.assert_array_equal(layer.down, values["mlp.down_proj"])
    (line,) = [record.getMessage() for record in caplog.records]
    expected = r"7 weights are decoded to float32, \S+ kB in place of \S+ kB, although packed=True: groups of 8 inputs"
    assert re.search(expected, line)


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 whole blocks", "fp8 e5m2 powers of two"])
def test_blocks_of_8_bit_floats_stay_as_they_are(name: str, tmp_path: pathlib.Path) -> None:
    """Codes and scales bit for bit; q, k and v are one weight where each begins with a block."""
    case = checkpoints_of.make(name, tmp_path)
    layer, dense = load_params(case.quantized, packed=True).layers[0], load_params(case.dense).layers[0]
    for field in FIELDS:
        np.testing.assert_array_equal(values_of(getattr(layer, field)), getattr(dense, field))
    down = "model.layers.0.mlp.down_proj."
    codes = case.tensors[down + "weight"]
    (scale,) = (array for part, array in case.tensors.items() if part.startswith(down + "weight_scale"))
    assert isinstance(layer.down, BlockCodes)
    assert layer.down.codes.dtype == codes.dtype
    np.testing.assert_array_equal(np.asarray(layer.down.codes).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(layer.down.scales, scale.astype(np.float32))
    blocks = {"fp8 blocks": (48, 48), "fp8 whole blocks": (32, 16), "fp8 e5m2 powers of two": (32, 32)}
    assert layer.down.block == blocks[name]
    if name == "fp8 blocks":  # q has 64 rows, a block and a third: k's blocks begin anew
        assert isinstance(layer.qkv, StackedOutputs)
        assert [part.shape[0] for part in layer.qkv.parts] == [64, 32, 32]
    else:
        assert isinstance(layer.qkv, BlockCodes)
        assert layer.qkv.scales.shape[0] == 128 // 32


def test_rows_of_blocks_that_are_cut_have_scales_of_their_own(tmp_path: pathlib.Path) -> None:
    """phi3's fused tensors: v begins within a block of 48 rows of qkv_proj."""
    encode = checkpoints_of.fp8("weight_scale_inv", lambda o, i: (-(-o // 48), -(-i // 48)), (48, 48))
    announced = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    folders = fused_checkpoints(tmp_path, encode, announced)
    layer, dense = load_params(folders[0], packed=True).layers[0], load_params(folders[1]).layers[0]
    for field in FIELDS:
        np.testing.assert_array_equal(values_of(getattr(layer, field)), getattr(dense, field))
    assert isinstance(layer.qkv, StackedOutputs)
    assert [part.block for part in layer.qkv.parts] == [(48, 48), (1, 48), (48, 48)]


EXPECTED_KINDS = {
    "awq gemm": (PackedInt4, PackedInt4),
    "gptq act-order": (PermutedInputs, PermutedInputs),
    "gptq own order": (StackedOutputs, PermutedInputs),
    "nf4": (PackedInt4, PackedInt4),
    "gptq 8 bits": (PackedInt8, PackedInt8),
    "fp8 channel": (ScaledCodes, ScaledCodes),
    "fp8 whole blocks": (BlockCodes, BlockCodes),
    "fp8 blocks": (StackedOutputs, BlockCodes),
}


@pytest.mark.parametrize("name", EXPECTED_KINDS)
def test_logits_are_those_of_the_dense_model(name: str, tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make(name, tmp_path)
    model = load(case.quantized, dtype="float32", packed=True, progress=False)
    assert isinstance(model.params.layers[0].qkv, EXPECTED_KINDS[name][0])
    assert isinstance(model.params.layers[0].down, EXPECTED_KINDS[name][1])
    expected = logits(load(case.dense, dtype="float32", progress=False), TOKENS)
    np.testing.assert_allclose(logits(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_formats_are_recognised_without_a_configuration(tmp_path: pathlib.Path) -> None:
    """Where shapes and dtypes say all: everything but AWQ's gemv and the size of FP8's blocks."""
    for name in FORMATS:
        if name in ("awq gemv", "gptq v2", "fp8 blocks", "fp8 whole blocks", "fp8 e5m2 powers of two"):
            continue
        case = checkpoints_of.make(name, tmp_path / name)
        config = {key: value for key, value in case.config.items() if key != "quantization_config"}
        folder = case.rewrite(case.tensors, config)
        for a, b in zip(jax.tree.leaves(load_params(folder)), jax.tree.leaves(load_params(case.dense)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_fused_weight_of_different_kinds_is_stacked(tmp_path: pathlib.Path) -> None:
    """q and k packed, v in float32, gate of 4 and up of 8 bits, as mixed checkpoints have them."""
    case, eight = checkpoints_of.make("gptq", tmp_path / "4"), checkpoints_of.make("gptq 8 bits", tmp_path / "8")
    v, up = "model.layers.0.self_attn.v_proj.", "model.layers.0.mlp.up_proj."
    tensors = {name: array for name, array in case.tensors.items() if not name.startswith((v, up))}
    tensors |= {name: array for name, array in eight.tensors.items() if name.startswith(up)}
    tensors[v + "weight"] = case.values[v + "weight"]
    dense = case.values | {up + "weight": eight.values[up + "weight"]}
    config = case.config | {"quantization_config": checkpoints_of.GPTQ | {"dynamic": {"-:.*v_proj": {}}}}
    model = load(case.rewrite(tensors, config), dtype="float32", packed=True, progress=False)
    layer = model.params.layers[0]
    assert isinstance(layer.qkv, StackedOutputs)
    assert isinstance(layer.gate_up, StackedOutputs)
    assert [type(part) for part in layer.qkv.parts] == [PackedInt4, type(jnp.zeros(1))]
    assert layer.qkv.parts[0].shape == (96, 64)
    assert [type(part) for part in layer.gate_up.parts] == [PackedInt4, PackedInt8]
    checkpoints_of.write(case.dense, dense, checkpoints_of.CONFIG)
    expected = logits(load(case.dense, dtype="float32", progress=False), TOKENS)
    np.testing.assert_allclose(logits(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_the_default_packs_what_a_kernel_reads(tmp_path: pathlib.Path, monkeypatch) -> None:
    """On a Hopper GPU and in bfloat16 codes of 4 bits, code books and 8-bit codes in groups; on this CPU nothing."""
    case = checkpoints_of.make("awq gemm", tmp_path / "a")
    book, int8 = checkpoints_of.make("nf4", tmp_path / "b"), checkpoints_of.make("gptq 8 bits", tmp_path / "d")
    blocks = checkpoints_of.make("fp8 whole blocks", tmp_path / "e")
    assert isinstance(load_params(case.quantized).layers[0].down, jax.Array)
    monkeypatch.setattr("pallas_kernels.dispatch.hopper_refusal", lambda: None)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("pallas_kernels.int4_matmul.triton_matmul.refusal", lambda *_: "not installed")
    monkeypatch.setattr("jaxinfer.checkpoint_weights.free_device_bytes", lambda: None)
    expected = (
        (case, None, PackedInt4),
        (book, None, PackedInt4),
        (int8, None, PackedInt8),
        (blocks, None, BlockCodes),
    )
    for checkpoint, packed, kind in expected:
        layer = load(checkpoint.quantized, dtype="bfloat16", packed=packed, progress=False).params.layers[0]
        for field in FIELDS:
            weight = getattr(layer, field)
            assert isinstance(weight, kind)
            assert isinstance(weight, BlockCodes) or weight.layout == "mosaic"
    eight = checkpoints_of.make("fp8 channel", tmp_path / "c")
    assert isinstance(load(eight.quantized, dtype="bfloat16", progress=False).params.layers[0].down, ScaledCodes)
    layer = load(case.quantized, dtype="bfloat16", packed=False, progress=False).params.layers[0]
    assert isinstance(layer.o, jax.Array)
    layer = load(case.quantized, dtype="float32", progress=False).params.layers[0]
    assert isinstance(layer.o, jax.Array)


@pytest.mark.parametrize(("name", "dtype"), [("int8", jnp.int8), ("fp8 tensor", jnp.float8_e4m3fn)])
def test_eight_bits_with_one_scale_an_output_stay_as_they_are(name: str, dtype: type, tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make(name, tmp_path)
    layer = load_params(case.quantized, packed=True).layers[0]
    prefix = "model.layers.0.self_attn."
    stored = np.concatenate([case.tensors[f"{prefix}{part}_proj.weight"] for part in "qkv"])
    assert isinstance(layer.qkv, ScaledCodes)
    assert layer.qkv.codes.dtype == dtype
    np.testing.assert_array_equal(np.asarray(layer.qkv.codes).view(np.uint8), stored.view(np.uint8))
    scale = case.tensors[f"{prefix}v_proj.weight_scale"].astype(np.float32)
    np.testing.assert_array_equal(layer.qkv.scales[96:], np.broadcast_to(scale.reshape(-1), 32))


def fused_checkpoints(
    folder: pathlib.Path, encode: checkpoints_of.Encode, announced: dict[str, Any]
) -> tuple[pathlib.Path, pathlib.Path]:
    """A phi3, which has qkv_proj and gate_up_proj, quantised and dense."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.qkv_proj": (128, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_up_proj": (256, 64),
        "mlp.down_proj": (64, 128),
    }
    base = checkpoints_of.make("awq gemm", folder / "base")
    plain = {name: array for name, array in base.values.items() if "_proj" not in name}
    parts, values = dict(plain), dict(plain)
    for module, (out, inputs) in shapes.items():
        encoded, dense = encode(rng, out, inputs)
        parts |= {f"model.layers.0.{module}.{part}": array for part, array in encoded.items()}
        values[f"model.layers.0.{module}.weight"] = dense
    config = checkpoints_of.CONFIG | {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    checkpoints_of.write(folder / "q", parts, config | {"quantization_config": announced})
    checkpoints_of.write(folder / "d", values, config)
    return folder / "q", folder / "d"


def test_fused_tensors_are_cut_by_rows(tmp_path: pathlib.Path) -> None:
    """phi3's qkv_proj and gate_up_proj, in a format that packs along the outputs."""
    quantized, plain = fused_checkpoints(tmp_path, checkpoints_of.awq_gemm, checkpoints_of.AWQ)
    expected = load_params(plain).layers[0]
    for packed in (False, True):
        layer = load_params(quantized, packed=packed).layers[0]
        for field in FIELDS:
            weight, dense = getattr(layer, field), np.asarray(getattr(expected, field))
            assert isinstance(weight, PackedInt4) == packed
            np.testing.assert_allclose(
                linear(jnp.eye(dense.shape[1], dtype=jnp.float32), weight), dense.T, rtol=2e-6, atol=1e-6
            )


# --- Exceptions, and where configuration and tensors disagree


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", False),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("model.language_model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("model.layers.0.mlp.down_proj", "language_model.model.layers.0.mlp.down_proj", True),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj", True),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:model\\.layers\\.0\\..*", "model.language_model.layers.0.self_attn.q_proj", True),
        ("re:.*lm_head", "model.layers.0.self_attn.q_proj", False),
        ("re:(", "model.layers.0.self_attn.q_proj", False),
        ("model.layers.*.mlp.down_proj", "model.layers.7.mlp.down_proj", True),
        ("*.o_proj", "model.layers.7.mlp.down_proj", False),
        ("", "model.layers.7.mlp.down_proj", False),
    ],
)  # fmt: skip
def test_lists_of_exceptions(pattern: str, module: str, matches: bool) -> None:
    for key in ("modules_to_not_convert", "ignore", "exclude_modules"):
        assert Announcement({"quant_method": "fp8", key: [pattern]}, "config.json").ignores(module) == matches


@pytest.mark.parametrize("pattern", ["re:(.+)+\\.nope", "re:(.*)*(.*)*x", "re:.*.*.*.*.*x", "re:(a|aa){1,}b"])
def test_patterns_that_could_be_tried_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="could take for ever"):
        Announcement({"quant_method": "fp8", "ignore": [pattern]}, "config.json").ignores("model.layers.0." + "a" * 60)


def test_groups_of_compressed_tensors_are_found_by_name_then_by_class() -> None:
    settings = checkpoints_of.compressed("pack-quantized", num_bits=4, group_size=32, strategy="group")
    settings["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    announcement = Announcement(settings, "config.json")
    down, q = (
        announcement.weight("model.layers.0.mlp.down_proj"),
        announcement.weight("model.layers.0.self_attn.q_proj"),
    )
    assert (down.bits, down.group_size, q.bits, q.group_size) == (8, None, 4, 32)
    assert announcement.weight("lm_head").bits is None


def test_modules_left_out_are_read_as_they_are(tmp_path: pathlib.Path, caplog) -> None:
    """An exception that the list names is silent; one that it does not name, and one that is none, are said."""
    case = checkpoints_of.make("fp8 blocks", tmp_path)
    down = "model.layers.0.mlp.down_proj."
    tensors = {name: array for name, array in case.tensors.items() if not name.startswith(down)}
    tensors[down + "weight"] = case.values[down + "weight"]
    announced = case.config["quantization_config"]

    def warnings(exceptions: list[str]) -> list[str]:
        caplog.clear()
        config = case.config | {"quantization_config": announced | {"modules_to_not_convert": exceptions}}
        with caplog.at_level(logging.WARNING, "jaxinfer"):
            params = load_params(case.rewrite(tensors, config))
        np.testing.assert_array_equal(params.layers[0].down, case.values[down + "weight"])
        return [record.getMessage() for record in caplog.records]

    assert warnings(["lm_head", "model.language_model.layers.0.mlp.down_proj"]) == []
    (unnamed,) = warnings(["lm_head"])
    assert re.search(
        r"1 weights are not quantised, though it does not except them, such as .*down_proj.weight", unnamed
    )
    (named,) = warnings(["lm_head", "down_proj", "q_proj"])
    assert re.search(r"1 weights are quantised, though it excepts them, such as .*q_proj.weight", named)


@pytest.mark.parametrize(("name", "kind"), [("gptq", PackedInt4), ("fp8 channel", ScaledCodes)])
def test_a_quantised_head(name: str, kind: type, tmp_path: pathlib.Path) -> None:
    """Decoded, or packed as the layers' weights are."""
    case = checkpoints_of.make(name, tmp_path)
    parts, values = FORMATS[name][0](np.random.default_rng(9), checkpoints_of.VOCAB, checkpoints_of.HIDDEN)
    tensors = {name: array for name, array in case.tensors.items() if name != "lm_head.weight"}
    folder = case.rewrite(tensors | {f"lm_head.{part}": array for part, array in parts.items()})
    decoded, packed = (load(folder, dtype="float32", packed=packed, progress=False) for packed in (False, True))
    np.testing.assert_array_equal(decoded.params.lm_head, values)
    assert isinstance(packed.params.lm_head, kind)
    np.testing.assert_allclose(logits(packed, TOKENS), logits(decoded, TOKENS), rtol=1e-4, atol=1e-4)


def test_prefixes_of_a_text_model_inside_another(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("awq gemm", tmp_path, prefix="model.language_model.")
    for a, b in zip(
        jax.tree.leaves(load_params(case.quantized)), jax.tree.leaves(load_params(case.dense)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_scales_of_activations_and_of_the_cache_are_skipped(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("fp8 channel", tmp_path)
    one = np.ones(1, np.float32)
    extra = {"mlp.up_proj.input_scale": one, "self_attn.k_scale": one, "self_attn.v_scale": one}
    tensors = case.tensors | {f"model.layers.0.{name}": array for name, array in extra.items()}
    np.testing.assert_array_equal(
        load_params(case.rewrite(tensors)).layers[0].o, case.values["model.layers.0.self_attn.o_proj.weight"]
    )


def test_biases_of_zeros_that_old_gptq_files_have(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("gptq", tmp_path)
    bias = "model.layers.0.mlp.down_proj.bias"
    load_params(case.rewrite(case.tensors | {bias: np.zeros(64, np.float16)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.down_proj\.bias"):
        load_params(case.rewrite(case.tensors | {bias: np.ones(64, np.float16)}))
    # Not one for each output: nothing is read, which of a sparse file of this size would never end.
    folder = case.rewrite(case.tensors | {bias: np.zeros(0, np.float16)})
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), len(content) - 8 - length
    header[bias] = {"dtype": "F16", "shape": [2**38], "data_offsets": [data, data + 2**39]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])
        file.truncate(8 + len(encoded) + data + 2**39)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.down_proj\.bias"):
        load_params(folder)


def test_modelopt_announces_itself_in_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("nvfp4 modelopt", tmp_path)
    (case.quantized / "config.json").write_text(json.dumps(checkpoints_of.CONFIG))
    other = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (case.quantized / "hf_quant_config.json").write_text(json.dumps(other))
    assert load_params(case.quantized).layers[0].o.shape == (64, 64)
    other["quantization"]["quant_algo"] = "W4A8_AWQ"
    (case.quantized / "hf_quant_config.json").write_text(json.dumps(other))
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config.json: quantization_config 'W4A8_AWQ' is not supported; use"
    ):
        load_params(case.quantized)


# --- What is not read, and files that are wrong


REFUSED: dict[str, dict[str, Any]] = {
    "quantization_config 'torchao' is not supported": {"quant_method": "torchao"},
    "quantization_config 'quark' is not supported": {"quant_method": "quark"},
    "quantization_config None is not supported": {"bits": 4},
    "AWQ version 'gemv_fast' is not supported": {"quant_method": "awq", "version": "gemv_fast"},
    "GPTQ checkpoint_format 'marlin' is not supported": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "compressed-tensors format 'marlin-24' is not": {"quant_method": "compressed-tensors", "format": "marlin-24"},
    "compressed-tensors with sparsity format 'sparse-24-bitmask'": {
        "quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "compressed-tensors with transforms": {
        "quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}},
    },
    "bitsandbytes in 8 bits is not supported": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "has bits 'four', expected a whole number": {"quant_method": "awq", "bits": "four"},
    "has blocks of [128], expected two whole numbers": {"quant_method": "fp8", "weight_block_size": [128]},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_not_read_is_refused_by_name(message: str, nested: bool) -> None:
    announced = {"quantization_config": REFUSED[message]}
    config = {"text_config": announced} if nested else announced

    def settings() -> object:
        announcement = find_announcement(("config.json", config), ("hf_quant_config.json", {}), ("", {}))
        return announcement and announcement.weight("model.layers.0.mlp.down_proj")

    with pytest.raises(CheckpointError) as caught:
        settings()
    text = str(caught.value)
    assert text.startswith("config.json: ")
    assert message in text
    assert "; use the original checkpoint" in text or "; download the file again" in text


def test_bitsandbytes_in_8_bits_is_refused_by_its_tensors(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("int8", tmp_path)
    tensors = {name.replace("weight_scale", "SCB"): array for name, array in case.tensors.items()}
    config = {key: value for key, value in case.config.items() if key != "quantization_config"}
    with pytest.raises(
        CheckpointError, match=r"_proj\.weight: bitsandbytes in 8 bits is not supported; use the original"
    ):
        load(case.rewrite(tensors, config), progress=False)


def test_awq_whose_words_hold_other_codes_than_it_says(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("awq 8 bits", tmp_path)
    config = case.config | {"quantization_config": checkpoints_of.AWQ}
    with pytest.raises(CheckpointError, match=r"AWQ with 4 bits is not supported where a word has 4 codes; use the"):
        load_params(case.rewrite(case.tensors, config))


@pytest.mark.parametrize("name", ["awq gemm", "gptq", "packed int4", "nvfp4", "fp8 blocks", "nf4", "hqq"])
def test_a_part_that_is_missing_or_too_many_is_named(name: str, tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make(name, tmp_path)
    module = "model.layers.0.mlp.up_proj."
    required = {
        "awq gemm": "qzeros", "gptq": "scales", "packed int4": "weight_shape", "nvfp4": "weight_scale",
        "fp8 blocks": "weight", "nf4": "weight.quant_map", "hqq": "zero",
    }[name]  # fmt: skip
    tensors = {key: array for key, array in case.tensors.items() if key != module + required}
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight: has model.* but no {required}.*download all of them"):
        load_params(case.rewrite(tensors))
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.up_proj\.stray"):
        load_params(case.rewrite(case.tensors | {module + "stray": np.zeros(3, np.float32)}))


@pytest.mark.parametrize(
    ("name", "part", "array", "message"),
    [
        ("packed int4", "weight_shape", np.array([np.nan, 64.0]), r"weight_shape is F64, expected I64 or I32"),
        ("packed int4", "weight_shape", np.zeros(1 << 16, np.int64), r"weight_shape has 524288 bytes; the file is dam"),
        ("hqq", "shape", np.array([np.nan, 64.0]), r"HQQ with shape \[\], nbits 4 and axis 1 is not known"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", np.zeros(1 << 17, np.uint8), r"nf4 has 131072 bytes; the"),
    ],
)  # fmt: skip
def test_descriptions_that_describe_nothing(
    name: str, part: str, array: np.ndarray, message: str, tmp_path: pathlib.Path
) -> None:
    case = checkpoints_of.make(name, tmp_path)
    folder = case.rewrite(case.tensors | {f"model.layers.0.mlp.up_proj.{part}": array})
    with pytest.raises(CheckpointError, match=message):
        load_params(folder)


def test_shapes_of_another_model_are_refused_before_anything_is_read(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("gptq", tmp_path)
    config = case.config | {"intermediate_size": 96}
    with pytest.raises(
        CheckpointError, match=r"wrong shapes: layers\.0\.gate_proj\.weight.* is \[128, 64\], expected \[96, 64\]"
    ):
        load_params(case.rewrite(case.tensors, config))


def test_a_truncated_file_is_refused(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("gptq", tmp_path)
    path = case.quantized / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_params(case.quantized)


def test_float16_that_overflows_is_refused(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("fp8 tensor", tmp_path)
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    folder = case.rewrite(case.tensors | {scale: np.full(1, 1e6, np.float32)})
    load(folder, dtype="bfloat16", progress=False)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has values beyond float16's 65504; use bfloat16"):
        load(folder, dtype="float16", progress=False)


def test_reading_a_range_of_rows(tmp_path: pathlib.Path) -> None:
    case = checkpoints_of.make("awq gemm", tmp_path)
    folder = open_folder(case.quantized)
    assert isinstance(folder, QuantizedFolder)
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(folder.read(name, slice(5, 77)), case.values[name][5:77])
    assert folder.tensors[name].shape == (128, 64)
    for rows in (slice(5, 200), slice(0, 10, 2), slice(9, 5)):
        with pytest.raises(ValueError, match="has 128 rows, which do not contain"):
            folder.read(name, rows)
    with pytest.raises(ValueError, match="do not fit an array"):
        folder.read_into(name, np.empty((3, 3), np.float32))
    folder.close()
