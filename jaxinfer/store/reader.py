"""Opens a store, and puts its weights on the device as they lie there."""

import collections
import functools
import itertools
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.progress import progress_bar
from checkpoints.safetensors import read_json
from jaxinfer.layers.weights import PermutedInputs, StackedOutputs
from jaxinfer.packed_weights import DeviceWeight
from jaxinfer.params import TOP, ParamSpec, Piece, piece_specs
from jaxinfer.store.arrays import AHEAD_BYTES, StoredArray, read_arrays, stored_file
from jaxinfer.store.layouts import LAYOUT_VERSIONS, repacked, unpacked
from jaxinfer.store.manifest import GGUF_METADATA, ORIGINAL, WEIGHTS, read_manifest
from jaxinfer.store.structure import FLOATS, Described, canonical_like, named_arrays
from jaxinfer.tokenization import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from pallas_kernels.int4_matmul import Packed, to_kernel_layout

log = logging.getLogger("jaxinfer")


class Store:
    """A store that is sound as far as can be told without reading its arrays: they are there, and of the right sizes.

    Raises CheckpointError, in one line, for one that is damaged, incomplete, or of a version that is not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.manifest = read_manifest(self.path)
        self.config = self.manifest.config
        self.dtype = jnp.dtype(self.manifest.dtype)
        self._files = {
            (piece, field): [
                StoredArray(
                    stored_file(self.path / WEIGHTS / piece / name, like),
                    like,
                    self.manifest.checksum(f"{WEIGHTS}/{piece}/{name}"),
                )
                for name, like in named_arrays(self.manifest.weights[piece][field].weight, field)
            ]
            for piece, specs in self.specs()
            for field in specs
        }

    @property
    def own_head(self) -> bool:
        """Whether the head is a weight of its own."""
        return "lm_head" in self.manifest.weights[TOP]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        likes = (stored.like for stored in self._arrays())
        return sum(math.prod(like.shape) * np.dtype(like.dtype).itemsize for like in likes)

    def specs(self) -> Iterator[tuple[str, dict[str, ParamSpec]]]:
        """The fields of each piece, in order."""
        return piece_specs(self.config, own_head=self.own_head)

    def tokenizer(self) -> Tokenizer | None:
        """The model's own, made from the files that it came with."""
        folder = self.path / ORIGINAL
        if f"{ORIGINAL}/{GGUF_METADATA}" in self.manifest.files:
            return tokenizer_from_gguf(read_json(folder, GGUF_METADATA))
        return tokenizer_from_folder(folder) if folder.is_dir() else None

    def pieces(self, dtype: jnp.dtype, name: str, *, progress: bool = False) -> Iterator[Piece]:
        """The weights on the default device, as its kernels read them; what is not packed has `dtype`.

        What was laid out for another kernel is repacked on the way, with a warning.
        """
        self._warn_of_repacking(name)
        arrays = read_arrays(self._arrays())
        with progress_bar(
            total=self.nbytes, unit="B", unit_scale=True, desc=f"Loading {name}", shown=progress, leave=False
        ) as bar:
            in_flight: collections.deque[tuple[int, DeviceWeight]] = collections.deque()
            on_the_way = 0  # bytes that the host may keep until the device has them
            for piece, specs in self.specs():
                fields: dict[str, DeviceWeight] = {}
                for field, spec in specs.items():
                    described, where = self.manifest.weights[piece][field], f"{self.path}: {piece}.{field}"
                    host = filled(described, arrays, where)
                    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(host))
                    # The device takes some arrays while the next ones are read and checked. Those that it has are let
                    # go of: whoever gets the weights may be done with them.
                    while in_flight and (on_the_way + num_bytes > AHEAD_BYTES or _has_come(in_flight[0][1])):
                        size, oldest = in_flight.popleft()
                        jax.block_until_ready(oldest)
                        on_the_way -= size
                        del oldest
                    fields[field] = _placed(host, described, spec.is_norm, dtype, where)
                    del host
                    in_flight.append((num_bytes, fields[field]))
                    on_the_way += num_bytes
                    bar.update(num_bytes)
                yield piece, fields

    def host_weight(self, piece: str, field: str) -> Any:
        """A weight of NumPy arrays, its codes canonical."""
        described, where = self.manifest.weights[piece][field], f"{self.path}: {piece}.{field}"
        host = filled(described, read_arrays(self._files[piece, field]), where)
        return _with_codes(host, lambda codes: unpacked(codes, described.version_of(codes)))

    def _arrays(self) -> Iterator[StoredArray]:
        return itertools.chain.from_iterable(self._files.values())

    def _warn_of_repacking(self, name: str) -> None:
        changes: collections.Counter[str] = collections.Counter()

        def note(codes: Packed, described: Described) -> Packed:
            wanted, version = _wanted(canonical_like(codes)), described.version_of(codes)
            if (codes.layout, version) != (wanted, LAYOUT_VERSIONS[wanted]):
                changes[f"from layout {codes.layout} {version} to {wanted} {LAYOUT_VERSIONS[wanted]}"] += 1
            return codes

        for fields in self.manifest.weights.values():
            for described in fields.values():
                _with_codes(described.weight, functools.partial(note, described=described))
        for change, count in changes.items():
            log.warning(
                "%s: written on %s; %d weights are repacked for this device each time it is loaded, %s; "
                "`jaxinfer convert` run here writes a store without that",
                *(name, self.manifest.device, count, change),
            )


