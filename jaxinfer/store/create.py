"""Makes a store: from a checkpoint, which need not fit into memory, or from a model that is loaded."""

import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from checkpoints.progress import is_watched
from jaxinfer.checkpoint_weights import WeightsRequest
from jaxinfer.device import start_device
from jaxinfer.model import Model, weights_dtype_for
from jaxinfer.params import TOP, Piece, layer_specs, linear_names, piece_name
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.source import Source, StoreSource, open_source
from jaxinfer.store.unfinished import check_store_free
from jaxinfer.store.writer import StoreWriter

log = logging.getLogger("jaxinfer")

STORE_DTYPE = "bfloat16"
"""Of what is not packed in a store made from a checkpoint, unless another is asked for."""


def create(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: jnp.dtype | type | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> pathlib.Path:
    """Writes a store of a checkpoint, or of another store, and returns its path.

    Weight by weight: no more than a layer, or embedding and head, is in memory. `plan` quantises; without one, codes
    that can stay packed do, and the rest has `dtype`, by default bfloat16 (of a store: its own). The arrays are those
    that this device's kernels read.

    Raises FileExistsError where there is something at `out`, ValueError for a path that is not Unicode, and what
    `jaxinfer.load` raises.
    """
    resolved = None if plan is None else resolve(plan)
    out = pathlib.Path(out).expanduser()
    check_store_free(out)
    dtype = None if dtype is None else weights_dtype_for(dtype)
    start_device()
    progress = is_watched() if progress is None else progress
    name = os.fspath(source)
    with open_source(source, progress=progress) as opened:
        if resolved is not None:
            resolved.check(linear_names(opened.config))  # before anything is written
        weights_dtype = written_dtype(opened, dtype, name)
        described = None if resolved is None else plan_mapping(resolved)
        quality = None
        if isinstance(opened, StoreSource) and resolved is None:
            described, quality = opened.store.manifest.plan, opened.store.manifest.quality
        packed = None if resolved else True
        request = WeightsRequest(name, weights_dtype, packed, resolved, progress, streamed=True)
        with StoreWriter(
            out, opened.config, weights_dtype, model=name, files=opened.files(), plan=described, quality=quality
        ) as store:
            store.write_all(opened.pieces(request))
    return out


def written_dtype(opened: Source, dtype: jnp.dtype | None, name: str) -> jnp.dtype:
    """Of what is not packed in what is written: as asked for, else a store's own, else `STORE_DTYPE`.

    Warns of matrices that the source has in more digits than that.
    """
    if dtype is not None:
        return dtype
    if isinstance(opened, StoreSource):
        return opened.store.dtype
    tensors, _ = opened.contents()
    matrices = (info for info in tensors.values() if len(info.shape) == 2 and info.name.endswith(".weight"))
    kinds = {info.dtype for info in matrices}.intersection(("F32", "F16"))
    if kinds:
        log.warning(
            "%s: weights that are %s are written as %s; dtype (--dtype) keeps another",
            *(name, " and ".join(sorted(kinds)), STORE_DTYPE),
        )
    return jnp.dtype(STORE_DTYPE)


def save(
    model: Model,
    out: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    quality: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a store of a loaded model and returns its path.

    `plan` is the one that quantised it, `quality` its report; by default those of `model.quantization`.

    The tokenizer's files are those of the checkpoint that the model was loaded from, `model.name`.

    Raises FileExistsError where there is something at `out`, and FileNotFoundError where that checkpoint is gone.
    """
    check_store_free(out)
    files: Mapping[str, bytes] = {}
    if model.tokenizer is not None:
        with open_source(model.name, progress=False) as source:
            files = source.files()
    if model.quantization is not None:
        plan = model.quantization.plan if plan is None else plan
        quality = model.quantization.to_mapping() if quality is None else quality
    described = None if plan is None else plan_mapping(plan)
    with StoreWriter(
        out, model.config, model.dtype, model=model.name, files=files, plan=described, quality=quality
    ) as store:
        store.write_all(model_pieces(model))
    return store.path


def model_pieces(model: Model) -> list[Piece]:
    """The pieces of a loaded model."""
    own = {name: getattr(model.params, name) for name in ("embed_tokens", "norm", "lm_head")}
    pieces: list[Piece] = [(TOP, {name: value for name, value in own.items() if value is not None})]
    for index, layer in enumerate(model.params.layers):
        pieces.append((piece_name(index), {name: getattr(layer, name) for name in layer_specs(model.config, index)}))
    return pieces


def plan_mapping(plan: Plan) -> dict[str, Any]:
    """A plan in JSON: its name, and the rules as in a TOML file."""
    return {"name": plan.name, **plan.to_mapping()}
