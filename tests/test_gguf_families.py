"""Every family through a GGUF file: the logits that transformers computes from the original checkpoint."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import families
import gguf_conversion
import numpy as np
import pytest

import jaxinfer.model
from jaxinfer.generation import logits

CASES = [case for case in families.CASES if case.name not in gguf_conversion.NOT_IN_GGUF]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[families.FamilyCase], pathlib.Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return functools.cache(lambda case: gguf_conversion.convert(case, folder / f"{case.name}.gguf"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_transformers(
    case: families.FamilyCase, converted: Callable[[families.FamilyCase], pathlib.Path]
) -> None:
    model = jaxinfer.model.load(converted(case), dtype="float32", progress=False)
    if case.model_type == "smollm3":
        # GGUF means every fourth layer has no positions; this case has them in the fourth and not in the second.
        assert [layer.rope is None for layer in model.config.layers] == [False, False, False, True]
        with_rope, without = model.config.layers[0], model.config.layers[3]
        layers = (with_rope, without, with_rope, with_rope)
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers))
    actual = np.asarray(logits(model, case.tokens))
    assert np.linalg.norm(actual - case.logits) <= 2e-4 * np.linalg.norm(case.logits)
    np.testing.assert_allclose(actual, case.logits, atol=2e-3, rtol=0)
