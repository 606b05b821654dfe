"""Paged attention for decode and verification on Hopper, through Pallas Mosaic GPU.

Flash decoding with the splits of one (sequence, KV head) in one thread block cluster. A warp owns every n-th tile of
16 keys: it reads keys and values straight from their pages into tensor-core fragments (no shared memory, no barrier
in the loop), keeps its own online softmax in float32, and the warps' partial results are merged through shared
memory, across the cluster's blocks without touching global memory. So a call is one launch, and nothing has to be
zeroed before it.

Fragments. mma.m16n8k16 adds A[16, 16] B[16, 8]. Lane 4 g + q holds, as pairs (words) along k, A rows g and g + 8 and B
column g, both at k = 2q, 2q+1 and 2q+8, 2q+9; of the sums, rows g and g + 8, columns 2q and 2q+1. Any order of k is
right as long as A and B agree, and any order of rows is right if the result is read in the same order. The kernel
picks orders that make every global read 16 consecutive bytes:

    S[row, key] = Q K^T   A = query rows (heads x tokens), B = keys. k runs over head_dim so that lane q of key g
                          reads 8 consecutive elements (two k-steps).
    O[d, row] = V^T P^T   A = values, B = probabilities. The sums of S are B's fragment already. Lane g reads 8
                          consecutive elements of keys 2q, 2q+1, 2q+8, 2q+9 and pairs them by key with byte permutes.

Query rows sit in shared memory in fragment order. docs/kernels_attention.md has the diagram and the measurements.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.warp import Warp

KEYS = 16  # keys of a tile: the depth of one mma
LOG2_E = math.log2(math.e)
# The running maximum starts here and not at -inf, so that a row with no visible key yet never computes inf - inf.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a call that is known when it is compiled.

    `splits` blocks of `warps` warps share one (sequence, KV head, block of query rows); each warp keeps `depth` tiles
    of 16 keys in flight. `early_launch` lets the blocks start while the kernel before still drains (programmatic
    dependent launch).
    """

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_row: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 8
    warps: int = 4
    depth: int = 2
    early_launch: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows that share a KV head: row = token * group + head in the group."""
        return self.tokens * self.group

    @property
    def halves(self) -> int:
        """8-row halves of the mma's 16 rows that a block uses."""
        return 1 if self.rows <= 8 else 2

    @property
    def block_rows(self) -> int:
        return 8 * self.halves

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def key_chunks(self) -> list[tuple[int, int]]:
        """(first element, words a lane reads): four lanes read 8 * words consecutive elements of a key."""
        full, rest = divmod(self.head_dim, 32)
        return [(32 * i, 4) for i in range(full)] + ([(32 * full, 2)] if rest else [])

    @property
    def value_chunks(self) -> list[tuple[int, int]]:
        """(first element, words a lane reads): eight lanes read 16 * words consecutive elements of a value."""
        chunks, start = [], 0
        for width in (64, 32, 16):
            while self.head_dim - start >= width:
                chunks.append((start, width // 16))
                start += width
        return chunks

    # Shared memory, in bytes. Rows of partial sums are 4 floats longer than head_dim: half the bank conflicts.
    @property
    def row_stride(self) -> int:
        return 4 * (self.head_dim + 4)

    @property
    def part_bytes(self) -> int:
        """One partial result: block_rows x (maximum, sum), then block_rows x head_dim sums."""
        return self.block_rows * (8 + self.row_stride)

    @property
    def parts_start(self) -> int:
        return 32 * self.head_dim

    @property
    def smem_bytes(self) -> int:
        return self.parts_start + (self.warps + (self.splits > 1)) * self.part_bytes


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The kernel's arrays in global memory, as the warp's memory methods take them."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    lengths: Any
    sinks: Any
    out: Any
    lse: Any


def attend(w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, row_block: Any, split: Any) -> None:
    """What one warp does, with `w` a `Warp` or its NumPy twin.

    `row` is the sequence, `row_block` the block of its query rows, `split` the block's place in its cluster.
    """
    true = w.const(1, "i32") > 0
    length = w.load_i32(args.lengths, row, true)
    first_row = row_block * plan.block_rows
    tiles = Tiles(w, plan, args, row, kv_head, length, split)

    # Start the first tiles' reads, then bring the queries in while they fly.
    buffers = [tiles.read(j, tiles.page(w.const(j, "i32"))) for j in range(plan.depth)]
    pages = [tiles.page(w.const(plan.depth + j, "i32")) for j in range(plan.depth)]
    stage_queries(w, plan, args, row, kv_head, first_row)
    w.block_barrier()

    softmax = Softmax(w, plan, length, first_row)
    carry, structure = jax.tree.flatten((softmax.initial(), buffers, pages))

    def body(i: Any, carry: Any) -> Any:
        state, buffers, pages = jax.tree.unflatten(structure, carry)
        buffers, pages = list(buffers), list(pages)
        for j in range(plan.depth):
            here = i * plan.depth + j
            state = (
                softmax.update_if(here < tiles.count, state, buffers[j], tiles.first_key(here))
                if j
                else (softmax.update(state, buffers[j], tiles.first_key(here)))
            )
            ahead = here + plan.depth
            buffers[j] = tiles.read(ahead, pages[j])
            pages[j] = tiles.page(ahead + plan.depth)
        return jax.tree.flatten((state, buffers, pages))[0]

    carry = w.loop((tiles.count + (plan.depth - 1)) // plan.depth, carry, body)
    state, _, _ = jax.tree.unflatten(structure, carry)
    softmax.store_partial(state)
    w.block_barrier()
    merge(w, plan, args, row, kv_head, first_row, split)


class Tiles:
    """The tiles of 16 keys that one warp works through: every (splits * warps)-th one of the sequence's."""

    def __init__(self, w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, length: Any, split: Any):
        self.w, self.plan, self.args = w, plan, args
        self.kv_head, self.length = kv_head, length
        self.page_table_row = row * plan.pages_per_row
        zero = w.const(0, "i32")
        first = zero
        if plan.window is not None:
            first = w.maximum(zero, length - (plan.tokens + plan.window - 1)) // KEYS
        # Neighbouring tiles go to different blocks, so that a short sequence is read by many multiprocessors.
        mine = w.warp * plan.splits + split
        self.stride = plan.splits * plan.warps
        self.first = first + mine
        total = (length + (KEYS - 1)) // KEYS
        self.count = w.maximum(zero, total - self.first + (self.stride - 1)) // self.stride
        self.group = w.lane // 4
        self.quad = w.lane % 4

    def first_key(self, i: Any) -> Any:
        return (self.first + i * self.stride) * KEYS

    def page(self, i: Any) -> Any:
        """Page id of this warp's i-th tile, which is garbage past the last one: nothing is read from there.

        Not predicated on the length, so that the reads of both are under way at the same time.
        """
        slot = self.first_key(i) // self.plan.page_size
        return self.w.load_i32(self.args.page_table, self.page_table_row + slot, slot < self.plan.pages_per_row)

    def read(self, i: Any, page: Any) -> tuple[Any, Any]:
        """Starts the reads of tile i: words of keys [2 halves][chunk] and values [4 keys][chunk].

        Positions from `length` on read as zero.
        """
        w, plan = self.w, self.plan
        key = self.first_key(i)
        tile = w.wide(page * plan.kv_heads + self.kv_head) * (plan.page_size * plan.head_dim)
        tile = tile + w.wide((key % plan.page_size) * plan.head_dim)
        own = key - self.length

        def words(pages: Any, first: Any, step: int, chunks: list[tuple[int, int]], lane: Any) -> list[Any]:
            valid = own + first < -step
            got = []
            for start, width in chunks:
                # Lanes are 2 * width elements apart; chunks of one width share an address.
                offset = tile + w.wide(first * plan.head_dim + lane * (2 * width))
                got.append(w.load_words(pages, offset, width, valid, step * plan.head_dim + start))
            return got

        keys = [words(self.args.k_pages, self.group, step, plan.key_chunks, self.quad) for step in (0, 8)]
        values = [words(self.args.v_pages, self.quad * 2, step, plan.value_chunks, self.group) for step in (0, 1, 8, 9)]
        return keys, values


def stage_queries(w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, first_row: Any) -> None:
    """Writes the query rows to shared memory as A fragments: [k-step][lane] four words. Rows past the last are zero."""
    steps = plan.head_dim // 16
    for start in range(0, 32 * steps, plan.threads):
        index = w.thread + start
        step, lane = index // 32, index % 32
        group, quad = lane // 4, lane % 4
        # Two k-steps share a 16-byte read of a key: the even one has its first two words.
        d = (step // 2) * 32 + quad * 8 + (step % 2) * 4
        if plan.head_dim % 32:
            d = w.select(step < steps - 1, d, quad * 4 + (plan.head_dim - 16))
        halves = []
        for half in range(plan.halves):
            query = first_row + group + 8 * half
            token, head = query // plan.group, query % plan.group
            position = (row * plan.tokens + token) * plan.q_heads + kv_head * plan.group + head
            valid = (query < plan.rows) & (step < steps)
            halves.append(w.load_words(args.q, position * plan.head_dim + d, 2, valid))
        zero = w.const(0, "i32")
        low, high = halves if plan.halves == 2 else (halves[0], (zero, zero))
        w.shared_store(index * 16, [low[0], high[0], low[1], high[1]], step < steps)


class Softmax:
    """One warp's online softmax: per query row a maximum and a sum, per row and element a sum of weighted values.

    Maximum and sum belong to row g (and g + 8) in the lanes of group g, the sum still spread over the four lanes.
    Weighted values are fragments of O[d, row]: [half][m-tile] four floats. Logits are multiplied by log2(e), for exp2.
    """

    def __init__(self, w: Any, plan: Plan, length: Any, first_row: Any):
        self.w, self.plan = w, plan
        self.group, self.quad = w.lane // 4, w.lane % 4
        self.last_key = []
        for half in range(plan.halves):
            token = (first_row + self.group + 8 * half) // plan.group
            self.last_key.append(length - plan.tokens + token)

    def initial(self) -> Any:
        zero, lowest = self.w.const(0.0), self.w.const(LOWEST)
        m_tiles = self.plan.head_dim // 16
        return (
            [lowest] * self.plan.halves,
            [zero] * self.plan.halves,
            [[(zero,) * 4] * m_tiles for _ in range(self.plan.halves)],
        )

    def update_if(self, condition: Any, state: Any, buffer: Any, first_key: Any) -> Any:
        flat, structure = jax.tree.flatten(state)
        updated = self.w.when(condition, flat, lambda: jax.tree.flatten(self.update(state, buffer, first_key))[0])
        return jax.tree.unflatten(structure, updated)

    def update(self, state: Any, buffer: Any, first_key: Any) -> Any:
        w, plan = self.w, self.plan
        keys, values = buffer
        maxima, sums, outs = (list(part) for part in state)
        scores = self.scores(keys)
        weights = []
        for half in range(plan.halves):
            logits = []
            for n in range(2):
                for column in range(2):
                    key = first_key + self.quad * 2 + (8 * n + column)
                    logits.append(self.logit(scores[n][2 * half + column], key, self.last_key[half]))
            peak = w.maximum(w.maximum(logits[0], logits[1]), w.maximum(logits[2], logits[3]))
            for mask in (1, 2):
                peak = w.maximum(peak, w.shuffle_xor(peak, mask))
            peak = w.maximum(peak, maxima[half])
            p = [w.exp2(x - peak) for x in logits]
            decay = w.exp2(maxima[half] - peak)
            maxima[half] = peak
            sums[half] = sums[half] * decay + ((p[0] + p[1]) + (p[2] + p[3]))
            weights.append((w.pack_bf16(p[0], p[1]), w.pack_bf16(p[2], p[3])))
            # Statistics live with row g, sums of O with rows 2q and 2q+1.
            even, odd = w.shuffle(decay, self.quad * 8), w.shuffle(decay, self.quad * 8 + 4)
            outs[half] = [(o[0] * even, o[1] * odd, o[2] * even, o[3] * odd) for o in outs[half]]
        m_tile = 0
        for chunk, (_, width) in enumerate(plan.value_chunks):
            for word in range(width):
                v = [values[key][chunk][word] for key in range(4)]
                a = (
                    w.low_halves(v[0], v[1]),
                    w.high_halves(v[0], v[1]),
                    w.low_halves(v[2], v[3]),
                    w.high_halves(v[2], v[3]),
                )
                for half in range(plan.halves):
                    outs[half][m_tile] = w.mma(outs[half][m_tile], a, weights[half])
                m_tile += 1
        return maxima, sums, outs

    def scores(self, keys: Any) -> list[list[Any]]:
        """S of 16 rows x 16 keys: [n-tile] four floats. Two sums per n-tile halve the chain of dependent mma."""
        w = self.w
        zero = w.const(0.0)
        sums = [[(zero,) * 4, (zero,) * 4] for _ in range(2)]
        step = 0
        for chunk, (_, width) in enumerate(self.plan.key_chunks):
            for word in range(0, width, 2):
                query = w.shared_load(w.lane * 16 + step * 512, 4, "i32")
                for n in range(2):
                    b = keys[n][chunk][word : word + 2]
                    sums[n][step % 2] = w.mma(sums[n][step % 2], query, b)
                step += 1
        return [[a + b for a, b in zip(even, odd, strict=True)] for even, odd in sums]

    def logit(self, score: Any, key: Any, last_key: Any) -> Any:
        w, plan = self.w, self.plan
        if plan.softcap is None:
            logit = score * (plan.scale * LOG2_E)
        else:  # tanh(x) = 1 - 2 / (exp(2x) + 1); tanh.approx is off by 5e-4 of the cap
            growth = w.exp2(score * (2.0 * LOG2_E * plan.scale / plan.softcap))
            logit = (1.0 - w.reciprocal(growth + 1.0) * 2.0) * (plan.softcap * LOG2_E)
        visible = key <= last_key
        if plan.window is not None:
            visible = visible & (key > last_key - plan.window)
        return w.select(visible, logit, w.const(-math.inf))

    def store_partial(self, state: Any) -> None:
        """Writes this warp's partial result to its place in shared memory."""
        w, plan = self.w, self.plan
        maxima, sums, outs = state
        part = w.warp * plan.part_bytes + plan.parts_start
        for half in range(plan.halves):
            total = sums[half]
            for mask in (1, 2):
                total = total + w.shuffle_xor(total, mask)
            w.shared_store(part + (self.group + 8 * half) * 8, [maxima[half], total], self.quad < 1)
            m_tile = 0
            for start, width in plan.value_chunks:
                for column in range(2):
                    query = self.quad * 2 + (column + 8 * half)
                    d = self.group * (2 * width) + start
                    address = part + (8 * plan.block_rows) + query * plan.row_stride + d * 4
                    run = []
                    for tile in outs[half][m_tile : m_tile + width]:
                        run += [tile[column], tile[column + 2]]
                    for at in range(0, len(run), 4):
                        w.shared_store(address + 4 * at, run[at : at + 4])
                m_tile += width


def merge(w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, first_row: Any, split: Any) -> None:
    """Adds up the partial results of the block's warps, then of the cluster's blocks; four elements a thread."""
    pieces = plan.head_dim // 4
    total = plan.block_rows * pieces
    warp_parts = [(w.const(plan.parts_start + i * plan.part_bytes, "i32"), None) for i in range(plan.warps)]
    if plan.splits == 1:
        for start in range(0, total, plan.threads):
            valid = w.thread + start < total
            task = clamp(w, w.thread + start, total)
            finish(w, plan, args, row, kv_head, first_row, task, combine(w, plan, warp_parts, task), valid)
        return
    block_part = w.const(plan.parts_start + plan.warps * plan.part_bytes, "i32")
    for start in range(0, total, plan.threads):
        task = clamp(w, w.thread + start, total)
        query, piece = task // pieces, task % pieces
        maximum, weight, out = combine(w, plan, warp_parts, task)
        w.shared_store(block_part + query * 8, [maximum, weight], piece < 1)
        w.shared_store(block_part + 8 * plan.block_rows + query * plan.row_stride + piece * 16, out)
    w.cluster_barrier()
    block_parts = [(block_part, w.const(i, "i32")) for i in range(plan.splits)]
    share = -(-total // plan.splits)
    for start in range(0, share, plan.threads):
        mine = w.thread + start
        task = split * share + mine
        valid = (mine < share) & (task < total)
        task = clamp(w, task, total)
        finish(w, plan, args, row, kv_head, first_row, task, combine(w, plan, block_parts, task), valid)
    # A block's shared memory lives until the last block has read it.
    w.cluster_barrier(release=False)


def clamp(w: Any, index: Any, limit: int) -> Any:
    last = w.const(limit - 1, "i32")
    return w.select(index < limit, index, last)


def combine(w: Any, plan: Plan, parts: list[tuple[Any, Any]], task: Any) -> tuple[Any, Any, Any]:
    """Maximum, sum and four weighted sums of one task over `parts`, (address, block of the cluster) pairs."""
    pieces = plan.head_dim // 4
    query, piece = task // pieces, task % pieces
    statistics = [w.shared_load(address + query * 8, 2, "f32", block) for address, block in parts]
    offset = query * plan.row_stride + piece * 16 + 8 * plan.block_rows
    sums = [w.shared_load(address + offset, 4, "f32", block) for address, block in parts]
    maximum = statistics[0][0]
    for m, _ in statistics[1:]:
        maximum = w.maximum(maximum, m)
    total, out = w.const(0.0), [w.const(0.0)] * 4
    for (m, s), o in zip(statistics, sums, strict=True):
        weight = w.exp2(m - maximum)
        total = total + s * weight
        out = [a + b * weight for a, b in zip(out, o, strict=True)]
    return maximum, total, out


def finish(
    w: Any, plan: Plan, args: Arguments, row: Any, kv_head: Any, first_row: Any, task: Any, merged: Any, valid: Any
) -> None:
    """Normalises four elements of one query row and writes them (and the row's log-sum-exp)."""
    pieces = plan.head_dim // 4
    query, piece = first_row + task // pieces, task % pieces
    valid = valid & (query < plan.rows)
    token, head = query // plan.group, kv_head * plan.group + query % plan.group
    position = (row * plan.tokens + token) * plan.q_heads + head
    maximum, total, out = merged
    if plan.sinks:  # a logit that takes part in the normalisation and adds no value
        sink = w.load_f32(args.sinks, head, valid) * LOG2_E
        peak = w.maximum(maximum, sink)
        decay = w.exp2(maximum - peak)
        total = total * decay + w.exp2(sink - peak)
        out = [x * decay for x in out]
        maximum = peak
    inverse = w.select(total > 0.0, w.reciprocal(total), w.const(0.0))
    out = [x * inverse for x in out]
    words = [w.pack_bf16(out[0], out[1]), w.pack_bf16(out[2], out[3])]
    w.store_words(args.out, position * plan.head_dim + piece * 4, words, valid)
    if args.lse is not None:
        w.store_f32(args.lse, position, (maximum + w.log2(total)) * (1.0 / LOG2_E), valid & (piece < 1))


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    plan: Plan,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel. bfloat16 q, pages and output; float32 sinks and log-sum-exp [B, T, Hq]."""
    scalar = plgpu.Layout.WG_SPLAT(())
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    operands = [q, k_pages, v_pages, page_table, lengths]
    if sinks is not None:
        operands.append(sinks)

    def kernel(*refs: Any) -> None:
        *arrays, smem = refs

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * (len(arrays) + 1), scalar, scalar, scalar, scalar))
        def emit(ctx: Any, *values: Any) -> None:
            del ctx
            *memory, row, kv_head, row_block, split = values
            *arrays, smem = memory
            query, keys, values_, table, row_lengths = arrays[:5]
            arguments = Arguments(
                query,
                keys,
                values_,
                table,
                row_lengths,
                sinks=arrays[5] if plan.sinks else None,
                out=arrays[len(operands)],
                lse=arrays[len(operands) + 1] if return_lse else None,
            )
            w = Warp(smem, plan.threads)
            attend(w, plan, arguments, *[w.scalar(x) for x in (row, kv_head, row_block, split)])

        if plan.early_launch:
            plgpu.griddepcontrol_wait()
        split = jax.lax.axis_index("split") if plan.splits > 1 else jnp.int32(0)
        indices = [jax.lax.axis_index(name) for name in ("row", "kv_head", "row_block")]
        emit(*arrays, smem, *indices, split)

    cluster = {"cluster": (plan.splits,), "cluster_names": ("split",)} if plan.splits > 1 else {}
    threads = {"num_threads": plan.warps // 4, "thread_name": "warpgroup"} if plan.warps > 4 else {}
    outs = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(plan.batch, plan.kv_heads, plan.row_blocks),
        grid_names=("row", "kv_head", "row_block"),
        scratch_types=[plgpu.SMEM((plan.smem_bytes // 4,), jnp.float32)],
        kernel_name="paged_attention",
        **cluster,
        **threads,
    )(*operands)
    return outs[0], (outs[1] if return_lse else None)
