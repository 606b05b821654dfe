"""`jaxinfer.quantize`: a model whose layers' projections are packed by a plan."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model import Model, load
from jaxinfer.packed_weights import device_layout
from jaxinfer.params import layer_specs, linear_names
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.quantization.quantizer import QuantizingReader


def quantize(
    model_or_path: Model | str | os.PathLike[str],
    plan: Plan | str | os.PathLike[str],
    *,
    dtype: jnp.dtype | type | str | None = None,
    progress: bool | None = None,
) -> Model:
    """Quantises a loaded model, or a checkpoint while it is read, weight by weight.

    `plan` is a preset ("int4", "int4-g128", "int4-hqq", "int3"), the path of a TOML file, or a `Plan`; see
    `jaxinfer.quantization.plan`. From a path no more than one weight is in full precision at a time, so that a model
    larger than the device can be done; `dtype` and `progress` are those of `load`. A loaded model is not changed: the
    new one shares what is not quantised with it. Deterministic, on CPU or GPU.

    Raises ValueError for a plan that does not fit the model, and for weights that are packed already.
    """
    if not isinstance(model_or_path, Model):
        return load(model_or_path, dtype=dtype, quantize=plan, progress=progress)
    if dtype is not None:
        raise ValueError("dtype is for a path: a loaded model keeps its own")
    model, plan = model_or_path, resolve(plan)
    plan.check(linear_names(model.config))
    layers = []
    for index, layer in enumerate(model.params.layers):
        changed = {}
        for field, spec in layer_specs(model.config, index).items():
            if not spec.is_linear or spec.columns is None:
                continue
            weight, starts = getattr(layer, field), dict(zip(spec.sources, _starts(spec.rows), strict=True))
            if not isinstance(weight, jax.Array):
                raise ValueError(f"layers.{index}.{field} is packed already; quantise the original model")

            def read_into(name: str, out: np.ndarray, weight: jax.Array = weight, starts: dict = starts) -> None:
                out[...] = np.asarray(weight[starts[name] : starts[name] + len(out)])

            reader = QuantizingReader(plan, read_into, np.dtype(model.dtype))
            packed = reader(spec.sources, spec.rows, spec.columns)
            if packed is not None:
                changed[field] = device_layout(packed)
        layers.append(dataclasses.replace(layer, **changed))
    return dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))


def _starts(rows: tuple[int, ...]) -> list[int]:
    return [sum(rows[:i]) for i in range(len(rows))]
