"""A residual stream whose last branch is added by the next norm: what layers compute does not change by that.

Here the reference stands in for the kernels that leave slices.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_weights import CONFIG

from jaxinfer import decoder
from jaxinfer.layers import linear as linear_module
from jaxinfer.layers import mlp as mlp_module
from jaxinfer.layers.linear import norm_linear, norm_linear_of
from jaxinfer.layers.residual import Pending, settled
from jaxinfer.model import load
from jaxinfer.packed_weights import random_int4
from pallas_kernels.int4_matmul import int4_matmul_of_sum


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes the layers leave branches pending; gets a line for each."""
    left: list[str] = []

    def none(name: str):
        return lambda *args, **kwargs: left.append(name)

    monkeypatch.setattr(linear_module, "slices_refusal", none("o"))
    monkeypatch.setattr(mlp_module, "gated_mlp_refusal", none("down"))
    return left


def test_a_norm_settles_what_is_pending(rng: np.random.Generator) -> None:
    x, partial, norm, bias = (
        jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 20, 128), (3, 1, 20, 128), (128,), (96,))
    )
    weight, total = random_int4(jnp.asarray([0, 1], jnp.uint32), (96, 128)), x + partial.sum(0)
    np.testing.assert_allclose(settled(Pending(x, partial)), total, rtol=1e-6, atol=1e-6)
    for some_norm, some_bias in ((norm, None), (norm, bias), (None, None)):
        y, found = norm_linear_of(Pending(x, partial), some_norm, 1e-5, weight, some_bias)
        np.testing.assert_allclose(found, total, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(y, norm_linear(total, some_norm, 1e-5, weight, some_bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_a_model_is_the_same_with_its_branches_pending(
    tmp_path: pathlib.Path, pending: list[str], multiplier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the residual has a multiplier, as in Granite, nothing waits."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = load(tmp_path, random_weights=0, quantize="int4", dtype="float32")
    config = dataclasses.replace(model.config, residual_multiplier=multiplier)
    tokens = jnp.arange(20, dtype=jnp.int32)[None, :]

    def hidden() -> np.ndarray:
        return np.asarray(decoder.forward(model.params, tokens, tokens, None, None, config=config, stage="first")[0])

    found = hidden()
    assert pending == (["o", "down"] * 2 if multiplier == 1.0 else ["down"] * 2)
    monkeypatch.undo()
    np.testing.assert_allclose(found, hidden(), rtol=1e-4, atol=1e-4)


def test_no_slices_are_refused() -> None:
    weight = random_int4(jax.random.key(0), (64, 128))
    x, none = jnp.ones((20, 128), jnp.float32), jnp.ones((0, 20, 128), jnp.float32)
    with pytest.raises(ValueError, match=r"partial has shape .*; expected slices of x's: \[slices, \*\(20, 128\)\]"):
        int4_matmul_of_sum(x, none, weight, norm=jnp.ones(128))
