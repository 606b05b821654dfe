"""Test settings: shapes checked at run time, strict dtypes and ranks, a fixed number of CPU devices."""

import gc
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", os.environ.get("JAXINFER_TEST_PLATFORM", "cpu"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["JAXINFER_COMPILATION_CACHE"] = "off"  # programs of an earlier run must not stand in for this one's

import jaxtyping
import pytest

for _package in ("jaxinfer", "pallas_kernels", "checkpoints"):
    jaxtyping.install_import_hook(_package, "beartype.beartype")

import jax
import numpy as np

import checkpoints.progress

checkpoints.progress.LOG_INTERVAL = 1e9  # what standard error shows must not depend on how long a test takes
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this process has none"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


MOST_MAPPINGS = {"between files": 20_000, "within a file": 40_000}
"""A process may have 65,530 mappings on Linux; every compiled program takes several, and at the limit LLVM crashes."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets compiled programs before there are too many: a worker compiles thousands of them."""
    maps = pathlib.Path("/proc/self/maps")
    if nextitem is None or not maps.exists():
        return
    where = "within a file" if nextitem.path == item.path else "between files"
    if maps.read_bytes().count(b"\n") > MOST_MAPPINGS[where]:
        jax.clear_caches()
        programs = sys.modules.get("jaxinfer.engine.programs")
        if programs is not None:
            programs._SHARED.clear()
        gc.collect()
