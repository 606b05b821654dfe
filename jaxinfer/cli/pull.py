"""`jaxinfer pull NAME`."""

import argparse

from checkpoints.pull import pull


def run(options: argparse.Namespace) -> int:
    """Prints the path, so that it can be used as `$(jaxinfer pull NAME)`."""
    print(pull(options.name, progress=not options.quiet))
    return 0
