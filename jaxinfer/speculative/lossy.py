"""Acceptance that changes the output, each kind under its own name; nothing here is ever on by default.

All accept what exact acceptance accepts, and more. In place of the first token that they reject comes the target's own.
Their output has neither the target's distribution nor, at temperature 0, its greedy tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.speculative.acceptance import Proposal


@dataclasses.dataclass(frozen=True)
class LossyTopK:
    """Accepts a token among the target's k most probable, k by its place in the output: start, middle, end.

    The first `start_tokens` of an output are judged with `start`, the last `end_tokens` before `max_tokens` with `end`,
    the rest with `middle`. k = 1 at temperature 0 is exact.
    """

    start: int = 1
    middle: int = 3
    end: int = 1
    start_tokens: int = 8
    end_tokens: int = 8
    needs_logits = False
    lossless = False

    def __post_init__(self) -> None:
        for name in ("start", "middle", "end"):
            if getattr(self, name) < 1:
                raise ValueError(f"LossyTopK: {name}={getattr(self, name)}; expected at least 1")

    def accepts(
        self,
        exact: Bool[Array, "batch drafted"],
        target_logprobs: Float32[Array, "batch drafted vocab"],
        proposal: Proposal,
        num_generated: Int32[Array, " batch"],
        max_tokens: Int32[Array, " batch"],
    ) -> Bool[Array, "batch drafted"]:
        places = num_generated[:, None] + jnp.arange(exact.shape[1], dtype=jnp.int32)[None, :]
        allowed = jnp.where(places < self.start_tokens, self.start, self.middle)
        allowed = jnp.where(places >= max_tokens[:, None] - self.end_tokens, self.end, allowed)
        own = jnp.take_along_axis(target_logprobs, proposal.tokens[:, :, None], axis=2)
        rank = 1 + jnp.sum(target_logprobs > own, axis=2, dtype=jnp.int32)
        return exact | ((rank <= allowed) & jnp.isfinite(own[:, :, 0]))


@dataclasses.dataclass(frozen=True)
class LossyTypical:
    """Typical acceptance (https://arxiv.org/abs/2401.10774): p(x) > min(epsilon, delta * exp(-entropy of p))."""

    epsilon: float = 0.09
    delta: float = 0.3
    needs_logits = False
    lossless = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"LossyTypical: {name}={getattr(self, name)}; expected a number in (0, 1]")

    def accepts(
        self,
        exact: Bool[Array, "batch drafted"],
        target_logprobs: Float32[Array, "batch drafted vocab"],
        proposal: Proposal,
        num_generated: Int32[Array, " batch"],
        max_tokens: Int32[Array, " batch"],
    ) -> Bool[Array, "batch drafted"]:
        own = jnp.take_along_axis(target_logprobs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
        possible = jnp.where(jnp.isfinite(target_logprobs), target_logprobs, 0.0)
        entropy = -jnp.sum(jnp.exp(target_logprobs) * possible, axis=2)
        return exact | (jnp.exp(own) > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy)))


@dataclasses.dataclass(frozen=True)
class LossyKL:
    """Accepts where the draft's distribution q is close to the target's p: KL(q || p) < threshold, in nats.

    For a draft without distributions q is one-hot, and the divergence is -log p(x).
    """

    threshold: float = 0.1
    needs_logits = True
    lossless = False

    def __post_init__(self) -> None:
        if not self.threshold > 0.0:
            raise ValueError(f"LossyKL: threshold={self.threshold}; expected a positive number of nats")

    def accepts(
        self,
        exact: Bool[Array, "batch drafted"],
        target_logprobs: Float32[Array, "batch drafted vocab"],
        proposal: Proposal,
        num_generated: Int32[Array, " batch"],
        max_tokens: Int32[Array, " batch"],
    ) -> Bool[Array, "batch drafted"]:
        own = jnp.take_along_axis(target_logprobs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
        if proposal.logits is None:
            return exact | (-own < self.threshold)
        draft = jax.nn.log_softmax(proposal.logits, axis=-1)
        terms = jnp.where(jnp.isfinite(draft), jnp.exp(draft) * (draft - target_logprobs), 0.0)
        return exact | ((jnp.sum(terms, axis=2) < self.threshold) & jnp.isfinite(own))


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """For benchmarks of the machinery only: accepts each token with this probability, whatever the models say."""

    probability: float
    needs_logits = False
    lossless = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"SyntheticAcceptance: probability={self.probability}; expected a number in [0, 1]")

    def accepts(
        self,
        exact: Bool[Array, "batch drafted"],
        target_logprobs: Float32[Array, "batch drafted vocab"],
        proposal: Proposal,
        num_generated: Int32[Array, " batch"],
        max_tokens: Int32[Array, " batch"],
    ) -> Bool[Array, "batch drafted"]:
        def chance(row: Int32[Array, ""], step: Int32[Array, ""]) -> Float32[Array, " drafted"]:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), row), step)
            return jax.random.uniform(key, (exact.shape[1],))

        rows = jnp.arange(exact.shape[0], dtype=jnp.int32)
        return jax.vmap(chance)(rows, num_generated) < self.probability
