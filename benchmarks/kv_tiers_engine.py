"""An engine at a long context with each precision of the key-value cache, tiers among them: memory and speed.

    python -m benchmarks.kv_tiers_engine --model qwen3-0.6b --batch 32 --prompt 8192 --output 256

So many requests at once, all of these lengths: their prompts in pieces of 2048 tokens, then decoding. The pools are
those that the engine makes for them. `ms_per_token` is the mean time of a request's output token after its first.
"""

import argparse
import dataclasses
import pathlib
import time

import jax
import numpy as np

import jaxinfer as ji
from benchmarks.decode import load, weights_of
from benchmarks.harness import RESULTS, Recorder
from jaxinfer import tiers


def measure(recorder: Recorder, model: ji.Model, kind: str, case: dict[str, object], prompts: list[list[int]]) -> None:
    """Records what an engine with that kind of cache takes and does."""
    batch, output = len(prompts), int(str(case["output"]))
    greedy = ji.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    config = ji.EngineConfig(
        max_decode_batch=batch,
        max_context=len(prompts[0]) + output,
        prefill_lengths=(min(2048, -(-len(prompts[0]) // 64) * 64),),
        prefill_rows=(1,),
        decode_rows=(batch,),
        prefix_cache=False,
        sampling=(greedy,),
    )
    with ji.Engine(dataclasses.replace(model, kv_dtype=tiers.resolve(kind)), config) as engine:
        engine.warmup(progress=False)
        runner = engine._runner
        assert runner is not None
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.cache))
        engine.reset_metrics()
        start = time.perf_counter()
        outputs = engine.generate(prompts, greedy, progress=False)
        seconds = time.perf_counter() - start
        metrics = engine.metrics()
    assert all(len(one.token_ids) == output for one in outputs)
    assert (metrics.compilations_after_warmup, metrics.preemptions, metrics.pages_owned) == (0, 0, 0), metrics
    recorder.record(
        case | {"kv": kind, "batch": batch, "prompt": len(prompts[0])},
        {
            "pool_gb": (num_bytes / 1e9, "GB"),
            "ms_per_token": (1e3 * metrics.time_per_output_token.mean, "ms"),
            "output_tokens_per_s": (batch * output / seconds, "tok/s"),
            "prefill_share": (metrics.prefill_share, ""),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape of benchmarks/shapes, or what jaxinfer.load takes")
    parser.add_argument("--dtype")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "tiered"], help="as kv_dtype takes them")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    parser.set_defaults(quantize=None, head=None)
    options = parser.parse_args()
    weights = weights_of(options.model, options)
    recorder = Recorder("kv_tiers_engine", options.results)
    model = load(options.model, weights, None)
    prompts = np.random.default_rng(0).integers(0, model.config.num_tokens, (options.batch, options.prompt)).tolist()
    for kind in options.kv:
        case: dict[str, object] = {"model": options.model, "weights": weights.name, "output": options.output}
        measure(recorder, model, kind, case, prompts)


if __name__ == "__main__":
    main()
