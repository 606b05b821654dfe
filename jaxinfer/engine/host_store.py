"""What the host tier's pages hold: arrays in pinned memory, from which the device copies without the processor's help.

A page leaves the device in two steps: a program gathers its keys and values of all layers into one array, and that
array is copied to the host while the device goes on; a page comes back the other way round. All is dispatched in order
and nothing is waited for: whatever overwrites a page, or reads it, comes after its move. A page that comes back takes
the place of one that leaves, so moves come as out, back, out, back: those that do not depend on each other are carried
out together, or each page would cost two programs of many.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
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
MEASURED_CALLS = 4
"""Calls of which the time is taken: the host prepares one while another is carried out."""

type Page = list[jax.Array]
"""Contents of a page: an array for each shape and type of the cache's leaves, [leaves, kv_heads, page_size, ...]."""


@jax.jit
def gather_pages(cache: PagedKVCache, pages: Int32[Array, " moves"]) -> list[Page]:
    """The contents of each of `MOVES` pages."""
    kinds = [jnp.stack([leaf[pages] for leaf in leaves], axis=1) for leaves in _alike(cache)]
    return [[kind[move] for kind in kinds] for move in range(MOVES)]


@functools.partial(jax.jit, donate_argnames="cache")
def scatter_pages(cache: PagedKVCache, contents: list[Page], pages: Int32[Array, " moves"]) -> PagedKVCache:
    """Writes contents into pages, each page once; those for the scratch page are padding and go nowhere."""
    leaves, tree = jax.tree.flatten(cache)
    # Unique, and padding past the end: otherwise XLA writes every number of 16 bits with a loop of compare-and-swap.
    beyond = leaves[0].shape[0] + jnp.arange(MOVES, dtype=jnp.int32)
    places = jnp.where(pages == SCRATCH_PAGE, beyond, pages)
    indices = {id(leaf): index for index, leaf in enumerate(leaves)}
    for kind, alike in enumerate(_alike(cache)):
        new = jnp.stack([page[kind] for page in contents], axis=1)
        for leaf, rows in zip(alike, new, strict=True):
            leaves[indices[id(leaf)]] = leaf.at[places].set(rows, mode="drop", unique_indices=True)
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


def together(moves: Sequence[Move]) -> Iterator[tuple[list[Move], list[Move]]]:
    """Cuts moves, in order, into groups of up to `MOVES` out and up to `MOVES` back, each group (out, back).

    In a group all pages can leave before any comes back: nobody reads what another move of the group brings.
    """
    out, back = list[Move](), list[Move]()
    filled, written = set[int](), set[int]()
    """Host pages and pages that this group fills."""
    for move in moves:
        leaves = move.kind == "demote"
        depends = move.page in written or (not leaves and move.host_page in filled)
        if depends or len(out if leaves else back) == MOVES:
            yield out, back
            out, back, filled, written = [], [], set(), set()
        (out if leaves else back).append(move)
        if leaves:
            filled.add(move.host_page)
        elif move.page != SCRATCH_PAGE:
            written.add(move.page)
    if out or back:
        yield out, back


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
        """What bringing `MOVES` pages to the device takes while as many leave, once it has been measured."""

    def clear(self) -> None:
        """Gives the memory back."""
        self._contents.clear()

    def carry_out(self, cache: PagedKVCache, moves: Sequence[Move]) -> PagedKVCache:
        """Dispatches moves, as if in order; returns the cache after them."""
        for out, back in together(moves):
            # Taken first: a page that leaves may get the host page of one that comes back.
            returning = [self._contents.pop(move.host_page) for move in back]
            if out:
                self._demote(cache, out)
            if back:
                cache = self._restore(cache, back, returning)
            self.num_moved["demote"] += len(out)
            self.num_moved["restore"] += len(back)
        return cache

    def seconds_for(self, num_pages: int) -> float | None:
        """How long bringing pages to the device takes; None before `measure`."""
        return None if self.seconds_a_call is None else -(-num_pages // MOVES) * self.seconds_a_call

    def allocate(self, cache: PagedKVCache, num_pages: int) -> None:
        """Has memory for so many pages, which is kept for those to come: the driver takes a second for each GB of it,
        for which a round would have to wait."""
        page = self._gather()(cache, _padded([]))[0]
        jax.block_until_ready([jax.device_put(page, self._pinned) for _ in range(num_pages)])

    def measure(self, cache: PagedKVCache) -> PagedKVCache:
        """Takes the time of full calls, over the scratch page: what a transfer costs depends on the machine.

        As many pages leave as come back, as it is when the pool is full: which it was when pages went to the host.
        """
        count = MEASURED_CALLS * MOVES
        out = [Move("demote", SCRATCH_PAGE, -1 - place) for place in range(count)]
        instead = [Move("demote", SCRATCH_PAGE, -1 - count - place) for place in range(count)]
        for _ in range(2):  # the first allocates
            cache = self.carry_out(cache, out)
            jax.block_until_ready((cache, list(self._contents.values())))
            start = time.perf_counter()
            back = [Move("restore", move.page, move.host_page) for move in out]
            cache = self.carry_out(cache, [move for pair in zip(instead, back, strict=True) for move in pair])
            jax.block_until_ready((cache, list(self._contents.values())))
            self.seconds_a_call = (time.perf_counter() - start) / MEASURED_CALLS
            for move in instead:
                del self._contents[move.host_page]
        self.num_moved = {"demote": 0, "restore": 0}
        return cache

    def _demote(self, cache: PagedKVCache, moves: Sequence[Move]) -> None:
        gathered = self._gather()(cache, _padded([move.page for move in moves]))
        copies = jax.device_put(gathered[: len(moves)], self._pinned)
        self._contents.update((move.host_page, copy) for move, copy in zip(moves, copies, strict=True))

    def _restore(self, cache: PagedKVCache, moves: Sequence[Move], contents: Sequence[Page]) -> PagedKVCache:
        copies = jax.device_put(list(contents), self._device)
        copies += [copies[0]] * (MOVES - len(copies))
        return self._scatter()(cache, copies, _padded([move.page for move in moves]))


def _padded(pages: list[int]) -> np.ndarray:
    return np.array([*pages, *[SCRATCH_PAGE] * (MOVES - len(pages))], np.int32)
