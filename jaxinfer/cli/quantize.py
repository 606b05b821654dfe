"""`jaxinfer quantize MODEL --plan PLAN --out PATH`."""

import argparse
import sys

from jaxinfer.quantization.api import write_quantized
from jaxinfer.quantization.plan import resolve


def run(options: argparse.Namespace) -> int:
    """Prints the path of the store; how well it was done, where that was measured, goes to standard error."""
    report = write_quantized(
        options.model,
        resolve(options.plan, "--plan "),
        options.out,
        calibration=options.calibration,
        promote_above=options.promote_above,
        dtype=options.dtype,
        progress=not options.quiet,
    )
    if report is not None and not options.quiet:
        print(report, file=sys.stderr)
    print(options.out)
    return 0
