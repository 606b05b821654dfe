"""The INT4 kernel for many rows as ptxas compiles it: its products must not wait for each other.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_compiled_for_cuda import H200

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the CUDA build of JAX (jax[cuda13]) to compile for a GPU",
)

COMPILE = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from pallas_kernels.int4_matmul import PackedInt4, wide, wide_tuning

rows, k, n = map(int, sys.argv[1:])
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

scales, zeros = array(jnp.bfloat16, n // 16, k // 128, 16), array(jnp.uint8, n // 16, k // 128, 16)
weight = PackedInt4(array(jnp.int32, n // 16, k // 64, 128), scales, zeros, None, (n, k), 128, "mosaic")
schedule = wide_tuning.wide_schedule(rows, weight)
product = jax.jit(lambda x, w: wide.int4_matmul(x, w, schedule=schedule, out_dtype=jnp.dtype(jnp.bfloat16)))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    product.trace(array(jnp.bfloat16, rows, k), weight).lower().compile()
"""


@pytest.mark.parametrize("rows", [64, 256, 2048])
def test_products_are_not_serialised_and_nothing_is_spilled(rows: int, tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, str(rows), "4096", "14336"],
        input=H200,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    (report,) = [path.read_text() for path in tmp_path.glob("int4_matmul_wide_*.ptxas")]  # XLA numbers its kernels
    assert "Used" in report
    assert "serialized" not in report
    assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"]
