"""`jaxinfer quantize MODEL --plan PLAN --out PATH`."""

import argparse
import sys

from jaxinfer.quantization.api import write_quantized
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.pair import write_draft
from jaxinfer.quantization.plan import resolve


def run(options: argparse.Namespace) -> int:
    """Prints the path of the store; how well it was done, where that was measured, goes to standard error."""
    plan = resolve(options.plan, "--plan ")
    if options.calibration is not None:
        calibration = Calibration.from_files(options.calibration, evaluation=options.evaluation)
    elif options.evaluation is not None:
        raise ValueError("--evaluation goes with --calibration, the text to calibrate with; give both")
    else:
        calibration = Calibration.bundled() if options.judge else None
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
        print(report or "quality: not measured; --judge or --calibration FILE measures it", file=sys.stderr)
    print(options.out)
    return 0
