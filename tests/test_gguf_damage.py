"""Damaged and hostile GGUF files: an error that says what is wrong, no crash, no large allocation."""

import os
import pathlib
import struct
import tracemalloc

import gguf_files
import numpy as np
import pytest
from gguf_files import Typed, string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile


def pairs(*items: tuple[str | bytes, bytes]) -> list[bytes]:
    return [string(key) + content for key, content in items]


def one_tensor(
    shape: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0, name: str | bytes = "w", data: int = 1024
) -> bytes:
    entry = gguf_files.tensor_entry("", shape, type_id, offset)[8:]
    table = gguf_files.header(3, 1, [], [string(name) + entry])
    return gguf_files.pad(table, 32) + bytes(data)


BIG = 2**63 - 1
BROKEN = {
    "empty": (b"", "not a GGUF file: it has 0 bytes"),
    "magic": (b"ggjt" + bytes(40), r"not a GGUF file: it starts with b'ggjt'"),
    "version 1": (gguf_files.header(1, 0, [], []), "GGUF version 1 is not supported"),
    "version 4": (gguf_files.header(4, 0, [], []), "GGUF version 4 is not supported"),
    "big endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "a big-endian GGUF file; convert it"),
    "tensor count": (struct.pack("<4sIQQ", b"GGUF", 3, BIG, 0), f"declares {BIG} tensors"),
    "key count": (struct.pack("<4sIQQ", b"GGUF", 3, 0, BIG), f"and {BIG} metadata keys, more than its 0 bytes"),
    "key length": (
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, BIG) + bytes(20),
        f"a metadata key of {BIG} bytes; 1 to 1024 are allowed",
    ),
    "empty key": (gguf_files.header(3, 0, pairs(("", gguf_files.value(1))), []), "a metadata key of 0 bytes"),
    "key twice": (
        gguf_files.header(3, 0, pairs(("k", gguf_files.value(1)), ("k", gguf_files.value(2))), []),
        "metadata key 'k' appears twice",
    ),
    "value type": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IQ", 13, 0))), []),
        "metadata key 'k' has the unknown value type 13",
    ),
    "element type": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 77, 0))), []),
        "'k' is an array of the unknown value type 77",
    ),
    "string length": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IQ", 8, BIG))), []),
        f"truncated or damaged in the header: {BIG} bytes are missing after byte 45",
    ),
    "array length": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 12, BIG))), []),
        "truncated or damaged in the header",
    ),
    "string count": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 8, BIG))), []),
        f"'k' declares {BIG} elements, more than the file can hold",
    ),
    "array count": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 9, BIG))), []),
        f"'k' declares {BIG} elements, more than the file can hold",
    ),
    "strings cut": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 8, 2) + string("a") + bytes(7))), []),
        "'k' ends after 1 of 2 strings",
    ),
    "nesting": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9)), []),
        "'k' nests arrays deeper than 4",
    ),
    "text": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<I", 8) + string(b"\xff\xfe"))), []),
        "the text of k at byte 45 is not UTF-8",
    ),
    "texts": (
        gguf_files.header(3, 0, pairs(("k", struct.pack("<IIQ", 9, 8, 2) + string("a") + string(b"\xff"))), []),
        "element 1 of metadata key 'k' is not UTF-8",
    ),
    "tensor name": (one_tensor(name=b"\xc3"), "the text of tensor name at byte 32 is not UTF-8"),
    "alignment 0": (gguf_files.to_bytes({"general.alignment": 0}, {}), "general.alignment is 0"),
    "alignment 48": (gguf_files.to_bytes({"general.alignment": 48}, {}), "it must be a power of two"),
    "alignment text": (gguf_files.to_bytes({"general.alignment": "x"}, {}), "general.alignment is 'x'"),
    "no dimensions": (one_tensor(shape=()), "'w' has 0 dimensions; 1 to 4 are allowed"),
    "five dimensions": (one_tensor(shape=(1,) * 5), "'w' has 5 dimensions; 1 to 4 are allowed"),
    "zero dimension": (one_tensor(shape=(3, 0)), r"'w' has shape \(3, 0\)"),
    "product": (one_tensor(shape=(2**63, 2**63, 2**63)), "truncated: its tensors need"),
    "row": (one_tensor(shape=(2, 48), type_id=2), r"shape \(2, 48\); its rows must be .* the 32 elements of a Q4_0"),
    "offset": (one_tensor(offset=16), "'w' is at data offset 16, not a multiple of the alignment 32"),
    "far offset": (one_tensor(offset=2**40), "truncated: its tensors need"),
    "type": (one_tensor(type_id=99), "tensor 'w' has type 99, which is not supported; .* F32=0, F16=1, Q4_0=2"),
    "known type": (one_tensor(type_id=16), r"tensor 'w' has type 16 \(IQ2_XXS\), which is not supported"),
    "cut data": (
        one_tensor(shape=(300,), data=1000),
        r"its tensors need 1264 bytes and the file has 1064, 200 are missing \(the first cut tensor is 'w'\)",
    ),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_broken_files_say_what_is_wrong(tmp_path: pathlib.Path, case: str) -> None:
    content, message = BROKEN[case]
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_that_overlap_or_repeat(tmp_path: pathlib.Path) -> None:
    def two(first: str, second: str, offset: int) -> GGUFFile:
        entries = [gguf_files.tensor_entry(first, (16,), 0, 0), gguf_files.tensor_entry(second, (16,), 0, offset)]
        content = gguf_files.pad(gguf_files.header(3, 2, [], entries), 32) + bytes(256)
        (tmp_path / "model.gguf").write_bytes(content)
        return GGUFFile(tmp_path / "model.gguf")

    assert list(two("a", "b", 64).tensors) == ["a", "b"]
    with pytest.raises(CheckpointError, match="tensors 'a' and 'b' overlap"):
        two("a", "b", 32)
    with pytest.raises(CheckpointError, match="tensor 'a' appears twice"):
        two("a", "a", 64)


