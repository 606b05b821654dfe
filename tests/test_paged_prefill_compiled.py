"""The prefill kernel as ptxas compiles it: softmax beside products, no product waits for another, nothing is spilled.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import pathlib

import pytest
from compiled_for_h200 import check_reports, needs_cuda_build, run_program

pytestmark = needs_cuda_build

PROGRAM = """
from pallas_kernels.paged_attention.formats import FORMATS
from pallas_kernels.paged_prefill import mosaic, plan

kv, head_dim = sys.argv[1], int(sys.argv[2])
form = FORMATS.get(kv)
storage, width = (jnp.bfloat16, head_dim) if form is None else (form.storage, form.width(head_dim))
pool, row = array(storage, 257, 8, 16, width), array(jnp.int32, 1)
scales = () if form is None else (array(jnp.float32, 257, 8, 16),) * 2
call = plan.plan_for(batch=1, tokens=512, q_heads=32, kv_heads=8, head_dim=head_dim, page_size=16, pages_per_row=256,
                     scale=0.1, kv=kv)

def run(q, k, v, table, starts, lengths, *scales):
    return mosaic.paged_prefill(q, k, v, table, starts, lengths, None, scales or None, plan=call, return_lse=False)[0]

queries = array(jnp.bfloat16, 1, 512, 32, head_dim)
compiled(run, queries, pool, pool, array(jnp.int32, 1, 256), row, row, *scales)
"""


@pytest.mark.parametrize(("kv", "head_dim"), [("bfloat16", 128), ("bfloat16", 64), ("int8", 128), ("int4", 128)])
def test_products_are_not_serialised_and_nothing_is_spilled(kv: str, head_dim: int, tmp_path: pathlib.Path) -> None:
    run_program(PROGRAM, kv, head_dim, dump=tmp_path)
    assert check_reports(tmp_path, "paged_prefill_0", 1)
    # In the loop: this tile's scores, the last one's values, all weights, and only then the wait for the values.
    ptx = (tmp_path / "paged_prefill_0.ptx").read_text()
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1;") :]
    assert loop[: loop.index("wgmma.wait_group.sync.aligned 0;")].count("ex2.approx") >= 64
