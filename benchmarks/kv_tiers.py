"""What each precision of the key-value cache costs: memory, speed at a long context, and quality.

    python -m benchmarks.kv_tiers speed --batch 8                 # the 8B shape at 32,768 tokens of context
    python -m benchmarks.kv_tiers quality --model smollm2-135m-instruct
    python -m benchmarks.kv_tiers quality --windows 2 --length 32768

Speed: decode steps of a batch whose rows all come to that context, caches filled without a prompt being computed. Time
includes everything that a tiered cache does between chunks of steps. Memory is that of the pools as they are allocated
for these rows, scratch and the room of a prefill call included, over the tokens that they hold.

Quality: perplexity, and KL divergence from the model with a bfloat16 cache, on held-out text in windows, computed
through the cache 64 tokens at a time. What would age later is not seen. Windows of 8192 tokens are as long as the
context of SmolLM2; for longer ones its RoPE is stretched by YaRN, and records say so, with its perplexity before. Two
of 32,768 tokens are of one document, contiguous; a third crosses to the next.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer as ji
from benchmarks.decode import SHAPES
from benchmarks.harness import RESULTS, Recorder
from benchmarks.kv_pages import CACHES, Pages, shapes
from benchmarks.kv_tiers_quality import held_out, measure_quality
from benchmarks.quality import name_of
from jaxinfer import tiers
from jaxinfer.batch import Limits
from jaxinfer.config import ModelConfig
from jaxinfer.loop import DecodeState, decode_chunk
from jaxinfer.sampling_state import SamplerVariant, build_sampling_state
from jaxinfer.tiered_batch import tiered_limits
from jaxinfer.tiers import KVCache, TieredKVCache

UNIT_SCALE = 2.0**-6
"""Of the codes in a cache that was never written: finite logits, or rows would end."""


def greedy_state(config: ModelConfig, rows: int, position: int) -> tuple[DecodeState, SamplerVariant]:
    """Rows that go on for ever from `position`."""
    sampling, variant = build_sampling_state(
        [ji.SamplingParams(temperature=0.0)] * rows,
        [[1]] * rows,
        vocab_size=config.vocab_size,
        num_tokens=config.num_tokens,
        eos_token_ids=(),
    )

    def full(value: int) -> jax.Array:
        return jnp.full(rows, value, jnp.int32)

    state = DecodeState(
        tokens=full(1),
        positions=full(position),
        num_generated=full(1),
        max_tokens=full(1 << 30),
        stop_ids=jnp.full((rows, 1), -1, jnp.int32),
        context_lengths=full(2 * position),
        done=jnp.zeros(rows, bool),
        sampling=sampling,
    )
    return state, variant


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table of speeds."""

    kind: str
    batch: int
    context: int
    chunks: int

    def pages(self, model: ji.Model, limits: Limits) -> Pages:
        return Pages(model.config, self.kind, model.dtype, self.batch, self.context, limits)

    def prompt(self, limits: Limits) -> int:
        """Tokens in the cache before the first chunk."""
        return self.context - (self.chunks + 1) * limits.decode_chunk


def compiled(model: ji.Model, case: Case, limits: Limits) -> Callable[..., Any]:
    """`decode_chunk` for a case."""
    pages = case.pages(model, limits)
    state, variant = greedy_state(model.config, case.batch, case.prompt(limits))
    arguments = (jax.eval_shape(pages.create), *map(shapes, (state, state.done, pages.table())))
    options = {"config": model.config, "variant": variant, "num_steps": limits.decode_chunk}
    return decode_chunk.lower(model.params, *arguments, **options).compile()


def measure_speed(recorder: Recorder, model: ji.Model, case: Case, limits: Limits, program: Any) -> None:
    """Records the time of a decode step, the bytes of the cache, and what a page's move costs."""
    pages = case.pages(model, limits)
    cache = with_scales(pages.create())
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    if isinstance(cache, TieredKVCache):  # compiles the moves
        for source, target, size in itertools.product(("recent", "int8"), ("int8", "int4"), tiers.MOVED_AT_ONCE):
            if source != target:
                nothing = jnp.zeros((size, 2), jnp.int32)
                cache = tiers.move_pages(cache, nothing, source=source, target=target)
        jax.block_until_ready(cache)
    start, moved = time.perf_counter(), 0
    for row in range(case.batch):
        prompt = case.prompt(limits)
        for first in range(0, prompt, limits.prefill_chunk):
            cache, some = pages.append(cache, min(limits.prefill_chunk, prompt - first), [row])
            moved += some
    jax.block_until_ready(cache)
    moving = time.perf_counter() - start
    state, _ = greedy_state(model.config, case.batch, case.prompt(limits))
    active = jnp.ones(case.batch, bool)
    chunk = None
    for index in range(1 + case.chunks):
        if index == 1:
            jax.block_until_ready(state)
            start = time.perf_counter()
        cache, _ = pages.append(cache, limits.decode_chunk)
        cache, state, chunk = program(model.params, cache, state, active, pages.table())
    jax.block_until_ready(state)
    step = (time.perf_counter() - start) / (case.chunks * limits.decode_chunk)
    assert chunk is not None
    assert np.asarray(chunk.counts).tolist() == [limits.decode_chunk] * case.batch
    tokens = case.batch * case.context
    metrics = {
        "ms_per_step": (step * 1e3, "ms"),
        "tokens_per_s": (case.batch / step, "tok/s"),
        "cache_gb": (num_bytes / 1e9, "GB"),
        "cache_bytes_per_token": (num_bytes / tokens, "B"),
        "temporary_gb": (program.memory_analysis().temp_size_in_bytes / 1e9, "GB"),
    }
    if moved:
        metrics["us_per_moved_page"] = (moving / moved * 1e6, "us")
    recorder.record({"kv": case.kind, "batch": case.batch, "context": case.context}, metrics)


def with_scales(cache: KVCache) -> KVCache:
    """A cache never written to, with scales as if it had been."""
    if isinstance(cache, TieredKVCache):
        return cache  # what moves is quantised, and has scales
    ones = [[jnp.full_like(scale, UNIT_SCALE) for scale in scales] for scales in (cache.key_scales, cache.value_scales)]
    return dataclasses.replace(cache, key_scales=ones[0], value_scales=ones[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "quality"))
    parser.add_argument("--model", help="a shape, or for quality a model; default llama-3-8b, smollm2-135m-instruct")
    parser.add_argument("--kv", nargs="+", default=list(CACHES), help="kinds of cache, as kv_dtype takes them")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--chunks", type=int, default=4, help="decode chunks that are timed")
    parser.add_argument("--quantize", metavar="PLAN", help="of the random weights; default bfloat16")
    parser.add_argument("--windows", type=int, default=8, help="of text, for quality")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("kv_tiers", arguments.results)
    if arguments.part == "quality":
        name = arguments.model or "smollm2-135m-instruct"
        model = ji.load(name, packed=False)
        windows = held_out(model, arguments.windows, arguments.length)
        measure_quality(recorder, model, {"model": name_of(name)}, windows, arguments.kv)
        return
    name = arguments.model or "llama-3-8b"
    model = ji.load(SHAPES / name, random_weights=0, quantize=arguments.quantize)
    limits = tiered_limits(Limits.default())
    cases = [
        Case(kind, batch, arguments.context, arguments.chunks) for batch in arguments.batch for kind in arguments.kv
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda case: compiled(model, case, limits), cases))
    for case, program in zip(cases, programs, strict=True):
        measure_speed(recorder, model, case, limits, program)


if __name__ == "__main__":
    main()
