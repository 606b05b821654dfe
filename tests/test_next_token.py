"""The kernel that chooses a token and begins the next pass, run on simulated warps, against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_attention_cases import lower_for_cuda
from simulated_cluster_warp import run_clusters
from test_int4_matmul import make

from pallas_kernels.int4_matmul import int4_matmul_fused, to_mosaic
from pallas_kernels.next_token import mosaic, next_token, next_token_refusal
from pallas_kernels.next_token.plan import BLOCKS, WARPS, NextPlan

BF16 = ml_dtypes.bfloat16
HIDDEN, ROWS, HALF = 1032, 5, 64


def arrays(vocab: int, hidden: int = HIDDEN, half: int = HALF) -> tuple[np.ndarray, ...]:
    """Logits, embedding, cos and sin."""
    rng = np.random.default_rng(vocab)
    angles = rng.standard_normal((2, ROWS, half)).astype(np.float32)
    logits = rng.standard_normal(vocab).astype(np.float32)
    return logits, rng.standard_normal((vocab, hidden)).astype(BF16), *angles


def simulated(
    logits: np.ndarray, table: np.ndarray, cos: np.ndarray, sin: np.ndarray, newest: int, start: int, num_tokens: int
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    plan = NextPlan(logits.size, num_tokens, table.shape[1], *cos.shape)
    token, following = np.full(1, -9, np.int32), np.full(2, -9, np.int32)
    x = np.full(table.shape[1], np.nan, BF16)
    angles = [np.full(2 * cos.shape[1], np.nan, BF16) for _ in range(2)]  # stored as words of two halves
    given = (
        logits,
        table.reshape(-1).view(np.uint8),
        np.array([-7, newest], np.int32),
        np.array([start, -7], np.int32),
        *(angle.reshape(-1).view(np.uint8) for angle in (cos, sin)),
    )
    arguments = mosaic.Arguments(*given, token, x, following, *angles)
    run_clusters(1, BLOCKS, WARPS, plan.shared_bytes, lambda w, block: mosaic.choose(w, plan, arguments, block))
    return int(token[0]), x, following, *(angle.view(np.float32) for angle in angles)


@pytest.mark.parametrize(
    ("vocab", "num_tokens", "best", "newest", "start"),
    [
        (20000, 20000, 19999, 7, 6),
        (20000, 19998, 3, 9, 6),
        (16384, 16384, 8191, 41, 41),
        (512, 509, 508, 8, 5),
    ],
)
def test_token_and_what_follows(vocab: int, num_tokens: int, best: int, newest: int, start: int) -> None:
    logits, table, cos, sin = arrays(vocab)
    logits[num_tokens:] = 100.0  # padding is no token
    logits[best] = 50.0
    token, x, following, *angles = simulated(logits, table, cos, sin, newest, start, num_tokens)
    assert token == best
    assert (x == table[best]).all()
    assert list(following) == [newest + 1] * 2
    row = newest + 1 - start
    assert (angles[0] == cos[row]).all()
    assert (angles[1] == sin[row]).all()


@pytest.mark.parametrize("place", [1, 100, 4097, 16383])
def test_first_of_equals(place: int) -> None:
    """In one lane, in lanes of a warp, in warps, in blocks; zeros of both signs are equal."""
    logits, *rest = arrays(20000)
    logits[:] = -1.0
    logits[[place, 19000]] = 0.0
    logits[place + 2 :: 4096] = -0.0
    assert simulated(logits, *rest, 7, 6, 20000)[0] == np.argmax(logits)


@pytest.mark.parametrize("fill", [-np.inf, np.nan, np.inf])
def test_nothing_to_choose_gives_a_token_that_exists(fill: float) -> None:
    logits, *rest = arrays(16384 + 4)
    logits[:] = fill
    logits[-4:] = 1.0
    assert simulated(logits, *rest, 7, 6, 16384)[0] == 0


def test_negative_logits_lose_to_no_padding() -> None:
    """A lane whose last four lie behind the vocabulary does not take what it has read there."""
    logits, *rest = arrays(16388)
    logits[:] = -3.0
    logits[77] = -2.0
    assert simulated(logits, *rest, 7, 6, 16388)[0] == 77


def test_an_idle_sequence_stays_idle() -> None:
    logits, table, cos, sin = arrays(512)
    _, x, following, *angles = simulated(logits, table, cos, sin, -1, -1, 512)
    assert (x == 0).all()
    assert list(following) == [-1, -1]
    assert (angles[0] == cos[0]).all()


def test_places_behind_the_last_angles_have_the_last() -> None:
    logits, table, cos, sin = arrays(512)
    _, _, following, *angles = simulated(logits, table, cos, sin, 30, 6, 512)
    assert list(following) == [31, 31]
    assert (angles[1] == sin[-1]).all()


@pytest.mark.parametrize(("newest", "num_tokens"), [(8, 512), (-1, 512), (8, 300), (40, 512)])
def test_reference_does_the_same(newest: int, num_tokens: int) -> None:
    logits, table, cos, sin = arrays(512)
    start = min(newest, 6)
    token, x, following, *angles = simulated(logits, table, cos, sin, newest, start, num_tokens)
    given = [jnp.asarray(array) for array in (logits, table)]
    places = [jnp.array(pair, jnp.int32) for pair in ([newest, newest], [start, start])]
    begun = next_token(*given, *places, jnp.asarray(cos)[None], jnp.asarray(sin)[None], num_tokens=num_tokens)
    assert int(begun.token[0]) == token
    assert (np.asarray(begun.x[0, 0]) == x).all()
    assert list(begun.places) == list(following)
    assert (np.asarray(begun.cos[0, 0]) == angles[0]).all()
    assert (np.asarray(begun.sin[0, 0]) == angles[1]).all()


def test_what_the_kernel_refuses() -> None:
    table = jnp.zeros((64, 1024), jnp.bfloat16)
    assert next_token_refusal(64, table, 64) == "this process has no GPU"
    assert next_token_refusal(64, table.astype(jnp.float32), 64) == "it copies an embedding of bfloat16, not float32"
    assert next_token_refusal(66, table, 64) == "it takes a multiple of 4 logits, up to 262144, not 66"
    assert next_token_refusal(64, table, 66) == "it takes a multiple of 4 angles, up to 128, not 66"
    assert NextPlan.refusal(64, 4104, 64) == "it takes a multiple of 8 hidden features, up to 4096, not 4104"


def test_kernel_lowers_for_cuda() -> None:
    logits, table, cos, sin = arrays(20000)
    places = np.zeros(2, np.int32)
    choose = functools.partial(mosaic.choose_next, num_tokens=20000)
    given = [jnp.asarray(array) for array in (logits, table, places, places, cos, sin)]
    assert lower_for_cuda(choose, *given).count("@mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "num_tokens", "hidden"), [(151936, 151669, 1024), (32000, 32000, 2048)])
def test_kernel_on_the_gpu(vocab: int, num_tokens: int, hidden: int) -> None:
    """As the reference, bit by bit, with many equal logits and with none; what the kernel writes to was NaN."""
    rng = np.random.default_rng(vocab)
    table = jax.random.normal(jax.random.key(0), (vocab, hidden), jnp.bfloat16)
    angles = [jnp.asarray(rng.standard_normal((1, ROWS, HALF)), jnp.float32) for _ in range(2)]
    runs = {
        backend: jax.jit(functools.partial(next_token, num_tokens=num_tokens, backend=backend))
        for backend in ("mosaic", "reference")
    }
    jax.block_until_ready([jnp.full((1 << 16,), jnp.nan) for _ in range(64)])
    for newest in (-1, *range(6, 30)):
        logits = rng.standard_normal(vocab).astype(np.float32)
        logits = np.round(logits * 4) / 4 if newest % 2 else logits
        start = max(-1, newest - int(rng.integers(0, ROWS)))
        places = [jnp.array([place, place], jnp.int32) for place in (newest, start)]
        got, want = (run(jnp.asarray(logits), table, *places, *angles) for run in runs.values())
        for one, other in zip(got, want, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.gpu
def test_logits_of_a_normalised_row_on_the_gpu() -> None:
    """Of a draft's INT4 head, which normalises its input, against float64."""
    weight, values = make(151936, 1024, 128, "zero_point", np.float32)
    rng = np.random.default_rng(3)
    x, norm = rng.standard_normal((1, 1024)).astype(BF16), rng.uniform(0.5, 1.5, 1024).astype(np.float32)
    packed = jax.tree.map(jnp.asarray, to_mosaic(weight))
    out = int4_matmul_fused(jnp.asarray(x), packed, norm=jnp.asarray(norm), out_dtype=jnp.float32, backend="mosaic")
    wide = x.astype(np.float64)
    want = (wide * norm).astype(BF16).astype(np.float64) @ values.T / np.sqrt((wide * wide).mean() + 1e-6)
    assert out.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want) < 1e-5
