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

import jax
import numpy as np

from checkpoints.errors import CheckpointError, check_regular
from jaxinfer.packed_runs import aligned_empty

READERS = 8
"""Threads. A disk on a network needs several requests at once; on a local one they do no harm."""

PIECE_BYTES = 16 * 2**20
"""Of one read."""

AHEAD_BYTES = 512 * 2**20
"""Of host memory that is filled before the device has taken it, or the largest array."""

_MAX_METADATA = 4096
"""Bytes of `.zarray`, which has about 160."""


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


def read_arrays(arrays: Iterable[tuple[pathlib.Path, jax.ShapeDtypeStruct]]) -> Iterator[np.ndarray]:
    """The arrays in these files, which `stored_file` has checked, in order, the next ones being read meanwhile.

    Raises CheckpointError for a file that cannot be read or has become shorter.
    """
    waiting: list[tuple[np.ndarray, list[concurrent.futures.Future[None]]]] = []
    ahead = 0
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(READERS, "jaxinfer-store")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def first() -> np.ndarray:
            nonlocal ahead
            array, reads = waiting.pop(0)
            for read in reads:
                read.result()
            ahead -= array.nbytes
            return array

        for file, like in arrays:
            num_bytes = math.prod(like.shape) * np.dtype(like.dtype).itemsize
            while waiting and ahead + num_bytes > AHEAD_BYTES:
                yield first()
            array = aligned_empty(like.shape, np.dtype(like.dtype))
            target = memoryview(array.reshape(-1).view(np.uint8))
            starts = range(0, num_bytes, PIECE_BYTES)
            waiting.append((array, [pool.submit(_read, file, target[s : s + PIECE_BYTES], s) for s in starts]))
            ahead += num_bytes
        while waiting:
            yield first()


def _read(path: pathlib.Path, target: memoryview, start: int) -> None:
    """Fills `target` with the bytes of a file from `start` on."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], start + done)
                if not count:
                    raise CheckpointError(f"{path} ends early; the store is damaged: copy or write it again")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error


def _zarr_dtype(dtype: np.dtype) -> str:
    """As zarr writes it: `<f4`, `|u1`, and by name what NumPy has no letter for."""
    return dtype.name if dtype.kind == "V" else dtype.str
