"""What `jaxinfer.memory_plan` says beside the memory that generating takes, each case in a process of its own.

    python -m benchmarks.memory_plan
    python -m benchmarks.memory_plan --cases llama-3-8b:int4:16:4096

A case is a shape of `benchmarks/shapes`, its weights (a dtype or a plan; random ones), the batch, and the context. The
allocator's peak is that of a process, loading and compiling included, and so is the plan's. Recorded are the peak as
planned by the formula and with XLA's own figures, the measured one, and the relative errors. On a CPU, whose
allocator counts nothing, only the plans are printed.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax

import jaxinfer as ji
from benchmarks.decode import SHAPES, prompts
from benchmarks.harness import ROOT, Recorder
from jaxinfer.quantization.plan import PRESETS

CASES = ("llama-3.2-1b:bfloat16:64:2048", "llama-3-8b:int4:16:4096", "qwen3-0.6b:bfloat16:128:4096")
OUTPUT = 17
"""Tokens a sequence: the first, and one decode chunk."""


def plan(shape: str, weights: str, batch: int, context: int, *, compile: bool) -> ji.MemoryPlan:
    quantize = weights if weights in PRESETS else None
    dtype = "bfloat16" if quantize else weights
    return ji.memory_plan(
        SHAPES / shape,
        batch=batch,
        context=context,
        dtype=dtype,
        quantize=quantize,
        random_weights=True,
        compile=compile,
    )


def peak() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure(case: str, recorder: Recorder) -> None:
    """Plans, loads, generates once, and compares."""
    shape, weights, rows, tokens = case.split(":")
    batch, context = int(rows), int(tokens)
    start = time.perf_counter()
    planned = plan(shape, weights, batch, context, compile=False)
    print(planned)
    print(f"planned in {time.perf_counter() - start:.2f} s", flush=True)
    if peak() is None:
        return
    quantize = weights if weights in PRESETS else None
    dtype = "bfloat16" if quantize else weights
    model = ji.load(SHAPES / shape, random_weights=0, dtype=dtype, quantize=quantize)
    jax.block_until_ready(model.params)
    loaded, in_use = peak(), (jax.devices()[0].memory_stats() or {})["bytes_in_use"]
    ids = prompts(model, batch, context - (OUTPUT - 1))
    ji.generate(
        model, ids, ji.SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True), max_batch_size=batch
    )
    measured = peak()
    assert loaded is not None and measured is not None
    compiled = plan(shape, weights, batch, context, compile=True)
    print(compiled, flush=True)
    print(f"measured: weights {in_use}, peak of loading {loaded}, peak {measured} bytes")
    metrics = {
        "measured_gb": (measured / 1e9, "GB"),
        "weights_gb": (in_use / 1e9, "GB"),
        "load_gb": (loaded / 1e9, "GB"),
    }
    for name, said in (("planned", planned), ("compiled", compiled)):
        metrics[f"{name}_gb"] = (said.peak / 1e9, "GB")
        metrics[f"{name}_error"] = (said.peak / measured - 1, "")
    recorder.record({"model": shape, "weights": weights, "batch": batch, "context": context}, metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, metavar="SHAPE:WEIGHTS:BATCH:CONTEXT")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    arguments = parser.parse_args()
    if arguments.here:
        recorder = Recorder("memory_plan", arguments.results) if arguments.results else Recorder("memory_plan")
        measure(arguments.cases[0], recorder)
        return
    results = [] if arguments.results is None else ["--results", str(arguments.results.absolute())]
    for case in arguments.cases:
        command = [sys.executable, "-m", "benchmarks.memory_plan", "--here", *results, "--cases", case]
        with tempfile.TemporaryDirectory() as cache:  # empty: trying kernels takes memory too
            subprocess.run(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, check=True, cwd=ROOT.parent)


if __name__ == "__main__":
    main()
