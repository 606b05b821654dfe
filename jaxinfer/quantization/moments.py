"""What calibration leaves of a weight's inputs: their second moments, E[x x^T], [in, in] in float32.

They say all that AWQ and GPTQ want to know: an error D of a weight costs E|D x|^2 = trace(D E[x x^T] D^T) in the
output, for any D, without the inputs themselves.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.packed_weights import DeviceWeight, HostWeight
from pallas_kernels.byte_matmul import decode_blocks
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8, dequantize


@jax.jit
def output_errors(error: Float[Array, "out in"], moments: Float[Array, "in in"]) -> Float[Array, " out"]:
    """Mean square that an error of the weight adds to each output. Never negative but for rounding, which is cut."""
    products = jnp.matmul(error, moments, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(jnp.sum(products * error, axis=1), 0.0)


def share_of_output(added: float, outputs: float, name: str) -> float:
    """An error as a share of the mean square of a weight's outputs; 0 for one that has none.

    Raises ValueError, naming the weight, for squares that float32 does not have.
    """
    if not (math.isfinite(added) and math.isfinite(outputs)):
        raise ValueError(
            f"{name.removesuffix('.weight')}: squares of its outputs are beyond float32, so its error cannot be told; "
            "quantise without calibration"
        )
    return added / outputs if outputs else 0.0


def values_of(weight: HostWeight | DeviceWeight) -> Float[Array, "out in"]:
    """The values of a weight as it would multiply, float32; packed codes in any layout."""
    match weight:
        case StackedOutputs():
            return jnp.concatenate([values_of(part) for part in weight.parts])
        case PermutedInputs():
            return dequantize(weight.weight)[:, jnp.argsort(jnp.asarray(weight.permutation))]
        case PackedInt4() | PackedInt8():
            return dequantize(weight)
        case ScaledCodes():
            return jnp.asarray(weight.codes).astype(jnp.float32) * jnp.asarray(weight.scales)[:, None]
        case BlockCodes():
            codes, scales = jnp.asarray(weight.codes), jnp.asarray(weight.scales)
            return decode_blocks(codes, scales, weight.block, jnp.float32)
        case jax.Array() | np.ndarray():
            return jnp.asarray(weight).astype(jnp.float32)


def better_rows[Codes: PackedInt4 | PackedInt8 | ScaledCodes](
    first: Codes, second: Codes, weight: Float[Array, "out in"], moments: Float[Array, "in in"]
) -> Codes:
    """Of two packings of one kind each output's better row, the first's if they are equal."""
    errors = [output_errors(values_of(packed) - weight, moments) for packed in (first, second)]
    take_second = errors[1] < errors[0]

    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(take_second.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    return jax.tree.map(chosen, first, second)
