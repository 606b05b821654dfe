"""Prefill of a chunk after a prefix in pages: its rate beside cuDNN's on one contiguous prompt."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Recorder, median, seconds
from jaxinfer.layers import attention
from jaxinfer.layers.chunk_attention import chunk_attention, windowed_chunk_attention
from pallas_kernels.paged_attention.formats import FORMATS, quantise

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
WINDOW = 1024
CALLS = 8  # in one program


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`tokens` of a prompt after `prefix` tokens in pages; `route` is how."""

    route: str  # of ROUTES
    tokens: int
    prefix: int = 0
    kv: str = "bfloat16"

    @property
    def operations(self) -> int:
        """Of attention, with a window that of the keys inside it."""
        seen = self.prefix + np.arange(1, self.tokens + 1)
        if self.route == "windowed":
            seen = np.minimum(seen, WINDOW)
        return 4 * HEAD_DIM * Q_HEADS * int(seen.sum())


CHUNKS = [
    Chunk("whole", 4096),
    Chunk("chunk", 2048, 2048),
    Chunk("chunk", 512, 3584),
    Chunk("chunk", 2048, 30720),
    Chunk("chunk", 2048, 2048, "int8"),
    Chunk("windowed", 2048, 2048),
    Chunk("blocked", 2048, 2048),
]


def chunk_timing(recorder: Recorder, case: Chunk) -> None:
    """Time per call, launches included: several in one program, each with other queries."""
    pages = (case.prefix + case.tokens) // PAGE_SIZE
    rng = np.random.default_rng(0)

    def normal(*size: int) -> jax.Array:
        return jax.jit(lambda: jax.random.normal(jax.random.key(0), size, jnp.bfloat16))()

    query = normal(1, case.tokens, Q_HEADS, HEAD_DIM)
    own = tuple(normal(1, case.tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    pools = [normal(pages + 1, KV_HEADS, PAGE_SIZE, HEAD_DIM) for _ in range(2)]
    scales: list[Any] = [None, None]
    if case.kv in FORMATS:
        (k_codes, k_scales), (v_codes, v_scales) = (quantise(pool, FORMATS[case.kv]) for pool in pools)
        pools, scales = [k_codes, v_codes], [k_scales, v_scales]
    table = jnp.asarray(rng.permutation(pages).astype(np.int32)[None] + 1)
    positions = jnp.arange(case.prefix, case.prefix + case.tokens, dtype=jnp.int32)[None]

    @jax.jit
    def program(query, own, pools, scales, positions, table):
        q = query
        for _ in range(CALLS):
            out = ROUTES[case.route](q, own, pools, scales, positions, table)
            q = query + out * jnp.bfloat16(1e-3)
        return q

    def run() -> jax.Array:
        return program(query, own, pools, scales, positions, table)

    seconds(run, 2)
    us = median(seconds(run, 5)) / CALLS * 1e6
    metrics = {"us": (us, "us"), "tflop_per_s": (case.operations / us / 1e6, "TFLOP/s")}
    shape = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
    recorder.record({"op": "prefill_attention", **dataclasses.asdict(case), **shape}, metrics)


SCALE = HEAD_DIM**-0.5


def whole(q: jax.Array, own: Any, pools: Any, scales: Any, positions: jax.Array, table: jax.Array) -> jax.Array:
    del pools, scales, table
    return attention.self_attention(q, own[0], own[1], positions, scale=SCALE, window=None, softcap=None)


def chunk(q: jax.Array, own: Any, pools: Any, scales: Any, positions: jax.Array, table: jax.Array) -> jax.Array:
    return chunk_attention(q, own[0], own[1], tuple(pools), tuple(scales), positions, table, scale=SCALE)


def windowed(q: jax.Array, own: Any, pools: Any, scales: Any, positions: jax.Array, table: jax.Array) -> jax.Array:
    del own
    stored = (tuple(pools), tuple(scales), positions, table)
    return windowed_chunk_attention(q, *stored, scale=SCALE, window=WINDOW)


def blocked(q: jax.Array, own: Any, pools: Any, scales: Any, positions: jax.Array, table: jax.Array) -> jax.Array:
    del own
    stored = (pools[0], pools[1], positions, table, scales[0], scales[1])
    return attention.prefill_attention(q, *stored, scale=SCALE, window=None, softcap=None)


# cuDNN on contiguous arrays, the two routes of a chunk, and what XLA makes of it.
ROUTES = {"whole": whole, "chunk": chunk, "windowed": windowed, "blocked": blocked}
