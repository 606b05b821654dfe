"""Safetensors folders: every dtype bit for bit against the format's own library; shards, indexes, JSON."""

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints import safetensors_file
from checkpoints.errors import CheckpointError
from checkpoints.safetensors import INDEX_FILE, SafetensorsFolder, read_json
from checkpoints.safetensors_file import DTYPES

FLOATS = ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"]


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of every kind of bit pattern, NaNs and infinities with payloads included."""
    bits = rng.integers(0, 2 if dtype == "BOOL" else 256, (*shape, DTYPES[dtype].itemsize), dtype=np.uint8)
    return bits.reshape(-1).view(DTYPES[dtype]).reshape(shape)


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


# --- Reading what the format's library wrote


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 3, 4), (1024, 1031)])
def test_every_dtype_is_read_bit_for_bit(tmp_path, rng, dtype, shape):
    """Trap I3: through both ways to read, BF16 and arrays of more than 1 MB included."""
    array = random_bits(rng, dtype, shape)
    save(tmp_path / "model.safetensors", {"w": array})
    folder = SafetensorsFolder(tmp_path)
    info = folder.tensors["w"]
    assert (info.shape, info.dtype, info.nbytes) == (shape, dtype, array.nbytes)
    read = folder.read("w")
    assert (read.dtype, read.shape) == (DTYPES[dtype], shape)
    assert bits(read) == bits(array)
    into = np.zeros(shape, DTYPES[dtype])
    folder.read_into("w", into)
    assert bits(into) == bits(array)


def test_a_file_of_mixed_dtypes(tmp_path, rng):
    arrays = {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "brain": rng.standard_normal((700, 800)).astype(ml_dtypes.bfloat16),
        "single": rng.standard_normal((7,)).astype(np.float32),
        "byte": rng.integers(0, 256, (3,), dtype=np.uint8),
        "long": rng.integers(-9, 9, (2, 2), dtype=np.int64),
    }
    assert arrays["brain"].nbytes > 2**20
    save(tmp_path / "model.safetensors", arrays)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == set(arrays)
    for name, array in arrays.items():
        read = folder.read(name)
        assert read.dtype == array.dtype
        assert bits(read) == bits(array)
        assert read.flags.writeable
        assert read.flags.owndata


@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 5), slice(None, 4), slice(4, None), slice(3, 3), slice(0, 6)])
def test_rows_are_those_of_the_whole_tensor(tmp_path, rng, rows):
    array = random_bits(rng, "BF16", (6, 5, 3))
    other = random_bits(rng, "F32", (11,))
    save(tmp_path / "model.safetensors", {"a": other, "w": array, "z": other})
    folder = SafetensorsFolder(tmp_path)
    assert bits(folder.read("w", rows)) == bits(array[rows])
    out = np.empty(array[rows].shape, np.float32)
    folder.read_into("w", out, rows)
    np.testing.assert_array_equal(out, array[rows].astype(np.float32))


@pytest.mark.parametrize("rows", [slice(0, 7), slice(-2, 6), slice(4, 3), slice(0, 6, 2), slice(7, 8)])
def test_rows_that_are_not_there_are_refused_not_clamped(tmp_path, rng, rows):
    save(tmp_path / "model.safetensors", {"w": random_bits(rng, "F32", (6, 2))})
    with pytest.raises(ValueError, match=r"w has shape \(6, 2\), which has no rows"):
        SafetensorsFolder(tmp_path).read("w", rows)


def test_a_scalar_has_no_rows(tmp_path):
    save(tmp_path / "model.safetensors", {"w": np.ones((), np.float32)})
    with pytest.raises(ValueError, match="has no rows 0:1"):
        SafetensorsFolder(tmp_path).read("w", slice(0, 1))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_read_into_converts_in_chunks(tmp_path, rng, monkeypatch, source, target):
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 24)  # 3 to 24 elements: chunks end inside rows
    array = rng.uniform(-200, 200, (7, 11)).astype(DTYPES[source])
    save(tmp_path / "model.safetensors", {"w": array})
    out = np.zeros((7, 11), target)
    SafetensorsFolder(tmp_path).read_into("w", out)
    np.testing.assert_array_equal(out, array.astype(target))


def test_bfloat16_becomes_float32_by_appending_zero_bits(tmp_path, rng):
    array = random_bits(rng, "BF16", (64, 64))
    array = np.where(np.isnan(array), ml_dtypes.bfloat16(1), array)  # a NaN may lose its payload
    save(tmp_path / "model.safetensors", {"w": array})
    out = np.zeros((64, 64), np.float32)
    SafetensorsFolder(tmp_path).read_into("w", out)
    np.testing.assert_array_equal(out.view(np.uint32), array.view(np.uint16).astype(np.uint32) << 16)


def test_reading_into_part_of_a_larger_array(tmp_path, rng):
    array = random_bits(rng, "F32", (6, 4))
    save(tmp_path / "model.safetensors", {"w": array})
    fused = np.zeros((10, 4), np.float32)
    SafetensorsFolder(tmp_path).read_into("w", fused[3:9])
    assert bits(fused[3:9]) == bits(array)
    assert not fused[:3].any()
    assert not fused[9:].any()


def test_float16_overflow_is_an_error_and_infinity_is_not(tmp_path):
    weights = np.array([1, 65504, np.inf, -np.inf, np.nan], np.float32)
    save(tmp_path / "model.safetensors", {"ok": weights, "big": np.array([1, 7e4], np.float32)})
    folder = SafetensorsFolder(tmp_path)
    out = np.zeros(5, np.float16)
    folder.read_into("ok", out)
    np.testing.assert_array_equal(out, np.array([1, 65504, np.inf, -np.inf, np.nan], np.float16))
    with pytest.raises(CheckpointError, match="'big' has values beyond float16's 65504; use bfloat16"):
        folder.read_into("big", np.zeros(2, np.float16))


def test_read_into_refuses_arrays_that_do_not_fit(tmp_path, rng):
    tensors = {"w": random_bits(rng, "F32", (6, 4)), "i": random_bits(rng, "I32", (2,))}
    save(tmp_path / "model.safetensors", tensors)
    folder = SafetensorsFolder(tmp_path)
    with pytest.raises(ValueError, match=r"have shape \(6, 4\), the array to read into \(4, 6\)"):
        folder.read_into("w", np.zeros((4, 6), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        folder.read_into("w", np.zeros((4, 6), np.float32).T)
    with pytest.raises(ValueError, match="i is int32 in the file and cannot be read into an array of float32"):
        folder.read_into("i", np.zeros(2, np.float32))


def test_peak_memory_is_the_tensor_and_nothing_else(tmp_path):
    array = np.zeros((40, 2**20), ml_dtypes.bfloat16)  # 80 MiB
    save(tmp_path / "model.safetensors", {"w": array})
    folder = SafetensorsFolder(tmp_path)
    out = np.empty(array.shape, np.float32)
    with traced() as peak:
        folder.read_into("w", out)
    assert peak() < 17 * 2**20
    with traced() as peak:
        folder.read("w")
    assert peak() < 81 * 2**20
    with traced() as peak:
        folder.read("w", slice(3, 5))
    assert peak() < 5 * 2**20


@contextlib.contextmanager
def traced():
    """Yields a function that returns the most bytes allocated at one time (NumPy's included)."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- Folders


def shard(folder: Path, name: str, *tensors: str) -> None:
    save(folder / name, {tensor: np.full(3, len(tensor), np.float32) for tensor in tensors})


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_sharded_folder(tmp_path):
    shard(tmp_path, A, "one", "three")
    shard(tmp_path, B, "four")
    shard(tmp_path, "mtp.safetensors", "extra")
    shard(tmp_path, "model.safetensors", "old")
    shard(tmp_path, "consolidated.00.safetensors", "one", "other")
    (tmp_path / "original").mkdir()
    write_index(tmp_path, {"one": A, "three": A, "four": B})
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == {"one", "three", "four"}
    assert folder.ignored == (
        "consolidated.00.safetensors",
        "model.safetensors",
        "mtp.safetensors",
        "original/",
    )
    for name in folder.tensors:
        np.testing.assert_array_equal(folder.read(name), np.full(3, len(name), np.float32))
    folder.close()


def test_missing_shards_are_named(tmp_path):
    shard(tmp_path, A, "one")
    write_index(tmp_path, {"one": A, "two": B, "three": "model-x.safetensors"})
    with pytest.raises(CheckpointError, match=f"lacks 2 of the 3 shards.*: {B}, model-x.safetensors; download"):
        SafetensorsFolder(tmp_path)


def test_index_and_shards_that_disagree(tmp_path):
    shard(tmp_path, A, "one", "surplus")
    shard(tmp_path, B, "moved")
    write_index(tmp_path, {"one": A, "lacking": A, "moved": A, "also": B})
    with pytest.raises(CheckpointError) as error:
        SafetensorsFolder(tmp_path)
    message = str(error.value)
    assert f"3 tensors that it names are not in their shard: 'lacking' ({A}), 'moved' ({A}), 'also' ({B})" in message
    assert f"1 tensors of its shards are not in it: 'surplus' ({A})" in message
    (tmp_path / INDEX_FILE).unlink()  # the remedy that the message gives
    assert set(SafetensorsFolder(tmp_path).tensors) == {"one", "surplus", "moved"}


def test_a_tensor_in_two_shards(tmp_path):
    shard(tmp_path, A, "one", "both")
    shard(tmp_path, B, "both")
    message = rf"1 tensors twice: 'both' \({A}, {B}\); it mixes two checkpoints"
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)
    write_index(tmp_path, {"one": A, "both": B})
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


