"""What a path or a name leads to, opened without reading its weights: a folder, a GGUF file, or a store."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

from checkpoints.errors import CheckpointError, exists
from checkpoints.gguf import GGUFFile, whole_models
from checkpoints.names import Mismatch
from checkpoints.pull import MODELS, pull, unknown_model
from checkpoints.quantized import open_folder
from checkpoints.safetensors import SafetensorsFolder, read_json
from checkpoints.tensors import TensorInfo
from jaxinfer.checkpoint_weights import (
    AnyCheckpoint,
    Match,
    WeightsRequest,
    check_bytes,
    match_tensors,
    read_gguf,
    read_pieces,
    read_safetensors,
)
from jaxinfer.config_gguf import from_gguf
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.params import Piece
from jaxinfer.quantization.report import QuantizationReport, report_of
from jaxinfer.store.manifest import GGUF_METADATA, MANIFEST, ORIGINAL, is_store
from jaxinfer.store.reader import Store, gguf_metadata
from jaxinfer.store.tensors import StoredTensors
from jaxinfer.store.unfinished import interrupted
from jaxinfer.tokenization import tokenizer_from_folder, tokenizer_from_gguf

_MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""What a folder has beside weights, of that which is read here."""


class FolderSource:
    """A Hugging Face folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.tokenizer = tokenizer_from_folder(path)
        files = read_json(path, "config.json"), read_json(path, "generation_config.json", optional=True)
        with _naming(path):
            self.config = from_hugging_face(
                *files,
                num_tokens=None if self.tokenizer is None else self.tokenizer.num_tokens,
                extra_eos=() if self.tokenizer is None else map(int, self.tokenizer.eos_token_ids),
            )

    def pieces(self, request: WeightsRequest) -> Iterator[Piece]:
        """The weights on the default device, piece by piece."""
        return read_safetensors(self.path, self.config, request)

    def contents(self) -> tuple[Mapping[str, TensorInfo], Mismatch | None]:
        """The tensors of the files, and in what they and the configuration disagree; a folder may have none."""
        if not any(self.path.glob("*.safetensors")):
            return {}, None
        with contextlib.closing(SafetensorsFolder(self.path)) as weights, self.tensors() as (_, match):
            return weights.tensors, match.mismatch

    @contextlib.contextmanager
    def tensors(self) -> Iterator[tuple[AnyCheckpoint, Match]]:
        """The weights tensor by tensor."""
        with contextlib.closing(open_folder(self.path)) as checkpoint:
            yield checkpoint, match_tensors(self.config, checkpoint)

    def files(self) -> dict[str, bytes]:
        """What belongs to the model beside weights, for a store's `original/`."""
        found = [path for pattern in _MODEL_FILES for path in sorted(self.path.glob(pattern)) if path.is_file()]
        return {path.relative_to(self.path).as_posix(): path.read_bytes() for path in found}


class GGUFSource:
    """A GGUF file, of one part or several."""

    def __init__(self, checkpoint: GGUFFile) -> None:
        self.path = checkpoint.paths[0]
        self._checkpoint = checkpoint
        with _naming(self.path):
            config = from_gguf(checkpoint.metadata, checkpoint.tensors, checkpoint.read)
            self.tokenizer = tokenizer_from_gguf(checkpoint.metadata)
        if self.tokenizer is not None:
            eos = tuple(sorted({*config.eos_token_ids, *map(int, self.tokenizer.eos_token_ids)}))
            num_tokens = min(config.vocab_size, self.tokenizer.num_tokens)
            config = dataclasses.replace(config, eos_token_ids=eos, num_tokens=num_tokens)
        self.config = config

    def pieces(self, request: WeightsRequest) -> Iterator[Piece]:
        """The weights on the default device, piece by piece."""
        return read_gguf(self._checkpoint, self.config, request)

    def contents(self) -> tuple[Mapping[str, TensorInfo], Mismatch | None]:
        """The tensors of the file, and in what they and the metadata disagree."""
        return dict(self._checkpoint.tensors), match_tensors(self.config, self._checkpoint).mismatch

    @contextlib.contextmanager
    def tensors(self) -> Iterator[tuple[AnyCheckpoint, Match]]:
        """The weights tensor by tensor."""
        yield self._checkpoint, match_tensors(self.config, self._checkpoint)

    def files(self) -> dict[str, bytes]:
        """What belongs to the model beside weights, for a store's `original/`."""
        return {GGUF_METADATA: gguf_metadata(self._checkpoint.metadata)}


