"""A draft that proposes nothing: plain decoding through the very program that verifies k tokens.

It times verification alone, and it decodes with the arithmetic of verification: where another program rounds 16-bit
near-ties another way, tokens with a draft are to be compared with these.
"""

import dataclasses
import typing
from typing import Any

import jax.numpy as jnp

from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.ngram import check_k
from jaxinfer.speculative.proposer import KeepsNothing, LearnsNothing, Rows, Wanted


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class NullDraft(KeepsNothing):
    """Steps have room for k drafted tokens and get none."""

    k: int = 4
    name = "nothing"
    draws = False
    params = ()

    def __post_init__(self) -> None:
        check_k(self.k, "NullDraft")

    def check(self, target: Model, longest: int) -> None:
        """Fits any model."""

    def proposer(self, target: Model) -> "NullProposer":
        return NullProposer()


@dataclasses.dataclass(frozen=True)
class NullProposer(LearnsNothing):
    """The compiled part: padding."""

    def propose(
        self, params: Any, state: tuple[()], cache: PagedKVCache, rows: Rows, wanted: Wanted
    ) -> tuple[Proposal, tuple[()], PagedKVCache]:
        batch = rows.positions.shape[0]
        nothing = Proposal(jnp.zeros((batch, wanted.num_drafted), jnp.int32), jnp.zeros(batch, jnp.int32))
        return nothing, state, cache
