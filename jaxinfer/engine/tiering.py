"""How an engine's memory is shared out between the tiers of a cache, and what does not go with tiers."""

import dataclasses
from collections.abc import Callable

from jaxinfer.engine.config import EngineConfig
from jaxinfer.memory import shown_bytes
from jaxinfer.tier_pages import TierRules
from jaxinfer.tiers import TieredKV, TierPools


@dataclasses.dataclass(frozen=True)
class Tiering:
    """Pools of an engine's cache in tiers, for requests of up to `longest` tokens."""

    rules: TierRules
    pools: TierPools
    widths: TierPools
    """Pages of a row at most: widths of page tables."""
    longest: int

    @property
    def num_pages(self) -> int:
        """Of all pools, scratch pages not counted."""
        return sum(dataclasses.astuple(self.pools))


@dataclasses.dataclass(frozen=True)
class Demand:
    """What the pools are for."""

    sequences: int
    longest: int
    """Tokens of a sequence at most."""
    decode_chunk: int
    piece: int
    """Tokens of a sequence that one prefill call computes at most."""
    round_tokens: int
    """Tokens of prompts that a round computes at most."""


def check(config: EngineConfig, kv: object, *, drafts: bool) -> None:
    """Raises ValueError for options that do not go with a tiered cache, or only with one."""
    if not isinstance(kv, TieredKV):
        if config.tier_pages is not None:
            raise ValueError(
                "tier_pages are for a tiered cache: load the model with kv_dtype='tiered', or leave them out"
            )
        return
    if drafts:
        raise ValueError("speculative decoding does not work with a tiered cache: load with kv_dtype='int8', say")
    reasons = {
        "num_pages": "which has a pool for each tier; give tier_pages instead, or leave it out",
        "host_pages": "whose pages stay on the device; leave it out, or load with kv_dtype='int8', say",
        "prefix_cache": "whose pages hold what their sequence's length has made of them; leave it out",
        "prefill_tile": "whose pages move between the pieces of a prompt; leave it out",
    }
    for name, reason in reasons.items():
        value = getattr(config, name)
        if value:
            raise ValueError(f"{name}={value!r} with a tiered cache, {reason}")


def share_out(
    rules: TierRules,
    demand: Demand,
    num_bytes: Callable[[TierPools], int],
    budget: int,
) -> Tiering:
    """Pools within `budget` bytes. Every sequence gets room for its newest tokens if that takes no more than half, and
    older tiers have the rest: as many whole sequences as that holds.

    Raises ValueError if not even a sequence of one token fits; a sequence that is too long makes `longest` less.
    """
    appended = max(demand.decode_chunk, demand.piece)
    longest = _largest(demand.longest, lambda tokens: num_bytes(rules.room(tokens, appended)) <= budget)
    if longest < 1:
        raise ValueError(f"{shown_bytes(budget)} are left for the KV cache, less than a page; use a smaller model")
    row, decoding = rules.room(longest, appended), rules.room(longest, demand.decode_chunk)
    # Pages that a round's prompts take for a while, beside those of decoding.
    spare = -(-max(demand.round_tokens, demand.piece) // rules.page_size)

    def pools(newest: int, older: int) -> TierPools:
        def of_newest(whole: int, usual: int) -> int:
            return max(whole, newest * usual + min(newest * (whole - usual), spare)) if whole else 0

        return TierPools(
            of_newest(row.recent, decoding.recent),
            older * row.int8,
            older * row.int4,
            of_newest(row.window, decoding.window),
        )

    def fits(newest: int, older: int, part: int = budget) -> bool:
        return num_bytes(pools(newest, older)) <= part

    older_of_one = num_bytes(pools(1, 1)) - num_bytes(pools(1, 0))
    newest = max(1, _largest(demand.sequences, lambda rows: fits(rows, 0, min(budget // 2, budget - older_of_one))))
    older = max(1, _largest(demand.sequences, lambda rows: fits(newest, rows)))
    if older == demand.sequences:
        newest = max(newest, _largest(demand.sequences, lambda rows: fits(rows, older)))
    return Tiering(rules, pools(newest, older), row, longest)


def given_pools(rules: TierRules, demand: Demand, pools: TierPools) -> Tiering:
    """Pools that the configuration gives; those of tiers that nobody reaches are left out. Raises ValueError if they
    hold no sequence at all."""
    appended = max(demand.decode_chunk, demand.piece)

    def holds(tokens: int) -> bool:
        wanted = dataclasses.astuple(rules.room(tokens, appended))
        return all(count <= own for count, own in zip(wanted, dataclasses.astuple(pools), strict=True))

    longest = _largest(demand.longest, holds)
    if longest < 1:
        raise ValueError(f"tier_pages={pools} hold no sequence of one token; one needs {rules.room(1, appended)}")
    row = rules.room(longest, appended)
    reached = zip(dataclasses.astuple(row), dataclasses.astuple(pools), strict=True)
    return Tiering(rules, TierPools(*(own if wanted else 0 for wanted, own in reached)), row, longest)


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which `holds`, which does for all smaller ones; 0 if it does for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
