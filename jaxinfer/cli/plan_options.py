"""The options of `jaxinfer plan`, without the imports that planning needs."""

import argparse

from jaxinfer.cli.options import file_name


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Beside those of loading: what is to be generated, where, and how the answer is shown."""
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a sequence, output included; default, and at most, the model's own",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences at once (1)")
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="plan for a GPU of that memory, such as 24GiB, that need not be here"
    )
    parser.add_argument("--draft", metavar="MODEL", help="a smaller model that drafts, with a cache of its own")
    parser.add_argument("--k", type=int, metavar="N", help="tokens that it drafts a step, with --draft (4)")
    parser.add_argument(
        "--compile", action="store_true", help="ask XLA what the programs take on this device: exact, some seconds"
    )
    parser.add_argument(
        "--chart", type=file_name, metavar="FILE", help="draw the memory as a bar, as PNG or by the file's ending"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
