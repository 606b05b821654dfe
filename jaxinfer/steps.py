"""The jitted programs: prefill, decode and verify. Pure functions; the cache is donated and updated in place.

Each is compiled once for each combination of shapes and static arguments. Padding is harmless everywhere: a padded
token is written nowhere and is masked in attention; a padded row gives logits that nobody reads.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.program import Program
from jaxinfer.sampling_logprobs import TokenLogprobs, token_logprobs
from jaxinfer.tiers import KVCache, PageTable
from jaxinfer.tokens import Stage


def prefill_positions(
    lengths: Int32[Array, " batch"], starts: Int32[Array, " batch"], num_tokens: int
) -> Int32[Array, "batch tokens"]:
    """Positions of a chunk padded at its end: starts + 0, 1, ... for the first `lengths` tokens, then -1."""
    offsets = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    return jnp.where(offsets < lengths[:, None], starts[:, None] + offsets, jnp.int32(-1))


@functools.partial(jax.jit, static_argnames=("config", "from_empty"), donate_argnames="cache")
def prefill(
    params: Params,
    cache: KVCache,
    tokens: Int32[Array, "batch tokens"],
    lengths: Int32[Array, " batch"],
    starts: Int32[Array, " batch"],
    page_table: PageTable,
    *,
    config: ModelConfig,
    context_lengths: Int32[Array, " batch"] | None = None,
    from_empty: bool = False,
    order: Int32[Array, " ordered"] | None = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Processes a chunk of each row's prompt and returns float32 logits of its last real token.

    Row b holds `lengths[b]` real tokens, then padding; its first token sits at position `starts[b]`, and positions
    before that are in the cache already. `from_empty=True` promises that all starts are 0: attention may then read
    the chunk itself instead of the pages. A row of length 0 is padding and gives logits of no meaning. `order`: see
    `decoder.forward`.
    """
    positions = prefill_positions(lengths, starts, tokens.shape[1])
    last = jnp.maximum(lengths - 1, 0)
    stage: Stage = "first" if from_empty else "prefill"
    hidden, cache = _forward(params, cache, tokens, positions, page_table, config, context_lengths, stage, last, order)
    return decoder.logits(params, hidden[:, 0], config), cache


@functools.partial(jax.jit, static_argnames=("num_logprobs", "config", "from_empty"), donate_argnames="cache")
def prefill_scored(
    params: Params,
    cache: KVCache,
    tokens: Int32[Array, "batch tokens"],
    lengths: Int32[Array, " batch"],
    starts: Int32[Array, " batch"],
    page_table: PageTable,
    targets: Int32[Array, "batch tokens"],
    *,
    num_logprobs: int,
    config: ModelConfig,
    context_lengths: Int32[Array, " batch"] | None = None,
    from_empty: bool = False,
) -> tuple[Float[Array, "batch vocab"], TokenLogprobs, KVCache]:
    """`prefill` that also scores `targets[b, t]` as the successor of `tokens[b, t]`.

    The head runs over up to 64 positions at a time: logits of all positions never exist at once.
    """
    positions = prefill_positions(lengths, starts, tokens.shape[1])
    hidden, cache = _forward(
        params, cache, tokens, positions, page_table, config, context_lengths, "first" if from_empty else "prefill"
    )
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]

    def score(block: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
        block_hidden, block_targets = block
        block_logits = decoder.logits(params, block_hidden, config)
        return token_logprobs(block_logits, block_targets, num_logprobs, config.num_tokens)

    rows = hidden.shape[0] * hidden.shape[1]
    width = math.gcd(rows, 64)
    blocks = (hidden.reshape(rows // width, width, -1), targets.reshape(rows // width, width))
    scores = jax.lax.map(score, blocks)
    scores = jax.tree.map(lambda leaf: leaf.reshape(*tokens.shape, *leaf.shape[2:]), scores)
    return decoder.logits(params, last, config), scores, cache


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def decode(
    params: Params,
    cache: KVCache,
    tokens: Int32[Array, " batch"],
    positions: Int32[Array, " batch"],
    page_table: PageTable,
    *,
    config: ModelConfig,
    context_lengths: Int32[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Appends one token a row, at `positions[b]` (-1: the row is idle), and returns float32 logits of the next."""
    hidden, cache = _forward(
        params, cache, tokens[:, None], positions[:, None], page_table, config, context_lengths, "decode"
    )
    return decoder.logits(params, hidden[:, 0], config), cache


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def verify(
    params: Params,
    cache: KVCache,
    tokens: Int32[Array, "batch drafted"],
    positions: Int32[Array, " batch"],
    page_table: PageTable,
    *,
    config: ModelConfig,
    context_lengths: Int32[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch drafted vocab"], KVCache]:
    """Appends several tokens a row, the first at `positions[b]` (-1: idle), and returns float32 logits after each."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    token_positions = jnp.where(positions[:, None] >= 0, positions[:, None] + offsets, jnp.int32(-1))
    hidden, cache = _forward(params, cache, tokens, token_positions, page_table, config, context_lengths, "decode")
    return decoder.logits(params, hidden, config), cache


outermost_prefill = Program(prefill, static_argnames=("config", "from_empty"), donate_argnames="cache")
"""`prefill` as a program of its own, with the compiler's options for that."""
outermost_prefill_scored = Program(
    prefill_scored, static_argnames=("num_logprobs", "config", "from_empty"), donate_argnames="cache"
)


def _forward(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    positions: jax.Array,
    page_table: PageTable,
    config: ModelConfig,
    context_lengths: jax.Array | None,
    stage: Stage,
    wanted: jax.Array | None = None,
    order: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    options = {"config": config, "stage": stage, "context_lengths": context_lengths, "wanted": wanted, "order": order}
    hidden, new_cache = decoder.forward(params, tokens, positions, cache, page_table, **options)
    assert new_cache is not None
    return hidden, new_cache


@functools.partial(jax.jit, static_argnames="config")
def full_logits(
    params: Params,
    tokens: Int32[Array, "batch tokens"],
    lengths: Int32[Array, " batch"],
    *,
    config: ModelConfig,
) -> Float[Array, "batch tokens vocab"]:
    """Teacher-forced float32 logits at every position, with no cache. Rows are padded at their end to one length."""
    positions = prefill_positions(lengths, jnp.zeros_like(lengths), tokens.shape[1])
    hidden, _ = decoder.forward(params, tokens, positions, None, None, config=config, stage="first")
    return decoder.logits(params, hidden, config)
