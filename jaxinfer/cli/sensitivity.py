"""`jaxinfer sensitivity MODEL`: what each weight's precision costs, and the plan of least loss in a given room."""

import argparse
import pathlib
import re
from collections.abc import Sequence

from jaxinfer.cli.options import json_line
from jaxinfer.cli.output_files import check_output, check_picture
from jaxinfer.model import load
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.plan import HEAD, Plan, Precision
from jaxinfer.quantization.sensitivity import sensitivity, unmeasured
from jaxinfer.quantization.sensitivity_table import plan_of, read_budget


def run(options: argparse.Namespace) -> int:
    """Measures, proposes, writes and draws what was asked for, prints the rest."""
    precisions = [precision_of(text) for text in options.precisions.split(",")]
    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}; expected a whole number from 1")
    if options.plan is not None and not options.plan.endswith(".toml"):
        raise ValueError(f"--plan {options.plan}: --quantize takes plans for files that end in .toml; name it so")
    check_output("--plan", options.plan)
    if options.plan is not None and pathlib.Path(options.plan).exists():
        raise ValueError(f"--plan {options.plan} exists already; remove it, or write to another path")
    check_picture("--heat-map", options.heat_map)
    budget = read_budget(options.budget, "--budget ")
    if isinstance(budget, Plan):
        check_measured(budget, precisions, options.head)
    calibration = None if options.calibration is None else Calibration.from_files(options.calibration)
    shown = not options.quiet
    model = load(options.model, dtype=options.dtype, packed=False, progress=shown)
    wanted = {"joined": not options.separate, "method": options.method}
    unmeasured(model, precisions, measure_head=options.head).propose(options.budget, **wanted)
    found = sensitivity(
        model,
        calibration,
        precisions=precisions,
        measure_head=options.head,
        max_tokens=options.tokens,
        quick=options.quick,
        progress=shown,
    )
    proposal = found.propose(options.budget, **wanted)
    if options.heat_map is not None:
        found.plot(options.heat_map)
    if options.plan is not None:
        proposal.save(options.plan)
    if options.json:
        plan = {"bytes": proposal.num_bytes, "kl": proposal.divergence, **proposal.plan.to_mapping()}
        print(json_line(found.to_mapping() | {"plan": plan}))
        return 0
    print(found)
    print()
    print(proposal)
    for precision in found.precisions:
        uniform = found.evaluate(plan_of(dict.fromkeys(found.names, precision), f"all {precision}"))
        print(uniform)
    return 0


def check_measured(plan: Plan, precisions: Sequence[Precision], with_head: bool) -> None:
    """Raises ValueError for a budget with a precision that is not among the candidates, before hours of measuring."""
    for rule in plan.rules:
        counts = with_head or any(pattern != HEAD for pattern in rule.weights)
        if counts and rule.precision.bits < 16 and rule.precision not in precisions:
            raise ValueError(
                f"--budget {plan.name} has weights in {rule.precision}, which is not among --precisions: add it, or "
                "give a size"
            )


def precision_of(text: str) -> Precision:
    """The precision in text such as 4:64:gptq, 4:32 or 8::fp8. Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+)(?::(\d*))?(?::(\w+))?\s*", text)
    if match is None:
        raise ValueError(f"--precisions has {text!r}; expected BITS:GROUP:METHOD, such as 4:64:gptq, 4:32 or 8::fp8")
    bits, group_size, method = match.groups()
    try:
        return Precision(int(bits), int(group_size) if group_size else None, method=method or "rtn")
    except ValueError as error:
        raise ValueError(f"--precisions has {text!r}: {error}") from error
