"""Decoding speed, time to first token and time to readiness, through the same programs that `generate` runs.

    python -m benchmarks.decode --model llama-3-8b --batch 1 16 64 --prompt 128 --output 257 --first-token 128 2048
    python -m benchmarks.decode --model llama-3-8b --int4 --head int8 --batch 1
    python -m benchmarks.decode --model llama-3-8b --quantize seed-mixed --batch 1 16
    python -m benchmarks.decode --model llama-3-8b --ready

`--model` is a shape of `benchmarks/shapes` (random weights made on the device) or anything `jaxinfer.load` takes.
`--ready` measures, in a process of its own, the seconds from start to the end of a first short generation: once with
an empty compilation cache, once with the cache that this left.
"""

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

import jaxinfer as ji
from benchmarks.harness import ROOT, Recorder, median, read_rate, seconds
from jaxinfer import kv_cache
from jaxinfer.batch import Batch, Limits
from jaxinfer.generation import requests_for
from jaxinfer.model import default_dtype
from jaxinfer.quantization.plan import HEAD, Plan, Precision, Rule, resolve

SHAPES = ROOT / "shapes"
HEADS = {"int8": Precision(8), "fp8": Precision(8, method="fp8"), "int4": Precision(4, 128)}


@dataclasses.dataclass(frozen=True)
class Weights:
    """What the options say of weights. `packed`: a GGUF file's codes as they are, not by a plan."""

    dtype: str | None
    plan: Plan | None
    packed: bool

    @property
    def name(self) -> str:
        """As the results have it: "int4", "int4, int8 head", or the dtype."""
        dtype = self.dtype or str(default_dtype())
        return self.plan.name if self.plan is not None else "int4" if self.packed else dtype


def weights_of(name: str, arguments: argparse.Namespace) -> Weights:
    """Raises ValueError for options that do not go together."""
    quantize = "int4" if arguments.int4 else arguments.quantize
    plan = None if quantize is None else resolve(quantize)
    if not (SHAPES / name / "config.json").exists():
        if arguments.head is not None or arguments.quantize is not None:
            raise ValueError("--head and --quantize are for the shapes of benchmarks/shapes; a file has its own codes")
        return Weights(arguments.dtype, None, arguments.int4)
    if arguments.head is not None:
        rules, rest = (), arguments.dtype or str(default_dtype())
        if plan is not None:
            rules, rest = plan.rules, plan.name
        plan = Plan((Rule((HEAD,), HEADS[arguments.head]), *rules), f"{rest}, {arguments.head} head")
    return Weights(arguments.dtype, plan, False)


def load(name: str, weights: Weights, kv: str | None) -> ji.Model:
    """A shape with random weights, whose codes of 4 bits are in groups of 128, or a checkpoint."""
    if (SHAPES / name / "config.json").exists():
        return ji.load(SHAPES / name, random_weights=0, dtype=weights.dtype, quantize=weights.plan, kv_dtype=kv)
    return ji.load(name, dtype=weights.dtype, packed=weights.packed, kv_dtype=kv)


