"""Runs a scoring plan on the device: prefill call after call, the LM head over the scored positions alone."""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer import decoder, kv_cache, steps
from jaxinfer.batch import MIN_PAGES, PAGE_SIZE, Limits, bucket
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.memory import free_device_bytes, free_host_bytes, shown_bytes
from jaxinfer.model import Model
from jaxinfer.program import program
from jaxinfer.scoring_plan import Run, TokenPair, build_forest, rows_for, schedule

POOL_CALLS = 8
"""Calls' worth of tokens that the pool holds at most: enough that rows of like length find each other."""
FEWEST_PAGES = 64
"""Smallest pool: short calls share their programs."""
SHORT_PREFIX = 1024
"""XLA's attention to prefixes below this length is quick enough."""
HEAD_BYTES = 1 << 28
"""Logits in memory at once, about: 523 rows of 128,256 words are enough to keep a GPU's tensor cores busy."""


@program(static_argnames=("config", "head_rows", "from_empty"), donate_argnames="cache")
def prefill_targets(
    params: Params,
    cache: PagedKVCache,
    tokens: Int32[Array, "batch tokens"],
    lengths: Int32[Array, " batch"],
    starts: Int32[Array, " batch"],
    page_table: Int32[Array, "batch pages"],
    context_lengths: Int32[Array, " batch"],
    places: Int32[Array, " targets"],
    targets: Int32[Array, " targets"],
    num_targets: Int32[Array, ""],
    *,
    config: ModelConfig,
    head_rows: int,
    from_empty: bool,
) -> tuple[Float32[Array, " targets"], Bool[Array, " targets"], PagedKVCache]:
    """`steps.prefill` that scores `targets[i]` after the token at `places[i]` = row * tokens + column.

    Returns log-probabilities and whether the target is the most probable of the ids that are not padding, for the first
    `num_targets`; a place may have several targets. The head takes `head_rows` targets at a time, a divisor of the
    room for them, and as many turns as there are targets: neither logits of all places nor those of places that nobody
    asked for are ever computed.
    """
    positions = steps.prefill_positions(lengths, starts, tokens.shape[1])
    hidden, new_cache = decoder.forward(
        params,
        tokens,
        positions,
        cache,
        page_table,
        config=config,
        stage="first" if from_empty else "prefill",
        context_lengths=context_lengths,
    )
    assert new_cache is not None
    flat = hidden.reshape(-1, hidden.shape[-1])

    def turn(index: jax.Array, scores: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logprobs, best = scores
        first = index * head_rows
        here = jax.lax.dynamic_slice_in_dim(places, first, head_rows)
        wanted = jax.lax.dynamic_slice_in_dim(targets, first, head_rows)
        logits = decoder.logits(params, jnp.take(flat, here, axis=0, mode="clip"), config)
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=1, mode="clip")[:, 0]
        some_logprobs = chosen - jax.nn.logsumexp(logits, axis=1)
        some_best = jnp.argmax(logits[:, : config.num_tokens], axis=1).astype(jnp.int32) == wanted
        return (
            jax.lax.dynamic_update_slice_in_dim(logprobs, some_logprobs, first, axis=0),
            jax.lax.dynamic_update_slice_in_dim(best, some_best, first, axis=0),
        )

    with jax.named_scope("score"):
        nothing = (jnp.zeros(places.shape, jnp.float32), jnp.zeros(places.shape, jnp.bool))
        turns = (num_targets + (head_rows - 1)) // head_rows
        logprobs, best = jax.lax.fori_loop(0, turns, turn, nothing)
    return logprobs, best, new_cache


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores of some slots, as they come off the device."""

    slots: np.ndarray
    logprobs: np.ndarray
    """float32; NaN where the model's logits are not finite."""
    best: np.ndarray
    num_computed: int
    """Tokens that the call computed, padding not counted."""


