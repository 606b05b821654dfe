"""`jaxinfer score`: log-likelihoods of continuations, one JSON object a line."""

import argparse
import json
import math
import sys
from collections.abc import Iterator

from jaxinfer.cli.options import json_line, loading, read_text, shown_name
from jaxinfer.model import load
from jaxinfer.request import Prompt
from jaxinfer.scoring import score


def run(options: argparse.Namespace) -> int:
    """Reads all pairs before the model is loaded, scores them, and prints them in order."""
    if (options.pairs_file is None) == (options.continuation is None):
        raise ValueError("give --continuation (with or without --prompt), or --pairs-file")
    if options.pairs_file is not None and options.prompt is not None:
        raise ValueError("--prompt goes with --continuation; a line of --pairs-file has its own prompt")
    if options.pairs_file is None:
        pairs: list[tuple[Prompt, Prompt]] = [(options.prompt or "", text) for text in options.continuation]
    else:
        pairs = list(_pairs(options.pairs_file))
        if not pairs:
            raise ValueError(f"{shown_name(options.pairs_file)} holds no pairs; give one JSON object a line")
    progress = not options.quiet
    model = load(options.model, **loading(options), progress=progress)
    scores = score(model, [prompt for prompt, _ in pairs], [text for _, text in pairs], progress=progress)
    failed = 0
    for index, (result, (prompt, continuation)) in enumerate(zip(scores, pairs, strict=True)):
        finite = not math.isnan(result.logprob)
        failed += not finite
        record = {
            "index": index,
            "prompt": prompt,
            "continuation": continuation,
            "logprob": result.logprob if finite else None,
            "num_tokens": result.num_tokens,
            "is_greedy": result.is_greedy,
            "token_logprobs": result.token_logprobs if finite else None,
        }
        print(json_line(record))
    if failed:
        print(f"error: the model's logits are not finite for {failed} pairs", file=sys.stderr)
    return 1 if failed else 0


def _pairs(name: str) -> Iterator[tuple[Prompt, Prompt]]:
    where = shown_name(name)
    for number, line in enumerate(read_text(name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} line {number} is not JSON: {error}") from error
        match record:
            case {"prompt": str() | list() as prompt, "continuation": str() | list() as text} if len(record) == 2:
                yield prompt, text
            case _:
                raise ValueError(
                    f"{where} line {number}: expected an object with prompt and continuation, nothing else"
                )