def bytes_per_step(model: ji.Model, batch: int, context: float) -> float:
    """Bytes a decode step must read: every weight once (of an embedding that is no head a few rows), and the cache."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    if model.params.lm_head is not None:
        weights -= model.params.embed_tokens.nbytes
    return weights + batch * context * kv_cache.bytes_per_token(model.config, model.cache_dtype)


def prompts(model: ji.Model, batch: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, model.config.num_tokens, (batch, length)).tolist()


def timed_run(model: ji.Model, ids: list[list[int]], output: int) -> tuple[float, float]:
    """Seconds to the first token of the batch, and seconds for the rest."""
    params = ji.SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    batch = Batch(model, requests_for(model, ids, params), Limits.default())
    start = time.perf_counter()
    first = None
    for _ in batch.run():
        first = first or time.perf_counter()
    end = time.perf_counter()
    assert first is not None
    assert all(len(request.token_ids) == output for request in batch.requests)
    return first - start, end - first


def measure_decode(
    recorder: Recorder, model: ji.Model, case: dict[str, object], batch: int, prompt: int, output: int, rate: float
) -> None:
    """Records speed and peak memory of a batch; `case` names the model and its weights."""
    ids = prompts(model, batch, prompt)
    timed_run(model, ids, output)
    rest = median([timed_run(model, ids, output)[1] for _ in range(3)])
    step = rest / (output - 1)
    stats = jax.devices()[0].memory_stats() or {}
    moved = bytes_per_step(model, batch, prompt + output / 2)
    metrics = {
        "tokens_per_s": (batch / step, "tok/s"),
        "ms_per_step": (step * 1e3, "ms"),
        "gb_per_s": (moved / step / 1e9, "GB/s"),
        "hbm_share": (moved / step / rate, ""),
    }
    if "peak_bytes_in_use" in stats:
        metrics["peak_gb"] = (stats["peak_bytes_in_use"] / 1e9, "GB")
    recorder.record({**case, "batch": batch, "prompt": prompt, "output": output}, metrics)


def measure_first_token(recorder: Recorder, model: ji.Model, case: dict[str, object], batch: int, prompt: int) -> None:
    """From the call of `generate` with token ids to the first token on the host."""
    ids = prompts(model, batch, prompt)
    params = ji.SamplingParams(max_tokens=1, temperature=0.0)
    seconds(lambda: ji.generate(model, ids, params), 5)
    times = seconds(lambda: ji.generate(model, ids, params), 15)
    case = {**case, "batch": batch, "prompt": prompt, "output": 1}
    rate = batch * prompt / median(times)
    recorder.record(case, {"ttft_ms": (median(times) * 1e3, "ms"), "prefill_tokens_per_s": (rate, "tok/s")})


def measure_ready(recorder: Recorder, name: str, options: list[str], weights: str) -> None:
    """Start of a fresh process to the end of its first generation (prompt 128, output 33, batch 1)."""
    command = [sys.executable, "-m", "benchmarks.decode", "--model", name, "--generate-once", *options]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        times = []
        for _ in ("cold", "warm"):
            start = time.perf_counter()
            subprocess.run(command, env=environment, check=True, cwd=ROOT.parent)
            times.append(time.perf_counter() - start)
    case: dict[str, object] = {"model": name, "weights": weights, "batch": 1, "prompt": 128, "output": 33}
    recorder.record(case, {"ready_cold_s": (times[0], "s"), "ready_warm_s": (times[1], "s")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype")
    codes = parser.add_mutually_exclusive_group()
    codes.add_argument("--int4", action="store_true", help="packed layers: random ones, or a GGUF file's as they are")
    codes.add_argument("--quantize", metavar="PLAN", help="random weights of a plan: a preset or a .toml file")
    parser.add_argument(
        "--head", choices=HEADS, help="a head of 8 or 4 bits, where the rest is as the other options say"
    )
    parser.add_argument("--kv", help="dtype of the key-value cache; by default that of the weights")
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=257, help="tokens a sequence; 1 + a multiple of the decode chunk")
    parser.add_argument("--first-token", type=int, nargs="*", default=[], metavar="PROMPT")
    parser.add_argument("--ready", action="store_true")
    parser.add_argument("--generate-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    arguments = parser.parse_args()
    try:
        weights = weights_of(arguments.model, arguments)
    except ValueError as error:
        parser.error(str(error))
    recorder = Recorder("decode", arguments.results) if arguments.results else Recorder("decode")
    if arguments.ready:
        options = ["--int4"] if arguments.int4 else []
        for option in ("dtype", "quantize", "head"):
            value = getattr(arguments, option)
            options += [] if value is None else [f"--{option}", value]
        measure_ready(recorder, arguments.model, options, weights.name)
    if not (arguments.batch or arguments.first_token or arguments.generate_once):
        return
    start = time.perf_counter()
    model = load(arguments.model, weights, arguments.kv)
    jax.block_until_ready(model.params)
    print(f"loaded {arguments.model} in {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.generate_once:
        timed_run(model, prompts(model, 1, 128), 33)
        print(f"first generation after {time.perf_counter() - start:.1f} s", flush=True)
        return
    rate = read_rate()
    recorder.record({"device": "memory"}, {"read_tb_per_s": (rate / 1e12, "TB/s")})
    case: dict[str, object] = {"model": arguments.model, "weights": weights.name, "kv": str(model.cache_dtype)}
    for batch in arguments.batch:
        measure_decode(recorder, model, case, batch, arguments.prompt, arguments.output, rate)
    for prompt in arguments.first_token:
        measure_first_token(recorder, model, case, 1, prompt)


if __name__ == "__main__":
    main()
