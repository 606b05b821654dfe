"""What other engines' decoders make of the folders that we export: that of compressed-tensors, and that of AutoAWQ.

They ran once, for tests/oracle/make_exports.py; the fixture has digests of what they read and of what came of it.
"""

import json
import pathlib

import export_cases
import numpy as np
import pytest

from jaxinfer.source import open_source

FIXTURE = json.loads((pathlib.Path(__file__).parent / "fixtures" / "exports.json").read_text())
REMEDY = "if that is meant, run tests/oracle/make_exports.py again"


def decoded(folder: pathlib.Path, module: str) -> np.ndarray:
    """A weight [out, in] in float32, as our reader of the format has it."""
    with open_source(folder, progress=False) as source, source.tensors() as (checkpoint, _):
        name = f"{module}.weight"
        out = np.empty(checkpoint.tensors[name].shape, np.float32)
        checkpoint.read_into(name, out)
        return out


@pytest.mark.parametrize("name", export_cases.CASES)
def test_other_decoders_read_what_we_write(name: str, tmp_path: pathlib.Path) -> None:
    """The same parts, to the bit, as the library read, and from them the same values, to the bit."""
    case, expected = export_cases.CASES[name], FIXTURE[name]
    folder = case.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    plain = settings["modules_to_not_convert" if case.format == "awq" else "ignore"]
    assert "lm_head" in plain  # also where it is the embedding: other engines build the module all the same
    assert config["tie_word_embeddings"] == (name.endswith("gguf, quantised"))
    parts = export_cases.modules(folder)
    assert set(parts) == set(expected)
    for module, own in parts.items():
        values = decoded(folder, module)
        assert export_cases.digest({"weight": values + 0.0}) == expected[module]["values"], f"{module}: {REMEDY}"
        assert export_cases.digest(own) == expected[module]["parts"], f"{module}: {REMEDY}"
        if case.plan is not None and "gguf" not in name:  # these have an exact form, which must have been found
            np.testing.assert_array_equal(values, decoded(tmp_path / "dense", module))
