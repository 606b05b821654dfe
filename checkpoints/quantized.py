"""A Hugging Face folder with quantised weights, as a checkpoint with one tensor for each weight.

A quantised weight is several tensors of the file (`q_proj.qweight`, `q_proj.scales`, ...). Here they are one, named
`q_proj.weight` and of its real shape, so that names, shapes and completeness are checked as for any checkpoint: a
part that belongs to nothing stays a tensor of its own, which no parameter uses, which is an error. Which weights are
quantised and how is read off the tensors; see `quantized_config.py` for what the configuration adds.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import QuantizedTensor
from checkpoints.formats.fp8 import FLOAT8_DTYPES
from checkpoints.quantized_config import CONFIG_FILES, ORIGINAL, Announcement, find_announcement
from checkpoints.quantized_recipes import RECIPES, Context, Opened
from checkpoints.safetensors import SafetensorsFolder, read_json
from checkpoints.safetensors_file import DTYPES
from checkpoints.tensors import TensorInfo

_INT8_SCALE = "SCB"  # of bitsandbytes in 8 bits
_PART_NAMES = frozenset(
    part for recipe in RECIPES for part in (recipe.anchor, *recipe.required, *recipe.optional, *recipe.ignored)
) | {_INT8_SCALE}
_CACHE_SCALE = re.compile(r"\.(k|v|q|prob)_scale$|\.(k|v)_proj\.output_scale$")


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A quantised weight and the tensors of its parts."""

    info: TensorInfo
    parts: Mapping[str, str]
    opened: Opened


