"""Speculation = a draft, a rule of acceptance, a policy of lengths; and what became of it."""

import logging
import threading
import typing
from collections.abc import Sequence

from jaxinfer.decoder import LINEAR
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs, Weight
from jaxinfer.model import Model
from jaxinfer.quantization.plan import Plan
from jaxinfer.speculative.acceptance import Acceptance, Exact
from jaxinfer.speculative.policy import Adaptive, Policy
from jaxinfer.speculative.proposer import Draft
from jaxinfer.speculative.report import SpeculationReport
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8

log = logging.getLogger("jaxinfer")


class Speculation:
    """How to speculate, for `generate` and `stream`: `draft=Speculation(NgramDraft(k=6), policy=FixedLength())`.

    A draft alone means exact acceptance under an adaptive policy. `report` adds up what happened in all runs; a new
    object, or `reset`, starts from zero. An acceptance that is not exact changes the output, says so in the log, and
    has a name that begins with Lossy.
    """

    @typing.no_type_check  # it checks more, and its errors are the ones users must see
    def __init__(self, draft: Draft, *, acceptance: Acceptance | None = None, policy: Policy | None = None) -> None:
        """Raises ValueError for what is no draft, acceptance or policy, and for lengths beyond the draft's k."""
        self.draft: Draft = _instance("draft", draft, Draft, "a draft such as jaxinfer.NgramDraft(k=4)")
        self.acceptance: Acceptance = _instance(
            "acceptance",
            Exact() if acceptance is None else acceptance,
            Acceptance,
            "None for exact acceptance, or a mode of jaxinfer.speculative.lossy such as LossyTopK()",
        )
        self.policy: Policy = _instance(
            "policy",
            Adaptive() if policy is None else policy,
            Policy,
            "None, or a policy of jaxinfer.speculative.policy such as FixedLength(4)",
        )
        self.report = SpeculationReport()
        self.lock = threading.Lock()
        """Held while `report` is changed: runs in several threads may share it."""
        self._warned: set[str] = set()
        self.policy.lengths(draft.k)  # raises ValueError for lengths beyond the draft's
        if not self.acceptance.lossless:
            log.warning("%r is not exact: outputs are not those of the target alone", self.acceptance)

    def __repr__(self) -> str:
        return f"Speculation({self.draft!r}, acceptance={self.acceptance!r}, policy={self.policy!r})"

    def reset(self) -> None:
        """Forgets what was counted."""
        with self.lock:
            self.report = SpeculationReport()

    def warn_of_plans(self, target: Model) -> None:
        """Says once, after a run, what a draft quantised apart from its target was accepted with.

        One that was calibrated on what its target writes (`jaxinfer.quantize_draft`) may have another plan.
        """
        draft = getattr(self.draft, "model", None)
        report = getattr(draft, "quantization", None)
        if "plans" in self._warned or not self.draft.has_own_cache or not sum(self.report.judged):
            return
        if report is not None and report.pair is not None:
            return
        own = None if target.quantization is None else target.quantization.plan
        other = None if report is None else report.plan
        forms = _forms(target.params), _forms(self.draft.params)
        if forms[0] != forms[1] or (own is not None and other is not None and own != other):
            self._warned.add("plans")
            log.warning(
                "target and draft are quantised differently (%s and %s); %.0f %% of drafted tokens were accepted; "
                "jaxinfer.quantize_draft calibrates a draft on its target",
                *(_described(form, plan) for form, plan in zip(forms, (own, other), strict=True)),
                100 * self.report.acceptance_rate,
            )


def as_speculation(draft: object) -> Speculation:
    """What `generate` was given, as a Speculation. Raises ValueError for what is no draft."""
    if isinstance(draft, Speculation):
        return draft
    return Speculation(_instance("draft", draft, Draft, "a draft such as jaxinfer.NgramDraft(k=4), or a Speculation"))


def _instance[Kind](name: str, value: object, kind: type[Kind], expected: str) -> Kind:
    """The value, if it is an instance of that kind. Raises ValueError for anything else, and for a class itself."""
    if isinstance(value, type):
        raise ValueError(f"{name} is the class {value.__name__}; expected an object of it: {expected}")
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}; expected {expected}")
    return value


def quantisation(params: object) -> str:
    """How the layers of a model are stored, in a word."""
    layers = getattr(params, "layers", [])
    if not layers:
        return "none"
    return _stored(layers[0].down)


def _forms(params: object) -> list[str]:
    """All the forms that the layers' projections are stored in."""
    layers = getattr(params, "layers", [])
    return sorted({_stored(getattr(layer, name)) for layer in layers for name in LINEAR}) or ["none"]


def _described(forms: Sequence[str], plan: Plan | None) -> str:
    return " beside ".join(forms) + ("" if plan is None else f" by {plan.name}")


def _stored(weight: Weight) -> str:
    match weight:
        case PackedInt4() | PackedInt8():
            return f"{weight.bits} bits, {weight.kind}, groups of {weight.group_size}"
        case PermutedInputs():
            return _stored(weight.weight)
        case StackedOutputs():
            return " and ".join(dict.fromkeys(_stored(part) for part in weight.parts))
        case ScaledCodes():
            return f"8 bits, {weight.codes.dtype}"
        case BlockCodes():
            return f"8 bits, {weight.codes.dtype}, blocks of {weight.block[0]} x {weight.block[1]}"
    return str(weight.dtype)
