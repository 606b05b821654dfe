"""Which parts of the sampler the engine's decode state has room for: a program's shape, so there are few of them."""

import dataclasses
from collections.abc import Iterable

from jaxinfer.config import ModelConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import SamplerVariant

MIN_PLACES = 64
"""Least room for a row's list of biases, and for its list of ids that `min_tokens` forbids."""
LISTED_LOGPROBS = (0, 5, 20)
"""Numbers of most probable tokens that programs report; more are rounded up to a power of two."""


@dataclasses.dataclass(frozen=True)
class SamplerLayout:
    """A sampler variant and the width of its lists. A wider one gives every row the same tokens."""

    variant: SamplerVariant
    places: int = MIN_PLACES

    @classmethod
    def required(cls, params: SamplingParams, config: ModelConfig) -> "SamplerLayout":
        """What one request needs, rounded up."""
        variant = SamplerVariant.required([params], config.num_tokens)
        if variant.num_logprobs is not None:
            variant = dataclasses.replace(variant, num_logprobs=listed(variant.num_logprobs, config))
        longest = max(len(params.logit_bias), len({*config.eos_token_ids, *params.stop_token_ids}))
        return cls(variant, max(MIN_PLACES, _power(longest)))

    def __or__(self, other: "SamplerLayout") -> "SamplerLayout":
        return SamplerLayout(self.variant | other.variant, max(self.places, other.places))

    def serves(self, other: "SamplerLayout") -> bool:
        return self | other == self

    @property
    def size(self) -> tuple[int, int, int]:
        """Wider layouts cost more: how many parts, how many listed logprobs, how long the lists."""
        fields = dataclasses.asdict(self.variant)
        parts = sum(bool(fields[name]) for name in fields if name not in ("num_tokens", "greedy", "num_logprobs"))
        listed = -1 if self.variant.num_logprobs is None else self.variant.num_logprobs
        return parts + (not self.variant.greedy), listed, self.places


class Layouts:
    """The layouts that programs exist for. A need that none of them serves widens the widest."""

    def __init__(self, known: Iterable[SamplerLayout]) -> None:
        self.known: list[SamplerLayout] = []
        for layout in known:
            self.add(layout)

    def add(self, layout: SamplerLayout) -> None:
        if layout not in self.known:
            self.known = sorted([*self.known, layout], key=lambda one: one.size)

    def choose(self, needs: Iterable[SamplerLayout]) -> SamplerLayout:
        """The narrowest known layout that serves all `needs`, or a new one, which is known from then on."""
        need = None
        for one in needs:
            need = one if need is None else need | one
        if need is None:
            return self.known[0]
        for layout in self.known:
            if layout.serves(need):
                return layout
        self.add(need | self.known[-1])
        return self.choose([need])


def listed(num_logprobs: int, config: ModelConfig) -> int:
    """The number of most probable tokens that programs report for requests that want `num_logprobs`."""
    count = next((n for n in LISTED_LOGPROBS if n >= num_logprobs), _power(num_logprobs))
    return min(count, config.num_tokens)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
