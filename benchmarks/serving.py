"""Latencies under load, of one queue and of two, and with a draft.

    python -m benchmarks.serving --model qwen3-8b --policies          three rows: bf16 with a mixed queue; + INT4;
                                                                      + separate queues
    python -m benchmarks.serving --model qwen3-8b --policies --draft qwen3-0.6b
                                                                      a fourth: + speculation
    python -m benchmarks.serving --model qwen3-8b --interference      a 2048-token prompt every second beside readers

`--policies` serves chat-like requests: Poisson arrivals, prompts of up to 2048 tokens most of which are short, answers
of up to 512; `--rows` chooses some of its rows. Shapes have random weights, so a draft's tokens are accepted with a
given probability, whatever the models say: its records say "acceptance": "synthetic". `--interference` compares the
time per output token of readers with and without the long prompts; together with `--policies` it shares their programs.
"""

import argparse
import dataclasses
import gc
import pathlib

import jax
import numpy as np

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.llm import load
from jaxinfer import kv_cache
from jaxinfer.engine.metrics import Latency
from jaxinfer.engine.workload import Arrival, replay
from jaxinfer.speculative.lossy import SyntheticAcceptance
from pallas_kernels.int4_matmul import PackedInt4

ROWS = {"bf16": "mixed", "int4": "mixed", "separate": "separate", "speculation": "speculation"}
"""Rows of the table of `--policies`, and the policy of each. All but the first have packed layers."""
PARAMS = ji.SamplingParams(temperature=0.6, ignore_eos=True)


def config(policy: str, arguments: argparse.Namespace) -> ji.EngineConfig:
    """One configuration for both policies, so that they share their programs, of which there are few."""
    return ji.EngineConfig(
        max_decode_batch=arguments.batch,
        max_context=arguments.longest * 2,
        max_prefill_tokens=arguments.prefill_tokens,
        prefill_lengths=(arguments.longest >> 3, arguments.longest >> 1),
        prefill_rows=(1,),
        decode_rows=(arguments.batch,),
        decode_stall_ms=arguments.stall_ms,
        policy="mixed" if policy == "mixed" else "separate",
        prefix_cache=False,
        sampling=(PARAMS,),
    )


def chat_arrivals(vocab: int, rate: float, seconds: float, longest: int) -> list[Arrival]:
    """Lengths are log-normal, as those of conversations are: median prompt longest / 8, answer longest / 16."""
    rng = np.random.default_rng(0)
    arrivals, now = [], 0.0
    while (now := now + rng.exponential(1 / rate)) < seconds:
        prompt = int(np.clip(rng.lognormal(np.log(longest / 8), 1.0), 4, longest))
        output = int(np.clip(rng.lognormal(np.log(longest / 16), 0.7), 2, longest / 4))
        ids = rng.integers(0, vocab, prompt).tolist()
        arrivals.append(Arrival(now, ids, dataclasses.replace(PARAMS, max_tokens=output)))
    return arrivals


def reading_arrivals(vocab: int, readers: int, seconds: float, longest: int, disturbed: bool) -> list[Arrival]:
    """Readers with short prompts from the start; disturbed: a prompt of `longest` tokens each second, one token out."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(0, vocab, length).tolist()

    long = dataclasses.replace(PARAMS, max_tokens=1)
    arrivals = [Arrival(0.0, ids(64), dataclasses.replace(PARAMS, max_tokens=longest)) for _ in range(readers)]
    if disturbed:
        arrivals += [Arrival(float(second), ids(longest), long) for second in range(1, int(seconds))]
    return arrivals


def serve(
    model: ji.Model,
    policy: str,
    arrivals: list[Arrival],
    arguments: argparse.Namespace,
    draft: ji.Speculation | None = None,
) -> ji.EngineMetrics:
    """Warms up, serves, and frees the memory."""
    with ji.Engine(model, config(policy, arguments), draft=draft) as engine:
        engine.warmup()
        replay(engine, [Arrival(0.0, arrivals[0].prompt, dataclasses.replace(PARAMS, max_tokens=2))])
        engine.reset_metrics()
        replay(engine, arrivals)
        metrics = engine.metrics()
        if arguments.timeline is not None:
            name = f"{arguments.timeline.stem}-{weights_of(model)}-{policy}{arguments.timeline.suffix}"
            engine.plot_timeline(arguments.timeline.with_name(name))
    print(metrics, flush=True)
    return metrics


def weights_of(model: ji.Model) -> str:
    return "int4" if isinstance(model.params.layers[0].down, PackedInt4) else str(model.dtype)


def recorder(folder: pathlib.Path | None) -> Recorder:
    return Recorder("throughput", folder or RESULTS)


def latencies(metrics: ji.EngineMetrics) -> dict[str, tuple[float, str]]:
    def p95(latency: Latency) -> tuple[float, str]:
        return latency.p95 * 1e3, "ms"

    return {
        "tpot_p95_ms": p95(metrics.time_per_output_token),
        "ttft_p95_ms": p95(metrics.time_to_first_token),
        "e2e_p95_ms": p95(metrics.end_to_end),
        "busy_share": (metrics.busy_share, ""),
        "occupancy": (metrics.batch_occupancy, ""),
        "compilations_after_warmup": (metrics.compilations_after_warmup, ""),
    }


def synthetic(arguments: argparse.Namespace) -> ji.Speculation:
    """A draft of the given shape in 4 bits, whose tokens are accepted by chance, under the adaptive policy."""
    draft = ji.ModelDraft(load(arguments.draft, True), arguments.k)
    return ji.Speculation(draft, acceptance=SyntheticAcceptance(arguments.acceptance))


def of_the_draft(metrics: ji.EngineMetrics) -> dict[str, tuple[float, str]]:
    found = metrics.speculation
    if found is None:
        return {}
    drafted = sum(count for length, count in found.steps.items() if length)
    return {
        "accepted_length": (found.mean_accepted_length, ""),
        "tokens_per_step": (found.tokens_per_step, ""),
        "drafted_steps_share": (drafted / max(1, sum(found.steps.values())), ""),
        "draft_s": (found.draft_seconds or 0.0, "s"),
        "verify_s": (found.verify_seconds or 0.0, "s"),
        "catch_up_s": (found.catch_up_seconds, "s"),
    }


def peak_memory() -> dict[str, tuple[float, str]]:
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"peak_gb": (stats["peak_bytes_in_use"] / 1e9, "GB")} if "peak_bytes_in_use" in stats else {}


def memory(model: ji.Model, metrics: ji.EngineMetrics) -> dict[str, tuple[float, str]]:
    """Of weights and pool: the peak of a process that has served other rows before would be theirs."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    page = kv_cache.bytes_per_token(model.config, model.cache_dtype) * ji.EngineConfig.page_size
    return {"weights_gb": (weights / 1e9, "GB"), "pool_gb": (metrics.pages * page / 1e9, "GB")}


