"""The scheduler in simulation: random arrivals, lengths, aborts; a device that is a dictionary of page contents."""

import collections
import dataclasses
from collections.abc import Sequence as Many

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.scheduler import MAX_SKIPS, Scheduler
from jaxinfer.engine.sequence import Chunk, Fork, Plan, Sequence, Status

RULES = Rules(
    page_size=4,
    max_sequences=4,
    max_decode_batch=4,
    decode_chunk=3,
    max_prefill_tokens=32,
    prefill_lengths=(4, 8, 16),
    stall_tokens=16,
)


def output_token(sequence: Sequence, index: int) -> int:
    """What the model says at place `index`: different everywhere, so that a token lost or doubled shows."""
    return 1000 * (sequence.arrival + 1) + index


@dataclasses.dataclass
class Simulation:
    """Carries out plans, one round behind as the engine does, and checks every rule on the way."""

    scheduler: Scheduler
    lengths: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    """Output tokens after which each sequence stops by itself."""
    pages: dict[int, list[int | None]] = dataclasses.field(default_factory=dict)
    """Tokens whose keys and values each page holds."""
    produced: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    in_flight: collections.deque = dataclasses.field(default_factory=collections.deque)
    stalled: int = 0
    waits: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    plans: list[Plan] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    """What decode chunks do from each round on, over and over; by default plain steps."""

    def submit(
        self, prompt: Many[int], max_tokens: int, stops_after: int = 10**9, group: int = -1, **options
    ) -> Sequence:
        group = len(self.lengths) if group < 0 else group
        sequence = Sequence(list(prompt), len(prompt), max_tokens, group, **options)
        spare = max((chunk.num_drafted for chunk in self.chunks), default=0)
        assert self.scheduler.fits(len(prompt) + max_tokens - 1 + spare)
        self.scheduler.add(sequence)
        self.lengths[sequence] = min(stops_after, max_tokens)
        return sequence

    def write(self, sequence: Sequence, position: int, token: int) -> None:
        size = self.scheduler.rules.page_size
        page = sequence.pages[position // size]
        assert page != 0
        self.pages.setdefault(page, [None] * size)[position % size] = token

    def check_readable(self, sequence: Sequence, tokens: Many[int]) -> None:
        """A sequence finds in its pages exactly its own first tokens."""
        size = self.scheduler.rules.page_size
        found = [token for page in sequence.pages for token in self.pages.get(page, [None] * size)]
        assert found[: len(tokens)] == list(tokens)

    def copy(self, fork: Fork) -> None:
        for source, target in fork.copies.values():
            self.pages[target] = list(self.pages[source])

    def text(self, sequence: Sequence, num_output: int) -> list[int]:
        prompt = sequence.tokens[: sequence.num_prompt]
        return prompt + [output_token(sequence, index) for index in range(num_output)]

    def round(self) -> None:
        """Plans, dispatches, reads what the round before dispatched."""
        scheduler = self.scheduler
        seated, num_changes = set(scheduler.running), scheduler.num_changes
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        was_ready = [sequence for sequence in running if sequence.wants_decode]
        if self.chunks:
            scheduler.chunk = self.chunks[len(self.plans) % len(self.chunks)]
        plan = scheduler.plan()
        self.plans.append(plan)
        self.check_plan(plan, waiting, running, was_ready)
        dispatched = []
        first = [piece for piece in plan.pieces if piece.start == 0]
        rest = [piece for piece in plan.pieces if piece.start > 0 and not piece.after_pieces]
        # One call appends all its tokens before it reads any; calls of the same kind may come in any order.
        for call in (first, rest[::-1], *([piece] for piece in plan.pieces if piece.after_pieces)):
            for piece in call:
                for position in range(piece.start, piece.start + piece.length):
                    self.write(piece.sequence, position, piece.sequence.tokens[position])
            for piece in call:
                self.check_readable(piece.sequence, piece.sequence.tokens[: piece.start + piece.length])
                if piece.last:
                    self.start(piece.sequence, dispatched)
        for fork in plan.forks:
            self.copy(fork)
            self.check_readable(fork.child, fork.child.tokens)
            self.start(fork.child, dispatched)
        for sequence in plan.decode:
            before = after = self.produced[sequence]
            for step in range(plan.chunk.num_steps):
                if after == self.lengths[sequence]:
                    break
                # The newest token goes in with drafted ones behind it, of which some stay, and the next is drawn.
                stay = (7 * sequence.arrival + 3 * len(self.plans) + step) % (plan.chunk.num_drafted + 1)
                for place in range(plan.chunk.num_drafted + 1):
                    position = sequence.num_prompt + after - 1 + place
                    self.write(sequence, position, output_token(sequence, after - 1 + place) if place <= stay else 0)
                after = min(after + 1 + stay, self.lengths[sequence])
                self.check_readable(sequence, self.text(sequence, after - 1))
            self.produced[sequence] = after
            tokens = [output_token(sequence, index) for index in range(before, after)]
            dispatched.append((sequence, tokens, after == self.lengths[sequence]))
        assert plan.has_work or self.in_flight or scheduler.is_empty, "nothing to do, but somebody waits"
        if self.in_flight:
            self.take(self.in_flight.popleft())
        if dispatched:
            self.in_flight.append(dispatched)
        self.check_pages()
        # The engine asks this number whether those with a slot, and so what the sampler has to do, are still the same.
        assert scheduler.num_changes - num_changes >= len(seated ^ set(scheduler.running))

    def start(self, sequence: Sequence, dispatched: list) -> None:
        index = sequence.num_generated
        self.produced[sequence] = index + 1
        dispatched.append((sequence, [output_token(sequence, index)], index + 1 == self.lengths[sequence]))

    def take(self, results: list) -> None:
        for sequence, tokens, ended in results:
            finished = sequence.status is Status.FINISHED
            self.scheduler.read(sequence, tokens)
            if ended and not finished:
                self.scheduler.finish(sequence)

    def check_plan(self, plan: Plan, waiting: list, running: list, was_ready: list) -> None:
        rules = self.scheduler.rules
        cost = sum(rules.padded(piece.length) for piece in plan.pieces)
        assert cost <= rules.max_prefill_tokens
        assert len(plan.decode) <= rules.max_decode_batch
        now = self.scheduler.running
        assert len({sequence.slot for sequence in now}) == len(now) <= rules.max_sequences
        assert all(0 <= sequence.slot < rules.max_sequences for sequence in now)
        # First come, first served: whoever left the queue came before all who are still in it.
        left = [sequence for sequence in waiting if sequence not in self.scheduler.waiting]
        still = [sequence.arrival for sequence in waiting if sequence in self.scheduler.waiting]
        assert all(sequence.arrival < min(still, default=10**9) for sequence in left)
        # Only later arrivals are preempted for the sake of earlier ones.
        for victim in plan.preempted:
            kept = [sequence.arrival for sequence in running if sequence not in plan.preempted]
            assert victim.arrival > max(kept, default=-1)
        decoded = set(plan.decode)
        still_ready = [sequence for sequence in was_ready if sequence not in plan.preempted]
        if decoded or not still_ready:
            self.stalled = 0
        elif rules.policy == "separate" and any(sequence.interactive for sequence in still_ready):
            self.stalled += cost
            assert self.stalled <= max(rules.stall_tokens, rules.prefill_lengths[0])
        for sequence in still_ready:
            self.waits[sequence] = 0 if sequence in decoded else self.waits[sequence] + bool(decoded)
            assert self.waits[sequence] <= MAX_SKIPS + rules.max_sequences

    def check_pages(self) -> None:
        pool = self.scheduler.pool
        counted = collections.Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        assert pool.references == [counted[page] for page in range(pool.num_pages)]
        assert all(not sequence.pages for sequence in self.scheduler.waiting)

    def run(self, most: int = 2000) -> None:
        while not (self.scheduler.is_empty and not self.in_flight):
            assert len(self.plans) < most, "somebody waits for ever"
            self.round()
        assert self.scheduler.pool.num_owned == 0
        assert sorted(self.scheduler._slots) == list(range(self.scheduler.rules.max_sequences))


def simulate(rules: Rules = RULES, num_pages: int = 40, prefix_cache: bool = True) -> Simulation:
    pool = PagePool(num_pages)
    return Simulation(Scheduler(rules, pool, PrefixCache(pool, rules.page_size) if prefix_cache else None))


# A dictionary, not Rules themselves: the run-time type checks draw random numbers, which Hypothesis objects to.
ALL_RULES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 3, 4]),
        "max_sequences": st.integers(1, 5),
        "max_decode_batch": st.integers(1, 5),
        "decode_chunk": st.integers(1, 5),
        "max_prefill_tokens": st.sampled_from([16, 32, 64]),
        "prefill_lengths": st.sampled_from([(4, 8, 16), (8,), (16,), (4, 8, 12, 16)]),
        "stall_tokens": st.sampled_from([1, 16, 40]),
        "decode_order": st.sampled_from(["shortest", "arrival", "longest"]),
        "decode_rows": st.sampled_from([(1, 3, 5), (2, 5), (5,)]),
        "policy": st.sampled_from(["separate", "mixed"]),
    }
)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[int], int, int, int, bool]:
    """(round, prompt, max_tokens, stops after, completions, whether somebody reads along)"""
    start = draw(st.sampled_from([[], [1] * 9, [1] * 9 + [2] * 8]))
    prompt = start + draw(st.lists(st.integers(1, 2), min_size=1, max_size=14))
    return (
        draw(st.integers(0, 12)),
        prompt,
        draw(st.integers(1, 12)),
        draw(st.integers(1, 14)),
        draw(st.sampled_from([1, 1, 1, 2, 4])),
        draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(
    chosen=ALL_RULES,
    requests=st.lists(arrivals(), min_size=1, max_size=10),
    aborts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=4),
    spare=st.integers(0, 40),
    prefix_cache=st.booleans(),
    chunks=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.sampled_from([1.0, 1.6, 4.0])), max_size=4),
)
def test_every_sequence_ends_with_its_own_tokens(chosen, requests, aborts, spare, prefix_cache, chunks) -> None:
    """With plain decode chunks, and with drafted tokens of which some stay, how many changing from round to round."""
    rules = Rules(**chosen)
    largest = max(len(prompt) + most - 1 for _, prompt, most, *_ in requests)
    largest += max((num_drafted for _, num_drafted, _ in chunks), default=0)
    simulation = simulate(rules, 1 + -(-largest // rules.page_size) + spare, prefix_cache)
    simulation.chunks = [Chunk(steps, drafted, min(rate, 1.0 + drafted)) for steps, drafted, rate in chunks]
    submitted: list[Sequence] = []
    aborted: set[Sequence] = set()
    for number in range(21):
        for group, (when, prompt, most, stops, completions, interactive) in enumerate(requests):
            if when == number:
                for _ in range(completions):
                    submitted.append(simulation.submit(prompt, most, stops, group=group, interactive=interactive))
        for when, which in aborts:
            if when == number and which < len(submitted):
                simulation.scheduler.finish(submitted[which])
                aborted.add(submitted[which])
        simulation.round()
    simulation.run()
    for sequence in submitted:
        assert sequence.status is Status.FINISHED and sequence.unread == 0
        if sequence not in aborted:
            assert sequence.tokens == simulation.text(sequence, simulation.lengths[sequence])


def test_shortest_or_earliest_first_and_nobody_passed_over_for_long() -> None:
    """Six sequences, two decoded at a time: the long one waits at most MAX_SKIPS chunks."""
    for order, expected in (("shortest", [1, 2]), ("arrival", [0, 1])):
        rules = dataclasses.replace(
            RULES, max_sequences=6, max_decode_batch=2, decode_order=order, max_prefill_tokens=96, stall_tokens=96
        )
        simulation = simulate(rules, 400)
        sequences = [simulation.submit([1] * length, 200) for length in (16, 5, 6, 9, 8, 7)]
        simulation.round()
        assert [sequences.index(sequence) for sequence in simulation.plans[0].decode] == expected
        gaps = collections.Counter()
        for _ in range(40):
            simulation.round()
            for sequence in sequences:
                gaps[sequence] = 0 if sequence in simulation.plans[-1].decode else gaps[sequence] + 1
                assert gaps[sequence] <= MAX_SKIPS + 3
        assert all(sequence.num_generated > 10 for sequence in sequences)


def test_longest_first_ends_together_in_steps_of_as_few_rows_as_that_takes() -> None:
    """Eight sequences of 5 to 65 tokens, programs of 4 and 8 rows: as many chunks as the longest needs, none of one
    row, and of 8 rows only as many as all the others need beside it."""
    lengths = (65, 5, 35, 53, 20, 59, 41, 62)
    rules = dataclasses.replace(
        RULES,
        max_sequences=8,
        max_decode_batch=8,
        max_prefill_tokens=96,
        stall_tokens=96,
        decode_order="longest",
        decode_rows=(4, 8),
    )
    simulation = simulate(rules, 400)
    for length in lengths:
        simulation.submit([1] * 4, length)
    simulation.run()
    sizes = [len(plan.decode) for plan in simulation.plans if plan.decode]
    assert len(sizes) <= -(-max(lengths) // 3)
    assert min(sizes[:-2]) >= 4
    assert sum(size > 4 for size in sizes) < len(sizes) / 2


def test_long_prompt_comes_in_pieces_between_decode_chunks() -> None:
    """A prompt of 60 with a bound of 16: at most 16 tokens of it between two chunks of the one who reads along."""
    simulation = simulate(num_pages=60)
    reader = simulation.submit([1] * 4, 60)
    simulation.round()
    long = simulation.submit([2] * 60, 4)
    for start in range(0, 60, 16):
        simulation.round()
        (piece,) = simulation.plans[-1].pieces
        assert (piece.sequence, piece.start, piece.length) == (long, start, min(16, 60 - start))
        assert reader in simulation.plans[-1].decode
    assert piece.last and long in simulation.plans[-1].decode


@pytest.mark.parametrize("policy", ["separate", "mixed"])
def test_batches_and_the_mixed_policy_compute_prompts_first(policy: str) -> None:
    rules = dataclasses.replace(RULES, policy=policy, max_prefill_tokens=16)
    simulation = simulate(rules, num_pages=200)
    for number in range(6):
        simulation.submit([number] * 16, 20, interactive=policy == "mixed")
    for number in range(4):
        simulation.round()
        assert [piece.length for piece in simulation.plans[-1].pieces] == [16]
        assert len(simulation.plans[-1].decode) == (0 if number < 3 else 4)  # then all slots are taken


def test_equal_prompts_of_one_round_share_pages() -> None:
    """Trap G1: a prompt that is cached to its last token leaves its last page to compute."""
    simulation = simulate(dataclasses.replace(RULES, max_prefill_tokens=64), num_pages=100)
    for length in (4, 8, 9):
        before = len(simulation.plans)
        sequences = [simulation.submit([length] * length, 3) for _ in range(4)]
        simulation.run()
        pieces = [piece for plan in simulation.plans[before:] for piece in plan.pieces]
        reused = (length - 1) // 4 * 4
        assert [piece.start for piece in pieces] == [0, reused, reused, reused]
        assert [sequence.num_reused for sequence in sequences] == [0, reused, reused, reused]


def test_pages_of_drafted_tokens_that_did_not_stay_are_given_back() -> None:
    """Page 4: a prompt of 6 and two chunks of 8 tokens reach 22 places, one of 4 at most after them fewer."""
    simulation = simulate()
    sequence = simulation.submit([1] * 6, 40)
    simulation.chunks = [Chunk(2, 3)]
    simulation.round()
    assert len(sequence.pages) == -(-(6 + 8 + 3) // 4)
    first = list(sequence.pages)
    simulation.round()  # dispatched before the first is read
    assert len(sequence.pages) == -(-(6 + 16 + 3) // 4)
    simulation.chunks = [Chunk(1)]
    version = sequence.pages_version
    simulation.round()
    reach = sequence.num_prompt + sequence.num_generated - 1 + sum(booking.most for booking in sequence.booked)
    assert len(sequence.pages) == -(-reach // 4) < -(-(6 + 16 + 3) // 4)
    assert sequence.pages_version == version + 1 and sequence.pages[: len(first)] == first[: len(sequence.pages)]
    simulation.run()


def test_forks_share_full_pages_and_copy_the_last() -> None:
    simulation = simulate()
    sequences = [simulation.submit([1, 2, 3, 4, 5, 6], 6, group=7) for _ in range(5)]
    simulation.round()
    (plan,) = simulation.plans
    assert [piece.sequence for piece in plan.pieces] == sequences[:1]
    assert [fork.child for fork in plan.forks] == sequences[1:4]  # the fifth finds no slot
    first = sequences[0].pages
    for fork in plan.forks:
        assert fork.child.pages[0] == first[0]
        assert fork.copies == {"pages": (first[1], fork.child.pages[1])}
    simulation.run()
    assert sequences[4].num_reused == 4  # the prefix cache has the full page still
    # A prompt that ends with its page has nothing to copy.
    simulation.submit([9] * 8, 4, group=8)
    simulation.submit([9] * 8, 4, group=8)
    simulation.round()
    assert [fork.copies for fork in simulation.plans[-1].forks] == [{}]
    simulation.run()


def test_preemption_takes_the_latest_and_loses_nothing() -> None:
    simulation = simulate(num_pages=1 + 8, prefix_cache=False)
    sequences = [simulation.submit([number + 1] * 8, 20) for number in range(3)]
    simulation.run()
    assert sequences[0].num_preemptions == 0 < sequences[1].num_preemptions
    assert simulation.scheduler.num_preemptions >= 2


def test_request_at_the_wall_of_the_pool() -> None:
    """Trap G3 with page 4: 252 usable tokens; prompt 250 and 6 more need 255. What fits exactly runs alone and ends."""
    rules = dataclasses.replace(RULES, prefill_lengths=(4, 8, 256), max_prefill_tokens=256)
    simulation = simulate(rules, num_pages=64)
    assert not simulation.scheduler.fits(250 + 6 - 1)
    exact = simulation.submit([1] * 250, 3)
    others = [simulation.submit([2] * 5, 8) for _ in range(3)]
    simulation.run(most=500)
    assert exact.num_generated == 3
    assert all(sequence.num_generated == 8 for sequence in others)


def test_untrusted_pages_are_read_by_nobody() -> None:
    simulation = simulate()
    bad = simulation.submit([1] * 9, 5)
    simulation.round()
    simulation.scheduler.finish(bad, trusted=False)
    again = simulation.submit([1] * 9, 5)
    simulation.run()
    assert again.num_reused == 0
