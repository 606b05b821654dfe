"""The gated half of the feed-forward block: act(gate(x)) * up(x)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.linear import Weight, norm_linear
from jaxinfer.layers.residual import Pending, Residual
from pallas_kernels.int4_matmul import (
    Packed,
    fused_refusal,
    gated_mlp_refusal,
    int4_gated_mlp_of_sum,
    int4_matmul_fused,
)


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


def gated_hidden(
    x: Float[Array, "*batch hidden"],
    norm: Float[Array, " hidden"] | None,
    eps: float,
    gate_up: Weight,
    gate_up_bias: Float[Array, " two_intermediate"] | None,
    activation: str,
) -> Float[Array, "*batch intermediate"]:
    """act(gate(x)) * up(x) of the RMS-normalised x, which the down projection takes.

    `gate_up` holds the gate rows, then the up rows: one product, not two.
    """
    if isinstance(gate_up, Packed) and gate_up_bias is None and activation == "silu":
        norm_eps = None if norm is None else eps
        if fused_refusal(x, gate_up, norm_eps=norm_eps, gated=True) is None:
            return int4_matmul_fused(x, gate_up, norm=norm, norm_eps=eps, gated=True)
    gate, up = jnp.split(norm_linear(x, norm, eps, gate_up, gate_up_bias), 2, axis=-1)
    return activate(gate, activation) * up


def is_packed_mlp(
    x: Float[Array, "*batch hidden"],
    gate_up: Weight,
    gate_up_bias: Float[Array, " two_intermediate"] | None,
    down: Weight,
    down_bias: Float[Array, " hidden"] | None,
    activation: str,
) -> bool:
    """Whether `packed_mlp` has kernels for it."""
    if not isinstance(gate_up, Packed) or not isinstance(down, Packed) or activation != "silu":
        return False
    return gate_up_bias is None and down_bias is None and gated_mlp_refusal(x, gate_up, down) is None


def packed_mlp(
    x: Residual,
    norm: Float[Array, " hidden"] | None,
    eps: float,
    gate_up: Weight,
    gate_up_bias: Float[Array, " two_intermediate"] | None,
    down: Weight,
    down_bias: Float[Array, " hidden"] | None,
    activation: str,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Float[Array, "slices *batch hidden"], Float[Array, "*batch hidden"]] | None:
    """The down projection of `gated_hidden`, in slices, and x settled, where kernels do the block as a whole.

    They do it for packed weights, and many rows or small weights; else there are `int4_matmul_fused`'s, and it is None.
    `ahead`: weights that are read next, which a kernel may bring nearer.
    """
    y, partial = (x.x, x.partial) if isinstance(x, Pending) else (x, None)
    if not is_packed_mlp(y, gate_up, gate_up_bias, down, down_bias, activation):
        return None
    assert isinstance(gate_up, Packed) and isinstance(down, Packed)
    return int4_gated_mlp_of_sum(y, partial, gate_up, down, norm=norm, norm_eps=eps, ahead=ahead)
