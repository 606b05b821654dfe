"""Prefill of a chunk after a prefix in pages: its rate beside cuDNN's on one contiguous prompt."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Recorder, median, seconds
from jaxinfer.layers import attention
from jaxinfer.layers.chunk_attention import chunk_attention, windowed_chunk_attention
from pallas_kernels.paged_attention.formats import FORMATS, quantise
from pallas_kernels.paged_prefill import mosaic
from pallas_kernels.paged_prefill.plan import plan_for

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
    head_dim: int = HEAD_DIM
    schedule: tuple[tuple[str, Any], ...] = ()  # what differs from the kernel's plan

    @property
    def operations(self) -> int:
        """Of attention, with a window that of the keys inside it."""
        seen = self.prefix + np.arange(1, self.tokens + 1)
        if self.route.endswith("windowed"):
            seen = np.minimum(seen, WINDOW)
        return 4 * self.head_dim * Q_HEADS * int(seen.sum())


CHUNKS = [
    Chunk("whole", 4096),
    Chunk("chunk", 2048, 2048),
    Chunk("chunk", 512, 3584),
    Chunk("chunk", 2048, 30720),
    Chunk("chunk", 2048, 2048, "int8"),
    Chunk("windowed", 2048, 2048),
    Chunk("blocked", 2048, 2048),
    Chunk("kernel", 4096),
    Chunk("kernel", 2048, 2048),
    Chunk("kernel", 512, 3584),
    Chunk("kernel", 2048, 30720),
    Chunk("kernel windowed", 2048, 2048),
    Chunk("kernel", 2048, 2048, "int8"),
]


class Work:
    """One case's arrays and its route."""

    def __init__(self, case: Chunk):
        pages = (case.prefix + case.tokens) // PAGE_SIZE
        rng = np.random.default_rng(0)
        numbers = rng.standard_normal(2**20 + 7).astype(jnp.bfloat16)

        def normal(*size: int) -> jax.Array:
            """Made on the host: a program for each size would take longer to compile than it all takes to measure."""
            return jnp.asarray(np.resize(np.roll(numbers, -rng.integers(2**20)), size))

        self.query = normal(1, case.tokens, Q_HEADS, case.head_dim)
        self.own = tuple(normal(1, case.tokens, KV_HEADS, case.head_dim) for _ in range(2))
        pools = [normal(pages + 1, KV_HEADS, PAGE_SIZE, case.head_dim) for _ in range(2)]
        scales: list[Any] = [None, None]
        if case.kv in FORMATS:
            (k_codes, k_scales), (v_codes, v_scales) = (quantise(pool, FORMATS[case.kv]) for pool in pools)
            pools, scales = [k_codes, v_codes], [k_scales, v_scales]
        self.pools, self.scales = tuple(pools), tuple(scales)
        self.table = jnp.asarray(rng.permutation(pages).astype(np.int32)[None] + 1)
        self.positions = jnp.arange(case.prefix, case.prefix + case.tokens, dtype=jnp.int32)[None]
        self.route = functools.partial(ROUTES[case.route], case)

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.query, self.own, self.pools, self.scales, self.positions, self.table


def chunk_timing(recorder: Recorder, case: Chunk) -> None:
    """Time per call, launches included: several in one program, each with other queries."""
    work = Work(case)

    @jax.jit
    def program(query, own, pools, scales, positions, table):
        q = query
        for _ in range(CALLS):
            out = work.route(q, own, pools, scales, positions, table)
            q = query + out * jnp.bfloat16(1e-3)
        return q

    def run() -> jax.Array:
        return program(*work.arrays)

    seconds(run, 2)
    us = median(seconds(run, 5)) / CALLS * 1e6
    metrics = {"us": (us, "us"), "tflop_per_s": (case.operations / us / 1e6, "TFLOP/s")}
    shape = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "page_size": PAGE_SIZE}
    described = {name: value for name, value in dataclasses.asdict(case).items() if name != "schedule"}
    recorder.record({"op": "prefill_attention", **described, **dict(case.schedule), **shape}, metrics)


type Arrays = tuple[jax.Array, ...]


def whole(case: Chunk, q: jax.Array, own: Arrays, pools: Any, scales: Any, *places: jax.Array) -> jax.Array:
    del pools, scales
    scale = case.head_dim**-0.5
    return attention.self_attention(q, own[0], own[1], places[0], scale=scale, window=None, softcap=None)


def chunk(case: Chunk, q: jax.Array, own: Arrays, pools: Any, scales: Any, *places: jax.Array) -> jax.Array:
    return chunk_attention(q, own[0], own[1], pools, scales, *places, scale=case.head_dim**-0.5)


def windowed(case: Chunk, q: jax.Array, own: Arrays, pools: Any, scales: Any, *places: jax.Array) -> jax.Array:
    del own
    return windowed_chunk_attention(q, pools, scales, *places, scale=case.head_dim**-0.5, window=WINDOW)


def blocked(case: Chunk, q: jax.Array, own: Arrays, pools: Any, scales: Any, *places: jax.Array) -> jax.Array:
    del own
    scale = case.head_dim**-0.5
    return attention.prefill_attention(q, *pools, *places, *scales, scale=scale, window=None, softcap=None)


def kernel(
    case: Chunk, q: jax.Array, own: Arrays, pools: Any, scales: Any, positions: jax.Array, table: jax.Array
) -> jax.Array:
    del own
    plan = plan_for(
        batch=1,
        tokens=case.tokens,
        q_heads=Q_HEADS,
        kv_heads=KV_HEADS,
        head_dim=case.head_dim,
        page_size=PAGE_SIZE,
        pages_per_row=table.shape[1],
        scale=case.head_dim**-0.5,
        window=WINDOW if case.route.endswith("windowed") else None,
        kv=case.kv,
    )
    plan = dataclasses.replace(plan, **dict(case.schedule))
    places = (table, positions[:, 0], positions[:, -1] + 1)
    codes = None if scales[0] is None else scales
    return mosaic.paged_prefill(q, *pools, *places, None, codes, plan=plan, return_lse=False)[0]


# cuDNN on contiguous arrays, the two routes of a chunk through it, what XLA makes of it, and the kernel.
ROUTES = {
    "whole": whole,
    "chunk": chunk,
    "windowed": windowed,
    "blocked": blocked,
    "kernel": kernel,
    "kernel windowed": kernel,
}
