"""Who has a slot and pages: sequences take a seat, get pages as they grow, and give all of it back. Plain Python."""

import bisect

from jaxinfer.engine.pages import OutOfPages, PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.sequence import Chunk, Plan, Sequence, Status


class Seats:
    """Every unfinished sequence: `waiting` without a seat, `running` with one. The scheduler decides who gets one."""

    def __init__(self, rules: Rules, pool: PagePool, prefixes: PrefixCache | None) -> None:
        self.rules, self.pool, self.prefixes = rules, pool, prefixes
        self.pools = {"pages": pool}
        """All there are: of a cache in tiers, where `pool` is that of the newest pages, one for each."""
        self.chunk = Chunk(rules.decode_chunk)
        """What decode chunks do that are planned from now on."""
        self.waiting: list[Sequence] = []
        """In order of arrival."""
        self.running: list[Sequence] = []
        """With a slot: prefilling or decoding, in order of arrival."""
        self.num_preemptions = 0
        self.num_changes = 0
        """How often somebody has come to `running` or gone."""
        self._slots = list(range(rules.max_sequences - 1, -1, -1))

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def fits(self, num_cached: int) -> bool:
        """Whether a sequence that needs `num_cached` tokens in the cache could ever run."""
        return self._pages_for(num_cached) <= self.pool.num_usable

    # --- Coming

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
        self.num_changes += 1
        bisect.insort(self.running, sequence, key=lambda other: other.arrival)

    # --- Growing

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.rules.page_size)

    def _reserve(self, plan: Plan) -> list[Sequence]:
        """Gives every sequence the pages of its next decode chunk, the oldest first, at the cost of the latest.

        Returns those that can go into one, in order of arrival.
        """
        ready, asking, asked = [], [], 0
        for sequence in self.running:
            is_ready, reach = sequence.outlook(self.chunk)
            if is_ready:
                ready.append(sequence)
            elif sequence.status is not Status.PREFILLING:
                continue
            wanted = self._pages_for(reach) - len(sequence.pages)
            if wanted < 0:
                self._take_back(sequence, -wanted)
            elif wanted > 0:
                asking.append((sequence, wanted))
                asked += wanted
        if asked <= self.pool.num_available:
            pages, first = self.pool.allocate(asked), 0
            for sequence, wanted in asking:
                sequence.pages += pages[first : first + wanted]
                first += wanted
            return ready
        for sequence, wanted in asking:
            while sequence.slot >= 0:
                try:
                    sequence.pages += self.pool.allocate(wanted)
                    break
                except OutOfPages:
                    victim = self.running[-1]
                    self._preempt(victim)
                    plan.preempted.append(victim)
        return [sequence for sequence in ready if sequence.slot >= 0]

    def _take_back(self, sequence: Sequence, count: int) -> None:
        """Frees the last pages of a sequence. Work on its way may write there; it does so before any later owner."""
        self.pool.release(sequence.pages[-count:])
        del sequence.pages[-count:]
        sequence.pages_version += 1

    # --- Going

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up_pages(sequence, trusted=True)
        sequence.status = Status.WAITING
        sequence.num_prefilled = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda other: other.arrival)

    def _return(self, sequence: Sequence) -> None:
        """Undoes an admission that the round has no tokens left for."""
        self._leave(sequence)
        sequence.num_prefilled = sequence.num_reused = 0
        sequence.status = Status.WAITING
        self.waiting.insert(0, sequence)

    def _give_up_pages(self, sequence: Sequence, trusted: bool) -> None:
        if self.prefixes is not None and not trusted:
            self.prefixes.forget(sequence.pages)
        elif self.prefixes is not None and sequence.cursor is not None:
            num_shared = self.rules.cacheable(sequence.num_prompt, sequence.num_certain)
            self.prefixes.extend(sequence.cursor, sequence.tokens, sequence.pages, num_shared)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self._slots.append(sequence.slot)
        self.running.remove(sequence)
        self.num_changes += 1
        sequence.pages, sequence.cursor, sequence.slot = [], None, -1
