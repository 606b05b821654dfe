"""The notebooks run from top to bottom, and are committed without outputs."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

from checkpoints.errors import CheckpointError
from checkpoints.pull import pull

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
