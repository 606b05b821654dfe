"""Writes a store, piece by piece, so that it is there as a whole or not at all."""

import contextlib
import dataclasses
import errno
import gc
import json
import logging
import os
import pathlib
import re
import shutil
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.packed_weights import DeviceWeight
from jaxinfer.params import Piece
from jaxinfer.store.checksums import checksum
from jaxinfer.store.manifest import MANIFEST, ORIGINAL, WEIGHTS, device_name, read_manifest, versions, write_manifest
from jaxinfer.store.structure import describe, named_arrays
from jaxinfer.store.unfinished import check_store_free, written_whole

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
        self.path = check_store_free(path)
        self.config, self.plan, self.quality = config, plan, quality
        self._dtype, self._model, self._files = dtype, pathlib.Path(model).name, files
        self._described: dict[str, dict[str, Any]] = {}
        self._checksums: dict[str, str] = {}

    def __enter__(self) -> "StoreWriter":
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(written_whole(self.path))
            with _quiet_orbax() as ocp:
                handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
                self._orbax = ocp.Checkpointer(handler)
            stack.callback(self._close_orbax)
            stack.push(self._finish_unless_failed)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> bool | None:
        return self._stack.__exit__(*details)

    def write(self, piece: str, fields: Mapping[str, DeviceWeight]) -> None:
        """Writes the weights of one piece. Raises OSError where the system does not let it, such as on a full disk."""
        arrays = {name: array for field, weight in fields.items() for name, array in named_arrays(weight, field)}
        self._described[piece] = {field: describe(weight) for field, weight in fields.items()}
        for name, array in arrays.items():
            self._checksums[f"{WEIGHTS}/{piece}/{name}"] = checksum(np.asarray(array))
        _check_room(self._folder, arrays.values())  # Orbax fails late, and in several threads
        with _quiet_orbax() as ocp:
            try:
                self._orbax.save(self._folder / WEIGHTS / piece, args=ocp.args.PyTreeSave(arrays))
                return
            except (OSError, ValueError) as error:
                number = os_error_number(error)
                if number is None:
                    raise
            gc.collect()  # asyncio's tasks that failed beside the first print that when they go: here it is not heard
            raise OSError(number, os.strerror(number), os.fspath(self.path))

    def write_all(self, pieces: Iterable[Piece]) -> None:
        """Writes pieces as they come, holding one at a time."""
        for name, fields in pieces:
            self.write(name, fields)
            del fields  # before the next piece is made

    def _close_orbax(self) -> None:
        with _quiet_orbax():
            self._orbax.close()

    def _finish_unless_failed(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        for name, content in self._files.items():
            target = self._folder / ORIGINAL / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            self._checksums[f"{ORIGINAL}/{name}"] = checksum(content)
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
            "checksums": self._checksums,
        }
        write_manifest(self._folder, content)
        read_manifest(self._folder)  # a store that could not be read again is none


def add_quality(path: str | os.PathLike[str], quality: Mapping[str, Any]) -> None:
    """Puts a report into a store that is there, in place of the one that it has."""
    folder = pathlib.Path(path).expanduser()
    read_manifest(folder)
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    write_manifest(folder, content | {"quality": dict(quality)})


def os_error_number(error: Exception) -> int | None:
    """The system's number of an OSError, and of a ValueError in which TensorStore passes one on; None of others."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\[os_error_code='(\d+)'", str(error))
    return None if number is None else int(number[1])


def _check_room(folder: pathlib.Path, arrays: Iterable[Any]) -> None:
    """Raises OSError where the disk has less room than arrays and a block of what describes each will take."""
    usage, block = shutil.disk_usage(folder), 4096
    needed = sum(-(-array.nbytes // block) * block + block for array in arrays)
    if usage.total > 0 and usage.free < needed:  # a file system that cannot tell says 0 of 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(folder))


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[types.ModuleType]:
    """Orbax, without a warning for each checkpoint that it has none of the files that other options would give it, and
    without a traceback of each thread and task that failed: the error that it raises says the same.

    It logs by absl, already while it is imported, and absl calls `logging.basicConfig` where the root logger has no
    handler. The program's own call would do nothing afterwards, so a handler stands there meanwhile: the one by which
    Python writes what there is no handler for.
    """
    root, placeholder = logging.getLogger(), logging.lastResort or logging.NullHandler()
    is_bare = not root.handlers
    if is_bare:
        root.addHandler(placeholder)
    try:
        import orbax.checkpoint as ocp

        loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]  # after the import: absl's class is its own
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield ocp
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    finally:
        if is_bare:
            root.removeHandler(placeholder)
