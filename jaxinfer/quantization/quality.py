"""Perplexity and KL divergence of a model from its original, on the same windows of tokens."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from checkpoints.progress import progress_bar
from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.layers.embedding import head
from jaxinfer.layers.linear import Weight
from jaxinfer.model import Model
from jaxinfer.quantization.layer_pass import UNTUNED
from jaxinfer.quantization.report import Quality

TOKENS_AT_ONCE = 8192
POSITIONS_AT_ONCE = 256
"""Positions whose logits, two rows of the vocabulary each, are in memory together."""

type Statistics = tuple[
    Float32[Array, " positions"],
    Float32[Array, " positions"],
    Float32[Array, " positions"],
    Bool[Array, " positions"],
    Float32[Array, " positions"],
]
"""Surprise, the original's surprise, KL divergence, whether the best token is the same, and what distributions share:
the sum of each token's smaller probability."""


@functools.partial(jax.jit, static_argnames=("config", "original_config"), compiler_options=UNTUNED)
def head_statistics(
    hidden: Float[Array, "rows tokens hidden"],
    original_hidden: Float[Array, "rows tokens original_hidden"],
    head_weight: Weight,
    original_head: Weight,
    tokens: Int32[Array, "rows tokens"],
    *,
    config: ModelConfig,
    original_config: ModelConfig | None = None,
) -> Statistics:
    """Compares next-token distributions at all positions but each row's last, from normalised hidden states.

    `original_config` is for an original that is another model.
    """
    other = config if original_config is None else original_config
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    missing = -count % POSITIONS_AT_ONCE

    def chunks(values: jax.Array, last: tuple[int, ...]) -> jax.Array:
        flat = values.reshape(count, *last)
        return jnp.pad(flat, ((0, missing), *((0, 0) for _ in last))).reshape(-1, POSITIONS_AT_ONCE, *last)

    def one(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        rows, original_rows, targets = chunk
        logprobs = jax.nn.log_softmax(head(rows, head_weight, config)[:, : config.num_tokens])
        original = jax.nn.log_softmax(head(original_rows, original_head, other)[:, : config.num_tokens])
        divergence = jnp.sum(jnp.exp(original) * (original - logprobs), axis=1)
        surprise, expected = (-jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0] for x in (logprobs, original))
        same = jnp.argmax(logprobs, axis=1) == jnp.argmax(original, axis=1)
        return surprise, expected, divergence, same, jnp.sum(jnp.exp(jnp.minimum(logprobs, original)), axis=1)

    states = (chunks(x[:, :-1], (x.shape[-1],)) for x in (hidden, original_hidden))
    parts = jax.lax.map(one, (*states, chunks(tokens[:, 1:], ())))
    surprise, expected, divergence, same, shared = (part.reshape(-1)[:count] for part in parts)
    return surprise, expected, divergence, same, shared


def joined(statistics: list[Statistics]) -> list[np.ndarray]:
    """Each kind over the positions of all batches."""
    return [np.concatenate(list(map(np.asarray, part))) for part in zip(*statistics, strict=True)]


def quality_of(statistics: list[Statistics]) -> Quality:
    """One figure of each kind over the positions of all batches."""
    return Quality.from_positions(*joined(statistics)[:4])


def measure(
    model: Model, original: Model, windows: Int32[np.ndarray, "rows tokens"], *, progress: bool = False
) -> Quality:
    """How far `model` is from `original` on rows of token ids. Raises ValueError for models of other vocabularies."""
    if model.config.num_tokens != original.config.num_tokens:
        raise ValueError(
            f"{model.name} has {model.config.num_tokens} tokens, {original.name} {original.config.num_tokens}; "
            "compare a model with the one it was made from"
        )
    return quality_of(compared(model, original, windows, progress=progress))


def compared(
    model: Model, original: Model, windows: Int32[np.ndarray, "rows tokens"], *, progress: bool
) -> list[Statistics]:
    """`head_statistics` of two models of the same tokens, of a batch of rows each."""
    statistics = []
    batches = list(row_batches(windows))
    configs = {"config": model.config, "original_config": original.config}
    with progress_bar(total=len(batches), desc="Comparing", unit="batch", shown=progress, leave=False) as bar:
        for batch in batches:
            tokens = jnp.asarray(batch)
            hidden = [whole_rows(m.params, tokens, config=m.config) for m in (model, original)]
            heads = [head_of(m.params) for m in (model, original)]
            # Waited for: the bar tells the time that is left.
            statistics.append(jax.block_until_ready(head_statistics(*hidden, *heads, tokens, **configs)))
            bar.update()
    return statistics


@functools.partial(jax.jit, static_argnames="config")
def whole_rows(
    params: Params, tokens: Int32[Array, "rows tokens"], *, config: ModelConfig
) -> Float[Array, "rows tokens hidden"]:
    """Normalised hidden states of rows that begin at position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    return decoder.forward(params, tokens, positions, None, None, config=config, stage="first")[0]


def head_of(params: Params) -> Weight:
    return params.embed_tokens if params.lm_head is None else params.lm_head


def row_batches(windows: Int32[np.ndarray, "rows tokens"]) -> Iterator[Int32[np.ndarray, "some tokens"]]:
    """The rows, as many at a time as `TOKENS_AT_ONCE` allows."""
    rows = max(1, TOKENS_AT_ONCE // max(1, windows.shape[1]))
    for first in range(0, len(windows), rows):
        yield windows[first : first + rows]