class StoreSource:
    """A store of `jaxinfer.store`."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.store = Store(path)
        self.config = self.store.config
        self.tokenizer = self.store.tokenizer()

    @property
    def report(self) -> QuantizationReport | None:
        """How well it was quantised, if that was measured as `jaxinfer.quantize` does."""
        return report_of(self.store.manifest.quality)

    def pieces(self, request: WeightsRequest) -> Iterator[Piece]:
        """The weights on the default device, piece by piece: as they are stored, unless they are to be decoded."""
        if request.plan is None and request.packed is not False:
            if not request.streamed:
                check_bytes(self.store.nbytes, request.name)
            yield from self.store.pieces(request.dtype, request.name, progress=request.progress)
            return
        with self.tensors() as (checkpoint, match):
            # Norms are stored with their offset added.
            config = dataclasses.replace(self.config, norm_offset=0.0)
            yield from read_pieces(config, checkpoint, match, request)

    def contents(self) -> tuple[Mapping[str, TensorInfo], Mismatch | None]:
        """The tensors under their canonical names; a store that could be opened fits its configuration."""
        return StoredTensors(self.store).tensors, _FITS

    @contextlib.contextmanager
    def tensors(self) -> Iterator[tuple[AnyCheckpoint, Match]]:
        """The weights tensor by tensor."""
        with contextlib.closing(StoredTensors(self.store)) as checkpoint:
            yield checkpoint, Match(checkpoint.sources, None, _FITS)

    def files(self) -> dict[str, bytes]:
        """What belonged to the model beside weights when the store was written."""
        prefix = f"{ORIGINAL}/"
        return {name.removeprefix(prefix): (self.path / name).read_bytes() for name in self.store.manifest.files}


type Source = FolderSource | GGUFSource | StoreSource

_FITS = Mismatch((), (), (), (), {})


@contextlib.contextmanager
def open_source(path_or_name: str | os.PathLike[str], *, progress: bool) -> Iterator[Source]:
    """Opens a folder, a .gguf file, a store, or what a name that is no path is pulled to.

    Raises CheckpointError or ValueError, naming the file and the remedy, for what cannot be read.
    """
    path = _resolve(path_or_name, progress)
    if is_store(path):
        yield StoreSource(path)
    elif path.is_dir():
        yield FolderSource(path)
    else:
        with contextlib.closing(GGUFFile(path)) as checkpoint:
            yield GGUFSource(checkpoint)


def _resolve(path_or_name: str | os.PathLike[str], progress: bool) -> pathlib.Path:
    """The folder or .gguf file that was meant; names that are no path are pulled."""
    if not isinstance(path_or_name, str | os.PathLike) or not os.fspath(path_or_name):
        raise ValueError(f"the model is {path_or_name!r}; give the path of a folder or .gguf file, or a name to fetch")
    path = pathlib.Path(path_or_name)
    with contextlib.suppress(RuntimeError):  # ~name of nobody here
        path = path.expanduser()
    if not path.exists():
        text = os.fspath(path_or_name)
        for folder in interrupted(path):
            raise FileNotFoundError(f"{text}: its write was interrupted or still runs ({folder.name}); write it again")
        is_file_name = path.suffix in (".gguf", ".safetensors", ".json") and ":" not in text
        looks_like_path = path.is_absolute() or text.startswith((".", "~")) or is_file_name or text.count("/") > 1
        if looks_like_path:
            raise FileNotFoundError(f"{text}: no such file or folder; a model to fetch is written name or owner/name")
        if "/" not in text and text not in MODELS:  # it may have been meant as either
            raise CheckpointError(f"{text}: no such file or folder, and {unknown_model(text)}")
        path = pull(text, progress=progress)
    if path.is_dir() and not is_store(path) and not exists(path / "config.json"):
        if (path / "weights" / "top").is_dir():
            raise FileNotFoundError(f"{path}: a store without its {MANIFEST}; copy the whole store, or write it again")
        ggufs = whole_models(path.glob("*.gguf"))
        if len(ggufs) != 1:
            listed = ", ".join(file.name for file in ggufs) or "no .gguf file either"
            raise FileNotFoundError(
                f"{path}: no config.json in this folder ({listed}); "
                "give a Hugging Face model folder or the path of one .gguf file (of a split model, any part)"
            )
        path = ggufs[0]
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file; give a .gguf file or the folder that holds config.json")
    return path


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the folder or the file to errors of those who were given its contents only."""
    try:
        yield
    except CheckpointError:  # names its file itself
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
