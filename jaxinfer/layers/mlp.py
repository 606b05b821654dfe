"""The gated feed-forward block: down(act(gate(x)) * up(x))."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.linear import Weight, linear, norm_linear


def activate(gate: Float[Array, "*shape"], activation: str) -> Float[Array, "*shape"]:
    """Applies `activation` (silu, gelu_tanh, gelu) in float32 and returns the input's dtype."""
    gate32 = gate.astype(jnp.float32)
    match activation:
        case "silu":
            result = jax.nn.silu(gate32)
        case "gelu_tanh":
            result = jax.nn.gelu(gate32, approximate=True)
        case "gelu":
            result = jax.nn.gelu(gate32, approximate=False)
        case _:
            raise ValueError(f"unknown activation {activation!r}; known: silu, gelu_tanh, gelu")
    return result.astype(gate.dtype)


def gated_mlp(
    x: Float[Array, "*batch hidden"],
    norm: Float[Array, " hidden"] | None,
    eps: float,
    gate_up: Weight,
    gate_up_bias: Float[Array, " two_intermediate"] | None,
    down: Weight,
    down_bias: Float[Array, " hidden"] | None,
    activation: str,
) -> Float[Array, "*batch hidden"]:
    """The block on the RMS-normalised x. `gate_up` holds the gate rows, then the up rows: one product, not two."""
    gate, up = jnp.split(norm_linear(x, norm, eps, gate_up, gate_up_bias), 2, axis=-1)
    return linear(activate(gate, activation) * up, down, down_bias)
