"""What the engine measures of itself: latencies, rates, how full everything is."""

import collections
import dataclasses
import re
import time
from collections.abc import Iterable
from typing import Literal

import numpy as np

from jaxinfer.engine.drafting_metrics import SpeculationMetrics

KEPT_REQUESTS = 10_000
"""Finished requests whose latencies are remembered."""
KEPT_SPANS = 50_000
"""Programs that the timeline remembers."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds over finished requests; zeros where none is known yet."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Latency":
        values = np.array(list(seconds), np.float64)
        if values.size == 0:
            return cls()
        p50, p95, p99 = np.percentile(values, [50, 95, 99])
        return cls(float(values.mean()), float(p50), float(p95), float(p99))


@dataclasses.dataclass(frozen=True)
class Span:
    """One program on the device, in seconds since the engine was made: from when it could begin (it was dispatched and
    the one before it had ended) to when the host saw its end."""

    kind: Literal["prefill", "draft", "decode"]
    start: float
    end: float
    rows: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class EngineMetrics:
    """The state of an engine and what it did since it was made, or since `reset_metrics`. Times are in seconds."""

    seconds: float
    submitted: int
    """Completions, as everywhere here: a request with n=4 counts four times."""
    finished: dict[str, int]
    """By finish reason."""
    waiting: int
    prefilling: int
    decoding: int
    preemptions: int
    prompt_tokens: int
    """Computed; what the prefix cache saved is not among them."""
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    time_to_first_token: Latency
    time_per_output_token: Latency
    """Of each request: from the first token to the last, over the tokens between."""
    end_to_end: Latency
    pages: int
    pages_owned: int
    pages_cached: int
    """Owned by nobody, but known to the prefix cache."""
    tier_pages: dict[str, int]
    """Of a tiered cache, the pages of each tier's pool, which `pages` is the sum of, and those that are owned."""
    tier_pages_owned: dict[str, int]
    host_pages: int
    """Of host memory, for what the pool evicts."""
    host_pages_used: int
    pages_demoted: int
    """Sent to the host, and fetched back from there, since the engine was made."""
    pages_restored: int
    host_hit_rate: float
    """Share of the pages sent to the host that were fetched back."""
    prefix_hit_rate: float
    """Share of the tokens of admitted sequences that were in the prefix cache."""
    batch_occupancy: float
    """Mean share of the rows of decode programs that held a sequence."""
    busy_share: float
    """Share of the time in which the device had work, as seen from the host."""
    prefill_share: float
    """Share of the busy time that was prefill."""
    compilations: int
    compilations_after_warmup: int
    is_warm: bool
    """Whether `warmup` has come: without it nothing is after it."""
    seconds_compiling: float
    speculation: SpeculationMetrics | None = None
    """With a draft."""

    def prometheus(self, prefix: str = "jaxinfer") -> str:
        """The same in Prometheus' text format, each value with its type. Raises ValueError for what is no prefix."""
        if not isinstance(prefix, str) or not re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise ValueError(
                f"prefix={prefix!r}; expected ASCII letters, digits, underscores and colons, not a digit first: names "
                "of metrics have no others"
            )
        lines = []
        values = dataclasses.asdict(self)
        del values["speculation"]
        for name, value in values.items():
            full = f"{prefix}_{name}"
            if isinstance(value, dict) and name in _LABELS:
                kind, label = _LABELS[name]
                lines += [f"# TYPE {full} {kind}"]
                lines += [f'{full}{{{label}="{key}"}} {count}' for key, count in sorted(value.items())]
            elif isinstance(value, dict):
                lines += [f"# TYPE {full}_seconds summary"]
                quantiles = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
                lines += [f'{full}_seconds{{quantile="{q}"}} {value[key]:.9g}' for q, key in quantiles.items()]
                lines += [f"# TYPE {full}_mean_seconds gauge", f"{full}_mean_seconds {value['mean']:.9g}"]
            else:
                kind = "counter" if name in _COUNTERS else "gauge"
                lines += [f"# TYPE {full} {kind}", f"{full} {value:.9g}"]
        if self.speculation is not None:
            lines += self.speculation.prometheus(f"{prefix}_speculation")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        """A table for people."""

        def latency(name: str, one: Latency) -> str:
            values = "".join(f"{1e3 * value:>10.1f}" for value in (one.mean, one.p50, one.p95, one.p99))
            return f"{name + ', ms':<28}{values}"

        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finished.items())) or "none"
        return "\n".join(
            [
                f"{'':<28}{'mean':>10}{'P50':>10}{'P95':>10}{'P99':>10}",
                latency("time to first token", self.time_to_first_token),
                latency("time per output token", self.time_per_output_token),
                latency("end to end", self.end_to_end),
                f"output                      {self.output_tokens:,} tokens, {self.output_tokens_per_s:,.1f} tokens/s",
                f"prefill                     {self.prompt_tokens:,} tokens, {self.prompt_tokens_per_s:,.1f} tokens/s, "
                f"{self.prefix_hit_rate:.1%} from the prefix cache",
                f"completions                 {self.submitted} submitted; finished: {reasons}",
                f"now                         {self.waiting} waiting, {self.prefilling} prefilling, "
                f"{self.decoding} decoding; {self.preemptions} preemptions so far",
                f"pages                       {self.pages_owned} of {self.pages} owned, {self.pages_cached} cached",
                *(
                    [
                        "of each tier                "
                        + ", ".join(
                            f"{name} {self.tier_pages_owned[name]} of {n}" for name, n in self.tier_pages.items()
                        )
                    ]
                    if self.tier_pages
                    else []
                ),
                *(
                    [
                        f"host pages                  {self.host_pages_used} of {self.host_pages} used; "
                        f"{self.pages_demoted} demoted, {self.pages_restored} restored ({self.host_hit_rate:.1%})"
                    ]
                    if self.host_pages
                    else []
                ),
                f"device                      busy {self.busy_share:.1%} of {self.seconds:.1f} s, of which prefill "
                f"{self.prefill_share:.1%}; decode rows {self.batch_occupancy:.1%} full",
                f"compilations                {self.compilations} in {self.seconds_compiling:.1f} s of all threads, "
                + (f"{self.compilations_after_warmup} after warm-up" if self.is_warm else "without a warm-up"),
                *([] if self.speculation is None else [str(self.speculation)]),
            ]
        )


