"""Runs one batch of requests from prompts to last tokens: prefill in groups, then decode chunk after chunk."""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxinfer import kv_cache, steps
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState, compile_chunk, decode_chunk, first_token
from jaxinfer.model import Model
from jaxinfer.outputs import Delta
from jaxinfer.program import program
from jaxinfer.request import Request
from jaxinfer.sampling_logprobs import Logprob, TokenLogprobs, logprob_tables
from jaxinfer.sampling_state import SamplerVariant, build_sampling_state
from jaxinfer.tiers import KVCache, PageTable, TieredKV, TierTables
from pallas_kernels.paged_attention import reads_lengths

PAGE_SIZE = 16
MIN_PREFILL = 64
"""Shortest prefill bucket; cuDNN attention needs multiples of 64."""
MIN_PAGES = 16
"""Narrowest page table, so that short sequences share one decode program."""


_COMPILED: set[tuple[object, ...]] = set()
"""Shapes whose first batch has been through. Only a hint where to look for compilations that can run side by side."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How work is cut into programs. Tokens per prefill call bound its activations; the chunk bounds how stale the
    host's knowledge (and a stream's text) can be, against one dispatch for each chunk."""

    prefill_chunk: int
    prefill_tokens: int
    decode_chunk: int

    @classmethod
    def default(cls, backend: str | None = None) -> "Limits":
        """Those of this process's backend, or of another one ("cpu", "gpu")."""
        if (backend or jax.default_backend()) == "cpu":
            return cls(prefill_chunk=512, prefill_tokens=1024, decode_chunk=4)
        return cls(prefill_chunk=2048, prefill_tokens=16384, decode_chunk=16)


def bucket(value: int, smallest: int = 1) -> int:
    """The smallest power-of-two multiple of `smallest` that is at least `value`."""
    size = smallest
    while size < value:
        size *= 2
    return size


