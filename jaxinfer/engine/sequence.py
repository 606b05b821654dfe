"""One completion as the scheduler sees it: numbers of tokens, pages, a slot. And what a round of work consists of."""

import collections
import dataclasses
import enum
from collections.abc import Hashable, Mapping

from jaxinfer.engine.prefix_cache import Cursor
from jaxinfer.tier_pages import Moves, Row


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """In the prefill queue, without a slot; also after a preemption."""
    PREFILLING = "prefilling"
    """Has a slot and pages; a part of its tokens is still to be computed."""
    DECODING = "decoding"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a decode chunk does for each of its sequences: steps that give 1 token and up to `num_drafted` more each."""

    num_steps: int
    num_drafted: int = 0
    tokens_per_step: float = 1.0
    """What a step is expected to give."""

    @property
    def most(self) -> int:
        """Tokens that a sequence gains at most."""
        return self.num_steps * (1 + self.num_drafted)


@dataclasses.dataclass(frozen=True)
class Booking:
    """Output tokens that one piece of dispatched work gives a sequence unless it ends: at most, and probably."""

    most: int
    expected: float


@dataclasses.dataclass(eq=False)
class Sequence:
    """What the scheduler knows of a completion. `tokens` are the prompt and what the host has read of the output.

    Work is dispatched before its results are read: `booked` has an entry for each piece of work with results to come.
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
    booked: collections.deque[Booking] = dataclasses.field(default_factory=collections.deque)
    pages_version: int = 0
    """How often its pages changed otherwise than by more of them: by an admission, or some being taken back."""
    tiers: Row | None = None
    """Its pages instead of `pages`, where the cache is in tiers."""
    skipped: int = 0
    """Decode chunks in a row that went without it."""
    num_preemptions: int = 0

    @property
    def num_generated(self) -> int:
        """Output tokens read so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def unread(self) -> int:
        """Pieces of work with results to come."""
        return len(self.booked)

    @property
    def wants_decode(self) -> bool:
        """Whether another decode chunk is likely to give it tokens."""
        return self.outlook(Chunk(0))[0]

    def cached_after(self, num_tokens: int) -> int:
        """Tokens in the cache, at most, when all dispatched work is done and has given `num_tokens` more; the newest is
        never among them."""
        most = len(self.tokens) - self.num_prompt + num_tokens
        for booking in self.booked:
            most += booking.most
        return self.num_prompt + min(most, self.max_tokens) - 1

    @property
    def still_to_come(self) -> int:
        """Output tokens that it may get beyond those of dispatched work."""
        return self.num_prompt + self.max_tokens - 1 - self.cached_after(0)

    def reach(self, chunk: Chunk) -> int:
        """Places in the cache that its next decode chunk may write to: what it may gain, and what is drafted behind."""
        return self.outlook(chunk)[1]

    def outlook(self, chunk: Chunk) -> tuple[bool, int]:
        """Whether another decode chunk is likely to give it tokens, and its `reach`.

        One call for both: it is asked for every sequence in every round, with one or two bookings each.
        """
        most = len(self.tokens) - self.num_prompt
        expected: float = most
        for booking in self.booked:
            most += booking.most
            expected += booking.expected
        is_decoding = self.status is Status.DECODING
        most += chunk.most if is_decoding else chunk.most + 1  # the token that its prefill is going to give
        reach = self.num_prompt + min(most, self.max_tokens) - 1 + chunk.num_drafted
        return is_decoding and expected < self.max_tokens, reach

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
    copied, since both will write to it."""

    parent: Sequence
    child: Sequence
    copies: Mapping[str, tuple[int, int]]
    """(from, to) by pool; nothing where the last page is full. There is one pool, "pages", or one for each tier."""


@dataclasses.dataclass
class Plan:
    """A round of work, in the order in which it is dispatched: moves, prefill pieces, forks, one decode chunk."""

    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    forks: list[Fork] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)
    chunk: Chunk = Chunk(0)
    """What the decode chunk does."""
    moves: list[Moves] = dataclasses.field(default_factory=list)
    """Pages between the tiers of a tiered cache. They are to be made though there be no other work."""

    @property
    def has_work(self) -> bool:
        return bool(self.pieces or self.decode)
