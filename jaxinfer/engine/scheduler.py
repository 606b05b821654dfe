"""Decides what runs next: a queue of prompts to compute, a set of sequences to decode, one pool of pages for both.

Plain Python: it knows lengths and pages, not arrays, so that its rules can be tested in simulation.

* The prefill queue is first come, first served; nobody overtakes its head. A preempted sequence goes back to the place
  of its arrival.
* A round computes at most `max_prefill_tokens` of prompts, padding included; longer prompts go in pieces.
* When somebody reads along, decoding waits for at most `stall_tokens` of prefill between two chunks. Otherwise (a
  batch of requests, or the "mixed" policy) prompts go first, up to one for every slot between two chunks.
* A decode chunk takes at most `max_decode_batch` sequences, in the configured order; one that was passed over
  `MAX_SKIPS` times goes first.
* Pages are given when they are needed, and taken back when a chunk has gained less than it might have. When there are
  none left the latest arrival gives up its own and is computed again later: the oldest always gets on, so every
  sequence ends.
"""

import bisect
import dataclasses
from typing import Literal

from jaxinfer.engine.pages import OutOfPages, PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.sequence import Booking, Chunk, Fork, Piece, Plan, Sequence, Status

MAX_SKIPS = 4
"""Decode chunks that may go without a sequence before it goes first."""

type DecodeOrder = Literal["shortest", "arrival"]
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

    def padded(self, length: int) -> int:
        """What a piece of `length` tokens costs."""
        return self.prefill_lengths[bisect.bisect_left(self.prefill_lengths, length)]


