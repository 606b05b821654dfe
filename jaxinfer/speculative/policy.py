"""How many tokens to draft: fixed, by context length, or what measured acceptance and costs say is fastest.

A step that drafts k tokens gains 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens, a_i being the share of tokens at drafted
position i that are accepted when all before them are; divided by the step's time this is the speed to maximise
(https://arxiv.org/abs/2211.17192, section 3.5, with measured times for a ratio of costs). Plain decoding is k = 0.
"""

import collections
import dataclasses
import logging
import statistics
import typing
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

log = logging.getLogger("jaxinfer")


@typing.runtime_checkable
class Controller(Protocol):
    """A policy at work on one batch."""

    def choose(self, context: int) -> int:
        """Tokens to draft in each step of the next chunk; `context` is the longest running row's length."""
        ...

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        """What a chunk did: int [steps, batch], -1 where a row was idle."""
        ...


@typing.runtime_checkable
class Policy(Protocol):
    def lengths(self, k: int) -> tuple[int, ...]:
        """All that its controllers may choose for a draft of up to `k` tokens, ascending: each is a program of its own.

        Raises ValueError for lengths beyond `k`.
        """
        ...

    def begin(self, k: int, batch_size: int, num_tokens: int) -> Controller:
        """For a draft of up to `k` tokens and a batch whose rows generate up to `num_tokens`."""
        ...


def is_length(value: object) -> bool:
    """Whether it is a number of tokens: an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Always the same length; by default the draft's k."""

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and not is_length(self.length):
            raise ValueError(
                f"FixedLength: length={self.length!r}; expected a number of tokens, or None for the draft's k"
            )

    def lengths(self, k: int) -> tuple[int, ...]:
        if self.length is not None and self.length > k:
            raise ValueError(f"FixedLength: length={self.length}; expected 0 to the draft's k={k}")
        return (k if self.length is None else self.length,)

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "FixedLength":
        return FixedLength(*self.lengths(k))

    def choose(self, context: int) -> int:
        assert self.length is not None
        return self.length

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        """Learns nothing."""


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class LengthByContext:
    """A length for each range of context lengths: `((0, 4), (1024, 2), (8192, 0))` drafts 4, from 1024 tokens on 2."""

    table: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        is_table = isinstance(self.table, tuple) and all(isinstance(pair, tuple) for pair in self.table)
        if not is_table or not all(len(pair) == 2 and all(map(is_length, pair)) for pair in self.table):
            raise ValueError(f"LengthByContext: {self.table!r}; expected a tuple of pairs such as ((0, 4), (1024, 2))")
        starts = [start for start, _ in self.table]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"LengthByContext: {self.table}; expected (context, length) pairs from context 0 upwards")

    def lengths(self, k: int) -> tuple[int, ...]:
        for _, length in self.table:
            if length > k:
                raise ValueError(f"LengthByContext: length {length}; expected 0 to the draft's k={k}")
        return tuple(sorted({length for _, length in self.table}))

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "LengthByContext":
        self.lengths(k)
        return self

    def choose(self, context: int) -> int:
        return next(length for start, length in reversed(self.table) if start <= context)

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        """Learns nothing."""


