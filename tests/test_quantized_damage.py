"""Quantised folders with parts and settings changed at random: read, or refused with CheckpointError; nothing else."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantized_checkpoints

from checkpoints.errors import CheckpointError
from checkpoints.quantized import QuantizedFolder, open_folder

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 8, 16, 31, 32, 48, 64, 128, 2**31, 2**63, 10**30, -(2**40), 0.5, 1e400,
    "", "4", "gemm", "gptq", "re:(", "*", [], [0, 0], [1, 2], [-1, 128], [2**40, 2**40], ["a", 1, None], {}, {"a": {}},
)  # fmt: skip
DTYPES = (
    np.int32, np.int64, np.uint8, np.int8, np.float16, np.float32, np.float64, np.bool_, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu,
)  # fmt: skip
CHANGES = 40


def damaged_tensor(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Other bytes, another shape or another dtype."""
    match rng.integers(5):
        case 0:
            return np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
        case 1:
            shape = [max(0, n + int(rng.integers(-2, 3))) for n in array.shape]
            return np.zeros(shape, array.dtype)
        case 2:
            shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 4)))
            return np.zeros(shape, array.dtype)
        case 3:
            return np.zeros(array.shape, DTYPES[rng.integers(len(DTYPES))])
    return array.T.copy()


def damaged_settings(rng: np.random.Generator, settings: dict[str, Any]) -> dict[str, Any]:
    """One value changed, at any depth."""
    settings = json.loads(json.dumps(settings))
    place = settings
    while True:
        key = list(place)[rng.integers(len(place))]
        if isinstance(place[key], dict) and place[key] and rng.integers(3):
            place = place[key]
            continue
        place[key] = VALUES[rng.integers(len(VALUES))]
        return settings


def read_all(folder: pathlib.Path) -> None:
    opened = open_folder(folder)
    for name in opened.tensors:
        if isinstance(opened, QuantizedFolder) and opened.code_bits(name) is not None:
            with np.errstate(all="ignore"):
                opened.read(name)
            tensor = opened.quantized(name)
            assert tensor is not None
            codes = tensor.rows(0, min(3, tensor.shape[0]))
            assert codes.codes.max() < 2**codes.bits
            assert codes.scales.shape[1] == -(-tensor.shape[1] // codes.group_size)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
@pytest.mark.parametrize("name", quantized_checkpoints.FORMATS)
def test_damage_is_an_error_that_says_so(name: str, tmp_path: pathlib.Path) -> None:
    case = quantized_checkpoints.make(name, tmp_path)
    module = "model.layers.0.self_attn.k_proj."
    tensors = {key: array for key, array in case.tensors.items() if key.startswith(module)}
    rng = np.random.default_rng(len(name))
    messages = []
    for i in range(CHANGES):
        changed, config = dict(tensors), dict(case.config)
        if i % 3:
            key = list(tensors)[rng.integers(len(tensors))]
            changed[key] = damaged_tensor(rng, tensors[key])
        else:
            config["quantization_config"] = damaged_settings(rng, config["quantization_config"])
        folder = case.rewrite(changed, config)
        try:
            read_all(folder)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > CHANGES // 10
    assert all("\n" not in message and len(message) < 1000 for message in messages)
