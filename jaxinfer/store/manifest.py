"""`jaxinfer.json`: what a store says of itself, written last and read without believing it."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax

import jaxinfer
from checkpoints.errors import CheckpointError
from checkpoints.safetensors import read_json
from jaxinfer.config import ModelConfig
from jaxinfer.params import piece_specs
from jaxinfer.store.checksums import checksum
from jaxinfer.store.structure import Described, parse

MANIFEST = "jaxinfer.json"
FORMAT = "jaxinfer-store"
VERSION = 2
"""Of this file's own form. What has version 1 may lack checksums: of this file, or of everything."""
READ_VERSIONS = (1, VERSION)

WEIGHTS, ORIGINAL, GGUF_METADATA = "weights", "original", "gguf.json"

MAX_LAYERS, MAX_FEATURES = 10_000, 2**31
_VERSIONED = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
_KEYS = ("format", "version", "model", "dtype", "device", "versions", "config", "plan", "quality", "files", "weights")
_CHECKSUM, _CHECKSUMS = "checksum", "checksums"  # of this file's content, and of the rest


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `jaxinfer.json` holds. `weights` are abstract, by piece and field; `files` the sizes of those of the model.

    `checksums` (`jaxinfer.store.checksums`) are those of arrays, `weights/{piece}/{array}`, and of files, by the names
    in `files`; empty for a store that was written before there were any.

    `plan` and `quality` are JSON objects, or None for a model that was not quantised here, or not measured.
    """

    model: str
    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    versions: Mapping[str, str]
    config: ModelConfig
    plan: Mapping[str, Any] | None
    quality: Mapping[str, Any] | None
    files: Mapping[str, int]
    weights: Mapping[str, Mapping[str, Described]]
    checksums: Mapping[str, str]

    def checksum(self, name: str) -> str | None:
        """That of an array or a file. Raises CheckpointError where only others have one."""
        return _checksum(self.checksums, name)


def versions() -> dict[str, str]:
    """Of everything that has a part in a store."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONED}
    return {"jaxinfer": jaxinfer.__version__, **found, "python": platform.python_version()}


