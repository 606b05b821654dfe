"""Programs compiled for an H200 on a machine that has none, each in a process of its own: the device is pretended."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

needs_cuda_build = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the CUDA build of JAX (jax[cuda13]) to compile for a GPU",
)

# What the compiler is told of the card it compiles for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

OPENING = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

def packed(out_features, in_features):
    from pallas_kernels.int4_matmul import PackedInt4

    strips = out_features // 16
    scales, zeros = (array(dtype, strips, in_features // 128, 16) for dtype in (jnp.bfloat16, jnp.uint8))
    codes = array(jnp.int32, strips, in_features // 64, 128)
    return PackedInt4(codes, scales, zeros, None, (out_features, in_features), 128, "mosaic")

def compiled(function, *arguments):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).trace(*arguments).lower().compile()

"""
"""What a program may use: arrays and weights without numbers, and their function compiled."""


def run_program(program: str, *arguments: object, dump: pathlib.Path) -> str:
    """What OPENING and a program print; Mosaic's PTX and what ptxas said of it are in `dump`."""
    answer = subprocess.run(
        [sys.executable, "-c", OPENING + program, *map(str, arguments)],
        input=H200,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "MOSAIC_GPU_DUMP_TO": str(dump)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def check_reports(dump: pathlib.Path, kernels: str, count: int) -> list[int]:
    """Kernels of so many names, as `kernels` is a pattern of: nothing is spilled, no product waits. Their registers."""
    reports = [path.read_text() for path in dump.glob(f"{kernels}.ptxas")]  # XLA numbers its kernels
    assert len(reports) == count
    for report in reports:
        assert "serialized" not in report
        assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"]
    return [int(registers) for report in reports for registers in re.findall(r"Used (\d+) registers", report)]
