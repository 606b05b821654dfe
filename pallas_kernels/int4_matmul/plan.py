"""How the Hopper INT4 kernel spreads one matrix over the card: sizes and shared memory, known at compile time."""

import dataclasses

from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.packing_rows import ByteRows, InRows

PIECE_BYTES = 512
"""A tile of 16 x 64 codes of 4 bits, half of one of 8: one 16-byte word for each lane of a warp."""
HELPERS = 4
"""Warps that do not multiply, where there are such."""
PART = 128
"""Inputs that a warp multiplies at least: two tiles."""
ROW_PADDING = 4
"""Floats between the tokens of a strip's sums, so that a warp's stores fall into 32 different banks."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What tuning chooses.

    A thread block holds `warps` (a multiple of 4) x `parts` x 128 inputs of x in registers and walks
    through strips of 16 output features, each warp keeping `depth` strips of weights in flight. The warps' sums are
    added after every `strips` strips. At most `blocks` blocks are launched, or one for each slice of the inputs: they
    should all be resident at once, since a second wave doubles the time. `digits` and `scaled` choose the arithmetic,
    see operands.py and lifted.py (for one or two rows columns.py). `bulk`: weights come by bulk copies, see
    bulk_stream.py. `joined`: blocks that share outputs add up their slices themselves, see joined.py.

    `apart`: four warps more ask for the weights, and add up and write what the others leave in shared memory, see
    apart.py; `strips` are those of one result.

    `once`: a block has `strips` strips, all of them fetched at once, see once.py; `depth` is as many. Tokens are in
    `tiles`, each with blocks of its own.
    """

    warps: int = 16
    parts: int = 2
    strips: int = 4
    depth: int = 3
    blocks: int = 132
    digits: bool = False
    scaled: bool = False
    bulk: bool = False
    joined: bool = False
    once: bool = False
    tiles: int = 1
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What the kernel takes over from its neighbours, for the price of one slice of the inputs.

    norm_eps: x is RMS-normalised first, with this epsilon. gated: the weight is a gate's outputs and as many others,
    and the result silu(gate) * other. residual: the result is added to an array.
    """

    norm_eps: float | None = None
    gated: bool = False
    residual: bool = False


PLAIN = Fusion()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One product x[all_rows, in_features] times a weight [out_features, in_features] under a schedule.

    `rows` are those of a block: of the last of several tiles some may be those of the tile before as well.
    `scale_bytes` and `offset_bytes` are the sizes of one scale and one offset (0: no offsets).
    """

    all_rows: int
    in_features: int
    out_features: int
    group_size: int
    scale_bytes: int
    offset_bytes: int
    bits: int
    schedule: Schedule
    fusion: Fusion = PLAIN
    in_rows: InRows | None = None

    @classmethod
    def of(cls, rows: int, weight: Packed, schedule: Schedule, fusion: Fusion = PLAIN) -> "Plan":
        """The plan of a product of `rows` rows with a weight of the mosaic layout."""
        out_features, in_features = weight.shape
        offset_bytes = 0 if weight.offsets is None else weight.offsets.dtype.itemsize
        scale_bytes = weight.scales.dtype.itemsize
        sizes = (rows, in_features, out_features, weight.group_size, scale_bytes, offset_bytes, weight.bits)
        return cls(*sizes, schedule, fusion, weight.in_rows if isinstance(weight, ByteRows) else None)

    @property
    def rows(self) -> int:
        return -(-self.all_rows // self.schedule.tiles)

    @property
    def threads(self) -> int:
        return 32 * (self.schedule.warps + (HELPERS if self.schedule.apart else 0))

    @property
    def token_blocks(self) -> int:
        return -(-self.rows // 8)

    @property
    def strips(self) -> int:
        return -(-self.out_features // STRIP)

    @property
    def strip_parts(self) -> int:
        """Strips that make one strip of results, which are a half of all strips apart."""
        return 2 if self.fusion.gated else 1

    @property
    def result_strips(self) -> int:
        return self.strips // self.strip_parts

    @property
    def results(self) -> int:
        """Numbers of a row of the result."""
        return self.out_features // self.strip_parts

    @property
    def column_tiles(self) -> int:
        return -(-self.in_features // COLUMNS)

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def warp_columns(self) -> int:
        return self.schedule.parts * PART

    @property
    def warp_tiles(self) -> int:
        return self.warp_columns // COLUMNS

    @property
    def lane_columns(self) -> int:
        """From the inputs of one lane of four to those of the next."""
        return 16 if self.in_rows is not None else 4 * steps_per_run(self.group_size)

    @property
    def run_columns(self) -> list[int]:
        """The first inputs of each run of steps, of which a lane has neighbouring ones."""
        if self.in_rows is not None:  # 16 neighbours, in two runs
            return [tile + half for tile in range(0, self.warp_columns, COLUMNS) for half in (0, 8)]
        return list(range(0, self.warp_columns, 16 * steps_per_run(self.group_size)))

    @property
    def block_columns(self) -> int:
        return self.schedule.warps * self.warp_columns

    @property
    def slices(self) -> int:
        """Blocks that share an output feature; each writes its own partial sums."""
        return -(-self.in_features // self.block_columns)

    @property
    def partials(self) -> int:
        """Slices that the kernel leaves to be added."""
        return 1 if self.schedule.joined else self.slices

    @property
    def ragged(self) -> bool:
        """Whether some warps have fewer inputs than others."""
        return self.slices * self.block_columns != self.in_features

    @property
    def blocks_per_slice(self) -> int:
        return max(1, min(self.result_strips, self.schedule.blocks // self.slices))

    @property
    def most_strips(self) -> int:
        """Strips of the block that has most."""
        return -(-self.result_strips // self.blocks_per_slice) * self.strip_parts

    @property
    def segment(self) -> int:
        """Inputs that are summed before a scale is applied."""
        return min(self.group_size, PART) if self.groups > 1 else PART

    @property
    def segments(self) -> int:
        """Segments of a warp's inputs."""
        return self.warp_columns // self.segment

    @property
    def even(self) -> bool:
        """Whether every group of four warps has as many whole groups of inputs: what bulk copies need."""
        return not self.ragged and self.group_size == self.segment

    @property
    def whole(self) -> bool:
        """Whether every block has all inputs of just as many strips as are fetched at once: what once.py needs."""
        strips = self.blocks_per_slice * self.schedule.strips
        return not self.ragged and self.slices == 1 and strips == self.result_strips * self.strip_parts

    # Shared memory, in bytes: a ring of strips for each warp, then two buffers of every warp's sums.
    @property
    def tile_bytes(self) -> int:
        """A tile of 16 x 64 codes."""
        return PIECE_BYTES * self.bits // 4

    @property
    def words_bytes(self) -> int:
        return self.warp_tiles * self.tile_bytes

    @property
    def scales_bytes(self) -> int:
        return self.segments * STRIP * self.scale_bytes

    @property
    def offsets_start(self) -> int:
        return self.words_bytes + self.scales_bytes

    @property
    def slot_bytes(self) -> int:
        """A warp's words, scales and offsets of one strip."""
        return self.offsets_start + self.segments * STRIP * self.offset_bytes

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def slots(self) -> int:
        """One slot more than are in flight, so that a copy never overwrites words that are still being read."""
        return self.schedule.depth + (0 if self.schedule.once or self.schedule.apart else 1)

    @property
    def token_bytes(self) -> int:
        """From one token's sums to the next."""
        return 4 * (STRIP + ROW_PADDING)

    @property
    def sums_bytes(self) -> int:
        """One warp's sums of one strip."""
        return self.rows * self.token_bytes

    @property
    def strip_bytes(self) -> int:
        """All warps' sums of one strip."""
        return self.schedule.warps * self.sums_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.schedule.strips * self.strip_bytes

    @property
    def sums_start(self) -> int:
        return self.schedule.warps * self.ring_bytes

    @property
    def squares_start(self) -> int:
        return self.sums_start + (1 if self.schedule.once else 2) * self.buffer_bytes

    @property
    def squares_bytes(self) -> int:
        """One warp's sums of squares of x, of each token of its blocks."""
        return 0 if self.fusion.norm_eps is None else 32 * self.token_blocks

    @property
    def norm_start(self) -> int:
        return self.squares_start + self.schedule.warps * self.squares_bytes

    @property
    def norm_bytes(self) -> int:
        """One warp's weights of the norm, see once.py."""
        return 4 * self.warp_columns if self.schedule.once and self.fusion.norm_eps is not None else 0

    @property
    def barriers_start(self) -> int:
        """Two for each slot of the rings, see bulk_stream.py, and for each buffer of sums, see apart.py."""
        return self.norm_start + self.schedule.warps * self.norm_bytes

    @property
    def inbox_start(self) -> int:
        """Sums of this block's results, [strip, slice, token, 16], see joined.py."""
        return self.sum_barriers_start + (32 if self.schedule.apart else 0)

    @property
    def sum_barriers_start(self) -> int:
        slots = self.schedule.warps // 4 * self.slots if self.schedule.bulk else 0
        return self.barriers_start + 16 * slots

    @property
    def inbox_strips(self) -> int:
        """Most strips whose results a block of a cluster writes."""
        return -(-self.result_strips // (self.blocks_per_slice * self.slices)) if self.schedule.joined else 0

    @property
    def inbox_barrier(self) -> int:
        return self.inbox_start + self.inbox_strips * self.slices * self.rows * STRIP * 4

    @property
    def shared_bytes(self) -> int:
        return self.inbox_barrier + (16 if self.schedule.joined else 0)
