"""Acceptance that changes the output, each kind under its own name; nothing here is ever on by default.

All accept what exact acceptance accepts, and more. In place of the first token that they reject comes the target's own.
Their output has neither the target's distribution nor, at temperature 0, its greedy tokens.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.speculative.acceptance import Drafted


def _check(mode: object, name: str, expected: str, is_right: Callable[[float], bool]) -> None:
    """Raises ValueError unless a mode's option is a number that is right."""
    value = getattr(mode, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_right(value):
        raise ValueError(f"{type(mode).__name__}: {name}={value!r}; expected {expected}")


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
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
            _check(self, name, "at least 1", lambda value: isinstance(value, int) and value >= 1)
        for name in ("start_tokens", "end_tokens"):
            _check(self, name, "a number of tokens, 0 or more", lambda value: isinstance(value, int) and value >= 0)

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        places = drafted.num_generated[:, None] + jnp.arange(drafted.exact.shape[1], dtype=jnp.int32)[None, :]
        allowed = jnp.where(places < self.start_tokens, self.start, self.middle)
        allowed = jnp.where(places >= drafted.max_tokens[:, None] - self.end_tokens, self.end, allowed)
        own = drafted.own_logprobs
        rank = 1 + jnp.sum(drafted.target_logprobs > own[:, :, None], axis=2, dtype=jnp.int32)
        return drafted.exact | ((rank <= allowed) & jnp.isfinite(own))


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class LossyTypical:
    """Typical acceptance (https://arxiv.org/abs/2401.10774): p(x) > min(epsilon, delta * exp(-entropy of p))."""

    epsilon: float = 0.09
    delta: float = 0.3
    needs_logits = False
    lossless = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            _check(self, name, "a number in (0, 1]", lambda value: 0.0 < value <= 1.0)

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        logprobs = drafted.target_logprobs
        entropy = -jnp.sum(jnp.exp(logprobs) * jnp.where(jnp.isfinite(logprobs), logprobs, 0.0), axis=2)
        bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        return drafted.exact | (jnp.exp(drafted.own_logprobs) > bound)


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class LossyKL:
    """Accepts where the draft's distribution q is close to the target's p: KL(q || p) < threshold, in nats.

    For a draft without distributions q is one-hot, and the divergence is -log p(x).
    """

    threshold: float = 0.1
    needs_logits = True
    lossless = False

    def __post_init__(self) -> None:
        _check(self, "threshold", "a positive number of nats", lambda value: value > 0.0)

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        own = drafted.own_logprobs
        if drafted.proposal.logits is None:
            return drafted.exact | (-own < self.threshold)
        draft = jax.nn.log_softmax(drafted.proposal.logits, axis=-1)
        terms = jnp.where(jnp.isfinite(draft), jnp.exp(draft) * (draft - drafted.target_logprobs), 0.0)
        return drafted.exact | ((jnp.sum(terms, axis=2) < self.threshold) & jnp.isfinite(own))


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """For benchmarks of the machinery only: accepts each token with this probability, whatever the models say."""

    probability: float
    needs_logits = False
    lossless = False

    def __post_init__(self) -> None:
        _check(self, "probability", "a number in [0, 1]", lambda value: 0.0 <= value <= 1.0)

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        batch, width = drafted.exact.shape

        def chance(row: Int32[Array, ""], step: Int32[Array, ""]) -> Float32[Array, " drafted"]:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), row), step)
            return jax.random.uniform(key, (width,))

        rows = jnp.arange(batch, dtype=jnp.int32)
        return jax.vmap(chance)(rows, drafted.num_generated) < self.probability