class Scheduler:
    """Holds every unfinished sequence. `plan` is called once a round, `read` for each result that comes back."""

    def __init__(self, rules: Rules, pool: PagePool, prefixes: PrefixCache | None) -> None:
        self.rules, self.pool, self.prefixes = rules, pool, prefixes
        self.stall_tokens = rules.stall_tokens
        self.chunk = Chunk(rules.decode_chunk)
        """What decode chunks do that are planned from now on."""
        self.waiting: list[Sequence] = []
        """In order of arrival."""
        self.running: list[Sequence] = []
        """With a slot: prefilling or decoding, in order of arrival."""
        self.num_preemptions = 0
        self.num_looked_up = 0
        """Tokens of admitted sequences, and how many of them were in the prefix cache."""
        self.num_reused = 0
        self._arrivals = 0
        self._slots = list(range(rules.max_sequences - 1, -1, -1))
        self._stalled = 0
        """Prefill tokens since the last decode chunk, while there was something to decode."""
        self._started = 0
        """Sequences whose prefill ended since the last decode chunk."""

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def fits(self, num_cached: int) -> bool:
        """Whether a sequence that needs `num_cached` tokens in the cache could ever run."""
        return self._pages_for(num_cached) <= self.pool.num_usable

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which must fit."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Chooses a round of work and books it as dispatched."""
        plan = Plan()
        self._reserve(plan)
        ready = [sequence for sequence in self.running if sequence.wants_decode]
        if not ready:
            self._stalled = self._started = 0
        bound = None
        if self.rules.policy == "separate" and any(sequence.interactive for sequence in ready):
            bound = self.stall_tokens
        spent, goes_on = self._prefill(plan, bound)
        if ready:
            self._stalled += spent
        self._started += sum(piece.last for piece in plan.pieces)
        if bound is not None:
            prefill_first = goes_on and self._stalled + self.rules.prefill_lengths[0] <= bound
        else:
            prefill_first = goes_on and self._started < self.rules.max_sequences
        if not (plan.pieces and prefill_first):
            self._decode(plan)
        return plan

    def read(self, sequence: Sequence, tokens: list[int]) -> None:
        """One dispatched result has come back, with these new tokens."""
        sequence.booked.popleft()
        if sequence.status is not Status.FINISHED:
            sequence.tokens += tokens

    def finish(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """A sequence has ended, wherever it stood: its slot and pages are free for work dispatched from now on.

        Not `trusted`: what its pages hold may be wrong (not finite), so nobody else will read it.
        """
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self._give_up_pages(sequence, trusted)
        sequence.status = Status.FINISHED

    # --- Pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.rules.page_size)

    def _reserve(self, plan: Plan) -> None:
        """Gives every sequence the pages of its next decode chunk, the oldest first, at the cost of the latest."""
        for sequence in list(self.running):
            while sequence.wants_decode or sequence.status is Status.PREFILLING:
                wanted = self._pages_for(sequence.reach(self.chunk)) - len(sequence.pages)
                if wanted < 0:
                    self._take_back(sequence, -wanted)
                if wanted <= 0:
                    break
                try:
                    sequence.pages += self.pool.allocate(wanted)
                    break
                except OutOfPages:
                    victim = self.running[-1]
                    self._preempt(victim)
                    plan.preempted.append(victim)

    def _take_back(self, sequence: Sequence, count: int) -> None:
        """Frees the last pages of a sequence. Work on its way may write there; it does so before any later owner."""
        self.pool.release(sequence.pages[-count:])
        del sequence.pages[-count:]
        sequence.pages_version += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up_pages(sequence, trusted=True)
        sequence.status = Status.WAITING
        sequence.num_prefilled = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda other: other.arrival)

    def _give_up_pages(self, sequence: Sequence, trusted: bool) -> None:
        if self.prefixes is not None and not trusted:
            self.prefixes.forget(sequence.pages)
        elif self.prefixes is not None and sequence.cursor is not None:
            self.prefixes.extend(sequence.cursor, sequence.tokens, sequence.pages, sequence.num_certain)
        self.pool.release(sequence.pages)
        self._slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.pages, sequence.cursor, sequence.slot = [], None, -1

    # --- Prefill

    def _prefill(self, plan: Plan, bound: int | None) -> tuple[int, bool]:
        """Plans pieces. Returns the tokens they cost and whether more could follow in another round."""
        whole = left = self.rules.max_prefill_tokens
        if bound is not None:
            whole = max(min(whole, bound), self.rules.prefill_lengths[0])
            left = whole if self._stalled == 0 else min(whole, bound - self._stalled)
        spent = 0
        written: set[int] = set()
        """Pages that pieces of this round write which do not begin a sequence."""
        prefilling = [sequence for sequence in self.running if sequence.status is Status.PREFILLING]
        for sequence in prefilling:
            spent += self._pieces(plan, sequence, left - spent, whole, written, after_pieces=False)
            if sequence.status is Status.PREFILLING:
                return spent, True
        while self.waiting:
            sequence = self.waiting[0]
            siblings = (other for other in self.running if other.group == sequence.group)
            if sequence.unread or any(other.status is Status.PREFILLING for other in siblings):
                return spent, False
            if self.rules.prefill_lengths[0] > left - spent:
                return spent, True
            if not self._admit(sequence):
                return spent, False
            after = not written.isdisjoint(sequence.pages)
            cost = self._pieces(plan, sequence, left - spent, whole, written, after_pieces=after)
            if cost == 0:
                self._return(sequence)
            spent += cost
            if sequence.status is not Status.DECODING:
                return spent, True
        return spent, False

    def _admit(self, sequence: Sequence) -> bool:
        """Moves the head of the queue to a slot, with pages for all its tokens and its first decode chunk."""
        if not self._slots:
            return False
        reused: list[int] = []
        cursor = None
        if self.prefixes is not None:
            # The last token is always computed: its logits are what is wanted.
            limit = len(sequence.tokens) - 1 if sequence.reuses else 0
            reused, cursor = self.prefixes.match(sequence.tokens, limit, sequence.salt)
        if not self._take_pages(sequence, reused):
            return False
        self.waiting.pop(0)
        sequence.cursor = cursor
        sequence.num_reused = sequence.num_prefilled = len(reused) * self.rules.page_size
        self._enter(sequence, Status.PREFILLING)
        return True

    def _return(self, sequence: Sequence) -> None:
        """Undoes an admission that the round has no tokens left for."""
        self.pool.release(sequence.pages)
        self._slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.pages, sequence.cursor, sequence.slot = [], None, -1
        sequence.num_prefilled = sequence.num_reused = 0
        sequence.status = Status.WAITING
        self.waiting.insert(0, sequence)

    def _take_pages(self, sequence: Sequence, shared: list[int]) -> bool:
        """Gives a sequence `shared` pages and new ones up to its first decode chunk; False if there are none."""
        wanted = self._pages_for(sequence.reach(self.chunk))
        self.pool.share(shared)
        try:
            sequence.pages = shared + self.pool.allocate(wanted - len(shared))
        except OutOfPages:
            self.pool.release(shared)
            return False
        return True

    def _enter(self, sequence: Sequence, status: Status) -> None:
        sequence.status, sequence.slot, sequence.skipped = status, self._slots.pop(), 0
        sequence.pages_version += 1
        bisect.insort(self.running, sequence, key=lambda other: other.arrival)

    def _pieces(
        self, plan: Plan, sequence: Sequence, left: int, whole: int, written: set[int], *, after_pieces: bool
    ) -> int:
        """Plans pieces of a sequence within `left` tokens, each after the one before it; returns their cost."""
        spent = 0
        while sequence.status is Status.PREFILLING:
            cost = self._piece(plan, sequence, left - spent, whole, written, after_pieces=after_pieces or spent > 0)
            if cost == 0:
                break
            spent += cost
        return spent

    def _piece(
        self, plan: Plan, sequence: Sequence, left: int, whole: int, written: set[int], *, after_pieces: bool
    ) -> int:
        """Plans the next piece of a sequence within `left` tokens and returns its cost, 0 if it must wait.

        What would fit in a round of its own (`whole` tokens) is not cut: later pieces read the cache, which is slower.
        """
        lengths = self.rules.prefill_lengths
        length = min(len(sequence.tokens) - sequence.num_prefilled, lengths[-1])
        cost = self.rules.padded(length)
        if cost > left:
            if cost <= whole or left < lengths[0]:
                return 0
            length = cost = lengths[bisect.bisect_right(lengths, left) - 1]
        start = sequence.num_prefilled
        if start == 0:
            self.num_looked_up += len(sequence.tokens)
        elif start == sequence.num_reused:
            self.num_looked_up += len(sequence.tokens)
            self.num_reused += start
        sequence.num_prefilled += length
        last = sequence.num_prefilled == len(sequence.tokens)
        plan.pieces.append(Piece(sequence, start, length, last, after_pieces))
        if self.prefixes is not None and sequence.cursor is not None:
            before = sequence.cursor.num_pages
            sequence.cursor = self.prefixes.extend(
                sequence.cursor, sequence.tokens, sequence.pages, sequence.num_prefilled
            )
            if start > 0:
                written.update(sequence.pages[before : sequence.cursor.num_pages])
        if last:
            sequence.status = Status.DECODING
            sequence.booked.append(Booking(1, 1.0))
            if sequence.num_generated == 0:
                self._fork_siblings(plan, sequence)
        return cost

    def _fork_siblings(self, plan: Plan, parent: Sequence) -> None:
        """Starts the completions next in the queue that have the same prompt, as far as there is room."""
        full = parent.num_prompt // self.rules.page_size
        while self.waiting and self._slots:
            child = self.waiting[0]
            if child.group != parent.group or child.num_generated or child.unread:
                return
            if not self._take_pages(child, parent.pages[:full]):
                return
            self.waiting.pop(0)
            copy = None
            if parent.num_prompt % self.rules.page_size:
                copy = (parent.pages[full], child.pages[full])
            child.cursor, child.num_reused, child.num_prefilled = parent.cursor, 0, parent.num_prompt
            child.booked.append(Booking(1, 1.0))
            self._enter(child, Status.DECODING)
            plan.forks.append(Fork(parent, child, copy))

    # --- Decode

    def _decode(self, plan: Plan) -> None:
        """Chooses the rows of the next decode chunk among all that have pages for it."""
        ready = [sequence for sequence in self.running if sequence.wants_decode]
        if len(ready) > self.rules.max_decode_batch:
            by_length = self.rules.decode_order == "shortest"

            def turn(sequence: Sequence) -> tuple[int, int, int]:
                overdue = sequence.skipped if sequence.skipped >= MAX_SKIPS else 0
                length = sequence.cached_after(0) if by_length and not overdue else 0
                return -overdue, length, sequence.arrival

            ready.sort(key=turn)
        for sequence in ready[self.rules.max_decode_batch :]:
            sequence.skipped += 1
        plan.decode, plan.chunk = ready[: self.rules.max_decode_batch], self.chunk
        for sequence in plan.decode:
            sequence.skipped = 0
            sequence.booked.append(Booking(self.chunk.most, self.chunk.num_steps * self.chunk.tokens_per_step))
        self._stalled = self._started = 0
