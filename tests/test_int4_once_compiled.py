"""The INT4 kernel of small matrices as ptxas compiles it: all its blocks must be on the card at once.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import pathlib

import pytest
from compiled_for_h200 import check_reports, needs_cuda_build, run_program

pytestmark = needs_cuda_build

PROGRAM = """
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion

rows, k, n, gated = map(int, sys.argv[1:])
weight = packed(n, k)
fusion = Fusion(norm_eps=1e-5, gated=True) if gated else Fusion(residual=True)
given = {"norm": array(jnp.float32, k)} if gated else {"residual": array(jnp.bfloat16, rows, n)}
plan = tuning.plan_for(rows, weight, fusion=fusion)
assert plan.schedule.once
options = {"schedule": plan.schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
product = lambda x, weight, given: mosaic.int4_matmul(x, weight, **given, **options)
compiled(product, array(jnp.bfloat16, rows, k), weight, given)
print(plan.threads, plan.shared_bytes, plan.blocks_per_slice)
"""


@pytest.mark.parametrize(("rows", "k", "n", "gated"), [(1, 1024, 6144, 1), (16, 1024, 6144, 1), (2, 3072, 1024, 0)])
def test_all_blocks_are_on_the_card_and_nothing_is_spilled(
    rows: int, k: int, n: int, gated: int, tmp_path: pathlib.Path
) -> None:
    answer = run_program(PROGRAM, rows, k, n, gated, dump=tmp_path)
    threads, shared_bytes, blocks = map(int, answer.split())
    (registers,) = check_reports(tmp_path, "int4_*", 1)
    at_once = -(-blocks // 132)
    assert threads * registers * at_once <= 65536
    assert (shared_bytes + 1024) * (at_once + 1) <= 228 * 1024
