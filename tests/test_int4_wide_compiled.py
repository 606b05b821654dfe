"""The INT4 kernel for many rows as ptxas compiles it: its products must not wait for each other.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import pathlib

import pytest
from compiled_for_h200 import check_reports, needs_cuda_build, run_program

pytestmark = needs_cuda_build

PROGRAM = """
from pallas_kernels.int4_matmul import wide, wide_tuning

rows, k, n = map(int, sys.argv[1:4])
weights = [packed(n, k)]
if sys.argv[4] == "gated":
    weights = [packed(2 * n, k), packed(k, n)]
    schedules = wide_tuning.gated_schedules(rows, *weights)
    product = lambda x, norm, *pair: wide.gated_mlp(x, *pair, norm, schedules=schedules, norm_eps=1e-5)
else:
    natural = sys.argv[4] == "as it is"
    schedule = wide_tuning.wide_schedule(rows, weights[0], natural=natural)
    assert schedule.natural == natural
    options = {"schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16)}
    product = lambda x, norm, weight: wide.int4_matmul(x, weight, None if natural else norm, norm_eps=1e-5, **options)
compiled(product, array(jnp.bfloat16, rows, k), array(jnp.float32, k), *weights)
"""


@pytest.mark.parametrize(
    ("rows", "n", "what"),
    [
        (64, 14336, "alone"),
        (128, 6144, "alone"),  # a block of one multiplying warpgroup
        (256, 14336, "alone"),
        (2048, 14336, "alone"),
        (224, 14336, "as it is"),
        (176, 6144, "as it is"),
        (256, 6144, "as it is"),  # two blocks join their sums
        (960, 4096, "as it is"),
        (640, 6144, "as it is"),
        (704, 6144, "as it is"),  # more tokens are spilled: wide_tuning.SPANS
        (704, 6144, "alone"),
        (2048, 4096, "as it is"),
        (64, 14336, "gated"),
        (80, 12288, "gated"),  # gates and others of different warps
        (240, 14336, "gated"),  # of one tile of all tokens
        (256, 14336, "gated"),
        (16384, 14336, "gated"),  # in groups of tokens
    ],
)
def test_products_are_not_serialised_and_nothing_is_spilled(
    rows: int, n: int, what: str, tmp_path: pathlib.Path
) -> None:
    run_program(PROGRAM, rows, 4096, n, what, dump=tmp_path)
    kernels = {"as it is": 1, "alone": 2, "gated": 3}  # the norm, and the products
    assert check_reports(tmp_path, "int4_*", kernels[what])
