"""What the host tier is worth: time to the first token of a prompt known on the device, on the host, or no more.

    python -m benchmarks.host_tier --model qwen3-0.6b
    python -m benchmarks.host_tier --model smollm2-135m-instruct --prompt 512

Three prompts of `--prompt` tokens take turns in a pool that holds one of them, so each finds its pages on the host, and
sends as many there. Their pages are computed, because the link is said to be slow; then copied or computed, as the
engine decides by what it has measured (`ttft_decided_ms`); then copied in any case; then one prompt comes twice. The
rate is that of pages which come back while as many leave. `--score` adds what
`Engine.score` makes of 200 pairs of 512 + 32 tokens with 20 shared prefixes, beside `jaxinfer.score`.
"""

import argparse
import pathlib
import time

import numpy as np

import jaxinfer as ji
from benchmarks.decode import load, weights_of
from benchmarks.harness import Recorder, median, seconds
from jaxinfer import kv_cache
from jaxinfer.engine.host_store import MOVES, HostStore

GREEDY = ji.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def first_tokens(engine: ji.Engine, prompts: list[list[int]], turns: int) -> float:
    """Median seconds to the first token of prompts that take turns, the first turn left out."""
    times = []
    for turn in range(1 + turns):
        for prompt in prompts:
            start = time.perf_counter()
            engine.generate([prompt], GREEDY, progress=False)
            if turn:
                times.append(time.perf_counter() - start)
    return median(times)


def tiers(model: ji.Model, length: int, turns: int, recorder: Recorder, case: dict[str, object]) -> None:
    pages = -(-length // 16) + 2
    config = ji.EngineConfig(
        max_decode_batch=1,
        max_context=length + 16,
        num_pages=1 + pages,
        host_pages=4 * pages,
        prefill_rows=(1,),
        prefill_lengths=(64, min(2048, -(-length // 64) * 64)),
        max_prefill_tokens=8192,
        sampling=(GREEDY,),
    )
    prompts = np.random.default_rng(0).integers(0, model.config.num_tokens, (3, length)).tolist()
    with ji.Engine(model, config) as engine:
        engine.warmup(progress=False)
        runner = engine._runner
        assert runner is not None and isinstance(runner.store, HostStore)
        store = runner.store
        measured = store.seconds_a_call
        assert measured is not None
        moved = MOVES * kv_cache.bytes_per_token(model.config, model.cache_dtype) * 16
        store.seconds_a_call = 1e9
        computed = first_tokens(engine, prompts, turns)
        store.seconds_a_call = measured
        before = engine.metrics().pages_restored
        decided = first_tokens(engine, prompts, turns)
        between = engine.metrics().pages_restored
        store.seconds_a_call = 0.0
        restored = first_tokens(engine, prompts, turns)
        known = first_tokens(engine, prompts[:1], 3 * turns)
        metrics = engine.metrics()
        assert metrics.pages_restored - between >= turns * 3 * (pages - 4), metrics
        assert metrics.compilations_after_warmup == 0
    recorder.record(
        case | {"prompt": length},
        {
            "ttft_restored_ms": (1e3 * restored, "ms"),
            "ttft_computed_ms": (1e3 * computed, "ms"),
            "ttft_on_device_ms": (1e3 * known, "ms"),
            "ttft_decided_ms": (1e3 * decided, "ms"),
            "decided_to_restore": (float(between > before), ""),
            "restore_gb_per_s": (moved / measured / 1e9, "GB/s"),
        },
    )


def scoring(model: ji.Model, recorder: Recorder, case: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, model.config.num_tokens, (20, 512)).tolist()
    continuations = rng.integers(0, model.config.num_tokens, (200, 32)).tolist()
    prompts = [prefixes[index % 20] for index in range(200)]
    given = 200 * 544
    with ji.Engine(model, ji.EngineConfig(num_pages=4096, max_context=1024)) as engine:
        first = engine.score(prompts, continuations, progress=False)
        reference = ji.score(model, prompts, continuations)
        worst = max(abs(one.logprob - other.logprob) for one, other in zip(first, reference, strict=True))
        kept = median(seconds(lambda: engine.score(prompts, continuations, progress=False), 3))
    plain = median(seconds(lambda: ji.score(model, prompts, continuations), 3))
    recorder.record(
        case | {"pairs": 200, "prefixes": 20},
        {
            "score_kept_prefixes_tokens_per_s": (given / kept, "tok/s"),
            "score_tokens_per_s": (given / plain, "tok/s"),
            "largest_difference": (worst, ""),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape of benchmarks/shapes, or what jaxinfer.load takes")
    parser.add_argument("--dtype")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--prompt", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    parser.set_defaults(quantize=None, head=None)
    options = parser.parse_args()
    weights = weights_of(options.model, options)
    recorder = Recorder("host_tier", options.results) if options.results else Recorder("host_tier")
    model = load(options.model, weights, None)
    case: dict[str, object] = {"model": options.model, "weights": weights.name, "kv": str(model.cache_dtype)}
    for length in options.prompt:
        tiers(model, length, options.turns, recorder, case)
    if options.score:
        scoring(model, recorder, case)


if __name__ == "__main__":
    main()
