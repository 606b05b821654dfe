"""The block's first product: the residual stream of the new tokens, normalised, times the rows of q, k and v."""

from typing import Any

from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul.operands import Halves, normalised, squares_stored
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.int4_matmul.plan import Plan as ProductPlan
from pallas_kernels.int4_matmul.planes import Planes
from pallas_kernels.int4_matmul.row import EIGHT, Row
from pallas_kernels.int4_matmul.stream import Places, Stream, Weights
from pallas_kernels.int4_matmul.strip import Arguments, factors_of, pieces_of, put, totals_of


class Strips(Stream):
    """Strips that a warp fetches all at once: strip i is `firsts[i]` and a constant more, `steps[i]`."""

    def __init__(
        self,
        m: Any,
        plan: ProductPlan,
        weights: Weights,
        first_tile: Any,
        firsts: list[Any],
        steps: list[int],
        start: int = 0,
        *,
        all_exist: bool = True,
    ) -> None:
        """Rings are from byte `start` on. What of them lies past the weight's last strip is not fetched."""
        count = m.integer(len(firsts))
        self._begin(m, plan, weights, first_tile, m.integer(0), count, m.warp * plan.ring_bytes + start)
        self._firsts, self._steps, self._all_exist = firsts, steps, all_exist

    def fill(self) -> None:
        w = self.w
        address, bases = self._ring + w.lane * 16, {}
        for i, (first, step) in enumerate(zip(self._firsts, self._steps, strict=True)):
            exists = w.lane < 32 if self._all_exist else first + step < self.plan.strips
            for j, copy in enumerate(self._copies):
                key = id(first), j
                bases[key] = bases[key] if key in bases else copy.offset + first * copy.stride
                go = exists if copy.predicate is None else exists & copy.predicate
                # The constant is part of the instruction, an address of its own would be five.
                place, source = copy.place + i * self.plan.slot_bytes, copy.constant + step * copy.stride
                w.copy_async(address, copy.array, bases[key], go, to=place, source=source)
            w.copy_commit()


class SummedRows:
    """A warp's inputs of the new tokens: x plus the slices, and the norm's weights.

    A lane has eight neighbouring inputs of each token. With 128 inputs a warp two lanes have the same, and half of the
    slices each.
    """

    def __init__(self, m: Any, plan: BlockPlan, x: Any, partial: Any, norm: Any):
        """x [tokens, hidden] bf16, partial [slices, tokens, hidden] and norm [hidden] float32.

        Starts to fetch the norm's weights, by an asynchronous copy: ptxas would put loads of them behind what waits.
        """
        self.m, self.plan, self._given = m, plan, (x, partial)
        product = plan.qkv
        self.lanes = product.warp_columns // EIGHT
        self.place = m.lane % self.lanes * EIGHT
        self.column = m.warp * product.warp_columns + self.place
        start = m.warp * product.norm_bytes + product.norm_start
        for first in range(0, product.norm_bytes, PIECE_BYTES):
            column = m.warp * product.warp_columns + m.lane * 4
            m.copy_async(start + m.lane * 16, norm, column * 4, m.lane < 32, to=first, source=first)
        self._norm = start + self.place * 4

    def read(self) -> None:
        """Starts the reads of x and of the slices."""
        m, product, (x, partial) = self.m, self.plan.qkv, self._given
        sharers = 32 // self.lanes
        sharer = m.lane // self.lanes
        self._x, self._slices = [], []
        size = product.rows * product.in_features
        for token in range(product.rows):
            row = token * product.in_features
            self._x.append(m.load_words(x, self.column, 4, None, row))
            slices = []
            for first in range(0, self.plan.slices, sharers):
                exists = None if first + sharers <= self.plan.slices else sharer + first < self.plan.slices
                offset = self.column + sharer * size
                offset = offset if exists is None else m.select(exists, offset, self.column)
                slices.append([m.load_four(partial, offset, exists, first * size + row + i) for i in (0, 4)])
            self._slices.append(slices)

    def read_norm(self) -> None:
        """The norm's weights must have come."""
        m = self.m
        self.weights = [m.as_number(word) for start in (0, 16) for word in m.shared_words(self._norm, start)]

    def sum(self, token: int) -> list[Any]:
        """x plus the slices, in an order that is always the same, as four words."""
        m, words = self.m, self._x[token]
        if not self.plan.slices:
            return list(words)
        sums: list[Any] = [number for four in self._slices[token][0] for number in four]
        for more in self._slices[token][1:]:
            sums = [a + b for a, b in zip(sums, [number for four in more for number in four], strict=True)]
        if self.lanes < 32:
            sums = [a + m.shuffle_xor(a, self.lanes) for a in sums]
        numbers = [number for word in words for number in m.numbers_of(word)]
        sums = [a + b for a, b in zip(numbers, sums, strict=True)]
        return [m.pair(*sums[i : i + 2]) for i in range(0, EIGHT, 2)]


