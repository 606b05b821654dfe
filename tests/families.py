"""Reads the tiny checkpoints of `tests/fixtures/families`, which `tests/oracle/make_families.py` wrote.

@pytest.mark.parametrize("case", families.CASES, ids=str)
def test_logits(case: families.FamilyCase) -> None:
    case.folder, case.config, case.tokens, case.logits, case.prompt, case.continuation, ...
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "families"


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """A checkpoint folder and what transformers computes with it, teacher forced and greedily, in float32."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def folder(self) -> pathlib.Path:
        """`config.json` and safetensors (one case in several shards, with their index)."""
        return FOLDER / self.name

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """`config.json` as it stands, in the spelling of transformers 4 or 5."""
        return json.loads((self.folder / "config.json").read_text())

    @functools.cached_property
    def _expected(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "expected.npz") as arrays:
            return dict(arrays)

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def num_tokens(self) -> int:
        """`continuation` is greedy among the ids below; from here on they are padding (or, for gemma3, images)."""
        return int(self._expected["num_tokens"])

    @property
    def tokens(self) -> Int32[np.ndarray, "rows length"]:
        return self._expected["tokens"]

    @property
    def logits(self) -> Float32[np.ndarray, "rows length vocab"]:
        """Logits at every position of `tokens`."""
        return self._expected["logits"]

    @property
    def length_dependent(self) -> bool:
        """Whether RoPE depends on the length a sequence reaches (dynamic, longrope)."""
        return "short_logits" in self._expected

    @property
    def short_logits(self) -> Float32[np.ndarray, "rows short vocab"]:
        """Logits of `tokens[:, :short]` alone, which are no slice of `logits`. Only if `length_dependent`."""
        return self._expected["short_logits"]

    @property
    def prompt(self) -> Int32[np.ndarray, " prompt"]:
        return self._expected["prompt"]

    @property
    def continuation(self) -> Int32[np.ndarray, " steps"]:
        """Greedy tokens after `prompt`, end-of-sequence ids ignored.

        A length-dependent RoPE has the frequencies of the final length (prompt and continuation) throughout.
        """
        return self._expected["continuation"]

    @property
    def margins(self) -> Float32[np.ndarray, " steps"]:
        """Best minus second-best logit at each step of `continuation`: at least 0.05."""
        return self._expected["margins"]


CASES = tuple(FamilyCase(folder.parent.name) for folder in sorted(FOLDER.glob("*/expected.npz")))
BY_NAME = {case.name: case for case in CASES}
