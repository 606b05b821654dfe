"""Prefill attention over pages, against the same attention written out over contiguous keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers import attention

PAGE_SIZE, PAGES, KV_HEADS, HEAD_DIM = 4, 11, 2, 8


@pytest.mark.parametrize("keys_at_once", [1, 4, 12, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (9, 20.0)])
def test_any_number_of_turns_gives_the_written_out_result(
    keys_at_once: int,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Rows of different lengths, one of them empty, pages in any order, NaN wherever no token of the row lies."""
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", keys_at_once)
    starts, lengths = np.array([0, 30, 13, 0]), np.array([6, 7, 1, 0])
    batch, tokens, heads = len(starts), 7, 6
    total = starts + lengths

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    query = normal(batch, tokens, heads, HEAD_DIM)
    keys, values = (normal(batch, PAGES * PAGE_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2))
    table = 1 + rng.permutation(batch * PAGES).reshape(batch, PAGES).astype(np.int32)
    pools = []
    for contiguous in (keys, values):
        pool = np.full((1 + batch * PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), np.nan, np.float32)
        for row in range(batch):
            for place in range(total[row]):
                pool[table[row, place // PAGE_SIZE], :, place % PAGE_SIZE] = contiguous[row, place]
        pools.append(jnp.asarray(pool))
    offsets = np.arange(tokens)
    positions = np.where(offsets < lengths[:, None], starts[:, None] + offsets, -1).astype(np.int32)
    options = {"scale": 0.4, "window": window, "softcap": softcap}
    got = jax.jit(lambda *arrays: attention.prefill_attention(*arrays, **options))(
        jnp.asarray(query), *pools, jnp.asarray(positions), jnp.asarray(table)
    )
    key_positions = np.broadcast_to(np.arange(PAGES * PAGE_SIZE, dtype=np.int32), (batch, PAGES * PAGE_SIZE))
    mask = attention.causal_mask(jnp.asarray(positions), jnp.asarray(key_positions), window)
    want = attention.masked_attention(
        jnp.asarray(query), jnp.asarray(keys), jnp.asarray(values), mask, scale=0.4, softcap=softcap
    )
    real = positions >= 0
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], rtol=2e-5, atol=2e-6)
    assert np.isfinite(np.asarray(got)).all()
