"""What quantising costs in quality: perplexity and KL divergence from the original, each precision beside the others.

    python -m benchmarks.quality                                          # SmolLM2-135M, 113 thousand tokens
    python -m benchmarks.quality --tokens 4096 --samples 8 --plans int4 int4-gptq     # a first try on a CPU

The original is the checkpoint decoded to bfloat16. All are judged on the same held-out text (minutes of a workshop and
verse, `jaxinfer/quantization/texts`); calibrated methods see another, a novel, or `--calibration` files. "Gap closed"
is the share of what int4 by rounding adds to the log of the perplexity that a plan does not add.

Original and quantised layers run side by side in float32 with the values that the codes stand for, one layer at a time:
the same few programs serve every plan. Seconds are for quantising and judging together.
"""

import argparse
import gc
import pathlib
import time

import jax

import jaxinfer as ji
from benchmarks import quality_report
from benchmarks.harness import RESULTS, Recorder
from jaxinfer.quantization.calibration import Calibration, Windows
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.quantization.report import Quality

MODEL = "smollm2-135m-instruct"
PLANS = ("int8", "fp8", "int4", "int4-hqq", "int4-awq", "int4-gptq", "seed-mixed")


def weight_bytes(model: ji.Model) -> int:
    """Of the layers and the head, not of the embedding, which no plan changes."""
    params = model.params
    return sum(leaf.nbytes for leaf in jax.tree.leaves((params.layers, params.lm_head)))


def judged(original: ji.Model, plan: Plan, windows: Windows) -> tuple[ji.Model, Quality]:
    """The original quantised by a plan, and how good it is on the evaluation windows."""
    model = ji.quantize(original, plan, calibration=windows, progress=False)
    assert model.quantization is not None and model.quantization.quality is not None
    return model, model.quantization.quality


def record_quality(
    recorder: Recorder, model: str, plan: Plan, quality: Quality, num_bytes: int, seconds: float
) -> dict[str, float]:
    """One plan's figures, as they are recorded. `num_bytes` are those of the layers and the head."""
    case: dict[str, object] = {"model": name_of(model), "plan": plan.name, "tokens": quality.num_tokens}
    metrics = {
        "perplexity": (quality.perplexity, ""),
        "original_perplexity": (quality.original_perplexity, ""),
        "kl_mean": (quality.kl_mean, "nats"),
        "kl_p99": (quality.kl_p99, "nats"),
        "agreement": (quality.agreement, "of tokens"),
        "size": (num_bytes / 1e6, "MB"),
        "seconds": (seconds, "s"),
    }
    recorder.record(case, metrics)
    return {name: value for name, (value, _) in metrics.items()}


def name_of(model: str) -> str:
    """A model's short name whether it was given by that or as the file that the name is pulled to."""
    return MODEL if pathlib.Path(model).name.startswith("SmolLM2-135M-Instruct.") else pathlib.Path(model).stem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="path or name of the original")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), help="presets, or paths of .toml files")
    parser.add_argument("--calibration", nargs="+", help="text or .jsonl files instead of the bundled novel")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate with")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="to judge by, at most; all there are by default")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("quality", arguments.results)
    original = ji.load(arguments.model, dtype="bfloat16", packed=False)
    if original.tokenizer is None:
        raise SystemExit(f"{arguments.model} has no tokenizer to read text with")
    sizes = {"samples": arguments.samples, "length": arguments.length}
    longest = original.config.max_position_embeddings
    texts = Calibration.bundled(**sizes, evaluation_samples=max(1, arguments.tokens // arguments.length))
    windows = texts.windows(original.tokenizer, longest)
    if arguments.calibration is not None:
        own = Calibration.from_files(arguments.calibration, **sizes).windows(original.tokenizer, longest)
        windows = Windows(own.calibration, windows.evaluation, own.source)
    evaluation = windows.evaluation
    print(f"calibrated with {windows.calibration.size} tokens of {windows.source}, judged on {evaluation.size} tokens")
    plans = [resolve(plan) for plan in arguments.plans]
    measured: dict[str, dict[str, float]] = {}
    for plan in plans:
        start = time.perf_counter()
        model, quality = judged(original, plan, windows)
        seconds = time.perf_counter() - start
        measured[plan.name] = record_quality(recorder, arguments.model, plan, quality, weight_bytes(model), seconds)
        del model
        gc.collect()
    print(f"\n{quality_report.table(measured, weight_bytes(original) / 1e6)}")


if __name__ == "__main__":
    main()
