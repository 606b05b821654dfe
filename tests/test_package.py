"""The package's public names, which are imported when first used."""

import ast
import asyncio
import importlib
import importlib.metadata
import inspect
import pathlib
import threading
import tomllib
from collections.abc import Callable

import markov
import pytest

import jaxinfer as ji

SOURCE = pathlib.Path(ji.__file__)
GREEDY = ji.SamplingParams(max_tokens=8, temperature=0.0)


def names_for_type_checkers() -> dict[str, str]:
    """Name to module of the imports below `if TYPE_CHECKING`."""
    blocks = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_names_at_run_time_are_those_for_type_checkers() -> None:
    assert names_for_type_checkers() == ji._MODULES
    for name, module in ji._MODULES.items():
        assert getattr(ji, name) is getattr(importlib.import_module(module), name)
    assert {name for name in dir(ji) if not name.startswith("_")} == set(ji._MODULES) == set(ji.__all__)
    assert "__version__" in dir(ji)
    with pytest.raises(AttributeError, match="module 'jaxinfer' has no attribute 'genrate'"):
        ji.genrate  # noqa: B018  # the access is what is tested


def test_the_version_is_that_of_the_distribution() -> None:
    """One place has it: the package, which the build reads."""
    assert ji.__version__ == importlib.metadata.version("jaxinfer")
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "jaxinfer/__init__.py"


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in SOURCE.parent.iterdir()}
    assert not modules & set(ji._MODULES)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: inspect.unwrap(ji.generate)(model, ["x"]),
        lambda model: inspect.unwrap(ji.stream)(model, ["x"]),
        lambda model: inspect.unwrap(ji.logits)(model, [[1]]),
        lambda model: inspect.unwrap(ji.score)(model, "x", "y"),
        lambda model: inspect.unwrap(ji.perplexity)(model, "x y"),
        lambda model: inspect.unwrap(ji.Engine.__init__)(object.__new__(ji.Engine), model),
    ],
)
def test_a_name_in_place_of_a_model_is_told_how_to_be_one(use: Callable[[object], object]) -> None:
    """Without the tests' own checks of types, which would be first."""
    with pytest.raises(ValueError, match=r"model='some/name' is no loaded model; give jaxinfer\.load\('some/name'\)"):
        use("some/name")
    with pytest.raises(ValueError, match=r"model=None is no loaded model; give what jaxinfer\.load returns"):
        use(None)


def test_generate_and_stream_inside_an_event_loop_and_a_thread() -> None:
    """As in a notebook cell, where a loop is running already."""
    model = markov.model(markov.chain(0, 1, 2, 3, markov.EOS))

    async def cell() -> tuple[str | None, str]:
        (output,) = ji.generate(model, "A", GREEDY)
        return output.text, "".join(delta.text for delta in ji.stream(model, "A", GREEDY))

    assert asyncio.run(cell()) == ("BCDEFG", "BCDEFG")
    said = []
    thread = threading.Thread(target=lambda: said.append(ji.generate(model, "A", GREEDY)[0].text))
    thread.start()
    thread.join()
    assert said == ["BCDEFG"]


@pytest.mark.parametrize("path", sorted((SOURCE.parent.parent / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_can_be_imported(path: pathlib.Path) -> None:
    """They run on a GPU only now and then; what they import changes meanwhile."""
    importlib.import_module(f"benchmarks.{path.stem}")


def test_the_script_of_gpu_measurements_names_benchmarks_that_exist() -> None:
    folder = SOURCE.parent.parent / "benchmarks"
    steps = [line.split() for line in (folder / "run_gpu.sh").read_text().splitlines() if line.startswith("step ")]
    assert len(steps) > 10
    for _, limit, module, *_ in steps:
        assert limit.isdigit()
        assert (folder.parent / f"{module.replace('.', '/')}.py").is_file(), module