_LABELS = {
    "finished": ("counter", "reason"),
    "tier_pages": ("gauge", "tier"),
    "tier_pages_owned": ("gauge", "tier"),
}
"""Values by name: their kind, and what the names are of."""
_COUNTERS = {
    "submitted",
    "preemptions",
    "prompt_tokens",
    "output_tokens",
    "pages_demoted",
    "pages_restored",
    "compilations",
    "compilations_after_warmup",
    "seconds_compiling",
}


@dataclasses.dataclass
class Clock:
    """When one completion was submitted, began and ended."""

    submitted: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0


class Meter:
    """Collects what `EngineMetrics` reports."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()
        self.prefill_rate: float | None = None
        """Prefill tokens per second of device time, over about the last ten programs; survives `reset`."""
        self.full_prefill_rate: float | None = None
        """The same over programs at least half as large as the largest: what more tokens cost than a few do."""
        self._recent = self._recent_full = (0.0, 0.0)
        self._largest = 0
        self._last_end = 0.0
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.start = self.now = time.perf_counter()
        self.submitted = self.prompt_tokens = self.output_tokens = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.clocks: collections.deque[Clock] = collections.deque(maxlen=KEPT_REQUESTS)
        self.spans: collections.deque[Span] = collections.deque(maxlen=KEPT_SPANS)
        self.busy: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.rows_used = self.rows_run = 0

    def has_read(self) -> None:
        """The results of a program have come."""
        self.now = time.perf_counter()

    def add_program(
        self, kind: Literal["prefill", "draft", "decode"], dispatched: float, rows: int, size: int, num_tokens: int
    ) -> float:
        """A program has ended, as the host sees it now; it ran `rows` sequences in `size` rows. Returns its seconds."""
        self.has_read()
        end = self.now - self.origin
        start = min(end, max(dispatched - self.origin, self._last_end))
        self._last_end = end
        self.spans.append(Span(kind, start, end, rows, num_tokens))
        self.busy[kind] += end - start
        if kind == "decode":
            self.rows_used += rows
            self.rows_run += size
        elif kind == "prefill":
            self.prompt_tokens += num_tokens
            if end > start:
                self._recent, self.prefill_rate = _recent_rate(self._recent, num_tokens, end - start)
                self._largest = max(self._largest, num_tokens)
                if 2 * num_tokens >= self._largest:
                    self._recent_full, self.full_prefill_rate = _recent_rate(self._recent_full, num_tokens, end - start)
        return end - start

    def add_tokens(self, clock: Clock, count: int) -> None:
        """Of what the host has read now, `count` tokens are a completion's."""
        clock.last = self.now
        if clock.first is None:
            clock.first = self.now
        clock.num_tokens += count
        self.output_tokens += count

    def add_finished(self, clock: Clock, reason: str) -> None:
        self.finished[reason] += 1
        if reason in ("stop", "length"):
            self.clocks.append(clock)

    def latencies(self) -> tuple[Latency, Latency, Latency]:
        """Time to first token, time per output token, end to end."""
        done = [(clock, clock.first, clock.last) for clock in self.clocks]
        spans = [(clock, first, last) for clock, first, last in done if first is not None and last is not None]
        return (
            Latency.of(first - clock.submitted for clock, first, _ in spans),
            Latency.of((last - first) / (clock.num_tokens - 1) for clock, first, last in spans if clock.num_tokens > 1),
            Latency.of(last - clock.submitted for clock, _, last in spans),
        )


def _recent_rate(recent: tuple[float, float], tokens: int, seconds: float) -> tuple[tuple[float, float], float]:
    """Tokens and seconds of about the last ten programs, one more included, and tokens per second."""
    recent = (0.9 * recent[0] + tokens, 0.9 * recent[1] + seconds)
    return recent, recent[0] / recent[1]
