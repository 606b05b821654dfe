"""Scoring speed: log-likelihoods of continuations whose prompts share prefixes, beside plain prefill.

    python -m benchmarks.scoring --model llama-3-8b
    python -m benchmarks.scoring --model smollm2-135m-instruct --pairs 64 --prefixes 8 --prompt 256 --continuation 16

`--pairs` pairs of `--prompt` and `--continuation` tokens, with `--prefixes` different prompts (issue 5: 1000 pairs of
512 + 32 tokens, 100 prompts). Three rates: of the tokens given, of the tokens that had to be computed once shared
prefixes are, padding counted in neither, and of plain prefill of rows of the prompt's length, in full calls. The
share is the second over the third.
"""

import argparse
import concurrent.futures
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer as ji
from benchmarks.decode import load, weights_of
from benchmarks.harness import Recorder, median, seconds
from jaxinfer import kv_cache, steps
from jaxinfer.batch import PAGE_SIZE, Limits, bucket, pages_for
from jaxinfer.scoring import encode_pair
from jaxinfer.scoring_run import run_pairs


def pairs_of(model: ji.Model, options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, each one of a few, and continuations, all different."""
    rng = np.random.default_rng(0)
    known = model.config.num_tokens
    prefixes = rng.integers(0, known, (options.prefixes, options.prompt)).tolist()
    continuations = rng.integers(0, known, (options.pairs, options.continuation)).tolist()
    return [prefixes[index % options.prefixes] for index in range(options.pairs)], continuations


class Prefill:
    """Plain prefill from nothing: as many rows of `length` tokens as a call takes."""

    def __init__(self, model: ji.Model, length: int) -> None:
        self.model, size = model, bucket(length, 64)
        rows = max(1, Limits.default().prefill_tokens // size)
        width = pages_for(size)
        lengths, starts = jnp.full(rows, length, jnp.int32), jnp.zeros(rows, jnp.int32)
        table = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
        self.arguments = (jnp.zeros((rows, size), jnp.int32), lengths, starts, table)
        self.options = {"config": model.config, "from_empty": True}
        self.cache = kv_cache.create(model.config, 1 + rows * width, PAGE_SIZE, model.cache_dtype)
        self.num_tokens = rows * length

    def compile(self) -> None:
        steps.outermost_prefill.lower(self.model.prompt_params, self.cache, *self.arguments, **self.options).compile()

    def run(self) -> jax.Array:
        logits, self.cache = steps.outermost_prefill(
            self.model.prompt_params, self.cache, *self.arguments, **self.options
        )
        return logits

    def rate(self, repeats: int) -> float:
        """Tokens per second, the first two runs left out."""
        seconds(self.run, 2)
        return self.num_tokens / median(seconds(self.run, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape of benchmarks/shapes, or what jaxinfer.load takes")
    parser.add_argument("--dtype")
    parser.add_argument("--int4", action="store_true", help="packed layers: random ones, or a GGUF file's as they are")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--prefixes", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--continuation", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    parser.set_defaults(quantize=None, head=None)
    options = parser.parse_args()
    weights = weights_of(options.model, options)
    recorder = Recorder("scoring", options.results) if options.results else Recorder("scoring")
    model = load(options.model, weights, None)
    prompts, continuations = pairs_of(model, options)
    pairs = [encode_pair(model, *pair) for pair in zip(prompts, continuations, strict=True)]
    prefill_alone = Prefill(model, options.prompt)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # all programs are compiled together
        compiled = pool.submit(prefill_alone.compile)
        computed = sum(scored.num_computed for scored in run_pairs(model, pairs, Limits.default()))
        compiled.result()
    print(f"first run, compilation included: {time.perf_counter() - start:.1f} s", flush=True)
    elapsed = median(seconds(lambda: ji.score(model, prompts, continuations), options.repeats))
    prefill = prefill_alone.rate(options.repeats)
    given = options.pairs * (options.prompt + options.continuation)
    sizes = {name: getattr(options, name) for name in ("pairs", "prefixes", "prompt", "continuation")}
    recorder.record(
        {"model": options.model, "weights": weights.name, "kv": str(model.cache_dtype), **sizes},
        {
            "seconds": (elapsed, "s"),
            "tokens_per_s": (given / elapsed, "tok/s"),
            "computed_tokens_per_s": (computed / elapsed, "tok/s"),
            "computed_tokens_share": (computed / given, ""),
            "prefill_tokens_per_s": (prefill, "tok/s"),
            "prefill_rate_share": (computed / elapsed / prefill, ""),
        },
    )


if __name__ == "__main__":
    main()
