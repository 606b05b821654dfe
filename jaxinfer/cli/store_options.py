"""Options of `jaxinfer quantize` and `jaxinfer convert`."""

import argparse

from jaxinfer.cli.options import add_model, file_name
from jaxinfer.quantization.plan import PRESETS

_WRITTEN = "of what is not packed, also of codes that are decoded; default bfloat16, of a store its own"


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """MODEL, the plan, the store to write, and what calibrated methods look at."""
    add_model(parser, _WRITTEN)
    parser.add_argument(
        "--plan",
        required=True,
        metavar="PLAN",
        help=f"{', '.join(PRESETS)}, or a .toml file",
    )
    parser.add_argument(
        "--out", required=True, type=file_name, metavar="PATH", help="the folder to write, which must not exist"
    )
    parser.add_argument(
        "--calibration",
        action="append",
        type=file_name,
        metavar="FILE",
        help="text or .jsonl of your domain; repeat it for several. Default: a bundled novel, if the plan needs text",
    )
    parser.add_argument(
        "--evaluation",
        action="append",
        type=file_name,
        metavar="FILE",
        help="judge by these files; default: a tenth of --calibration, which then calibrates nothing",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="windows of text to calibrate with, from all of it (128; 8 where they only show the weights' errors)",
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a window at most (512)")
    parser.add_argument(
        "--judge",
        action=argparse.BooleanOptionalAction,
        help="report perplexity and KL divergence from the original, and keep them in the store; default: if the model "
        "has a tokenizer. --no-judge takes less time",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="MODEL drafts for this one: calibrate on what it writes, and report how far the two agree",
    )
    parser.add_argument(
        "--promote-above", type=float, metavar="X", help="more bits for weights whose outputs err by more, such as 0.01"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no report on standard error")


def add_convert(parser: argparse.ArgumentParser) -> None:
    """MODEL, the folder to write, and its format."""
    add_model(parser, _WRITTEN)
    parser.add_argument("out", type=file_name, metavar="OUT", help="the folder to write, which must not exist")
    parser.add_argument(
        "--format",
        choices=("store", "safetensors", "awq", "compressed-tensors"),
        default="store",
        help="store (default): packed as this device's kernels read it; safetensors: decoded, for any engine; awq and "
        "compressed-tensors: the codes as they are, where the format has such codes",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
