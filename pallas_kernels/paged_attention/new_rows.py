"""The new tokens' keys and values as a block has them in shared memory: rows of a page, written and attended."""

import functools
from typing import Any

import jax

from pallas_kernels.paged_attention.fragments import code_pairs
from pallas_kernels.paged_attention.merge import Place, clamp
from pallas_kernels.paged_attention.new_token import Arguments, DecodePlan
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import VALUE_STEPS, Tiles


class NewRows:
    """Keys of the new tokens, then their values, each `row_bytes` long, and their scales in the same order."""

    def __init__(self, w: Any, plan: DecodePlan, args: Arguments, place: Place):
        self.w, self.plan, self.args, self.place = w, plan, args, place
        self.tokens = plan.attention.tokens
        # A thread writes pieces of this many bytes: (row, first byte, place in the sequence, page id, whether) of each.
        self.size = 16 if plan.attention.row_bytes % 16 == 0 else 8
        self.pieces: list[tuple[Any, ...]] = []
        self.scale_piece: tuple[Any, ...] | None = None

    def read_pages(self, first: Any, writes: Any) -> None:
        """Starts the reads of the ids of the pages that the rows belong in, the first token at place `first`."""
        w, attention = self.w, self.plan.attention
        in_row = attention.row_bytes // self.size
        total = 2 * self.tokens * in_row
        for start in range(0, total, attention.threads):
            piece = clamp(w, w.thread + start, total)
            row = piece // in_row
            self.pieces.append(
                (row, piece % in_row * self.size, *self._page(first, row, w.thread + start, total, writes))
            )
        if attention.quantised:
            row = clamp(w, w.thread, 2 * self.tokens)
            self.scale_piece = (row, *self._page(first, row, w.thread, 2 * self.tokens, writes))

    def _page(self, first: Any, row: Any, index: Any, total: int, writes: Any) -> tuple[Any, Any, Any]:
        attention = self.plan.attention
        place = first + row % self.tokens
        slot = place // attention.page_size
        valid = writes & (index < total) & (slot < attention.pages_per_row)
        page = self.w.load_i32(self.args.page_table, self.place.row * attention.pages_per_row + slot, valid)
        return place, page, valid

    def write(self) -> None:
        """Writes the rows to their pages, with their scales. All warps' rows must be in shared memory."""
        w, attention, pools = self.w, self.plan.attention, self.args.pools
        for row, start, place, page, valid in self.pieces:
            words = w.shared_load(row * attention.row_bytes + start + self.plan.new_rows_start, self.size // 4, "i32")
            at = self._row_of(place, page) * attention.row_bytes + w.wide(start)
            w.store_bytes(pools.k_pages, at, words, valid & (row < self.tokens))
            w.store_bytes(pools.v_pages, at, words, valid & (row > self.tokens - 1))
        if self.scale_piece is not None:
            row, place, page, valid = self.scale_piece
            at, scale = self._row_of(place, page), self._scale(row)
            w.store_f32(pools.k_scales, at, scale, valid & (row < self.tokens))
            w.store_f32(pools.v_scales, at, scale, valid & (row > self.tokens - 1))

    def _row_of(self, place: Any, page: Any) -> Any:
        """Number of the pool's row for a place in the sequence."""
        w, attention = self.w, self.plan.attention
        block = w.wide(page * attention.kv_heads + self.place.kv_head)
        return block * attention.page_size + w.wide(place % attention.page_size)

    def _scale(self, row: Any) -> Any:
        return self.w.shared_load(row * 4 + self.plan.scales_start, 1, "f32")[0]

    def tile(self) -> tuple[Any, Any, Any, Any]:
        """The new tokens as a tile of 16 keys, as `Tiles.read` gives one. Keys past the last, which no query sees, are
        the last once more."""
        w, attention = self.w, self.plan.attention
        group, quad = w.lane // 4, w.lane % 4

        def row(kind: int, token: Any) -> Any:
            return clamp(w, token, self.tokens) + kind * self.tokens

        def words(at: Any, chunks: list[tuple[int, int]], lane: Any) -> list[Any]:
            return [self._bytes(at, start, size, lane) for start, size in chunks]

        keys = [words(row(0, group + step), attention.key_chunks, quad) for step in (0, 8)]
        values = [words(row(1, quad * 2 + step), attention.value_chunks, group) for step in VALUE_STEPS]
        if not attention.quantised:
            return keys, values, [], []
        k_scales, v_scales = ([self._scale(row(kind, quad * 2 + step)) for step in VALUE_STEPS] for kind in (0, 1))
        return keys, values, k_scales, v_scales

    def _bytes(self, row: Any, start: int, size: int, lane: Any) -> Any:
        """`size` bytes of a row from start + size * lane on, as words; two bytes are the lower half of one."""
        w = self.w
        at = row * self.plan.attention.row_bytes + (start + self.plan.new_rows_start)
        if size > 2:
            return w.shared_load(at + lane * size, size // 4, "i32")
        word = w.shared_load(at + lane // 2 * 4, 1, "i32")[0]
        return (w.select(lane % 2 < 1, word, w.upper_half(word)),)

    def alone(self, softmax: Softmax) -> Any:
        """The softmax state after a single new token: maximum its logit, sum 1, weighted values its value."""
        w, attention = self.w, self.plan.attention
        # All eight columns of B hold the same key, so that every lane gets its rows' logit.
        key, value = w.const(0, "i32"), w.const(1, "i32")
        keys = [self._bytes(key, start, size, softmax.quad) for start, size in attention.key_chunks]
        scores = [of_half[0][0] for of_half in softmax.scores([keys])]
        k_scale, v_scale = (self._scale(key), self._scale(value)) if attention.quantised else (None, None)
        if k_scale is not None:
            scores = [score * k_scale for score in scores]
        maxima = [softmax.logit(score) + softmax.headroom for score in scores]
        one = w.select(softmax.quad < 1, w.const(1.0), w.const(0.0))  # sums are spread over a row's four lanes
        tiles = [(low, low, high, high) for low, high in self._value_pairs(value, softmax.group)]
        if v_scale is not None:
            tiles = [tuple(x * v_scale for x in tile) for tile in tiles]
        return maxima, [one] * attention.halves, [list(tiles) for _ in range(attention.halves)]

    def attended(self, tiles: Tiles, buffers: list[Any], position: Any, length: Any, split: Any) -> tuple[Softmax, Any]:
        """A warp's softmax over its tiles of the `length` stored keys, `buffers` of which are read, and the new tokens;
        and its state. Of an idle row, `position` -1, there are no new tokens."""
        w, attention = self.w, self.plan.attention
        softmax = Softmax(w, attention, length, self.place.first_row, last_stored=length - 1)
        # The warp with the fewest tiles of the first block takes the new tokens in.
        owns = (position > -1) & (split < 1) & (w.warp > attention.warps - 2)
        state, structure = jax.tree.flatten(softmax.initial())
        if attention.tokens == 1:
            state = w.when(owns, state, lambda: jax.tree.flatten(self.alone(softmax))[0])
        state = self._over(softmax, tiles, buffers, jax.tree.unflatten(structure, state))
        if attention.tokens > 1:  # after the loop: registers for one more tile are free there
            flat = jax.tree.leaves(state)
            new = functools.partial(softmax.update, state, first_key=length, last_keys=softmax.positions)
            state = jax.tree.unflatten(structure, w.when(owns, flat, lambda: jax.tree.leaves(new(self.tile()))))
        return softmax, state

    def _over(self, softmax: Softmax, tiles: Tiles, buffers: list[Any], state: Any) -> Any:
        return softmax.over(tiles, buffers, state)

    def _value_pairs(self, value: Any, group: Any) -> list[tuple[Any, Any]]:
        """A value's elements in lane `group` of eight, two for each m-tile; codes without their scale."""
        w, attention = self.w, self.plan.attention
        pairs = []
        for start, size in attention.value_chunks:
            words = self._bytes(value, start, size, group)
            if not attention.quantised:
                pairs += [w.unpack_bf16(word) for word in words]
                continue
            halves = zip(*(code_pairs(w, attention, word) for word in words), strict=True)
            for half in halves:  # of the head, with int4
                pairs += [w.unpack_f16(pair) for of_word in half for pair in of_word[: max(1, size // 2)]]
        return pairs
