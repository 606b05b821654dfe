"""What speculation did in a run: acceptance by position, accepted lengths, steps and their time."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class SpeculationReport:
    """Counts over all rows and steps so far. A position is judged when all drafted tokens before it were accepted."""

    judged: list[int] = dataclasses.field(default_factory=list)
    """How often the drafted token at each position was judged."""
    accepted: list[int] = dataclasses.field(default_factory=list)
    """How often it was accepted."""
    histogram: list[int] = dataclasses.field(default_factory=list)
    """How often a row accepted 0, 1, 2, ... drafted tokens in a step in which it was proposed any."""
    row_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Steps of running rows, by drafted length; 0 is plain decoding."""
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    """What these steps generated on the device, by drafted length: also what a stop string that the host found later
    took back. Every row's first token comes from its prompt's pass and is not counted."""
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Steps of the batch, by drafted length."""
    timed_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those whose time is known: steps during which a program was compiled are left out."""
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    """Wall-clock seconds of the timed steps."""

    def add(
        self, num_drafted: int, proposed: np.ndarray, accepted: np.ndarray, tokens: int, seconds: float | None
    ) -> None:
        """Adds a chunk: `proposed`, `accepted` int [steps, batch], -1 where a row was idle. `seconds` are None where
        they say nothing of the steps."""
        while len(self.judged) < num_drafted:
            self.judged.append(0)
            self.accepted.append(0)
        while len(self.histogram) <= num_drafted:
            self.histogram.append(0)
        drafted = proposed > 0
        for place in range(num_drafted):
            self.judged[place] += int(np.sum(drafted & (proposed > place) & (accepted >= place)))
            self.accepted[place] += int(np.sum(drafted & (accepted > place)))
        for length, count in zip(*np.unique(accepted[drafted], return_counts=True), strict=True):
            self.histogram[int(length)] += int(count)
        self.row_steps[num_drafted] = self.row_steps.get(num_drafted, 0) + int(np.sum(proposed >= 0))
        self.tokens[num_drafted] = self.tokens.get(num_drafted, 0) + tokens
        self.steps[num_drafted] = self.steps.get(num_drafted, 0) + len(proposed)
        if seconds is not None:
            self.timed_steps[num_drafted] = self.timed_steps.get(num_drafted, 0) + len(proposed)
            self.seconds[num_drafted] = self.seconds.get(num_drafted, 0.0) + seconds

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share accepted of the tokens judged at each drafted position, 0 where none was."""
        return tuple(_ratio(kept, judged) for kept, judged in zip(self.accepted, self.judged, strict=True))

    @property
    def acceptance_rate(self) -> float:
        """Share accepted of all drafted tokens that were judged."""
        return _ratio(sum(self.accepted), sum(self.judged))

    @property
    def mean_accepted_length(self) -> float:
        """Drafted tokens accepted a step by a row that was proposed any."""
        return _ratio(sum(self.accepted), sum(self.histogram))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a running row gained in a step of those that drafted; 1, as in plain decoding, if none did."""
        drafting = [length for length in self.row_steps if length]
        gained, steps = (sum(counts[length] for length in drafting) for counts in (self.tokens, self.row_steps))
        return gained / steps if steps else 1.0

    @property
    def seconds_per_step(self) -> dict[int, float]:
        """Mean seconds of a timed step, by drafted length."""
        return {length: self.seconds[length] / count for length, count in self.timed_steps.items()}

    @property
    def estimated_speedup(self) -> float | None:
        """Tokens a second of drafting steps over those of plain ones; None unless steps of both kinds were timed.

        An estimate: the steps were of other tokens, and in an engine of other batches. `jaxinfer spec-bench` compares
        the same prompts.
        """
        plain = self.seconds_per_step.get(0)
        drafting = _ratio(*(sum(by[length] for length in by if length) for by in (self.seconds, self.timed_steps)))
        return self.tokens_per_step * plain / drafting if plain and drafting else None

    def __str__(self) -> str:
        places = "  ".join(f"{share:.0%}" for share in self.acceptance_by_position) or "nothing was drafted"
        lines = [
            f"acceptance by position: {places}",
            f"mean accepted length {self.mean_accepted_length:.2f}, {self.tokens_per_step:.2f} tokens a drafting step, "
            f"{sum(self.tokens.values())} tokens",
        ]
        for length in sorted(self.steps):
            seconds = self.seconds_per_step.get(length)
            kind = "plain" if length == 0 else f"k = {length}"
            lines.append(
                f"{kind}: {self.steps[length]} steps" + ("" if seconds is None else f" of {1e3 * seconds:.2f} ms")
            )
        if self.estimated_speedup is not None:
            lines.append(f"estimated speed-up of drafting {self.estimated_speedup:.2f}")
        return "\n".join([*lines, *bars(self.histogram)])


def bars(counts: Sequence[int], width: int = 40) -> list[str]:
    """A line for each accepted length, with a bar of its share."""
    total = sum(counts)
    if not total:
        return []
    return [
        f"{length:3d} accepted {count / total:4.0%} {'#' * round(width * count / total)}"
        for length, count in enumerate(counts)
    ]


def _ratio(part: int | float, whole: int | float) -> float:
    return part / whole if whole else 0.0
