"""The new token of a decode step: its norm, rotation, codes and place in a page, and what it adds to the softmax."""

import dataclasses
from typing import Any

from pallas_kernels.paged_attention.formats import FORMATS, SMALLEST_SCALE
from pallas_kernels.paged_attention.fragments import code_pairs, step_of
from pallas_kernels.paged_attention.merge import Outputs, Place
from pallas_kernels.paged_attention.mosaic import query_word
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import Pools


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """`attention` is the plan of the attention over the stored tokens; its window, if any, counts the new one."""

    attention: Plan
    rotary_dim: int
    interleaved: bool
    norm_eps: float | None  # None: no norm

    @property
    def stored(self) -> Plan:
        """The plan as the stored tokens see it: the new token takes one place of the window."""
        window = self.attention.window
        return dataclasses.replace(self.attention, window=None if window is None else window - 1)

    @property
    def new_token_start(self) -> int:
        """Shared memory: the new key and value as rows of a page, behind the rest; then their scales."""
        return self.attention.smem_bytes

    @property
    def scales_start(self) -> int:
        return self.new_token_start + 2 * self.attention.row_bytes

    @property
    def smem_bytes(self) -> int:
        return self.scales_start + (8 if self.attention.quantised else 0)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; those that the call does not have are None."""

    qkv: Any
    pools: Pools
    page_table: Any
    positions: Any
    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    outputs: Outputs


@dataclasses.dataclass
class Quad:
    """Four elements of a head in one lane, two words, and what they are combined with."""

    head: Any
    piece: Any  # place in the head, in units of four elements
    valid: Any
    words: list[Any]
    turns: Any = None  # inside the rotary dimensions of a query or key
    second: Any = None  # in their second half
    partner: list[Any] | None = None  # the other halves of the rotated pairs
    cos: Any = None
    sin: Any = None
    weights: Any = None
    partner_weights: Any = None
    codes: Any = None  # of a page: the four elements in a word, int4 with those that are head_dim / 2 further on


class NewToken:
    """The block's query heads, the new key and the new value: a warp takes a head, a lane four of its elements.

    Heads are numbered within the block: queries 0 to `queries` - 1, then the key, then the value.
    """

    def __init__(self, w: Any, plan: DecodePlan, args: Arguments, place: Place):
        """Starts all reads."""
        self.w, self.plan, self.args, self.place = w, plan, args, place
        attention = plan.attention
        self.queries = min(attention.group, attention.block_rows)
        self.pieces = attention.head_dim // 4
        self.quads = [
            [self._read(w.warp + first, w.lane + piece) for piece in range(0, self.pieces, 32)]
            for first in range(0, self.queries + 2, attention.warps)
        ]

    def _is_query(self, head: Any) -> Any:
        return head < self.queries

    def _is_key(self, head: Any) -> Any:
        return (head > self.queries - 1) & (head < self.queries + 1)

    def _is_value(self, head: Any) -> Any:
        return head > self.queries

    def _read(self, head: Any, piece: Any) -> Quad:
        w, plan, args, place = self.w, self.plan, self.args, self.place
        attention, half = plan.attention, plan.rotary_dim // 2
        is_query, d = self._is_query(head), piece * 4
        valid = (piece < self.pieces) & (head < self.queries + 2)
        query = place.first_row + head
        inside = valid & (w.select(is_query, query, w.const(0, "i32")) < attention.group)
        source = w.select(
            is_query,
            place.kv_head * attention.group + query,
            (head - self.queries) * attention.kv_heads + (place.kv_head + attention.q_heads),
        )
        start = (place.row * (attention.q_heads + 2 * attention.kv_heads) + source) * attention.head_dim
        quad = Quad(head, piece, valid, list(w.load_words(args.qkv, start + d, 2, inside)))
        partner = None
        if plan.rotary_dim:
            quad.turns = inside & (d < plan.rotary_dim) & (head < self.queries + 1)
            angle, count = d // 2, 2
            if not plan.interleaved:
                quad.second = d > half - 1
                angle, count = w.select(quad.second, d - half, d), 4
                partner = w.select(quad.second, d - half, d + half)
                quad.partner = list(w.load_words(args.qkv, start + partner, 2, quad.turns))
            quad.cos = w.load_floats(args.cos, place.row * half + angle, count, quad.turns)
            quad.sin = w.load_floats(args.sin, place.row * half + angle, count, quad.turns)
        if plan.norm_eps is not None:
            quad.weights = self._weights(head, d, inside)
            if partner is not None:
                quad.partner_weights = self._weights(head, partner, quad.turns)
        return quad

    def _weights(self, head: Any, d: Any, valid: Any) -> list[Any]:
        of_query = self.w.load_floats(self.args.q_norm, d, 4, valid & self._is_query(head))
        of_key = self.w.load_floats(self.args.k_norm, d, 4, valid & self._is_key(head))
        return [a + b for a, b in zip(of_query, of_key, strict=True)]  # one of the two reads as zero

    def stage(self) -> None:
        """Normalises and rotates, rounding to bfloat16 after each, and writes the results to shared memory.

        Query rows that do not exist keep what was there: their sums are never written.
        """
        for quads in self.quads:
            if self.plan.norm_eps is not None:
                self._normalise(quads)
            for quad in quads:
                if self.plan.rotary_dim:
                    self._rotate(quad)
            if self.plan.attention.quantised:
                self._quantise(quads)
            for quad in quads:
                self._store(quad)

    def _normalise(self, quads: list[Quad]) -> None:
        w = self.w
        squares = w.const(0.0)
        for x in self._floats([word for quad in quads for word in quad.words]):
            squares = squares + x * x
        for mask in (1, 2, 4, 8, 16):
            squares = squares + w.shuffle_xor(squares, mask)
        inverse = w.rsqrt(squares * (1.0 / self.plan.attention.head_dim) + self.plan.norm_eps)

        def scaled(words: list[Any], weights: list[Any]) -> list[Any]:
            return self._packed([x * inverse * g for x, g in zip(self._floats(words), weights, strict=True)])

        for quad in quads:
            normalised, is_value = scaled(quad.words, quad.weights), self._is_value(quad.head)
            quad.words = [w.select(is_value, a, b) for a, b in zip(quad.words, normalised, strict=True)]
            if quad.partner is not None:
                quad.partner = scaled(quad.partner, quad.partner_weights)

    def _rotate(self, quad: Quad) -> None:
        w = self.w
        x = self._floats(quad.words)
        if quad.partner is None:
            other, cos, sin = [x[1], x[0], x[3], x[2]], [*quad.cos[:1] * 2, *quad.cos[1:] * 2], []
            for s in quad.sin:
                sin += [0.0 - s, s]
        else:
            other, cos = self._floats(quad.partner), quad.cos
            sin = [w.select(quad.second, s, 0.0 - s) for s in quad.sin]
        turned = self._packed([a * c + b * s for a, b, c, s in zip(x, other, cos, sin, strict=True)])
        quad.words = [w.select(quad.turns, a, b) for a, b in zip(turned, quad.words, strict=True)]

    def _floats(self, words: list[Any]) -> list[Any]:
        return [x for word in words for x in self.w.unpack_bf16(word)]

    def _packed(self, x: list[Any]) -> list[Any]:
        return [self.w.pack_bf16(x[0], x[1]), self.w.pack_bf16(x[2], x[3])]

    def _quantise(self, quads: list[Quad]) -> None:
        """The head's codes and scale, as `formats.quantise` gives them; those of queries are not used."""
        w, attention = self.w, self.plan.attention
        form = FORMATS[attention.kv]
        largest = w.const(0.0)
        for x in self._floats([word for quad in quads for word in quad.words]):
            largest = w.maximum(largest, w.maximum(x, 0.0 - x))
        for mask in (1, 2, 4, 8, 16):
            largest = w.maximum(largest, w.shuffle_xor(largest, mask))
        scale = w.maximum(largest * (1 / form.largest), w.const(SMALLEST_SCALE))
        inverse = w.exact_reciprocal(scale)
        pack = w.pack_e4m3 if attention.kv == "float8_e4m3fn" else w.pack_int8
        for quad in quads:
            quad.codes = pack([x * inverse for x in self._floats(quad.words)])
        if attention.kv == "int4":
            # code + 8 of each byte: modulo 16, so that no carry leaves a byte.
            codes = [((quad.codes & 0x0F0F0F0F) + 0x08080808) & 0x0F0F0F0F for quad in quads]
            for i, quad in enumerate(quads):
                quad.codes = codes[i] + self._further(codes, i) * 16
        head = quads[0].head
        place = w.select(self._is_key(head), w.const(0, "i32"), w.const(4, "i32")) + self.plan.scales_start
        w.shared_store(place, [scale], (head > self.queries - 1) & quads[0].valid & (w.lane < 1))

    def _further(self, codes: list[Any], i: int) -> Any:
        """What the lane with the piece that is head_dim / 2 after this lane's has; anything in the upper half."""
        distance = self.pieces // 2
        if distance % 32 == 0:
            return codes[min(i + distance // 32, len(codes) - 1)]
        return self.w.shuffle(codes[0], (self.w.lane + distance) % 32)

    def _store(self, quad: Quad) -> None:
        """Queries as `mosaic.stage_queries` lays them out; key and value as rows of a page."""
        w, attention = self.w, self.plan.attention
        head = quad.head
        step, lane = step_of(w, attention, quad.piece * 4)
        tile = (head // 16) * (32 * attention.head_dim)
        address = tile + (step * 32 + (head % 8) * 4 + lane) * 16 + ((head % 16) // 8) * 4
        is_query = quad.valid & self._is_query(head)
        words = [query_word(w, attention, word) for word in quad.words]
        w.shared_store(address, words[:1], is_query)
        w.shared_store(address + 8, words[1:], is_query)
        row = (head - self.queries) * attention.row_bytes + self.plan.new_token_start
        stored, size = self._stored(quad)
        w.shared_store(row + quad.piece * size, stored, self._in_row(quad) & (head > self.queries - 1))

    def _stored(self, quad: Quad) -> tuple[list[Any], int]:
        """The words of this piece in a page, and their bytes."""
        return ([quad.codes], 4) if self.plan.attention.quantised else (quad.words, 8)

    def _in_row(self, quad: Quad) -> Any:
        """Whether the piece has words of its own in a page: with int4, those of the lower half of a head."""
        if self.plan.attention.kv == "int4":
            return quad.valid & (quad.piece < self.pieces // 2)
        return quad.valid

    def write(self, page: Any, offset: Any, writes: Any) -> None:
        """Writes the new key and value to row `offset` of their page, with their scales."""
        w, attention, pools = self.w, self.plan.attention, self.args.pools
        block = w.wide(page * attention.kv_heads + self.place.kv_head) * attention.page_size + w.wide(offset)
        for quad in [quad for quads in self.quads for quad in quads]:
            stored, size = self._stored(quad)
            at, valid = block * attention.row_bytes + w.wide(quad.piece * size), writes & self._in_row(quad)
            w.store_bytes(pools.k_pages, at, stored, valid & self._is_key(quad.head))
            w.store_bytes(pools.v_pages, at, stored, valid & self._is_value(quad.head))
        if attention.quantised:
            first = writes & (w.thread < 1)
            for pool, scale in zip((pools.k_scales, pools.v_scales), self._scales(), strict=True):
                w.store_f32(pool, block, scale, first)

    def _scales(self) -> list[Any]:
        """Of the new key and value, from shared memory."""
        start = self.plan.scales_start
        return [self.w.shared_load(self.w.const(start + 4 * i, "i32"), 1, "f32")[0] for i in range(2)]

    def attended(self, softmax: Softmax) -> Any:
        """The softmax state after the new token alone: maximum its logit, sum 1, weighted values its value."""
        w, attention = self.w, self.plan.attention
        key = w.const(self.plan.new_token_start, "i32")
        # All eight columns of B hold the same key, so that every lane gets its rows' logit.
        keys = [
            w.shared_load(key + (softmax.quad * size + start), size // 4, "i32") for start, size in attention.key_chunks
        ]
        scores = [of_half[0][0] for of_half in softmax.scores([keys])]
        k_scale, v_scale = self._scales() if attention.quantised else (None, None)
        if k_scale is not None:
            scores = [score * k_scale for score in scores]
        maxima = [softmax.logit(score) + softmax.headroom for score in scores]
        one = w.select(softmax.quad < 1, w.const(1.0), w.const(0.0))  # sums are spread over a row's four lanes
        tiles = [(low, low, high, high) for low, high in self._value_pairs(softmax.group)]
        if v_scale is not None:
            tiles = [tuple(x * v_scale for x in tile) for tile in tiles]
        return maxima, [one] * attention.halves, [list(tiles) for _ in range(attention.halves)]

    def _value_pairs(self, group: Any) -> list[tuple[Any, Any]]:
        """The new value's elements in lane `group` of eight, two for each m-tile; codes without their scale."""
        w, attention = self.w, self.plan.attention
        value = self.plan.new_token_start + attention.row_bytes
        pairs = []
        for start, size in attention.value_chunks:
            if size == 2:  # two lanes share a word
                word = w.shared_load((group // 2) * 4 + (start + value), 1, "i32")[0]
                words = [w.select(group % 2 < 1, word, w.upper_half(word))]
            else:
                words = w.shared_load(group * size + (start + value), size // 4, "i32")
            if not attention.quantised:
                pairs += [w.unpack_bf16(word) for word in words]
                continue
            halves = zip(*(code_pairs(w, attention, word) for word in words), strict=True)
            for half in halves:  # of the head, with int4
                pairs += [w.unpack_f16(pair) for of_word in half for pair in of_word[: max(1, size // 2)]]
        return pairs
