"""The quality part of `benchmarks.kv_tiers`: windows of text computed through caches of each precision."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer as ji
from benchmarks.harness import Recorder
from benchmarks.kv_pages import Pages, shapes
from jaxinfer import decoder, tiers
from jaxinfer.batch import Limits
from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.quantization.calibration import Calibration
from jaxinfer.quantization.quality import head_of, head_statistics
from jaxinfer.tiers import KVCache, PageTable, TieredKVCache

CHUNK = 64
"""Tokens that a forward pass takes at a time."""


def stretched(config: ModelConfig, context: int) -> ModelConfig:
    """A model of plain RoPE with another context, by YaRN (arXiv 2309.00071) with the paper's constants: untrained."""
    factor = context / config.max_position_embeddings

    def stretch(layer: LayerConfig) -> LayerConfig:
        if layer.rope is None:
            return layer
        if layer.rope.kind != "default":
            raise ValueError(
                f"{config.model_type} has RoPE of kind {layer.rope.kind}; only plain RoPE is stretched here"
            )
        rope = dataclasses.replace(
            layer.rope,
            kind="yarn",
            factor=factor,
            attention_factor=0.1 * math.log(factor) + 1.0,
            original_max_position_embeddings=config.max_position_embeddings,
        )
        return dataclasses.replace(layer, rope=rope)

    return dataclasses.replace(config, layers=tuple(map(stretch, config.layers)), max_position_embeddings=context)


def held_out(model: ji.Model, rows: int, length: int) -> np.ndarray:
    """Windows [rows, tokens] of the bundled text to judge by, one document after the other."""
    if model.tokenizer is None:
        raise SystemExit(f"{model.name} has no tokenizer to read text with")
    text = Calibration.bundled(samples=1, length=length, evaluation_samples=rows)
    return text.windows(model.tokenizer, length).evaluation


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def forward(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    start: jax.Array,
    page_table: PageTable,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache]:
    """Normalised hidden states of the tokens [rows, CHUNK] that come at `start`."""
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    hidden, after = decoder.forward(params, tokens, positions, cache, page_table, config=config, stage="prefill")
    assert after is not None
    return hidden, after


@dataclasses.dataclass(frozen=True)
class Run:
    """Windows [rows, tokens] through a cache of one kind, `CHUNK` tokens at a time."""

    model: ji.Model
    windows: np.ndarray
    kind: str

    def pages(self) -> Pages:
        rows, length = self.windows.shape
        limits = Limits(prefill_chunk=CHUNK, prefill_tokens=rows * CHUNK, decode_chunk=CHUNK)
        return Pages(self.model.config, self.kind, self.model.dtype, rows, length, limits)

    @property
    def cache_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(self.pages().create)))

    def compiled(self) -> Callable[..., Any]:
        """`forward` for it, and the moves of its cache's pages, which their first call then finds compiled."""
        pages = self.pages()
        cache = jax.eval_shape(pages.create)
        if isinstance(cache, TieredKVCache):
            pairs = jax.ShapeDtypeStruct((tiers.MOVED_AT_ONCE[0], 2), jnp.int32)
            for source, target in (("recent", "int8"), ("int8", "int4")):
                tiers.move_pages.lower(cache, pairs, source=source, target=target).compile()
        tokens = jax.ShapeDtypeStruct((len(self.windows), CHUNK), jnp.int32)
        arrays = (tokens, jax.ShapeDtypeStruct((), jnp.int32), shapes(pages.table()))
        return forward.lower(self.model.params, cache, *arrays, config=self.model.config).compile()

    def hidden_states(self, program: Callable[..., Any]) -> jax.Array:
        """[rows, tokens, hidden], normalised."""
        pages = self.pages()
        cache, hidden = pages.create(), []
        for start in range(0, self.windows.shape[1], CHUNK):
            cache, _ = pages.append(cache, CHUNK)
            arrays = (jnp.asarray(self.windows[:, start : start + CHUNK]), jnp.int32(start), pages.table())
            some, cache = program(self.model.params, cache, *arrays)
            hidden.append(some)
        return jnp.concatenate(hidden, axis=1)


def compared(model: ji.Model, windows: np.ndarray, hidden: jax.Array, original: jax.Array) -> list[np.ndarray]:
    """Surprise in nats, divergence from the original, and whether the best token is the same: each [rows, tokens - 1].

    No more logits than of `quality.POSITIONS_AT_ONCE` positions are in memory.
    """
    weight = head_of(model.params)
    parts = head_statistics(hidden, original, weight, weight, jnp.asarray(windows), config=model.config)
    surprise, _, divergence, same, _ = (np.asarray(part).reshape(len(windows), -1) for part in parts)
    return [surprise, divergence, same]


def measure_quality(
    recorder: Recorder, model: ji.Model, case: dict[str, object], windows: np.ndarray, kinds: Sequence[str]
) -> None:
    """Records perplexity and divergence over all positions, and over the last quarter of each window.

    For windows that are longer than its context the model is stretched, which costs it something: `short_perplexity` is
    over the first tokens of each window, as many as it was trained for, `unstretched_perplexity` that of the model as
    it is on the same tokens (with a cache of its dtype).
    """
    rows, length = windows.shape
    context, plain = model.config.max_position_embeddings, str(model.dtype)
    is_stretched = length > context
    tested = dataclasses.replace(model, config=stretched(model.config, length)) if is_stretched else model
    runs = [Run(tested, windows, kind) for kind in dict.fromkeys((plain, *kinds))]
    if is_stretched:
        runs.append(Run(model, windows[:, :context], plain))
        case = case | {"rope": f"yarn, {length / context:g} times"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(Run.compiled, runs))
    shared: dict[str, tuple[float, str]] = {}
    if is_stretched:
        short = runs.pop()
        hidden = short.hidden_states(programs.pop())
        surprise = compared(model, short.windows, hidden, hidden)[0]
        shared = {"unstretched_perplexity": (float(np.exp(surprise.mean())), "")}
    original = None
    for run, program in zip(runs, programs, strict=True):
        hidden = run.hidden_states(program)
        original = hidden if original is None else original
        surprise, divergence, same = compared(tested, windows, hidden, original)
        late = slice(3 * length // 4, None)
        metrics = {
            "cache_bytes_per_token": (run.cache_bytes / windows.size, "B"),
            "perplexity": (float(np.exp(surprise.mean())), ""),
            "kl_mean": (float(divergence.mean()), "nats"),
            "agreement": (float(same.mean()), "of tokens"),
            "late_perplexity": (float(np.exp(surprise[:, late].mean())), ""),
            "late_kl_mean": (float(divergence[:, late].mean()), "nats"),
        }
        if is_stretched:
            metrics["short_perplexity"] = (float(np.exp(surprise[:, : context - 1].mean())), "")
        recorder.record(case | {"kv": run.kind, "windows": rows, "tokens": length}, metrics | shared)
