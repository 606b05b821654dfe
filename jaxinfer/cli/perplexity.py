"""`jaxinfer perplexity`: how well a model foresees a text."""

import argparse
import dataclasses
import math
import sys

from jaxinfer.cli.options import json_line, loading, read_text
from jaxinfer.model import load
from jaxinfer.scoring import perplexity


def run(options: argparse.Namespace) -> int:
    """Prints the perplexity of a text, and of how many tokens it is."""
    text = read_text(options.file)
    progress = not options.quiet
    model = load(options.model, **loading(options), progress=progress)
    result = perplexity(model, text, window=options.window, stride=options.stride, progress=progress)
    if math.isnan(result.logprob):
        print("error: the model's logits are not finite for this text", file=sys.stderr)
        return 1
    if options.json:
        record = dataclasses.asdict(result)
        if math.isinf(result.perplexity):  # JSON has no such number
            record["perplexity"] = None
        print(json_line(record))
    else:
        print(f"perplexity {result.perplexity:.4f} ({result.num_tokens} tokens, log-likelihood {result.logprob:.2f})")
    return 0
