"""What is known about a call of the Mosaic kernels when it is compiled, and how the work is cut up."""

import dataclasses

KEYS = 16  # keys of a tile: the depth of one mma
MULTIPROCESSORS = 132  # of an H100 and an H200


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes and options of a call, and its schedule.

    `splits` blocks of `warps` warps share one (sequence, KV head, block of query rows); each warp keeps `depth` tiles
    of 16 keys in flight. `early_launch` lets the blocks start while the kernel before still drains (programmatic
    dependent launch). `keep_tables` asks the L2 cache to keep page ids, positions and angles from layer to layer.
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
    warps: int = 8
    depth: int = 2
    early_launch: bool = False
    keep_tables: bool = True

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
        return 32 * self.head_dim

    @property
    def inbox_start(self) -> int:
        return self.parts_start + self.warps * self.part_bytes

    @property
    def smem_bytes(self) -> int:
        """The inbox holds (maximum, sum) and then four sums of `share` tasks from each block of the cluster."""
        return self.inbox_start + (self.splits * self.share * 24 if self.splits > 1 else 0)


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
) -> Plan:
    """The schedule for a call, from what was measured on an H200 (docs/kernels_attention.md).

    The width of the page table stands for the lengths, which are not known yet.
    """
    plan = Plan(batch, tokens, q_heads, kv_heads, head_dim, page_size, pages_per_row, scale, window, softcap, sinks)
    groups = batch * kv_heads * plan.row_blocks
    if groups > MULTIPROCESSORS:
        # Two or more small blocks on each multiprocessor: 98 % of the memory's speed at depth 1, and a cluster of two
        # evens out what does not divide.
        splits, warps, depth = (1 if groups > 3 * MULTIPROCESSORS else 2), 4, 1
    else:
        # One large block on each. Clusters of 16 were slower than of 8 even where half the multiprocessors idle.
        splits, warps, depth = min(8, _power_of_two(MULTIPROCESSORS // groups)), 8, 2
    tiles = min(pages_per_row * page_size, (window or pages_per_row * page_size) + KEYS) // KEYS
    while splits > 1 and splits * warps > tiles:  # no block without a tile for each of its warps
        splits //= 2
    if head_dim * plan.halves > 128:
        depth = 1  # two tiles and their sums do not fit in a thread's registers
    return dataclasses.replace(plan, splits=splits, warps=warps, depth=depth)


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