class SummedRow(Row):
    """One token of `SummedRows`, as `Planes` takes it."""

    def __init__(self, rows: SummedRows, token: int, y: Any, writes: Any):
        """Where `writes`, the sums go to y [tokens, hidden]."""
        self._rows, self._token, self._y, self._writes = rows, token, y, writes
        self.place, self._lanes = rows.place, rows.lanes

    def numbers(self) -> list[Any]:
        """The lane's inputs times the norm's weights, two in a word; the squares go to shared memory."""
        rows, m = self._rows, self._rows.m
        product, words = rows.plan.qkv, rows.sum(self._token)
        m.store_words(self._y, rows.column + self._token * product.in_features, words, self._writes)
        words, square = normalised(m, words, rows.weights)
        squares_stored(m, product, square, self.masks, m.lane < 1, m.integer(4 * self._token))
        return words


def in_order(w: Any, plan: ProductPlan, address: Any, row_bytes: int) -> list[list[list[Any]]]:
    """A warp's inputs of tokens whose rows are in shared memory from `address` on: [tile][step][token block].

    In place of tokens that do not exist it reads one that does: nobody stores their sums.
    """
    run, steps = steps_per_run(plan.group_size), []
    address = address + w.lane // 4 % plan.rows * row_bytes + w.lane % 4 * (2 * plan.lane_columns)
    for first in plan.run_columns:
        words = w.shared_load(address + 2 * first, 2 * run, "i32")
        steps += [[words[2 * i : 2 * i + 2]] for i in range(run)]
    per_tile = COLUMNS // 16
    return [steps[t : t + per_tile] for t in range(0, len(steps), per_tile)]


def fetched(m: Any, plan: ProductPlan, a: Arguments, x: Halves | Planes, places: Places) -> tuple[Any, Any]:
    """A strip's words and factors, in registers."""
    factors = [factors_of(m, plan, a, x.code_bias, places, segment) for segment in range(plan.segments)]
    return pieces_of(m, plan, places), factors


def strips_of(m: Any, plan: BlockPlan, kv_head: Any, split: Any) -> tuple[list[Any], list[int]]:
    """The rows of q, k and v that a block has, in strips of the whole weight: `Strips`' firsts and steps."""
    attention, count = plan.decode.attention, plan.qkv.schedule.strips
    per_head = plan.head_strips

    def strip(local: Any) -> Any:  # of the cluster's
        head, inside = local // per_head, local % per_head
        query = kv_head * attention.group + head
        value = m.select(head < attention.group + 1, m.integer(0), m.integer(attention.kv_heads))
        other = kv_head + attention.q_heads + value
        return m.select(head < attention.group, query, other) * per_head + inside

    if per_head % count == 0:
        return [strip(split * count)] * count, list(range(count))
    return [strip(split * count + i) for i in range(count)], [0] * count


def project(m: Any, plan: BlockPlan, a: Arguments, stream: Strips, x: Planes) -> None:
    """Leaves every warp's sums of the block's strips in shared memory; their weights must be there."""
    product = plan.qkv
    strips = [fetched(m, product, a, x, places) for places in stream.places()]
    for i, (pieces, factors) in enumerate(strips):
        put(m, product, x, totals_of(m, product, x, pieces, factors.__getitem__), m.integer(i * product.strip_bytes))


def send_heads(w: Any, m: Any, plan: BlockPlan, split: Any) -> None:
    """Adds the warps' sums and sends the results, rounded, to all blocks: a thread four of them, to one."""
    product, attention = plan.qkv, plan.decode.attention
    strips, tokens, pieces = product.schedule.strips, product.rows, STRIP // 4
    total = pieces * strips * tokens * BLOCKS
    for start in range(0, total, plan.threads):
        index = m.thread + start
        piece, strip, token = index % pieces, index // pieces % strips, index // (pieces * strips) % tokens
        block = index // (pieces * strips * tokens)
        address = strip * product.strip_bytes + token * product.token_bytes + piece * 16
        sums = [m.number(0.0)] * 4
        squares = m.number(0.0)
        for warp in range(WARPS):
            words = m.shared_words(address, product.sums_start + warp * product.sums_bytes)
            sums = [a + m.as_number(word) for a, word in zip(sums, words, strict=True)]
            squares = squares + m.shared_number(token * 4, product.squares_start + warp * product.squares_bytes)
        assert product.fusion.norm_eps is not None
        root = m.rsqrt(squares * (1.0 / product.in_features) + product.fusion.norm_eps)
        sums = [number * root for number in sums]
        words = [m.pair(*sums[i : i + 2]) for i in (0, 2)]
        local = split * strips + strip
        head = local // plan.head_strips
        # As `NewTokens` numbers them.
        other = (head - attention.group) * tokens + token + tokens * attention.group
        number = m.select(head < attention.group, token * attention.group + head, other)
        place = number * (2 * attention.head_dim) + local % plan.head_strips * (2 * STRIP) + piece * 8 + plan.new_start
        w.send(place, [m.as_number(word) for word in words], index < total, block, plan.new_barrier)
