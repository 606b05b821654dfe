"""Writes safetensors folders shard by shard, so that host memory holds one shard at a time."""

import json
import math
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from checkpoints.safetensors import INDEX_FILE
from checkpoints.safetensors_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardWriter:
    """Writes `num_shards` files of a folder, and with `finish` the index that says what is where."""

    def __init__(self, folder: pathlib.Path, num_shards: int) -> None:
        self._folder, self._num_shards = folder, num_shards
        self._weight_map: dict[str, str] = {}
        self._shards, self._bytes = 0, 0

    @property
    def nbytes(self) -> int:
        """Of all tensors so far."""
        return self._bytes

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes the next file. Raises ValueError for one too many and for a tensor that was written before."""
        self._shards += 1
        twice = sorted(set(tensors) & set(self._weight_map))
        if self._shards > self._num_shards or twice:
            what = f"{twice[0]} twice" if twice else f"more than {self._num_shards} shards"
            raise ValueError(f"{self._folder}: {what}")
        name = f"model-{self._shards:05d}-of-{self._num_shards:05d}.safetensors"
        write_file(self._folder / name, tensors)
        self._weight_map |= dict.fromkeys(tensors, name)
        self._bytes += sum(array.nbytes for array in tensors.values())

    def finish(self) -> None:
        """Writes the index. Raises ValueError if shards are missing."""
        if self._shards != self._num_shards:
            raise ValueError(f"{self._folder}: {self._shards} of {self._num_shards} shards are written")
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def write_file(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file, which must not exist: https://github.com/safetensors/safetensors#format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.dtype.itemsize * math.prod(array.shape)
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
