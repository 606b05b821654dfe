"""The tensors that one parameter joins, such as q, k and v: scaled together, quantised each by its own precision."""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.weights import StackedOutputs
from jaxinfer.packed_weights import DeviceWeight, HostWeight
from jaxinfer.params import ParamSpec
from jaxinfer.quantization.awq import clip_and_round, scale_candidates, scaled_losses
from jaxinfer.quantization.moments import output_errors, share_of_output, values_of
from jaxinfer.quantization.plan import Plan, Precision
from jaxinfer.quantization.quantizer import quantize_weight
from pallas_kernels.int4_matmul import dequantize

ROWS_SEARCHED = 256
"""Rows of a parameter, about, that choose among AWQ's candidates; all rows are asked whether the winner beats ones."""

type Part = tuple[Precision | None, slice]
"""Rows of a weight that have one precision; None leaves them as they are."""


def names_of(spec: ParamSpec) -> list[str]:
    """The tensors as plans name them."""
    return [name.removesuffix(".weight") for name in spec.sources]


def parts_of(spec: ParamSpec, plan: Plan) -> list[Part]:
    starts = [0, *itertools.accumulate(spec.rows)]
    return [(precision, slice(starts[run.start], starts[run.stop])) for precision, run in plan.runs(names_of(spec))]


def best_scales(
    weight: Float[Array, "out in"],
    moments: Float[Array, "in in"],
    magnitudes: Float[Array, " in"],
    spec: ParamSpec,
    plan: Plan,
) -> Float[Array, " in"] | None:
    """AWQ's scales of the columns for the rows that the plan gives to it; None if ones are best, or no row is AWQ's.

    The candidate of least error without clipping has to beat ones once more, both clipped. An error counts as a share
    of its tensor's outputs: else those of q and k, which are large, would choose for v.
    """
    parts = [(precision, rows) for precision, rows in parts_of(spec, plan) if precision and precision.method == "awq"]
    if not parts:
        return None
    group_size = parts[0][0].group_size
    assert group_size is not None
    rows = jnp.concatenate([weight[rows] for _, rows in parts])
    candidates = scale_candidates(rows, magnitudes, group_size=group_size)
    importance = _importance(weight, moments, spec)
    losses = jnp.zeros(len(candidates), jnp.float32)
    step = max(1, len(rows) // ROWS_SEARCHED)
    for precision, own in parts:
        some = slice(own.start, own.stop, step)
        losses = losses + scaled_losses(weight[some], moments, candidates, importance[some], **_codes_of(precision))
    best = candidates[jnp.argmin(losses)]

    def clipped_error(scales: jax.Array) -> float:
        total = 0.0
        scaled_moments = moments / (scales[:, None] * scales[None, :])
        for precision, own in parts:
            packed = clip_and_round(weight[own] * scales[None, :], scaled_moments, **_codes_of(precision))
            error = dequantize(packed) / scales[None, :] - weight[own]
            total += float(jnp.sum(importance[own] * output_errors(error, moments)))
        return total

    return best if clipped_error(best) < clipped_error(jnp.ones_like(best)) else None


def _importance(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], spec: ParamSpec
) -> Float[Array, " out"]:
    """Of each row: one over the mean square of its tensor's outputs; 0 for a tensor that has none."""
    sizes = output_errors(weight, moments)
    starts = [0, *itertools.accumulate(spec.rows)]
    totals = [jnp.full(stop - start, jnp.sum(sizes[start:stop])) for start, stop in itertools.pairwise(starts)]
    total = jnp.concatenate(totals)
    return jnp.where(total > 0.0, 1.0 / total, 0.0)


def quantize_fused(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], spec: ParamSpec, plan: Plan, dtype: jnp.dtype
) -> tuple[HostWeight | DeviceWeight, dict[str, float]]:
    """The weight by its plan, and the relative error of the outputs of each tensor that is quantised.

    What the plan leaves alone has `dtype`.
    """
    parts = [
        weight[rows].astype(dtype) if precision is None else quantize_weight(weight[rows], precision, moments)
        for precision, rows in parts_of(spec, plan)
    ]
    packed = parts[0] if len(parts) == 1 else StackedOutputs(tuple(parts))
    added = output_errors(values_of(packed) - weight, moments)
    whole = output_errors(weight, moments)
    errors = {}
    starts = [0, *itertools.accumulate(spec.rows)]
    for name, (start, stop) in zip(names_of(spec), itertools.pairwise(starts), strict=True):
        if plan.precision(name) is not None:
            change, size = (float(jnp.sum(squares[start:stop])) for squares in (added, whole))
            errors[name] = share_of_output(change, size, name)
    return packed, errors


def _codes_of(precision: Precision) -> dict[str, int | bool]:
    assert precision.group_size is not None and precision.symmetric is not None
    return {"bits": precision.bits, "group_size": precision.group_size, "symmetric": precision.symmetric}