class _HeadersOnly:
    """A folder whose matrices are zeros: memory that is never written to is never taken, so they cost nothing."""

    def __init__(self, folder: "SafetensorsFolder | _HeadersOnly") -> None:
        self._folder = folder
        self.tensors, self.ignored = folder.tensors, folder.ignored

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self.tensors[name]
        if len(info.shape) < 2 or rows is not None or info.dtype not in DTYPES:
            return self._folder.read(name, rows)
        return np.zeros(info.shape, DTYPES[info.dtype])

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Leaves `out` as it is: a plain tensor of a folder without data has none."""

    def close(self) -> None:
        self._folder.close()


class QuantizedFolder:
    """Reads the weights of a folder, decoded (`read`, `read_into`) or as codes (`quantized`).

    Raises CheckpointError for a format that is not read and for parts that do not fit each other, naming the weight.
    Only shapes are checked when opening; nothing large is read. `skipped` are tensors that have no part in the
    weights, and why; `notes` say where the configuration and the tensors disagree on what is quantised.
    """

    def __init__(self, folder: "SafetensorsFolder | _HeadersOnly", announcement: Announcement | None) -> None:
        self._folder = folder
        self._announcement = announcement
        self._weights: dict[str, _Weight] = {}
        self._last: tuple[str, QuantizedTensor] | None = None
        self.skipped: dict[str, str] = {}
        tensors = dict(folder.tensors)
        for module, parts in _by_module(folder.tensors).items():
            found = self._recognise(module, parts)
            if found is None:
                continue
            weight, ignored = found
            for name in weight.parts.values():
                del tensors[name]
            self.skipped |= {parts[part].name: "scale of an activation, which is not quantised" for part in ignored}
            self._weights[weight.info.name] = weight
            tensors[weight.info.name] = weight.info
        self.skipped |= {name: "scale of a quantised cache" for name in tensors if _CACHE_SCALE.search(name)}
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.notes = tuple(self._disagreements()) if announcement is not None else ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Files of the folder that are not read."""
        return self._folder.ignored

    def code_bits(self, name: str) -> int | None:
        """The width of a weight's codes, 4 or 8; None for a tensor that is not quantised."""
        weight = self._weights.get(name)
        return None if weight is None else weight.opened.code_bits

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The codes of a weight, None for a tensor that is not quantised. Its parts stay in memory until `release`,
        or until another one is asked for."""
        weight = self._weights.get(name)
        if weight is None:
            return None
        if self._last is None or self._last[0] != name:
            self._last = None
            arrays = {part: self._folder.read(tensor) for part, tensor in weight.parts.items()}
            self._last = name, weight.opened.decode(arrays)
        return self._last[1]

    def release(self, name: str) -> None:
        """Forgets the parts of a weight."""
        if self._last is not None and self._last[0] == name:
            self._last = None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A fresh array of a tensor or of a range of its rows: float32 if it is quantised, else in its dtype."""
        tensor = self.quantized(name)
        if tensor is None:
            return self._folder.read(name, rows)
        start, stop = _bounds(name, rows, tensor.shape[0])
        out = np.empty((stop - start, tensor.shape[1]), np.float32)
        tensor.read_into(out, start, stop)
        return out

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        """Reads a tensor or a range of its rows into `out`, which has that shape and any floating dtype."""
        tensor = self.quantized(name)
        if tensor is None:
            self._folder.read_into(name, out, rows)
            return
        start, stop = _bounds(name, rows, tensor.shape[0])
        if out.shape != (stop - start, tensor.shape[1]):
            raise ValueError(f"{name}: rows {start}:{stop} of {tensor.shape} do not fit an array of {out.shape}")
        try:
            tensor.read_into(out, start, stop)
        except OverflowError:
            raise CheckpointError(f"{name} has values beyond float16's 65504; use bfloat16 or float32") from None

    def zero_biases(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the tensors that are biases of quantised weights and zero: older GPTQ files have them everywhere."""
        return {
            name: "a bias of zeros that the model does not have"
            for name in names
            if name.endswith(".bias")
            and (weight := self._weights.get(name.removesuffix("bias") + "weight")) is not None
            and self.tensors[name].shape == weight.info.shape[:1]  # of any other size it is none, and may be huge
            and not self._folder.read(name).any()
        }

    def without_data(self) -> "QuantizedFolder":
        """The same weights with matrices that read as zeros: `quantized` then tells of what kind a weight's codes are
        and nothing large is read. Vectors, such as GPTQ's order of the inputs, are read; closing this closes both."""
        return QuantizedFolder(_HeadersOnly(self._folder), self._announcement)

    def close(self) -> None:
        self._last = None
        self._folder.close()

    def _recognise(self, module: str, parts: Mapping[str, TensorInfo]) -> tuple[_Weight, Sequence[str]] | None:
        """The weight that a module's tensors make up and the parts it has no use for; None if it is not quantised."""
        weight_name = f"{module}.weight" if module else "weight"
        if _INT8_SCALE in parts:
            raise CheckpointError(f"{weight_name}: bitsandbytes in 8 bits is not supported; {ORIGINAL}")
        for recipe in RECIPES:
            anchor = parts.get(recipe.anchor)
            if anchor is None or (recipe.dtypes is not None and anchor.dtype not in recipe.dtypes):
                continue
            missing = [part for part in recipe.required if part not in parts]
            if missing and recipe.anchor == "weight":
                continue  # no scale: a plain tensor, if not of float8
            if missing:
                raise CheckpointError(
                    f"{weight_name}: has {anchor.name} but no {' and no '.join(missing)}, which {recipe.name} needs; "
                    "files are incomplete: download all of them again from one place"
                )
            used = [recipe.anchor, *recipe.required, *(part for part in recipe.optional if part in parts)]
            infos = {part: parts[part] for part in used}
            opened = recipe.open(infos, Context(weight_name, module, self._announcement, self._folder.read))
            info = TensorInfo(weight_name, opened.shape, recipe.name, sum(part.nbytes for part in infos.values()))
            names = {part: part_info.name for part, part_info in infos.items()}
            return _Weight(info, names, opened), [part for part in recipe.ignored if part in parts]
        plain = parts.get("weight")
        if plain is not None and plain.dtype in FLOAT8_DTYPES:
            raise CheckpointError(
                f"{weight_name}: is {plain.dtype} and has no weight_scale and no weight_scale_inv, without which its "
                "codes are no weights; files are incomplete: download all of them again from one place"
            )
        return None

    def _disagreements(self) -> Sequence[str]:
        """Lines on weights that the configuration calls quantised and are not, or the other way round."""
        announcement = self._announcement
        assert announcement is not None
        modules = {name: name.removesuffix(".weight") for name in self.tensors if name.endswith("_proj.weight")}
        plain = [n for n, module in modules.items() if n not in self._weights and not announcement.ignores(module)]
        against = [name for name in self._weights if announcement.ignores(name.removesuffix(".weight"))]
        lines = []
        if plain:
            lines.append(f"{len(plain)} weights are not quantised, though it does not except them, such as {plain[0]}")
        if against:
            lines.append(f"{len(against)} weights are quantised, though it excepts them, such as {against[0]}")
        return [f"{announcement.where}: {line}; they are read as they are stored" for line in lines]


def open_folder(path: str | os.PathLike[str]) -> SafetensorsFolder | QuantizedFolder:
    """The weights of a model folder, quantised or not, as its configuration or its tensors say.

    Raises CheckpointError for a folder that is not sound and for a quantisation that is not read, naming it.
    """
    folder = pathlib.Path(path)
    config, modelopt, gptq = (
        (str(folder / name), read_json(folder, name, optional=name != "config.json")) for name in CONFIG_FILES
    )
    announcement = find_announcement(config, modelopt, gptq)
    opened = SafetensorsFolder(folder)
    if announcement is None and not _has_quantized_parts(opened.tensors):
        return opened
    return QuantizedFolder(opened, announcement)


def _has_quantized_parts(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether there are tensors that only a quantised format has, whatever the configuration says."""
    names = {part for parts in _by_module(tensors).values() for part in parts}
    anchors = {recipe.anchor for recipe in RECIPES if recipe.anchor != "weight"} | {_INT8_SCALE, "weight_scale"}
    return not names.isdisjoint(anchors)


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each module by the part of a weight that they may be: `a.q_proj.weight.absmax` of `a.q_proj`."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        pieces = name.split(".")
        for count in (3, 2, 1):
            part = ".".join(pieces[-count:])
            if part in _PART_NAMES and len(pieces) > count:
                modules.setdefault(".".join(pieces[:-count]), {})[part] = info
                break
    return modules


def _bounds(name: str, rows: slice | None, count: int) -> tuple[int, int]:
    start, stop = (0, count) if rows is None else (rows.start or 0, count if rows.stop is None else rows.stop)
    if not 0 <= start <= stop <= count or (rows is not None and rows.step not in (None, 1)):
        raise ValueError(f"{name} has {count} rows, which do not contain {rows}")
    return start, stop
