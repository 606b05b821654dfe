"""What a folder says of its quantised weights: `quantization_config` in config.json, or a file of the quantiser's own,
ModelOpt's hf_quant_config.json and AutoGPTQ's quantize_config.json.

The tensors decide which weights are quantised and how (`quantized.py`); the configuration tells what shapes cannot:
bits and group size, whether zeros are symmetric, the layout's version. It is also where formats that are recognised
but not supported are refused, by name.
"""

import dataclasses
import fnmatch
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from checkpoints.errors import CheckpointError

ORIGINAL = "use the original checkpoint, or a GGUF, AWQ or GPTQ file of the model"

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", "modelopt", "hqq")
"""Values of `quant_method` that are read."""

_AWQ_VERSIONS = ("gemm", "gemv")
_GPTQ_VERSIONS: dict[str, Literal[1, 2]] = {"gptq": 1, "gptq_v2": 2}
_GPTQ_FORMAT_KEYS = ("checkpoint_format", "format")
_COMPRESSED_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_SCATTERED_ORDERS = ("group", "dynamic", "true")
"""Values of compressed-tensors' actorder; "weight" and "static" leave the inputs of a group side by side."""
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")

_show = reprlib.Repr(maxstring=80, maxother=80, maxlist=4, maxdict=4, maxlevel=2).repr


