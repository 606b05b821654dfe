"""256 requests at once: prompts and outputs of 100 to 1024 tokens, drawn uniformly (133,966 output tokens in all).

    python -m benchmarks.throughput --model qwen3-0.6b
    python -m benchmarks.throughput --model llama-3-8b --int4 --repeats 1
    python benchmarks/throughput.py --engine vllm --model FOLDER        (or nanovllm; no jaxinfer needed)

The workload is nano-vllm's. Which engine runs it is a matter of one import; all three have the same `LLM`.
`benchmarks.serving` measures latencies under load: here nobody reads along. jaxinfer decodes those with most to come
first (`decode_order="longest"`), so that all end together; short answers then come late, and their time per output
token doubles. `--order shortest` decodes everybody at once, as the other engines do.
"""

import argparse
import importlib
import pathlib
import random
import time
from typing import Any

FINE = range(2, 17)
"""Numbers of rows, in sixteenths of the batch, that decode programs exist for."""
MODULES = {"jaxinfer": "benchmarks.llm", "vllm": "vllm", "nanovllm": "nanovllm"}


def workload(num_requests: int, longest: int, largest_id: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of output tokens."""
    rng = random.Random(0)
    low = min(100, longest)
    prompts = [[rng.randint(0, largest_id) for _ in range(rng.randint(low, longest))] for _ in range(num_requests)]
    return prompts, [rng.randint(low, longest) for _ in range(num_requests)]


def options_for(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each engine needs beside the model."""
    engine, longest, batch, order = arguments.engine, arguments.longest, arguments.batch, arguments.order
    if engine == "vllm":
        options = {"max_model_len": 2 * longest, "load_format": "dummy", "skip_tokenizer_init": True}
        return options | {"enable_prefix_caching": False}  # a repeat must compute its prompts again
    if engine == "nanovllm":
        return {"max_model_len": 2 * longest}
    import jaxinfer as ji  # only if it is what runs

    return {
        "max_model_len": 2 * longest,
        "int4": arguments.int4,
        "kv_dtype": arguments.kv,
        "max_decode_batch": batch,
        "max_prefill_tokens": 256 * longest,  # all prompts in one round, so that few calls are not full
        "prefill_tile": arguments.tile,  # prompts fill calls whatever their lengths: padding is half a tile each
        "prefill_lengths": tuple(max(arguments.tile, longest * rows) for rows in (1, 2, 4, 8)),
        "decode_stall_tokens": 256 * longest,  # throughput, not latency: prompts first
        # Longest first, no step has few rows; otherwise there are ever fewer, and what a step has too many is computed.
        "decode_rows": tuple(sorted({max(1, batch * n // 16) for n in ((8, 16) if order == "longest" else FINE)})),
        "decode_order": order,
        "prefix_cache": False,  # as for vLLM
        "sampling": (ji.SamplingParams(temperature=0.6),),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=MODULES, default="jaxinfer")
    parser.add_argument("--model", required=True)
    parser.add_argument("--int4", action="store_true", help="jaxinfer: packed layers")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024, help="of prompts and of outputs, in tokens")
    parser.add_argument("--largest-id", type=int, default=10000, help="of prompts' tokens; others draw other lengths")
    parser.add_argument("--batch", type=int, default=256, help="jaxinfer: sequences decoded at once")
    parser.add_argument(
        "--order", default="longest", help="jaxinfer: whom it decodes first (EngineConfig.decode_order)"
    )
    parser.add_argument("--tile", type=int, default=32, help="jaxinfer: tokens of a row of a prefill call")
    parser.add_argument("--kv", help="jaxinfer: type of the key-value cache, such as int8 (default: the weights')")
    parser.add_argument("--repeats", type=int, default=2, help="the fastest counts; for nanovllm give 1")
    parser.add_argument("--timeline", type=pathlib.Path, help="jaxinfer: a picture of the last run")
    parser.add_argument("--results", type=pathlib.Path, help="jaxinfer: folder for the JSON lines")
    arguments = parser.parse_args()

    module = importlib.import_module(MODULES[arguments.engine])
    prompts, outputs = workload(arguments.requests, arguments.longest, arguments.largest_id)
    params = [module.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in outputs]
    given: list[Any] = [{"prompt_token_ids": ids} for ids in prompts] if arguments.engine == "vllm" else [*prompts]
    start = time.perf_counter()
    llm = module.LLM(arguments.model, **options_for(arguments))
    short = module.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=16)
    llm.generate(given[:1], [short], use_tqdm=False)
    print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
    first, fastest, metrics = None, float("inf"), None
    for _ in range(arguments.repeats):
        if arguments.engine == "jaxinfer":
            llm.engine.reset_metrics()
        start = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        print(f"{sum(outputs)} output tokens in {seconds:.2f} s: {sum(outputs) / seconds:,.0f} tok/s", flush=True)
        first = first or seconds
        if seconds < fastest and arguments.engine == "jaxinfer":
            metrics = llm.engine.metrics()
        fastest = min(fastest, seconds)
    if metrics is None or first is None:
        return
    print(metrics)
    from benchmarks import serving

    if arguments.timeline is not None:
        llm.engine.plot_timeline(arguments.timeline)
    case = {
        "model": arguments.model,
        "weights": serving.weights_of(llm.model),
        **({} if arguments.kv is None else {"kv": arguments.kv}),
        "requests": arguments.requests,
        "longest": arguments.longest,
        "policy": "all at once",
        "decode_order": llm.engine.config.decode_order,
    }
    rate = {
        "output_tokens_per_s": (sum(outputs) / fastest, "tok/s"),
        "first_run_tokens_per_s": (sum(outputs) / first, "tok/s"),
    }
    serving.recorder(arguments.results).record(case, rate | serving.latencies(metrics) | serving.peak_memory())


if __name__ == "__main__":
    main()
