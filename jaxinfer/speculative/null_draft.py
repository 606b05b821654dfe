"""A draft that proposes nothing: plain decoding through the very program that verifies k tokens.

It times verification alone, and it decodes with the arithmetic of verification: where another program rounds 16-bit
near-ties another way, tokens with a draft are to be compared with these.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model
from jaxinfer.sampling_state import SamplerVariant
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.ngram import check_k
from jaxinfer.speculative.proposer import Rows


@dataclasses.dataclass(frozen=True)
class NullDraft:
    """Steps have room for k drafted tokens and get none."""

    k: int = 4
    name = "nothing"
    draws = False
    has_own_cache = False
    bytes_per_token = 0
    params = ()

    def __post_init__(self) -> None:
        check_k(self.k, "NullDraft")

    def check(self, target: Model, longest: int) -> None:
        """Fits any model."""

    def proposer(self, target: Model) -> "NullProposer":
        return NullProposer()

    def create_state(self, target: Model, num_pages: int, page_size: int, batch: int) -> tuple[()]:
        return ()


@dataclasses.dataclass(frozen=True)
class NullProposer:
    """The compiled part: padding."""

    def propose(
        self,
        params: Any,
        state: Any,
        cache: PagedKVCache,
        rows: Rows,
        variant: SamplerVariant,
        num_drafted: int,
        with_logits: bool,
    ) -> tuple[Proposal, Any, PagedKVCache]:
        batch = rows.positions.shape[0]
        return Proposal(jnp.zeros((batch, num_drafted), jnp.int32), jnp.zeros(batch, jnp.int32)), state, cache

    def settle(self, state: Any, positions: Int32[Array, " batch"]) -> Any:
        return state

    def catch_up(
        self, params: Any, state: Any, rows: Rows, running: Bool[Array, " batch"], chunk: int, from_empty: bool
    ) -> Any:
        return state
