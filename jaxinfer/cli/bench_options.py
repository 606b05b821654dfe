"""Options of `jaxinfer bench`; apart from its work, which imports JAX."""

import argparse
import math

from jaxinfer.cli.options import file_name


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The command's options beside MODEL and --dtype."""
    parser.add_argument(
        "--workload",
        type=file_name,
        metavar="FILE",
        help="requests to replay: a JSON object a line with one of prompt, token_ids or prompt_tokens (so many random "
        "ids), and optionally arrival (seconds) and params",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests to make up if there is no file (64; on a CPU 8)",
    )
    parser.add_argument(
        "--rate", type=float, default=math.inf, metavar="X", help="arrivals a second, Poisson (all at once)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, metavar=("LOW", "HIGH"), help="(100 1024; on a CPU 16 128)"
    )
    parser.add_argument(
        "--output-tokens", type=int, nargs=2, metavar=("LOW", "HIGH"), help="(100 1024; on a CPU 16 32)"
    )
    parser.add_argument("--temperature", type=float, default=0.6, metavar="X", help="(0.6)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload and of sampling (0)")
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="make weights up; MODEL needs no more than a config.json"
    )
    parser.add_argument("--max-decode-batch", type=int, metavar="N", help="sequences in one decode chunk")
    parser.add_argument("--max-prefill-tokens", type=int, metavar="N", help="prompt tokens computed in one round")
    parser.add_argument(
        "--prefill-tile",
        type=int,
        metavar="N",
        help="lay prompts into calls in rows of so many tokens, without padding",
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="longest prompt and output of a request")
    parser.add_argument("--decode-chunk", type=int, metavar="N", help="decode steps in one program")
    parser.add_argument("--decode-stall-ms", type=float, metavar="X", help="longest that decoding may wait for prefill")
    parser.add_argument(
        "--decode-order",
        choices=("shortest", "arrival", "longest"),
        default="shortest",
        help="who decodes when not all can; longest is for batches (shortest)",
    )
    parser.add_argument(
        "--policy", choices=("separate", "mixed"), default="separate", help="two queues, or one as a baseline"
    )
    parser.add_argument(
        "--draft", metavar="DRAFT", help="speculate: ngram, self, self:N or a model, as in spec-bench (no draft)"
    )
    parser.add_argument("--k", type=int, metavar="N", help="drafted tokens a step at most, with --draft (4)")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt whole")
    parser.add_argument(
        "--host-pages", type=int, default=0, metavar="N", help="pages of host memory for what the pool evicts (0)"
    )
    parser.add_argument("--no-warmup", action="store_true", help="compile while serving, to see what that costs")
    parser.add_argument(
        "--timeline", type=file_name, metavar="FILE.png", help="also draw when the device did what (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; times in seconds")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
