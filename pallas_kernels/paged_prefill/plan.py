"""How the Hopper prefill kernel divides one call: blocks of query rows, tiles of keys, shared memory."""

import dataclasses
import functools

ROWS = 128
"""Query rows (tokens x the query heads of one KV head) of a block: two warpgroups with 64 each."""
CONSUMER_WARPS = 8
PRODUCERS = 128
"""Threads that fetch: one warpgroup."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a block of a Hopper card can have."""


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """One call; everything the kernel is specialised for.

    Keys and values come up to `stages` (two at least) tiles ahead: one is reported when the next is on its way. At
    most `blocks` blocks are launched, each of which goes on with another part (128 query rows of one row and KV head)
    until all are done; None launches a block for each part.
    """

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_row: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    kv: str
    stages: int
    blocks: int | None = None

    # The whole call
    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def row_blocks(self) -> int:
        return -(-self.tokens * self.group // ROWS)

    @property
    def parts(self) -> int:
        return self.row_blocks * self.batch * self.kv_heads

    @property
    def launched(self) -> int:
        return self.parts if self.blocks is None else min(self.blocks, self.parts)

    # A tile
    @property
    def keys(self) -> int:
        """Keys of a tile: what leaves registers for the sums of 64 rows by 128 threads."""
        return keys_of(self.head_dim)

    @property
    def tile_pages(self) -> int:
        return self.keys // self.page_size

    @property
    def queries_in_registers(self) -> bool:
        """Where they fit beside the sums: the tensor cores then read a sixth less of shared memory."""
        return self.head_dim <= 128 and self.kv == "bfloat16"

    @property
    def registers(self) -> tuple[int, int]:
        """Of each fetching and each multiplying thread; those that fetch codes hold half a tile of them, twice."""
        return (40, 232) if self.kv == "bfloat16" else (88, 208)

    @property
    def swizzle(self) -> int:
        """Bytes of a row of a slab: the widest swizzle that divides a head."""
        return next(width for width in (128, 64, 32) if 2 * self.head_dim % width == 0)

    @property
    def slabs(self) -> int:
        return 2 * self.head_dim // self.swizzle

    @property
    def row_chunks(self) -> int:
        """Pieces of 16 bytes in a head."""
        return self.head_dim // 8

    @property
    def row_lanes(self) -> int:
        """Neighbouring threads that fetch one row, a power of two."""
        return 1 << (self.row_chunks - 1).bit_length()

    @property
    def rows_at_once(self) -> int:
        return PRODUCERS // self.row_lanes

    # Shared memory in bytes: queries [warpgroup][slab][64 rows][swizzle], then for each stage keys and values
    # [slab][key][swizzle], then barriers.
    @property
    def query_bytes(self) -> int:
        """One warpgroup's."""
        return 64 * 2 * self.head_dim

    @property
    def tile_bytes(self) -> int:
        return self.keys * 2 * self.head_dim

    @property
    def keys_start(self) -> int:
        return 2 * self.query_bytes

    @property
    def values_start(self) -> int:
        return self.keys_start + self.stages * self.tile_bytes

    @property
    def barriers_start(self) -> int:
        return self.values_start + self.stages * self.tile_bytes

    @functools.cached_property
    def barriers(self) -> dict[str, int]:
        """Where each kind of barrier starts; one for each stage, one for the queries."""
        starts, place = {}, self.barriers_start
        for name, count in (
            ("keys_full", self.stages),
            ("keys_empty", self.stages),
            ("values_full", self.stages),
            ("values_empty", self.stages),
            ("queries_full", 1),
            ("queries_empty", 1),
        ):
            starts[name] = place
            place += 8 * count
        return starts

    @property
    def shared_bytes(self) -> int:
        return self.barriers_start + 8 * (4 * self.stages + 2)


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
) -> PrefillPlan:
    """The plan of a call over pages that hold `kv`."""
    return PrefillPlan(
        batch=batch,
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_row=pages_per_row,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        kv=kv,
        stages=most_stages(head_dim),
    )


def keys_of(head_dim: int) -> int:
    return 128 if head_dim <= 128 else 64


def most_stages(head_dim: int) -> int:
    """Stages that fit; more than four are never waited for."""
    room = SHARED_BYTES - 2 * 64 * 2 * head_dim - 256
    return min(4, room // (2 * keys_of(head_dim) * 2 * head_dim))
