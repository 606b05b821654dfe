"""Decides what runs next: a queue of prompts to compute, a set of sequences to decode, one pool of pages for both.

Plain Python: it knows lengths and pages, not arrays, so that its rules can be tested in simulation.

* The prefill queue is first come, first served; nobody overtakes its head. A preempted sequence goes back to the place
  of its arrival.
* A round computes at most `max_prefill_tokens` of prompts, padding included; longer prompts go in pieces.
* When somebody reads along, decoding waits for at most `stall_tokens` of prefill between two chunks. Otherwise (a
  batch of requests, or the "mixed" policy) prompts go first, up to one for every slot between two chunks.
* A decode chunk takes at most `max_decode_batch` sequences, in the configured order; one that was passed over
  `MAX_SKIPS` times goes first. Longest first takes no more than are needed for all to end when the longest does: no
  step then has few rows, which costs nearly what one of many does.
* Pages are given when they are needed, and taken back when a chunk has gained less than it might have. When there are
  none left the latest arrival gives up its own and is computed again later: the oldest always gets on, so every
  sequence ends.
"""

import bisect

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.seats import Seats
from jaxinfer.engine.sequence import Booking, Fork, Piece, Plan, Sequence, Status

MAX_SKIPS = 4
"""Decode chunks that may go without a sequence before it goes first."""


class Scheduler(Seats):
    """Holds every unfinished sequence. `plan` is called once a round, `read` for each result that comes back."""

    def __init__(self, rules: Rules, pool: PagePool, prefixes: PrefixCache | None) -> None:
        super().__init__(rules, pool, prefixes)
        self.stall_tokens = rules.stall_tokens
        self.num_looked_up = 0
        """Tokens of admitted sequences, and how many of them were in the prefix cache."""
        self.num_reused = 0
        self._arrivals = 0
        self._stalled = 0
        """Prefill tokens since the last decode chunk, while there was something to decode."""
        self._started = 0
        """Sequences whose prefill ended since the last decode chunk."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which must fit."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Chooses a round of work and books it as dispatched."""
        plan = Plan()
        ready = self._reserve(plan)
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
            self._decode(plan, ready + self._begun(plan))
        return plan

    def _begun(self, plan: Plan) -> list[Sequence]:
        """Sequences whose prompts end in this round, and that can be decoded in it."""
        begun = [piece.sequence for piece in plan.pieces if piece.last] + [fork.child for fork in plan.forks]
        return [sequence for sequence in begun if sequence.wants_decode]

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
            if sequence.unread:  # of before it was preempted
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
            limit = self.rules.cacheable(sequence.num_prompt, limit)
            reused, cursor = self.prefixes.match(sequence.tokens, limit, sequence.salt)
        if not self._take_pages(sequence, reused):
            return False
        self.waiting.pop(0)
        sequence.cursor = cursor
        sequence.num_reused = sequence.num_prefilled = len(reused) * self.rules.page_size
        self._enter(sequence, Status.PREFILLING)
        return True

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
        if self.rules.two_weights and sequence.num_prefilled < sequence.num_prompt:
            length = min(length, sequence.num_prompt - sequence.num_prefilled)
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
            num_shared = self.rules.cacheable(sequence.num_prompt, sequence.num_prefilled)
            sequence.cursor = self.prefixes.extend(sequence.cursor, sequence.tokens, sequence.pages, num_shared)
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
        while self.waiting and self._slots:
            child = self.waiting[0]
            if child.group != parent.group or child.num_generated or child.unread:
                return
            if not self._can_fork(parent, child):
                return
            self.waiting.pop(0)
            child.cursor, child.num_reused, child.num_prefilled = parent.cursor, 0, parent.num_prompt
            child.booked.append(Booking(1, 1.0))
            self._enter(child, Status.DECODING)
            plan.forks.append(self._fork(parent, child))

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Gives a completion of the same prompt its pages; False if there are none."""
        return self._take_pages(child, parent.pages[: parent.num_prompt // self.rules.page_size])

    def _fork(self, parent: Sequence, child: Sequence) -> Fork:
        """What starts it."""
        full, rest = divmod(parent.num_prompt, self.rules.page_size)
        return Fork(parent, child, {"pages": (parent.pages[full], child.pages[full])} if rest else {})

    # --- Decode

    def _decode(self, plan: Plan, ready: list[Sequence]) -> None:
        """Chooses the rows of the next decode chunk among all that are ready and have pages for it."""
        order, most = self.rules.decode_order, self.rules.max_decode_batch
        if order == "longest" and ready:
            most = self._enough(ready)
        if len(ready) > most:

            def turn(sequence: Sequence) -> tuple[int, int, int]:
                overdue = sequence.skipped if sequence.skipped >= MAX_SKIPS else 0
                rank = 0
                if order == "shortest" and not overdue:
                    rank = sequence.cached_after(0)
                elif order == "longest" and not overdue:
                    rank = -sequence.still_to_come
                return -overdue, rank, sequence.arrival

            ready.sort(key=turn)
        for sequence in ready[most:]:
            sequence.skipped += 1
        plan.decode, plan.chunk = ready[:most], self.chunk
        booking = Booking(self.chunk.most, self.chunk.num_steps * self.chunk.tokens_per_step)
        for sequence in plan.decode:
            sequence.skipped = 0
            sequence.booked.append(booking)
        self._stalled = self._started = 0

    def _enough(self, ready: list[Sequence]) -> int:
        """Rows of the smallest decode program with which all may end when the longest does, as far as is known."""
        chunks = [-(-sequence.still_to_come // self.chunk.num_steps) for sequence in (*ready, *self.waiting)]
        needed = -(-sum(chunks) // max(1, *chunks))
        sizes = (rows for rows in self.rules.decode_rows if rows >= needed)
        return min(next(sizes, self.rules.max_decode_batch), self.rules.max_decode_batch)
