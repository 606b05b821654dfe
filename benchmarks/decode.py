"""Decoding speed, time to first token and time to readiness, through the same programs that `generate` runs.

    python -m benchmarks.decode --model llama-3-8b --batch 1 16 64 --prompt 128 --output 257 --first-token 128 2048
    python -m benchmarks.decode --model llama-3-8b --ready

`--model` is a shape of `benchmarks/shapes` (random weights made on the device) or anything `jaxinfer.load` takes.
`--ready` measures, in a process of its own, the seconds from start to the end of a first short generation: once with
an empty compilation cache, once with the cache that this left.
"""

import argparse
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
from pallas_kernels.int4_matmul import PackedInt4

SHAPES = ROOT / "shapes"


def load(name: str, dtype: str | None, int4: bool, kv: str | None) -> ji.Model:
    if (SHAPES / name / "config.json").exists():
        return ji.load(SHAPES / name, random_weights=0, dtype=dtype, quantize="int4" if int4 else None, kv_dtype=kv)
    return ji.load(name, dtype=dtype, packed=int4, kv_dtype=kv)


def bytes_per_step(model: ji.Model, batch: int, context: float) -> float:
    """Bytes a decode step must read: every weight once (of an untied embedding only a few rows), and the cache."""
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
    recorder: Recorder, model: ji.Model, name: str, batch: int, prompt: int, output: int, rate: float
) -> None:
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
    recorder.record(case_of(name, model, batch=batch, prompt=prompt, output=output), metrics)


def measure_first_token(recorder: Recorder, model: ji.Model, name: str, batch: int, prompt: int) -> None:
    """From the call of `generate` with token ids to the first token on the host."""
    ids = prompts(model, batch, prompt)
    params = ji.SamplingParams(max_tokens=1, temperature=0.0)
    seconds(lambda: ji.generate(model, ids, params), 2)
    times = seconds(lambda: ji.generate(model, ids, params), 7)
    case = case_of(name, model, batch=batch, prompt=prompt, output=1)
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


def case_of(name: str, model: ji.Model, **sizes: int) -> dict[str, object]:
    packed = isinstance(model.params.layers[0].down, PackedInt4)
    return {"model": name, "weights": "int4" if packed else str(model.dtype), "kv": str(model.cache_dtype), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--int4", action="store_true", help="packed layers: random ones, or a GGUF file's as they are")
    parser.add_argument("--kv", help="dtype of the key-value cache; by default that of the weights")
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=257, help="tokens a sequence; 1 + a multiple of the decode chunk")
    parser.add_argument("--first-token", type=int, nargs="*", default=[], metavar="PROMPT")
    parser.add_argument("--ready", action="store_true")
    parser.add_argument("--generate-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    arguments = parser.parse_args()
    recorder = Recorder("decode", arguments.results) if arguments.results else Recorder("decode")
    if arguments.ready:
        options = (["--dtype", arguments.dtype] if arguments.dtype else []) + (["--int4"] if arguments.int4 else [])
        weights = "int4" if arguments.int4 else arguments.dtype or str(default_dtype())
        measure_ready(recorder, arguments.model, options, weights)
    if not (arguments.batch or arguments.first_token or arguments.generate_once):
        return
    start = time.perf_counter()
    model = load(arguments.model, arguments.dtype, arguments.int4, arguments.kv)
    jax.block_until_ready(model.params)
    print(f"loaded {arguments.model} in {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.generate_once:
        timed_run(model, prompts(model, 1, 128), 33)
        print(f"first generation after {time.perf_counter() - start:.1f} s", flush=True)
        return
    rate = read_rate()
    recorder.record({"device": "memory"}, {"read_tb_per_s": (rate / 1e12, "TB/s")})
    for batch in arguments.batch:
        measure_decode(recorder, model, arguments.model, batch, arguments.prompt, arguments.output, rate)
    for prompt in arguments.first_token:
        measure_first_token(recorder, model, arguments.model, 1, prompt)


if __name__ == "__main__":
    main()
