"""Attention of a decode step inside the resident kernel: a block has a slice of the context of one KV head.

Token t of the context belongs to slice t / (2 warps) % slices; there, a half of a warp takes it, a lane 8 of its 128
dimensions. The new tokens belong to the last slice. Slices are put together by all blocks of the KV head, each for a
share of the dimensions, after another exchange.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pallas_kernels.resident.plan import HEAD_DIM
from pallas_kernels.resident.products import Block, as_tree

LOWEST = -1e30
LOG2_E = 1.4426950408889634
AHEAD = 2
"""Steps of keys and values on their way before the queries are there."""


class Attention:
    def __init__(self, b: Block):
        self.b, w, plan = b, b.w, b.plan
        self.half, self.share = w.lane // 16, w.lane % 16
        self.kv_head, self.slice_ = b.block // plan.slices, b.block % plan.slices
        position = w.global_words(b.arguments.positions, w.integer(0), 1)[0]
        self.writes = w.integer(-1) < position
        self.length = w.select(self.writes, position, w.integer(0))
        self.stride = 2 * plan.warps * plan.slices
        self.first = self.slice_ * (2 * plan.warps) + w.warp * 2 + self.half
        self.steps = (self.length + (self.stride - 1)) // self.stride

    def keep_tables(self) -> None:
        """The row's page table, and the angles' cos and sin, to shared memory."""
        w, plan = self.b.w, self.b.plan
        threads = 32 * plan.warps
        for start in range(0, plan.pages_per_row, threads):
            index = w.thread + start
            inside = (index < plan.pages_per_row) & (w.warp < plan.warps)
            index = w.select(inside, index, w.integer(0))
            page = w.global_words(self.b.arguments.page_table, index * 4, 1)[0]
            w.shared_store(index * 4, w.as_number(page), inside, plan.table_start)
        for start in range(0, plan.tokens * HEAD_DIM // 2, threads):
            index = w.thread + start
            inside = (index < plan.tokens * HEAD_DIM // 2) & (w.warp < plan.warps)
            index = w.select(inside, index, w.integer(0))
            for place, array in enumerate((self.b.arguments.cos, self.b.arguments.sin)):
                (word,) = w.global_words(array, index * 4, 1)
                w.shared_store(index * 4, w.as_number(word), inside, plan.angles_start + place * plan.angles_bytes)

    def run(self, layer: Any, tag: Any) -> None:
        """All multiplying warps: from the words of q, k and v to the block's share of the result."""
        b, w, plan = self.b, self.b.w, self.b.plan
        keys, values = b.array(layer, "keys"), b.array(layer, "values")
        ahead = [self._read(keys, values, w.integer(step)) for step in range(AHEAD)]
        q_norm = self._norm(layer, "q_norm")
        queries = self._queries(tag, q_norm)

        def step(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
            words, state = carry[: 8 * AHEAD], carry[8 * AHEAD :]
            fresh = self._read(keys, values, index + AHEAD)
            seen = [self._token(index) < self.length] * plan.query_rows
            return (*words[8:], *fresh, *self._attend(queries, words[:8], seen, state))

        state = [w.number(x) for _ in range(plan.query_rows) for x in (LOWEST, 0.0, *[0.0] * 8)]
        state = w.loop(self.steps, [*[word for words in ahead for word in words], *state], step)[8 * AHEAD :]

        def new_token(token: Any, carry: Sequence[Any]) -> Sequence[Any]:
            words = self._new_token(layer, token, tag, keys, values)
            seen = [(self.half < 1) & (token <= row // plan.group) for row in range(plan.query_rows)]
            return self._attend(queries, words, seen, carry)

        owns = (w.integer(plan.slices - 2) < self.slice_) & (w.integer(plan.warps - 2) < w.warp)
        state = w.loop(w.select(owns, w.integer(plan.tokens), w.integer(0)), state, new_token)
        self._store(state)
        w.some_warps_barrier(plan.warps)
        threads = 32 * plan.warps
        for start in range(0, plan.query_rows * HEAD_DIM, threads):
            needed = min(plan.warps, (plan.query_rows * HEAD_DIM - start) // 32)
            w.when(w.warp < needed, functools.partial(self._add_warps, start, tag))
        w.when(w.warp < 1, lambda: self._add_slices(tag))

    # Reading
    def _token(self, step: Any) -> Any:
        return step * self.stride + self.first

    def _place(self, token: Any, valid: Any) -> Any:
        """Where this lane's part of a token lies in the pools, in elements."""
        w, plan = self.b.w, self.b.plan
        token = w.select(valid, token, w.integer(0))
        page = w.bits(w.shared_number(token // plan.page_size * 4, plan.table_start))
        row = (page * plan.kv_heads + self.kv_head) * plan.page_size + token % plan.page_size
        return row * HEAD_DIM + self.share * 8

    def _read(self, keys: Any, values: Any, step: Any) -> list[Any]:
        token = self._token(step)
        valid = token < self.length
        place = self._place(token, valid)
        return [*self.b.w.load_words(keys, place, 4, valid), *self.b.w.load_words(values, place, 4, valid)]

    def _norm(self, layer: Any, kind: str) -> list[Any]:
        w = self.b.w
        if not self.b.plan.qk_norm:
            return []
        array = self.b.array(layer, kind)
        return [w.as_number(x) for four in (0, 16) for x in w.global_words(array, self.share * 32 + four, 4)]

    def _angles(self, token: Any) -> tuple[list[Any], list[Any]]:
        """cos and sin of this lane's 8 dimensions; the sines of the lower half are negative."""
        w, plan = self.b.w, self.b.plan
        place = token * (HEAD_DIM // 2 * 4) + self.share % 8 * 32
        cos, sin = (
            [w.as_number(x) for four in (0, 16) for x in w.shared_words(place, plan.angles_start + start + four)]
            for start in (0, plan.angles_bytes)
        )
        low = self.share < 8
        return cos, [w.select(low, 0.0 - x, x) for x in sin]

    def _turned(self, words: Sequence[Any], norm: list[Any], angles: tuple[list[Any], list[Any]]) -> list[Any]:
        """A head's 8 dimensions of this lane, normalised and rotated, rounded to bfloat16 after each, as words."""
        w = self.b.w
        x = [number for word in words for number in w.numbers_of(word)]
        if norm:
            total = as_tree([number * number for number in x])
            for mask in (1, 2, 4, 8):
                total = total + w.shuffle_xor(total, mask)
            inverse = w.rsqrt(total * (1 / HEAD_DIM) + self.b.plan.norm_eps)
            words = [
                w.pack(x[i] * inverse * norm[i], x[i + 1] * inverse * norm[i + 1], "bfloat16") for i in range(0, 8, 2)
            ]
            x = [number for word in words for number in w.numbers_of(word)]
        others = [w.shuffle_xor(number, 8) for number in x]  # 64 dimensions away
        turned = [a * c + o * s for a, o, c, s in zip(x, others, *angles, strict=True)]
        return [w.pack(turned[i], turned[i + 1], "bfloat16") for i in range(0, 8, 2)]

    def _queries(self, tag: Any, norm: list[Any]) -> list[list[Any]]:
        """The KV head's query rows, times the scale: 8 numbers a lane."""
        w, plan = self.b.w, self.b.plan
        place = self.kv_head * (plan.group * HEAD_DIM // 2) + self.share * 4
        rows = [(row // plan.group, row % plan.group) for row in range(plan.query_rows)]
        starts = [plan.words["qkv"] + token * plan.qkv // 2 + head * HEAD_DIM // 2 for token, head in rows]
        words = w.poll(self.b.arguments.words, [(place, start + two) for start in starts for two in (0, 2)], tag)
        queries = []
        for row, (token, _) in enumerate(rows):
            turned = self._turned(words[4 * row : 4 * row + 4], norm, self._angles(w.integer(token)))
            queries.append([x * (plan.scale * LOG2_E) for word in turned for x in w.numbers_of(word)])
        return queries

    def _new_token(self, layer: Any, token: Any, tag: Any, keys: Any, values: Any) -> list[Any]:
        """A new token's key and value, which are written to their page."""
        b, w, plan = self.b, self.b.w, self.b.plan
        norm = self._norm(layer, "k_norm")
        first = plan.words["qkv"] + plan.q_heads * HEAD_DIM // 2
        place = token * (plan.qkv // 2) + self.kv_head * (HEAD_DIM // 2) + self.share * 4
        starts = [first, first + plan.kv_heads * HEAD_DIM // 2]
        words = w.poll(b.arguments.words, [(place, start + two) for start in starts for two in (0, 2)], tag)
        key, value = self._turned(words[:4], norm, self._angles(token)), words[4:]
        position = self.length + token
        writes = self.writes & (position < plan.pages_per_row * plan.page_size)
        place = self._place(position, writes)
        for array, four in ((keys, key), (values, value)):
            w.store_words(array, place, four, writes & (self.half < 1))
        return [*key, *value]

    # Softmax: for each query row a maximum, a sum and 8 dimensions of the result
    def _attend(
        self, queries: list[list[Any]], words: Sequence[Any], seen: list[Any], state: Sequence[Any]
    ) -> list[Any]:
        w = self.b.w
        key = [x for word in words[:4] for x in w.numbers_of(word)]
        value = [x for word in words[4:] for x in w.numbers_of(word)]
        new: list[Any] = []
        for row, (query, visible) in enumerate(zip(queries, seen, strict=True)):
            peak, total, *out = state[10 * row : 10 * row + 10]
            score = as_tree([q * k for q, k in zip(query, key, strict=True)])
            for mask in (1, 2, 4, 8):
                score = score + w.shuffle_xor(score, mask)
            higher = w.select(visible, w.maximum(peak, score), peak)
            kept = w.exp2(peak - higher)
            share = w.select(visible, w.exp2(score - higher), w.number(0.0))
            new += [higher, total * kept + share]
            new += [w.fma(share, v, o * kept) for v, o in zip(value, out, strict=True)]
        return new

    def _store(self, state: Sequence[Any]) -> None:
        """The warp's halves together, to shared memory."""
        w, plan = self.b.w, self.b.plan
        for row in range(plan.query_rows):
            peak, total, *out = state[10 * row : 10 * row + 10]
            higher = w.maximum(peak, w.shuffle_xor(peak, 16))
            kept = w.exp2(peak - higher)
            both = [x * kept for x in (total, *out)]
            total, *out = [x + w.shuffle_xor(x, 16) for x in both]
            mine = [w.select(self.half < 1, out[i], out[4 + i]) for i in range(4)]
            index = w.warp * plan.query_rows + row
            place = index * (HEAD_DIM * 4) + self.share * 32 + self.half * 16
            w.shared_store_words(place, [w.bits(x) for x in mine], plan.heads_start)
            for i, x in enumerate((higher, total)):
                w.shared_store(index * 8, x, w.lane < 1, plan.stats_start + 4 * i)

    def _add_warps(self, start: int, tag: Any) -> None:
        """The block's result: a thread has one dimension of one query row, from `start` on."""
        b, w, plan = self.b, self.b.w, self.b.plan
        index = w.thread + start
        row, d = index // HEAD_DIM, index % HEAD_DIM
        stats = [
            [w.shared_number(row * 8, plan.stats_start + warp * plan.query_rows * 8 + 4 * i) for i in range(2)]
            for warp in range(plan.warps)
        ]
        peak = stats[0][0]
        for other, _ in stats[1:]:
            peak = w.maximum(peak, other)
        kept = [w.exp2(other - peak) for other, _ in stats]
        total = w.maximum(as_tree([k * s for k, (_, s) in zip(kept, stats, strict=True)]), w.number(1e-30))
        place = row * (HEAD_DIM * 4) + d * 4
        numbers = [
            w.shared_number(place, plan.heads_start + warp * plan.query_rows * HEAD_DIM * 4)
            for warp in range(plan.warps)
        ]
        value = as_tree([k * x for k, x in zip(kept, numbers, strict=True)]) * w.reciprocal(total)
        word = w.pack(value, w.shuffle_xor(value, 1), "bfloat16")
        index = b.block * plan.query_rows + row
        words = b.arguments.words
        w.publish(words, index * (HEAD_DIM // 2) + d // 2 + plan.words["heads"], word, tag, d % 2 < 1)
        lse = w.bits(peak + w.log2(total))
        w.publish(words, index + plan.words["lse"], lse, tag, d < 1)

    def _add_slices(self, tag: Any) -> None:
        """This block's share of the KV head's result, from all slices: a lane has a slice, or a part of one."""
        b, w, plan = self.b, self.b.w, self.b.plan
        parts = 32 // plan.slices
        count = plan.merged_words // parts
        first = self.slice_ * plan.merged_words  # of the words of the query rows
        row, word = first // (HEAD_DIM // 2), first % (HEAD_DIM // 2) + w.lane % parts * count
        block = self.kv_head * plan.slices + w.lane // parts
        lse_at = block * plan.query_rows + row // 2 * 2
        place = (block * plan.query_rows + row) * (HEAD_DIM // 2) + word
        pairs = [(place, plan.words["heads"] + i) for i in range(0, count, 2)]
        *words, even, odd = w.poll(b.arguments.words, [*pairs, (lse_at, plan.words["lse"])], tag)
        lse = w.as_number(w.select(row % 2 < 1, even, odd))
        masks = [mask for mask in (1, 2, 4, 8, 16) if mask >= parts]
        peak = lse
        for mask in masks:
            peak = w.maximum(peak, w.shuffle_xor(peak, mask))
        kept = w.exp2(lse - peak)
        totals = [kept, *[x * kept for word in words for x in w.numbers_of(word)]]
        for mask in masks:
            totals = [x + w.shuffle_xor(x, mask) for x in totals]
        inverse = w.reciprocal(totals[0])
        head = self.kv_head * plan.group + row % plan.group
        to = row // plan.group * (plan.queries // 2) + head * (HEAD_DIM // 2) + word + plan.words["attended"]
        for i in range(count):
            result = w.pack(totals[1 + 2 * i] * inverse, totals[2 + 2 * i] * inverse, "bfloat16")
            w.publish(b.arguments.words, to + i, result, tag, w.lane < parts)
