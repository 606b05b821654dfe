"""From canonical tensors to parameters: names and shapes, joined rows, random weights; counted by hand."""

import functools
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import DTypeLike

from jaxinfer.config import ModelConfig
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.model import load
from jaxinfer.params import assemble, canonical_shapes, from_pieces, num_parameters, random_params


@functools.cache
def config(name: str) -> ModelConfig:
    return from_hugging_face(families.BY_NAME[name].config)


def numbered(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values that tell a tensor from any other, and its rows apart: exact in float16 and bfloat16."""
    seed = sum(name.encode()) % 16
    rows = np.arange(shape[0], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 1))
    return np.broadcast_to(seed + (rows % 8) / 16, shape)


def assembled(name: str, dtype: DTypeLike = np.float32):
    shapes = canonical_shapes(config(name))

    def read_into(tensor: str, out: np.ndarray) -> None:
        assert out.shape == shapes[tensor]
        out[...] = numbered(tensor, out.shape)

    return from_pieces(assemble(config(name), jnp.dtype(dtype), read_into))


# gemma3's file holds a vision tower too; tests of names and of logits cover its text part.
@pytest.mark.parametrize("case", [case for case in families.CASES if case.model_type != "gemma3"], ids=str)
def test_the_tensors_of_every_family_are_those_of_its_checkpoint(case: families.FamilyCase):
    """As many weights as transformers wrote, and loading them fills arrays of exactly the shapes asked for."""
    stored = 0
    for file in sorted(case.folder.glob("*.safetensors")):
        stored += sum(array.size for array in safetensors.numpy.load_file(file).values())
    assert num_parameters(config(case.name)) == stored
    assert sum(math.prod(shape) for shape in canonical_shapes(config(case.name)).values()) == stored


def test_names_and_shapes_of_a_llama_by_hand():
    """hidden 32, intermediate 48, 4 heads and 2 KV heads of 8, vocabulary 96, 2 layers, head untied."""
    layer = {
        "q_proj": (32, 32),
        "k_proj": (16, 32),
        "v_proj": (16, 32),
        "o_proj": (32, 32),
        "gate_proj": (48, 32),
        "up_proj": (48, 32),
        "down_proj": (32, 48),
        "attn_norm": (32,),
        "mlp_norm": (32,),
    }
    expected = {"embed_tokens.weight": (96, 32), "norm.weight": (32,), "lm_head.weight": (96, 32)}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    assert canonical_shapes(config("llama")) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_q_k_v_and_gate_up_are_joined_in_this_order(dtype: str):
    params = assembled("llama", dtype)
    layer = params.layers[1]
    for array, parts in (
        (layer.qkv, {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32)}),
        (layer.gate_up, {"gate_proj": (48, 32), "up_proj": (48, 32)}),
        (layer.down, {"down_proj": (32, 48)}),
    ):
        expected = np.concatenate([numbered(f"layers.1.{name}.weight", shape) for name, shape in parts.items()])
        assert isinstance(array, jax.Array) and array.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(array).astype(np.float32), expected)
    assert layer.attn_norm is not None
    assert layer.attn_norm.dtype == jnp.float32  # norms stay float32
    assert params.embed_tokens.dtype == jnp.dtype(dtype)


def test_the_norm_offset_is_added_to_norms_and_to_nothing_else():
    """Gemma stores weight - 1."""
    params = assembled("gemma2")
    np.testing.assert_array_equal(params.norm, numbered("norm.weight", params.norm.shape) + 1)
    layer = params.layers[0]
    assert layer.mlp_post_norm is not None
    np.testing.assert_array_equal(
        layer.mlp_post_norm, numbered("layers.0.mlp_post_norm.weight", layer.mlp_post_norm.shape) + 1
    )
    np.testing.assert_array_equal(layer.down, numbered("layers.0.down_proj.weight", layer.down.shape))


def test_progress_adds_up_to_the_bytes_of_the_model():
    told: list[int] = []
    shapes = canonical_shapes(config("llama"))
    params = from_pieces(assemble(config("llama"), jnp.bfloat16, lambda name, out: out.fill(0), told.append))
    assert sum(told) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    norms = sum(math.prod(shape) for name, shape in shapes.items() if "norm" in name)
    assert sum(told) == 2 * num_parameters(config("llama")) + 2 * norms


def test_a_cpu_takes_the_host_s_array_over():
    """No copy of a large tensor: the array's address is the one that was filled."""
    if jax.default_backend() != "cpu":
        pytest.skip("another device has memory of its own")
    addresses = set()

    def read_into(name: str, out: np.ndarray) -> None:
        out.fill(0)
        addresses.add(out.ctypes.data)

    for dtype in (jnp.float32, jnp.bfloat16):
        addresses.clear()
        params = from_pieces(assemble(config("llama"), dtype, read_into))
        for array in (params.embed_tokens, params.layers[0].down, params.layers[1].qkv):
            assert isinstance(array, jax.Array)
            assert array.unsafe_buffer_pointer() in addresses


# --- Random weights


def test_random_weights_are_those_of_their_seed():
    first, again, other = (random_params(config("qwen2"), jnp.float32, seed) for seed in (1, 1, 2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.embed_tokens, other.embed_tokens)
    flat = [np.asarray(layer.down) for layer in first.layers]
    assert not np.array_equal(flat[0], flat[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_weights_have_the_shapes_of_real_ones(dtype: type):
    case = families.BY_NAME["qwen2"]
    real = load(case.folder, dtype=dtype, progress=False).params
    made = random_params(config("qwen2"), dtype, 0)
    assert jax.tree.structure(real) == jax.tree.structure(made)
    for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(made), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_random_weights_are_spread_as_documented():
    """Uniform with mean 0 and standard deviation 0.02, so within 0.02 sqrt(3) = 0.0346; norms are 1."""
    params = random_params(config("qwen3"), jnp.float32, 0)
    values = np.concatenate([np.asarray(params.embed_tokens).ravel(), np.asarray(params.layers[0].gate_up).ravel()])
    assert np.abs(values).max() <= 0.02 * 3**0.5
    assert values.std() == pytest.approx(0.02, rel=0.03)
    assert values.mean() == pytest.approx(0, abs=5e-4)
    np.testing.assert_array_equal(params.norm, np.ones(params.norm.shape))
    assert params.layers[0].q_norm is not None
    np.testing.assert_array_equal(params.layers[0].q_norm, np.ones(params.layers[0].q_norm.shape))
