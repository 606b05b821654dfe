"""Paged attention for decode and verification on Triton: for the cards before Hopper, and what Mosaic does not take.

Flash decoding in two launches. The first gives each (sequence, KV head, block of query rows, split of the keys) to a
block of threads, which reads page ids, keys and values two tiles ahead through asynchronous copies and keeps float32
partial results; the second merges a query row's splits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import triton_backend
from pallas_kernels.paged_attention.formats import format_of

MAX_TOKENS = 16
TILE_BYTES = 8192
"""Of keys, or of values, in a tile, as numbers of 16 bits: that many a warp has registers for.

Two such tiles of each in flight for a block fit four blocks on a multiprocessor of 164 KB, and eight of 8-bit codes.
"""
LEAST_TILES = 4
"""Tiles of a split, so that its pipeline fills."""
MOST_SPLITS = 64
"""What the merging block holds in registers at once."""
BLOCKS = {"8.0": (4, 7), "9.0": (4, 8)}
"""Blocks of one warp wanted on each multiprocessor, by compute capability: for pages of numbers, and of codes, which

take half the bytes or less and more arithmetic to overlap.
"""
OTHER_BLOCKS = (2, 4)
"""On what is not listed: 100 KB of shared memory, and less bandwidth for each."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a call's sizes and the card decide: query rows and keys of a block's tile, warps, stages, splits."""

    block_rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def refusal(dtype: jnp.dtype, kv: str, head_dim: int, page_size: int, tokens: int) -> str | None:
    """Why the Triton kernels do not take queries of `dtype` over pages that hold `kv`; None if they do."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it needs queries of bfloat16, float16 or float32, not {dtype}"
    if tokens > MAX_TOKENS:
        return f"it takes up to {MAX_TOKENS} query tokens, not {tokens}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head_dim that is a multiple of 16 and at most 256, not {head_dim}"
    if page_size % 16:
        return f"it needs a page size that is a multiple of 16, not {page_size}"
    reason = triton_backend.refusal()
    if reason is None and kv == "float8_e4m3fn" and float(triton_backend.capability()) < 8.9:
        return f"fp8 pages need compute capability 8.9 or later, not {triton_backend.capability()}; use int8"
    return reason


def schedule_for(
    *,
    pairs: int,
    rows: int,
    head_dim: int,
    max_keys: int,
    codes: bool,
    exact: bool,
    multiprocessors: int,
    capability: str,
) -> Schedule:
    """The schedule for `pairs` (sequence, KV head) of `rows` query rows over up to `max_keys` keys.

    Blocks are as many as run at once; if the pairs alone are more, enough for several rounds, so that the last one
    matters little. `max_keys` stands for the lengths, which are not known yet. `exact` is for float32.
    """
    block_rows = 16 if rows <= 16 or exact else 32 if rows <= 32 else 64
    row_bytes = _power_of_two(head_dim) * (4 if exact else 2)
    if row_bytes > 256:
        keys, stages = max(16, 2 * TILE_BYTES // row_bytes), 3  # half the stages, tiles of twice the size
    else:
        keys, stages = min(64, TILE_BYTES // row_bytes), 5
    warps = block_rows // 16
    if exact:
        warps, stages = 4, 3  # three products for one: the operands need more registers
    elif warps == 2 and stages == 5:
        keys = 64  # with a key's page id for every thread, threads need not part ways to ask for them
    groups = pairs * -(-rows // block_rows)
    places = multiprocessors * BLOCKS.get(capability, OTHER_BLOCKS)[codes] // warps
    splits = places // groups if groups <= places else -(-4 * places // groups) if groups < 4 * places else 1
    splits = max(1, min(splits, MOST_SPLITS, -(-max_keys // keys) // LEAST_TILES))
    return Schedule(block_rows, keys, warps, stages, splits)


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "schedule"))
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output in q's dtype and the float32 log-sum-exp [batch, tokens, q_heads]."""
    from pallas_kernels.paged_attention import triton_kernels

    batch, tokens, q_heads, head_dim = q.shape
    num_pages, kv_heads, page_size, width = k_pages.shape
    form = None if scales is None else format_of(k_pages.dtype)
    words = width if form is None else width // 2  # of a row, see the kernel
    rows = tokens * (q_heads // kv_heads)
    if schedule is None:
        keys = page_table.shape[1] * page_size
        schedule = schedule_for(
            pairs=batch * kv_heads,
            rows=rows,
            head_dim=head_dim,
            max_keys=keys if window is None else min(keys, window + tokens),
            codes=scales is not None,
            exact=q.dtype == jnp.float32,
            multiprocessors=triton_backend.multiprocessors(),
            capability=triton_backend.capability(),
        )
    heads = {"TOKENS": tokens, "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    sizes = heads | {"SPLITS": schedule.splits}
    parts = (batch, kv_heads, schedule.splits, rows)
    k_scales, v_scales = (lengths, lengths) if scales is None else scales  # not read where there are none
    partial, maximum, total = triton_backend.call(
        triton_kernels.paged_attention_split,
        *(q, k_pages, v_pages, k_scales, v_scales, page_table, lengths),
        out_type=[
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        grid=(batch * kv_heads, schedule.splits, -(-rows // schedule.block_rows)),
        num_warps=schedule.warps,
        num_stages=schedule.stages,
        WIDTH=words,
        PAGE=page_size,
        PAGES=page_table.shape[1],
        SCALE=scale,
        WINDOW=window,
        SOFTCAP=softcap,
        FORMAT=None if form is None else form.name,
        LARGE=num_pages * kv_heads * page_size * words >= 2**31,
        BLOCK_R=schedule.block_rows,
        BLOCK_W=max(16, _power_of_two(words)),
        KEYS=schedule.keys,
        STAGES=schedule.stages,
        ASM=True,
        **sizes,
    )
    block_d, block_s = _power_of_two(head_dim), _power_of_two(schedule.splits)
    out, lse = triton_backend.call(
        triton_kernels.paged_attention_merge,
        *(partial, maximum, total, total if sinks is None else sinks.astype(jnp.float32)),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
        grid=(batch * kv_heads, rows),
        num_warps=max(1, block_s * block_d // 2048),  # one as long as it holds all, so that none waits for another
        num_stages=1,
        SINKS=sinks is not None,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        **sizes,
    )
    return out, lse


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
