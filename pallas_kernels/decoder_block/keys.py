"""The stored keys of a block: where its warps' tiles are, and the loop over them."""

from typing import Any

import jax

from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.paged_attention.new_rows import NewRows
from pallas_kernels.paged_attention.plan import KEYS
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import VALUE_STEPS, Tiles


class Listed:
    """The row's position and the pages of a warp's tiles, each warp's in shared memory (the products') for itself.

    By asynchronous copies: a warp has six counters of loads under way, so that a load into a register that is needed
    early shares one with loads that are needed late, and both are waited for.
    """

    def __init__(self, m: Any, plan: BlockPlan, page_table: Any, positions: Any, split: Any):
        """Starts the copies. positions [1] and page_table [1, pages] int32."""
        self._m, attention = m, plan.decode.attention
        self._start = m.warp * plan.listed_bytes + plan.listed_start
        m.copy_async(self._start, positions, m.integer(0), m.lane < 1, nbytes=4)
        for first in range(0, plan.listed_tiles, 32):
            tile = m.lane + first
            slot = ((tile * WARPS + m.warp) * BLOCKS + split) * KEYS // attention.page_size
            exists, inside = tile < plan.listed_tiles, slot < attention.pages_per_row
            place = m.select(inside, slot, m.integer(0)) * 4
            m.copy_async(self._start + tile * 4, page_table, place, exists, to=4, nbytes=4, inside=inside)

    def position(self) -> Any:
        """Of the first new token; -1 is an idle row."""
        return self._m.shared_word(self._start)

    def page(self, tile: Any) -> Any:
        """Page id of one of the warp's tiles."""
        return self._m.shared_word(self._start + tile * 4, 4)


class ListedTiles(Tiles):
    """Tiles whose pages are in shared memory."""

    def __init__(self, listed: Listed, *of_tiles: Any):
        super().__init__(*of_tiles)
        self._listed = listed

    def page(self, i: Any) -> Any:
        return self._listed.page(i)

    def read_first(self) -> Any:
        """Starts the reads of the warp's first tile, if it has one: here, as ptxas moves no load out of a branch."""
        w, plan = self.w, self.plan
        zero = w.const(0, "i32")

        def nothing(chunks: list[tuple[int, int]]) -> list[Any]:
            return [(zero,) * max(1, size // 4) for _, size in chunks]

        keys, values = [nothing(plan.key_chunks) for _ in range(2)], [nothing(plan.value_chunks) for _ in VALUE_STEPS]
        words, structure = jax.tree.flatten((keys, values, [], []))
        words = w.when(self.count > 0, words, lambda: jax.tree.leaves(self.read(zero, self.page(zero))))
        return jax.tree.unflatten(structure, words)


class RowsBehindFewKeys(NewRows):
    """New tokens behind so few keys that most warps have a tile or none: nothing is done for one that may follow."""

    def _over(self, softmax: Softmax, tiles: Tiles, buffers: list[Any], state: Any) -> Any:
        w = self.w
        carry, structure = jax.tree.flatten((state, buffers))

        def body(i: Any, carry: Any) -> Any:
            state, buffers = jax.tree.unflatten(structure, carry)
            state = softmax.update(state, buffers[0], tiles.first_key(i), softmax.last_keys)
            words, of_words = jax.tree.flatten(buffers)
            after = i + 1
            more = after < tiles.count
            words = w.when(more, words, lambda: jax.tree.leaves(tiles.read(after, tiles.page(after))))
            return jax.tree.leaves((state, jax.tree.unflatten(of_words, words)))

        return jax.tree.unflatten(structure, w.loop(tiles.count, carry, body))[0]
