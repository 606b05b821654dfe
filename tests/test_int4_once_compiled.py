"""INT4 kernels of small matrices and of clusters as ptxas compiles them: all their blocks must be on the card at once.

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
assert plan.schedule.once or plan.schedule.joined
options = {"schedule": plan.schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
product = lambda x, weight, given: mosaic.int4_matmul(x, weight, **given, **options)
compiled(product, array(jnp.bfloat16, rows, k), weight, given)
print(plan.threads, plan.shared_bytes, plan.slices * plan.blocks_per_slice * plan.schedule.tiles)
"""


@pytest.mark.parametrize(
    ("rows", "k", "n", "gated"),
    [
        (1, 1024, 6144, 1),
        (16, 1024, 6144, 1),
        (2, 3072, 1024, 0),
        (32, 1024, 6144, 1),
        (32, 3072, 1024, 0),
        (8, 12288, 4096, 0),
        (5, 14336, 4096, 0),
    ],
)
def test_all_blocks_are_on_the_card_and_nothing_is_spilled(
    rows: int, k: int, n: int, gated: int, tmp_path: pathlib.Path
) -> None:
    answer = run_program(PROGRAM, rows, k, n, gated, dump=tmp_path)
    threads, shared_bytes, blocks = map(int, answer.split())
    (registers,) = check_reports(tmp_path, "int4_*", 1)
    at_once = -(-blocks // 132)
    assert threads * registers * at_once <= 65536
    # Of small ones for up to 16 rows there is room for one of the next kernel's beside.
    others = 1 if rows <= 16 and k < 4096 else 0
    assert (shared_bytes + 1024) * (at_once + others) <= 228 * 1024


HALVES = """
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion

rows, k, n, adding = map(int, sys.argv[1:])
fusion = Fusion(residual=bool(adding))
plan = tuning.plan_for(rows, packed(n, k), fusion=fusion)
assert plan.schedule.joined
given = {"residual": array(jnp.bfloat16, rows, n)} if adding else {}
options = {"schedule": plan.schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
product = lambda x, weight, given: mosaic.int4_matmul(x, weight, **given, **options)
compiled(product, array(jnp.bfloat16, rows, k), packed(n, k), given)
print(plan.threads, plan.shared_bytes, plan.slices * plan.blocks_per_slice)
"""


@pytest.mark.parametrize(
    ("rows", "n", "adding"),
    [
        (3, 14336, 0),
        (7, 6144, 0),
        (8, 4096, 0),
        (8, 14336, 0),
        (16, 14336, 0),
        (3, 4096, 1),
        (7, 4096, 1),
        (8, 4096, 1),
    ],
)
def test_two_blocks_with_half_of_the_inputs_are_on_a_multiprocessor(
    rows: int, n: int, adding: int, tmp_path: pathlib.Path
) -> None:
    answer = run_program(HALVES, rows, 4096, n, adding, dump=tmp_path)
    threads, shared_bytes, blocks = map(int, answer.split())
    (registers,) = check_reports(tmp_path, "int4_*", 1)
    assert blocks == 2 * 132 and threads * -(-registers // 8) * 8 * 2 <= 65536
    assert (shared_bytes + 1024) * 2 <= 228 * 1024


APART = """
from pallas_kernels.int4_matmul import mosaic
from pallas_kernels.int4_matmul.plan import Fusion, Plan, Schedule

rows, k, n, warps, parts, depth, normed = map(int, sys.argv[1:])
weight = packed(n, k)
fusion = Fusion(norm_eps=1e-5, gated=True) if normed else Fusion()
blocks = 132 * (16 // warps)
schedule = Schedule(warps, parts, 2 if normed else 1, depth, blocks, scaled=True, bulk=True, apart=True)
given = {"norm": array(jnp.float32, k)} if normed else {}
options = {"schedule": schedule, "out_dtype": jnp.dtype(jnp.bfloat16), "fusion": fusion}
product = lambda x, weight, given: mosaic.int4_matmul(x, weight, **given, **options)
compiled(product, array(jnp.bfloat16, rows, k), weight, given)
plan = Plan.of(rows, weight, schedule, fusion)
print(plan.threads, plan.shared_bytes, 16 // warps)
"""


@pytest.mark.parametrize(
    ("rows", "k", "n", "warps", "parts", "depth", "normed"),
    [
        (8, 4096, 14336, 16, 2, 4, 0),
        (16, 4096, 14336, 16, 2, 4, 0),
        (8, 14336, 4096, 8, 2, 4, 0),
        (16, 14336, 4096, 16, 1, 6, 0),
        (5, 4096, 24576, 16, 2, 4, 1),
        (8, 4096, 28672, 16, 2, 4, 1),
    ],
)
def test_four_warps_more_have_registers(rows, k, n, warps, parts, depth, normed, tmp_path: pathlib.Path) -> None:
    answer = run_program(APART, rows, k, n, warps, parts, depth, normed, dump=tmp_path)
    threads, shared_bytes, at_once = map(int, answer.split())
    (registers,) = check_reports(tmp_path, "int4_*", 1)
    assert threads * -(-registers // 8) * 8 * at_once <= 65536
    assert (shared_bytes + 1024) * at_once <= 228 * 1024


BLOCK = """
from pallas_kernels.int4_matmul import gated_once
from pallas_kernels.int4_matmul.gated_plan import GatedPlan, shape_for

rows, slices, hidden, k = map(int, sys.argv[1:])
gate_up, down, x, norm = packed(2 * hidden, k), packed(k, hidden), array(jnp.bfloat16, rows, k), array(jnp.float32, k)
clusters, cluster = shape_for(rows, gate_up, down)
plan = GatedPlan.of(rows, gate_up, down, 1e-5, clusters, cluster, slices)
partial = array(jnp.float32, slices, rows, k) if slices else None
options = {"clusters": clusters, "cluster": cluster, "norm_eps": 1e-5}
block = lambda *given: gated_once.gated_mlp(*given, jax.tree.leaves(given[2]), **options)
compiled(block, x, partial, gate_up, down, norm)
print(plan.threads, plan.shared_bytes, plan.blocks)
"""


@pytest.mark.parametrize(("rows", "slices"), [(1, 8), (2, 0)])
def test_a_feed_forward_block_is_on_the_card_at_once(rows: int, slices: int, tmp_path: pathlib.Path) -> None:
    answer = run_program(BLOCK, rows, slices, 3072, 1024, dump=tmp_path)
    threads, shared_bytes, blocks = map(int, answer.split())
    (registers,) = check_reports(tmp_path, "int4_*", 1)
    assert blocks <= 132 and threads * registers <= 65536 and shared_bytes + 1024 <= 228 * 1024


ATTENTION = """
from pallas_kernels.decoder_block.api import attention_block

tokens, q_heads, kv_heads, head_dim = map(int, sys.argv[1:])
hidden, bf16 = 1024, jnp.bfloat16
qkv, o = packed((q_heads + 2 * kv_heads) * head_dim, hidden), packed(hidden, q_heads * head_dim)
pages = array(bf16, 65, kv_heads, 16, head_dim)
table, rope = array(jnp.int32, 1, 64), array(jnp.float32, 1, tokens, head_dim // 2)
norms = {"norm": array(jnp.float32, hidden)} | {name: array(jnp.float32, head_dim) for name in ("q_norm", "k_norm")}
options = {"norm_eps": 1e-5, "num_q_heads": q_heads, "scale": head_dim**-0.5}
block = lambda norms, *given: attention_block(*given, **norms, **options)
x, partial, position = array(bf16, 1, tokens, hidden), array(jnp.float32, 12, 1, tokens, hidden), array(jnp.int32, 1)
compiled(block, norms, x, partial, qkv, o, pages, pages, table, position, rope, rope)
print(8 * kv_heads)
"""


@pytest.mark.parametrize(("tokens", "heads"), [(1, (16, 8, 128)), (2, (16, 8, 128)), (2, (16, 4, 64))], ids=str)
def test_an_attention_block_is_on_the_card_at_once(
    tokens: int, heads: tuple[int, int, int], tmp_path: pathlib.Path
) -> None:
    blocks = int(run_program(ATTENTION, tokens, *heads, dump=tmp_path))
    (registers,) = check_reports(tmp_path, "attention_block*", 1)
    assert blocks <= 132 and 256 * registers <= 65536


NEXT = """
from pallas_kernels.next_token import mosaic

vocab, hidden = map(int, sys.argv[1:])
places, angles = array(jnp.int32, 2), array(jnp.float32, 5, 64)
logits, table = array(jnp.float32, vocab), array(jnp.bfloat16, vocab, hidden)
choose = lambda *given: mosaic.choose_next(*given, num_tokens=vocab - 1)
compiled(choose, logits, table, places, places, angles, angles)
"""


@pytest.mark.parametrize("vocab", [151936, 262144])
def test_a_cluster_that_chooses_a_token_spills_nothing(vocab: int, tmp_path: pathlib.Path) -> None:
    run_program(NEXT, vocab, 1024, dump=tmp_path)
    (registers,) = check_reports(tmp_path, "next_token*", 1)
    assert 512 * registers <= 65536


HEAD = """
from pallas_kernels.int4_matmul import mosaic, tuning
from pallas_kernels.int4_matmul.plan import Fusion

weight, fusion = packed(151936, 1024), Fusion(norm_eps=1e-6)
options = {"schedule": tuning.plan_for(1, weight, fusion=fusion).schedule, "out_dtype": jnp.dtype(jnp.float32)}
head = lambda x, weight, norm: mosaic.int4_matmul(x, weight, norm, **options, fusion=fusion)
compiled(head, array(jnp.bfloat16, 1, 1024), weight, array(jnp.float32, 1024))
"""


def test_a_head_that_normalises_spills_nothing(tmp_path: pathlib.Path) -> None:
    run_program(HEAD, dump=tmp_path)
    check_reports(tmp_path, "int4_*", 1)
