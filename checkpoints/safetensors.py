"""Hugging Face model folders: JSON files, and safetensors weights in one file or many."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, exists
from checkpoints.safetensors_file import SafetensorsFile, show
from checkpoints.tensors import TensorInfo

INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD_NUMBER = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


def read_json(folder: str | os.PathLike[str], filename: str, *, optional: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file of a model folder, such as `config.json`.

    `optional=True` turns a missing file into an empty dict. Everything else that is wrong (no such folder,
    a link to nothing, not UTF-8, not JSON, not an object) is a CheckpointError.
    """
    folder = Path(folder)
    path = folder / filename
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; expected a model folder that holds {filename}")
    if not exists(path):
        if optional:
            return {}
        raise CheckpointError(f"{folder} has no {filename}; download the whole model folder")
    if not path.is_file():  # a device or a pipe has no size, and may have no end
        raise CheckpointError(f"{path} is not a file; download it again")
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MAX_JSON_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, which no {filename} of a model has; download it again")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); write or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; download it again")
    return value


class SafetensorsFolder:
    """The safetensors weights of a Hugging Face folder, as a `checkpoints.tensors.Checkpoint`.

    With `model.safetensors.index.json`: the shards that it names, checked against it. Without:
    `model.safetensors` if it exists, else every `*.safetensors`. What is left out is listed in `ignored`:
    second copies in the original release's names (`consolidated*.safetensors`, `original/`), and shards that
    the index does not name. Tensors are in file order; reads are thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder; expected a model folder with safetensors files")
        chosen, index = _choose_files(self.path)
        files = [SafetensorsFile(self.path / name) for name in chosen]
        self._file_of = _merge(files, self.path)
        if index is not None:
            _check_index(index, self._file_of, self.path)
        self.tensors: Mapping[str, TensorInfo] = {name: file.tensors[name] for name, file in self._file_of.items()}
        unused = sorted(set(_safetensors_names(self.path)) - set(chosen))
        self.ignored: tuple[str, ...] = (
            *unused,
            *(["original/"] if (self.path / "original").is_dir() else []),
        )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns a fresh array of a tensor, or of `rows` (start:stop) of its first axis, in its dtype."""
        return self._find(name).read(name, rows)

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Reads a tensor, or only `rows` of it, into `out`: of the same shape, C-contiguous, writable.

        A floating-point tensor is converted to whatever floating-point dtype `out` has, with at most 16 MiB
        of temporary memory; any other needs its own dtype. Values too large for float16 are an error.
        """
        self._find(name).read_into(name, out, rows)

    def close(self) -> None:
        """Does nothing: a file is opened for each read, and closed after it."""

    def _find(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor {show(name)}; `tensors` lists those it has")
        return self._file_of[name]


def _safetensors_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.safetensors"))


def _choose_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Returns the names of the files to read and, where there is an index, its map from tensor to file."""
    if exists(folder / INDEX_FILE):
        index = _read_index(folder)
        shards = sorted(set(index.values()))
        missing = [shard for shard in shards if not exists(folder / shard)]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(shards)} shards that {INDEX_FILE} names: "
                f"{_some(missing)}; download them"
            )
        return shards, index
    names = _safetensors_names(folder)
    if "model.safetensors" in names:
        return ["model.safetensors"], None
    chosen = [name for name in names if not name.startswith("consolidated")]
    if not chosen:
        raise CheckpointError(_explain_no_weights(folder))
    _check_shard_numbers(chosen, folder)
    return chosen, None


def _read_index(folder: Path) -> dict[str, str]:
    index = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; download it again")
    for name, file in index.items():
        # Plain file names only: an index that came from a network must not lead out of its folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise CheckpointError(
                f"{folder / INDEX_FILE} maps {show(name)} to {show(file)}, not to a file; download it again"
            )
    return index


def _explain_no_weights(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder} has no safetensors weights but GGUF files; give the file itself: {folder / gguf[0]}"
    if pickled := [name for name in names if name.endswith(_PICKLE_SUFFIXES)]:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which can run any code when opened and "
            "are never loaded; save the model as safetensors, or download a revision that has them"
        )
    if any(name.endswith(".safetensors") for name in names):
        return f"{folder} has only consolidated*.safetensors, which use other names; download model*.safetensors"
    return f"{folder} has no .safetensors file; download the weights into it"


def _check_shard_numbers(names: list[str], folder: Path) -> None:
    """Without an index, a name such as model-00002-of-00003.safetensors still says how many there are."""
    found: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        if match := _SHARD_NUMBER.search(name):
            found[name[: match.start()], int(match[2])].add(int(match[1]))
    for (stem, total), numbers in found.items():
        if numbers != set(range(1, total + 1)):
            raise CheckpointError(
                f"{folder} has {len(numbers)} of the {total} shards {stem}-*-of-{total:05d}.safetensors "
                f"and no {INDEX_FILE}; download the missing files"
            )


def _merge(files: list[SafetensorsFile], folder: Path) -> dict[str, SafetensorsFile]:
    file_of: dict[str, SafetensorsFile] = {}
    twice: list[str] = []
    for file in files:
        twice += [f"{show(n)} ({file_of[n].path.name}, {file.path.name})" for n in file.tensors if n in file_of]
        file_of |= dict.fromkeys(file.tensors, file)
    if twice:
        raise CheckpointError(
            f"{folder} holds {len(twice)} tensors twice: {_some(twice)}; "
            "it mixes two checkpoints: move the files of one away"
        )
    return file_of


def _check_index(index: dict[str, str], file_of: dict[str, SafetensorsFile], folder: Path) -> None:
    lacking = [
        f"{show(name)} ({shard})"
        for name, shard in index.items()
        if name not in file_of or file_of[name].path.name != shard
    ]
    surplus = [f"{show(name)} ({file.path.name})" for name, file in file_of.items() if name not in index]
    problems = []
    if lacking:
        problems.append(f"{len(lacking)} tensors that it names are not in their shard: {_some(lacking)}")
    if surplus:
        problems.append(f"{len(surplus)} tensors of its shards are not in it: {_some(surplus)}")
    if problems:
        raise CheckpointError(
            f"{folder / INDEX_FILE} does not match its shards: {'; '.join(problems)}; download both "
            "from one revision, or remove the index to load every tensor of every shard"
        )


def _some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
