"""Weights of a model from the files of a checkpoint: everything is checked first, then read."""

import contextlib
import dataclasses
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import names, names_gguf
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile
from checkpoints.names import Mismatch, TensorSource
from checkpoints.progress import progress_bar
from checkpoints.quantized import QuantizedFolder, open_folder
from checkpoints.safetensors import SafetensorsFolder
from jaxinfer.config import ModelConfig
from jaxinfer.memory import free_device_bytes, free_host_bytes, shown_bytes
from jaxinfer.packed_weights import PackedReader
from jaxinfer.params import (
    Piece,
    ReadInto,
    assemble,
    canonical_shapes,
    has_own_head,
    largest_piece,
    least_bytes,
    linear_names,
)
from jaxinfer.quantization.plan import Plan
from jaxinfer.quantization.quantizer import QuantizingReader
from jaxinfer.store.tensors import StoredTensors

log = logging.getLogger("jaxinfer")

type AnyCheckpoint = SafetensorsFolder | QuantizedFolder | GGUFFile | StoredTensors


@dataclasses.dataclass(frozen=True)
class WeightsRequest:
    """How `load` was asked to read weights.

    `streamed` says that each piece is gone before the next is read, so that only the largest has to fit. `fitted` is
    the plan of who asks for decoded weights in order to quantise them.
    """

    name: str
    dtype: jnp.dtype
    packed: bool | None
    plan: Plan | None
    progress: bool
    streamed: bool = False
    fitted: Plan | None = None


def check_memory(
    config: ModelConfig, dtype: jnp.dtype, name: str, *, packed: bool = False, plan: Plan | None = None
) -> None:
    """Raises ValueError for weights that cannot fit, as those of a damaged configuration may not."""
    check_bytes(least_bytes(config, dtype, packed=packed, plan=plan), name)


def check_bytes(
    needed: int,
    name: str,
    what: str = "the weights take at least",
    remedy: str = "load a smaller model, or with a smaller dtype",
) -> None:
    """Raises ValueError for more bytes of weights than are free."""
    free = free_device_bytes()
    if free is None:
        if jax.default_backend() != "cpu":
            return
        free = free_host_bytes()
    if needed > free:
        raise ValueError(f"{name}: {what} {shown_bytes(needed)} and {shown_bytes(free)} are free; {remedy}")


def wants_codes(packed: bool | None, dtype: jnp.dtype, backend: str) -> bool:
    """Whether the codes of a quantised checkpoint stay packed where they can: as asked, or where a kernel is likely."""
    return packed or (packed is None and dtype == jnp.bfloat16 and backend != "cpu")


def read_safetensors(path: pathlib.Path, config: ModelConfig, request: WeightsRequest) -> Iterator[Piece]:
    """The weights of a folder, piece by piece."""
    name = request.name
    with contextlib.closing(open_folder(path)) as checkpoint:
        if checkpoint.ignored:
            log.warning("%s: not read, as they are not part of the model: %s", name, ", ".join(checkpoint.ignored))
        if isinstance(checkpoint, QuantizedFolder):
            for note in checkpoint.notes:
                log.warning("%s: %s", name, note)
        yield from read_pieces(config, checkpoint, match_tensors(config, checkpoint), request)


def read_gguf(checkpoint: GGUFFile, config: ModelConfig, request: WeightsRequest) -> Iterator[Piece]:
    """The weights of a GGUF file, piece by piece."""
    return read_pieces(config, checkpoint, match_tensors(config, checkpoint), request)


@dataclasses.dataclass(frozen=True)
class Match:
    """Which tensor of a checkpoint fills which parameter. `tied_head` is a tensor that the embedding stands in for."""

    sources: Mapping[str, TensorSource]
    tied_head: str | None
    mismatch: Mismatch


def match_tensors(config: ModelConfig, checkpoint: AnyCheckpoint) -> Match:
    tensors, shapes = checkpoint.tensors, canonical_shapes(config)
    if isinstance(checkpoint, GGUFFile):
        everywhere, skipped = names_gguf.gguf_sources(
            checkpoint.metadata["general.architecture"],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            available=tensors,
            include_absent=True,
            **_sizes(config),
        )
    else:
        everywhere, skipped = names.hugging_face_sources(
            config.model_type, available=tensors, include_absent=True, **_sizes(config)
        )
    sources = {canonical: source for canonical, source in everywhere.items() if source.name in tensors}
    if isinstance(checkpoint, QuantizedFolder):
        unused = [source.name for canonical, source in sources.items() if canonical not in shapes]
        skipped |= checkpoint.skipped | checkpoint.zero_biases(unused)
    head = sources.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if head is not None:
        skipped[head.name] = "the configuration ties the head to the embedding"
    mismatch = names.compare(expected=shapes, sources=everywhere, tensors=tensors, skipped=skipped)
    return Match(sources, None if head is None else head.name, mismatch)


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "num_layers": config.num_layers,
        "q_rows": config.num_heads * config.head_dim,
        "kv_rows": config.num_kv_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }


