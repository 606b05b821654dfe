"""Whether the plan that sensitivity proposes beats the uniform one of its size, for rounding and for GPTQ.

    python -m benchmarks.sensitivity                               # SmolLM2-135M, 8192 tokens, 113 thousand to judge by
    python -m benchmarks.sensitivity --measured 512 --tokens 4096 --methods rtn       # a first try on a CPU

Measures every weight in int4 with groups of 128, 64 and 32 and in int8, proposes the plan of least loss in the room of
int4 with groups of 64, and judges both on held-out text, as `benchmarks.quality` does. Plans and heat maps are written
beside the results.
"""

import argparse
import dataclasses
import pathlib
import time

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.quality import MODEL, judged, weight_bytes
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.plan import Precision, uniform

GROUPS = (128, 64, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="path or name of the original")
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"], choices=("rtn", "hqq", "gptq"))
    parser.add_argument("--measured", type=int, default=8192, help="tokens that weights are measured on")
    parser.add_argument("--samples", type=int, default=128, help="windows that GPTQ calibrates with")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="to judge by, at most; all there are by default")
    parser.add_argument("--quick", action="store_true", help="measure KL for the coarsest precision only")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("quality", arguments.results)
    original = ji.load(arguments.model, dtype="bfloat16", packed=False)
    rows = max(1, arguments.tokens // arguments.length)
    texts = Calibration.bundled(samples=arguments.samples, length=arguments.length, evaluation_samples=rows)
    windows = texts.windows(original.tokenizer, original.config.max_position_embeddings)
    for method in arguments.methods:
        start = time.perf_counter()
        candidates = [*(Precision(4, group, method=method) for group in GROUPS), Precision(8)]
        found = ji.sensitivity(
            original, windows, precisions=candidates, max_tokens=arguments.measured, quick=arguments.quick
        )
        print(found)
        print(f"measured in {time.perf_counter() - start:.0f} s")
        plain = uniform(f"int4 {method}", Precision(4, 64, method=method))
        joined, apart = (found.propose(plain, joined=joined) for joined in (True, False))
        for name, proposal in (("chosen", joined), ("chosen, separate", apart)):
            print(f"{name}: {proposal}")
        arguments.results.mkdir(parents=True, exist_ok=True)
        joined.save(arguments.results / f"chosen-{method}.toml")
        found.plot(arguments.results / f"sensitivity-{method}.png")
        named = [plain]
        for name, proposal in ((f"chosen {method}", joined), (f"chosen {method}, separate", apart)):
            named.append(dataclasses.replace(proposal.plan, name=name))
        for plan in named:
            model, quality = judged(original, plan, windows)
            print(f"{plan.name}: {quality}")
            recorder.record(
                {"model": pathlib.Path(arguments.model).stem, "plan": plan.name, "tokens": quality.num_tokens},
                {
                    "perplexity": (quality.perplexity, ""),
                    "original_perplexity": (quality.original_perplexity, ""),
                    "kl_mean": (quality.kl_mean, "nats"),
                    "kl_p99": (quality.kl_p99, "nats"),
                    "agreement": (quality.agreement, "of tokens"),
                    "size": (weight_bytes(model) / 1e6, "MB"),
                },
            )
            del model


if __name__ == "__main__":
    main()
