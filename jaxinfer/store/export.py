"""A model of any format as a Hugging Face folder: decoded, or with its codes as AWQ or compressed-tensors have them."""

import dataclasses
import functools
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.export import ShardWriter
from checkpoints.export_formats import (
    Rows,
    Scheme,
    awq_parts,
    awq_scheme,
    compressed_parts,
    compressed_scheme,
    configuration,
)
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.names import TensorSource, hugging_face_sources
from checkpoints.names_gguf import unpermute_rows
from checkpoints.progress import is_watched, progress_bar
from checkpoints.quantized import QuantizedFolder
from checkpoints.safetensors import SafetensorsFolder
from jaxinfer.checkpoint_weights import AnyCheckpoint, tensor_reader
from jaxinfer.config import ModelConfig
from jaxinfer.config_export import to_hugging_face
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.model import weights_dtype_for
from jaxinfer.params import canonical_shapes, piece_specs
from jaxinfer.source import FolderSource, Source, StoreSource, open_source
from jaxinfer.store.create import written_dtype
from jaxinfer.store.tensors import StoredTensors
from jaxinfer.store.unfinished import check_free, written_whole
from jaxinfer.tokenization.export import hugging_face_files

log = logging.getLogger("jaxinfer")

type ExportFormat = Literal["safetensors", "awq", "compressed-tensors"]

_HEAD = "lm_head.weight"
REPORT = "quantization_report.json"


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",
    dtype: jnp.dtype | type | str | None = None,
    progress: bool | None = None,
) -> pathlib.Path:
    """Writes a folder of safetensors that other engines load, and returns its path. One layer is in memory at a time.

    "safetensors" decodes everything to `dtype`, by default bfloat16. "awq" and "compressed-tensors" keep codes, scales
    and zeros as they are, which is exact, and raise ValueError for those that the format does not have, naming the
    weight; what is not quantised has `dtype`. Norms are float32. Plan and quality report of a store are in
    `quantization_report.json`, which other engines leave alone. Of a GGUF file, and of a store of one, config.json,
    generation_config.json and the tokenizer's files are written anew, with ValueError for what they have no form for.

    Raises FileExistsError where there is something at `out`, and what `jaxinfer.load` raises.
    """
    path = pathlib.Path(out).expanduser().absolute()
    check_free(path)
    dtype = None if dtype is None else weights_dtype_for(dtype)
    progress = is_watched() if progress is None else progress
    with open_source(source, progress=progress) as opened:
        config_json, files = _model_files(opened, os.fspath(source))
        files = files | _report(opened)
        weights_dtype = np.dtype(written_dtype(opened, dtype, os.fspath(source)))
        with opened.tensors() as (checkpoint, match):
            if match.mismatch:
                raise CheckpointError(f"{os.fspath(source)}: {match.mismatch}")
            norm_offset = from_hugging_face(config_json).norm_offset
            tensors = _Tensors(opened, checkpoint, match.sources, format, weights_dtype, norm_offset)
            config_json |= {"dtype": str(weights_dtype), "tie_word_embeddings": not tensors.own_head}
            if format != "safetensors":
                schemes, plain = tensors.schemes()
                if not schemes:
                    raise ValueError(f"{os.fspath(source)} has no codes to write as {format}; quantise it first")
                config_json["quantization_config"] = configuration(format, schemes, plain)
                if any(scheme.act_order for scheme in schemes.values()):
                    log.warning(
                        "%s: inputs are in the order of their activations (actorder group), which compressed-tensors "
                        "0.20 refuses and earlier versions read",
                        path,
                    )
            with written_whole(path) as folder:
                tensors.write(folder, progress)
                for name, content in (files | {"config.json": json.dumps(config_json, indent=2).encode()}).items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
    return path


def _report(opened: Source) -> dict[str, bytes]:
    """What a store knows of how it was quantised, as a file."""
    if not isinstance(opened, StoreSource):
        return {}
    manifest = opened.store.manifest
    known = {"plan": manifest.plan, "quality": manifest.quality}
    return {REPORT: json.dumps(known, indent=2).encode()} if any(known.values()) else {}


