"""The new tokens of a decode step: their norms, rotation and codes, staged in shared memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.paged_attention.formats import FORMATS, SMALLEST_SCALE
from pallas_kernels.paged_attention.fragments import step_of
from pallas_kernels.paged_attention.merge import Outputs, Place
from pallas_kernels.paged_attention.mosaic import query_word
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tiles import Pools


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """`attention` is the plan of the attention, the new tokens its queries."""

    attention: Plan
    rotary_dim: int
    interleaved: bool
    norm_eps: float | None  # None: no norm

    @property
    def new_rows_start(self) -> int:
        """Shared memory: the new keys, then the new values, as rows of a page, behind the rest; then their scales."""
        return self.attention.smem_bytes

    @property
    def scales_start(self) -> int:
        return self.new_rows_start + 2 * self.attention.tokens * self.attention.row_bytes

    @property
    def smem_bytes(self) -> int:
        return self.scales_start + (8 * self.attention.tokens if self.attention.quantised else 0)


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


HEADS = 8  # that a warp reads at the same time: a lane has about 20 registers for each, while tiles are under way


class NewTokens:
    """The block's query rows, the new keys and the new values: a warp takes a head, a lane four of its elements.

    Heads are numbered within the block: query rows 0 to `queries` - 1, then the keys by token, then the values.
    """

    def __init__(self, w: Any, plan: DecodePlan, args: Arguments, place: Place):
        """Starts the first reads."""
        self.w, self.plan, self.args, self.place = w, plan, args, place
        attention = plan.attention
        self.tokens = attention.tokens
        self.queries = min(attention.rows, attention.block_rows)
        self.heads = self.queries + 2 * self.tokens
        self.pieces = attention.head_dim // 4
        firsts = range(0, self.heads, attention.warps)
        # Of wide heads a lane has two pieces, and their tiles take twice the room.
        at_once = HEADS if self.pieces <= 32 else HEADS // 4
        self.turns = [firsts[start : start + at_once] for start in range(0, len(firsts), at_once)]
        self.first_turn = self._read_heads(self.turns[0])

    def _is_query(self, head: Any) -> Any:
        return head < self.queries

    def _is_key(self, head: Any) -> Any:
        return (head > self.queries - 1) & (head < self.queries + self.tokens)

    def _is_value(self, head: Any) -> Any:
        return head > self.queries + self.tokens - 1

    def _read_heads(self, firsts: Sequence[int]) -> list[list[Quad]]:
        w = self.w
        return [[self._read(w.warp + first, w.lane + piece) for piece in range(0, self.pieces, 32)] for first in firsts]

    def _read(self, head: Any, piece: Any) -> Quad:
        w, plan, args, place = self.w, self.plan, self.args, self.place
        attention, half = plan.attention, plan.rotary_dim // 2
        is_query, d = self._is_query(head), piece * 4
        valid = (piece < self.pieces) & (head < self.heads)
        query, other = place.first_row + head, w.maximum(head - self.queries, w.const(0, "i32"))
        inside = valid & (w.select(is_query, query, w.const(0, "i32")) < attention.rows)
        token = w.select(is_query, query // attention.group, other % self.tokens) + place.row * self.tokens
        source = w.select(
            is_query,
            place.kv_head * attention.group + query % attention.group,
            (other // self.tokens) * attention.kv_heads + (place.kv_head + attention.q_heads),
        )
        start = (token * (attention.q_heads + 2 * attention.kv_heads) + source) * attention.head_dim
        quad = Quad(head, piece, valid, list(w.load_words(args.qkv, start + d, 2, inside)))
        partner = None
        if plan.rotary_dim:
            quad.turns = inside & (d < plan.rotary_dim) & (head < self.queries + self.tokens)
            angle, count = d // 2, 2
            if not plan.interleaved:
                quad.second = d > half - 1
                angle, count = w.select(quad.second, d - half, d), 4
                partner = w.select(quad.second, d - half, d + half)
                quad.partner = list(w.load_words(args.qkv, start + partner, 2, quad.turns))
            quad.cos = w.load_floats(args.cos, token * half + angle, count, quad.turns)
            quad.sin = w.load_floats(args.sin, token * half + angle, count, quad.turns)
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
        for turn, firsts in enumerate(self.turns):
            for quads in self._read_heads(firsts) if turn else self.first_turn:
                self._stage_head(quads)

    def _stage_head(self, quads: list[Quad]) -> None:
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
        w.shared_store(
            (head - self.queries) * 4 + self.plan.scales_start,
            [scale],
            (head > self.queries - 1) & quads[0].valid & (w.lane < 1),
        )

    def _further(self, codes: list[Any], i: int) -> Any:
        """What the lane with the piece that is head_dim / 2 after this lane's has; anything in the upper half."""
        distance = self.pieces // 2
        if distance % 32 == 0:
            return codes[min(i + distance // 32, len(codes) - 1)]
        return self.w.shuffle(codes[0], (self.w.lane + distance) % 32)

    def _store(self, quad: Quad) -> None:
        """Queries as `mosaic.stage_queries` lays them out; keys and values as rows of a page."""
        w, attention = self.w, self.plan.attention
        head = quad.head
        step, lane = step_of(w, attention, quad.piece * 4)
        tile = (head // 16) * (32 * attention.head_dim)
        address = tile + (step * 32 + (head % 8) * 4 + lane) * 16 + ((head % 16) // 8) * 4
        is_query = quad.valid & self._is_query(head)
        words = [query_word(w, attention, word) for word in quad.words]
        w.shared_store(address, words[:1], is_query)
        w.shared_store(address + 8, words[1:], is_query)
        row = (head - self.queries) * attention.row_bytes + self.plan.new_rows_start
        stored, size = ([quad.codes], 4) if attention.quantised else (quad.words, 8)
        in_row = quad.valid & (head > self.queries - 1)
        if attention.kv == "int4":  # only the pieces of the lower half of a head have words of their own
            in_row = in_row & (quad.piece < self.pieces // 2)
        w.shared_store(row + quad.piece * size, stored, in_row)
