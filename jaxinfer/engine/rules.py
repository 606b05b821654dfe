"""Limits that the scheduler keeps to."""

import bisect
import dataclasses
from typing import Literal

type DecodeOrder = Literal["shortest", "arrival", "longest"]
type Policy = Literal["separate", "mixed"]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Limits of the scheduler. Lengths are in tokens."""

    page_size: int
    max_sequences: int
    """Sequences that may hold pages at once: slots."""
    max_decode_batch: int
    decode_chunk: int
    """Steps of a decode chunk."""
    max_prefill_tokens: int
    prefill_lengths: tuple[int, ...]
    """Lengths that prefill programs exist for, ascending; a piece is padded to the next one."""
    stall_tokens: int
    decode_order: DecodeOrder = "shortest"
    policy: Policy = "separate"
    decode_rows: tuple[int, ...] = ()
    """Numbers of rows that decode programs exist for, ascending; where the order is "longest"."""
    two_weights: bool = False
    """Prompts are computed with other weights than what follows them: no piece has tokens of both, and only pages of
    prompts are cached."""

    def padded(self, length: int) -> int:
        """What a piece of `length` tokens costs."""
        return self.prefill_lengths[bisect.bisect_left(self.prefill_lengths, length)]

    def cacheable(self, num_prompt: int, num_tokens: int) -> int:
        """How many of a sequence's first `num_tokens` tokens others may read."""
        return min(num_tokens, num_prompt) if self.two_weights else num_tokens
