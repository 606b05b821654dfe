"""Test settings: shapes checked at run time, strict dtypes and ranks, a fixed number of CPU devices."""

import gc
import os
import pathlib
import sys
from typing import Any

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

QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""No optimisation by LLVM, fusions written by LLVM alone and not by MLIR, and no splitting of a program for threads."""
if os.environ["JAX_PLATFORMS"] == "cpu":
    # More than half of the tests' time went into compiling. Processes that tests start do without these flags: there
    # the programs are those that users have.
    with pytest.MonkeyPatch.context() as _patch:
        # The last of two values holds: XLA_FLAGS can say otherwise.
        _patch.setenv("XLA_FLAGS", " ".join([*QUICK_TO_COMPILE, os.environ.get("XLA_FLAGS", "")]))
        jax.devices()  # reads the flags

checkpoints.progress.LOG_INTERVAL = 1e9  # what standard error shows must not depend on how long a test takes
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {group: index for index, group in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(rank)))
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this process has none"))


LONGEST_FIRST = (
    "test_engine",
    "test_engine_speculation.py",
    "test_families.py",
    "test_speculative_generate.py",
    "test_generate.py",
    "test_memory_plan.py",
    "test_notebook.py",
)
"""What would be waited for at the end if it were begun late."""


def group_of(nodeid: str) -> str:
    """Tests of a group run in one process: two thirds of their time goes into compiling, and programs are shared only
    there. A group is a file; but those of the engine, all for one model and one size, are a group together.
    """
    file = pathlib.PurePath(nodeid.partition("::")[0]).name
    return "test_engine" if file.startswith("test_engine_") and file not in LONGEST_FIRST else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    if os.environ.get("JAXINFER_TEST_PLATFORM") == "cuda":
        return None  # each kernel is a program of its own, and some files have most of them
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # it would begin with the groups of the most tests
    return Scheduling(config, log)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


MOST_MAPPINGS = 40_000
"""A process may have 65,530 mappings on Linux; every compiled program takes several, and at the limit LLVM crashes."""
PROGRAMS_BETWEEN_LOOKS = 100
"""Counting thousands of mappings takes 20 ms, too long for every test. Programs have 4 to about 100 each."""
_compiled: list[str] = []


def _note_compilation(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def pytest_runtest_teardown() -> None:
    """Forgets compiled programs before there are too many: a worker compiles thousands of them."""
    maps = pathlib.Path("/proc/self/maps")
    if len(_compiled) < PROGRAMS_BETWEEN_LOOKS or not maps.exists():
        return
    _compiled.clear()
    if maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        programs = sys.modules.get("jaxinfer.engine.programs")
        if programs is not None:
            programs._SHARED.clear()
        gc.collect()
