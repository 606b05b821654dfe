"""`pull` against a server that answers as the Hugging Face Hub does; huggingface_hub itself runs, nothing is replaced.

The protocol is the part that it needs: what a repository holds, HEAD and GET of a file, errors in headers.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

FAMILY = Path(__file__).parent / "fixtures" / "families" / "llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tiny-llama"
NOT_WANTED = {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit('code of a checkpoint ran')"}


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, `files`; `someone/gated` is gated, all else is not there. `asked` lists what was fetched."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        for listing in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main"):
            if path == listing:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
                return self._send({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False}, body)
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            return self._send(tree, body)
        for revision in ("main", COMMIT):
            prefix = f"/{REPOSITORY}/resolve/{revision}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in self.files:
                name = path.removeprefix(prefix)
                if body:
                    self.asked.append(name)
                tag = {"ETag": f'"{hashlib.sha1(self.files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(self.files[name], body, tag)
            if path.startswith(prefix):
                return self._send(b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, 404)
        if "someone/gated" in path:
            return self._send(b"", body, {"X-Error-Code": "GatedRepo"}, 403)
        return self._send(b"", body, {"X-Error-Code": "RepoNotFound"}, 404)

    def _send(self, content: object, body: bool, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *_args: object) -> None:
        """Requests are no output of the tests."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The environment of a process for which the server is the Hub, with a cache of its own."""
    Hub.files = {path.name: path.read_bytes() for path in FAMILY.iterdir() if path.is_file()} | NOT_WANTED
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
        "JAX_PLATFORMS": "cpu",
    }
    yield environment
    server.shutdown()
    server.server_close()
    thread.join()


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxinfer", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_repository_is_fetched_once_and_loads(hub):
    Hub.asked.clear()
    pulled = run(hub, "pull", REPOSITORY)
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip().splitlines()[-1])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in Hub.files.items() if name.endswith((".json", ".jinja", ".safetensors"))
    }
    assert not set(Hub.asked) & set(NOT_WANTED), "code and pickles are not even fetched"

    Hub.asked.clear()
    shown = run(hub, "info", REPOSITORY)
    assert shown.returncode == 0, shown.stderr
    assert "llama" in shown.stdout
    assert Hub.asked == [], "what is in the cache is not fetched again"

    offline = run(hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "info", REPOSITORY)
    assert (offline.returncode, offline.stdout) == (0, shown.stdout), offline.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/gated", "someone/gated is gated: accept its terms"),
        ("someone/nothing", "someone/nothing is not on the Hugging Face Hub, or is private"),
        (f"{REPOSITORY}:model.Q4_1.gguf", f"{REPOSITORY} has no file model.Q4_1.gguf"),
    ],
)
def test_errors_of_the_hub(hub, name, message):
    failed = run(hub, "pull", name)
    assert failed.returncode not in (0, 1) and message in failed.stderr, failed.stderr
    assert "Traceback" not in failed.stderr
