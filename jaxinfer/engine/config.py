"""EngineConfig: what a user can set, checked one by one; `settings` makes of it what one model needs on one device."""

import dataclasses
import math
import typing
from collections.abc import Sequence

from jaxinfer.engine.rules import DecodeOrder, Policy
from jaxinfer.fields import refuse_unknown
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tiers import TierPools


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
        decode_chunk: Decode steps in one program (16; 4): the host admits, stops and streams between chunks.
            Fewer with drafted tokens, so that a chunk has about as many tokens.
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
