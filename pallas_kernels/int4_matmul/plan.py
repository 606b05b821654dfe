"""How the Hopper INT4 kernel spreads one matrix over the card: sizes and shared memory, known at compile time."""

import dataclasses

from pallas_kernels.int4_matmul.packing import PackedInt4

COLUMNS = 64
"""Inputs of a packed tile."""
STRIP = 16
"""Output features of one `mma`."""
PIECE_BYTES = 512
"""A strip of one tile, 16 x 64 codes: one 16-byte word for each lane of a warp."""
PART = 128
"""Inputs that a warp multiplies at least: two tiles."""
ROW_PADDING = 4
"""Floats between the rows of sums, so that a warp's stores fall into 32 different banks."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What tuning chooses.

    A thread block holds `warps` (a multiple of 4) x `parts` x 128 inputs of x in registers and walks through units of
    `strips` x 16 output features, each warp keeping `depth` units of weights in flight. At most `blocks` blocks are
    launched, or one for each slice of the inputs: they should all be resident at once, since a second wave doubles the
    time. With `bulk` the copy engine moves the weights, otherwise each lane its own words. `early_launch` lets blocks
    start, and fetch weights, while the kernel before still runs; that kernel must not have written the weights.
    """

    warps: int = 8
    parts: int = 1
    strips: int = 2
    depth: int = 3
    blocks: int = 264
    bulk: bool = False
    early_launch: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """One product x[rows, in_features] times a weight [out_features, in_features] under a schedule.

    `scale_bytes` and `offset_bytes` are the sizes of one scale and one offset (0: no offsets).
    """

    rows: int
    in_features: int
    out_features: int
    group_size: int
    scale_bytes: int
    offset_bytes: int
    schedule: Schedule

    @classmethod
    def of(cls, rows: int, weight: PackedInt4, schedule: Schedule) -> "Plan":
        """The plan of a product of `rows` rows with a weight of the mosaic layout."""
        out_features, in_features = weight.shape
        offset_bytes = 0 if weight.offsets is None else weight.offsets.dtype.itemsize
        scale_bytes = weight.scales.dtype.itemsize
        return cls(rows, in_features, out_features, weight.group_size, scale_bytes, offset_bytes, schedule)

    @property
    def threads(self) -> int:
        return 32 * self.schedule.warps

    @property
    def token_blocks(self) -> int:
        return -(-self.rows // 8)

    @property
    def column_tiles(self) -> int:
        return -(-self.in_features // COLUMNS)

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def padded_features(self) -> int:
        return -(-self.out_features // 64) * 64

    @property
    def warp_tiles(self) -> int:
        return 2 * self.schedule.parts

    @property
    def block_columns(self) -> int:
        return self.schedule.warps * self.schedule.parts * PART

    @property
    def slices(self) -> int:
        """Blocks that share an output feature; each writes its own partial sums."""
        return -(-self.in_features // self.block_columns)

    @property
    def unit_rows(self) -> int:
        return self.schedule.strips * STRIP

    @property
    def units(self) -> int:
        return self.padded_features // self.unit_rows

    @property
    def blocks_per_slice(self) -> int:
        return max(1, min(self.units, self.schedule.blocks // self.slices))

    @property
    def segment(self) -> int:
        """Inputs that are summed before a scale is applied."""
        return min(self.group_size, PART) if self.groups > 1 else PART

    @property
    def segments(self) -> int:
        """Segments of a warp's inputs."""
        return self.schedule.parts * PART // self.segment

    # Shared memory, in bytes: a ring of units for each warp, then two buffers of every warp's sums.
    @property
    def words_bytes(self) -> int:
        return self.schedule.strips * self.warp_tiles * PIECE_BYTES

    @property
    def scales_bytes(self) -> int:
        return self.segments * self.unit_rows * self.scale_bytes

    @property
    def unit_bytes(self) -> int:
        return self.words_bytes + self.scales_bytes + self.segments * self.unit_rows * self.offset_bytes

    @property
    def slots(self) -> int:
        """One more than are in flight, so that a copy never overwrites words that are still being read."""
        return self.schedule.depth + 1

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.unit_bytes

    @property
    def sums_stride(self) -> int:
        """Bytes from one token's sums to the next."""
        return 4 * (self.unit_rows + ROW_PADDING)

    @property
    def sums_bytes(self) -> int:
        """One warp's sums of one unit."""
        return self.rows * self.sums_stride

    @property
    def sums_start(self) -> int:
        return self.schedule.warps * self.ring_bytes

    @property
    def barriers_start(self) -> int:
        """Eight bytes for each slot of each warp, if copies are bulk."""
        end = self.sums_start + 2 * self.schedule.warps * self.sums_bytes
        return -(-end // 8) * 8

    @property
    def shared_bytes(self) -> int:
        return self.barriers_start + (8 * self.schedule.warps * self.slots if self.schedule.bulk else 0)
