"""A model's passes by themselves: what a step costs before anything is sampled, judged or kept."""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
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


@functools.partial(jax.jit, static_argnames=("config", "num_passes"), donate_argnames="cache")
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

    def __init__(self, model: ji.Model, batch: int, width: int, place: int) -> None:
        num_pages = pages_for(place + width)
        self._config = model.config
        self._cache = kv_cache.create(model.config, 1 + batch * num_pages, PAGE_SIZE, model.cache_dtype)
        self._tokens = jnp.zeros((batch, width), jnp.int32)
        positions = jnp.broadcast_to(place + jnp.arange(width, dtype=jnp.int32)[None, :], (batch, width))
        table = 1 + jnp.arange(batch * num_pages, dtype=jnp.int32).reshape(batch, num_pages)
        self._params, self._places = model.params, (positions, table)
        self._run()

    def seconds(self, repeats: int = 3) -> float:
        """Of one pass: the least of some runs."""
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._run()
            times.append((time.perf_counter() - start) / NUM_PASSES)
        return min(times)

    def _run(self) -> None:
        self._tokens, self._cache = run_passes(
            self._params, self._cache, self._tokens, *self._places, config=self._config, num_passes=NUM_PASSES
        )
        jax.block_until_ready(self._tokens)


@dataclasses.dataclass(frozen=True)
class StepPasses:
    """Seconds of the passes that a step with `k` drafted tokens consists of, and of a plain step's."""

    k: int
    plain: float
    draft: float
    verify: float

    def metrics(self, step: float) -> dict[str, tuple[float, str]]:
        """Values and units for a record; `step` is the seconds of a whole step."""
        return {
            "plain_pass_ms": (1e3 * self.plain, "ms"),
            "draft_pass_ms": (1e3 * self.draft, "ms"),
            "verify_pass_ms": (1e3 * self.verify, "ms"),
            "verify_cost": (self.verify / self.plain, ""),
            "overhead": (1.0 - (self.verify + self.k * self.draft) / step, ""),
        }


def of_step(target: ji.Model, draft: Draft, batch: int, lengths: Sequence[int], place: int) -> dict[int, StepPasses]:
    """The passes of steps with these numbers of drafted tokens, compiled side by side and timed one by one."""
    widths = sorted({1, *(length + 1 for length in lengths)})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        drafting = pool.submit(Passes, _model_of(draft), batch, 1, place)
        programs = {width: pool.submit(Passes, target, batch, width, place) for width in widths}
    one = drafting.result().seconds()
    seconds = {width: program.result().seconds() for width, program in programs.items()}
    return {length: StepPasses(length, seconds[1], one, seconds[length + 1]) for length in lengths}


def _model_of(draft: Draft) -> ji.Model:
    """The model that a draft runs."""
    if isinstance(draft, ji.SelfDraft):
        return dataclasses.replace(draft.model, params=draft.params, config=draft.config)
    assert isinstance(draft, ji.ModelDraft)
    return draft.model
