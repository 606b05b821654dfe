"""Products of 8-bit codes as XLA compiles them for an H200: the weight is read as it is, and no copy of it is made but
for many rows by floats in blocks.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import json
import os
import subprocess
import sys

import pytest
from compiled_for_h200 import H200, needs_cuda_build

pytestmark = needs_cuda_build

OUT, IN = 32768, 4096

# A process of its own: the device is pretended.
COMPILE = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jaxinfer.layers.linear import linear
from jaxinfer.layers.weights import BlockCodes, ScaledCodes

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
jax.default_backend = lambda: "gpu"
dtype, out_features, in_features = sys.argv[1], *map(int, sys.argv[2:4])

def array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

if dtype == "blocks":
    codes = array(out_features, in_features, dtype=jnp.float8_e4m3fn)
    weight = BlockCodes(codes, array(out_features // 128, in_features // 128, dtype=jnp.float32), (128, 128))
else:
    weight = ScaledCodes(array(out_features, in_features, dtype=dtype), array(out_features, dtype=jnp.float32))
head = jax.jit(lambda x, weight: linear(x, weight, out_dtype=jnp.float32))
scratch = {}
for rows in map(int, sys.argv[4:]):
    compiled = head.lower(array(rows, in_features, dtype=jnp.bfloat16), weight).compile()
    scratch[rows] = compiled.memory_analysis().temp_size_in_bytes
print(json.dumps(scratch))
"""


def scratch(dtype: str, *rows: int) -> dict[int, int]:
    """Bytes of temporaries of the product of so many rows."""
    command = [sys.executable, "-c", COMPILE, dtype, str(OUT), str(IN), *map(str, rows)]
    result = subprocess.run(
        command, input=H200, capture_output=True, text=True, timeout=300, check=False, env=os.environ
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = {int(key): value for key, value in json.loads(result.stdout.splitlines()[-1]).items()}
    assert tuple(found) == rows
    return found


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_no_copy_of_the_weight_is_made(dtype: str) -> None:
    """Converted to bfloat16 it would take 268 MB; the largest product is 34 MB, which several parts may have to add."""
    found = scratch(dtype, 1, 16, 64, 256)
    assert all(size < OUT * IN / 2 for size in found.values()), found


def test_floats_in_blocks_are_read_as_they_are_by_few_rows() -> None:
    """One row in a single reduction. For 16, sums of the 32 columns of blocks, 67 MB; many rows decode the weight."""
    found = scratch("blocks", 1, 16, 256)
    assert found[1] < 1e4
    assert found[16] < 1.1 * 16 * OUT * 4 * IN / 128
    assert found[256] < 1.3 * 2 * OUT * IN