def write_manifest(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes `jaxinfer.json`, or replaces it in one step; what it says of its own checksum is computed anew."""
    unfinished = folder / f"{MANIFEST}.unfinished"
    whole = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **content}, allow_nan=False))
    whole[_CHECKSUM] = own_checksum(whole)
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(whole, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)


def own_checksum(content: Mapping[str, Any]) -> str:
    """That of a manifest's content, as JSON gives it, without the entry that holds it."""
    others = {name: value for name, value in content.items() if name != _CHECKSUM}
    return checksum(json.dumps(others, sort_keys=True).encode())


def is_store(path: pathlib.Path) -> bool:
    """Whether a folder says that it is one."""
    return (path / MANIFEST).exists()


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads and checks `jaxinfer.json`: it says what was written, which fits together and to the model's files.

    Raises CheckpointError, in one line, for everything else.
    """
    path = folder / MANIFEST
    content = read_json(folder, MANIFEST)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not that of a store; give the folder that `jaxinfer convert` wrote")
    version = content.get("version")
    if type(version) is not int or version not in READ_VERSIONS:
        raise CheckpointError(
            f"{path} has version {str(version)[:20]}, this version of jaxinfer reads "
            f"{' and '.join(map(str, READ_VERSIONS))}; update jaxinfer, or write the store again"
        )
    needed = _KEYS if version == 1 else (*_KEYS, _CHECKSUM, _CHECKSUMS)
    missing = [key for key in needed if key not in content]
    if missing:
        raise CheckpointError(f"{path} has no {' and no '.join(missing)}; the store is damaged: write it again")
    if _CHECKSUM in content and content[_CHECKSUM] != own_checksum(content):
        raise CheckpointError(
            f"{path} says other things than were written (its checksum differs); "
            "the store is damaged: copy or write it again"
        )
    decoded = {
        name: decode(hint, content[name], f"{path}: {name}")
        for name, hint in {
            "model": str,
            "dtype": Literal["float32", "bfloat16", "float16"],
            "device": str,
            "versions": dict[str, str],
            "config": ModelConfig,
            "plan": dict | None,
            "quality": dict | None,
            "files": dict[str, int],
        }.items()
    }
    checksums = decode(dict[str, str], content.get(_CHECKSUMS, {}), f"{path}: checksums")
    if version > 1 and not checksums:  # none at all, in version 1, are those of a store from before there were any
        raise CheckpointError(f"{path} has no checksums; the store is damaged: write it again")
    _check_config(decoded["config"], path)
    _check_files(folder, decoded["files"], checksums)
    return Manifest(**decoded, checksums=checksums, weights=_weights(content["weights"], decoded["config"], path))


def decode(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the type that is asked for: dataclasses, tuples, dicts, literals, unions, numbers, strings.

    Raises CheckpointError, naming `where`, for a value of another type; unknown and missing fields are errors too.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        fields = {field.name: field for field in dataclasses.fields(hint)}
        known = isinstance(value, Mapping) and set(value) <= set(fields)
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if not known or not required <= set(value):
            raise _unexpected(where, value, f"an object with the fields of {hint.__name__}")
        hints = typing.get_type_hints(hint)
        return hint(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (other,) = (argument for argument in arguments if argument is not types.NoneType)
        return decode(other, value, where)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list) and len(value) <= MAX_LAYERS:
        return tuple(decode(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: decode(arguments[1], item, f"{where}.{key[:40]}") for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300:
        return float(value)
    if hint in (int, bool, str, dict) and type(value) is hint:
        return value
    raise _unexpected(where, value, getattr(hint, "__name__", str(hint)))


def _unexpected(where: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{where} is {repr(value)[:80]}, not {expected}; the store is damaged: write it again")


def _check_config(config: ModelConfig, path: pathlib.Path) -> None:
    """What the decoder takes for granted; shapes are compared with those of the arrays after this."""
    sizes = ("vocab_size", "num_tokens", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    numbers = {name: getattr(config, name) for name in (*sizes, "max_position_embeddings")}
    wrong = [name for name, value in numbers.items() if not 0 < value < MAX_FEATURES]
    if not 0 < config.num_layers < MAX_LAYERS:
        wrong.append("layers")
    if not wrong and config.num_heads % config.num_kv_heads:
        wrong.append("num_kv_heads")
    if config.num_tokens > config.vocab_size:
        wrong.append("num_tokens")
    for layer in config.layers:
        rope, window = layer.rope, layer.window
        if rope is not None and not (0 < rope.rotary_dim <= config.head_dim and rope.rotary_dim % 2 == 0):
            wrong.append("layers.rope.rotary_dim")
        if window is not None and not 0 < window < MAX_FEATURES:
            wrong.append("layers.window")
    ids = (*config.eos_token_ids, *(() if config.bos_token_id is None else (config.bos_token_id,)))
    if any(not 0 <= token < MAX_FEATURES for token in ids):
        wrong.append("eos_token_ids or bos_token_id")
    if wrong:
        raise CheckpointError(f"{path}: config has an impossible {wrong[0]}; the store is damaged: write it again")


def _checksum(checksums: Mapping[str, str], name: str) -> str | None:
    if checksums and name not in checksums:
        raise CheckpointError(f"{MANIFEST} has no checksum of {name[:80]}; the store is damaged: write it again")
    return checksums.get(name)


def _check_files(folder: pathlib.Path, files: Mapping[str, int], checksums: Mapping[str, str]) -> None:
    """The files that came with the model: all there, none longer or shorter than they were, or of other bytes."""
    for name, size in files.items():
        parts = pathlib.PurePosixPath(name).parts
        if not parts or parts[0] != ORIGINAL or ".." in parts or "\0" in name or "\\" in name:
            raise CheckpointError(f"{folder / MANIFEST} names the file {name[:80]!r}; the store is damaged")
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} has no {name}; the store is incomplete: copy or write it again")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, not the {size} that were written; "
                "the store is damaged: copy or write it again"
            )
        written = _checksum(checksums, name)
        if written is not None and checksum(file.read_bytes()) != written:
            raise CheckpointError(
                f"{file} has other bytes than were written (its checksum differs); "
                "the store is damaged: copy or write it again"
            )


def _weights(content: Any, config: ModelConfig, path: pathlib.Path) -> dict[str, dict[str, Described]]:
    """Every weight that the configuration asks for, and no other, each of its shape."""
    described = decode(dict[str, dict], content, f"{path}: weights")
    own_head = any("lm_head" in fields for fields in described.values())
    found: dict[str, dict[str, Described]] = {}
    expected = dict(piece_specs(config, own_head=own_head))
    if set(described) != set(expected):
        differing = sorted(set(described) ^ set(expected))[0]
        raise CheckpointError(f"{path}: the configuration and the weights differ in {differing[:40]}; write it again")
    for piece, specs in expected.items():
        fields = described[piece]
        if set(fields) != set(specs):
            differing = sorted(set(fields) ^ set(specs))[0]
            raise CheckpointError(
                f"{path}: the configuration and the weights of {piece} differ in {differing[:40]}; "
                "the store is damaged: write it again"
            )
        found[piece] = {name: parse(fields[name], spec, f"{path}: {piece}.{name}") for name, spec in specs.items()}
    return found


def device_name() -> str:
    """The device that the arrays were laid out for."""
    return jax.local_devices()[0].device_kind
