"""`jaxinfer.quantize`: a model whose layers' projections are packed by a plan."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.layers.weights import Weight
from jaxinfer.model import Model, load
from jaxinfer.packed_weights import DeviceWeight, device_layout
from jaxinfer.params import ParamSpec, has_own_head, layer_specs, linear_names, top_specs
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

    `plan` is a preset ("int4", "int8", "fp8", "seed-mixed", ...), the path of a TOML file, or a `Plan`; see
    `jaxinfer.quantization.plan`. From a path no more than one weight is in full precision at a time, so that a model
    larger than the device can be done; `dtype` and `progress` are those of `load`. A loaded model is not changed: the
    new one shares what is not quantised with it, also weights that are packed already. Deterministic, on CPU or GPU.

    Raises ValueError for a plan that does not fit the model, or that names weights which are packed already.
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
            if spec.is_linear:
                packed = _packed(getattr(layer, field), spec, plan, f"layers.{index}.{field}")
                changed |= {} if packed is None else {field: packed}
        layers.append(dataclasses.replace(layer, **changed))
    params = dataclasses.replace(model.params, layers=layers)
    if has_own_head(plan):
        head = model.params.embed_tokens if model.params.lm_head is None else model.params.lm_head
        spec = top_specs(model.config, own_head=True)["lm_head"]
        params = dataclasses.replace(params, lm_head=_packed(head, spec, plan, "lm_head"))
    return dataclasses.replace(model, params=params)


def _packed(weight: Weight, spec: ParamSpec, plan: Plan, name: str) -> DeviceWeight | None:
    """A weight by its plan; None if that leaves it alone."""
    assert spec.columns is not None
    if not any(plan.precision(source.removesuffix(".weight")) for source in spec.sources):
        return None
    if not isinstance(weight, jax.Array):
        raise ValueError(f"{name} is packed already; quantise the original model")
    starts = dict(zip(spec.sources, itertools.accumulate(spec.rows, initial=0), strict=False))

    def read_into(name: str, out: np.ndarray) -> None:
        out[...] = np.asarray(weight[starts[name] : starts[name] + len(out)])

    packed = QuantizingReader(plan, read_into, np.dtype(weight.dtype))(spec.sources, spec.rows, spec.columns)
    assert packed is not None
    return device_layout(packed)
