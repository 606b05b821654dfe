"""Options of `jaxinfer score` and `jaxinfer perplexity`."""

import argparse

from jaxinfer.cli.options import file_name, unicode_text


def add_score(parser: argparse.ArgumentParser) -> None:
    """One pair or several from the command line, or a file of them."""
    parser.add_argument("--prompt", type=unicode_text, metavar="TEXT", help="the text before; empty if not given")
    parser.add_argument(
        "--continuation",
        action="append",
        type=unicode_text,
        metavar="TEXT",
        help="what to score; repeat it for several",
    )
    parser.add_argument(
        "--pairs-file",
        type=file_name,
        metavar="FILE",
        help="each line a JSON object with prompt and continuation, text or token ids (- is standard input)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def add_perplexity(parser: argparse.ArgumentParser) -> None:
    """A text and how to walk through it."""
    parser.add_argument(
        "file", type=file_name, metavar="FILE", nargs="?", default="-", help="a UTF-8 text (default: standard input)"
    )
    parser.add_argument("--window", type=int, metavar="N", help="tokens looked at together (the context, at most 4096)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens scored a window (half of it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
