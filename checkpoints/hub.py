"""Fetches models from the Hugging Face Hub, into the cache that huggingface_hub keeps."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.progress import is_watched

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPLIT_GGUF = re.compile(r"(.*-)\d{5}(-of-(\d{5})\.gguf)")

# Configuration, tokenizer, chat template and weights at the top of a repository; no code, no pickles, no copies of
# the weights in other formats (those are in folders, or called consolidated*).
_WANTED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]


def pull_repository(name: str, progress: bool, cache_dir: Path | None) -> Path:
    """Fetches `owner/name`, without files that jaxinfer does not read, or one file of it: `owner/name:file.gguf`.

    A repository that is in the cache needs no network. Returns the path of the folder or the file.
    """
    repository, _, file = name.partition(":")
    if not _REPOSITORY.fullmatch(repository) or (":" in name and not file.endswith(".gguf")):
        raise CheckpointError(
            f"{name!r} is neither a file or folder here nor a Hugging Face repository; "
            "write owner/name, or owner/name:file.gguf for one GGUF file of it"
        )
    # Imported here: it takes most of a second, and models of the package index do without it.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The bases are OSError and the error of the HTTP library, which is not the same one in each huggingface_hub.
    bases = (base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    watched = progress and is_watched()
    if progress and not watched:  # huggingface_hub would draw its bars into a log
        print(f"looking for {name} on the Hugging Face Hub, or in its cache here", file=sys.stderr)
    hub_errors: tuple[type[Exception], ...] = (HFValidationError, *bases)
    try:
        with _progress_bars(watched), _no_retry_messages():
            if file:
                parts = [Path(hf_hub_download(repository, part, cache_dir=cache_dir)) for part in _parts_of_gguf(file)]
                return parts[0]
            folder = Path(
                snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, cache_dir=cache_dir)
            )
    except hub_errors as error:
        raise CheckpointError(_explain(name, repository, file, error)) from error
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{repository} has no safetensors weights at its top; of a repository of GGUF files, name one: "
            f"{repository}:NAME.gguf"
        )
    return folder


def _parts_of_gguf(file: str) -> list[str]:
    """All files of a split GGUF model, given any of them, the first one first."""
    match = _SPLIT_GGUF.fullmatch(file)
    if not match:
        return [file]
    return [f"{match[1]}{part:05d}{match[2]}" for part in range(1, int(match[3]) + 1)]


def _explain(name: str, repository: str, file: str, error: BaseException) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # What the Hub said is the error itself, or what made huggingface_hub look into its cache in vain.
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    for cause in causes:
        if isinstance(cause, GatedRepoError):
            return f"{repository} is gated: accept its terms on its Hugging Face page, then run `hf auth login`"
        if isinstance(cause, RepositoryNotFoundError):
            return f"{repository} is not on the Hugging Face Hub, or is private; check the name, or run `hf auth login`"
        if isinstance(cause, RemoteEntryNotFoundError):
            return f"{repository} has no file {file}; its page on the Hugging Face Hub lists those it has"
        if isinstance(cause, OfflineModeIsEnabled):
            return f"{name} is not in the local cache and HF_HUB_OFFLINE is set; unset it, or give the path of a folder"
    cause = causes[-1]
    reason = (str(cause).splitlines() or [""])[0]
    return (
        f"cannot fetch {name} from the Hugging Face Hub ({type(cause).__name__}: {reason}); check the network, "
        "or give the path of a copy on this machine"
    )


@contextmanager
def _progress_bars(progress: bool) -> Iterator[None]:
    """huggingface_hub has one switch for the whole process; it is put back afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _no_retry_messages() -> Iterator[None]:
    """Ten lines of failed attempts before the one that says what is wrong help nobody; they are put back afterwards."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
