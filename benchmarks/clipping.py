"""By which error rounding to nearest clips a group's range: perplexity and KL divergence of int4 for some exponents.

    python -m benchmarks.clipping                     # SmolLM2-135M on 8192 tokens: a quarter of an hour on two cores
    python -m benchmarks.clipping --tokens 1024       # a first try

Every linear weight of the layers is rounded to 4 bits in groups (64, with zero points, as the preset int4 has them),
each group's range clipped for the least sum of |error|^exponent; "none" clips nothing, 2 is the mean square. The
original is the checkpoint decoded to bfloat16, run in float32 as the rounded values are, on the same held-out text as
`benchmarks.quality`.
"""

import argparse
import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.quality import MODEL, name_of
from jaxinfer.params import layer_specs
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.quality import measure
from jaxinfer.quantization.rtn import round_to_nearest
from pallas_kernels.int4_matmul import dequantize

EXPONENTS = ("none", "2", "2.4", "3")


def rounded(original: ji.Model, exponent: str, codes: dict[str, int | bool]) -> ji.Model:
    """The model with the values that the codes of its layers' linear weights stand for."""
    clipping = {"ratios": (1.0,)} if exponent == "none" else {"exponent": float(exponent)}
    layers = []
    for index, layer in enumerate(original.params.layers):
        linear = [field for field, spec in layer_specs(original.config, index).items() if spec.is_linear]
        changed = {field: dequantize(round_to_nearest(getattr(layer, field), **codes, **clipping)) for field in linear}
        layers.append(dataclasses.replace(layer, **changed))
    return dataclasses.replace(original, params=dataclasses.replace(original.params, layers=layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="path or name of the original")
    parser.add_argument("--exponents", nargs="+", default=list(EXPONENTS), help='numbers, or "none"')
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true", help="no zero points")
    parser.add_argument("--tokens", type=int, default=8192, help="to judge by")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("clipping", arguments.results)
    loaded = ji.load(arguments.model, dtype="bfloat16", packed=False)
    if loaded.tokenizer is None:
        raise SystemExit(f"{arguments.model} has no tokenizer to read text with")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loaded.params)
    original = dataclasses.replace(loaded, params=params)
    count = max(1, arguments.tokens // arguments.length)
    texts = Calibration.bundled(samples=1, length=arguments.length, evaluation_samples=count)
    windows = texts.windows(loaded.tokenizer, loaded.config.max_position_embeddings).evaluation
    codes = {"bits": arguments.bits, "group_size": arguments.group_size, "symmetric": arguments.symmetric}
    for exponent in arguments.exponents:
        start = time.perf_counter()
        quality = measure(rounded(original, exponent, codes), original, windows)
        case: dict[str, object] = {"model": name_of(arguments.model), **codes, "exponent": exponent}
        metrics = {
            "perplexity": (quality.perplexity, ""),
            "original_perplexity": (quality.original_perplexity, ""),
            "kl_mean": (quality.kl_mean, "nats"),
            "kl_p99": (quality.kl_p99, "nats"),
        }
        recorder.record({**case, "tokens": quality.num_tokens}, metrics)
        print(f"in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
