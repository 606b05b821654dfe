"""Settings: what a configuration comes to for one model on one device."""

import bisect
import dataclasses
import functools
import typing
from collections.abc import Callable

import jax

from jaxinfer import kv_cache
from jaxinfer.batch import Limits
from jaxinfer.engine import tiering
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.layout import SamplerLayout, listed
from jaxinfer.engine.row_width import attention_block_width
from jaxinfer.engine.rules import Rules
from jaxinfer.engine.tiering import Tiering
from jaxinfer.memory import free_device_bytes, free_host_bytes, shown_bytes
from jaxinfer.model import Model
from jaxinfer.speculative.model_draft import ModelDraft
from jaxinfer.speculative.self_draft import SelfDraft
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.tier_pages import TierRules
from jaxinfer.tiers import TieredKV
from jaxinfer.tiers import num_bytes as tier_bytes
from pallas_kernels.paged_attention import reads_lengths

CPU_POOL_BYTES = 2 * 2**30
"""Most that a CPU's pool takes by default: zeroing more would delay the first token."""


class Room(typing.NamedTuple):
    """What a prefill program has room for, into which pieces are laid row by row."""

    rows: int
    """An eighth more than its tokens fill: the last row of a piece may be short, and costs its tokens alone while there
    are rows. Of many prompts shorter than a row a call has all rows before all tokens, and computes padding."""
    tile: int
    """Tokens of a row."""
    tokens: int


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
    row_widths: tuple[int, ...]
    """The same of one row: a short sequence alone may have a faster kernel."""
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
    packed: tuple[Room, ...] = ()
    """Of prefill programs into which pieces are laid row by row, ascending. Empty: a row is a piece, and `prefill_rows`
    and the rules have their sizes."""

    def widths_of(self, rows: int) -> tuple[int, ...]:
        """Widths of the page tables of `rows` rows that decode programs exist for."""
        return self.row_widths if rows == 1 else self.page_widths

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
    sampled = max(batch * (1 + spare), packed[-1].rows if packed else 0)
    budget = functools.partial(_pool_bytes, model, config.memory_fraction, call, sampled)
    tiers = None
    if isinstance(model.kv_dtype, TieredKV):
        demand = tiering.Demand(sequences, longest, chunk, lengths[-1], tokens)
        tiers = _tiering(config, model, model.kv_dtype, demand, budget)
        num_pages, longest = 1 + tiers.num_pages, tiers.longest
        widths = row_widths = (max(dataclasses.astuple(tiers.widths)),)
    else:
        num_pages = _num_pages(config, model, speculation, sequences, longest, spare, budget)
        longest = min(longest, (num_pages - 1) * config.page_size - spare)
        widest = -(-(longest + spare) // config.page_size)
        # Where a kernel reads no more pages than a row has, a wide table costs nothing and one program serves all.
        wide = reads_lengths(model.dtype, model.cache_dtype.name, model.config.head_dim, config.page_size)
        widths = row_widths = (widest,) if wide else _ladder(16, 4, widest)
        if wide and (narrow := _row_width(config, model, speculation, widest)):
            row_widths = tuple(sorted({narrow, widest}))
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
        row_widths,
        layouts,
        prefix_cache or cuts,
        scored,
        drafted,
        prefix_cache,
        tiers,
        packed,
    )


def _row_width(config: EngineConfig, model: Model, speculation: Speculation | None, widest: int) -> int:
    """Pages of the widest table with which a row alone has layers of fewer kernels, in the model or in its draft."""
    both = [(model, model.params)]
    draft = None if speculation is None else speculation.draft
    if isinstance(draft, ModelDraft | SelfDraft):  # a self-draft's pages are the model's
        both.append((draft.model if draft.has_own_cache else model, draft.params))
    return max(
        attention_block_width(params, one.config, one.dtype, config.page_size, widest)
        if one.cache_dtype == one.dtype
        else 0
        for one, params in both
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


def _packed(tile: int | None, lengths: tuple[int, ...], *, drafts: bool) -> tuple[Room, ...]:
    """Of calls of `lengths` tokens, none without a tile. Prompts of eight rows and more find a row for each end."""
    if tile is None:
        return ()
    if drafts:
        raise ValueError(f"prefill_tile={tile} with a draft, whose prompts are computed piece by piece; leave one out")
    if any(length % tile for length in lengths):
        raise ValueError(f"prefill_lengths={lengths}: expected multiples of prefill_tile={tile}")
    return tuple(Room(length // tile + max(1, length // tile // 8), tile, length) for length in lengths)


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