@dataclasses.dataclass(frozen=True)
class WeightSettings:
    """What the configuration says of one weight; None is nothing. `group_size` -1 is one group for all inputs.

    `scattered`: the inputs of a group do not lie side by side, so that only a tensor can tell which group one is of.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    block: tuple[int, int] | None = None
    scattered: bool = False


class Announcement:
    """A quantisation configuration. `where` names its file in messages.

    Raises CheckpointError for a method, or a version of one, that is not read.
    """

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._settings = settings
        method = settings.get("quant_method", settings.get("quant_algo"))
        self.method = self._method(method)
        self._refuse_unknown_layouts()
        self._ignored = tuple(self._ignore_patterns())

    def ignores(self, module: str) -> bool:
        """Whether a list of exceptions names a module (`model.layers.0.mlp.gate`), or one that it is inside of."""
        return any(_matches(pattern, module) for pattern in self._ignored)

    def weight(self, module: str) -> WeightSettings:
        """The settings of a module's weight."""
        match self.method:
            case "compressed-tensors":
                return self._compressed_weight(module)
            case "awq":
                return self._grouped_weight(self._settings)
            case "gptq":
                return self._gptq_weight(module)
            case "fp8":
                return WeightSettings(block=self._block(self._settings.get("weight_block_size")))
        return WeightSettings()

    @property
    def gptq_version(self) -> Literal[1, 2]:
        """How GPTQ's zeros are stored: 1 is less one, also where nothing is said."""
        return _GPTQ_VERSIONS.get(self._gptq_format, 1)

    @property
    def _gptq_format(self) -> str:
        """`checkpoint_format`, which GPTQModel also writes as `format`."""
        said = {str(self._settings[key]).lower() for key in _GPTQ_FORMAT_KEYS if self._settings.get(key)} or {"gptq"}
        if len(said) > 1:
            raise CheckpointError(
                f"{self.where}: quantization_config has format {_show(self._settings['format'])} and checkpoint_format "
                f"{_show(self._settings['checkpoint_format'])}; remove the one that is wrong"
            )
        return said.pop()

    def _method(self, method: Any) -> str:
        if isinstance(method, str):
            if method in _MODELOPT_ALGORITHMS or method.startswith("modelopt"):
                return "modelopt"
            normal = method.lower().replace("_", "-")
            if normal == "compressed-tensors" or method in METHODS:
                return "compressed-tensors" if normal == "compressed-tensors" else method
            if normal == "fbgemm-fp8":
                return "fbgemm_fp8"
        if method is None and "config_groups" in self._settings:
            return "compressed-tensors"
        raise self._refusal(f"quantization_config {_show(method)}")

    def _refuse_unknown_layouts(self) -> None:
        settings = self._settings
        match self.method:
            case "awq":
                version = str(settings.get("version") or "gemm").lower()
                if version not in _AWQ_VERSIONS:
                    raise self._refusal(f"AWQ version {_show(version)}")
            case "gptq":
                if self._gptq_format not in _GPTQ_VERSIONS or settings.get("is_marlin_format"):
                    raise self._refusal(f"GPTQ checkpoint_format {_show(self._gptq_format)}")
            case "compressed-tensors":
                groups = settings.get("config_groups")
                groups = list(groups.values()) if isinstance(groups, Mapping) else []
                formats = [settings.get("format"), *(g.get("format") for g in groups if isinstance(g, Mapping))]
                for name in formats:
                    if name is not None and str(name) not in _COMPRESSED_FORMATS:
                        raise self._refusal(f"compressed-tensors format {_show(name)}")
                sparsity = settings.get("sparsity_config")
                if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
                    raise self._refusal(f"compressed-tensors with sparsity format {_show(sparsity.get('format'))}")
                transforms = settings.get("transform_config")
                if isinstance(transforms, Mapping) and transforms.get("config_groups"):
                    raise self._refusal("compressed-tensors with transforms of activations (transform_config)")
            case "bitsandbytes":
                if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
                    raise self._refusal("bitsandbytes in 8 bits")
            case "modelopt":
                algorithm = settings.get("quant_algo")
                if algorithm is not None and str(algorithm) not in _MODELOPT_ALGORITHMS:
                    raise self._refusal(f"ModelOpt quant_algo {_show(algorithm)}")

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {what} is not supported; {ORIGINAL} (supported are {', '.join(METHODS)})"
        )

    def _ignore_patterns(self) -> Iterator[str]:
        keys = (
            "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "skip_modules",
            "llm_int8_skip_modules",
        )  # fmt: skip
        for key in keys:
            patterns = self._settings.get(key)
            if isinstance(patterns, list):
                yield from (pattern for pattern in patterns if isinstance(pattern, str))
        dynamic = self._settings.get("dynamic")
        if isinstance(dynamic, Mapping):
            yield from ("re:" + pattern[2:] for pattern in dynamic if pattern.startswith("-:"))

    def _grouped_weight(self, settings: Mapping[str, Any]) -> WeightSettings:
        """AWQ's and GPTQ's settings. With act-order the inputs of a group are scattered, unless groups are static."""
        key = "group_size" if "group_size" in settings else "q_group_size"
        bits, group_size, symmetric = self._integer("bits", settings), self._integer(key, settings), settings.get("sym")
        return WeightSettings(
            bits,
            group_size,
            symmetric if isinstance(symmetric, bool) else None,
            scattered=settings.get("desc_act") is True and settings.get("static_groups") is not True,
        )

    def _gptq_weight(self, module: str) -> WeightSettings:
        """GPTQ's settings, with those in their place that the first pattern of `dynamic` for the module has.

        Bits are then read off the shapes, and also the group size of a module that is quantised though excepted.
        """
        dynamic = self._settings.get("dynamic")
        if not isinstance(dynamic, Mapping) or not dynamic:
            return self._grouped_weight(self._settings)
        settings = self._settings
        for pattern, overrides in dynamic.items():
            if _matches("re:" + pattern.removeprefix("+:").removeprefix("-:"), module):
                if pattern.startswith("-:"):
                    return dataclasses.replace(self._grouped_weight(settings), bits=None, group_size=None)
                settings = {**settings, **(overrides if isinstance(overrides, Mapping) else {})}
                break
        return dataclasses.replace(self._grouped_weight(settings), bits=None)

    def _compressed_weight(self, module: str) -> WeightSettings:
        groups = self._settings.get("config_groups")
        if self.ignores(module) or not isinstance(groups, Mapping):
            return WeightSettings()
        for group in _targeting(module, groups.values()):
            weights = group.get("weights")
            if not isinstance(weights, Mapping):
                continue
            grouped = weights.get("strategy") in (None, "group", "tensor_group")
            return WeightSettings(
                bits=self._integer("num_bits", weights),
                group_size=self._integer("group_size", weights) if grouped else None,
                symmetric=weights.get("symmetric") is not False,
                block=self._block(weights.get("block_structure")),
                scattered=str(weights.get("actorder")).lower() in _SCATTERED_ORDERS,
            )
        return WeightSettings()

    def _integer(self, key: str, settings: Mapping[str, Any] | None = None) -> int | None:
        value = (self._settings if settings is None else settings).get(key)
        if value is not None and type(value) is not int:
            raise CheckpointError(
                f"{self.where}: quantization_config has {key} {_show(value)}, expected a whole number; "
                "download the file again"
            )
        return value

    def _block(self, value: Any) -> tuple[int, int] | None:
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value):
            return value[0], value[1]
        raise CheckpointError(
            f"{self.where}: quantization_config has blocks of {_show(value)}, expected two whole numbers; "
            "download the file again"
        )


CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json")

type File = tuple[str, Mapping[str, Any]]
"""How messages call a file, and the object in it."""


def find_announcement(config_file: File, modelopt_file: File, gptq_file: File) -> Announcement | None:
    """The configuration in config.json, also inside text_config, or in one of the other two of `CONFIG_FILES`.

    GPTQ's own file adds what config.json leaves out.
    """
    where, config = config_file
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            for key in ("quantization_config", "compression_config"):
                settings = part.get(key)
                if isinstance(settings, Mapping):
                    gptq = settings.get("quant_method") == "gptq"
                    return Announcement(_completed(settings, gptq_file[1]) if gptq else settings, where)
                if settings is not None:
                    raise CheckpointError(f"{where}: {key} is {_show(settings)}, expected an object; {ORIGINAL}")
    settings = modelopt_file[1].get("quantization")
    if isinstance(settings, Mapping):
        return Announcement(settings, modelopt_file[0])
    where, settings = gptq_file
    # Other tools' files of this name, which say nothing of a checkpoint, have no bits.
    if "bits" in settings and settings.get("quant_method") in (None, "gptq"):
        return Announcement({**settings, "quant_method": "gptq"}, where)
    return None


def _completed(settings: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """GPTQ's settings in config.json, which are the ones that count, with those of its own file that it lacks."""
    said = {key: value for key, value in settings.items() if value is not None}
    if not said.keys().isdisjoint(_GPTQ_FORMAT_KEYS):
        other = {key: value for key, value in other.items() if key not in _GPTQ_FORMAT_KEYS}
    return {**other, **said}


def _targeting(module: str, groups: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """The groups whose targets name a module, those that name it itself before those that name its class."""
    by_class = []
    for group in groups:
        targets = group.get("targets") if isinstance(group, Mapping) else None
        names = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
        if any(_matches(name, module) for name in names):
            yield group
        elif "Linear" in names:
            by_class.append(group)
    yield from by_class


MAX_REPETITIONS = 4
"""`*`, `+` and `{` in a regular expression: a module's name is tried in as many nested loops."""
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
_REPETITION = re.compile(r"(?<!\\)[*+{]")


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern is a module's name, a part of it, or that of one around it, with or without prefixes.

    `re:` starts a regular expression, `*` stands for anything. A list for a multimodal model names
    `model.language_model.layers...` where the tensors are `model.layers...`, and the other way round.
    """
    names = {module, _without_prefix(module)}
    if pattern.startswith("re:"):
        if _REPEATED_GROUP.search(pattern) or len(_REPETITION.findall(pattern)) > MAX_REPETITIONS:
            raise CheckpointError(
                f"quantization_config has the pattern {reprlib.repr(pattern)}, which repeats a group or has more than "
                f"{MAX_REPETITIONS} repetitions: matching it could take for ever; write it without them"
            )
        try:
            expression = re.compile(pattern[3:])
        except (re.error, RecursionError, OverflowError):
            return False
        spellings = names | {prefix + _without_prefix(module) for prefix in _PREFIXES}
        return any(expression.match(name) for name in spellings)
    pattern = _without_prefix(pattern.removesuffix(".weight"))
    if "*" in pattern:
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    return bool(pattern) and f".{pattern}." in f".{_without_prefix(module)}."


_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
