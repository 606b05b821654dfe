"""EngineConfig: what a user can set; Settings: what it comes to for one model on one device."""

import bisect
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax

from jaxinfer import kv_cache
from jaxinfer.batch import Limits
from jaxinfer.engine import tiering
from jaxinfer.engine.layout import SamplerLayout, listed
from jaxinfer.engine.rules import DecodeOrder, Policy, Rules
from jaxinfer.engine.tiering import Tiering
from jaxinfer.fields import refuse_unknown
from jaxinfer.memory import free_device_bytes, free_host_bytes, shown_bytes
from jaxinfer.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.tier_pages import TierRules
from jaxinfer.tiers import TieredKV, TierPools
from jaxinfer.tiers import num_bytes as tier_bytes
from pallas_kernels.paged_attention import reads_lengths

CPU_POOL_BYTES = 2 * 2**30
"""Most that a CPU's pool takes by default: zeroing more would delay the first token."""


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of an engine; frozen. None means: chosen for the device, as said in parentheses (GPU; CPU).

    Args:
        max_decode_batch: Sequences in one decode chunk (256; 16).
        max_sequences: Sequences that hold pages at once (`max_decode_batch`). More than that take turns in
            `decode_order`.
        max_context: Longest prompt and output of a request in tokens, without the last (the model's, or what the pool
            holds).
        num_pages: Pages of the pool, the scratch page included (as many as `memory_fraction` allows).
        tier_pages: Of a model with a tiered cache instead: pages of the pools of each tier, scratch pages not counted
            (room for every sequence's newest tokens if that takes no more than half of what `memory_fraction` allows,
            and in older tiers for as many sequences of `max_context` as the rest holds).
        memory_fraction: Share of the free device memory, less room for activations, that the pool takes.
        page_size: Tokens of a page; the GPU's kernels need a multiple of 16.
        max_prefill_tokens: Tokens of prompts computed in one round, padding included (8192; 1024).
        prefill_lengths: Lengths to which pieces of prompts are padded, multiples of 64; longer prompts go in pieces of
            the longest.
        prefill_rows: Numbers of pieces of one length computed in one call.
        prefill_tile: Lay prompts into calls in rows of so many tokens, as many rows as each needs, so that prompts of
            any lengths fill a call. `prefill_lengths` are what calls hold in all, multiples of the tile, and
            `prefill_rows` does not count. It pays where a kernel reads the pages, 128 // (query heads of a KV head)
            tokens at once. By default a row is a piece of its own, padded to its length.
        decode_rows: Numbers of rows that decode programs exist for; the largest is `max_decode_batch`.
        decode_chunk: Decode steps in one program (16; 4): the host admits, stops and streams between chunks. Half as
            many with drafted tokens.
        decode_stall_tokens: Prefill tokens that may pass between two decode chunks while somebody reads along (2048;
            512).
        decode_stall_ms: The same bound in milliseconds, turned into tokens at the prefill rate measured while serving.
        decode_order: Who decodes when there are more sequences than `max_decode_batch`: the shortest first, or the
            earliest, or, for batches that nobody reads along and whose `max_tokens` are not much too large, those with
            most to come ("longest"): all end together, in steps of as few rows as that takes.
        policy: "separate": prefill and decode are two queues with limits of their own. "mixed": one queue in which
            prompts go first and decoding waits for them, as a baseline to measure against.
        prefix_cache: Keep pages of finished sequences and reuse them for prompts that begin the same (yes; not with a
            tiered cache, which refuses True: a sequence's older pages hold what its length has made of them).
        host_pages: Pages of pinned host memory for what the pool evicts: pages of preempted sequences and of the prefix
            cache. They come back when they are asked for and copying is faster than computing their tokens.
        sampling: Examples of what will be asked for; `warmup` compiles for the needs of each. Others compile when they
            come.

    Raises:
        ValueError: an option has the wrong type, is out of range, or is none; it is named, with what was expected.
    """

    max_decode_batch: int | None = None
    max_sequences: int | None = None
    max_context: int | None = None
    num_pages: int | None = None
    tier_pages: TierPools | None = None
    memory_fraction: float = 0.9
    page_size: int = 16
    max_prefill_tokens: int | None = None
    prefill_lengths: tuple[int, ...] | None = None
    prefill_rows: tuple[int, ...] = (1, 4)
    prefill_tile: int | None = None
    decode_rows: tuple[int, ...] | None = None
    decode_chunk: int | None = None
    decode_stall_tokens: int | None = None
    decode_stall_ms: float | None = None
    decode_order: DecodeOrder = "shortest"
    policy: Policy = "separate"
    prefix_cache: bool | None = None
    host_pages: int = 0
    sampling: tuple[SamplingParams, ...] = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))

    def __new__(cls, *_: typing.Any, **options: typing.Any) -> "EngineConfig":
        refuse_unknown(cls, options, "engine option")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name not in ("page_size", "host_pages"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                why = ": page 0 is scratch" if name == "num_pages" else ""
                raise ValueError(f"{name}={value!r}; expected an integer of at least {least}{why}")
            most = _MOST[name] if name in _MOST else 2**31 - 1
            if value > most:
                raise ValueError(f"{name}={value}; expected at most {most}")
        for name in ("prefill_lengths", "prefill_rows", "decode_rows"):
            value = getattr(self, name)
            if value is None and name != "prefill_rows":
                continue
            if not isinstance(value, Sequence) or not _ascends(value):
                raise ValueError(f"{name}={value!r}; expected ascending integers of at least 1")
            object.__setattr__(self, name, tuple(value))
        if not _is_number(self.memory_fraction) or not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction!r}; expected a number in (0, 1]")
        if self.decode_stall_ms is not None and not (
            _is_number(self.decode_stall_ms) and 0 < self.decode_stall_ms < math.inf
        ):
            raise ValueError(f"decode_stall_ms={self.decode_stall_ms!r}; expected a number above 0")
        for name, kind in (("decode_order", DecodeOrder), ("policy", Policy)):
            known = typing.get_args(kind.__value__)
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(known)}")
        if not isinstance(self.prefix_cache, bool | None):
            raise ValueError(f"prefix_cache={self.prefix_cache!r}; expected True or False")
        pools = self.tier_pages
        if pools is not None and not isinstance(pools, TierPools):
            raise ValueError(f"tier_pages={pools!r}; expected jaxinfer.tiers.TierPools(recent, int8, int4, window)")
        for count in () if pools is None else dataclasses.astuple(pools):
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**31:
                raise ValueError(f"tier_pages={pools}; expected integers of at least 0, in pages")
        if self.host_pages and self.prefix_cache is False:
            raise ValueError(f"host_pages={self.host_pages} without prefix_cache, which is what finds them; turn it on")
        examples = (self.sampling,) if isinstance(self.sampling, SamplingParams) else self.sampling
        if not isinstance(examples, Sequence) or not examples:
            raise ValueError(f"sampling={self.sampling!r}; give at least one SamplingParams as an example")
        if not all(isinstance(row, SamplingParams) for row in examples):
            raise ValueError(
                "sampling holds something else than SamplingParams; give examples of what will be asked for"
            )
        object.__setattr__(self, "sampling", tuple(examples))


_INTEGERS = {
    "max_decode_batch": 1,
    "max_sequences": 1,
    "max_context": 1,
    "num_pages": 2,
    "page_size": 1,
    "max_prefill_tokens": 1,
    "prefill_tile": 1,
    "decode_chunk": 1,
    "decode_stall_tokens": 1,
    "host_pages": 0,
}
"""Least values."""
_MOST = {"max_decode_batch": 1 << 16, "page_size": 1 << 16, "decode_chunk": 1 << 12}
"""Most, of those that programs are unrolled or padded to; of the others what fits 32 bits."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ascends(values: Sequence[object]) -> bool:
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return 0 < len(numbers) == len(values) and numbers[0] >= 1 and numbers == sorted(set(numbers))


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration with every value settled."""

    rules: Rules
    num_pages: int
    host_pages: int
    max_context: int
    """Most tokens of a request in the cache: its prompt and all of its output but the last token."""
    prefill_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    page_widths: tuple[int, ...]
    """Widths of page tables that decode programs exist for, ascending; prefill has the last."""
    layouts: tuple[SamplerLayout, ...]
    continues: bool
    """Whether prefill may have to begin behind a cached prefix or an earlier piece: a program of its own."""
    scored: tuple[int, ...]
    """Numbers of listed logprobs of prompts that programs exist for."""
    drafted: tuple[int, ...] = (0,)
    """Numbers of drafted tokens a step that decode programs exist for."""
    prefix_cache: bool = True
    tiers: Tiering | None = None
    """Of a tiered cache: its pools. `num_pages` is all of them then."""
    packed: tuple[tuple[int, int], ...] = ()
    """(rows, tokens of a row) of prefill programs into which pieces are laid row by row, ascending. Empty: a row is a
    piece, and `prefill_rows` and the rules have their sizes."""

    @property
    def rereads(self) -> bool:
        """Whether output may be computed again, after a preemption: the pages do not hold all that may run at once."""
        if self.tiers is not None:
            pools = zip(dataclasses.astuple(self.tiers.pools), dataclasses.astuple(self.tiers.widths), strict=True)
            return any(pool < self.rules.max_sequences * row for pool, row in pools)
        most = self.rules.max_sequences * -(-(self.max_context + self.spare_tokens) // self.rules.page_size)
        return self.num_pages - 1 < most

    @property
    def pool_tokens(self) -> int:
        """Tokens of a request in the cache that the pages hold if it has them all."""
        if self.tiers is not None:
            return self.tiers.longest
        return (self.num_pages - 1) * self.rules.page_size - self.spare_tokens

    @property
    def spare_tokens(self) -> int:
        """Places that a sequence needs in its pages behind the last of its tokens."""
        return self.drafted[-1]


def settle(config: EngineConfig, model: Model, speculation: Speculation | None = None) -> Settings:
    """Chooses what the configuration leaves open. Raises ValueError for a pool that is too small or does not fit, and
    for what does not go with a tiered cache."""
    tiering.check(config, model.kv_dtype, drafts=speculation is not None)
    on_cpu = jax.default_backend() == "cpu"
    batch = config.max_decode_batch or default_decode_batch()
    sequences = config.max_sequences or batch
    tokens = config.max_prefill_tokens or (1024 if on_cpu else 8192)
    # On a GPU a step of 9 to 31 rows takes as long as one of 32: the weights are what is read.
    ladder = _ladder(1, 4, batch) if on_cpu else tuple(sorted({1, min(8, batch), *_ladder(32, 2, batch)}))
    decode_rows = config.decode_rows or ladder
    if decode_rows[-1] < min(batch, sequences):
        raise ValueError(f"decode_rows={decode_rows}: the largest is below max_decode_batch={batch}")
    longest = min(model.config.max_position_embeddings, config.max_context or 2**31)
    lengths = config.prefill_lengths or _prefill_lengths(tokens, on_cpu)
    if config.prefill_lengths is None and config.prefill_tile is None:
        lengths = lengths[: 1 + bisect.bisect_left(lengths, longest)]  # no prompt needs more
    if lengths[0] > tokens:
        raise ValueError(f"max_prefill_tokens={tokens} is below the shortest of prefill_lengths={lengths}")
    lengths = tuple(length for length in lengths if length <= tokens)
    packed = _packed(config.prefill_tile, lengths, drafts=speculation is not None)
    chunk = config.decode_chunk or (4 if on_cpu else 16)
    drafted = (0,) if speculation is None else speculation.policy.lengths(speculation.draft.k)
    spare = drafted[-1]
    # The most that a call computes, of prompts or of scoring; a round may have several.
    most = lengths[-1] * (1 if packed else config.prefill_rows[0])
    call = max(most, min(tokens, Limits.default().prefill_tokens))
    sampled = max(batch * (1 + spare), packed[-1][0] if packed else 0)
    budget = functools.partial(_pool_bytes, model, config.memory_fraction, call, sampled)
    tiers = None
    if isinstance(model.kv_dtype, TieredKV):
        demand = tiering.Demand(sequences, longest, chunk, lengths[-1], tokens)
        tiers = _tiering(config, model, model.kv_dtype, demand, budget)
        num_pages, longest = 1 + tiers.num_pages, tiers.longest
        widths = (max(dataclasses.astuple(tiers.widths)),)
    else:
        num_pages = _num_pages(config, model, speculation, sequences, longest, spare, budget)
        longest = min(longest, (num_pages - 1) * config.page_size - spare)
        widest = -(-(longest + spare) // config.page_size)
        # Where a kernel reads no more pages than a row has, a wide table costs nothing and one program serves all.
        wide = reads_lengths(model.dtype, model.cache_dtype.name, model.config.head_dim, config.page_size)
        widths = (widest,) if wide else _ladder(16, 4, widest)
    if longest < 1:
        raise ValueError(
            f"num_pages={num_pages} of {config.page_size} tokens leave no place for a request beside {spare} drafted "
            "tokens; raise num_pages or memory_fraction, or draft fewer"
        )
    if config.max_context is not None and longest < min(config.max_context, model.config.max_position_embeddings):
        need = f"and {spare} drafted tokens need" if spare else "needs"
        name = "num_pages" if tiers is None else "tier_pages"
        raise ValueError(
            f"max_context={config.max_context} {need} more than the {num_pages} pages of {config.page_size} tokens "
            f"that there are; lower it, or raise {name} or memory_fraction"
        )
    rules = Rules(
        page_size=config.page_size,
        max_sequences=sequences,
        max_decode_batch=min(batch, sequences),
        decode_chunk=chunk,
        max_prefill_tokens=tokens,
        prefill_lengths=_multiples(config.prefill_tile, lengths[-1]) if config.prefill_tile else lengths,
        stall_tokens=config.decode_stall_tokens or (512 if on_cpu else 2048),
        decode_order=config.decode_order,
        policy=config.policy,
        decode_rows=decode_rows,
        two_weights=model.prefill_params is not None,
    )
    layouts = tuple(dict.fromkeys(SamplerLayout.required(row, model.config) for row in config.sampling))
    whole = min(tokens, rules.stall_tokens) if config.policy == "separate" else tokens
    cuts = longest > lengths[-1] or lengths[-1] > whole or config.decode_stall_ms is not None
    wanted = [row.prompt_logprobs for row in config.sampling]
    scored = tuple(sorted({listed(count, model.config) for count in wanted if count is not None}))
    prefix_cache = config.prefix_cache is not False and tiers is None
    return Settings(
        rules,
        num_pages,
        config.host_pages,
        longest,
        config.prefill_rows,
        decode_rows,
        widths,
        layouts,
        prefix_cache or cuts,
        scored,
        drafted,
        prefix_cache,
        tiers,
        packed,
    )


def _num_pages(
    config: EngineConfig,
    model: Model,
    speculation: Speculation | None,
    sequences: int,
    longest: int,
    spare: int,
    budget: Callable[[], int],
) -> int:
    """Pages of the pool, the scratch page included."""
    token_bytes = kv_cache.bytes_per_token(model.config, model.cache_dtype)
    host_bytes = config.host_pages * token_bytes * config.page_size
    if host_bytes > free_host_bytes():
        raise ValueError(
            f"host_pages={config.host_pages} take {shown_bytes(host_bytes)} of host memory, and "
            f"{shown_bytes(free_host_bytes())} are free; lower it"
        )
    page_bytes = (token_bytes + (0 if speculation is None else speculation.draft.bytes_per_token)) * config.page_size
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = min(budget() // page_bytes, 1 + sequences * -(-(longest + spare) // config.page_size))
        if num_pages < 2:
            raise ValueError(
                f"{shown_bytes(budget())} are left for the KV cache, less than a page; use a smaller model"
            )
    elif num_pages * page_bytes > (most := _most_bytes()):
        raise ValueError(
            f"num_pages={num_pages} take {shown_bytes(num_pages * page_bytes)}, and {shown_bytes(most)} are free; "
            f"lower it to at most {most // page_bytes}, or leave it out"
        )
    return num_pages


def _tiering(
    config: EngineConfig, model: Model, kv: TieredKV, demand: tiering.Demand, budget: Callable[[], int]
) -> Tiering:
    """Pools of a tiered cache."""
    tier_rules = TierRules.of(model.config, kv, config.page_size)
    num_bytes = functools.partial(tier_bytes, model.config, page_size=config.page_size, dtype=model.dtype)
    if config.tier_pages is None:
        return tiering.share_out(tier_rules, demand, num_bytes, budget())
    found = tiering.given_pools(tier_rules, demand, config.tier_pages)
    if num_bytes(found.pools) > _most_bytes():
        raise ValueError(
            f"tier_pages={found.pools} take {shown_bytes(num_bytes(found.pools))}, and {shown_bytes(_most_bytes())} "
            "are free; lower them, or leave them out"
        )
    return found


def default_decode_batch() -> int:
    """`max_decode_batch` where the configuration leaves it open."""
    return 16 if jax.default_backend() == "cpu" else 256


def _ladder(first: int, factor: int, last: int) -> tuple[int, ...]:
    """`first` times powers of `factor` as long as they are below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _packed(tile: int | None, lengths: tuple[int, ...], *, drafts: bool) -> tuple[tuple[int, int], ...]:
    """(rows, tokens of a row) of calls of `lengths` tokens, none without a tile."""
    if tile is None:
        return ()
    if drafts:
        raise ValueError(f"prefill_tile={tile} with a draft, whose prompts are computed piece by piece; leave one out")
    if any(length % tile for length in lengths):
        raise ValueError(f"prefill_lengths={lengths}: expected multiples of prefill_tile={tile}")
    return tuple((length // tile, tile) for length in lengths)


def _multiples(of: int, last: int) -> tuple[int, ...]:
    return tuple(range(of, last + of, of))


def _prefill_lengths(max_tokens: int, on_cpu: bool) -> tuple[int, ...]:
    """Powers of two from 64 and, where padding costs more than a program, their halfway points."""
    longest = min(512 if on_cpu else 2048, max_tokens)
    lengths = {min(longest, 64)}
    for power in range(6, longest.bit_length()):
        size = 1 << power
        lengths |= {size, size * 3 // 2} if size >= 128 and not on_cpu else {size}
    return tuple(sorted(length for length in lengths if length <= longest))


def _most_bytes() -> int:
    """Bytes that a pool can have at all."""
    free = free_device_bytes()
    return free_host_bytes() if free is None else free


def _pool_bytes(model: Model, fraction: float, prefill_tokens: int, batch: int) -> int:
    """Bytes that the pool may take, beside prefill and a sampler of `batch` rows."""
    free = free_device_bytes()
    if free is None:
        return int(min(fraction * free_host_bytes() / 2, CPU_POOL_BYTES))
    config = model.config
    widest = 2 * config.intermediate_size + 6 * config.hidden_size + 4 * config.num_heads * config.head_dim
    activations = 2 * prefill_tokens * widest * model.dtype.itemsize
    sampler = 6 * 4 * batch * config.vocab_size
    return max(0, int(fraction * (free - activations - sampler)))