def filled(described: Described, arrays: Iterator[np.ndarray], where: str) -> Any:
    """The weight with the next of the arrays.

    Raises CheckpointError for scales, minima and norms that are not finite: one of them spoils all outputs. Plain
    matrices, which are most of what a store reads, are not looked through.
    """
    leaves, structure = jax.tree.flatten(described.weight)
    filled_leaves = [next(arrays) for _ in leaves]
    for array in filled_leaves:
        if (array.ndim == 1 or len(leaves) > 1) and array.dtype.name in FLOATS and not is_finite(array):
            raise CheckpointError(f"{where} holds NaN or infinity; the store is damaged: write it again")
    weight = jax.tree.unflatten(structure, filled_leaves)
    for part in weight.parts if isinstance(weight, StackedOutputs) else (weight,):
        if isinstance(part, PermutedInputs):  # the device gathers by it without looking
            ordered = np.sort(part.permutation)
            if not np.array_equal(ordered, np.arange(len(ordered), dtype=np.int32)):
                raise CheckpointError(f"{where}: the order of the inputs is none; the store is damaged: write it again")
    return weight


def is_finite(array: np.ndarray) -> bool:
    """Whether floats hold neither NaN nor infinity, whose exponents alone have all bits set.

    A fifth of the time of `np.isfinite` for 16 bits: a model of 8B in groups of 128 has 55 million scales.
    """
    exponent = np.array(np.inf, array.dtype).view(f"u{array.dtype.itemsize}")
    bits = array.reshape(-1).view(exponent.dtype)
    pieces = (bits[start : start + 2**16] for start in range(0, bits.size, 2**16))  # each stays in a core's cache
    return all((piece & exponent).max() < exponent for piece in pieces)


def gguf_metadata(metadata: Mapping[str, Any]) -> bytes:
    """What tokenizers are made from of a GGUF file's metadata: the content of a store's `original/gguf.json`."""
    kept = {key: value for key, value in metadata.items() if key.startswith(("tokenizer.", "general."))}
    return json.dumps(kept).encode()


def rounded(values: Any, dtype: Any, where: str) -> Any:
    """Numbers in another dtype. Raises CheckpointError for those that float16 cannot hold."""
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    if dtype == np.float16 and bool((~jnp.isfinite(result) & jnp.isfinite(values)).any()):
        raise CheckpointError(f"{where} has values beyond float16's 65504; use bfloat16 or float32")
    return result


def _with_codes(weight: Any, change: Callable[[Packed], Packed]) -> Any:
    """A weight with its packed codes changed."""
    if isinstance(weight, StackedOutputs):
        return StackedOutputs(tuple(_with_codes(part, change) for part in weight.parts))
    if isinstance(weight, PermutedInputs):
        return PermutedInputs(change(weight.weight), weight.permutation)
    return change(weight) if isinstance(weight, Packed) else weight


@functools.lru_cache(maxsize=256)
def _wanted(canonical: Packed) -> str:
    """The layout that this device's kernel reads; a model has few different kinds of weights."""
    return jax.eval_shape(to_kernel_layout, canonical).layout


def _has_come(weight: DeviceWeight) -> bool:
    """Whether all of it is on the device."""
    return all(leaf.is_ready() for leaf in jax.tree.leaves(weight))


def _placed(host: Any, described: Described, is_norm: bool, dtype: jnp.dtype, where: str) -> DeviceWeight:
    """A weight on the default device, in its layout; arrays in `dtype`, norms as they are."""
    if isinstance(host, StackedOutputs):
        return StackedOutputs(tuple(_placed(part, described, is_norm, dtype, where) for part in host.parts))
    on_device = jax.device_put(host)
    if isinstance(host, np.ndarray):
        return on_device if is_norm or on_device.dtype == dtype else rounded(on_device, dtype, where)

    def arranged(codes: Packed) -> Packed:
        version, wanted = described.version_of(codes), _wanted(canonical_like(codes))
        if (codes.layout, version) == (wanted, LAYOUT_VERSIONS[wanted]):
            return codes
        return repacked(codes, version)

    return _with_codes(on_device, arranged)
