"""What a draft has to be: `Draft` on the host, `Proposer` inside the program.

A further kind of draft (heads that predict several tokens, say) implements both; `loop` calls nothing else.
"""

import dataclasses
import typing
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model
from jaxinfer.sampling_state import SamplerVariant, SamplingState
from jaxinfer.speculative.acceptance import Proposal


@typing.no_type_check  # JAX rebuilds pytrees around placeholders, as in `lower`
@flax.struct.dataclass
class Rows:
    """What the rows of a batch show to a draft at the start of a step."""

    history: Int32[Array, "batch room"]
    """Prompt and generated tokens; the newest is at `positions`, what follows it has no meaning."""
    positions: Int32[Array, " batch"]
    """Place of the newest token, which is in no cache yet; -1: the row is idle."""
    hidden: Float[Array, "batch hidden"]
    """The target's normalised hidden state that the newest token was chosen from; zeros in the first step."""
    num_generated: Int32[Array, " batch"]
    context_lengths: Int32[Array, " batch"]
    page_table: Int32[Array, "batch pages"]
    """Of the target's pages; a draft's own pages have the same numbers."""
    sampling: SamplingState
    noise_keys: UInt32[Array, "batch 2"] | None
    """Keys to draw with in place of `sampling.keys`; None if all rows are greedy."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a step wants of a draft; static."""

    num_drafted: int
    variant: SamplerVariant
    with_logits: bool
    """Whether the proposal needs the logits that its tokens were drawn from (one-hot tokens may leave them out for the
    whole batch). Without them, tokens that are drawn are drawn with `Rows.noise_keys`."""


@typing.runtime_checkable
class Proposer(Protocol):
    """The part of a draft that is compiled into the loop. Hashable: programs are kept by it.

    Its state is a pytree. Pages of its own are a `PagedKVCache`, numbered as the target's; all other leaves are indexed
    by row first, and a row begins with zeros.
    """

    def propose(
        self, params: Any, state: Any, cache: PagedKVCache, rows: Rows, wanted: Wanted
    ) -> tuple[Proposal, Any, PagedKVCache]:
        """Proposes tokens to each row; returns the proposal, the draft's new state and the target's cache.

        What it writes to the target's cache must lie at the newest token's position or after it: verification writes
        those places again.
        """
        ...

    def settle(self, state: Any, positions: Int32[Array, " batch"]) -> Any:
        """The state after a step, the newest token of each row at `positions`: what lies there or beyond was rejected
        and is rolled back."""
        ...

    def catch_up(
        self, params: Any, state: Any, rows: Rows, known: Int32[Array, " batch"], chunk: int, from_empty: bool
    ) -> Any:
        """Takes in up to `chunk` tokens of each running row that precede its newest one and that it has not seen.

        The first `known` tokens of a row are in its pages already, whoever wrote them there. `from_empty` promises that
        there are none in any row and that no row has seen any token.
        """
        ...


class KeepsNothing:
    """What drafts without a state have in common."""

    has_own_cache = False
    bytes_per_token = 0

    def create_state(self, target: Model, num_pages: int, page_size: int, batch: int) -> tuple[()]:
        return ()


class LearnsNothing:
    """What proposers without a state have in common."""

    def settle(self, state: tuple[()], positions: Int32[Array, " batch"]) -> tuple[()]:
        return state

    def catch_up(
        self, params: Any, state: tuple[()], rows: Rows, known: Int32[Array, " batch"], chunk: int, from_empty: bool
    ) -> tuple[()]:
        return state


@typing.runtime_checkable
class Draft(Protocol):
    """A draft as users hold it."""

    @property
    def k(self) -> int:
        """Most tokens that it proposes at once."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> Any:
        """Arrays that `proposer` gets as `params`."""
        ...

    @property
    def draws(self) -> bool:
        """Whether it has distributions to draw from; else its tokens are one-hot."""
        ...

    @property
    def has_own_cache(self) -> bool:
        """Whether its state has to see every token: `catch_up` runs over prompts, and after steps without a draft."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of its own cache for each token."""
        ...

    def check(self, target: Model, longest: int) -> None:
        """Raises ValueError unless it can draft for `target` up to `longest` tokens in context."""
        ...

    def proposer(self, target: Model) -> Proposer: ...

    def create_state(self, target: Model, num_pages: int, page_size: int, batch: int) -> Any: ...


def fit_vocabulary(logits: Float32[Array, "rows draft_vocab"], vocab_size: int) -> Float32[Array, "rows vocab"]:
    """The draft's logits at the target's width. Ids that only one of them has are padding."""
    width = logits.shape[1]
    if width >= vocab_size:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, vocab_size - width)), constant_values=-jnp.inf)


def idle_safe(positions: Int32[Array, " batch"], num_tokens: int, first: int = 0) -> Int32[Array, "batch num_tokens"]:
    """Positions of `num_tokens` tokens from `first` after the newest one; all -1 in idle rows."""
    offsets = first + jnp.arange(num_tokens, dtype=jnp.int32)
    return jnp.where(positions[:, None] >= 0, positions[:, None] + offsets[None, :], jnp.int32(-1))


def newest(rows: Rows) -> Int32[Array, " batch"]:
    """The newest token of each row."""
    index = jnp.maximum(rows.positions, 0)[:, None]
    return jnp.take_along_axis(rows.history, index, axis=1)[:, 0]


def at_places(history: Int32[Array, "batch room"], places: Int32[Array, "batch count"]) -> Int32[Array, "batch count"]:
    """Tokens at some places of each row; places outside give those at the edge."""
    return jax.vmap(lambda row, index: row[jnp.clip(index, 0, row.shape[0] - 1)])(history, places)