def _model_files(opened: Source, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """config.json without what it said of quantisation, and the other files beside weights.

    Raises ValueError where there is none and the model cannot be described by one.
    """
    files = opened.files()
    if "config.json" not in files:
        try:
            return _files_of_gguf(opened)
        except ValueError as error:
            raise ValueError(f"{name} comes from a GGUF file: {error}; only --format store can be written") from error
    content = json.loads(files["config.json"])
    if "text_config" in content:
        raise ValueError(f"{name} is the text part of a model with images or sound; only --format store can be written")
    ours = ("quantization_config", "compression_config", "torch_dtype")
    return {key: value for key, value in content.items() if key not in ours}, files


def _files_of_gguf(opened: Source) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The same for a model that was described by the metadata of a GGUF file."""
    config, tokenizer = opened.config, opened.tokenizer
    padding = None if tokenizer is None else tokenizer.special_tokens.get("pad_token")
    pad_id = None if tokenizer is None or padding is None else tokenizer.backend.token_to_id(padding)
    config_json = to_hugging_face(config, pad_token_id=pad_id)
    # The tokenizer's first ends a text; the others end turns, or are named elsewhere.
    eos = list(dict.fromkeys([*(() if tokenizer is None else tokenizer.eos_token_ids), *config.eos_token_ids]))
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": pad_id}
    files = {} if tokenizer is None else hugging_face_files(tokenizer, max_length=config.max_position_embeddings)
    return config_json, files | {"generation_config.json": json.dumps(generation, indent=2).encode()}


class _Targets(NamedTuple):
    """The tensors of a file by name, each with the canonical ones that it is made of; `norms` are among the others."""

    linear: dict[str, list[str]]
    other: dict[str, list[str]]
    norms: set[str]


class _Tensors:
    """The tensors of a model under the names that its family has in Hugging Face's folders."""

    def __init__(
        self,
        opened: Source,
        checkpoint: AnyCheckpoint,
        sources: Mapping[str, TensorSource],
        format: ExportFormat,
        dtype: np.dtype,
        norm_offset: float,
    ) -> None:
        self._config, self._checkpoint, self._sources = opened.config, checkpoint, sources
        self._format, self._dtype = format, dtype
        self._read_into = tensor_reader(checkpoint, sources)
        self.own_head = _HEAD in sources
        # Stores and GGUF files have norms with the family's offset added, folders have them without.
        self._norm_offset = 0.0 if isinstance(opened, FolderSource) else norm_offset

    def schemes(self) -> tuple[dict[str, Scheme], list[str]]:
        """How each quantised module will be written, and which linear ones are not quantised; nothing large is read.

        Raises ValueError, naming the weight, for codes that the format does not have.
        """
        checkpoint = self._checkpoint
        outline = checkpoint.without_data() if isinstance(checkpoint, QuantizedFolder | StoredTensors) else checkpoint
        scheme_of = awq_scheme if self._format == "awq" else compressed_scheme
        schemes: dict[str, Scheme] = {}
        plain: list[str] = []
        for targets in self._files():
            for target, members in targets.linear.items():
                rows, module = self._codes(outline, target, members), target.removesuffix(".weight")
                if rows:
                    schemes[module] = scheme_of(rows, target)
                else:
                    plain.append(module)
        if not self.own_head:  # of no file, but a linear module of the model that other engines build
            plain.append(_target_names(self._config)[_HEAD].removesuffix(".weight"))
        return schemes, plain

    def write(self, folder: pathlib.Path, progress: bool) -> None:
        """A file for what is outside the layers, and one for each layer."""
        count = self._config.num_layers + 1
        shapes = canonical_shapes(self._config)
        if self.own_head:
            shapes[_HEAD] = shapes["embed_tokens.weight"]
        writer = ShardWriter(folder, count)
        with progress_bar(total=count, unit="file", desc="Writing", shown=progress, leave=False) as bar:
            for targets in self._files():
                tensors: dict[str, np.ndarray] = {}
                for target, members in targets.linear.items():
                    tensors |= self._linear(target, members, shapes)
                for target, members in targets.other.items():
                    tensors[target] = self._dense(members, shapes, norm=targets.norms.issuperset(members))
                writer.write(tensors)
                bar.update()
        writer.finish()

    def _files(self) -> Iterator["_Targets"]:
        """What each file has."""
        names = _target_names(self._config)
        for _, specs in piece_specs(self._config, own_head=self.own_head):
            linear = {name for spec in specs.values() if spec.is_linear for name in spec.sources}
            targets = _Targets({}, {}, {name for spec in specs.values() if spec.is_norm for name in spec.sources})
            for canonical in (name for spec in specs.values() for name in spec.sources):
                kind = targets.linear if canonical in linear else targets.other
                kind.setdefault(names[canonical], []).append(canonical)
            yield targets

    def _linear(self, target: str, members: list[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The parts of a linear weight, or the weight."""
        rows = [] if self._format == "safetensors" else self._codes(self._checkpoint, target, members)
        if not rows:
            return {target: self._dense(members, shapes)}
        parts, _ = (awq_parts if self._format == "awq" else compressed_parts)(rows, target)
        return {f"{target.removesuffix('.weight')}.{part}": array for part, array in parts.items()}

    def _codes(self, checkpoint: AnyCheckpoint, target: str, members: list[str]) -> list[Rows]:
        """The codes that a tensor is made of, one below the other; none if it is not quantised.

        Raises ValueError where only some of them are.
        """
        if isinstance(checkpoint, SafetensorsFolder):
            return []
        sources = [self._sources[name] for name in members]
        quantised = [source for source in sources if checkpoint.code_bits(source.name) is not None]
        if quantised and len(quantised) != len(members):
            raise ValueError(f"{target} is one tensor in this family, and only a part of it is quantised")
        rows = []
        for source in quantised:
            tensor = checkpoint.quantized(source.name)
            assert tensor is not None
            start, stop = source.rows or (0, tensor.shape[0])
            if source.unpermute_heads is None:
                rows.append((tensor, start, stop))
            else:
                rows.append((_unpermuted(tensor, start, stop, source.unpermute_heads), 0, stop - start))
        return rows

    def _dense(self, members: list[str], shapes: Mapping[str, tuple[int, ...]], *, norm: bool = False) -> np.ndarray:
        parts = []
        for name in members:
            part = np.empty(shapes[name], np.float32 if norm else self._dtype)
            self._read_into(name, part)
            parts.append(part - np.float32(self._norm_offset) if norm else part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unpermuted(tensor: QuantizedTensor, start: int, stop: int, heads: int) -> QuantizedTensor:
    """Rows start:stop of a GGUF file's query or key projection, in the model's order."""
    order = unpermute_rows(np.arange(stop - start), heads)

    @functools.cache
    def all_rows() -> Codes:
        return tensor.rows(start, stop)

    def rows(first: int, last: int) -> Codes:
        found, at = all_rows(), order[first:last]
        offsets = None if found.offsets is None else found.offsets[at]
        return dataclasses.replace(found, codes=found.codes[at], scales=found.scales[at], offsets=offsets)

    return QuantizedTensor((stop - start, tensor.shape[1]), rows)


def _target_names(config: ModelConfig) -> dict[str, str]:
    """The tensor of the family's folders that each canonical one is, or is a part of."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sources, _ = hugging_face_sources(
        config.model_type,
        num_layers=config.num_layers,
        q_rows=q_rows,
        kv_rows=kv_rows,
        intermediate_size=config.intermediate_size,
        available=(),
        include_absent=True,
    )
    return {canonical: source.name for canonical, source in sources.items()}
