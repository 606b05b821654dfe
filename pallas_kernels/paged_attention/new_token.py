"""The new tokens of a decode step: their norms, rotation and codes, staged in shared memory."""

import dataclasses
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
    """Four elements of a head in one lane, as two words."""

    piece: Any  # place in the head, in units of four elements
    words: list[Any]
    turns: Any = None  # inside the rotary dimensions of a query or key
    cos: Any = None
    sin: Any = None
    codes: Any = None  # of a page: the four elements in a word, int4 with those that are head_dim / 2 further on


@dataclasses.dataclass
class Head:
    """A head of the block: its number, what it is, and a lane's part of it."""

    number: Any
    exists: Any
    is_query: Any
    is_value: Any
    quads: list[Quad]


HEADS = 8  # that a warp reads at the same time: a lane has about 10 registers for each, while tiles are under way


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
        # A lane has the same pieces of every head: two of wide ones, whose tiles take twice the room.
        self.lane_pieces = [w.lane + piece for piece in range(0, self.pieces, 32)]
        firsts = range(0, self.heads, attention.warps)
        at_once = HEADS // len(self.lane_pieces) ** 2
        self.turns = [firsts[start : start + at_once] for start in range(0, len(firsts), at_once)]
        # A single token's heads are all rotated by the same angles.
        self.angles = [
            self._angles(piece, place.row, self._constant(True)) for piece in self.lane_pieces if self.tokens == 1
        ]
        self.first_turn = [self._read(first) for first in self.turns[0]]
        self.weights = [self._weights(piece) for piece in self.lane_pieces]

    def _constant(self, value: bool) -> Any:
        return self.w.const(int(value), "i32") > 0

    def _at_least(self, first: int, limit: int) -> Any:
        """Whether the warp's head number is `limit` or more; a constant where all warps, from `first` on, agree."""
        if first >= limit or first + self.plan.attention.warps <= limit:
            return self._constant(first >= limit)
        return self.w.warp + first > limit - 1

    def _read(self, first: int) -> Head:
        w, place = self.w, self.place
        attention, number = self.plan.attention, self.w.warp + first
        yes, no = self._constant(True), self._constant(False)

        def below(limit: int) -> Any:
            return w.select(self._at_least(first, limit), no, yes)

        exists, is_query, is_value = (
            below(self.heads),
            below(self.queries),
            self._at_least(first, self.queries + self.tokens),
        )
        query, other = place.first_row + number, w.maximum(number - self.queries, w.const(0, "i32"))
        inside = exists & (w.select(is_query, query, w.const(0, "i32")) < attention.rows)
        token = w.select(is_query, query // attention.group, other % self.tokens) + place.row * self.tokens
        source = w.select(
            is_query,
            place.kv_head * attention.group + query % attention.group,
            (other // self.tokens) * attention.kv_heads + (place.kv_head + attention.q_heads),
        )
        start = (token * (attention.q_heads + 2 * attention.kv_heads) + source) * attention.head_dim
        head = Head(number, exists, is_query, is_value, [])
        for at, piece in enumerate(self.lane_pieces):
            valid = inside & (piece < self.pieces)
            quad = Quad(piece, self._words(start + piece * 4, valid))
            if self.plan.rotary_dim:
                quad.turns = w.select(is_value, no, piece * 4 < self.plan.rotary_dim)
                quad.cos, quad.sin = self.angles[at] if self.angles else self._angles(piece, token, inside)
            head.quads.append(quad)
        return head

    def _words(self, offset: Any, valid: Any) -> list[Any]:
        """Four elements of the projections."""
        return list(self.w.load_words(self.args.qkv, offset, 2, valid))

    def _angles(self, piece: Any, token: Any, inside: Any) -> tuple[Any, Any]:
        """Cosines and sines of a token's pairs that a piece is in; zero outside the rotary dimensions."""
        w, args, half = self.w, self.args, self.plan.rotary_dim // 2
        if not half:
            return (), ()
        d = piece * 4
        angle, count = (d // 2, 2) if self.plan.interleaved else (w.select(d > half - 1, d - half, d), 4)
        turns = inside & (d < 2 * half)
        return tuple(self._table(x, token * half + angle, count, turns) for x in (args.cos, args.sin))

    def _weights(self, piece: Any) -> tuple[Any, Any]:
        """Of the norms of queries and of keys."""
        if self.plan.norm_eps is None:
            return (), ()
        valid = piece < self.pieces
        return tuple(self._table(x, piece * 4, 4, valid) for x in (self.args.q_norm, self.args.k_norm))

    def _table(self, table: Any, offset: Any, count: int, valid: Any) -> Any:
        """Numbers of a norm's weights or of the angles."""
        return self.w.load_floats(table, offset, count, valid)

    def stage(self) -> None:
        """Normalises and rotates, rounding to bfloat16 after each, and writes the results to shared memory.

        Query rows that do not exist keep what was there: their sums are never written.
        """
        for turn, firsts in enumerate(self.turns):
            for head in [self._read(first) for first in firsts] if turn else self.first_turn:
                self._stage_head(head)

    def _stage_head(self, head: Head) -> None:
        if self.plan.norm_eps is not None:
            self._normalise(head)
        if self.plan.rotary_dim:
            self._rotate(head)
        if self.plan.attention.quantised:
            self._quantise(head)
        for quad in head.quads:
            self._store(head, quad)

    def _normalise(self, head: Head) -> None:
        w = self.w
        squares = w.const(0.0)
        for x in self._floats([word for quad in head.quads for word in quad.words]):
            squares = squares + x * x
        for mask in (1, 2, 4, 8, 16):
            squares = squares + w.shuffle_xor(squares, mask)
        inverse = w.rsqrt(squares * (1.0 / self.plan.attention.head_dim) + self.plan.norm_eps)
        for quad, weights in zip(head.quads, self.weights, strict=True):
            of_head = [w.select(head.is_query, a, b) for a, b in zip(*weights, strict=True)]
            normalised = self._packed([x * inverse * g for x, g in zip(self._floats(quad.words), of_head, strict=True)])
            quad.words = [w.select(head.is_value, a, b) for a, b in zip(quad.words, normalised, strict=True)]

    def _rotate(self, head: Head) -> None:
        w = self.w
        partners = [None if self.plan.interleaved else self._partner(head, quad) for quad in head.quads]
        for quad, partner in zip(head.quads, partners, strict=True):
            x = self._floats(quad.words)
            if partner is None:
                other, cos, sin = [x[1], x[0], x[3], x[2]], [*quad.cos[:1] * 2, *quad.cos[1:] * 2], []
                for s in quad.sin:
                    sin += [0.0 - s, s]
            else:
                other, cos = self._floats(partner), quad.cos
                second = quad.piece * 8 > self.plan.rotary_dim - 1
                sin = [w.select(second, s, 0.0 - s) for s in quad.sin]
            turned = self._packed([a * c + b * s for a, b, c, s in zip(x, other, cos, sin, strict=True)])
            quad.words = [w.select(quad.turns, a, b) for a, b in zip(turned, quad.words, strict=True)]

    def _partner(self, head: Head, quad: Quad) -> list[Any]:
        """The other halves of the pairs that a lane's four elements are in: another lane has them."""
        w, distance = self.w, self.plan.rotary_dim // 8
        piece = w.select(quad.piece > distance - 1, quad.piece - distance, quad.piece + distance)
        found = [[w.shuffle(word, piece % 32) for word in of_lane.words] for of_lane in head.quads]
        if len(found) == 1:
            return found[0]
        return [w.select(piece < 32, a, b) for a, b in zip(*found, strict=True)]

    def _floats(self, words: list[Any]) -> list[Any]:
        return [x for word in words for x in self.w.unpack_bf16(word)]

    def _packed(self, x: list[Any]) -> list[Any]:
        return [self.w.pack_bf16(x[0], x[1]), self.w.pack_bf16(x[2], x[3])]

    def _quantise(self, head: Head) -> None:
        """The head's codes and scale, as `formats.quantise` gives them; those of queries are not used."""
        w, attention, quads = self.w, self.plan.attention, head.quads
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
        is_new = head.exists & (head.number > self.queries - 1)
        w.shared_store((head.number - self.queries) * 4 + self.plan.scales_start, [scale], is_new & (w.lane < 1))

    def _further(self, codes: list[Any], i: int) -> Any:
        """What the lane with the piece that is head_dim / 2 after this lane's has; anything in the upper half."""
        distance = self.pieces // 2
        if distance % 32 == 0:
            return codes[min(i + distance // 32, len(codes) - 1)]
        return self.w.shuffle(codes[0], (self.w.lane + distance) % 32)

    def _store(self, head: Head, quad: Quad) -> None:
        """Queries as `mosaic.stage_queries` lays them out; keys and values as rows of a page."""
        w, attention, number = self.w, self.plan.attention, head.number
        step, lane = step_of(w, attention, quad.piece * 4)
        tile = (number // 16) * (32 * attention.head_dim)
        address = tile + (step * 32 + (number % 8) * 4 + lane) * 16 + ((number % 16) // 8) * 4
        inside = quad.piece < self.pieces
        is_query = inside & head.is_query
        words = [query_word(w, attention, word) for word in quad.words]
        w.shared_store(address, words[:1], is_query)
        w.shared_store(address + 8, words[1:], is_query)
        row = (number - self.queries) * attention.row_bytes + self.plan.new_rows_start
        stored, size = ([quad.codes], 4) if attention.quantised else (quad.words, 8)
        in_row = inside & head.exists & (number > self.queries - 1)
        if attention.kv == "int4":  # only the pieces of the lower half of a head have words of their own
            in_row = in_row & (quad.piece < self.pieces // 2)
        w.shared_store(row + quad.piece * size, stored, in_row)
