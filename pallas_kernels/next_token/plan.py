"""How the kernel that chooses a token is cut up: sizes and shared memory, known at compile time."""

import dataclasses

BLOCKS, WARPS = 8, 16
"""Of the cluster, the largest that every card places, and of a block."""
FOUR = 4
"""Logits that a lane asks for at once."""
MOST_FOURS = 16
"""Of a lane, all asked for before the first is looked at: registers have room for them."""


@dataclasses.dataclass(frozen=True)
class NextPlan:
    """`num_tokens` of the `vocab` logits count; `rows` x `half` angles; an embedding of `hidden` features."""

    vocab: int
    num_tokens: int
    hidden: int
    rows: int
    half: int

    @staticmethod
    def refusal(vocab: int, hidden: int, half: int) -> str | None:
        """Why the kernel does not take such sizes; None if it does."""
        if vocab % FOUR or vocab > BLOCKS * WARPS * 32 * FOUR * MOST_FOURS:
            most = BLOCKS * WARPS * 32 * FOUR * MOST_FOURS
            return f"it takes a multiple of {FOUR} logits, up to {most}, not {vocab}"
        if hidden % 8 or hidden > WARPS * 32 * 8:
            return f"it takes a multiple of 8 hidden features, up to {WARPS * 32 * 8}, not {hidden}"
        if half % FOUR or half > 32 * FOUR:
            return f"it takes a multiple of {FOUR} angles, up to {32 * FOUR}, not {half}"
        return None

    @property
    def turns(self) -> int:
        """Fours of logits of a lane."""
        return -(-self.vocab // (BLOCKS * WARPS * 32 * FOUR))

    # Shared memory: [warp] its best logit's order and place, [block] the same of what blocks sent, a barrier.
    @property
    def inbox(self) -> int:
        return 8 * WARPS

    @property
    def barrier(self) -> int:
        return self.inbox + 8 * BLOCKS

    @property
    def shared_bytes(self) -> int:
        return self.barrier + 8
