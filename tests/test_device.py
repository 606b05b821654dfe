"""The start of JAX's device: none there, and options that come too late."""

import logging
import os
import pathlib
import subprocess
import sys

import markov
import pytest

import jaxinfer as ji
from jaxinfer import device


def test_l5_memory_options_set_after_the_start_are_warned_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Trap L5: JAX reads them once, so after an out-of-memory error in a notebook setting them does nothing."""
    folder = markov.save(tmp_path, {})
    monkeypatch.setattr(device, "_seen", {})
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        ji.load(folder, progress=False)
        assert caplog.messages == []
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
        ji.load(folder, progress=False)
        ji.load(folder, progress=False)  # said once
        (message,) = caplog.messages
        assert message.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION was changed after JAX had started")
        assert "restart the kernel" in message
        monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
        ji.load(folder, progress=False)
    assert caplog.messages[1].startswith("XLA_PYTHON_CLIENT_PREALLOCATE was changed")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda':\nno CUDA-capable device")]
)
def test_a_device_that_is_not_there_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise error

    monkeypatch.setattr(device.jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"^JAX_PLATFORMS=cuda finds no device .*; set JAX_PLATFORMS=cpu to") as caught:
        device.start_device()
    assert "\n" not in str(caught.value)


def test_the_command_line_without_the_device_that_was_asked_for(tmp_path: pathlib.Path):
    """On a machine without a GPU; one that has it is asked for a device that nothing has."""
    folder = markov.save(tmp_path, {})
    for command in (["info", str(folder)], ["generate", str(folder), "--prompt", "A"]):
        done = subprocess.run(
            [sys.executable, "-m", "jaxinfer.cli", *command],
            env=os.environ | {"JAX_PLATFORMS": "nosuch"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("error: JAX_PLATFORMS=nosuch finds no device (")
