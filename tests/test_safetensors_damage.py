"""Safetensors files that are cut, mutated or made up: a CheckpointError, no crash, no large allocation."""

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoints.errors import CheckpointError
from checkpoints.safetensors import SafetensorsFolder
from checkpoints.safetensors_file import DTYPES, SafetensorsFile


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """Writes a file with any header: an object to be encoded, or bytes as they are."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype: Any, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@contextlib.contextmanager
def traced():
    """Yields a function that returns the most bytes allocated at one time (NumPy's included)."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BROKEN = {
    "empty file": (b"", "too few for its header"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "too few for its header"),
    "header past the end": ((2**62).to_bytes(8, "little") + b"{}", "too few for its header"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "not JSON": (b"\2\0\0\0\0\0\0\0{a", "broken header"),
    "not UTF-8": (b"\2\0\0\0\0\0\0\0\xff\xfe", "broken header"),
    "not an object": (b"\2\0\0\0\0\0\0\0[]", "not a JSON object"),
    "deep nesting": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "broken header"),
    "a number of 5000 digits": ((5000).to_bytes(8, "little") + b"9" * 5000, "broken header"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path, case):
    content, message = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


BROKEN_HEADERS = {
    "unknown dtype": ({"a": entry("F4", [2], 0, 1)}, 1, "has dtype 'F4'; supported are BOOL, U8"),
    "dtype is a list": ({"a": entry([], [2], 0, 1)}, 1, "has dtype"),
    "no description": ({"a": 3}, 0, "no description"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, "impossible shape None"),
    "negative size": ({"a": entry("U8", [-1], 0, 1)}, 1, "impossible shape"),
    "size is a float": ({"a": entry("U8", [1.0], 0, 1)}, 1, "impossible shape"),
    "size is true": ({"a": entry("U8", [True], 0, 1)}, 1, "impossible shape"),
    "huge size": ({"a": entry("U8", [2**70], 0, 1)}, 1, "impossible shape"),
    "huge product": ({"a": entry("U8", [2**40, 2**40], 0, 1)}, 1, "impossible shape"),
    "huge product with a zero": ({"a": entry("U8", [0, 2**40, 2**40], 0, 0)}, 0, "impossible shape"),
    "65 axes": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, "impossible shape"),
    "backward offsets": ({"a": entry("U8", [1], 1, 0)}, 1, "bad data_offsets"),
    "negative offset": ({"a": entry("U8", [1], -1, 0)}, 1, "bad data_offsets"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, 1, "bad data_offsets"),
    "span too short": ({"a": entry("F32", [3], 0, 10)}, 10, "takes 12 bytes, but its data_offsets span 10"),
    "truncated": ({"a": entry("F32", [3], 0, 12)}, 11, "truncated: 11 of 12 bytes"),
    "absurdly long": ({"a": entry("U8", [2**50], 0, 2**50)}, 1, "truncated"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, "'b' overlaps another"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, 3, "'b' leaves a hole"),
    "bytes left over": ({"a": entry("U8", [1], 0, 1)}, 3, "2 bytes after its last tensor"),
    "a name that is not Unicode": (b'{"\\ud800": 1}', 0, "broken header .*surrogates not allowed"),
    "same name twice": (b'{"a": 1, "a": 1}', 0, "a name occurs twice"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_headers(tmp_path, case):
    header, size, message = BROKEN_HEADERS[case]
    write_raw(tmp_path / "model.safetensors", header, bytes(size))
    with traced() as peak, pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)
    assert peak() < 2**20


def test_header_longer_than_the_format_allows(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse
    with traced() as peak, pytest.raises(CheckpointError, match="header of 100000001 bytes"):
        SafetensorsFolder(tmp_path)
    assert peak() < 2**20


def test_a_long_name_is_cut_in_messages(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"a\n\u0416" * 100_000: 3})
    with pytest.raises(CheckpointError) as error:
        SafetensorsFolder(tmp_path)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones(100, np.float32)}, path)
    folder = SafetensorsFolder(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends inside tensor 'w'"):
        folder.read("w")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        folder.read("w")


def reads_like_the_library(path: Path) -> None:
    """Opens and reads everything: what the library finds, or a CheckpointError, nothing else."""
    with traced() as peak:
        try:
            file = SafetensorsFile(path)
            arrays = {name: file.read(name) for name in file.tensors}
        except CheckpointError:
            return
        finally:
            assert peak() < 2**20
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert theirs.keys() == arrays.keys()
    for name, array in arrays.items():
        assert theirs[name]["dtype"] == file.tensors[name].dtype
        assert tuple(theirs[name]["shape"]) == array.shape
        assert bytes(theirs[name]["data"]) == array.tobytes()


@pytest.fixture(scope="module")
def small_file() -> bytes:
    rng = np.random.default_rng(1)
    shapes = {"BF16": (4, 3), "F32": (5,), "I64": (), "U8": (0, 3), "F8_E4M3": (2, 2)}
    arrays = {dtype: rng.integers(0, 9, shape).astype(DTYPES[dtype]) for dtype, shape in shapes.items()}
    return safetensors.numpy.save(arrays, metadata={"format": "pt"})


@given(cut=st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_truncated_files_are_refused(small_file, tmp_path_factory, cut):
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    path.write_bytes(small_file[: min(cut, len(small_file) - 1)])
    with pytest.raises(CheckpointError):
        SafetensorsFile(path)


@given(edits=st.lists(st.tuples(st.integers(0, 420), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_mutated_files_never_crash(small_file, tmp_path_factory, edits):
    content = bytearray(small_file)
    for position, value in edits:
        content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    reads_like_the_library(path)


sizes = st.integers(-2, 9) | st.sampled_from([2**31, 2**32, 2**56, 2**63, 2**64, True, None, 1.5, "1"])
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "bf16", None, 1]),
        "shape": st.lists(sizes, max_size=3) | st.none(),
        "data_offsets": st.lists(sizes, max_size=3) | st.tuples(st.integers(0, 8), st.integers(0, 40)),
    },
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(
    header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3) | json_values,
    data=st.binary(max_size=40),
)
@example(header={"a": entry("U8", [0, 2**55], 0, 0)}, data=b"")
@settings(max_examples=300, deadline=None)
def test_random_headers_never_crash(tmp_path_factory, header, data):
    reads_like_the_library(write_raw(tmp_path_factory.getbasetemp() / "random.safetensors", header, data))


@given(content=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_never_crash(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(content)
    reads_like_the_library(path)