def read_pieces(
    config: ModelConfig, checkpoint: AnyCheckpoint, match: Match, request: WeightsRequest
) -> Iterator[Piece]:
    """Checks that tensors and parameters match one to one, then reads them, piece by piece.

    A head that is tied and yet among the sources is one of its own.
    """
    name, dtype, packed, plan = request.name, request.dtype, request.packed, request.plan
    if match.mismatch:
        raise CheckpointError(f"{name}: {match.mismatch}")
    sources, shapes = match.sources, canonical_shapes(config)
    head = "lm_head.weight"
    own_head = has_own_head(plan) or (config.tie_word_embeddings and head in sources)
    if own_head and config.tie_word_embeddings:
        embedding = "embed_tokens.weight"
        sources = {**sources, head: sources.get(head, sources[embedding])}
        shapes = {**shapes, head: shapes[embedding]}
    read_into = tensor_reader(checkpoint, sources)
    read_packed = None
    wanted = wants_codes(packed, dtype, jax.default_backend())
    if plan is not None:
        plan.check(linear_names(config))
        read_packed = QuantizingReader(plan, read_into, np.dtype(dtype))
    elif wanted and not isinstance(checkpoint, SafetensorsFolder):
        read_packed = PackedReader(checkpoint, sources, read_into, np.dtype(dtype), only_for_kernel=packed is None)
    if request.streamed:
        check_bytes(largest_piece(config) * dtype.itemsize, name, "the largest layer, or embedding and head, take")
    else:
        check_memory(config, dtype, name, packed=isinstance(read_packed, PackedReader), plan=plan)
    quantised_by = plan or request.fitted
    if quantised_by is not None:
        quantised = {f"{weight}.weight" for weight in linear_names(config) if quantised_by.precision(weight)}
        _warn_of_codes(name, checkpoint, [sources[weight].name for weight in sources if weight in quantised])
    tied = match.tied_head
    if tied is not None and not _same_rows(checkpoint, tied, sources["embed_tokens.weight"].name):
        log.warning("%s: %s differs from the embedding it is tied to; it is ignored", name, tied)
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with progress_bar(
        total=total, unit="B", unit_scale=True, desc=f"Loading {name}", shown=request.progress, leave=False
    ) as bar:
        yield from assemble(config, dtype, read_into, bar.update, read_packed, own_head=own_head)
    if isinstance(read_packed, PackedReader):
        for reason, found in read_packed.decoded.items():
            log.warning(
                "%s: %d weights are decoded to %s, %s in place of %s%s: %s",
                *(name, found.num_tensors, dtype),
                *(shown_bytes(found.num_weights * dtype.itemsize), shown_bytes(found.num_bits // 8)),
                *(", although packed=True" if packed else "", reason),
            )


def tensor_reader(checkpoint: AnyCheckpoint, sources: Mapping[str, TensorSource]) -> ReadInto:
    def read_into(name: str, out: np.ndarray) -> None:
        source = sources[name]
        rows = None if source.rows is None else slice(*source.rows)
        checkpoint.read_into(source.name, out, rows)
        if source.unpermute_heads is not None:
            out[...] = names_gguf.unpermute_rows(out, source.unpermute_heads)

    return read_into


def _warn_of_codes(name: str, checkpoint: AnyCheckpoint, wanted: list[str]) -> None:
    """Says how many of the tensors that are to be quantised are quantised already: that costs quality twice."""
    if isinstance(checkpoint, SafetensorsFolder):
        return
    codes = [source for source in wanted if checkpoint.code_bits(source) is not None]
    if codes:
        kinds = sorted({checkpoint.tensors[source].dtype for source in codes})
        log.warning(
            "%s: %d of %d weights to be quantised are codes already (%s), which are decoded and rounded again: that "
            "loses more than quantising the original does; use the original, or load these codes without a plan",
            *(name, len(codes), len(wanted), ", ".join(kinds)),
        )


def _same_rows(checkpoint: AnyCheckpoint, first: str, second: str, rows_at_once: int = 4096) -> bool:
    """Whether two tensors are equal, read a few rows at a time."""
    shape = checkpoint.tensors[first].shape
    if shape != checkpoint.tensors[second].shape:
        return False
    for start in range(0, shape[0], rows_at_once):
        rows = slice(start, min(start + rows_at_once, shape[0]))
        if not np.array_equal(checkpoint.read(first, rows), checkpoint.read(second, rows)):
            return False
    return True
