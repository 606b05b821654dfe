"""The notebooks run from top to bottom, and are committed without outputs."""

import pathlib
import re

import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import jaxinfer
from benchmarks.pair_models import SHAPES, eight_bits, hugging_face_config, save, train_tokenizer
from checkpoints.errors import CheckpointError
from checkpoints.pull import pull
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.model import Model, load
from jaxinfer.params import random_params

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path: pathlib.Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


def test_quickstart_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        pull("smollm2-135m-instruct", progress=False)
    except CheckpointError as error:
        pytest.skip(f"the notebook needs SmolLM2-135M: {error}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    notebook = nbformat.read(FOLDER / "01_quickstart.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    sources = [cell.source for cell in notebook.cells]
    generated = printed[next(i for i, source in enumerate(sources) if source.startswith("outputs = "))]
    assert "Paris" in generated.splitlines()[0]
    top = printed[next(i for i, source in enumerate(sources) if "steps.prefill(" in source)]
    assert top.splitlines()[0].endswith(repr(" Paris"))


@pytest.fixture
def small_model(tmp_path: pathlib.Path) -> Model:
    """One layer with random weights, for any text; stored in 8 bits as `benchmarks.train_pair` stores a pair."""
    config = hugging_face_config(SHAPES["draft"])
    params = random_params(from_hugging_face(config), jnp.float32, seed=0)
    save(tmp_path / "model", config, params, train_tokenizer("One, two, three. The bridge was closed."), int8=True)
    model = load(tmp_path / "model", dtype=jnp.float32, progress=False)
    (layer,), (expected,) = model.params.layers, params.layers
    half_steps = eight_bits(np.asarray(expected.down))["weight_scale"].astype(np.float32) * 0.5
    assert (np.abs(np.asarray(layer.down) - np.asarray(expected.down)) <= half_steps * 1.01).all()
    return model


def test_faster_runs(small_model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in this process, on a small model in place of the real one; the trained pair is itself."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(jaxinfer, "load", lambda name: small_model if isinstance(name, str) else load(name))
    names: dict[str, object] = {}
    for cell in nbformat.read(FOLDER / "02_faster.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "02_faster.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "2 of 2 outputs are those without a draft" in printed
    assert "the text of the pair is the same" in printed
    assert re.search(r"^  \d accepted +\d+% #+$", printed, re.MULTILINE), "the histogram of the report"
    assert re.search(r"^speculation +accepted by position", printed, re.MULTILINE), "the engine's metrics"
    before, after = map(float, re.findall(r"([\d.]+) MB on the device, ([\d.]+) MB", printed)[0])
    assert after < before