def test_several_files_without_index(tmp_path):
    shard(tmp_path, "a.safetensors", "one")
    shard(tmp_path, "b.safetensors", "two")
    shard(tmp_path, "consolidated.safetensors", "one")
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == {"one", "two"}
    assert folder.ignored == ("consolidated.safetensors",)
    shard(tmp_path, "model.safetensors", "whole")
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == {"whole"}
    assert folder.ignored == ("a.safetensors", "b.safetensors", "consolidated.safetensors")


def test_numbered_shards_without_index_must_be_complete(tmp_path):
    shard(tmp_path, "model-00002-of-00002.safetensors", "two")
    with pytest.raises(CheckpointError, match=r"1 of the 2 shards model-\*-of-00002.safetensors and no model"):
        SafetensorsFolder(tmp_path)
    shard(tmp_path, "model-00001-of-00002.safetensors", "one")
    assert set(SafetensorsFolder(tmp_path).tensors) == {"one", "two"}


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/etc/w.safetensors", "a\\w.safetensors", "w.bin", 3, ".safetensors\n"]
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, file):
    write_index(tmp_path, {"one": file})
    with pytest.raises(CheckpointError, match=r"maps 'one' to .*, not to a file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [1], "x"])
def test_an_index_without_a_map(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["pytorch_model.bin"],
            r"only pickled weights \(pytorch_model.bin\).*never loaded; save the model as",
        ),
        (["consolidated.00.pth"], "only pickled weights"),
        (["m.gguf", "pytorch_model.bin"], "GGUF files; give the file itself: .*m.gguf"),
        (["consolidated.safetensors"], r"only consolidated\*.safetensors"),
        (["config.json"], "has no .safetensors file"),
    ],
)
def test_folders_without_weights(tmp_path, files, message):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


def test_not_a_folder_and_no_such_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        SafetensorsFolder(tmp_path / "nothing")
    shard(tmp_path, "model.safetensors", "one")
    with pytest.raises(CheckpointError, match="has no tensor 'two'"):
        SafetensorsFolder(tmp_path).read("two")


# --- JSON files


def test_read_json(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos": [1, 2], "x": Infinity, "é": null}', "utf-8")
    assert read_json(tmp_path, "config.json") == {
        "model_type": "llama",
        "eos": [1, 2],
        "x": np.inf,
        "é": None,
    }
    assert read_json(tmp_path, "generation_config.json", optional=True) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "holds a JSON list, not an object"),
    ],
)
def test_read_json_refuses(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path, "config.json", optional=True)


def test_read_json_of_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config.json; download the whole model folder"):
        read_json(tmp_path, "config.json")
    with pytest.raises(CheckpointError, match=r"is not a folder; expected a model folder that holds config"):
        read_json(tmp_path / "nothing", "config.json", optional=True)