def small_file() -> bytes:
    rng = np.random.default_rng(1)
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "split.count": Typed(2, 1),
        "flag": True,
        "theta": 0.5,
        "scale": Typed(12, 0.1),
        "tokens": ["", "\u0120the", "<0x0A>"],
        "types": Typed(5, [-1, 3]),
        "nested": [[1, 2], [3]],
    }
    return gguf_files.to_bytes(
        metadata,
        {
            "blk.0.w": gguf_files.packed(rng, "Q4_K", 2, 256),
            "blk.0.b": rng.normal(size=(3, 2)).astype(np.float16),
            "out": gguf_files.packed(rng, "Q5_0", 1, 2, 32),
        },
    )


SMALL = small_file()


def parse_and_read(path: pathlib.Path, content: bytes) -> bool:
    """Whether the content is read in full; anything but a CheckpointError, or much memory, is a failure."""
    path.write_bytes(content)
    return is_read(path)


def is_read(path: pathlib.Path) -> bool:
    """The same of a file that is there."""
    tracemalloc.start()
    try:
        with GGUFFile(path) as file:
            for name in file.tensors:
                file.read(name)
        return True
    except CheckpointError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e6


def test_every_truncation_is_an_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    assert parse_and_read(path, SMALL)
    end_of_data = len(SMALL) - (-(2 * 22) % 32)  # the padding after the last tensor is not needed
    os.truncate(path, end_of_data)
    assert is_read(path)
    for size in [end_of_data - 1, *reversed(range(800, end_of_data, 13)), *reversed(range(800))]:
        os.truncate(path, size)
        assert not is_read(path), size


def test_a_file_cut_after_it_was_opened(tmp_path: pathlib.Path) -> None:
    """Also between two reads of one tensor; touching mapped pages that are not there any more would end the process."""
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    with GGUFFile(path) as file:
        tensor = file.quantized("blk.0.w")
        assert tensor is not None and tensor.shape == file.read("blk.0.w").shape == (2, 256)
        assert tensor.rows(0, 1).codes.shape == (1, 256)
        os.truncate(path, 32)
        for read in (lambda: file.read("blk.0.w"), lambda: file.read_blocks("out"), lambda: tensor.rows(1, 2)):
            with pytest.raises(CheckpointError, match=f"model.gguf has 32 of the {len(SMALL)} bytes that it had when"):
                read()
        path.unlink()
        path.write_bytes(b"")
    path.write_bytes(SMALL)
    with GGUFFile(path) as file:  # replaced by another file, as downloads do
        path.unlink()
        path.write_bytes(b"")
        assert file.read("blk.0.w").shape == (2, 256)


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
MUTATION = st.tuples(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=8) | NUMBERS)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(MUTATION, min_size=1, max_size=3), cut=st.integers(0, len(SMALL)) | st.none())
def test_mutated_files_are_read_or_refused(
    tmp_path: pathlib.Path, mutations: list[tuple[int, bytes | int]], cut: int | None
) -> None:
    content = bytearray(SMALL)
    for position, new in mutations:
        piece = new if isinstance(new, bytes) else new.to_bytes(8, "little")
        content[position : position + len(piece)] = piece
    parse_and_read(tmp_path / "model.gguf", bytes(content[:cut]))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_headers_are_read_or_refused(tmp_path: pathlib.Path, body: bytes, counts: tuple[int, int]) -> None:
    parse_and_read(tmp_path / "model.gguf", struct.pack("<4sIQQ", b"GGUF", 3, *counts) + body)