def policies(model: ji.Model, rows: list[str], arguments: argparse.Namespace, first: float | None) -> float | None:
    """Some rows, each with its speed-up over the first of all: how much sooner 95 % of the answers are complete.

    Returns the first row's P95 in seconds, `first` where there was one.
    """
    arrivals = chat_arrivals(model.config.num_tokens, arguments.rate, arguments.seconds, arguments.longest)
    for row in rows:
        policy = ROWS[row]
        draft = synthetic(arguments) if policy == "speculation" else None
        metrics = serve(model, policy, arrivals, arguments, draft)
        first = first or metrics.end_to_end.p95
        case = {"model": arguments.model, "weights": weights_of(model), "requests": len(arrivals)}
        case |= {"policy": policy, "rate": arguments.rate, "longest": arguments.longest}
        if draft is not None:
            case |= {"draft": arguments.draft, "k": arguments.k, "acceptance": "synthetic"}
            case |= {"probability": arguments.acceptance}
        found = {
            "output_tokens_per_s": (metrics.output_tokens_per_s, "tok/s"),
            "speed_up": (first / metrics.end_to_end.p95, "times"),
        }
        found |= latencies(metrics) | of_the_draft(metrics) | memory(model, metrics)
        recorder(arguments.results).record(case, found)
    return first


def interference(model: ji.Model, arguments: argparse.Namespace) -> None:
    """The readers' P95 of the time per output token, disturbed over quiet."""
    per_token = {}
    for name, disturbed in (("quiet", False), ("disturbed", True)):
        arrivals = reading_arrivals(
            model.config.num_tokens, arguments.readers, arguments.seconds, arguments.longest, disturbed
        )
        metrics = serve(model, "separate", arrivals, arguments)
        per_token[name] = metrics.time_per_output_token.p95  # one-token requests have none: the readers' alone
        case = {"model": arguments.model, "weights": weights_of(model), "requests": arguments.readers, "policy": name}
        found = {"output_tokens_per_s": (metrics.output_tokens_per_s, "tok/s")} | latencies(metrics)
        if disturbed:
            found["tpot_p95_ratio"] = (per_token["disturbed"] / per_token["quiet"], "times")
        recorder(arguments.results).record(case, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape of benchmarks/shapes, or anything jaxinfer loads")
    parser.add_argument("--policies", action="store_true")
    parser.add_argument("--interference", action="store_true")
    parser.add_argument("--int4", action="store_true", help="packed layers, for --interference")
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals a second, for --policies")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="of --policies")
    parser.add_argument("--draft", help="a shape with the model's vocabulary, for a fourth row of --policies")
    parser.add_argument("--k", type=int, default=4, help="tokens it drafts a step at most")
    parser.add_argument("--acceptance", type=float, default=0.8, help="synthetic: the chance of each drafted token")
    parser.add_argument("--readers", type=int, default=32, help="for --interference")
    parser.add_argument("--seconds", type=float, default=20.0, help="during which requests arrive")
    parser.add_argument("--longest", type=int, default=2048, help="prompt, a multiple of 512")
    parser.add_argument("--batch", type=int, default=128, help="sequences decoded at once")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="of prompts in one round")
    parser.add_argument("--stall-ms", type=float, default=30.0, help="longest that decoding waits for prefill")
    parser.add_argument("--timeline", type=pathlib.Path, help="pictures, named after this one")
    parser.add_argument("--results", type=pathlib.Path, help="folder for the JSON lines")
    arguments = parser.parse_args()
    if not (arguments.policies or arguments.interference):
        parser.error("nothing to measure; give --policies or --interference")
    first = None
    chosen = [row for row in ROWS if row in arguments.rows and (row != "speculation" or arguments.draft)]
    for int4 in (False, True):
        rows = [row for row in chosen if arguments.policies and (row != "bf16") == int4]
        has_readers = arguments.interference and arguments.int4 == int4
        if not (rows or has_readers):
            continue
        model = load(arguments.model, int4)
        if rows:
            first = policies(model, rows, arguments, first)
        if has_readers:
            interference(model, arguments)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