def head_rows_for(config: ModelConfig, num_places: int) -> int:
    """Places that the head takes at a time: a power of two, so that their logits fill `HEAD_BYTES` at most."""
    most = max(1, HEAD_BYTES // (4 * config.vocab_size))
    return min(1 << (most.bit_length() - 1), bucket(num_places))


def row_tokens(num_tokens: int, start: int, *, gpu: bool) -> int:
    """Padded length of a row of tokens from position `start` on: a power of two or three quarters of one.

    On a GPU a multiple of 64, which cuDNN's attention needs. Only of few tokens after a short prefix, where XLA's
    attention costs less than the padding would, a multiple of 16.
    """
    short = 0 < start < SHORT_PREFIX and num_tokens <= 48
    return padded(num_tokens, 64 if gpu and not short else 16)


def padded(size: int, unit: int) -> int:
    """The smallest power of two, or three quarters of one, that is at least `size` and a multiple of `unit`."""
    power = bucket(size, unit)
    less = power * 3 // 4
    return less if less >= size and less % unit == 0 else power


def run_pairs(model: Model, pairs: Sequence[TokenPair], limits: Limits) -> Iterator[Scored]:
    """Scores every continuation token of `pairs`; slot i of the results is the i-th of them, pair after pair.

    Raises ValueError if the longest pair's keys and values do not fit in memory.
    """
    forest = build_forest(rows_for(pairs), model.config, PAGE_SIZE, limits.prefill_chunk)
    num_pages = _num_pages(model, pairs, limits)
    cache = kv_cache.create(model.config, num_pages, PAGE_SIZE, model.cache_dtype)
    width = padded(-(-max(pair.num_inputs for pair in pairs) // PAGE_SIZE), MIN_PAGES)
    waiting: collections.deque[tuple[list[Run], jax.Array, jax.Array]] = collections.deque()
    calls = [call for level in schedule(forest, num_pages, PAGE_SIZE) for call in calls_for(level, limits)]
    _compile_together(model, cache, [Shape.of(model.config, *call) for call in calls], width)
    for runs, size in calls:
        arrays, options = call_arguments(model, runs, size, width)
        logprobs, best, cache = prefill_targets(model.params, cache, *arrays, **options)
        waiting.append((runs, logprobs, best))
        if len(waiting) > 2:  # the device has its next calls while the host reads what the last one gave
            yield read_call(*waiting.popleft())
    while waiting:
        yield read_call(*waiting.popleft())


def _num_pages(model: Model, pairs: Sequence[TokenPair], limits: Limits) -> int:
    """Pages of the pool: as many as all rows take, bounded by memory and by what helps."""
    page_bytes = kv_cache.bytes_per_token(model.config, model.cache_dtype) * PAGE_SIZE
    free = free_device_bytes()
    affordable = (free_host_bytes() if free is None else free) // 2 // page_bytes
    longest = max(range(len(pairs)), key=lambda index: pairs[index].num_inputs)
    necessary = 1 + -(-pairs[longest].num_inputs // PAGE_SIZE)
    if necessary > affordable:
        raise ValueError(
            f"pair {longest} has {pairs[longest].num_inputs + 1} tokens, whose KV cache takes "
            f"{shown_bytes(necessary * page_bytes)} of at most {shown_bytes(affordable * page_bytes)}; shorten it"
        )
    useful = POOL_CALLS * limits.prefill_tokens // PAGE_SIZE
    wanted = min(sum(-(-pair.num_inputs // PAGE_SIZE) for pair in pairs), useful)
    return min(affordable, 1 + bucket(max(wanted, necessary - 1), FEWEST_PAGES))


def calls_for(level: Sequence[Run], limits: Limits) -> Iterator[tuple[list[Run], int]]:
    """Cuts runs into calls of rows alike in length, with the number of tokens a row; longest first.

    The last rows go together, whatever their lengths, if that at most doubles their cost: every further shape is one
    more program to compile.
    """
    gpu = jax.default_backend() == "gpu"
    for from_empty in (True, False):
        rest = [run for run in level if (run.start == 0) == from_empty]
        rest.sort(key=lambda run: (row_tokens(len(run.tokens), run.start, gpu=gpu), len(run.tokens)), reverse=True)
        sizes = [row_tokens(len(run.tokens), run.start, gpu=gpu) for run in rest]
        while rest:
            size = sizes[0]
            rows = 1 << (max(1, limits.prefill_tokens // size).bit_length() - 1)
            taken = min(rows, sizes.count(size))
            if len(rest) <= rows and len(rest) * size <= 2 * sum(sizes):
                taken = len(rest)
            yield rest[:taken], size
            del rest[:taken], sizes[:taken]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What makes a call of `prefill_targets` a program of its own, beside model, cache and the width of the table."""

    rows: int
    size: int
    """Tokens of a row."""
    num_places: int
    head_rows: int
    from_empty: bool

    @classmethod
    def of(cls, config: ModelConfig, runs: Sequence[Run], size: int) -> "Shape":
        """Of a call for rows of `size` tokens."""
        rows = bucket(len(runs))
        # Room for a target a token, so that the number of targets makes no program of its own; of many answers to the
        # same few tokens there are more.
        num_places = max(rows * size, bucket(sum(len(run.targets.places) for run in runs)))
        head_rows = head_rows_for(config, num_places)
        return cls(rows, size, -(-num_places // head_rows) * head_rows, head_rows, runs[0].start == 0)


_COMPILED: set[tuple[object, ...]] = set()
"""What `_compile_together` has seen: only a hint where to look for compilations that can run side by side."""


def _compile_together(model: Model, cache: PagedKVCache, shapes: Sequence[Shape], width: int) -> None:
    """Compiles the programs of several calls in threads, where they would else be compiled one after the other."""
    pools = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache))
    wanted = {(model.config, model.dtype, pools, width, shape): shape for shape in shapes}
    new = [shape for key, shape in wanted.items() if key not in _COMPILED]
    _COMPILED.update(wanted)
    if len(new) < 2:
        return

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def compile_one(shape: Shape) -> None:
        rows = ints(shape.rows)
        batch = (ints(shape.rows, shape.size), rows, rows, ints(shape.rows, width), rows)
        targets = (ints(shape.num_places), ints(shape.num_places), ints())
        pages = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cache)
        options = {"config": model.config, "head_rows": shape.head_rows, "from_empty": shape.from_empty}
        prefill_targets.lower(model.params, pages, *batch, *targets, **options).compile()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, new))


def call_arguments(model: Model, runs: Sequence[Run], size: int, width: int) -> tuple[tuple[jax.Array, ...], dict]:
    """The arrays of one call of `prefill_targets` for rows of `size` tokens, and its static arguments."""
    shape = Shape.of(model.config, runs, size)
    rows = shape.rows
    tokens = np.zeros((rows, size), np.int32)
    lengths, starts, context_lengths = (np.zeros(rows, np.int32) for _ in range(3))
    page_table = np.full((rows, width), kv_cache.SCRATCH_PAGE, np.int32)
    places, targets = (np.zeros(shape.num_places, np.int32) for _ in range(2))
    count = 0
    for row, run in enumerate(runs):
        tokens[row, : len(run.tokens)] = run.tokens
        lengths[row], starts[row], context_lengths[row] = len(run.tokens), run.start, run.context_length
        page_table[row, : len(run.pages)] = run.pages
        following = count + len(run.targets.places)
        places[count:following] = row * size + run.targets.places
        targets[count:following] = run.targets.tokens
        count = following
    # One transfer for all: each costs the host as much as a small program does.
    arrays = jax.device_put(
        (tokens, lengths, starts, page_table, context_lengths, places, targets, np.array(count, np.int32))
    )
    return arrays, {"config": model.config, "head_rows": shape.head_rows, "from_empty": shape.from_empty}


def read_call(runs: Sequence[Run], logprobs: jax.Array, best: jax.Array) -> Scored:
    """Waits for a call's scores."""
    slots = np.concatenate([run.targets.slots for run in runs])
    host_logprobs, host_best = (np.asarray(array)[: len(slots)] for array in jax.device_get((logprobs, best)))
    num_computed = sum(len(run.tokens) for run in runs)
    return Scored(slots, host_logprobs, host_best & ~np.isnan(host_logprobs), num_computed)
