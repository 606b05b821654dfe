"""What the host tier's pages hold: arrays in pinned memory, from which the device copies without the processor's help.

A page leaves the device in two steps: a program gathers its keys and values of all layers into one array, and that
array is copied to the host while the device goes on; a page comes back the other way round. All is dispatched in order
and nothing is waited for: whatever overwrites a page, or reads it, comes after its move.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxinfer.engine.host_pages import Move
from jaxinfer.engine.pages import SCRATCH_PAGE
from jaxinfer.kv_cache import PagedKVCache

MOVES = 16
"""Pages that one program gathers or scatters, padding included."""

type Page = list[jax.Array]
"""Contents of a page: an array for each shape and type of the cache's leaves, [leaves, kv_heads, page_size, ...]."""


@jax.jit
def gather_pages(cache: PagedKVCache, pages: Int32[Array, " moves"]) -> list[Page]:
    """The contents of each of `MOVES` pages."""
    kinds = [jnp.stack([leaf[pages] for leaf in leaves], axis=1) for leaves in _alike(cache)]
    return [[kind[move] for kind in kinds] for move in range(MOVES)]


@functools.partial(jax.jit, donate_argnames="cache")
def scatter_pages(cache: PagedKVCache, contents: list[Page], pages: Int32[Array, " moves"]) -> PagedKVCache:
    """Writes contents into pages. Several may go to the scratch page, which nobody reads."""
    leaves, tree = jax.tree.flatten(cache)
    places = {id(leaf): index for index, leaf in enumerate(leaves)}
    for kind, alike in enumerate(_alike(cache)):
        new = jnp.stack([page[kind] for page in contents], axis=1)
        for leaf, rows in zip(alike, new, strict=True):
            leaves[places[id(leaf)]] = leaf.at[pages].set(rows)
    return jax.tree.unflatten(tree, leaves)


def page_shapes(cache: Any) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of a page's contents, for compilation."""
    pages = jax.ShapeDtypeStruct((MOVES,), jnp.int32)
    return jax.eval_shape(gather_pages, cache, pages)[0]


def _alike(cache: PagedKVCache) -> list[list[jax.Array]]:
    """The cache's leaves by shape and type: keys and values, and their scales if they have any."""
    kinds: dict[Any, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(cache):
        kinds.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    return list(kinds.values())


class HostStore:
    """Contents of host pages by number."""

    def __init__(self, gather: Callable[[], Callable[..., Any]], scatter: Callable[[], Callable[..., Any]]) -> None:
        """`gather` and `scatter` give the compiled programs. Raises ValueError for a device without pinned memory."""
        device = jax.local_devices()[0]
        kinds = {memory.kind for memory in device.addressable_memories()}
        if "pinned_host" not in kinds:
            raise ValueError(f"host_pages: {device} has no pinned host memory, only {sorted(kinds)}; set host_pages=0")
        self._pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._device = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        self._gather, self._scatter = gather, scatter
        self._contents: dict[int, Page] = {}
        self.num_moved = {"demote": 0, "restore": 0}
        """Pages, since the store was made."""
        self.seconds_a_call: float | None = None
        """What bringing `MOVES` pages to the device takes, once it has been measured."""

    def clear(self) -> None:
        """Gives the memory back."""
        self._contents.clear()

    def carry_out(self, cache: PagedKVCache, moves: Sequence[Move]) -> PagedKVCache:
        """Dispatches moves in order; returns the cache after them."""
        for move in moves:
            self.num_moved[move.kind] += 1
        for kind, alike in itertools.groupby(moves, key=lambda move: move.kind):
            for some in itertools.batched(alike, MOVES):
                cache = self._demote(cache, some) if kind == "demote" else self._restore(cache, some)
        return cache

    def seconds_for(self, num_pages: int) -> float | None:
        """How long bringing pages to the device takes; None before `measure`."""
        return None if self.seconds_a_call is None else -(-num_pages // MOVES) * self.seconds_a_call

    def measure(self, cache: PagedKVCache) -> PagedKVCache:
        """Takes the time of a full call, over the scratch page: what a transfer costs depends on the machine."""
        moves = [Move("demote", SCRATCH_PAGE, -1 - place) for place in range(MOVES)]
        back = [Move("restore", move.page, move.host_page) for move in moves]
        for _ in range(2):  # the first allocates
            cache = jax.block_until_ready(self.carry_out(cache, moves))
            jax.block_until_ready(list(self._contents.values()))
            start = time.perf_counter()
            cache = jax.block_until_ready(self.carry_out(cache, back))
            self.seconds_a_call = time.perf_counter() - start
        self.num_moved = {"demote": 0, "restore": 0}
        return cache

    def _demote(self, cache: PagedKVCache, moves: Sequence[Move]) -> PagedKVCache:
        gathered = self._gather()(cache, _padded([move.page for move in moves]))
        copies = jax.device_put(gathered[: len(moves)], self._pinned)
        self._contents.update((move.host_page, copy) for move, copy in zip(moves, copies, strict=True))
        return cache

    def _restore(self, cache: PagedKVCache, moves: Sequence[Move]) -> PagedKVCache:
        copies = jax.device_put([self._contents.pop(move.host_page) for move in moves], self._device)
        copies += [copies[0]] * (MOVES - len(copies))
        return self._scatter()(cache, copies, _padded([move.page for move in moves]))


def _padded(pages: list[int]) -> np.ndarray:
    return np.array([*pages, *[SCRATCH_PAGE] * (MOVES - len(pages))], np.int32)
