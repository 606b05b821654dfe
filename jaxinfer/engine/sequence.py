"""One completion as the scheduler sees it: numbers of tokens, pages, a slot. And what a round of work consists of."""

import dataclasses
import enum
from collections.abc import Hashable

from jaxinfer.engine.prefix_cache import Cursor


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """In the prefill queue, without a slot; also after a preemption."""
    PREFILLING = "prefilling"
    """Has a slot and pages; a part of its tokens is still to be computed."""
    DECODING = "decoding"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """What the scheduler knows of a completion. `tokens` are the prompt and what the host has read of the output.

    Work is dispatched before its results are read: `num_dispatched` counts output tokens that will exist when all
    dispatched work is done (at most: a stop may come before), `unread` the pieces of work with results to come.
    """

    tokens: list[int]
    num_prompt: int
    max_tokens: int
    group: int
    """Equal for the completions of one request, whose prompt is computed once."""
    salt: Hashable = None
    interactive: bool = True
    """Somebody reads along, so decoding may not wait for prefill longer than the bound."""
    reuses: bool = True
    """May begin with cached pages; not if all positions of its prompt are scored."""
    arrival: int = -1
    """Place in the order of arrival, given by the scheduler; kept through preemptions."""
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    cursor: Cursor | None = None
    num_reused: int = 0
    """Tokens found in the prefix cache when it was last admitted."""
    num_prefilled: int = 0
    num_dispatched: int = 0
    unread: int = 0
    num_admissions: int = 0
    """How often it was given a slot and pages."""
    skipped: int = 0
    """Decode chunks in a row that went without it."""
    num_preemptions: int = 0

    @property
    def num_generated(self) -> int:
        """Output tokens read so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_decode(self) -> bool:
        """Whether another decode chunk could give it tokens."""
        return self.status is Status.DECODING and self.num_dispatched < self.max_tokens

    def cached_after(self, num_steps: int) -> int:
        """Tokens in the cache, at most, when `num_steps` more decode steps are done; the newest is never among them."""
        return self.num_prompt + min(self.num_dispatched + num_steps, self.max_tokens) - 1

    @property
    def num_certain(self) -> int:
        """Leading tokens whose keys and values are in the pages, as far as the host knows."""
        if self.status is Status.DECODING:
            return len(self.tokens) - 1 if self.num_generated else self.num_prompt
        return self.num_prefilled


@dataclasses.dataclass(frozen=True)
class Piece:
    """`length` tokens of a sequence, from `start` on, to compute in one prefill call."""

    sequence: Sequence
    start: int
    length: int
    last: bool
    """Its logits give the sequence's next token."""
    after_pieces: bool = False
    """It reads pages that other pieces of this round write, so it runs after them."""


@dataclasses.dataclass(frozen=True)
class Fork:
    """Another completion of a prompt just computed. Pages are shared but for the last if it is not full: that one is
    copied, (from, to), since both will write to it."""

    parent: Sequence
    child: Sequence
    copy: tuple[int, int] | None


@dataclasses.dataclass
class Plan:
    """A round of work, in the order in which it is dispatched: prefill pieces, forks, one decode chunk."""

    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    forks: list[Fork] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.pieces or self.decode)
