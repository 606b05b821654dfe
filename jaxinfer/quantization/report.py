"""What quantising did to a model: the error of each weight, and the quality of the whole."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.quantization.plan import Plan, from_mapping


@dataclasses.dataclass(frozen=True)
class Quality:
    """How far a model is from its original on text that neither calibration nor, one hopes, training has seen.

    KL divergences are of the next token's distribution from the original's, in nats, at every position. `agreement` is
    the share of positions at which both hold the same token for the most probable.
    """

    perplexity: float
    original_perplexity: float
    kl_mean: float
    kl_p99: float
    agreement: float
    num_tokens: int

    @classmethod
    def from_positions(
        cls, surprise: np.ndarray, original_surprise: np.ndarray, divergence: np.ndarray, same_best: np.ndarray
    ) -> "Quality":
        """From [positions]: negative log-likelihoods of the next tokens, KL divergences, equality of the best."""
        divergence = divergence.astype(np.float64)
        with np.errstate(over="ignore"):  # a model that is certain and wrong has an infinite perplexity
            perplexities = [float(np.exp(np.mean(x, dtype=np.float64))) for x in (surprise, original_surprise)]
        return cls(
            perplexity=perplexities[0],
            original_perplexity=perplexities[1],
            kl_mean=float(np.mean(divergence)),
            kl_p99=float(np.quantile(divergence, 0.99)),
            agreement=float(np.mean(same_best)),
            num_tokens=len(divergence),
        )

    @property
    def is_finite(self) -> bool:
        """Whether JSON can hold it."""
        return all(map(math.isfinite, dataclasses.astuple(self)))

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4g} (original {self.original_perplexity:.4g}), KL mean {self.kl_mean:.4f}, "
            f"99th percentile {self.kl_p99:.4f} nats, same best token {self.agreement:.1%}, on {self.num_tokens} tokens"
        )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far a draft agrees with its target: KL divergence of its next-token distributions from the target's, in nats,
    and `acceptance`, the share of drafted tokens that sampling would accept: the mean of sum(min(p, q))."""

    kl_mean: float
    kl_p99: float
    acceptance: float
    num_tokens: int

    @classmethod
    def from_positions(cls, divergence: np.ndarray, shared: np.ndarray) -> "Agreement":
        """From [positions]: KL divergences, and what the distributions share."""
        divergence = divergence.astype(np.float64)
        means = (
            float(np.mean(divergence)),
            float(np.quantile(divergence, 0.99)),
            float(np.mean(shared, dtype=np.float64)),
        )
        return cls(*means, len(divergence))

    def __str__(self) -> str:
        return f"KL mean {self.kl_mean:.4f}, 99th percentile {self.kl_p99:.4f} nats, acceptance {self.acceptance:.1%}"


@dataclasses.dataclass(frozen=True)
class PairReport:
    """How a draft agrees with the target that it was quantised for; None where there was no text to judge by."""

    target: str
    before: Agreement | None
    after: Agreement | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"drafts for {self.target}"
        return (
            f"drafts for {self.target}; before: {self.before}; after: {self.after}, on {self.after.num_tokens} tokens"
        )

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> "PairReport":
        """Undoes `dataclasses.asdict`."""
        both = [None if content[key] is None else Agreement(**content[key]) for key in ("before", "after")]
        return cls(content["target"], *both)


@dataclasses.dataclass(frozen=True)
class WeightError:
    """`error` is E|D x|^2 / E|W x|^2, D what quantising changed of W, over the calibration's inputs x."""

    name: str
    precision: str
    error: float
    promoted: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizationReport:
    """`plan` is the one that was followed, promotions included. `quality` is None if no evaluation text was given.

    `pair` is None unless it was quantised as the draft of a target (`jaxinfer.quantize_draft`).
    """

    plan: Plan
    source: str
    calibration_tokens: int
    weights: tuple[WeightError, ...]
    quality: Quality | None
    pair: PairReport | None = None

    def over(self, threshold: float) -> list[WeightError]:
        """Weights whose error is larger, the worst first."""
        return sorted((weight for weight in self.weights if weight.error > threshold), key=lambda w: -w.error)

    def __repr__(self) -> str:
        """A few lines: how it was done, the worst weights, the quality."""
        errors = (f"{weight.name} {100 * weight.error:.2g} % ({weight.precision})" for weight in self.over(0.0)[:5])
        promoted = [weight.name for weight in self.weights if weight.promoted]
        lines = [
            f"{self.plan.name}: {len(self.weights)} weights quantised, {len(promoted)} promoted, "
            f"errors measured on {self.calibration_tokens} tokens of {self.source}",
            f"largest errors of outputs: {', '.join(errors) or 'none'}",
            f"quality: {self.quality or 'not measured, no text was kept apart to judge by'}",
        ]
        if promoted:
            more = f" and {len(promoted) - 5} more" if len(promoted) > 5 else ""
            lines.insert(1, f"promoted for larger errors: {', '.join(promoted[:5])}{more}")
        lines += [] if self.pair is None else [str(self.pair)]
        return "\n".join(lines)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "plan": {"name": self.plan.name, **self.plan.to_mapping()},
            "source": self.source,
            "calibration_tokens": self.calibration_tokens,
            "weights": [dataclasses.asdict(weight) for weight in self.weights],
            "quality": None if self.quality is None else dataclasses.asdict(self.quality),
            "pair": None if self.pair is None else dataclasses.asdict(self.pair),
        }

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> "QuantizationReport":
        """Undoes `to_mapping`."""
        plan = dict(content["plan"])
        name = plan.pop("name")
        quality, pair = content["quality"], content.get("pair")
        return cls(
            plan=from_mapping(plan, name),
            source=content["source"],
            calibration_tokens=content["calibration_tokens"],
            weights=tuple(WeightError(**weight) for weight in content["weights"]),
            quality=None if quality is None else Quality(**quality),
            pair=None if pair is None else PairReport.from_mapping(pair),
        )


def report_of(content: Mapping[str, Any] | None) -> QuantizationReport | None:
    """The report in JSON of any origin; None for one of another form."""
    if content is None:
        return None
    try:
        return QuantizationReport.from_mapping(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