class Adaptive:
    """Chooses among a few lengths, plain decoding included, and says in the log when it switches drafting off or on.

    `lengths` are those that may be compiled; by default half the draft's k and k. It starts with the longest and, in
    batches that go on for long enough to pay for it, times a few plain steps. While drafting is off it is tried again
    now and then, at growing intervals. What steps cost is remembered from batch to batch of one size.
    """

    @typing.no_type_check  # it checks more, and its error is the one users must see
    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        if lengths is not None and not (isinstance(lengths, list | tuple) and all(map(is_length, lengths))):
            raise ValueError(f"Adaptive: lengths={lengths!r}; expected numbers of drafted tokens such as (2, 4)")
        self.chosen = None if lengths is None else tuple(sorted({0, *lengths}))
        self._costs: dict[int, StepCosts] = {}

    def __repr__(self) -> str:
        return f"Adaptive(lengths={self.chosen})"

    def lengths(self, k: int) -> tuple[int, ...]:
        lengths = tuple(sorted({0, (k + 1) // 2, k})) if self.chosen is None else self.chosen
        if lengths[-1] > k or lengths[-1] == 0:
            raise ValueError(f"Adaptive: lengths={lengths}; expected some from 1 to the draft's k={k}")
        return lengths

    def begin(self, k: int, batch_size: int, num_tokens: int) -> "AdaptiveController":
        costs = self._costs.setdefault(batch_size, StepCosts())
        return AdaptiveController(self.lengths(k), batch_size, num_tokens, costs)


class StepCosts:
    """Seconds of a step by drafted length: the median of the last few, as a chunk may hold a compilation, and a host
    that is late takes from one chunk's time what it adds to another's."""

    def __init__(self) -> None:
        self._samples: dict[int, collections.deque[float]] = {}

    def add(self, num_drafted: int, seconds: float) -> None:
        self._samples.setdefault(num_drafted, collections.deque(maxlen=8)).append(seconds)

    def count(self, num_drafted: int) -> int:
        return len(self._samples.get(num_drafted, ()))

    def known(self) -> dict[int, float]:
        enough = {length: samples for length, samples in self._samples.items() if len(samples) >= MIN_SAMPLES}
        return {length: statistics.median(samples) for length, samples in enough.items()}


MIN_SAMPLES = 3
"""Chunks of one length before its cost is believed."""
DECAY = 0.9
"""What a chunk leaves of the counts before it: acceptance follows the last twenty chunks or so."""
GAIN = 1.03
"""How much faster another length must look: programs change for more than noise."""
PROBE_TOKENS = 64
"""Plain steps are timed only where rows may generate this many tokens."""
FIRST_RETRY, LAST_RETRY = 16, 256
"""Chunks without drafting before it is tried again."""


class AdaptiveController:
    """`Adaptive` at work on one batch."""

    def __init__(self, lengths: tuple[int, ...], batch_size: int, num_tokens: int, costs: StepCosts) -> None:
        self.lengths, self.batch_size, self.costs = lengths, batch_size, costs
        self.longest = lengths[-1]
        self.judged, self.accepted = np.zeros(self.longest), np.zeros(self.longest)
        self.probes_plain = num_tokens >= PROBE_TOKENS
        self.current = self.longest
        self.retry_after, self.chunks_off, self.trying = FIRST_RETRY, 0, 0
        self.plain_ahead = 0
        """Plain chunks that were chosen since one that drafts was read. Not all of them come: an engine may put a chunk
        off until it has other rows."""

    def choose(self, context: int) -> int:
        length = self._choose()
        self.plain_ahead += length == 0
        return length

    def _choose(self) -> int:
        if self.costs.count(self.longest) < MIN_SAMPLES or (self.judged.sum() == 0 and self.current):
            return self.longest
        if self.costs.count(0) < MIN_SAMPLES:
            # A few are enough even if none has been read back yet.
            return 0 if self.probes_plain and self.plain_ahead < MIN_SAMPLES + 2 else self.longest
        if self.trying > 0:
            self.trying -= 1
            return self.longest
        return self.current

    def observe(self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, seconds_per_step: float) -> None:
        self.costs.add(num_drafted, seconds_per_step)
        if num_drafted:
            self.plain_ahead = 0
            self.judged *= DECAY
            self.accepted *= DECAY
            for place in range(num_drafted):
                # A row that was proposed nothing has accepted nothing: the step cost as much.
                self.judged[place] += np.sum((proposed >= 0) & (accepted >= place))
                self.accepted[place] += np.sum(accepted > place)
        speeds = self.speeds()
        if 0 not in speeds or self.current not in speeds:
            return
        best = max(speeds, key=lambda length: speeds[length])
        if speeds[best] > GAIN * speeds[self.current]:
            self._switch(best, speeds)
        elif self.current == 0:
            self.chunks_off += 1
            if self.chunks_off >= self.retry_after:
                self.chunks_off, self.trying = 0, MIN_SAMPLES
                self.retry_after = min(2 * self.retry_after, LAST_RETRY)

    def speeds(self) -> dict[int, float]:
        """Tokens a second of a row for each length whose cost is known or lies between known ones."""
        costs = interpolated(self.costs.known(), self.lengths)
        gains = expected_tokens(self.judged, self.accepted)
        return {length: gains[length] / cost for length, cost in costs.items()}

    def _switch(self, length: int, speeds: Mapping[int, float]) -> None:
        drafting = max(speeds, key=lambda other: speeds[other] if other else 0.0)
        ratio = speeds[drafting] / speeds[0]
        share = self.accepted.sum() / max(self.judged.sum(), 1.0)
        measured = f"{share:.0%} of drafted tokens accepted, batch {self.batch_size}"
        if length == 0:
            log.info("speculation off: drafting runs at %.2f times plain decoding (%s)", ratio, measured)
            self.retry_after, self.chunks_off = FIRST_RETRY, 0
        elif self.current == 0:
            log.info("speculation on again: k = %d runs at %.2f times plain decoding (%s)", length, ratio, measured)
        else:
            log.debug("speculation: k = %d instead of %d (%s)", length, self.current, measured)
        self.current = length


def expected_tokens(judged: np.ndarray, accepted: np.ndarray) -> list[float]:
    """Tokens a step for lengths 0, 1, ...; a position that was never judged counts as the one before it."""
    gains, reach, share = [1.0], 1.0, 0.0
    for place in range(len(judged)):
        share = accepted[place] / judged[place] if judged[place] > 0 else share
        reach *= share
        gains.append(gains[-1] + reach)
    return gains


def interpolated(costs: Mapping[int, float], lengths: Sequence[int]) -> dict[int, float]:
    """Costs of `lengths`, those in between known ones taken as on a straight line; others are left out."""
    known = sorted(costs)
    if not known:
        return {}
    values = np.interp(lengths, known, [costs[length] for length in known])
    inside = (length for length in lengths if known[0] <= length <= known[-1])
    return {length: float(values[list(lengths).index(length)]) for length in inside}
