"""The next token op: the most probable token of one sequence, and what a pass over it begins with."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.next_token import mosaic, reference
from pallas_kernels.next_token.plan import NextPlan


class Begun(NamedTuple):
    """What a pass over a token begins with, each in a buffer of its own."""

    token: Int32[Array, " 1"]
    x: Float[Array, "1 1 hidden"]
    """Its embedding; zeros for an idle sequence."""
    places: Int32[Array, " 2"]
    """Where the pass's first token is, and its last: here the same; -1 for an idle sequence."""
    cos: Float32[Array, "1 1 half"]
    sin: Float32[Array, "1 1 half"]


def next_token(
    logits: Float32[Array, " vocab"],
    table: Float[Array, "tokens hidden"],
    places: Int32[Array, " 2"],
    start: Int32[Array, " 2"],
    cos: Float32[Array, "1 rows half"],
    sin: Float32[Array, "1 rows half"],
    *,
    num_tokens: int,
    backend: Literal["mosaic", "reference"] | None = None,
) -> Begun:
    """The first of the most probable tokens, and its embedding, position and angles, in one kernel where there is one.

    Args:
      logits: of the pass before; of the first `num_tokens`, as padding is no token. NaN is never chosen by the kernel.
      table: the embedding, a row a token.
      places: of the pass before, see `Begun`: the next token is behind its last.
      start: the places of the pass whose first token the first row of `cos` and `sin` belongs to, a row a place. Behind
        the last row, the last is given.
      backend: forces one; else the environment variable JAXINFER_KERNELS, else the first that supports the call.
    """
    refusals = {"mosaic": next_token_refusal(logits.shape[0], table, cos.shape[2]), "reference": None}
    choices = dispatch.choose("next_token", refusals, backend, or_last=True)
    arrays = dispatch.in_memory((logits, table, places, start, cos[0], sin[0]))
    chosen = mosaic if choices[0].taken else reference
    token, x, following, *angles = chosen.choose_next(*arrays, num_tokens=num_tokens)
    next_cos, next_sin = (angle[None, None] for angle in angles)
    return Begun(token, x[None, None], following, next_cos, next_sin)


def next_token_refusal(vocab: int, table: Float[Array, "tokens hidden"], half: int) -> str | None:
    """Why the kernel does not take so many logits, such an embedding, so many angles; None if it does."""
    if table.dtype != jnp.bfloat16:
        return f"it copies an embedding of bfloat16, not {table.dtype}"
    return NextPlan.refusal(vocab, table.shape[1], half) or dispatch.hopper_refusal()
