"""The INT4 kernel of small matrices as ptxas compiles it: all its blocks must be on the card at once.

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
from pallas_kernels.int4_matmul import PackedInt4, mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion

rows, k, n, gated = map(int, sys.argv[1:])
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

scales, zeros = array(jnp.bfloat16, n // 16, k // 128, 16), array(jnp.uint8, n // 16, k // 128, 16)
weight = PackedInt4(array(jnp.int32, n // 16, k // 64, 128), scales, zeros, None, (n, k), 128, "mosaic")
fusion = Fusion(norm_eps=1e-5, gated=True) if gated else Fusion(residual=True)
given = {"norm": array(jnp.float32, k)} if gated else {"residual": array(jnp.bfloat16, rows, n)}
plan = tuning.plan_for(rows, weight, fusion=fusion)
assert plan.schedule.once
options = {"schedule": plan.schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
product = jax.jit(lambda x, weight, given: mosaic.int4_matmul(x, weight, **given, **options))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    product.trace(array(jnp.bfloat16, rows, k), weight, given).lower().compile()
print(plan.threads, plan.shared_bytes, plan.blocks_per_slice)
"""


@pytest.mark.parametrize(("rows", "k", "n", "gated"), [(1, 1024, 6144, 1), (16, 1024, 6144, 1), (2, 3072, 1024, 0)])
def test_all_blocks_are_on_the_card_and_nothing_is_spilled(
    rows: int, k: int, n: int, gated: int, tmp_path: pathlib.Path
) -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, (rows, k, n, gated))],
        input=H200,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    threads, shared_bytes, blocks = map(int, answer.stdout.split())
    (report,) = [path.read_text() for path in tmp_path.glob("int4_*.ptxas")]
    assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"]
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    at_once = -(-blocks // 132)
    assert threads * registers * at_once <= 65536
    assert (shared_bytes + 1024) * (at_once + 1) <= 228 * 1024
