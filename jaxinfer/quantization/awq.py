"""AWQ: inputs that are often large get finer steps, by scaling their columns up before rounding and x down.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023. Scales are searched
on a grid between "as the inputs are large" and "as the weights are small"; then each group's range is clipped.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.quantization.layer_pass import UNTUNED
from jaxinfer.quantization.moments import better_rows, output_errors
from jaxinfer.quantization.rtn import groups_of, round_to_nearest
from pallas_kernels.int4_matmul import Packed, dequantize

STEPS = 20
"""Exponents tried are 0, 1/20, ... 19/20."""

SMALLEST = 1e-4


@functools.partial(jax.jit, static_argnames=("group_size",))
def scale_candidates(
    weight: Float[Array, "out in"], magnitudes: Float[Array, " in"], *, group_size: int
) -> Float[Array, "candidates in"]:
    """Scales of the columns, all ones first. With r in steps of 1/20, x the root mean square of an input and w the mean
    over outputs of |weight| / its group's largest: x^r, and x^r / w^(1 - r). Smallest * largest of a candidate is 1."""
    grouped = jnp.abs(groups_of(weight, group_size))
    shares = grouped / (jnp.max(grouped, axis=2, keepdims=True) + 1e-6)
    share = jnp.mean(shares, axis=0).reshape(-1)[: weight.shape[1]]
    exponents = (jnp.arange(STEPS, dtype=jnp.float32) / STEPS)[:, None]
    by_inputs = magnitudes[None, :] ** exponents
    by_both = by_inputs / (share[None, :] ** (1.0 - exponents) + SMALLEST)
    scales = jnp.maximum(jnp.concatenate([by_inputs, by_both]), SMALLEST)
    scales = scales / jnp.sqrt(jnp.max(scales, axis=1, keepdims=True) * jnp.min(scales, axis=1, keepdims=True))
    return jnp.where(jnp.isfinite(scales), scales, 1.0).at[0].set(1.0)  # x^0 is all ones, but for rounding


@functools.partial(jax.jit, static_argnames=("bits", "group_size", "symmetric"), compiler_options=UNTUNED)
def scaled_losses(
    weight: Float[Array, "out in"],
    moments: Float[Array, "in in"],
    candidates: Float[Array, "candidates in"],
    importance: Float[Array, " out"],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> Float[Array, " candidates"]:
    """Mean square errors of the outputs, each times its importance, summed, for each candidate: columns scaled, rounded
    without clipping, scaled back."""

    def loss(scales: Float[Array, " in"]) -> Float[Array, ""]:
        scaled = weight * scales[None, :]
        packed = round_to_nearest(scaled, bits=bits, group_size=group_size, symmetric=symmetric, ratios=(1.0,))
        return jnp.sum(importance * output_errors(dequantize(packed) / scales[None, :] - weight, moments))

    return jax.lax.map(loss, candidates)


@functools.partial(jax.jit, static_argnames=("bits", "group_size", "symmetric"))
def clip_and_round(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], *, bits: int, group_size: int, symmetric: bool
) -> Packed:
    """Rounds with each group's range clipped for the outputs' sake; rows that plain clipping serves better, by that.

    So no output's error is larger than `round_to_nearest`'s, on the inputs of the calibration.
    """
    rounding = functools.partial(
        round_to_nearest, weight.astype(jnp.float32), bits=bits, group_size=group_size, symmetric=symmetric
    )
    return better_rows(rounding(moments=moments), rounding(), weight.astype(jnp.float32), moments)
