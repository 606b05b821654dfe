"""256 requests at once: prompts and outputs of 100 to 1024 tokens, drawn uniformly (133,966 output tokens in all).

    python -m benchmarks.throughput --model qwen3-0.6b
    python -m benchmarks.throughput --model llama-3-8b --int4 --repeats 1
    python -m benchmarks.throughput --model llama-3-8b --order shortest --also "--parts 32 --calls 16"
    python benchmarks/throughput.py --engine vllm --model FOLDER        (or nanovllm; no jaxinfer needed)

The workload is nano-vllm's. Which engine runs it is a matter of one import; all three have the same `LLM`.
`benchmarks.serving` measures latencies under load: here nobody reads along. jaxinfer decodes those with most to come
first (`decode_order="longest"`), so that all end together; short answers then come late, and their time per output
token doubles. `--order shortest` decodes everybody at once, as the other engines do. `--also` runs further engines of
other sizes over the same loaded model.
"""

import argparse
import collections
import importlib
import pathlib
import random
import shlex
import sys
import time
from collections.abc import Iterable
from typing import Any

SIZES = {"calls": 8, "parts": 16, "chunk": None}
"""Of jaxinfer's engine, by default; records name others."""
MODULES = {"jaxinfer": "benchmarks.llm", "vllm": "vllm", "nanovllm": "nanovllm"}


def workload(num_requests: int, longest: int, largest_id: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of output tokens."""
    rng = random.Random(0)
    low = min(100, longest)
    prompts = [[rng.randint(0, largest_id) for _ in range(rng.randint(low, longest))] for _ in range(num_requests)]
    return prompts, [rng.randint(low, longest) for _ in range(num_requests)]


def options_for(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each engine needs beside the model."""
    engine, longest, batch, parts = arguments.engine, arguments.longest, arguments.batch, arguments.parts
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
        "prefill_lengths": tuple(max(arguments.tile, longest << n) for n in range(arguments.calls.bit_length())),
        "decode_stall_tokens": 256 * longest,  # throughput, not latency: prompts first
        # Longest first, no step has few rows; otherwise there are ever fewer, and what a step has too many is computed.
        "decode_rows": tuple(sorted({max(1, batch * n // parts) for n in _shares(arguments.order, parts)})),
        "decode_order": arguments.order,
        "decode_chunk": arguments.chunk,
        "prefix_cache": False,  # as for vLLM
        "sampling": (ji.SamplingParams(temperature=0.6),),
    }


def _shares(order: str, parts: int) -> Iterable[int]:
    """Numbers of rows that decode programs exist for, in parts of the batch, none below an eighth of it."""
    # Of this workload, longest first, a step has a little more than half of the requests.
    return (parts // 2, parts // 2 + 1, parts) if order == "longest" else range(parts // 8, parts + 1)


def times(engine: Any) -> str:
    """What prompts and decode steps took, by the rows of the programs."""
    config = engine.settings.rules
    spans = collections.defaultdict(list)
    for span in engine._meter.spans:
        size = next((rows for rows in config.decode_rows if rows >= span.rows), 0) if span.kind == "decode" else 0
        spans[size].append(span)
    lines = []
    for size, some in sorted(spans.items(), reverse=True):
        seconds, tokens = sum(span.end - span.start for span in some), sum(span.num_tokens for span in some)
        ms = 1e3 * seconds / (len(some) * (config.decode_chunk if size else 1))
        what = f"{size:4} rows" if size else "prompts "
        lines.append(f"{what} {len(some):4} programs {seconds:7.3f} s {ms:8.3f} ms a step, {tokens} tokens")
    return "\n".join(lines)


def options_parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--calls", type=int, help="jaxinfer: longest prompts that a prefill call has room for")
    parser.add_argument("--parts", type=int, help="jaxinfer: decode programs for every such part of a batch")
    parser.add_argument("--chunk", type=int, help="jaxinfer: steps of a decode program (default: the engine's)")
    parser.add_argument("--also", action="append", default=[], metavar="OPTIONS", help="jaxinfer: and one with these")
    parser.add_argument("--kv", help="jaxinfer: type of the key-value cache, such as int8 (default: the weights')")
    parser.add_argument("--repeats", type=int, default=2, help="the fastest counts; for nanovllm give 1")
    parser.set_defaults(**SIZES)
    parser.add_argument("--timeline", type=pathlib.Path, help="jaxinfer: a picture of the last run")
    parser.add_argument("--results", type=pathlib.Path, help="jaxinfer: folder for the JSON lines")
    return parser


def main() -> None:
    parser = options_parser()
    arguments = parser.parse_args()
    model = run(arguments, arguments.model)
    for more in arguments.also:
        print(f"\nwith {more}", flush=True)
        run(parser.parse_args([*sys.argv[1:], *shlex.split(more)]), model)


def run(arguments: argparse.Namespace, model: Any) -> Any:
    """Runs the workload on a new engine and prints and records what it did. Returns the loaded model."""
    module = importlib.import_module(MODULES[arguments.engine])
    prompts, outputs = workload(arguments.requests, arguments.longest, arguments.largest_id)
    params = [module.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in outputs]
    given: list[Any] = [{"prompt_token_ids": ids} for ids in prompts] if arguments.engine == "vllm" else [*prompts]
    start = time.perf_counter()
    llm = module.LLM(model, **options_for(arguments))
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
        return None
    print(f"{metrics}\n{times(llm.engine)}")
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
        **{name: value for name, value in vars(arguments).items() if name in SIZES and value != SIZES[name]},
    }
    rate = {
        "output_tokens_per_s": (sum(outputs) / fastest, "tok/s"),
        "first_run_tokens_per_s": (sum(outputs) / first, "tok/s"),
    }
    serving.recorder(arguments.results).record(case, rate | serving.latencies(metrics) | serving.peak_memory())
    llm.engine.close()
    return llm.model


if __name__ == "__main__":
    main()
