"""The options of `jaxinfer sensitivity`, without the imports that measuring needs."""

import argparse

from jaxinfer.cli.options import file_name


def add_sensitivity(parser: argparse.ArgumentParser) -> None:
    """Text, precisions, budget, and where the results go."""
    parser.add_argument(
        "--calibration",
        action="append",
        type=file_name,
        metavar="FILE",
        help="text or .jsonl of your own domain; repeat it for several. Default: a bundled novel",
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens measured on, at most (4096)")
    parser.add_argument(
        "--precisions",
        default="4:128,4:64,4:32,8",
        metavar="LIST",
        help="candidates as BITS:GROUP:METHOD, the last two as in plans and optional, with commas (4:128,4:64,4:32,8)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure KL for the coarsest candidate only, and scale it for the others"
    )
    parser.add_argument("--head", action="store_true", help="measure the language-model head too")
    parser.add_argument(
        "--budget",
        default="int4",
        metavar="SIZE",
        help="room for the weights: 60MB, '4.5 bits' (a weight), or a plan, as much as that takes (int4)",
    )
    parser.add_argument(
        "--separate", action="store_true", help="q, k and v, gate and up may differ: better, but more products a layer"
    )
    parser.add_argument(
        "--method",
        choices=("rtn", "hqq", "awq", "gptq"),
        help="that the plan is to be made by, below 8 bits: weights that err much with one err much with all. "
        "Default: as measured",
    )
    parser.add_argument(
        "--plan", type=file_name, metavar="FILE.toml", help="write the proposed plan there, for --quantize"
    )
    parser.add_argument(
        "--heat-map", type=file_name, metavar="FILE", help="draw what was measured, as PNG or by the file's ending"
    )
    parser.add_argument("--json", action="store_true", help="print everything measured as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
