"""Products of weights kept in 4 bits, and the random ones that benchmarks use. Loading them: test_load.py."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.layers.linear import linear, norm_linear
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.model import load
from jaxinfer.packed_weights import random_int4
from pallas_kernels.int4_matmul import PackedInt4, dequantize

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_products_of_packed_weights(rng: np.random.Generator) -> None:
    weight = random_int4(jax.random.key(3), (96, 256))
    dense = dequantize(weight, jnp.float32)
    assert 0.01 < float(jnp.std(dense)) < 0.04
    x = jnp.asarray(rng.standard_normal((5, 256), np.float32))
    bias = jnp.asarray(rng.standard_normal(96, np.float32))
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 256).astype(np.float32))
    np.testing.assert_allclose(linear(x, weight, bias), x @ dense.T + bias[None, :], rtol=1e-5, atol=1e-5)
    expected = rms_norm(x, norm, 1e-6) @ dense.T
    np.testing.assert_allclose(norm_linear(x, norm, 1e-6, weight), expected, rtol=1e-5, atol=1e-5)


def test_one_row_is_normalised_after_its_product(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """On a GPU only, so the choice is made for it here."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    packed = random_int4(jax.random.key(4), (96, 256))
    dense = dequantize(packed, jnp.float32)
    x = jnp.asarray(rng.standard_normal((1, 1, 256), np.float32)) * 50.0
    bias = jnp.asarray(rng.standard_normal(96, np.float32))
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 256).astype(np.float32))
    expected = rms_norm(x, norm, 1e-6) @ dense.T + bias[None, None, :]
    order = rng.permutation(256).astype(np.int32)
    for weight in (dense, packed, StackedOutputs((dense[:32], dense[32:]))):
        got = norm_linear(x, norm, 1e-6, weight, bias)
        assert got.shape == (1, 1, 96)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    got = norm_linear(x, norm, 1e-6, PermutedInputs(packed, order), bias)
    expected = rms_norm(x, norm, 1e-6)[..., order] @ dense.T + bias[None, None, :]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_products_of_codes_with_a_scale_an_output(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, backend: str, rows: int, dtype: type
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    codes = jnp.asarray(rng.integers(-127, 128, (96, 64)).astype(np.float32)).astype(dtype)
    scales = jnp.asarray(rng.uniform(0.01, 0.02, 96).astype(np.float32))
    dense = np.asarray(codes.astype(jnp.float32)) * np.asarray(scales)[:, None]
    weight = ScaledCodes(codes, scales)
    x = jnp.asarray(rng.standard_normal((1, rows, 64), np.float32))
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 64).astype(np.float32))
    np.testing.assert_allclose(linear(x, weight), np.asarray(x) @ dense.T, rtol=1e-4, atol=1e-4)
    expected = np.asarray(rms_norm(x, norm, 1e-6)) @ dense.T
    np.testing.assert_allclose(norm_linear(x, norm, 1e-6, weight), expected, rtol=1e-4, atol=1e-4)
    assert linear(x.astype(jnp.bfloat16), weight).dtype == jnp.bfloat16


@pytest.mark.parametrize(("shape", "block"), [((96, 64), (32, 16)), ((90, 64), (48, 48))])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_of_codes_with_a_scale_a_block(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    rows: int,
    shape: tuple[int, int],
    block: tuple[int, int],
) -> None:
    """One row, on a GPU, few and many, each by its own way; blocks that divide the weight and such that do not."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    codes = jnp.asarray(rng.normal(0, 2, shape).astype(np.float32)).astype(jnp.float8_e4m3fn)
    sizes = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    scales = rng.uniform(0.01, 0.02, sizes).astype(np.float32)
    dense = np.array(codes.astype(jnp.float32))
    for out, inputs in np.ndindex(shape):
        dense[out, inputs] *= scales[out // block[0], inputs // block[1]]
    weight = BlockCodes(codes, jnp.asarray(scales), block)
    x = jnp.asarray(rng.standard_normal((1, rows, shape[1]), np.float32))
    norm = jnp.asarray(rng.uniform(0.5, 1.5, shape[1]).astype(np.float32))
    bias = jnp.asarray(rng.standard_normal(shape[0], np.float32))
    np.testing.assert_allclose(
        linear(x, weight, bias), np.asarray(x) @ dense.T + np.asarray(bias), rtol=1e-4, atol=1e-4
    )
    expected = np.asarray(rms_norm(x, norm, 1e-6)) @ dense.T
    np.testing.assert_allclose(norm_linear(x, norm, 1e-6, weight), expected, rtol=1e-4, atol=1e-4)
    halves = linear(x.astype(jnp.bfloat16), weight)
    assert halves.dtype == jnp.bfloat16
    np.testing.assert_allclose(halves.astype(jnp.float32), np.asarray(x) @ dense.T, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_products_of_blocks_on_a_gpu(rng: np.random.Generator, rows: int) -> None:
    """As XLA's kernels for the card compute them, against float64."""
    codes = rng.normal(0, 2, (1024, 512)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.01, 0.02, (8, 4)).astype(np.float32)
    dense = codes.astype(np.float64) * np.repeat(np.repeat(scales.astype(np.float64), 128, 0), 128, 1)
    x = jnp.asarray(rng.standard_normal((rows, 512), np.float32)).astype(jnp.bfloat16)
    expected = np.asarray(x).astype(np.float64) @ dense.T
    weight = BlockCodes(jnp.asarray(codes), jnp.asarray(scales), (128, 128))
    found = np.asarray(jax.jit(linear)(x, weight)).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.005 * np.abs(expected).max())


def test_random_int4_model_has_packed_layers_and_a_dense_head(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = load(tmp_path, random_weights=0, quantize="int4")
    for layer in model.params.layers:
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(weight, PackedInt4)
            assert weight.kind == "zero_point"
    assert isinstance(model.params.lm_head, jax.Array)
