"""`jaxinfer quantize MODEL --plan PLAN --out PATH`."""

import argparse
import dataclasses
import logging
import sys

from jaxinfer.quantization.api import windows_for, write_quantized
from jaxinfer.quantization.calibration import EVALUATION_SAMPLES, Calibration, Windows
from jaxinfer.quantization.pair import write_draft
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.source import open_source
from jaxinfer.store.unfinished import check_store_free

log = logging.getLogger("jaxinfer")

ERROR_SAMPLES = 8
"""Windows on which the errors of weights are measured where no method looks at them."""


def run(options: argparse.Namespace) -> int:
    """Prints the path of the store; how well it was done, where that was measured, goes to standard error."""
    plan = resolve(options.plan, "--plan ")
    check_store_free(options.out)
    calibration = calibration_for(options, plan)
    common = {
        "calibration": calibration,
        "promote_above": options.promote_above,
        "dtype": options.dtype,
        "progress": not options.quiet,
    }
    if options.target is None:
        report = write_quantized(options.model, plan, options.out, **common)
    else:
        report = write_draft(options.model, options.target, plan, options.out, **common)
    if not options.quiet:
        print(report or "quality: not measured", file=sys.stderr)
    print(options.out)
    return 0


def calibration_for(options: argparse.Namespace, plan: Plan) -> Calibration | Windows | None:
    """The text to calibrate with and to judge by; None where nothing looks at any.

    What is judged because nobody said otherwise is not, with a warning, where no tokenizer can read the text.
    """
    if options.calibration is None and options.evaluation is not None:
        raise ValueError("--evaluation goes with --calibration, the text to calibrate with; give both")
    judged = options.judge is not False
    windows = {name: getattr(options, name) for name in ("samples", "length") if getattr(options, name) is not None}
    if options.calibration is not None:
        calibration = Calibration.from_files(options.calibration, evaluation=options.evaluation, **windows)
        return calibration if judged else dataclasses.replace(calibration, evaluation_samples=0)
    evaluation_samples = EVALUATION_SAMPLES if judged else 0
    if plan.needs_calibration or options.promote_above is not None or options.target is not None:
        return Calibration.bundled(evaluation_samples=evaluation_samples, **windows)
    calibration = Calibration.bundled(evaluation_samples=evaluation_samples, **{"samples": ERROR_SAMPLES} | windows)
    if not judged:
        if windows:
            name, value = next(iter(windows.items()))
            raise ValueError(f"--{name} {value}: nothing looks at text; a method that calibrates, or --judge, would")
        return None
    if options.judge:
        return calibration
    with open_source(options.model, progress=not options.quiet) as source:
        if source.tokenizer is None:
            log.warning("%s: quality is not measured: it has no tokenizer to read text with", options.model)
            return None
        try:
            return windows_for(calibration, source.tokenizer, source.config, options.model)
        except ValueError as error:
            log.warning("%s: quality is not measured: %s; --calibration FILE may be of its words", options.model, error)
            return None
