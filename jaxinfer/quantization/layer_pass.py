"""A layer as calibration sees it: what its projections are given, and what it passes on. Everything in float32."""

import functools
import math
import typing
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams, add_branch, attention_block, decoder_layer
from jaxinfer.layers.linear import norm_linear
from jaxinfer.layers.mlp import activate
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.residual import settled
from jaxinfer.layers.rope import rope_tables
from jaxinfer.tokens import Tokens

PRECISION = "highest"
"""Of the products: NVIDIA's default for float32 keeps 10 bits, which is what codes of 8 bits already cost."""

UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Compiler options of what calibration runs a few times: products go to cuBLAS as they are. XLA would compile and time
dozens of kernels of its own for each shape in float32: two and a half minutes for seconds of work (SmolLM2-135M on an
H200: 163 s for a first plan; with these options for everything, a first plan and twelve kinds of GPTQ took 78 s)."""


@typing.no_type_check  # JAX rebuilds pytrees around placeholders
@flax.struct.dataclass
class InputMoments:
    """Sums or means of x x^T over tokens, x the inputs of a layer's projections, named as those in `LayerParams`."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array


def representative(config: ModelConfig, index: int) -> int:
    """The first layer that computes as this one does: one program serves all of them."""
    return config.layers.index(config.layers[index])


@functools.partial(jax.jit, static_argnames=("config", "index"), compiler_options=UNTUNED)
def pass_through(
    layer: LayerParams, x: Float[Array, "batch tokens hidden"], *, config: ModelConfig, index: int
) -> Float[Array, "batch tokens hidden"]:
    """What the layer makes of whole rows of tokens that begin at position 0."""
    with jax.default_matmul_precision(PRECISION):
        return settled(decoder_layer(layer, x, None, index, _whole_rows(x, config, index), config)[0])


@functools.partial(jax.jit, static_argnames=("config", "index"), compiler_options=UNTUNED)
def summed_moments(
    layer: LayerParams, x: Float[Array, "batch tokens hidden"], *, config: ModelConfig, index: int
) -> InputMoments:
    """Sums over the tokens of x, of what the layer's projections are given. All weights are arrays."""
    with jax.default_matmul_precision(PRECISION):
        qkv = norm_linear(x, layer.attn_norm, config.norm_eps, layer.qkv, layer.qkv_bias)
        heads, _ = attention_block(layer, qkv, None, index, _whole_rows(x, config, index), config)
        after = settled(add_branch(x, heads, layer.o, layer.o_bias, layer.attn_post_norm, config))
        fused = norm_linear(after, layer.mlp_norm, config.norm_eps, layer.gate_up, layer.gate_up_bias)
        gate, up = jnp.split(fused, 2, axis=-1)

        def normalised(x: jax.Array, norm: jax.Array | None) -> jax.Array:
            return x if norm is None else rms_norm(x, norm, config.norm_eps)

        return InputMoments(
            qkv=second_moments(normalised(x, layer.attn_norm)),
            o=second_moments(heads),
            gate_up=second_moments(normalised(after, layer.mlp_norm)),
            down=second_moments(activate(gate, config.activation) * up),
        )


def input_moments(layer: LayerParams, batches: Sequence[jax.Array], *, config: ModelConfig, index: int) -> InputMoments:
    """Means over all tokens of the batches, each [rows, tokens, hidden]."""
    total = summed_moments(layer, batches[0], config=config, index=index)
    for batch in batches[1:]:
        total = jax.tree.map(jnp.add, total, summed_moments(layer, batch, config=config, index=index))
    count = sum(math.prod(batch.shape[:2]) for batch in batches)
    return jax.tree.map(lambda sums: sums / count, total)


@jax.jit
def second_moments(x: Float[Array, "*batch in"]) -> Float[Array, "in in"]:
    """Sum of x x^T over all but the last axis."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)


def _whole_rows(x: jax.Array, config: ModelConfig, index: int) -> Tokens:
    batch, length, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))
    rope = config.layers[index].rope
    lengths = jnp.full((batch,), length, jnp.int32)
    tables = {} if rope is None else {rope: rope_tables(rope, positions, lengths)}
    return Tokens(positions, None, tables, "first")