def pages_for(num_tokens: int) -> int:
    """Width of the page table that holds `num_tokens` tokens a row."""
    return bucket(-(-num_tokens // PAGE_SIZE), MIN_PAGES)


def pool_pages(num_rows: int, num_tokens: int, spare_tokens: int = 0) -> int:
    """Pages of a batch's cache: the scratch page, and `num_tokens` tokens with `spare_tokens` behind them for each row,
    both numbers rounded up to the sizes that programs are compiled for."""
    return 1 + bucket(num_rows) * (pages_for(num_tokens) + -(-spare_tokens // PAGE_SIZE))


def cache_tokens(request: Request) -> int:
    """Places in the cache that a request needs at most: its last token is never appended."""
    return len(request.prompt) + request.max_tokens - 1


@dataclasses.dataclass(frozen=True)
class PrefillGroup:
    """Rows whose prompts go through prefill together, in chunks of `chunk` tokens."""

    rows: tuple[int, ...]
    chunk: int


def plan_prefill(lengths: Sequence[int], limits: Limits) -> list[PrefillGroup]:
    """Groups rows of similar length so that a call has at most `prefill_tokens` tokens, padding included."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[PrefillGroup] = []
    while order:
        chunk = bucket(min(lengths[order[0]], limits.prefill_chunk), MIN_PREFILL)
        # Half the padded size at most is padding: a row that fits a smaller bucket starts a group of its own.
        alike = [row for row in order if bucket(min(lengths[row], limits.prefill_chunk), MIN_PREFILL) == chunk]
        size = max(1, limits.prefill_tokens // chunk)
        taken = alike[: 1 << (size.bit_length() - 1)]
        groups.append(PrefillGroup(tuple(taken), chunk))
        left_out = set(order) - set(taken)
        order = [row for row in order if row in left_out]
    return groups


class Batch:
    """The device state of one batch: cache, page table, decode state. Row r owns pages 1 + r * width onwards."""

    def __init__(self, model: Model, requests: Sequence[Request], limits: Limits, *, spare_tokens: int = 0) -> None:
        """Every row has room for `spare_tokens` behind its last."""
        self.model, self.requests, self.limits = model, list(requests), limits
        self.size = bucket(len(requests))
        padding = self.size - len(requests)
        self.lengths = np.array([len(request.prompt) for request in requests] + [0] * padding, np.int32)
        self.max_tokens = np.array([request.max_tokens for request in requests] + [0] * padding, np.int32)
        self.context_lengths = self.lengths + np.maximum(self.max_tokens - 1, 0)
        self.pools = self._share_out(max(cache_tokens(request) for request in requests), spare_tokens)
        """What tells a cache of this size from others."""
        self._cache: KVCache | None = None

    def _share_out(self, longest: int, spare_tokens: int) -> Hashable:
        """Decides how large the cache is for rows of up to `longest` tokens, and which pages of it are whose."""
        width = pages_for(longest) + -(-spare_tokens // PAGE_SIZE)
        self.page_table = np.zeros((self.size, width), np.int32)
        for row in range(len(self.requests)):
            self.page_table[row] = 1 + row * width + np.arange(width)
        self._device_tables: dict[int, jax.Array] = {}
        self.num_pages = 1 + self.size * width
        return self.num_pages, self.model.cache_dtype

    def _allocate(self) -> KVCache:
        return kv_cache.create(self.model.config, self.num_pages, PAGE_SIZE, self.model.cache_dtype)

    @property
    def cache(self) -> KVCache:
        """The pages of all rows; allocated when they are first asked for."""
        if self._cache is None:
            self._cache = self._allocate()
        return self._cache

    @cache.setter
    def cache(self, cache: KVCache) -> None:
        self._cache = cache

    def _initial_state(self) -> tuple[DecodeState, SamplerVariant]:
        """The state of all rows before their first token."""
        sampling, variant = build_sampling_state(
            [request.params for request in self.requests],
            [request.prompt for request in self.requests],
            vocab_size=self.model.config.vocab_size,
            num_tokens=self.model.config.num_tokens,
            eos_token_ids=self.model.config.eos_token_ids,
            batch_size=self.size,
            seeds=[request.seed for request in self.requests],
            sample_indices=[request.sample_index for request in self.requests],
        )
        stop_width = bucket(max(1, *(len(request.stop_ids) for request in self.requests)))
        stop_ids = np.full((self.size, stop_width), -1, np.int32)
        for row, request in enumerate(self.requests):
            stop_ids[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        zeros = np.zeros(self.size, np.int32)
        # One transfer for all: each costs the host as much as a small program does.
        arrays = jax.device_put(
            {
                "tokens": zeros,
                "positions": self.lengths,
                "num_generated": zeros,
                "max_tokens": self.max_tokens,
                "stop_ids": stop_ids,
                "context_lengths": self.context_lengths,
                "done": np.arange(self.size) >= len(self.requests),
            },
            may_alias=False,  # the state is donated
        )
        return DecodeState(sampling=sampling, **arrays), variant

    def run(self) -> Iterator[Delta]:
        """Generates everything, yielding news of each request as soon as the host has it."""
        shapes = (self.model.config, self.model.dtype, self.size, self.pools)
        if shapes in _COMPILED:
            logits = self._prefill()
            # Built while the device is busy with the prompts.
            state, self.variant = self._initial_state()
        else:
            state, self.variant = self._initial_state()
            # Prefill and decode compile side by side.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                table = self._decode_table(self._reach(self.requests, 1))
                compiled = pool.submit(self._compile_decode, state, table)
                logits = self._prefill()
                compiled.result()
            _COMPILED.add(shapes)
        self.state, first = first_token(logits, state, variant=self.variant)
        waiting = collections.deque([first])
        dispatched = 1
        while running := [request for request in self.requests if not request.finished]:
            # One chunk runs while the one before it is read.
            longest = max(request.max_tokens for request in running)
            while len(waiting) < 2 and dispatched < longest:
                waiting.append(self._dispatch(dispatched))
                dispatched += self.limits.decode_chunk
            yield from self._read(waiting.popleft())

    def _compile_decode(self, state: DecodeState, page_table: PageTable) -> None:
        """Compiles the program of the first decode chunk."""
        if max(request.max_tokens for request in self.requests) == 1:
            return
        compile_chunk(
            self.model.params,
            jax.eval_shape(self._allocate),
            state,
            state.done,
            page_table,
            config=self.model.config,
            variant=self.variant,
            num_steps=self.limits.decode_chunk,
        )

    def _reach(self, running: Sequence[Request], dispatched: int) -> int:
        """Tokens that the longest row has in the cache after the chunk that follows `dispatched` generated tokens."""
        following = dispatched + self.limits.decode_chunk
        return max(len(request.prompt) + min(following, request.max_tokens) - 1 for request in running)

    def _decode_table(self, num_tokens: int) -> PageTable:
        """The page table for decoding: whole where a kernel reads no more than a row has, else as wide as needed."""
        whole = self.page_table.shape[1] * PAGE_SIZE
        model = self.model
        wide = reads_lengths(model.dtype, model.cache_dtype.name, model.config.head_dim, PAGE_SIZE)
        return self._table(whole if wide else num_tokens)

    def _prefill_table(self, rows: np.ndarray, start: int, chunk: int) -> np.ndarray | TierTables:
        """The page table for prefilling a chunk of `rows` (-1: padding) from token `start` on."""
        width = self._table_width(start + chunk)
        return np.where(rows[:, None] >= 0, self.page_table[rows, :width], kv_cache.SCRATCH_PAGE)

    def _table(self, num_tokens: int) -> jax.Array:
        """The page table, as wide as rows of up to `num_tokens` tokens need."""
        width = self._table_width(num_tokens)
        if width not in self._device_tables:
            self._device_tables[width] = jnp.asarray(self.page_table[:, :width])
        return self._device_tables[width]

    def _table_width(self, num_tokens: int) -> int:
        return min(pages_for(num_tokens), self.page_table.shape[1])

    def _dispatch(self, dispatched: int) -> DecodedChunk:
        """Starts the chunk that follows `dispatched` generated tokens."""
        running = [request for request in self.requests if not request.finished]
        active = np.zeros(self.size, bool)
        active[: len(self.requests)] = [not request.finished for request in self.requests]
        self.cache, self.state, chunk = decode_chunk(
            self.model.params,
            self.cache,
            self.state,
            active,
            self._decode_table(self._reach(running, dispatched)),
            config=self.model.config,
            variant=self.variant,
            num_steps=self.limits.decode_chunk,
        )
        return chunk

    def _read(self, chunk: DecodedChunk) -> Iterator[Delta]:
        """Waits for a chunk and hands each row its tokens."""
        host: DecodedChunk = jax.device_get(chunk)
        for row, request in enumerate(self.requests):
            count = int(host.counts[row])
            tokens = [int(token) for token in host.tokens[:count, row]]
            tables: list[dict[int, Logprob]] = []
            if host.logprobs is not None and request.params.logprobs is not None:
                scores = jax.tree.map(lambda leaf, row=row: leaf[:, row], host.logprobs)
                tables = logprob_tables(tokens, scores, request.params.logprobs)
            delta = request.take(tokens, tables, bool(host.failed[row]))
            if delta is not None:
                yield delta

    def _prefill(self) -> jax.Array:
        """Runs all prompts through the model; returns float32 logits [size, vocab] of their last tokens."""
        groups = plan_prefill([len(request.prompt) for request in self.requests], self.limits)
        if len(groups) == 1 and self.lengths.max() <= groups[0].chunk:
            scored = any(request.params.prompt_logprobs is not None for request in self.requests)
            if self._cache is None and not scored and not isinstance(self.model.kv_dtype, TieredKV):
                return self._begin(groups[0].chunk)
            if groups[0].rows == tuple(range(self.size)):
                return self._prefill_chunk(groups[0], np.arange(self.size, dtype=np.int32), self.lengths, 0)
        whole = jnp.zeros((self.size, self.model.config.vocab_size), jnp.float32)
        for group in groups:
            size = bucket(len(group.rows))
            rows = np.array([*group.rows, *[-1] * (size - len(group.rows))], np.int32)
            lengths = np.where(rows >= 0, self.lengths[rows], 0)
            for start in range(0, int(lengths.max()), group.chunk):
                here = np.clip(lengths - start, 0, group.chunk).astype(np.int32)
                logits = self._prefill_chunk(group, rows, here, start)
                # Rows that end in this chunk keep its logits; the others' go to a row that does not exist.
                targets = np.where((here > 0) & (start + here == lengths), rows, self.size)
                whole = _scatter_rows(whole, logits, jnp.asarray(targets.astype(np.int32)))
        return whole

    def _begin(self, num_tokens: int) -> jax.Array:
        """Allocates the cache and prefills all prompts, padded to `num_tokens`, in one call."""
        table = self.page_table[:, : self._table_width(num_tokens)]
        rows = np.zeros((self.size, num_tokens + 2 + table.shape[1]), np.int32)
        for row, request in enumerate(self.requests):
            rows[row, : len(request.prompt)] = request.prompt
        rows[:, num_tokens], rows[:, num_tokens + 1] = self.lengths, self.context_lengths
        rows[:, num_tokens + 2 :] = table
        logits, self.cache = _begin(
            self.model.prompt_params,
            rows,
            num_tokens=num_tokens,
            num_pages=self.num_pages,
            cache_dtype=self.model.cache_dtype,
            config=self.model.config,
        )
        return logits

    def _prefill_chunk(self, group: PrefillGroup, rows: np.ndarray, lengths: np.ndarray, start: int) -> jax.Array:
        """One call of the prefill program for tokens `start` to `start + chunk` of a group's rows."""
        chunk = group.chunk
        tokens = np.zeros((len(rows), chunk + 1), np.int32)
        for place, row in enumerate(group.rows):
            piece = self.requests[row].prompt[start : start + chunk + 1]
            tokens[place, : len(piece)] = piece
        page_table = self._prefill_table(rows, start, chunk)
        context_lengths = np.where(rows >= 0, self.context_lengths[rows], 0).astype(np.int32)
        starts = np.where(lengths > 0, start, 0).astype(np.int32)
        # As NumPy arrays: a jitted program brings them to the device in less time than `jax.device_put` takes to start.
        arguments = (tokens[:, :chunk], lengths, starts, page_table)
        options = {"config": self.model.config, "context_lengths": context_lengths, "from_empty": start == 0}
        wanted = [self.requests[row].params.prompt_logprobs for row in group.rows]
        most = max((count for count in wanted if count is not None), default=None)
        if most is None:
            logits, self.cache = steps.outermost_prefill(self.model.prompt_params, self.cache, *arguments, **options)
            return logits
        logits, scores, self.cache = steps.outermost_prefill_scored(
            self.model.prompt_params,
            self.cache,
            *arguments,
            tokens[:, 1:],
            num_logprobs=most,
            **options,
        )
        self._take_prompt_scores(group, jax.device_get(scores), start)
        return logits

    def _take_prompt_scores(self, group: PrefillGroup, scores: TokenLogprobs, start: int) -> None:
        """Keeps the tables of prompt tokens `start` + 1 onwards for the rows that asked for them."""
        for place, row in enumerate(group.rows):
            request = self.requests[row]
            if request.params.prompt_logprobs is None:
                continue
            targets = request.prompt[start + 1 : start + 1 + group.chunk]
            own = jax.tree.map(lambda leaf, place=place: leaf[place], scores)
            request.prompt_tables += logprob_tables(targets, own, request.params.prompt_logprobs)


@program(static_argnames=("num_tokens", "num_pages", "cache_dtype", "config"))
def _begin(
    params: Params,
    rows: Int32[Array, "batch numbers"],
    *,
    num_tokens: int,
    num_pages: int,
    cache_dtype: jnp.dtype,
    config: ModelConfig,
) -> tuple[Float32[Array, "batch vocab"], PagedKVCache]:
    """Logits of the last tokens of whole prompts, and a new cache that holds the prompts.

    One program with one array from the host, as a lone prompt waits for the host as well: each call with a cache's many
    arrays costs it some 0.3 ms, each array that it brings along 0.04. A row's numbers are its tokens, its length, the
    length that it may reach, and its page table.
    """
    tokens, lengths, context_lengths = rows[:, :num_tokens], rows[:, num_tokens], rows[:, num_tokens + 1]
    cache = kv_cache.create(config, num_pages, PAGE_SIZE, cache_dtype)
    arguments = (tokens, lengths, jnp.zeros_like(lengths), rows[:, num_tokens + 2 :])
    return steps.prefill(params, cache, *arguments, config=config, context_lengths=context_lengths, from_empty=True)


@jax.jit
def _scatter_rows(whole: jax.Array, part: jax.Array, targets: jax.Array) -> jax.Array:
    return whole.at[targets].set(part, mode="drop")
