"""One decode step's attention on Hopper in one kernel: norm, RoPE, append, attend (see `decode.py` for the op).

The warp program is that of `mosaic.py`; only the start differs. Every block of a cluster rotates the query heads into
its shared memory; the first block also the new key, whose row it writes to its page together with the value's. The
new token itself is attended from shared memory, as the first entry of one warp's softmax, so no block waits for
another's write.
"""

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels.paged_attention.merge import Outputs, Place, merge
from pallas_kernels.paged_attention.mosaic import launch
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.softmax import Softmax
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.paged_attention.warp import Warp


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
        """Shared memory: the new key and value, bfloat16, behind the rest."""
        return self.attention.smem_bytes

    @property
    def smem_bytes(self) -> int:
        return self.attention.smem_bytes + 4 * self.attention.head_dim


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory; those that the call does not have are None."""

    qkv: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    positions: Any
    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    outputs: Outputs


def decode(w: Any, plan: DecodePlan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin; the indices are those of `mosaic.attend`."""
    stored = plan.stored
    if stored.splits > 1:
        w.cluster_arrive(release=False)
    true = w.const(1, "i32") > 0
    position = w.load_i32(args.positions, row, true)
    place = Place(row, kv_head, row_block * stored.block_rows)
    length = w.maximum(position, w.const(0, "i32"))
    tiles = Tiles(w, stored, args.k_pages, args.v_pages, args.page_table, row, kv_head, length, split)
    # In the order in which they are needed: page ids, the projections, then what depends on the page ids.
    pages = [tiles.page(w.const(j, "i32")) for j in range(stored.depth)]
    token = NewToken(w, plan, args, place)
    writes = (position > -1) & (split < 1) & (row_block < 1)
    slot = length // stored.page_size
    writes = writes & (slot < stored.pages_per_row)
    page = w.load_i32(args.page_table, row * stored.pages_per_row + slot, writes)
    buffers = [tiles.read(j, pages[j]) for j in range(stored.depth)]
    token.stage()
    w.block_barrier()
    token.write(page, length % stored.page_size, writes)

    softmax = Softmax(w, stored, length, place.first_row)
    # The warp with the fewest tiles of the block that has the new key.
    owns = (position > -1) & (split < 1) & (w.warp > stored.warps - 2)
    empty, structure = jax.tree.flatten(softmax.initial())
    state = w.when(owns, empty, lambda: jax.tree.flatten(token.attended(softmax))[0])
    softmax.store_partial(softmax.over(tiles, buffers, jax.tree.unflatten(structure, state)))
    w.block_barrier()
    merge(w, stored, args.outputs, place, split)


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

    def _store(self, quad: Quad) -> None:
        """Queries as `mosaic.stage_queries` lays them out; key and value as rows."""
        w, attention = self.w, self.plan.attention
        head, piece = quad.head, quad.piece
        step, lane = (piece // 8) * 2 + piece % 2, (piece % 8) // 2
        if attention.head_dim % 32:
            in_pairs = piece < self.pieces - 4
            step = w.select(in_pairs, step, w.const(attention.head_dim // 16 - 1, "i32"))
            lane = w.select(in_pairs, lane, piece - (self.pieces - 4))
        address = (step * 32 + (head % 8) * 4 + lane) * 16 + (head // 8) * 4
        is_query = quad.valid & self._is_query(head)
        w.shared_store(address, quad.words[:1], is_query)
        w.shared_store(address + 8, quad.words[1:], is_query)
        row = (head - self.queries) * (2 * attention.head_dim) + self.plan.new_token_start
        w.shared_store(row + piece * 8, quad.words, quad.valid & (head > self.queries - 1))

    def write(self, page: Any, offset: Any, writes: Any) -> None:
        """Writes the new key and value to row `offset` of their page."""
        w, attention = self.w, self.plan.attention
        start = w.wide(page * attention.kv_heads + self.place.kv_head) * (attention.page_size * attention.head_dim)
        start = start + w.wide(offset * attention.head_dim)
        for quad in [quad for quads in self.quads for quad in quads]:
            at, valid = start + w.wide(quad.piece * 4), writes & quad.valid
            w.store_words(self.args.k_pages, at, quad.words, valid & self._is_key(quad.head))
            w.store_words(self.args.v_pages, at, quad.words, valid & self._is_value(quad.head))

    def attended(self, softmax: Softmax) -> Any:
        """The softmax state after the new token alone: maximum its logit, sum 1, weighted values its value."""
        w, attention = self.w, self.plan.attention
        key = w.const(self.plan.new_token_start, "i32")
        # All eight columns of B hold the same key, so that every lane gets its rows' logit.
        keys = [
            w.shared_load(key + (softmax.quad * (2 * width) + start) * 2, width, "i32")
            for start, width in attention.key_chunks
        ]
        scores = softmax.scores([keys])[0]
        maxima = [softmax.logit(scores[2 * half]) for half in range(attention.halves)]
        one = w.select(softmax.quad < 1, w.const(1.0), w.const(0.0))  # sums are spread over a row's four lanes
        tiles = []
        for start, width in attention.value_chunks:
            address = key + (softmax.group * (2 * width) + (start + attention.head_dim)) * 2
            for word in w.shared_load(address, width, "i32"):
                low, high = w.unpack_bf16(word)
                tiles.append((low, low, high, high))
        return maxima, [one] * attention.halves, [list(tiles) for _ in range(attention.halves)]


# Jitted, so that a model's equal layers share one kernel: it is lowered once, and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames="plan")
def decode_attention(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    *,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel: output [B, Hq * D] and the pools, updated in place where the caller gives them up."""
    attention = plan.attention
    keys, values = jax.new_ref(k_pages), jax.new_ref(v_pages)
    operands = [qkv, keys, values, page_table, positions]
    operands += [*(rope or ()), *(norms or ()), *(() if sinks is None else (sinks,))]
    out_type = [jax.ShapeDtypeStruct((attention.batch, attention.q_heads * attention.head_dim), qkv.dtype)]

    def program(w: Warp, inputs: list[Any], outs: list[Any], *indices: Any) -> None:
        rest = iter(inputs[5:])
        cos, sin = (next(rest), next(rest)) if rope else (None, None)
        q_norm, k_norm = (next(rest), next(rest)) if norms else (None, None)
        outputs = Outputs(outs[0], None, next(rest) if sinks is not None else None)
        args = Arguments(*inputs[:5], cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, outputs=outputs)
        decode(w, plan, args, *indices)

    outs = launch(program, attention, operands, out_type, plan.smem_bytes, "decode_attention")
    return outs[0], jax.freeze(keys), jax.freeze(values)
