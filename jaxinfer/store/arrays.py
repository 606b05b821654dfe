"""Arrays of a store, read from the files of their chunks by several threads at once.

Orbax writes an array as zarr version 2, here without compression and in one chunk: the file `0.0` is its bytes in
row-major order. Plain reads into the memory that the device takes over are as fast as the disk is; Orbax's own restore
goes through two more copies of each array (on the machine of `benchmarks/results`, a third of the rate).
https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from checkpoints.errors import CheckpointError, check_regular
from checkpoints.positioned import read_at
from jaxinfer.packed_runs import aligned_empty
from jaxinfer.store.checksums import BLOCK_BYTES, block_digests, of_blocks

READERS = 8
"""Threads. A disk on a network needs several requests at once; on a local one they do no harm."""

PIECE_BYTES = 4 * BLOCK_BYTES
"""That one thread reads and checks before it takes the next."""

AHEAD_BYTES = 512 * 2**20
"""Of host memory that is filled before the device has taken it, or the largest array."""

_MAX_METADATA = 4096
"""Bytes of `.zarray`, which has about 160."""


class StoredArray(NamedTuple):
    """An array in a file that `stored_file` has checked, and its checksum; None in stores that have none."""

    file: pathlib.Path
    like: jax.ShapeDtypeStruct
    checksum: str | None


def stored_file(folder: pathlib.Path, like: jax.ShapeDtypeStruct) -> pathlib.Path:
    """The file with an array's bytes, checked to be of the shape, the dtype and the size that are expected.

    Raises CheckpointError for an array that is not there, is damaged, or is no plain zarr array.
    """
    described = folder / ".zarray"
    try:
        check_regular(described)
        text = described.read_bytes()[: _MAX_METADATA + 1]
        metadata = json.loads(text.decode("utf-8"))
        chunk = folder / ".".join("0" for _ in like.shape)
        check_regular(chunk)
        size = chunk.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; copy or write the store again") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{described} is not JSON; copy or write the store again") from error
    shape = list(like.shape)
    expected = {
        "zarr_format": 2, "shape": shape, "chunks": shape, "order": "C", "compressor": None, "filters": None,
        "dtype": _zarr_dtype(np.dtype(like.dtype)),
    }  # fmt: skip
    for key, value in expected.items():
        if not isinstance(metadata, dict) or metadata.get(key, ...) != value:
            found = metadata.get(key) if isinstance(metadata, dict) else metadata
            raise CheckpointError(
                f"{described}: {key} is {repr(found)[:80]}, expected {value}; the store is damaged: write it again"
            )
    needed = math.prod(shape) * np.dtype(like.dtype).itemsize
    if size != needed:
        raise CheckpointError(f"{chunk} has {size} of {needed} bytes; the store is damaged: copy or write it again")
    return chunk


def read_arrays(arrays: Iterable[StoredArray]) -> Iterator[np.ndarray]:
    """The arrays in these files, in order, the next ones being read meanwhile.

    Raises CheckpointError for a file that cannot be read, has become shorter, or holds other bytes than were written.
    """
    waiting: list[tuple[StoredArray, np.ndarray, list[concurrent.futures.Future[bytes]]]] = []
    ahead = 0
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(READERS, "jaxinfer-store")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def first() -> np.ndarray:
            nonlocal ahead
            stored, array, reads = waiting.pop(0)
            digests = b"".join([read.result() for read in reads])
            if stored.checksum is not None and of_blocks(digests) != stored.checksum:
                raise CheckpointError(
                    f"{stored.file}: the array has other bytes than were written (its checksum differs); "
                    "the store is damaged: copy or write it again"
                )
            ahead -= array.nbytes
            return array

        for stored in arrays:
            file, like, is_checked = stored.file, stored.like, stored.checksum is not None
            num_bytes = math.prod(like.shape) * np.dtype(like.dtype).itemsize
            while waiting and ahead + num_bytes > AHEAD_BYTES:
                yield first()
            array = aligned_empty(like.shape, np.dtype(like.dtype))
            target = memoryview(array.reshape(-1).view(np.uint8))
            starts = range(0, num_bytes, PIECE_BYTES)
            reads = [pool.submit(_read, file, target[s : s + PIECE_BYTES], s, is_checked) for s in starts]
            waiting.append((stored, array, reads))
            ahead += num_bytes
        while waiting:
            yield first()


def _read(path: pathlib.Path, target: memoryview, start: int, is_checked: bool) -> bytes:
    """Fills `target` with the bytes of a file from `start` on; returns the digests of their blocks, if asked to.

    Block by block: what was read is still in a cache when it is added up.
    """
    digests = []
    try:
        with path.open("rb", buffering=0) as file:
            for begin in range(0, len(target), BLOCK_BYTES):
                block, done = target[begin : begin + BLOCK_BYTES], 0
                while done < len(block):
                    count = read_at(file, block[done:], start + begin + done)
                    if not count:
                        raise CheckpointError(f"{path} ends early; the store is damaged: copy or write it again")
                    done += count
                if is_checked:
                    digests.append(block_digests(np.asarray(block)))
            return b"".join(digests)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error


def _zarr_dtype(dtype: np.dtype) -> str:
    """As zarr writes it: `<f4`, `|u1`, and by name what is not NumPy's own (e5m2 too, which says that it is `<f1`)."""
    return dtype.str if dtype.isbuiltin == 1 else dtype.name
