"""The scheduler over a cache in tiers: it also decides which pages move down, and counts those of each tier.

A round begins with all moves, and a sequence takes part in at most one program of a round: so each program finds the
pages where the length of its rows says, as in a batch of `generate`. A long prompt comes in one piece a round, and is
decoded from the round after its last one on. Plain Python.
"""

from jaxinfer.engine.rules import Rules
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Fork, Plan, Sequence, Status
from jaxinfer.tier_pages import Moved, TierPages, TierRules, calls_for, no_moves
from jaxinfer.tiers import TierPools


class TieredScheduler(Scheduler):
    """A `Scheduler` whose sequences have their pages in `Sequence.tiers`; nothing of them is known to a prefix cache.

    The pools must hold the longest sequence alone.
    """

    def __init__(self, rules: Rules, tier_rules: TierRules, pools: TierPools) -> None:
        self.pages = TierPages(tier_rules, pools, rules.max_sequences)
        newest = self.pages.pools["recent" if tier_rules.has_full_layers else "window"]
        super().__init__(rules, newest, None)
        self.pools = self.pages.pools

    # --- Coming

    def _take_pages(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there are pages for all its tokens and its first decode chunk; it gets them as they are needed."""
        appended = max(self.rules.prefill_lengths[-1], self.chunk.most)
        return self.pages.has(self.pages.rules.room(sequence.reach(self.chunk), appended))

    def _admit(self, sequence: Sequence) -> bool:
        if not super()._admit(sequence):
            return False
        self.pages.cover(sequence.slot, self._next_reach(sequence))
        return True

    def _enter(self, sequence: Sequence, status: Status) -> None:
        super()._enter(sequence, status)
        sequence.tiers = self.pages.rows[sequence.slot]

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        newest = (self.pages.pools.get(name) for name in ("recent", "window"))
        return all(pool is None or pool.num_available for pool in newest)  # each may copy its last page

    def _fork(self, parent: Sequence, child: Sequence) -> Fork:
        copies = self.pages.fork(parent.slot, child.slot, parent.num_prompt)
        child.tiers = self.pages.rows[child.slot]
        return Fork(parent, child, copies)

    # --- Growing

    def _next_reach(self, sequence: Sequence) -> int:
        """Tokens that have places when the next piece of a prompt, or the next decode chunk, has been computed."""
        if sequence.status is Status.DECODING:
            return sequence.reach(self.chunk)
        return min(sequence.num_prefilled + self.rules.prefill_lengths[-1], len(sequence.tokens))

    def _reserve(self, plan: Plan) -> list[Sequence]:
        """Lets every sequence's pages age and gives it those of its next program, the oldest first, at the cost of the
        latest. Returns those that can go into a decode chunk."""
        ready, moved = [], no_moves()
        for sequence in list(self.running):
            if sequence.status is Status.DECODING:
                if not sequence.wants_decode:
                    continue
                num_tokens = sequence.cached_after(0)
            else:
                num_tokens = sequence.num_prefilled
            while sequence.slot >= 0 and not self._settle(sequence, num_tokens, moved):
                victim = self.running[-1]
                self._preempt(victim)
                plan.preempted.append(victim)
            if sequence.status is Status.DECODING:
                ready.append(sequence)
        plan.moves = calls_for(moved)
        return ready

    def _settle(self, sequence: Sequence, num_tokens: int, moved: Moved) -> bool:
        """Brings a sequence's pages to where those of so many tokens are; False, and nothing done, without room."""
        slot, reach = sequence.slot, self._next_reach(sequence)
        row = self.pages.rows[slot]
        if not self.pages.has_room(row, num_tokens, reach):
            return False
        row.num_tokens = num_tokens
        self.pages.age(slot, moved)
        self.pages.cover(slot, reach)
        return True

    def _begun(self, plan: Plan) -> list[Sequence]:
        return []

    def _pieces(
        self, plan: Plan, sequence: Sequence, left: int, whole: int, written: set[int], *, after_pieces: bool
    ) -> int:
        return self._piece(plan, sequence, left, whole, written, after_pieces=after_pieces)

    # --- Going

    def _leave(self, sequence: Sequence) -> None:
        self.pages.release(sequence.slot)
        sequence.tiers = None
        super()._leave(sequence)
