"""GGUF files: what gguf-py writes is read, what is wrong is refused with the reason, and memory stays
bounded."""

import concurrent.futures
import contextlib
import os
import pathlib
import sys
import time
import tracemalloc
from typing import Any

import gguf
import gguf_files
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from gguf_files import Packed, Typed

from checkpoints.errors import CheckpointError
from checkpoints.formats import ggml
from checkpoints.gguf import GGUFFile

QUANTISED = sorted(gguf_files.SCALE_OFFSETS)

METADATA = {
    "general.architecture": "llama",
    "a.u8": Typed(0, 255),
    "a.i8": Typed(1, -128),
    "a.u16": Typed(2, 65535),
    "a.i16": Typed(3, -32768),
    "a.u32": Typed(4, 2**32 - 1),
    "a.i32": Typed(5, -(2**31)),
    "a.f32": Typed(6, 0.5),
    "a.true": True,
    "a.false": False,
    "a.text": "naïve 日本 \n\0",
    "a.empty": "",
    "a.u64": Typed(10, 2**64 - 1),
    "a.i64": Typed(11, -(2**63)),
    "a.f64": Typed(12, 0.1),
    "a.strings": ["", "Ġthe", "▁the", "<0x0A>"],
    "a.ints": Typed(5, [-1, 0, 1]),
    "a.floats": [0.5, -2.0],
    "a.bools": [True, False],
    "a.nested": [[1, 2], [3]],
    "a.none": Typed(4, []),
}


def values_of(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: item.value if isinstance(item, Typed) else item for key, item in metadata.items()}


def some_tensors(rng: np.random.Generator) -> dict[str, np.ndarray | Packed]:
    return {
        "f32": rng.normal(size=(5, 7)).astype(np.float32),
        "f16": rng.normal(size=(3, 4)).astype(np.float16),
        "bf16": rng.normal(size=(2, 6)).astype(ml_dtypes.bfloat16),
        "f64": rng.normal(size=(3,)),
        "i32": np.arange(-3, 3, dtype=np.int32),
        "vector": rng.normal(size=(9,)).astype(np.float32),
        **{name: gguf_files.packed(rng, name, 6, 256) for name in QUANTISED},
        "experts": gguf_files.packed(rng, "Q4_K", 3, 4, 512),
    }


def expected_values(tensor: np.ndarray | Packed) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    rows = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
    return ggml.dequantize(rows, tensor.dtype)


@pytest.fixture
def model(tmp_path: pathlib.Path, rng: np.random.Generator) -> tuple[pathlib.Path, dict]:
    tensors = some_tensors(rng)
    return gguf_files.write(tmp_path / "model.gguf", METADATA, tensors), tensors


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_every_value_and_tensor_is_read(
    tmp_path: pathlib.Path, rng: np.random.Generator, version: int, alignment: int
) -> None:
    tensors = some_tensors(rng)
    path = gguf_files.write(tmp_path / "model.gguf", METADATA, tensors, version=version, alignment=alignment)
    with GGUFFile(path) as file:
        expected = values_of(METADATA) | ({} if alignment == 32 else {"general.alignment": alignment})
        assert file.metadata == expected
        assert [type(v) for v in file.metadata.values()] == [type(v) for v in expected.values()]
        assert list(file.tensors) == list(tensors)
        for name, tensor in tensors.items():
            actual, wanted = file.read(name), expected_values(tensor)
            assert actual.dtype == wanted.dtype
            assert file.tensors[name].shape == actual.shape == wanted.shape
            np.testing.assert_array_equal(actual, wanted)
            assert file.tensors[name].nbytes == file.read_blocks(name).nbytes


def test_our_test_files_are_as_gguf_py_reads_them(model: tuple[pathlib.Path, dict]) -> None:
    path, _ = model
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key in METADATA.keys() - {"a.nested", "a.none"}:  # gguf-py flattens the one and has no value for the other
        assert fields[key] == values_of(METADATA)[key]
    with GGUFFile(path) as file:
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.dtype == tensor.tensor_type.name
            assert info.shape == tuple(tensor.shape.tolist()[::-1])
            np.testing.assert_array_equal(
                file.read_blocks(tensor.name).reshape(-1), tensor.data.reshape(-1).view(np.uint8)
            )


