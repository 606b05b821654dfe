"""`jaxinfer sensitivity MODEL`: what each weight's precision costs, and the plan of least loss in a given room."""

import argparse
import re

from jaxinfer.cli.options import json_line
from jaxinfer.model import load
from jaxinfer.quantization.plan import Precision
from jaxinfer.quantization.sensitivity import sensitivity
from jaxinfer.quantization.sensitivity_table import plan_of


def run(options: argparse.Namespace) -> int:
    """Measures, proposes, writes and draws what was asked for, prints the rest."""
    precisions = [precision_of(text) for text in options.precisions.split(",")]
    if options.plan is not None and not options.plan.endswith(".toml"):
        raise ValueError(f"--plan {options.plan}: --quantize takes plans for files that end in .toml; name it so")
    shown = not options.quiet
    model = load(options.model, dtype=options.dtype, packed=False, progress=shown)
    found = sensitivity(
        model,
        options.calibration,
        precisions=precisions,
        measure_head=options.head,
        max_tokens=options.tokens,
        quick=options.quick,
        progress=shown,
    )
    proposal = found.propose(options.budget, joined=not options.separate)
    if options.heat_map is not None:
        try:
            found.plot(options.heat_map)
        except ImportError as error:
            raise ValueError(str(error)) from error
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
