"""What a round of the engine costs the host, without a device: its programs are stand-ins that return at once.

    python -m benchmarks.engine_host --rows 256

The workload is that of `benchmarks.throughput`, in as many rows; every round has news of each for a reader. Time is the
processor time of the thread that drives the engine, so that a busy machine counts less, from the end of the prompts on.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.soak import MODEL
from benchmarks.throughput import workload
from jaxinfer.engine.programs import Size
from jaxinfer.loop import DecodedChunk

PARAMS = ji.SamplingParams(temperature=0.6, ignore_eos=True)
CHUNK = 16
TOKEN = 5
"""What everybody says."""


def stand_in(size: Size) -> Callable[..., Any]:
    """A function with the arguments and results of that program, which computes nothing."""
    if size.kind == "prefill":
        logits = jnp.zeros((size.rows, 1), jnp.float32)
        return lambda params, cache, *batch, context_lengths: (logits, cache)
    steps = 1 if size.kind == "start" else CHUNK
    chunk = DecodedChunk(
        tokens=jnp.full((steps, size.rows), TOKEN, jnp.int32),
        counts=jnp.full(size.rows, steps, jnp.int32),
        failed=jnp.zeros(size.rows, bool),
        logprobs=None,
    )
    if size.kind == "start":
        return lambda logits, state, *rows: (state, chunk)
    if size.kind == "decode":
        return lambda params, cache, state, slots, table: (cache, state, chunk)
    raise ValueError(f"no stand-in for {size}")


def serve(engine: ji.Engine, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int, int]:
    """Seconds of the host in all rounds but the first, which computes the prompts; those rounds, and their rows."""
    for ids, count in zip(prompts, outputs, strict=True):
        engine.submit(ids, dataclasses.replace(PARAMS, max_tokens=count))
    engine.step()
    num_rounds = 0
    start = time.thread_time()
    while engine.has_work:
        engine.step()
        num_rounds += 1
    return time.thread_time() - start, num_rounds, sum(-(-(count - 1) // CHUNK) for count in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    rows = arguments.rows
    with tempfile.TemporaryDirectory() as folder:
        shape = MODEL | {"max_position_embeddings": 4096}
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(shape))
        model = ji.load(folder, random_weights=0, dtype="float32")
    config = ji.EngineConfig(
        max_decode_batch=rows,
        max_context=2048,
        num_pages=1 + 128 * rows,
        max_prefill_tokens=1 << 18,
        prefill_lengths=tuple(range(128, 1152, 128)),
        prefill_rows=(8,),
        decode_rows=(rows,),
        decode_chunk=CHUNK,
        decode_stall_tokens=1 << 18,
        prefix_cache=arguments.prefix_cache,
        sampling=(PARAMS,),
    )
    with ji.Engine(model, config) as engine:
        runner = engine._runner
        assert runner is not None
        made: dict[Size, Callable[..., Any]] = {}
        runner.programs.get = lambda size: made.setdefault(size, made.get(size) or stand_in(size))
        requests = workload(rows, 1024, MODEL["vocab_size"] - 1)
        serve(engine, *requests)
        found = [serve(engine, *requests) for _ in range(arguments.repeats)]
    seconds, num_rounds, num_rows = min(found)
    Recorder("engine_host", arguments.results).record(
        {"rows": rows, "decode_chunk": CHUNK, "prefix_cache": arguments.prefix_cache},
        {
            "us_per_row": (1e6 * seconds / num_rows, "us"),
            "ms_per_round": (1e3 * seconds / num_rounds, "ms"),
            "rows_per_round": (num_rows / num_rounds, ""),
        },
    )


if __name__ == "__main__":
    main()
