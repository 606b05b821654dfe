"""Codes of 8 bits with one scale an output: int8 to the nearest, or float8_e4m3fn."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.weights import ScaledCodes

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The code of an output's largest weight."""

type CodeDtype = Literal["int8", "float8_e4m3fn"]


@jax.jit(static_argnames="dtype")
def scale_outputs(weight: Float[Array, "out in"], *, dtype: CodeDtype) -> ScaledCodes:
    """Quantises a weight: the largest of an output becomes the largest code, the others the nearest. No clipping.

    float32 scales. An int8 code is wrong by half a step, 1/254 of the output's largest weight, at most; a float8 code
    by 1/16 of its own weight (3 bits after the leading one), or 2**-10 of a scale near zero. Deterministic.
    """
    largest = LARGEST[dtype]
    values = weight.astype(jnp.float32)
    scales = jnp.max(jnp.abs(values), axis=1) / jnp.float32(largest)
    scales = jnp.where(scales == 0.0, 1.0, scales)  # an output of zeros, or of numbers that float32 barely has
    values = jnp.clip(values / scales[:, None], -largest, largest)
    if dtype == "int8":
        values = jnp.round(values)
    return ScaledCodes(values.astype(dtype), scales)
