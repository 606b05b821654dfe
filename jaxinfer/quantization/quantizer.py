"""Quantises a model by a plan, one weight at a time: from a checkpoint while it is loaded, or from arrays."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxinfer.layers.weights import ScaledCodes, StackedOutputs
from jaxinfer.packed_runs import aligned_empty
from jaxinfer.packed_weights import HostWeight
from jaxinfer.quantization.awq import clip_and_round
from jaxinfer.quantization.checks import check_tensors
from jaxinfer.quantization.gptq import compensated_int8, compensated_rounding
from jaxinfer.quantization.hqq import half_quadratic
from jaxinfer.quantization.plan import CALIBRATED, Plan, Precision
from jaxinfer.quantization.rtn import round_to_nearest
from jaxinfer.quantization.scaled import scale_outputs
from pallas_kernels.int4_matmul import Packed

type ReadInto = Callable[[str, np.ndarray], None]


def quantize_weight(weight: jax.Array, precision: Precision, moments: jax.Array | None = None) -> Packed | ScaledCodes:
    """Codes of a weight [out, in], on its device, canonical.

    `moments` are the second moments of its inputs, which calibrated methods need; AWQ's scales are in the weight
    already.
    """
    if precision.method in CALIBRATED and moments is None:
        raise ValueError(f"method {precision.method} needs calibration: use jaxinfer.quantize(path, plan)")
    if precision.bits == 8 and precision.group_size is None:
        if moments is not None and precision.method == "gptq":
            return compensated_int8(weight, moments)
        return scale_outputs(weight, dtype="float8_e4m3fn" if precision.method == "fp8" else "int8")
    assert precision.group_size is not None and precision.symmetric is not None
    codes = {"bits": precision.bits, "group_size": precision.group_size, "symmetric": precision.symmetric}
    if moments is not None and precision.method in CALIBRATED:
        method = clip_and_round if precision.method == "awq" else compensated_rounding
        return method(weight, moments, **codes)
    if precision.method == "hqq":
        return half_quadratic(weight, bits=precision.bits, group_size=precision.group_size)
    return round_to_nearest(weight, **codes)


@dataclasses.dataclass(frozen=True)
class QuantizingReader:
    """Reads linear weights and quantises them: what `params.assemble` takes as `read_packed`.

    On the device there is one weight in float32 at a time. What the plan leaves alone is read in `dtype`.
    """

    plan: Plan
    read_into: ReadInto
    dtype: np.dtype

    def __call__(self, names: Sequence[str], rows: Sequence[int], in_features: int) -> HostWeight | None:
        """Joins canonical tensors of so many rows, one below the other; None if the plan leaves all of them alone.

        Neighbours of one precision are one weight. Raises ValueError for NaN, infinity, and numbers beyond what the
        codes' scales can be (`checks`).
        """
        runs = self.plan.runs([name.removesuffix(".weight") for name in names])
        if all(precision is None for precision, _ in runs):
            return None
        parts = []
        for precision, run in runs:
            dtype = self.dtype if precision is None else np.dtype(np.float32)
            host = aligned_empty((sum(rows[run]), in_features), dtype)
            first = 0
            for name, count in zip(names[run], rows[run], strict=True):
                self.read_into(name, host[first : first + count])
                first += count
            if precision is None:
                parts.append(host)
                continue
            weight = jax.device_put(host)
            check_tensors(weight, names[run], rows[run], [precision] * len(names[run]))
            parts.append(quantize_weight(weight, precision))
        return parts[0] if len(parts) == 1 else StackedOutputs(tuple(parts))
