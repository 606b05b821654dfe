"""A model's passes by themselves: what a step costs before anything is sampled, judged or kept."""

import collections
import concurrent.futures
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler
from jaxtyping import Array, Int32

import jaxinfer as ji
from jaxinfer import decoder, kv_cache
from jaxinfer.batch import PAGE_SIZE, pages_for
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.speculative.proposer import Draft

NUM_PASSES = 32
"""In one program, as in a decode chunk."""
MORE_CALLS = 4
"""Calls of such a program that follow each other."""


# The cache, of a few pages, is not donated: `profiler.measure` calls the program twice with the same arguments.
@functools.partial(jax.jit, static_argnames=("config", "num_passes"))
def run_passes(
    params: Params,
    cache: PagedKVCache,
    tokens: Int32[Array, "batch width"],
    positions: Int32[Array, "batch width"],
    page_table: Int32[Array, "batch pages"],
    *,
    config: ModelConfig,
    num_passes: int,
) -> tuple[Int32[Array, "batch width"], PagedKVCache]:
    """Passes over the same places, each over the tokens that the one before found most probable."""

    def one(carry: tuple[jax.Array, PagedKVCache], _: None):
        tokens, cache = carry
        hidden, new_cache = decoder.forward(params, tokens, positions, cache, page_table, config=config, stage="decode")
        assert new_cache is not None
        return (jnp.argmax(decoder.logits(params, hidden, config), axis=-1).astype(jnp.int32), new_cache), None

    carry, _ = jax.lax.scan(one, (tokens, cache), None, length=num_passes)
    return carry


class Passes:
    """Passes of `width` tokens a row that follow `place` cached ones, compiled when it is made."""

    def __init__(self, name: str, model: ji.Model, batch: int, width: int, place: int) -> None:
        self.name = name
        num_pages = pages_for(place + width)
        cache = kv_cache.create(model.config, 1 + batch * num_pages, PAGE_SIZE, model.cache_dtype)
        positions = jnp.broadcast_to(place + jnp.arange(width, dtype=jnp.int32)[None, :], (batch, width))
        table = 1 + jnp.arange(batch * num_pages, dtype=jnp.int32).reshape(batch, num_pages)
        self._arguments = (model.params, cache, jnp.zeros((batch, width), jnp.int32), positions, table)
        self._options = {"config": model.config, "num_passes": NUM_PASSES}
        self._layers = len(model.config.layers)
        self._run(MORE_CALLS)

    def seconds(self, repeats: int = 3) -> float:
        """Of one pass. By how much longer more calls take than one: what the host does before the first is not in it,
        as it is not in a step, whose program is sent while the one before it runs."""

        def least(calls: int) -> float:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                self._run(calls)
                times.append(time.perf_counter() - start)
            return min(times)

        return (least(MORE_CALLS) - least(1)) / ((MORE_CALLS - 1) * NUM_PASSES)

    def kernels(self) -> list[str]:
        """Lines that say what a pass consists of on a GPU: kernels, in the order of a layer, and their microseconds."""
        _, timings = profiler.measure(run_passes, aggregate=False)(*self._arguments, **self._options)
        if timings is None:
            return [f"{self.name}: CUPTI saw no kernel"]
        by_name = collections.defaultdict(list)
        for name, milliseconds in timings:
            by_name[name].append(1e3 * milliseconds)
        total = sum(map(sum, by_name.values())) / NUM_PASSES
        lines = [f"{self.name}: {len(timings) / NUM_PASSES:.0f} kernels, {total:.0f} us by themselves"]
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
            in_layer, rest = divmod(len(times), NUM_PASSES * self._layers)
            places = [times[place::in_layer] for place in range(in_layer)] if in_layer and not rest else [times]
            means = ", ".join(f"{statistics.fmean(place):.2f}" for place in places)
            if sum(times) / NUM_PASSES > total / 200:
                lines.append(f"  {name[:44]:44} {len(times) / NUM_PASSES:6.1f} of {means} us")
        return lines

    def _run(self, calls: int) -> None:
        jax.block_until_ready([run_passes(*self._arguments, **self._options) for _ in range(calls)])


class StepPasses:
    """The passes of a step with `k` drafted tokens, compiled when it is made."""

    def __init__(self, target: ji.Model, draft: Draft, batch: int, k: int, place: int) -> None:
        model = _model_of(draft)
        widths = {"verify": (target, k + 1), "draft": (model, 1)}
        if draft.has_own_cache:
            widths["first_draft"] = (model, 2)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            made = {
                name: pool.submit(Passes, f"{name} pass, {width} tokens a row", owner, batch, width, place)
                for name, (owner, width) in widths.items()
            }
        self.k, self.passes = k, {name: future.result() for name, future in made.items()}

    def metrics(self, step: float) -> dict[str, tuple[float, str]]:
        """Times the passes; `step` is the seconds of a whole step. `overhead` is the share of it that is no pass."""
        seconds = {name: passes.seconds() for name, passes in self.passes.items()}
        drafting = seconds.get("first_draft", seconds["draft"]) + (self.k - 1) * seconds["draft"]
        metrics = {f"{name}_pass_ms": (1e3 * value, "ms") for name, value in seconds.items()}
        return metrics | {"overhead": (1.0 - (seconds["verify"] + drafting) / step, "")}

    def kernels(self) -> list[str]:
        """See `Passes.kernels`."""
        return [line for passes in self.passes.values() for line in passes.kernels()]


def _model_of(draft: Draft) -> ji.Model:
    """The model that a draft runs."""
    if isinstance(draft, ji.SelfDraft):
        return dataclasses.replace(draft.model, params=draft.params, config=draft.config)
    assert isinstance(draft, ji.ModelDraft)
    return draft.model
