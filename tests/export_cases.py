"""Small models, and the folders that `convert` makes of them for other engines.

    python tests/export_cases.py FOLDER    # FOLDER/<case>, for tests/oracle/make_exports.py

Codes must be the same wherever they are made, since what a format's own library decodes from them is a fixture. So
weights that are quantised here are ones that have an exact form: any search for the best codes must find it.
"""

import dataclasses
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Literal

import gguf
import gguf_conversion
import gguf_files
import gguf_models
import ml_dtypes
import numpy as np
import quantized_checkpoints

from checkpoints.safetensors import SafetensorsFolder
from jaxinfer.quantization.plan import Plan, Precision, Rule, uniform
from jaxinfer.store.create import create
from jaxinfer.store.export import export

GROUP = 16
ASYMMETRIC, SYMMETRIC = Precision(4, GROUP), Precision(4, GROUP, symmetric=True)
MIXED = Plan(
    (
        Rule(("*.o_proj",), Precision(16)),
        Rule(("*.v_proj",), Precision(8)),
        Rule(("*.down_proj",), Precision(8, method="fp8")),
        Rule(("*.gate_proj", "*.up_proj"), SYMMETRIC),
        Rule(("*",), ASYMMETRIC),
    ),
    "mixed",
)


@dataclasses.dataclass(frozen=True)
class ExportCase:
    """A model of `source`, quantised by `plan` if there is one, for other engines."""

    source: Callable[[pathlib.Path], pathlib.Path]
    format: Literal["awq", "compressed-tensors"]
    plan: Plan | None = None

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """The exported folder, below `folder`, which must be there and be empty."""
        source = self.source(folder)
        if self.plan is not None:
            source = create(source, folder / "store", plan=self.plan)
        return export(source, folder / "out", format=self.format, progress=False)


def four_bits(rng: np.random.Generator, out: int, inputs: int) -> np.ndarray:
    """Every group of 16 has the codes 0 and 15, a zero between them, and a power of two as its scale."""
    codes = rng.integers(0, 16, (out, inputs // GROUP, GROUP))
    codes[..., 0], codes[..., 1] = 0, 15
    zeros = rng.integers(1, 15, (out, inputs // GROUP, 1))
    scales = 2.0 ** rng.integers(-7, -4, zeros.shape)
    return ((codes - zeros) * scales).reshape(out, inputs).astype(np.float32)


def symmetric(rng: np.random.Generator, out: int, inputs: int) -> np.ndarray:
    """Whole numbers from -7, which every group has, to 7."""
    codes = rng.integers(-7, 8, (out, inputs))
    codes[:, ::GROUP] = -7
    return (codes / 64).astype(np.float32)


def eight_bits(rng: np.random.Generator, out: int, inputs: int) -> np.ndarray:
    codes = rng.integers(-127, 128, (out, inputs))
    codes[:, 0] = 127
    return (codes / 512).astype(np.float32)


def small_floats(rng: np.random.Generator, out: int, inputs: int) -> np.ndarray:
    values = rng.normal(0, 50, (out, inputs)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values[:, 0] = 448  # the format's largest
    return values / 1024


def exact_for(precision: Precision | None) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    """Makes weights that a precision has an exact form for."""
    if precision is None or precision.bits == 4:
        return symmetric if precision is not None and precision.symmetric else four_bits
    return small_floats if precision.method == "fp8" else eight_bits


def dense(folder: pathlib.Path, plan: Plan) -> pathlib.Path:
    """A llama in float32 whose weights the plan's precisions have exactly."""
    rng = np.random.default_rng(0)
    tensors = dict(quantized_checkpoints.plain_tensors(rng))
    for module, (out, inputs) in quantized_checkpoints.LINEAR.items():
        precision = plan.precision(f"layers.0.{module.split('.')[1]}")
        tensors[f"model.layers.0.{module}.weight"] = exact_for(precision)(rng, out, inputs)
    path = folder / "dense"
    quantized_checkpoints.write(path, tensors, quantized_checkpoints.CONFIG)
    return path


def quantised(kind: str) -> Callable[[pathlib.Path], pathlib.Path]:
    """A checkpoint of one of the formats that we read."""
    return lambda folder: quantized_checkpoints.make(kind, folder).quantized


type Tensor = np.ndarray | gguf_files.Packed


def gguf_file(
    path: pathlib.Path, weight: Callable[[str, tuple[int, ...]], Tensor], *, tied: bool = False
) -> pathlib.Path:
    """A llama whose linear weights are those of `weight`, asked in order by name, such as attn_q."""
    config = quantized_checkpoints.CONFIG
    model = gguf_models.gguf_model(
        "llama", layers=1, hidden=config["hidden_size"], ff=config["intermediate_size"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], context=64,
        vocab=config["vocab_size"], output=not tied, tokenizer__ggml__eos_token_id=3,
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, info in model.tensors.items():
        linear = len(info.shape) == 2 and name.startswith("blk.")
        tensors[name] = weight(name.split(".")[2], info.shape) if linear else np.ones(info.shape, np.float32)
    return gguf_files.write(path, model.metadata, tensors)


def gguf_of_floats(folder: pathlib.Path) -> pathlib.Path:
    """As llama.cpp converts them: rows of q and k in its own order. The head is the embedding."""
    config, rng = quantized_checkpoints.CONFIG, np.random.default_rng(0)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        projection = f"layers.0.{name.removeprefix('attn_')}_proj.weight"
        return gguf_conversion.converted(four_bits(rng, *shape), projection, gguf.MODEL_ARCH.LLAMA, config)

    return gguf_file(folder / "m.gguf", weight, tied=True)


def gguf_of_codes(*kinds: str) -> Callable[[pathlib.Path], pathlib.Path]:
    """Random blocks, the types in turns."""

    def write(folder: pathlib.Path) -> pathlib.Path:
        rng, turns = np.random.default_rng(0), itertools.cycle(kinds)
        return gguf_file(folder / "m.gguf", lambda _, shape: gguf_files.packed(rng, next(turns), *shape))

    return write


CASES = {
    "awq of gguf codes": ExportCase(gguf_of_codes("Q4_0"), "awq"),
    "awq of gguf, quantised": ExportCase(gguf_of_floats, "awq", uniform("int4", ASYMMETRIC)),
    "awq of gptq": ExportCase(quantised("gptq"), "awq"),
    "awq of safetensors, quantised": ExportCase(
        lambda folder: dense(folder, uniform("int4", ASYMMETRIC)), "awq", uniform("int4", ASYMMETRIC)
    ),
    "compressed-tensors of gguf codes": ExportCase(gguf_of_codes("Q4_0", "Q8_0"), "compressed-tensors"),
    "compressed-tensors of gguf, quantised": ExportCase(
        gguf_of_floats, "compressed-tensors", uniform("int4", ASYMMETRIC)
    ),
    "compressed-tensors of gptq": ExportCase(quantised("gptq"), "compressed-tensors"),
    "compressed-tensors of fp8 blocks": ExportCase(quantised("fp8 whole blocks"), "compressed-tensors"),
    "compressed-tensors of safetensors, quantised": ExportCase(
        lambda folder: dense(folder, MIXED), "compressed-tensors", MIXED
    ),
}


def modules(folder: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """The parts of each quantised module of a folder, by module."""
    opened = SafetensorsFolder(folder)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in opened.tensors:
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = opened.read(name)
    return {module: parts for module, parts in found.items() if len(parts) > 1}


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {list(array.shape)}\n".encode() + array.tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    for name, case in CASES.items():
        place = pathlib.Path(sys.argv[1]) / name
        place.mkdir(parents=True)
        print(case.write(place))