def write_with_gguf_py(path: pathlib.Path, rng: np.random.Generator, **options: Any) -> dict[str, np.ndarray]:
    writer = GGUFWriter(path, "llama", **options)
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_add_bos_token(True)
    weights = {f"blk.{i}.attn_q.weight": rng.normal(size=(4, 64)).astype(np.float32) for i in range(5)}
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_1")
    expected = {}
    for (name, weight), kind in zip(weights.items(), kinds, strict=True):
        type_ = GGMLQuantizationType[kind]
        data = gguf.quants.quantize(weight, type_)
        writer.add_tensor(name, data, raw_dtype=type_)
        expected[name] = gguf.quants.dequantize(data, type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_files_of_gguf_py(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    path = tmp_path / "model.gguf"
    expected = write_with_gguf_py(path, rng)
    with GGUFFile(path) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.rope.freq_base": 1e6,
            "tokenizer.ggml.tokens": ["a", "b", "ü"],
            "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
            "tokenizer.ggml.add_bos_token": True,
        }
        assert [info.dtype for info in file.tensors.values()] == ["F32", "F16", "BF16", "Q8_0", "Q4_1"]
        for name, values in expected.items():
            np.testing.assert_array_equal(file.read(name).astype(np.float32), values)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_files_of_gguf_py(tmp_path: pathlib.Path, rng: np.random.Generator, opened: int) -> None:
    expected = write_with_gguf_py(tmp_path / "big.gguf", rng, split_max_tensors=2)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with GGUFFile(paths[opened]) as file:
        assert file.paths == tuple(paths)
        assert file.metadata["llama.block_count"] == 2
        assert list(file.tensors) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(file.read(name).astype(np.float32), values)


def test_ranges_of_rows(model: tuple[pathlib.Path, dict]) -> None:
    path, tensors = model
    with GGUFFile(path) as file:
        for name in ("f32", "bf16", "Q4_1", "Q6_K", "experts", "vector"):
            wanted = expected_values(tensors[name])
            for rows in (slice(1, 2), slice(None, 1), slice(1, None), slice(0, 0), slice(None)):
                np.testing.assert_array_equal(file.read(name, rows), wanted[rows])
        for rows in (slice(0, 7), slice(-1, None), slice(3, 2), slice(0, 4, 2)):
            with pytest.raises(CheckpointError, match="'Q4_1' has 6 rows, which do not contain slice"):
                file.read("Q4_1", rows)


def test_rows_of_a_quantised_vector_end_at_blocks(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    tensor = gguf_files.packed(rng, "Q8_0", 96)
    with GGUFFile(gguf_files.write(tmp_path / "model.gguf", {}, {"x": tensor})) as file:
        np.testing.assert_array_equal(file.read("x", slice(32, 96)), expected_values(tensor)[32:])
        with pytest.raises(CheckpointError, match=r"cannot be cut at .* Q8_0 blocks have 32 elements"):
            file.read("x", slice(0, 16))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_read_into_converts_in_pieces(tmp_path: pathlib.Path, rng: np.random.Generator, name: str, dtype: type) -> None:
    """Larger than one piece, so that the seams are covered too."""
    if name in gguf_files.SCALE_OFFSETS:
        tensor: np.ndarray | Packed = gguf_files.packed(rng, name, 700, 512)
    else:
        kind = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[name]
        tensor = rng.normal(size=(700, 512)).astype(np.float32).astype(kind)
    wanted = expected_values(tensor)
    with GGUFFile(gguf_files.write(tmp_path / "model.gguf", {}, {"w": tensor})) as file:
        out = np.zeros((900, 512), dtype)
        file.read_into("w", out[100:800])
        np.testing.assert_array_equal(out[100:800], wanted.astype(dtype))
        assert not out[:100].any()
        assert not out[800:].any()
        file.read_into("w", out[:30], slice(520, 550))
        np.testing.assert_array_equal(out[:30], wanted[520:550].astype(dtype))


def test_read_into_refuses_what_it_cannot_fill(model: tuple[pathlib.Path, dict]) -> None:
    path, _ = model
    with GGUFFile(path) as file:
        for out in (
            np.zeros((5, 256), np.float32),
            np.zeros((6, 256), np.int32),
            np.zeros((256, 6), np.float32).T,
        ):
            with pytest.raises(ValueError, match=r"Q4_0 \(Q4_0\) reads into a C-contiguous array .*\(6, 256\), got"):
                file.read_into("Q4_0", out)
        with pytest.raises(ValueError, match="reads into a C-contiguous array of int32"):
            file.read_into("i32", np.zeros(6, np.float32))


def test_numbers_beyond_float16_are_refused(tmp_path: pathlib.Path) -> None:
    tensor = np.array([1.0, 1e6], np.float32)
    with GGUFFile(gguf_files.write(tmp_path / "model.gguf", {}, {"x": tensor})) as file:
        with pytest.raises(CheckpointError, match="'x' has numbers too big for float16; read it as bfloat16"):
            file.read_into("x", np.zeros(2, np.float16))
        out = np.zeros(2, ml_dtypes.bfloat16)
        file.read_into("x", out)
        assert out.tolist() == [1.0, 999424.0]


def test_packed_rows_outlive_the_file(model: tuple[pathlib.Path, dict]) -> None:
    path, tensors = model
    file = GGUFFile(path)
    rows = file.read_blocks("experts")
    assert rows.shape == (3, 4, 288)
    np.testing.assert_array_equal(file.read_blocks("experts", slice(1, 3)), rows[1:])
    assert file.read_blocks("experts", slice(2, 2)).shape == (0, 4, 288)
    file.close()
    file.close()
    assert rows.tobytes() == tensors["experts"].data
    with pytest.raises(CheckpointError, match="has been closed"):
        file.read("experts")
    with pytest.raises(CheckpointError, match="there is no tensor 'q' among its 19"):
        file.read("q")


def test_a_vocabulary_is_parsed_fast(tmp_path: pathlib.Path) -> None:
    tokens = [f"Ġtoken{i}" for i in range(150_000)]
    metadata = {"tokens": tokens, "scores": Typed(6, [float(i) for i in range(150_000)])}
    path = gguf_files.write(tmp_path / "model.gguf", metadata, {})
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with GGUFFile(path) as file:
            seconds.append(time.perf_counter() - start)
            assert file.metadata == values_of(metadata)
    assert min(seconds) < 0.5


def test_reading_keeps_only_the_result_in_memory(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    block = gguf_files.random_blocks(rng, "Q4_0", 1, 4096).tobytes()
    tensor = Packed("Q4_0", (16384, 4096), block * 16384)  # 38 MB packed, 134 MB as bfloat16
    with GGUFFile(gguf_files.write(tmp_path / "model.gguf", {}, {"w": tensor})) as file:
        out = np.zeros((16384, 4096), ml_dtypes.bfloat16)
        tracemalloc.start()
        before = mapped_resident_bytes()
        file.read_into("w", out)
        assert tracemalloc.get_traced_memory()[1] < 5e6
        tracemalloc.stop()
        if before is not None:
            assert (mapped_resident_bytes() or 0) - before < 4e6


def mapped_resident_bytes() -> int | None:
    """Bytes of mapped files that are resident in this process; None where the system does not say."""
    status = pathlib.Path("/proc/self/status")
    if sys.platform != "linux" or not status.exists():
        return None
    lines = [line.split() for line in status.read_text().splitlines() if line.startswith("RssFile:")]
    return int(lines[0][1]) * 1024 if lines else None


def test_big_endian_files_of_gguf_py(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    write_with_gguf_py(tmp_path / "model.gguf", rng, endianess=GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="a big-endian GGUF file"):
        GGUFFile(tmp_path / "model.gguf")


def test_reads_of_systems_without_preadv(model: tuple[pathlib.Path, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none. Eight threads at once, each at another position of the one file."""
    path, _ = model
    with contextlib.closing(GGUFFile(path)) as file:
        names = list(file.tensors) * 4
        expected = [file.read(name) for name in names]
        monkeypatch.delattr(os, "preadv")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for found, wanted in zip(pool.map(file.read, names), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_unreadable_paths(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be opened: No such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        GGUFFile(tmp_path)


@pytest.fixture
def split(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    parts = [{f"t{i}": np.full((2,), i, np.float32)} for i in range(3)]
    return gguf_files.write_split(tmp_path, {"general.architecture": "llama"}, parts)


def test_a_missing_part_is_named(split: list[pathlib.Path]) -> None:
    split[1].unlink()
    message = r"1 of the 3 parts of this model are missing: model-00002-of-00003.gguf; put them"
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(split[2])


def test_a_renamed_part(split: list[pathlib.Path]) -> None:
    path = split[0].rename(split[0].with_name("other.gguf"))
    with pytest.raises(CheckpointError, match="one of 3 parts of a model; rename it back, to end in -NNNNN-of-00003"):
        GGUFFile(path)


def test_parts_of_different_models(split: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    first, second, third = split
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"split.no and split.count are \(2, 3\), expected \(1, 3\)"):
        GGUFFile(first)
    again = {"split.no": Typed(2, 1), "split.count": Typed(2, 3)}
    gguf_files.write(second, again, {"t0": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: tensor 't0' is in another part"):
        GGUFFile(first)
    gguf_files.write(second, again, {})
    with pytest.raises(CheckpointError, match=r"the parts hold 2 tensors but split\.tensors\.count is 3"):
        GGUFFile(first)
    second.write_bytes(content)
    assert [GGUFFile(third).read(f"t{i}")[0] for i in range(3)] == [0, 1, 2]
