"""Writes `tests/fixtures/exports.json`: what the formats' own libraries decode from the folders that we export.

    python tests/export_cases.py FOLDER            # where jaxinfer is installed
    python tests/oracle/make_exports.py FOLDER     # where torch and the libraries are

The libraries: transformers 5.17, compressed-tensors 0.20, AutoAWQ 0.2.9.

For each case and quantised module, SHA-256 of the parts that were read and of the float32 weight [out, in] that came of
them: by transformers with compressed-tensors, from the folder alone, config.json included; by AutoAWQ's
`dequantize_gemm` with the group size of config.json. Scales are widened to float32 first, so that nothing is rounded.
"""

import hashlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures" / "exports.json"


def autoawq_packing():
    """A file of AutoAWQ by itself: importing the package needs a GPU."""
    root = pathlib.Path(importlib.util.find_spec("transformers").submodule_search_locations[0]).parent
    spec = importlib.util.spec_from_file_location("packing_utils", root / "awq" / "utils" / "packing_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts_of(folder: pathlib.Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each quantised module."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            for name in names:
                module, _, part = name.rpartition(".")
                found.setdefault(module, {})[part] = file.get_tensor(name)
    return {module: parts for module, parts in found.items() if len(parts) > 1}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """As `export_cases.digest` has it."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        described = str(tensor.dtype).removeprefix("torch.")
        stored = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        total.update(f"{name} {described} {list(tensor.shape)}\n".encode() + stored)
    return total.hexdigest()


def awq_values(folder: pathlib.Path, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    decode = autoawq_packing().dequantize_gemm
    found = {}
    for name, own in parts.items():
        group = settings["group_size"] if settings["group_size"] > 0 else own["qweight"].shape[0]
        values = decode(own["qweight"], own["qzeros"], own["scales"].float(), settings["bits"], group)
        found[name] = values.T.contiguous()
    return found


def compressed_tensors_values(folder: pathlib.Path, modules: Mapping[str, object]) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(torch.arange(3, 19)[None, :])  # the first call decodes
    return {name: model.get_submodule(name).weight.detach() for name in modules}


def main(root: pathlib.Path) -> None:
    fixture = {}
    for place in sorted(root.iterdir()):
        folder = place / "out"
        parts = parts_of(folder)
        values = (awq_values if place.name.startswith("awq") else compressed_tensors_values)(folder, parts)
        for name, value in values.items():
            assert value.dtype == torch.float32 and np.isfinite(value.numpy()).all(), name
        fixture[place.name] = {
            name: {"parts": digest(own), "values": digest({"weight": values[name] + 0.0})}
            for name, own in parts.items()
        }
        print(place.name, len(parts))
    FIXTURE.write_text(json.dumps(fixture, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
