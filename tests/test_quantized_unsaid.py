"""Quantised folders that do not say all that their codes need: refused, for a guess would load as another model."""

import json
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import packing
import pytest
import quantized_checkpoints as checkpoints_of
from quantized_checkpoints import AWQ, FORMATS, GPTQ, INT4, compressed

from checkpoints.errors import CheckpointError
from checkpoints.formats.parts import check_group
from checkpoints.quantized import open_folder
from checkpoints.safetensors import SafetensorsFolder

UP = "model.layers.0.mlp.up_proj."
INT8 = {"num_bits": 8, "type": "int"}
PER_OUTPUT = compressed("int-quantized", **INT8, strategy="channel", symmetric=False)
GROUPED_INT8 = compressed("int-quantized", **INT8, strategy="group", group_size=32, actorder="group")


def write(name: str, folder: pathlib.Path, announced: dict[str, Any] | None, without: str | None) -> pathlib.Path:
    """The up projection of a format's checkpoint in a folder of its own, with another configuration, less a part."""
    case = checkpoints_of.make(name, folder)
    tensors = {key: array for key, array in case.tensors.items() if key.startswith(UP) and key != f"{UP}{without}"}
    return case.rewrite(tensors, {} if announced is None else {"quantization_config": announced})


MISSING: dict[str, tuple[str, dict[str, Any] | None, str | None, str]] = {
    "act-order": ("gptq act-order", GPTQ | {"desc_act": True}, "g_idx", "no g_idx, .* desc_act is true"),
    "zeros, 4 bits": (
        "packed int4 asymmetric", compressed("pack-quantized", **INT4, symmetric=False), "weight_zero_point",
        "no weight_zero_point, .* symmetric is false",
    ),
    "zeros, 8 bits": (
        "packed int8 asymmetric", compressed("pack-quantized", **INT4 | {"num_bits": 8}, symmetric=False),
        "weight_zero_point", "no weight_zero_point, .* symmetric is false",
    ),
    "zeros, int8": ("int8", PER_OUTPUT, None, "no weight_zero_point, .* symmetric is false"),
    "order": (
        "packed int4 order", compressed("pack-quantized", **INT4, actorder="group"), "weight_g_idx",
        "no weight_g_idx, .* actorder is by group",
    ),
    "float8 blocks": ("fp8 blocks", FORMATS["fp8 blocks"][1], "weight_scale_inv", "is F8_E4M3 and has no weight_scale"),
    "float8 channel": ("fp8 channel", FORMATS["fp8 channel"][1], "weight_scale", "is F8_E4M3 and has no weight_scale"),
    "float8 excepted": (
        "fp8 blocks", {"quant_method": "fp8", "ignored_layers": ["up_proj"]}, "weight_scale_inv", "is F8_E4M3 and has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_a_part_that_the_configuration_calls_for_is_named(case: str, tmp_path: pathlib.Path) -> None:
    name, announced, without, message = MISSING[case]
    pattern = rf"^{re.escape(UP)}weight: .*{message}.*; files are incomplete: download all of them again"
    with pytest.raises(CheckpointError, match=pattern):
        open_folder(write(name, tmp_path, announced, without))


def test_integers_of_eight_bits_in_groups_by_activation_are_not_supported(tmp_path: pathlib.Path) -> None:
    folder = write("int8", tmp_path, GROUPED_INT8, None)
    weight = np.zeros((128, 64), np.int8)
    checkpoints_of.save(
        folder / "model.safetensors", {UP + "weight": weight, UP + "weight_scale": np.ones((128, 2), np.float32)}
    )
    with pytest.raises(CheckpointError, match="int-quantized with actorder by group is not supported; use"):
        open_folder(folder)


def test_groups_of_8_bit_floats_are_not_supported(tmp_path: pathlib.Path) -> None:
    settings = compressed("float-quantized", num_bits=8, type="float", strategy="group", group_size=32)
    folder = write("fp8 channel", tmp_path, settings, None)
    open_folder(folder)  # one scale an output is one, whatever it is called
    weight, scale = np.zeros((128, 64), ml_dtypes.float8_e4m3fn), np.ones((128, 2), np.float32)
    checkpoints_of.save(folder / "model.safetensors", {UP + "weight": weight, UP + "weight_scale": scale})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: FP8 with a scale for every 32 .* is not supported; "):
        open_folder(folder)


@pytest.mark.parametrize(
    ("name", "announced"),
    [
        ("gptq", GPTQ | {"desc_act": True, "static_groups": True}),
        ("packed int4", compressed("pack-quantized", **INT4, symmetric=True, actorder="weight")),
        ("packed int4 channel", compressed("pack-quantized", num_bits=4, strategy="channel", actorder="group")),
    ],
)
def test_orders_that_leave_groups_side_by_side_need_no_index(
    name: str, announced: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Static groups, the order of compressed-tensors' weights, and one group for all inputs."""
    folder = open_folder(write(name, tmp_path, announced, "g_idx"))
    values = checkpoints_of.make(name, tmp_path / "whole").values[UP + "weight"]
    np.testing.assert_array_equal(folder.read(UP + "weight"), values)


# --- Group sizes, where the last group is shorter


RAGGED, OUT = 80, 8
"""Inputs that three groups of 32 hold, as would three of 27 to 39."""


def ragged(kind: str, folder: pathlib.Path, announced: dict[str, Any] | None) -> tuple[pathlib.Path, np.ndarray]:
    """A weight [8, 80] in groups of 32, alone in a folder, and its values."""
    codes, zeros, scales = packing.random_weight(np.random.default_rng(0), OUT, RAGGED, 32, 4)
    groups = np.arange(RAGGED) // 32
    match kind:
        case "awq":
            parts = packing.awq_gemm(codes, zeros, scales)
        case "gptq":
            parts = packing.gptq(codes, zeros, scales, 4, 1)
        case "gptq order":
            groups = np.random.default_rng(1).permutation(groups)
            parts = packing.gptq(codes, zeros, scales, 4, 1, groups)
        case _:
            zeros[...] = 8
            shape = np.array(codes.shape)
            parts = {"weight_packed": packing.pack_rows(codes, 4), "weight_scale": scales, "weight_shape": shape}
    config = {} if announced is None else {"quantization_config": announced}
    checkpoints_of.write(folder, {UP + part: array for part, array in parts.items()}, config)
    return folder, packing.values(codes, zeros, scales, groups)


NO_GROUP = {"group_size": None}
SAID: dict[str, tuple[str, dict[str, Any] | None]] = {
    "awq": ("awq", AWQ),
    "gptq, other modules excepted": ("gptq", GPTQ | {"dynamic": {"-:lm_head": {}}}),
    "gptq, by pattern": (
        "gptq", GPTQ | {"group_size": 128, "dynamic": {"+:.*up_proj": {"group_size": 32}, "+:.*": {"group_size": 16}}},
    ),
    "gptq, by its index": ("gptq order", GPTQ | NO_GROUP),
    "compressed-tensors without a strategy": ("packed", compressed("pack-quantized", num_bits=4, group_size=32)),
}  # fmt: skip
UNSAID: dict[str, tuple[str, dict[str, Any] | None]] = {
    "awq, no configuration": ("awq", None),
    "awq": ("awq", {"quant_method": "awq", "bits": 4}),
    "gptq, excepted": ("gptq", GPTQ | {"dynamic": {"-:.*up_proj": {}}}),
    "compressed-tensors": ("packed", compressed("pack-quantized", num_bits=4)),
}


@pytest.mark.parametrize("case", SAID)
def test_the_size_of_ragged_groups_is_what_the_folder_says(case: str, tmp_path: pathlib.Path) -> None:
    kind, announced = SAID[case]
    folder, values = ragged(kind, tmp_path, announced)
    np.testing.assert_array_equal(open_folder(folder).read(UP + "weight"), values)


@pytest.mark.parametrize("case", UNSAID)
def test_ragged_groups_of_a_size_that_nothing_says_are_refused(case: str, tmp_path: pathlib.Path) -> None:
    kind, announced = UNSAID[case]
    folder, _ = ragged(kind, tmp_path, announced)
    message = r"up_proj\.weight: 3 groups of scales for 80 inputs, and nothing says how many .*; add the group_size"
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_a_group_size_is_read_off_where_only_one_is_usual() -> None:
    """1984 inputs in 16 groups: of 124, or of 128 and a last one of 64."""
    assert check_group(2048, 16, None, "w") == 128
    assert check_group(96, 2, None, "w", indexed=True) == 48
    assert check_group(576, 1, None, "w") == 576
    for inputs, groups in ((1984, 16), (192, 2), (576, 5)):
        with pytest.raises(CheckpointError, match="nothing says"):
            check_group(inputs, groups, None, "w")


# --- The version of GPTQ's zeros, and the files and keys that tell it


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (GPTQ | {"format": "gptq_v2"}, {}),
        (GPTQ, GPTQ | {"checkpoint_format": "gptq_v2"}),
        (GPTQ | {"checkpoint_format": None}, {"format": "gptq_v2"}),
        (None, {"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, GPTQ | {"checkpoint_format": "gptq", "format": "gptq"}),
    ],
)
def test_the_second_version_of_gptq_is_known_wherever_it_is_said(
    config: dict[str, Any] | None, own: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    folder = write("gptq v2", tmp_path, config, None)
    (folder / "quantize_config.json").write_text(json.dumps(own))
    values = checkpoints_of.make("gptq v2", tmp_path / "whole").values[UP + "weight"]
    np.testing.assert_array_equal(open_folder(folder).read(UP + "weight"), values)


def test_two_versions_of_gptq_at_once_are_refused(tmp_path: pathlib.Path) -> None:
    folder = write("gptq v2", tmp_path, GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, None)
    with pytest.raises(CheckpointError, match="format 'gptq_v2' and checkpoint_format 'gptq'; remove the one that is"):
        open_folder(folder)


def test_another_tools_quantize_config_is_none_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    folder = checkpoints_of.make("gptq", tmp_path).dense
    (folder / "quantize_config.json").write_text(json.dumps({"per_channel": True, "reduce_range": True}))
    assert isinstance(open_folder(folder), SafetensorsFolder)
