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

rows, k, n = map(int, sys.argv[1:4])
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

def packed(n, k):
    scales, zeros = array(jnp.bfloat16, n // 16, k // 128, 16), array(jnp.uint8, n // 16, k // 128, 16)
    return PackedInt4(array(jnp.int32, n // 16, k // 64, 128), scales, zeros, None, (n, k), 128, "mosaic")

weights = [packed(n, k)]
if sys.argv[4] == "gated":
    weights = [packed(2 * n, k), packed(k, n)]
    schedules = wide_tuning.gated_schedules(rows, *weights)
    product = jax.jit(lambda x, norm, *pair: wide.gated_mlp(x, *pair, norm, schedules=schedules, norm_eps=1e-5))
else:
    schedule = wide_tuning.wide_schedule(rows, weights[0])
    options = {"schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "norm_eps": 1e-5}
    product = jax.jit(lambda x, norm, weight: wide.int4_matmul(x, weight, norm, **options))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    product.trace(array(jnp.bfloat16, rows, k), array(jnp.float32, k), *weights).lower().compile()
"""


@pytest.mark.parametrize(
    ("rows", "what"), [(64, "alone"), (256, "alone"), (2048, "alone"), (64, "gated"), (256, "gated")]
)
def test_products_are_not_serialised_and_nothing_is_spilled(rows: int, what: str, tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, str(rows), "4096", "14336", what],
        input=H200,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    reports = [path.read_text() for path in tmp_path.glob("int4_*.ptxas")]  # XLA numbers its kernels
    assert len(reports) == (3 if what == "gated" else 2)  # the norm, and the products
    for report in reports:
        assert "Used" in report
        assert "serialized" not in report
        assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"]
