"""`jaxinfer.quantize`: a model whose layers' projections are packed by a plan."""

import dataclasses
import itertools
import logging
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.progress import is_watched
from jaxinfer.checkpoint_weights import WeightsRequest, check_memory
from jaxinfer.config import ModelConfig
from jaxinfer.device import start_device
from jaxinfer.layers.weights import Weight
from jaxinfer.model import Model, load, weights_dtype_for
from jaxinfer.packed_weights import DeviceWeight, device_layout
from jaxinfer.params import (
    ParamSpec,
    Piece,
    from_pieces,
    has_own_head,
    layer_specs,
    linear_names,
    piece_owner,
    piece_specs,
    top_specs,
)
from jaxinfer.quantization.calibrated import CalibratedQuantizer
from jaxinfer.quantization.calibration import Calibration, Windows
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.quantization.quantizer import QuantizingReader
from jaxinfer.quantization.report import QuantizationReport
from jaxinfer.source import open_source
from jaxinfer.store.create import create, plan_mapping, save, written_dtype
from jaxinfer.store.unfinished import check_store_free
from jaxinfer.store.writer import StoreWriter
from jaxinfer.tokenization import Tokenizer

log = logging.getLogger("jaxinfer")


type CalibrationText = Calibration | Windows | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""What `quantize` calibrates with: documents, token ids, or the paths of text and .jsonl files."""


def quantize(
    model_or_path: Model | str | os.PathLike[str],
    plan: Plan | str | os.PathLike[str],
    *,
    calibration: CalibrationText | None = None,
    promote_above: float | None = None,
    out: str | os.PathLike[str] | None = None,
    dtype: jnp.dtype | type | str | None = None,
    progress: bool | None = None,
) -> Model:
    """Quantises a loaded model, or a checkpoint while it is read, layer by layer.

    `plan` is a preset ("int4", "int4-awq", "int8", "fp8", "seed-mixed", ...), the path of a TOML file, or a `Plan`; see
    `jaxinfer.quantization.plan`. From a path no more than one layer is in full precision at a time, so that a model
    larger than the device can be done; `dtype` and `progress` are those of `load`. Weights that a checkpoint has
    quantised are decoded, with a warning. A loaded model is not changed: the new one shares what is not quantised with
    it, also weights that are packed already. Deterministic, on CPU or GPU.

    The methods "awq" and "gptq" look at each layer's inputs on `calibration` text: files of your own domain, a
    `Calibration` of them, or token ids as `Windows`; by default a novel that is bundled (`Calibration.bundled`). With
    calibration, whatever the methods, the new model's `quantization` reports the error of every weight's outputs, and
    perplexity and KL divergence from the original on text that was kept apart; `promote_above`, a share such as 0.01,
    quantises weights of a larger error with more bits. AWQ changes norms, v and up projections too, as they take up the
    scales.

    `out` writes a store (`jaxinfer.store`) and returns the model of it; from a path it never holds more than a layer.
    What is not packed there is bfloat16, unless `dtype` is another. A store of unknown quality is made with a warning.

    Raises FileExistsError for an `out` that exists, and ValueError for one that is not Unicode, for a plan that does
    not fit the model, or that names weights which are packed already, and for weights that hold NaN, infinity or
    numbers beyond what codes stand for. "awq" and "gptq" warn of fewer than 1024 tokens of text.
    """
    plan = resolve(plan, "plan=")
    if out is not None:
        return _into_store(model_or_path, plan, calibration, promote_above, pathlib.Path(out), dtype, progress)
    if plan.needs_calibration or promote_above is not None or calibration is not None:
        return _calibrated(model_or_path, plan, calibration, promote_above, dtype, progress)
    if not isinstance(model_or_path, Model):
        return load(model_or_path, dtype=dtype, quantize=plan, progress=progress)
    if dtype is not None:
        raise ValueError("dtype is for a path: a loaded model keeps its own")
    model = model_or_path
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
        raise ValueError(f"{name} is packed already; quantise the original model, or load it with packed=False")
    starts = dict(zip(spec.sources, itertools.accumulate(spec.rows, initial=0), strict=False))

    def read_into(name: str, out: np.ndarray) -> None:
        out[...] = np.asarray(weight[starts[name] : starts[name] + len(out)])

    packed = QuantizingReader(plan, read_into, np.dtype(weight.dtype))(spec.sources, spec.rows, spec.columns)
    assert packed is not None
    return device_layout(packed)


def _into_store(
    model_or_path: Model | str | os.PathLike[str],
    plan: Plan,
    calibration: CalibrationText | None,
    promote_above: float | None,
    out: pathlib.Path,
    dtype: jnp.dtype | type | str | None,
    progress: bool | None,
) -> Model:
    check_store_free(out)
    if isinstance(model_or_path, Model):
        options = {"calibration": calibration, "promote_above": promote_above, "dtype": dtype, "progress": progress}
        model = quantize(model_or_path, plan, **options)
        save(model, out, plan=plan)
        _say_if_unmeasured(out, model.quantization)
        return model
    report = write_quantized(
        model_or_path, plan, out, calibration=calibration, promote_above=promote_above, dtype=dtype, progress=progress
    )
    _say_if_unmeasured(out, report)
    return load(out, dtype=dtype, progress=progress)


def _say_if_unmeasured(out: pathlib.Path, report: QuantizationReport | None) -> None:
    if report is None or report.quality is None:
        log.warning("%s: quality is not measured; calibration=[paths of texts] measures it", out)


def write_quantized(
    path_or_name: str | os.PathLike[str],
    plan: Plan | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: CalibrationText | None = None,
    promote_above: float | None = None,
    dtype: jnp.dtype | type | str | None = None,
    progress: bool | None = None,
) -> QuantizationReport | None:
    """What `quantize` does with `out`, for a model that may not fit the device: it is not loaded afterwards.

    Returns the report of a calibrated method, None of the others.
    """
    plan = resolve(plan, "plan=")
    if not (plan.needs_calibration or promote_above is not None or calibration is not None):
        create(path_or_name, out, dtype=dtype, plan=plan, progress=progress)
        return None
    check_store_free(out)
    dtype = None if dtype is None else weights_dtype_for(dtype)
    start_device()
    name = os.fspath(path_or_name)
    progress = is_watched() if progress is None else progress
    with open_source(path_or_name, progress=progress) as source:
        weights_dtype = written_dtype(source, dtype, name)
        windows = windows_for(calibration, source.tokenizer, source.config, name)
        quantizer = CalibratedQuantizer(source.config, plan, windows, weights_dtype, promote_above=promote_above)
        request = WeightsRequest(name, weights_dtype, False, None, progress=False, streamed=True, fitted=plan)
        with StoreWriter(out, source.config, weights_dtype, model=name, files=source.files()) as store:
            store.write_all(quantizer.pieces(source.pieces(request), progress=progress))
            report = quantizer.report()
            store.plan, store.quality = plan_mapping(report.plan), report.to_mapping()
    return report


def _calibrated(
    model_or_path: Model | str | os.PathLike[str],
    plan: Plan,
    calibration: CalibrationText | None,
    promote_above: float | None,
    dtype: jnp.dtype | type | str | None,
    progress: bool | None,
) -> Model:
    progress = is_watched() if progress is None else progress
    if isinstance(model_or_path, Model):
        if dtype is not None:
            raise ValueError("dtype is for a path: a loaded model keeps its own")
        model = model_or_path
        pieces = dense_pieces(model)
        windows = windows_for(calibration, model.tokenizer, model.config, model.name)
        quantizer = CalibratedQuantizer(model.config, plan, windows, model.dtype, promote_above=promote_above)
        params = from_pieces(quantizer.pieces(pieces, progress=progress))
        return dataclasses.replace(model, params=params, quantization=quantizer.report())
    start_device()
    weights_dtype, name = weights_dtype_for(dtype), os.fspath(model_or_path)
    with open_source(model_or_path, progress=progress) as source:
        windows = windows_for(calibration, source.tokenizer, source.config, name)
        quantizer = CalibratedQuantizer(source.config, plan, windows, weights_dtype, promote_above=promote_above)
        check_memory(source.config, weights_dtype, name, plan=plan)
        request = WeightsRequest(name, weights_dtype, False, None, progress=False, streamed=True, fitted=plan)
        params = from_pieces(quantizer.pieces(source.pieces(request), progress=progress))
        return Model(source.config, params, source.tokenizer, weights_dtype, name, quantization=quantizer.report())


def windows_for(
    calibration: CalibrationText | None, tokenizer: Tokenizer | None, config: ModelConfig, name: str
) -> Windows:
    """The token ids of calibration text; by default of the bundled novel. `name` is the model's.

    Raises ValueError for token ids that the model does not have, and for text without a tokenizer.
    """
    if isinstance(calibration, Windows):
        calibration.check(config.num_tokens, config.max_position_embeddings)
        return calibration
    if tokenizer is None:
        raise ValueError(
            f"{name} has no tokenizer to read calibration texts with; add its tokenizer.json, or from Python pass "
            "Windows of token ids"
        )
    if calibration is None:
        calibration = Calibration.bundled()
        log.info("calibrating with %s; text of your own domain is better: calibration=[paths]", calibration.source)
    elif not isinstance(calibration, Calibration):
        calibration = Calibration.from_files(calibration)
    return calibration.windows(tokenizer, config.max_position_embeddings)


def dense_pieces(model: Model) -> list[Piece]:
    """The pieces of a loaded model, which has them anyway. Raises ValueError for one that is packed already."""
    pieces = []
    for name, specs in piece_specs(model.config):
        owner = piece_owner(model.params, name)
        fields = {field: getattr(owner, field) for field in specs}
        for field, value in fields.items():
            if not isinstance(value, jax.Array):
                raise ValueError(
                    f"{name}.{field} is packed already; quantise the original model, or load it with packed=False"
                )
        pieces.append((name, fields))
    return pieces
