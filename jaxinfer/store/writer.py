"""Writes a store, piece by piece, so that it is there as a whole or not at all."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import filelock
import jax
import orbax.checkpoint as ocp

from jaxinfer.config import ModelConfig
from jaxinfer.packed_weights import DeviceWeight
from jaxinfer.params import Piece
from jaxinfer.store.manifest import MANIFEST, ORIGINAL, WEIGHTS, device_name, read_manifest, versions, write_manifest
from jaxinfer.store.structure import describe, named_arrays
from jaxinfer.store.unfinished import LOCK, UNFINISHED, remove_interrupted

log = logging.getLogger("jaxinfer")


class StoreWriter:
    """A store in the making, in a folder beside `path` that becomes `path` in one step when the block ends.

    with StoreWriter("models/out", config, jnp.dtype("bfloat16"), model="name") as store:
        store.write("layer_00000", {"qkv": packed, ...})   # every piece of `params.piece_specs`, in any order
        store.quality = {...}

    Where the block raises, nothing is left, and a warning says so; what a killed process leaves is removed, with a
    warning, when the same store is written again. Raises FileExistsError where there is something at `path`.
    """

    plan: Mapping[str, Any] | None
    quality: Mapping[str, Any] | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: ModelConfig,
        dtype: jax.numpy.dtype,
        *,
        model: str,
        files: Mapping[str, bytes] = types.MappingProxyType({}),
        plan: Mapping[str, Any] | None = None,
        quality: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` names what it is made from, of a path the last part; `files` are those of the original that are no
        weights, by name; `plan` and `quality` are JSON objects."""
        self.path = pathlib.Path(path).expanduser().absolute()
        self.config, self.plan, self.quality = config, plan, quality
        self._dtype, self._model, self._files = dtype, pathlib.Path(model).name, files
        self._described: dict[str, dict[str, Any]] = {}
        check_free(self.path)

    def __enter__(self) -> "StoreWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_interrupted(self.path)
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=self.path.name + UNFINISHED, dir=self.path.parent))
        self._folder.chmod(0o777 & ~_umask())
        self._lock = filelock.FileLock(self._folder / LOCK)
        self._lock.acquire()
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
        self._orbax = ocp.Checkpointer(handler)
        return self

    def write(self, piece: str, fields: Mapping[str, DeviceWeight]) -> None:
        """Writes the weights of one piece."""
        arrays = {name: array for field, weight in fields.items() for name, array in named_arrays(weight, field)}
        self._described[piece] = {field: describe(weight) for field, weight in fields.items()}
        with _quiet_orbax():
            self._orbax.save(self._folder / WEIGHTS / piece, args=ocp.args.PyTreeSave(arrays))

    def write_all(self, pieces: Iterable[Piece]) -> None:
        """Writes pieces as they come, holding one at a time."""
        for name, fields in pieces:
            self.write(name, fields)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._orbax.close()
        try:
            if kind is None:
                self._finish()
        finally:
            if self._folder.exists():
                self._lock.release()
                shutil.rmtree(self._folder, ignore_errors=True)
                log.warning("%s: not written; what was there of it has been removed", self.path)

    def _finish(self) -> None:
        for name, content in self._files.items():
            target = self._folder / ORIGINAL / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        content = {
            "model": self._model,
            "dtype": str(self._dtype),
            "device": device_name(),
            "versions": versions(),
            "config": dataclasses.asdict(self.config),
            "plan": self.plan,
            "quality": self.quality,
            "files": {f"{ORIGINAL}/{name}": len(content) for name, content in self._files.items()},
            "weights": self._described,
        }
        write_manifest(self._folder, content)
        read_manifest(self._folder)  # a store that could not be read again is none
        check_free(self.path)
        self._lock.release()
        (self._folder / LOCK).unlink(missing_ok=True)
        self._folder.rename(self.path)
        with contextlib.suppress(OSError):  # systems where a folder cannot be opened
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def add_quality(path: str | os.PathLike[str], quality: Mapping[str, Any]) -> None:
    """Puts a report into a store that is there, in place of the one that it has."""
    folder = pathlib.Path(path).expanduser()
    read_manifest(folder)
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    write_manifest(folder, content | {"quality": dict(quality)})


def check_free(path: pathlib.Path) -> None:
    """Raises FileExistsError unless a store can be written to `path`: nothing is overwritten."""
    if path.exists():
        raise FileExistsError(f"{path} exists already; remove it, or write to another path")


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Without a warning for each checkpoint that it has none of the files that other options would give it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
