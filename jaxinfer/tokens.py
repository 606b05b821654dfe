"""What a forward pass knows of its tokens beside their hidden states: where they are, and how they are laid out."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxinfer.config import RopeConfig
from jaxinfer.tiers import PageTable

type Stage = Literal["first", "prefill", "decode"]
"""What a forward pass may assume. "first": no row has anything cached, so attention may read the new keys and
values themselves instead of the pages. "prefill": rows may have a cached prefix and may end in padding. "decode": a
row's tokens are all real, or the row is idle and all its positions are -1."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What the layers need to know of the tokens beside their hidden states."""

    positions: Int32[Array, "batch tokens"]
    page_table: PageTable | None
    rope_tables: dict[RopeConfig, tuple[jax.Array, jax.Array]]
    """Of the tokens' angles, and maybe of those that follow a row's last."""
    stage: Stage
    order: Int32[Array, " ordered"] | None = None
    """Of tokens that are computed without their rows' padding, side by side in one row: flat places in `positions`."""

    first: Int32[Array, " places"] | None = None
    """Of a single row, its first position at place 0, where that is in memory already."""

    def angles(self, rope: RopeConfig) -> tuple[Float[Array, "batch tokens half"], Float[Array, "batch tokens half"]]:
        """Cosines and sines of the tokens alone."""
        cos, sin = self.rope_tables[rope]
        length = self.positions.shape[1]
        return cos[:, :length], sin[:, :length]

    @property
    def columns(self) -> Int32[Array, "batch tokens"]:
        """Of each place in `positions` where it comes in `order`; anything in range for what does not."""
        assert self.order is not None
        columns = jnp.zeros(self.positions.size, jnp.int32)
        ordered = jnp.arange(self.order.size, dtype=jnp.int32)
        return columns.at[self.order].set(ordered, unique_indices=True).reshape(self.positions.shape)

    def in_rows(self, x: Shaped[Array, "rows places features"]) -> Shaped[Array, "batch tokens features"]:
        """What layers have of their tokens, as attention takes it: padding is zeros."""
        if self.order is None:
            return x
        found = x[0].at[self.columns].get(mode="promise_in_bounds")
        return jnp.where((self.positions >= 0)[:, :, None], found, jnp.zeros((), x.dtype))

    def out_of_rows(self, x: Shaped[Array, "batch tokens features"]) -> Shaped[Array, "rows places features"]:
        """Back again."""
        if self.order is None:
            return x
        flat = x.reshape(-1, x.shape[-1])
        return flat.at[self.order].get(mode="promise_in_bounds", unique_indices=True)[None]

    def one(self, x: Float[Array, "rows places features"], places: Int32[Array, " batch"]) -> jax.Array:
        """What each row has at one of its places: [batch, 1, features]."""
        if self.order is None:
            return one_token(x, places)
        return x[0].at[jnp.take_along_axis(self.columns, places[:, None], axis=1)].get(mode="promise_in_bounds")


def one_token(
    x: Float[Array, "batch tokens features"], places: Int32[Array, " batch"]
) -> Float[Array, "batch 1 features"]:
    """What each row has at one of its places."""
    return jnp.take_along_axis(x, places[:, None, None], axis=1)
