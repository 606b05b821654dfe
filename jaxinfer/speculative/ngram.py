"""Prompt lookup: what followed the last few tokens when they stood in the row before, found on the device."""

import dataclasses
import typing
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.proposer import KeepsNothing, LearnsNothing, Rows, Wanted, at_places

MAX_DRAFTED = 15
"""Most tokens a draft may propose: verification runs k + 1 at once, and its attention kernel takes 16."""


def check_k(k: object, kind: str) -> None:
    """Raises ValueError for a number of drafted tokens that no program is made for."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_DRAFTED:
        raise ValueError(f"{kind}: k={k!r}; expected 1 to {MAX_DRAFTED} drafted tokens a step")


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class NgramDraft(KeepsNothing):
    """Proposes what followed the longest suffix of the row, of `max_n` down to `min_n` tokens, when it occurred last.

    A continuation that reaches the row's end goes on from its own beginning, so that a row that repeats itself is
    proposed another round. A row in which no suffix occurs twice is proposed nothing. Costs no model and no memory;
    pays where outputs quote their prompts or themselves (summaries, code edits, retrieved text).
    """

    k: int = 4
    min_n: int = 2
    max_n: int = 4
    draws = False
    params = ()

    def __post_init__(self) -> None:
        check_k(self.k, "NgramDraft")
        for name in ("min_n", "max_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 16:
                raise ValueError(f"NgramDraft: {name}={value!r}; expected 1 to 16 tokens")
        if self.min_n > self.max_n:
            raise ValueError(f"NgramDraft: min_n={self.min_n} is above max_n={self.max_n}; swap them")

    @property
    def name(self) -> str:
        return f"n-gram({self.min_n}..{self.max_n})"

    def check(self, target: Model, longest: int) -> None:
        """Drafts for any model."""

    def proposer(self, target: Model) -> "NgramProposer":
        return NgramProposer(self.min_n, self.max_n)


@dataclasses.dataclass(frozen=True)
class NgramProposer(LearnsNothing):
    """The compiled part: a few comparisons over the row's history, no sequential search."""

    min_n: int
    max_n: int

    def propose(
        self, params: Any, state: tuple[()], cache: PagedKVCache, rows: Rows, wanted: Wanted
    ) -> tuple[Proposal, tuple[()], PagedKVCache]:
        tokens, found = lookup(rows.history, rows.positions, self.min_n, self.max_n, wanted.num_drafted)
        lengths = jnp.where(found, jnp.int32(wanted.num_drafted), jnp.int32(0))
        return Proposal(tokens, lengths), state, cache


def lookup(
    history: Int32[Array, "batch room"],
    positions: Int32[Array, " batch"],
    min_n: int,
    max_n: int,
    num_drafted: int,
) -> tuple[Int32[Array, "batch num_drafted"], Bool[Array, " batch"]]:
    """Continuations of each row's suffix, and whether it was found; `positions` are those of the newest tokens."""
    room = history.shape[1]
    places = jnp.arange(room, dtype=jnp.int32)[None, :]
    last = positions[:, None]
    # matched[b, i]: how many tokens up to i equal those up to the newest, 0 to max_n.
    matched = jnp.zeros(history.shape, jnp.int32)
    unbroken = (places < last) & (last >= 0)
    for back in range(max_n):
        suffix_token = at_places(history, last - back)
        earlier = jnp.pad(history, ((0, 0), (back, 0)))[:, :room]
        unbroken &= (earlier == suffix_token) & (places >= back) & (last >= back)
        matched += unbroken.astype(jnp.int32)
    # The longest match, and of equal ones the latest.
    score = jnp.where(matched >= min_n, matched * room + places, -1)
    place = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    found = jnp.max(score, axis=1) >= 0
    period = jnp.maximum(last - place, 1)
    ahead = jnp.arange(num_drafted, dtype=jnp.int32)[None, :] % period
    return at_places(history, place + 1 + ahead), found
