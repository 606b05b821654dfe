"""`jaxinfer convert MODEL OUT`."""

import argparse

from jaxinfer.store.create import create
from jaxinfer.store.export import export


def run(options: argparse.Namespace) -> int:
    """Prints the path of what was written."""
    common = {"dtype": options.dtype, "progress": not options.quiet}
    if options.format == "store":
        create(options.model, options.out, **common)
    else:
        export(options.model, options.out, format=options.format, **common)
    print(options.out)
    return 0
