"""What an engine measures of its draft."""

import dataclasses

from jaxinfer.speculative.report import SpeculationReport


@dataclasses.dataclass(frozen=True)
class SpeculationMetrics:
    """Acceptance, and where the time of decoding went. Times are in seconds of the device, as the host sees them."""

    acceptance_by_position: tuple[float, ...]
    """Share of the tokens at each drafted position that stayed, of those before which all stayed."""
    acceptance_rate: float
    mean_accepted_length: float
    """Drafted tokens that stayed a step, of sequences that were proposed any."""
    accepted_lengths: tuple[int, ...]
    """How often a sequence that was proposed any kept 0, 1, 2, ... drafted tokens in a step."""
    tokens_per_step: float
    """Of a sequence, in steps that drafted; 1 if none did."""
    estimated_speedup: float | None
    """Of drafting steps over plain ones, as far as both came; see `SpeculationReport.estimated_speedup`."""
    steps: dict[int, int]
    """By drafted length; 0 is plain decoding."""
    timed_steps: dict[int, int]
    """Those during which nothing was compiled: the others' time says nothing of steps."""
    step_seconds: dict[int, float]
    """Of all timed steps of a length together."""
    draft_seconds: float | None
    """Of `step_seconds`, what the draft's passes take by themselves, timed with empty rows by `warmup`; None without.
    0 for a draft that runs no model: what it takes, next to nothing, is with `verify_seconds`."""
    verify_seconds: float | None
    """The rest of the steps with drafted tokens: verification and acceptance."""
    catch_up_seconds: float
    """The draft's own prefill, and its catching up after plain steps."""

    @classmethod
    def of(
        cls, report: SpeculationReport, draft_seconds: float | None, catch_up_seconds: float
    ) -> "SpeculationMetrics":
        drafted = sum(seconds for length, seconds in report.seconds.items() if length)
        return cls(
            acceptance_by_position=report.acceptance_by_position,
            acceptance_rate=report.acceptance_rate,
            mean_accepted_length=report.mean_accepted_length,
            accepted_lengths=tuple(report.histogram),
            tokens_per_step=report.tokens_per_step,
            estimated_speedup=report.estimated_speedup,
            steps=dict(report.steps),
            timed_steps=dict(report.timed_steps),
            step_seconds=dict(report.seconds),
            draft_seconds=draft_seconds,
            verify_seconds=None if draft_seconds is None else max(0.0, drafted - draft_seconds),
            catch_up_seconds=catch_up_seconds,
        )

    def prometheus(self, prefix: str) -> list[str]:
        """Lines of Prometheus' text format."""
        lines = [f"# TYPE {prefix}_acceptance gauge"]
        shares = enumerate(self.acceptance_by_position, 1)
        lines += [f'{prefix}_acceptance{{position="{place}"}} {share:.9g}' for place, share in shares]
        lines.append(f"# TYPE {prefix}_accepted_lengths counter")
        counts = enumerate(self.accepted_lengths)
        lines += [f'{prefix}_accepted_lengths{{accepted="{length}"}} {count}' for length, count in counts]
        by_length = {"steps": self.steps, "timed_steps": self.timed_steps, "step_seconds": self.step_seconds}
        for name, values in by_length.items():
            lines.append(f"# TYPE {prefix}_{name} counter")
            lines += [f'{prefix}_{name}{{drafted="{length}"}} {value:.9g}' for length, value in sorted(values.items())]
        for name in ("acceptance_rate", "mean_accepted_length", "tokens_per_step", "estimated_speedup"):
            if getattr(self, name) is not None:
                lines += [f"# TYPE {prefix}_{name} gauge", f"{prefix}_{name} {getattr(self, name):.9g}"]
        for name in ("draft_seconds", "verify_seconds", "catch_up_seconds"):
            if getattr(self, name) is not None:
                lines += [f"# TYPE {prefix}_{name} counter", f"{prefix}_{name} {getattr(self, name):.9g}"]
        return lines

    def __str__(self) -> str:
        """Lines of the engine's table."""
        shares = " ".join(f"{share:.0%}" for share in self.acceptance_by_position) or "nothing was drafted"
        times = {
            length: f"{1e3 * self.step_seconds[length] / count:.2f} ms" for length, count in self.timed_steps.items()
        }
        steps = ", ".join(
            f"{count} {f'of k = {length}' if length else 'plain'} ({times.get(length, 'all while compiling')})"
            for length, count in sorted(self.steps.items())
        )
        gain = "" if self.estimated_speedup is None else f", estimated speed-up {self.estimated_speedup:.2f}"
        split = "not timed (warmup does)"
        if self.draft_seconds is not None and self.verify_seconds is not None:
            split = f"{self.draft_seconds:.2f} s, verification {self.verify_seconds:.2f} s"
        return "\n".join(
            [
                f"speculation                 accepted by position: {shares}; {self.mean_accepted_length:.2f} a step, "
                f"{self.tokens_per_step:.2f} tokens a drafting step{gain}",
                f"                            steps: {steps or 'none'}",
                f"                            drafting {split}, catching up {self.catch_up_seconds:.2f} s",
            ]
        )
