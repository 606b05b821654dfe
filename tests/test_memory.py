"""Memory is given back with the model, and what is free is asked of those who know."""

import gc
import json
import os
import pathlib
import subprocess
import sys

import jax
import markov
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer import memory
from jaxinfer.memory import free_host_bytes

PARAMS = ji.SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)


def use(model: ji.Model) -> None:
    """Everything that makes arrays from a model: a batch with its cache to the end, one left in the middle, scores."""
    ji.generate(model, [[0], [1, 2]], PARAMS)
    ji.generate(model, [0], PARAMS, draft=ji.NgramDraft(k=2))
    abandoned = ji.stream(model, [[0]], PARAMS)
    next(abandoned)
    ji.logits(model, [[0, 1]])
    ji.score(model, [[0]], [[1, 2]])
    engine = ji.Engine(model, ji.EngineConfig(num_pages=9, max_decode_batch=2))
    engine.generate([[0]], PARAMS)


def live() -> dict[int, jax.Array]:
    gc.collect()
    return {id(array): array for array in jax.live_arrays()}


def test_l1_a_deleted_model_leaves_no_array_behind(tmp_path: pathlib.Path):
    """Trap L1: neither a jit cache nor a batch that was not run to its end holds weights or a cache."""
    folder = markov.save(tmp_path, markov.chain(0, 1, 2, 3))
    before = live()
    for _ in range(2):
        model = ji.load(folder, progress=False)
        use(model)
        del model
        gc.collect()
        left = [(array.dtype, array.shape) for array in jax.live_arrays() if id(array) not in before]
        assert left == []


def test_a_device_that_tells_nothing(monkeypatch: pytest.MonkeyPatch):
    """A GPU that is not of CUDA, its allocator without a limit: there is no driver of CUDA to ask."""

    class Device:
        platform, local_hardware_id = "gpu", 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": 1}

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    assert memory.free_device_bytes() is None


GPU_CONFIG = markov.CONFIG | {
    "vocab_size": 131072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
"""580 MB in bfloat16."""


@pytest.fixture
def gpu_model(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "config.json").write_text(json.dumps(GPU_CONFIG))
    return tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["cuda_async", "platform"])
def test_free_memory_is_known_with_allocators_that_have_no_limit(allocator: str) -> None:
    """What is free shrinks by what an array takes; loading would be refused with 0 bytes free.

    Other processes, tests too, take and give back memory of the card meanwhile: one undisturbed array is enough.
    """
    command = """
import jax, numpy
from jaxinfer.memory import free_device_bytes
jax.block_until_ready(jax.device_put(numpy.zeros(1)))
arrays, seen = [], []
for _ in range(16):
    before = free_device_bytes()
    assert 2 << 28 < before
    arrays.append(jax.block_until_ready(jax.numpy.zeros(1 << 28, "uint8")))
    seen.append(before - free_device_bytes())
assert any((1 << 28) * 0.9 < taken < (1 << 28) * 1.5 for taken in seen), seen
"""
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    run = [sys.executable, "-c", command]
    result = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr


def bytes_in_use() -> int:
    gc.collect()
    stats = jax.local_devices()[0].memory_stats()
    assert stats is not None
    return stats["bytes_in_use"]


@pytest.mark.gpu
def test_l1_a_deleted_model_gives_the_device_its_memory_back(gpu_model: pathlib.Path):
    """Trap L1: within 2 % of the model after it is deleted, and five rounds do not climb."""
    before = bytes_in_use()
    after = []
    for seed in range(5):
        model = ji.load(gpu_model, random_weights=seed, progress=False)
        size = 2 * model.num_parameters
        assert bytes_in_use() - before > 0.98 * size
        use(model)
        del model
        after.append(bytes_in_use())
    assert max(after) - before < 0.02 * size
    assert after[-1] - after[0] < 0.001 * size


@pytest.mark.gpu
def test_l1_after_running_out_of_memory_the_next_smaller_call_works(gpu_model: pathlib.Path):
    """Trap L1: the saved traceback still holds the frames of the call that failed, as in a notebook."""
    model = ji.load(gpu_model, random_weights=0, progress=False)
    expected = np.asarray(ji.logits(model, [[1, 2, 3]]))
    before = bytes_in_use()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        # 128 * 4096 * 131072 float32 are 275 GB, more than any card has.
        ji.logits(model, np.ones((128, 4096), np.int32)).block_until_ready()
    assert caught.value.__traceback__ is not None
    assert bytes_in_use() - before < 0.02 * 2 * model.num_parameters
    np.testing.assert_array_equal(np.asarray(ji.logits(model, [[1, 2, 3]])), expected)
    assert len(ji.generate(model, [[1, 2, 3]], PARAMS)[0].token_ids) == 4


# --- What is free on the host


GIB = 2**30


def machine(root: pathlib.Path, groups: str, **files: object) -> pathlib.Path:
    """A machine with 8 GiB free: `groups` is /proc/self/cgroup, `files` are below /sys/fs/cgroup (`__` is a slash)."""
    contents = {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n"}
    contents["proc/self/cgroup"] = groups
    contents |= {f"sys/fs/cgroup/{name.replace('__', '/')}": f"{text}\n" for name, text in files.items()}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


STAT = "anon 5\ninactive_file 1073741824\nactive_file 7"
STAT_1 = "cache 5\ninactive_file 1\ntotal_inactive_file 1073741824"


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/\n", {"memory.max": "max", "memory.current": 5 * GIB}, 8 * GIB),
        # 4 GiB allowed, 3 used, of which 1 is cached files.
        ("0::/\n", {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": STAT}, 2 * GIB),
        ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
        # A group inside others: the tightest counts.
        (
            "0::/a/b\n",
            {"a__b__memory.max": "max", "a__b__memory.current": 1, "a__memory.max": GIB, "a__memory.current": 0},
            GIB,
        ),
        # The host's path, seen from inside the container.
        ("0::/kubepods/pod1\n", {"memory.max": 2 * GIB, "memory.current": GIB}, GIB),
        # Version 1, whose "no limit" is a number.
        (
            "4:cpu,cpuacct:/x\n3:memory:/x\n0::/\n",
            {"memory__x__memory.limit_in_bytes": 3 * GIB, "memory__x__memory.usage_in_bytes": 2 * GIB}
            | {"memory__x__memory.stat": STAT_1},
            2 * GIB,
        ),
        ("3:memory:/\n", {"memory__memory.limit_in_bytes": 2**63 - 4096, "memory__memory.usage_in_bytes": 0}, 8 * GIB),
    ],
)
def test_control_groups_bound_the_free_memory_of_the_host(
    tmp_path: pathlib.Path, groups: str, files: dict[str, object], free: int
):
    assert free_host_bytes(machine(tmp_path, groups, **files)) == free


def test_a_kernel_without_control_groups(tmp_path: pathlib.Path):
    machine(tmp_path, "")
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_host_bytes(tmp_path) == 8 * GIB


def test_free_memory_of_this_machine():
    assert 0 < free_host_bytes() < 2**60
