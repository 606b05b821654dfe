"""`jaxinfer plan MODEL`: what memory a model, its cache and its programs will take, and what would fit."""

import argparse
import dataclasses

from jaxinfer.cli.options import json_line, loading
from jaxinfer.cli.output_files import check_picture
from jaxinfer.device import start_device
from jaxinfer.planning.plan import memory_plan
from jaxinfer.speculative.ngram import check_k


def run(options: argparse.Namespace) -> int:
    """Prints the plan as text or JSON. Exit code 1 if it does not fit, so that a script can ask."""
    check_picture("--chart", options.chart)
    if options.draft is None and options.k is not None:
        raise ValueError(f"--k {options.k} goes with --draft, the model that drafts so many tokens; give both")
    num_drafted = 4 if options.k is None else options.k
    check_k(num_drafted, "--draft")
    start_device()
    plan = memory_plan(
        options.model,
        context=options.context,
        batch=options.batch,
        gpu_memory=options.gpu_memory,
        draft=options.draft,
        num_drafted=num_drafted,
        compile=options.compile,
        progress=True,
        **loading(options),
    )
    if options.chart is not None:
        plan.plot(options.chart)
    facts = dataclasses.asdict(plan) | {"rounded": plan.rounded, "peak": plan.peak, "fits": plan.fits}
    print(json_line(facts) if options.json else plan)
    return 0 if plan.fits else 1
