"""Log-probabilities of chosen tokens and of the most probable ones: computed on the device, tabled on the
host.

They are raw: the log-softmax of the model's own float32 logits, before bias, penalties, temperature and
filters (vLLM's `raw_logprobs`). Padding ids count in the normaliser, as in every other engine, and are never
listed.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

LOWEST_LOGPROB = -9999.0
"""Reported instead of -inf, which JSON cannot hold; vLLM's server reports the same number."""


@typing.no_type_check
@flax.struct.dataclass
class TokenLogprobs:
    """Scores of one token for each row, with the `k` most probable tokens, most probable first."""

    logprob: Float32[Array | np.ndarray, "*rows"]
    rank: Int32[Array | np.ndarray, "*rows"]
    """1 + the number of tokens that are strictly more probable."""
    top_ids: Int32[Array | np.ndarray, "*rows k"]
    top_logprobs: Float32[Array | np.ndarray, "*rows k"]


def token_logprobs(
    logits: Float32[Array, "rows vocab"],
    tokens: Int32[Array, " rows"],
    num_logprobs: int,
    num_tokens: int,
) -> TokenLogprobs:
    """Scores `tokens`, row by row, under `logits`.

    For a prompt, row t holds the logits at position t and token t + 1 of the prompt: its first token has no
    score, and the last position's logits belong to the first generated token. `num_tokens` is the number of
    ids that are not padding; `num_logprobs` is at most that.
    """
    normaliser = jax.nn.logsumexp(logits, axis=1)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    real = logits if num_tokens == logits.shape[1] else jnp.where(ids < num_tokens, logits, -jnp.inf)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    top, top_ids = lax.top_k(real, num_logprobs)
    return TokenLogprobs(
        logprob=chosen[:, 0] - normaliser,
        rank=1 + jnp.sum(real > chosen, axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top - normaliser[:, None],
    )


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability and its rank, 1 for the most probable.

    Finite, but for a token of a prompt whose logits were not: NaN.
    """

    logprob: float
    rank: int


def logprob_tables(tokens: Sequence[int], scores: TokenLogprobs, num_logprobs: int) -> list[dict[int, Logprob]]:
    """One table for each token: token id to `Logprob`, the token itself first, then the most probable ones.

    Row i of `scores` scores `tokens[i]`; more rows, padding, are ignored, and so are more than `num_logprobs`
    columns. A table has `num_logprobs` entries if the token is among them, else one more.
    """
    logprobs, ranks, top_ids, top_logprobs = (
        np.asarray(array).tolist() for array in (scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs)
    )
    tables = []
    for row, token in enumerate(tokens):
        table = {int(token): Logprob(max(logprobs[row], LOWEST_LOGPROB), ranks[row])}
        listed = top_logprobs[row][:num_logprobs]
        rank = 1
        for column, logprob in enumerate(listed):
            if column and logprob < listed[column - 1]:  # equal tokens share the rank of the first
                rank = column + 1
            if math.isfinite(logprob):
                table.setdefault(top_ids[row][column], Logprob(logprob, rank))
        tables.append(table)
    return tables
