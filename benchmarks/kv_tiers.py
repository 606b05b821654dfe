"""What each precision of the key-value cache costs: memory, speed at a long context, and quality.

    python -m benchmarks.kv_tiers speed --batch 8                 # the 8B shape at 32,768 tokens of context
    python -m benchmarks.kv_tiers quality --model smollm2-135m-instruct

Speed: decode steps of a batch whose rows all come to that context, caches filled without a prompt being computed. Time
includes everything that a tiered cache does between chunks of steps. Memory is that of the pools as they are allocated
for these rows, scratch and the room of a prefill call included, over the tokens that they hold.

Quality: perplexity, and KL divergence from the model with a bfloat16 cache, on held-out text in windows as long as the
context of SmolLM2 (8192 tokens), computed through the cache 64 tokens at a time. What would age later is not seen.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer as ji
from benchmarks.decode import SHAPES
from benchmarks.harness import RESULTS, Recorder
from jaxinfer import decoder, kv_cache, tiers
from jaxinfer.batch import PAGE_SIZE, Limits, bucket
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.loop import DecodeState, decode_chunk
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.quality import head_statistics
from jaxinfer.sampling_state import SamplerVariant, build_sampling_state
from jaxinfer.tier_pages import TierPages, TierRules
from jaxinfer.tiered_batch import pools_for, tiered_limits
from jaxinfer.tiers import KVCache, PageTable, TieredKV, TieredKVCache

CACHES = ("bfloat16", "int8", "float8_e4m3fn", "int4", "tiered")
CHUNK = 64
"""Tokens that quality's forward passes take at a time."""
UNIT_SCALE = 2.0**-6
"""Of the codes in a cache that was never written: finite logits, or rows would end."""


class Pages:
    """A cache of one kind and the tables of its rows, which all have the same number of tokens."""

    def __init__(self, config: ModelConfig, kind: str, dtype: jnp.dtype, rows: int, num_tokens: int, limits: Limits):
        self.config, self.dtype, self.rows = config, dtype, rows
        self.kv = tiers.resolve(kind)
        if isinstance(self.kv, TieredKV):
            rules = TierRules.of(config, self.kv, PAGE_SIZE)
            self.pools = pools_for(rules, rows, num_tokens, limits)
            self.widths = rules.room(bucket(num_tokens), limits.decode_chunk)
            self.tiers = TierPages(rules, self.pools, rows)
        self.width = -(-num_tokens // PAGE_SIZE)

    def create(self) -> KVCache:
        if isinstance(self.kv, TieredKV):
            return tiers.create(self.config, self.pools, PAGE_SIZE, self.dtype)
        return kv_cache.create(self.config, 1 + self.rows * self.width, PAGE_SIZE, self.kv)

    def table(self) -> PageTable:
        if isinstance(self.kv, TieredKV):
            return jax.tree.map(jnp.asarray, self.tiers.tables(range(self.rows), self.widths))
        return 1 + jnp.arange(self.rows * self.width, dtype=jnp.int32).reshape(self.rows, self.width)

    def append(self, cache: KVCache, count: int, rows: Sequence[int] | None = None) -> tuple[KVCache, int]:
        """Makes room for `count` tokens of each row. Returns the cache and the pages that moved down before."""
        moved = 0
        if isinstance(cache, TieredKVCache):
            for moves in self.tiers.settle():
                moved += int((moves.pages[:, 1] != kv_cache.SCRATCH_PAGE).sum())
                pages = jnp.asarray(moves.pages)
                cache = tiers.move_pages(cache, pages, source=moves.source, target=moves.target)
            for row in range(self.rows) if rows is None else rows:
                self.tiers.append(row, count)
        return cache, moved


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


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


@functools.partial(jax.jit, static_argnames=("config", "from_empty"), donate_argnames="cache")
def forward(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    start: jax.Array,
    page_table: PageTable,
    *,
    config: ModelConfig,
    from_empty: bool,
) -> tuple[jax.Array, KVCache]:
    """Normalised hidden states of the tokens [rows, CHUNK] that come at `start`."""
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    stage = "first" if from_empty else "prefill"
    hidden, after = decoder.forward(params, tokens, positions, cache, page_table, config=config, stage=stage)
    assert after is not None
    return hidden, after


def window_pages(model: ji.Model, windows: np.ndarray, kind: str) -> Pages:
    """A cache of that kind for windows [rows, tokens], of which `CHUNK` tokens are computed at a time."""
    rows, length = windows.shape
    limits = Limits(prefill_chunk=CHUNK, prefill_tokens=rows * CHUNK, decode_chunk=CHUNK)
    return Pages(model.config, kind, model.dtype, rows, length, limits)


def hidden_states(model: ji.Model, windows: np.ndarray, kind: str) -> jax.Array:
    """[rows, tokens, hidden] of windows computed through a cache of that kind."""
    pages = window_pages(model, windows, kind)
    cache, hidden = pages.create(), []
    for start in range(0, windows.shape[1], CHUNK):
        cache, _ = pages.append(cache, CHUNK)
        arrays = (jnp.asarray(windows[:, start : start + CHUNK]), jnp.int32(start), pages.table())
        some, cache = forward(model.params, cache, *arrays, config=model.config, from_empty=start == 0)
        hidden.append(some)
    return jnp.concatenate(hidden, axis=1)


def measure_quality(recorder: Recorder, model: ji.Model, name: str, windows: np.ndarray, kinds: Sequence[str]) -> None:
    """Records perplexity and divergence over all positions, and over the last quarter of each window."""
    params = model.params
    weight = params.embed_tokens if params.lm_head is None else params.lm_head
    original = hidden_states(model, windows, str(model.dtype))
    rows, length = windows.shape
    for kind in kinds:
        hidden = hidden_states(model, windows, kind)
        tokens = jnp.asarray(windows)
        parts = head_statistics(hidden, original, weight, weight, tokens, config=model.config)
        surprise, _, divergence, same = (np.asarray(part).reshape(rows, length - 1) for part in parts)
        late = slice(3 * length // 4, None)
        cache = jax.eval_shape(window_pages(model, windows, kind).create)
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        metrics = {
            "cache_bytes_per_token": (num_bytes / windows.size, "B"),
            "perplexity": (float(np.exp(surprise.mean())), ""),
            "kl_mean": (float(divergence.mean()), "nats"),
            "agreement": (float(same.mean()), "of tokens"),
            "late_perplexity": (float(np.exp(surprise[:, late].mean())), ""),
            "late_kl_mean": (float(divergence[:, late].mean()), "nats"),
        }
        recorder.record({"model": name, "kv": kind, "windows": rows, "tokens": length}, metrics)


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
        length = min(arguments.length, model.config.max_position_embeddings)
        text = Calibration.bundled(samples=1, length=length, evaluation_samples=arguments.windows)
        if model.tokenizer is None:
            raise SystemExit(f"{name} has no tokenizer to read text with")
        windows = text.windows(model.tokenizer, model.config.max_position_embeddings).evaluation
        measure_quality(recorder, model, name, windows, arguments.kv)
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
