"""The engine's own jitted programs: they work on chosen rows ("slots") of one large decode state.

Row numbers are padded to a bucket with the number of slots, which no slot has: reads of it are blank and done, writes
to it are dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.kv_cache import SCRATCH_PAGE, PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState, decode_steps, sample_first
from jaxinfer.program import program
from jaxinfer.sampling_state import LogitBias, MinTokens, Penalties, SamplerVariant, SamplingState
from jaxinfer.tiers import KVCache, PageTable, TieredKVCache

STOP_PLACES = 16
"""Stop ids a slot compares with on the device; the host looks for the others when it reads a chunk."""


@functools.partial(jax.jit, static_argnames=("num_slots", "vocab_size", "layout"))
def blank_state(*, num_slots: int, vocab_size: int, layout: SamplerLayout) -> DecodeState:
    """A state in which every slot is done, with the sampler's parts that `layout` asks for, all without effect."""
    zeros = jnp.zeros(num_slots, jnp.int32)
    variant = layout.variant
    places = (num_slots, layout.places)
    sampling = SamplingState()
    if not variant.greedy:
        sampling = dataclasses.replace(
            sampling, temperature=jnp.zeros(num_slots, jnp.float32), keys=jnp.zeros((num_slots, 2), jnp.uint32)
        )
    if variant.top_k:
        sampling = dataclasses.replace(sampling, top_k=jnp.full(num_slots, vocab_size, jnp.int32))
    if variant.top_p:
        sampling = dataclasses.replace(sampling, top_p=jnp.ones(num_slots, jnp.float32))
    if variant.min_p:
        sampling = dataclasses.replace(sampling, min_p=jnp.zeros(num_slots, jnp.float32))
    if variant.penalties:
        penalties = Penalties(
            presence=jnp.zeros(num_slots, jnp.float32),
            frequency=jnp.zeros(num_slots, jnp.float32),
            repetition=jnp.ones(num_slots, jnp.float32),
            prompt_mask=jnp.zeros((num_slots, vocab_size), bool),
            output_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        )
        sampling = dataclasses.replace(sampling, penalties=penalties)
    if variant.logit_bias:
        bias = LogitBias(ids=jnp.full(places, vocab_size, jnp.int32), values=jnp.zeros(places, jnp.float32))
        sampling = dataclasses.replace(sampling, logit_bias=bias)
    if variant.min_tokens:
        minimum = MinTokens(count=zeros, ids=jnp.full(places, vocab_size, jnp.int32))
        sampling = dataclasses.replace(sampling, min_tokens=minimum)
    return DecodeState(
        tokens=zeros,
        positions=zeros,
        num_generated=zeros,
        max_tokens=zeros,
        stop_ids=jnp.full((num_slots, STOP_PLACES), -1, jnp.int32),
        context_lengths=zeros,
        done=jnp.ones(num_slots, bool),
        sampling=sampling,
    )


@functools.partial(jax.jit, static_argnames="variant", donate_argnames="state")
def start_rows(
    logits: Float32[Array, "rows vocab"],
    state: DecodeState,
    rows: DecodeState,
    sources: Int32[Array, " rows"],
    slots: Int32[Array, " rows"],
    *,
    variant: SamplerVariant,
) -> tuple[DecodeState, DecodedChunk]:
    """Samples the next token of sequences whose prefill has ended, and moves them into their slots.

    Row i continues row `sources[i]` of `logits` (several may continue one) and goes to slot `slots[i]`.
    """
    rows, chunk = sample_first(logits[sources], rows, variant)
    return jax.tree.map(lambda whole, part: whole.at[slots].set(part, mode="drop"), state, rows), chunk


@program(
    static_argnames=("config", "variant", "num_steps"),
    donate_argnames=("cache", "state"),
    rows=lambda params, cache, state, slots, *_: slots.shape[0],
)
def decode_rows(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    slots: Int32[Array, " rows"],
    page_table: PageTable,
    *,
    config: ModelConfig,
    variant: SamplerVariant,
    num_steps: int,
) -> tuple[KVCache, DecodeState, DecodedChunk]:
    """Runs `num_steps` decode steps of the sequences in `slots`; the others stay as they are."""
    part = take_slots(state, slots)
    cache, part, chunk = decode_steps(
        params, cache, part, page_table, config=config, variant=variant, num_steps=num_steps
    )
    return cache, put_slots(state, part, slots), chunk


def take_slots(state: DecodeState, slots: Int32[Array, " rows"]) -> DecodeState:
    """The state of the sequences in `slots`, for use inside a jitted program; padding is done."""
    part: DecodeState = jax.tree.map(lambda whole: whole.at[slots].get(mode="clip"), state)
    return dataclasses.replace(part, done=part.done | (slots >= state.done.shape[0]))


def put_slots(state: DecodeState, part: DecodeState, slots: Int32[Array, " rows"]) -> DecodeState:
    """The whole state with what decode steps change in a row put back."""

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        return whole.at[slots].set(new, mode="drop")

    sampling = state.sampling
    if sampling.penalties is not None and part.sampling.penalties is not None:
        sampling = sampling.with_output_counts(
            put(sampling.penalties.output_counts, part.sampling.penalties.output_counts)
        )
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, part.tokens),
        positions=put(state.positions, part.positions),
        num_generated=put(state.num_generated, part.num_generated),
        done=put(state.done, part.done),
        sampling=sampling,
    )


@functools.partial(jax.jit, donate_argnames="cache")
def copy_pages(cache: PagedKVCache, sources: Int32[Array, " copies"], targets: Int32[Array, " copies"]) -> PagedKVCache:
    """Copies whole pages in all layers. Padding copies the scratch page onto itself."""
    return jax.tree.map(lambda pool: pool.at[targets].set(pool[sources]), cache)


@functools.partial(jax.jit, donate_argnames="cache")
def copy_newest(
    cache: TieredKVCache, *, recent: Int32[Array, "copies 2"], window: Int32[Array, "copies 2"]
) -> TieredKVCache:
    """Copies whole pages, from `[i, 0]` to `[i, 1]`, in the tiers that programs write to. Padding has scratch pages."""

    def copied(store: PagedKVCache, pairs: jax.Array) -> PagedKVCache:
        sources, targets = pairs[:, 0], pairs[:, 1]

        def copy(pool: jax.Array) -> jax.Array:
            beyond = pool.shape[0] + jnp.arange(targets.size, dtype=jnp.int32)
            places = jnp.where(targets == SCRATCH_PAGE, beyond, targets)
            return pool.at[places].set(pool[sources], mode="drop", unique_indices=True)

        return jax.tree.map(copy, store)

    return dataclasses.replace(cache, recent=copied(cache.recent, recent), window=copied(cache.window, window))
