"""Attention of many rows as ptxas makes it for an H200: three blocks on a multiprocessor.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import pathlib

import pytest
from compiled_for_h200 import check_reports, needs_cuda_build, run_program

pytestmark = needs_cuda_build

COMPILE = """
import dataclasses
from pallas_kernels.paged_attention import decode_mosaic
from pallas_kernels.paged_attention.plan import plan_for
from pallas_kernels.token_order import TokenOrder

rows, tokens = map(int, sys.argv[1:])
sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "pages_per_row": 128, "scale": 128**-0.5}
plan = dataclasses.replace(plan_for(batch=rows, tokens=1, **sizes), order=TokenOrder(tokens, 2) if tokens else None)
plan = decode_mosaic.DecodePlan(plan, 128, False, None)
qkv, pool, pages = array(jnp.bfloat16, rows, 1, 6144), array(jnp.bfloat16, 64, 8, 16, 128), array(jnp.int32, rows, 128)
arrays = qkv, pool, pool, pages, array(jnp.int32, rows), *[array(jnp.float32, rows, 1, 64)] * 2

def attention(qkv, keys, values, pages, positions, *rope):
    return decode_mosaic.decode_attention(qkv, keys, values, pages, positions, rope, None, None, plan=plan)

compiled(attention, *arrays)
print(plan.attention.threads)
"""


@pytest.mark.parametrize(("rows", "tokens"), [(184, 0), (200, 104), (256, 128)])
def test_a_third_block_fits(rows: int, tokens: int, tmp_path: pathlib.Path) -> None:
    """Also where heads go to the output projection's order, in tiles of so many tokens."""
    threads = int(run_program(COMPILE, rows, tokens, dump=tmp_path).splitlines()[-1])
    (registers,) = check_reports(tmp_path, "decode_attention*", 1)
    assert 3 * threads * -(-registers // 8) * 8 <= 65536
