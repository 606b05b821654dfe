"""What is known about a call of the Mosaic kernels when it is compiled, and how the work is cut up."""

import dataclasses

from pallas_kernels.token_order import TokenOrder

KEYS = 16  # keys of a tile: the depth of one mma
MULTIPROCESSORS = 132  # of an H100 and an H200
TASK_BYTES = 24  # of a partial result of one task: maximum, sum and four weighted sums
ROOM = 640  # of 8-row halves times (head_dim + 32): what a thread's 255 registers hold of sums and statistics


@dataclasses.dataclass(frozen=True)
class Run:
    """`chunks` chunks of a key in which a lane holds `elements` consecutive elements (int4: of each half of the head).

    The run starts at element `start` and k-step `first_step`; a chunk has `steps` k-steps.
    """

    start: int
    elements: int
    chunks: int
    first_step: int
    steps: int

    @property
    def end(self) -> int:
        return self.start + 4 * self.elements * self.chunks

    @property
    def end_step(self) -> int:
        return self.first_step + self.steps * self.chunks


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes and options of a call, and its schedule.

    `kv` is what pages hold: bfloat16, or a format of `formats.py`. `splits` blocks of `warps` warps share one
    (sequence, KV head, block of query rows); each warp keeps `depth` tiles of 16 keys in flight. `most_halves` limits
    the rows of a block, in units of 8, below what fits in registers. With `late_values` a tile's values are asked for
    when the weights of the tile before are known, and not with its keys: fewer registers. Each `every`-th row
    comes first, then the others. `order`: the heads' results are written in the order of the product that follows,
    instead of as rows.
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
    kv: str = "bfloat16"
    splits: int = 8
    warps: int = 8
    depth: int = 2
    most_halves: int | None = None
    late_values: bool = False
    every: int = 1
    order: TokenOrder | None = None

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows that share a KV head: row = token * group + head in the group."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        """Blocks that the rows are dealt to; each reads the cache once. One as long as the sums fit in registers."""
        fit = max(2, ROOM // (self.head_dim + 32))
        return -(-self.rows // (8 * min(fit, self.most_halves or fit)))

    @property
    def halves(self) -> int:
        """8-row halves of the mmas' 16 rows that a block uses."""
        return -(-self.rows // (8 * self.row_blocks))

    @property
    def block_rows(self) -> int:
        return 8 * self.halves

    @property
    def row_tiles(self) -> int:
        """mmas that a block's query rows take as A."""
        return -(-self.halves // 2)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def quantised(self) -> bool:
        """Pages hold codes: these and queries and weights are float16 in registers, and each row has a scale."""
        return self.kv != "bfloat16"

    @property
    def bits(self) -> int:
        """Of an element in a page."""
        return {"bfloat16": 16, "int8": 8, "float8_e4m3fn": 8, "int4": 4}[self.kv]

    @property
    def row_bytes(self) -> int:
        """Of one token's key or value in a page."""
        return self.head_dim * self.bits // 8

    @property
    def key_chunks(self) -> list[tuple[int, int]]:
        """(first byte, bytes a lane reads) of a key: its four lanes read consecutive pieces."""
        return _chunks(self.row_bytes, lanes=4)

    @property
    def value_chunks(self) -> list[tuple[int, int]]:
        """(first byte, bytes a lane reads) of a value: its eight lanes read consecutive pieces."""
        return _chunks(self.row_bytes, lanes=8)

    @property
    def key_runs(self) -> list[Run]:
        """Key chunks of one size together."""
        runs: list[Run] = []
        step = 0
        for first, size in self.key_chunks:
            elements, steps = (size // 2, size // 8) if not self.quantised else (size, size // 4)
            steps = steps * 2 if self.kv == "int4" else steps
            if runs and runs[-1].elements == elements:
                runs[-1] = dataclasses.replace(runs[-1], chunks=runs[-1].chunks + 1)
            else:
                runs.append(Run(first // 2 if not self.quantised else first, elements, 1, step, steps))
            step += steps
        return runs

    @property
    def value_runs(self) -> list[tuple[int, int]]:
        """(first element, consecutive elements of a lane) in the order of the m-tiles, which take two of them each."""
        runs = []
        for first, size in self.value_chunks:
            if self.kv == "bfloat16":
                runs.append((first // 2, size // 2))
            else:
                runs += [(first + half, size) for half in ((0, self.head_dim // 2) if self.kv == "int4" else (0,))]
        return runs

    def chunk_tiles(self, size: int) -> int:
        """m-tiles of a value chunk of which a lane reads `size` bytes."""
        return size * 4 // self.bits

    # Merging: a task is four elements of one query row; each block of a cluster finishes `share` of them.
    @property
    def tasks(self) -> int:
        return self.block_rows * self.head_dim // 4

    @property
    def share(self) -> int:
        return -(-self.tasks // self.splits)

    # Shared memory, in bytes: queries, the warps' partial results, what the cluster's blocks send.
    @property
    def row_stride(self) -> int:
        """Rows of partial sums are 4 floats longer than head_dim: half the bank conflicts."""
        return 4 * (self.head_dim + 4)

    @property
    def part_bytes(self) -> int:
        """One partial result: block_rows x (maximum, sum), then block_rows x head_dim sums."""
        return self.block_rows * (8 + self.row_stride)

    @property
    def parts_start(self) -> int:
        return 32 * self.head_dim * self.row_tiles

    @property
    def inbox_start(self) -> int:
        return self.parts_start + self.warps * self.part_bytes

    @property
    def inbox_barrier(self) -> int:
        """The inbox holds (maximum, sum) and then four sums of `share` tasks from each block of the cluster."""
        return self.inbox_start + self.splits * self.share * TASK_BYTES

    @property
    def smem_bytes(self) -> int:
        return self.inbox_barrier + 16 if self.splits > 1 else self.inbox_start


def plan_for(
    *,
    batch: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages_per_row: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    kv: str = "bfloat16",
) -> Plan:
    """The schedule for a call, from what was measured on an H200 (docs/kernels_attention.md).

    The width of the page table stands for the lengths, which are not known yet.
    """
    plan = Plan(batch, tokens, q_heads, kv_heads, head_dim, page_size, pages_per_row, scale, window, softcap, sinks, kv)
    groups = batch * kv_heads * plan.row_blocks
    room = pages_per_row * page_size
    if groups > MULTIPROCESSORS // 2:
        # Two or more small blocks on each multiprocessor: 98 % of the memory's speed at depth 1. A cluster of two evens
        # out what does not divide, and rows that differ in length; more rows, the longest first, do without, from where
        # on was measured for one token in bfloat16.
        many, uneven = 3 * MULTIPROCESSORS, 1024 <= room <= 2048
        whole = not uneven or (tokens == 1 and head_dim == 128 and not plan.quantised)
        splits = 1 if groups > 2 * many or (groups > many and whole) else 2
        warps, depth = 4, 1
    else:
        # One large block on each. Clusters of 16 were slower than of 8 even where half the multiprocessors idle.
        splits, warps, depth = min(8, _power_of_two(MULTIPROCESSORS // groups)), 8, 2
    tiles = min(room, (window or room) + KEYS) // KEYS
    # Two tiles and their sums do not fit in a thread's registers. With codes tiles have half the bytes.
    wide = head_dim * plan.halves > (256 if plan.quantised else 128) or head_dim > 128
    if 64 < head_dim <= 128 and 16 < tiles <= 64:
        measured = not plan.quantised  # codes with several tokens were not
        one_half = tokens == 1 or (measured and plan.halves == 1)
        if one_half and 8 * groups <= MULTIPROCESSORS and tiles <= 32:
            # A tile for each warp of eight small blocks: faster on an H200 than four large ones.
            return dataclasses.replace(plan, splits=8, warps=4, depth=2 if plan.quantised and not wide else 1)
        dealt = dataclasses.replace(plan, most_halves=1, splits=4, warps=8, depth=1)
        blocks = dealt.splits * batch * kv_heads * dealt.row_blocks
        if measured and tokens > 1 and plan.halves > 1 and blocks <= MULTIPROCESSORS:
            # Few rows for each block: for 5 tokens of 4 heads faster on an H200 than all 20 in one block.
            return dealt
    # With so many blocks a third on each multiprocessor pays, for which a thread may have 168 registers.
    late = groups >= 11 * MULTIPROCESSORS and not plan.quantised and head_dim == 128 and plan.rows in (4, 8)
    if plan.quantised:
        depth = 2
    while splits > 1 and splits * warps > tiles:  # no block without a tile for each of its warps
        splits //= 2
    plan = dataclasses.replace(plan, splits=splits, warps=warps, depth=1 if wide else depth, late_values=late)
    # Rows, the longest first, would all end at the same time, and the next all begin: so the first blocks that run at
    # once are of rows of all lengths. Others take their places one by one, the longest first.
    # Of three blocks on a multiprocessor two count here, too: measured so.
    return dataclasses.replace(plan, every=max(1, round(groups * splits / (2 * MULTIPROCESSORS))))


def _chunks(row_bytes: int, lanes: int) -> list[tuple[int, int]]:
    """Cuts a row into pieces of 16, 8, 4 or 2 bytes a lane, the widest first."""
    chunks, start = [], 0
    for size in (16, 8, 4, 2):
        while row_bytes - start >= lanes * size:
            chunks.append((start, size))
            start += lanes * size
    return chunks


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
