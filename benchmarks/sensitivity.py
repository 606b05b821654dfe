"""Whether the plan that sensitivity proposes beats the best uniform one of its size: the one rounded by GPTQ.

    python -m benchmarks.sensitivity                               # SmolLM2-135M, 4096 tokens, 113 thousand to judge by
    python -m benchmarks.sensitivity --plan benchmarks/plans/smollm2-135m-int4-room.toml          # a plan made before
    python -m benchmarks.sensitivity --measured 512 --tokens 4096 --methods rtn --quick      # a first try on a CPU

Measures every weight in int4 with groups of 128, 64 and 32 and in int8, rounded to the nearest, and proposes the plan
of least loss in the room of int4 with groups of 64. Each method then makes the plan and its uniform rival of the same
room, and both are judged on the same held-out text, as `benchmarks.quality` does. A table that was measured with
rounding serves GPTQ too: what GPTQ takes off an error is about the same for all weights. Plan and heat map are written
beside the results.
"""

import argparse
import dataclasses
import pathlib
import time

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.quality import MODEL, judged, record_quality, weight_bytes
from jaxinfer.quantization.calibration import Calibration, Windows
from jaxinfer.quantization.plan import Plan, Precision, resolve

CANDIDATES = (Precision(4, 128), Precision(4, 64), Precision(4, 32), Precision(8))
UNIFORM = {"rtn": "int4", "hqq": "int4-hqq", "awq": "int4-awq", "gptq": "int4-gptq"}
"""The rival of each method: a preset with groups of 64."""


def proposed(original: ji.Model, windows: Windows, arguments: argparse.Namespace) -> Plan:
    """Measures, and writes the plan and the heat map."""
    start = time.perf_counter()
    found = ji.sensitivity(
        original, windows, precisions=CANDIDATES, max_tokens=arguments.measured, quick=arguments.quick
    )
    print(found)
    print(f"measured in {time.perf_counter() - start:.0f} s")
    proposal = found.propose("int4")
    print(proposal)
    arguments.results.mkdir(parents=True, exist_ok=True)
    proposal.save(arguments.results / "chosen.toml")
    found.plot(arguments.results / "sensitivity.png")
    return proposal.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="path or name of the original")
    parser.add_argument("--plan", help="a .toml file with the chosen plan: nothing is measured")
    parser.add_argument("--methods", nargs="+", default=["gptq"], choices=UNIFORM, help="that make both plans")
    parser.add_argument("--measured", type=int, default=4096, help="tokens that weights are measured on")
    parser.add_argument("--samples", type=int, default=128, help="windows that GPTQ calibrates with")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="to judge by, at most; all there are by default")
    parser.add_argument("--quick", action="store_true", help="measure KL for the coarsest precision only")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("quality", arguments.results)
    original = ji.load(arguments.model, dtype="bfloat16", packed=False)
    if original.tokenizer is None:
        raise SystemExit(f"{arguments.model} has no tokenizer to read text with")
    rows = max(1, arguments.tokens // arguments.length)
    texts = Calibration.bundled(samples=arguments.samples, length=arguments.length, evaluation_samples=rows)
    windows = texts.windows(original.tokenizer, original.config.max_position_embeddings)
    chosen = proposed(original, windows, arguments) if arguments.plan is None else resolve(arguments.plan)
    for method in arguments.methods:
        rival = resolve(UNIFORM[method])
        found = []
        for plan in (dataclasses.replace(chosen.by_method(method), name=f"chosen-{method}"), rival):
            start = time.perf_counter()
            model, quality = judged(original, plan, windows)
            size = weight_bytes(model)
            print(f"{plan.name}: {size / 1e6:.2f} MB, {quality}")
            record_quality(recorder, arguments.model, plan, quality, size, time.perf_counter() - start)
            found.append((size, quality))
            del model
        (size, quality), (rival_size, rival_quality) = found
        better = size <= rival_size and quality.perplexity < rival_quality.perplexity
        print(f"chosen-{method} {'beats' if better else 'does NOT beat'} {rival.name} of equal size")


if __name__ == "__main__":
    main()
