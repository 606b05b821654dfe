"""The prefill kernel as ptxas compiles it: softmax beside products, no product waits for another, nothing is spilled.

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
from pallas_kernels.paged_attention.formats import FORMATS
from pallas_kernels.paged_prefill import mosaic, plan

kv, head_dim = sys.argv[1], int(sys.argv[2])
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

form = FORMATS.get(kv)
storage, width = (jnp.bfloat16, head_dim) if form is None else (form.storage, form.width(head_dim))
pool, row = array(storage, 257, 8, 16, width), array(jnp.int32, 1)
scales = () if form is None else (array(jnp.float32, 257, 8, 16),) * 2
call = plan.plan_for(batch=1, tokens=512, q_heads=32, kv_heads=8, head_dim=head_dim, page_size=16, pages_per_row=256,
                     scale=0.1, kv=kv)

def run(q, k, v, table, starts, lengths, *scales):
    return mosaic.paged_prefill(q, k, v, table, starts, lengths, None, scales or None, plan=call, return_lse=False)[0]

with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    queries = array(jnp.bfloat16, 1, 512, 32, head_dim)
    jax.jit(run).trace(queries, pool, pool, array(jnp.int32, 1, 256), row, row, *scales).lower().compile()
"""


@pytest.mark.parametrize(("kv", "head_dim"), [("bfloat16", 128), ("bfloat16", 64), ("int8", 128), ("int4", 128)])
def test_products_are_not_serialised_and_nothing_is_spilled(kv: str, head_dim: int, tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, kv, str(head_dim)],
        input=H200,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    report = (tmp_path / "paged_prefill_0.ptxas").read_text()
    assert "Used" in report
    assert "serialized" not in report
    assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"]
    # In the loop: this tile's scores, the last one's values, all weights, and only then the wait for the values.
    ptx = (tmp_path / "paged_prefill_0.ptx").read_text()
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1;") :]
    assert loop[: loop.index("wgmma.wait_group.sync.aligned 0;")].count("ex2.approx") >= 64
