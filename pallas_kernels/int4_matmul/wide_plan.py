"""How the Hopper INT4 kernel for many rows spreads one matrix over the card: sizes and shared memory."""

import dataclasses
from typing import Any

from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.token_order import STAGE, TokenOrder

LINE = 64 * 2 + 16
"""Bytes from one token to the next where sums become lines: 64 results, and room that puts tokens into other banks."""
LINES, FEW_LINES = 64, 16
"""Tokens whose results become lines at a time; beside tiles of so many tokens that stages leave no more room
for two and more warpgroups."""
MANY_TOKENS, MANY_OF_HALVES = 128, 240
"""Most tokens of a tile beside which there is room for LINES, and beside which two warpgroups with half a gate each
have it with one stage less: their lines are written in more steps."""
DIRECT_ROWS = 64
"""Up to so many rows each thread writes its own results."""
BOX, BOX_BYTES = 64, 128
"""Inputs of a box that the copy engine fetches of x as it is, and the bytes of one token's."""
PRODUCERS = 128
"""Threads that fetch: one warpgroup."""


@dataclasses.dataclass(frozen=True)
class WideSchedule:
    """What tuning chooses.

    A thread block computes `warpgroups` x `tiles` x 64 output features of `tokens` tokens (a multiple of 8, at most
    256; `tiles` x `tokens` at most 256, for the sums are in registers), then goes on with another such part. Weights
    and x come `stages` x 128 inputs ahead. `cluster` (1, 2 or 4) blocks with neighbouring features read x once for all.
    At most `blocks` blocks are launched: they should all be resident.

    Where there are too few parts for that, a part is over one of `slices` slices of the inputs, whose sums XLA adds.

    `turns`: the multiplying warpgroups take turns at the tensor cores, two in a stage, so that one unpacks while
    another multiplies.

    `together`: so many tiles of tokens are multiplied by all weights before the next ones are (0: all of them), so that
    x stays in the L2 cache where it is larger than that.

    `natural`: x comes as it is, and words are read in the order of its inputs (`wide_natural`).

    `joined`: the two blocks of a cluster have the same part, each over half of the inputs, and then put their sums
    together (`wide_join`); none of them has a second part.
    """

    tokens: int = 64
    warpgroups: int = 2
    tiles: int = 1
    slices: int = 1
    cluster: int = 1
    stages: int = 4
    blocks: int = 132
    turns: bool = False
    together: int = 0
    natural: bool = False
    joined: bool = False


@dataclasses.dataclass(frozen=True)
class WidePlan:
    """One product x[rows, in_features] times a weight [out_features, in_features] under a schedule.

    `scale_bytes` and `offset_bytes` are the sizes of one scale and one offset (0: no offsets). `gated`: the weight is a
    gate's outputs and as many others, and the results are silu(gate) * other; a warpgroup's two tiles are 64 of each,
    or its one tile 32 of each (`halves`).
    `result_order`: results are written in the order of the next product's x instead of as rows.
    """

    rows: int
    in_features: int
    out_features: int
    group_size: int
    scale_bytes: int
    offset_bytes: int
    bits: int
    schedule: WideSchedule
    gated: bool = False
    result_order: TokenOrder | None = None

    @classmethod
    def of(cls, rows: int, weight: Packed, schedule: WideSchedule) -> "WidePlan":
        """The plan of a product of `rows` rows with a weight of the mosaic layout."""
        out_features, in_features = weight.shape
        offset_bytes = 0 if weight.offsets is None else weight.offsets.dtype.itemsize
        scale_bytes = weight.scales.dtype.itemsize
        return cls(rows, in_features, out_features, weight.group_size, scale_bytes, offset_bytes, weight.bits, schedule)

    # The whole product
    @property
    def strips(self) -> int:
        return -(-self.out_features // STRIP)

    @property
    def results(self) -> int:
        """Numbers of a row of the result."""
        return self.out_features // 2 if self.gated else self.out_features

    @property
    def result_strips(self) -> int:
        return -(-self.results // STRIP)

    @property
    def token_order(self) -> TokenOrder:
        return TokenOrder(self.schedule.tokens, steps_per_run(self.group_size))

    @property
    def column_tiles(self) -> int:
        return -(-self.in_features // COLUMNS)

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def steps(self) -> int:
        """Stages that cover the inputs."""
        return -(-self.in_features // STAGE)

    @property
    def token_tiles(self) -> int:
        return -(-self.rows // self.schedule.tokens)

    @property
    def readers(self) -> int:
        """Blocks of a cluster that read the same x."""
        return 1 if self.schedule.joined else self.schedule.cluster

    # One block's part
    @property
    def block_features(self) -> int:
        return 64 * self.schedule.warpgroups * self.schedule.tiles

    @property
    def block_strips(self) -> int:
        return self.block_features // STRIP

    @property
    def halves(self) -> bool:
        """Whether a warpgroup's first two warps have a gate's strips, and the other two those that belong to them."""
        return self.gated and self.schedule.tiles == 1

    @property
    def part_strips(self) -> int:
        """Strips of results of a part."""
        return self.block_strips // 2 if self.gated else self.block_strips

    @property
    def feature_parts(self) -> int:
        """Parts of the output features that a cluster computes at a time."""
        return -(-self.result_strips // (self.part_strips * self.readers))

    def strip_of(self, index: Any) -> tuple[Any, Any]:
        """Which strip of the part's results, and of the weight, a block's strip is, from the part's first one on."""
        if not self.gated:
            return index, index
        half = 2 if self.halves else 4
        strip = index // (2 * half) * half + index % half
        return strip, strip + index // half % 2 * self.result_strips

    @property
    def parts(self) -> int:
        """Parts of the whole product that the clusters share."""
        return self.feature_parts * self.schedule.slices * self.token_tiles

    @property
    def clusters(self) -> int:
        return max(1, min(self.parts, self.schedule.blocks // self.schedule.cluster))

    @property
    def consumer_warps(self) -> int:
        return 4 * self.schedule.warpgroups

    @property
    def boxes(self) -> int:
        """Boxes of a stage of x as it is: halves of the inputs, and of the tokens where four blocks share them."""
        return max(2, self.readers)

    @property
    def box_tokens(self) -> int:
        return self.schedule.tokens * 2 // self.boxes

    @property
    def turns(self) -> bool:
        return self.schedule.turns and self.schedule.warpgroups > 1

    @property
    def segment(self) -> int:
        """Inputs of a stage that share a scale."""
        return min(self.group_size, STAGE) if self.groups > 1 else STAGE

    @property
    def segments(self) -> int:
        return STAGE // self.segment

    @property
    def by_lines(self) -> bool:
        """Whether results of 16 bits are written as whole lines, through shared memory, and not by each thread."""
        if self.result_order is not None:
            return True
        return self.rows > DIRECT_ROWS and self.schedule.slices == 1 and self.results % 8 == 0

    # Shared memory, in bytes: the stages, two barriers for each, and the warpgroups' lines. A stage is x [16 pieces of
    # 8 inputs, token, 16 bytes], or as it is [half of the inputs, token, 128 bytes swizzled], the words [strip, tile,
    # bytes], and the scales and offsets [strip, segment, 16].
    @property
    def x_bytes(self) -> int:
        return self.schedule.tokens * STAGE * 2

    @property
    def tile_bytes(self) -> int:
        """A tile of 16 x 64 codes."""
        return PIECE_BYTES * self.bits // 4

    @property
    def words_bytes(self) -> int:
        """One strip's words."""
        return STAGE // COLUMNS * self.tile_bytes

    @property
    def scales_start(self) -> int:
        return self.x_bytes + self.block_strips * self.words_bytes

    @property
    def offsets_start(self) -> int:
        return self.scales_start + self.block_strips * self.segments * STRIP * self.scale_bytes

    @property
    def stage_bytes(self) -> int:
        size = self.offsets_start + self.block_strips * self.segments * STRIP * self.offset_bytes
        return -(-size // 1024) * 1024 if self.schedule.natural else size  # as often as the swizzle repeats

    @property
    def full_barriers(self) -> int:
        return self.schedule.stages * self.stage_bytes

    @property
    def empty_barriers(self) -> int:
        return self.full_barriers + 8 * self.schedule.stages

    @property
    def ready_barrier(self) -> int:
        """Where the other block says that its stages are free."""
        return self.empty_barriers + 8 * self.schedule.stages

    @property
    def sent_barrier(self) -> int:
        """Where what the other block sends is counted."""
        return self.ready_barrier + 8

    @property
    def lines_start(self) -> int:
        return self.ready_barrier + 16 * self.schedule.joined

    @property
    def lines(self) -> int:
        if self.schedule.warpgroups == 1 and not self.halves:
            return LINES
        return LINES if self.schedule.tokens <= (MANY_OF_HALVES if self.halves else MANY_TOKENS) else FEW_LINES

    @property
    def lines_bytes(self) -> int:
        """One warpgroup's."""
        return self.lines * LINE if self.by_lines else 0

    @property
    def shared_bytes(self) -> int:
        return self.lines_start + self.schedule.warpgroups * self.lines_bytes

    @property
    def sent_bytes(self) -> int:
        """Sums of half of the tokens, which go where a block's stages were."""
        return self.block_features * self.schedule.tokens // 2 * 4


class Part:
    """The part of the product that a block works on: some features of some tokens over some of the stages."""

    def __init__(self, w: Any, plan: WidePlan, index: Any, rank: Any):
        """The blocks of a cluster have neighbouring features, or halves of the inputs."""
        schedule, slices = plan.schedule, plan.schedule.slices
        self.token_tile, rest = _token_tile(w, plan, index)
        self.slice, features = rest % slices, rest // slices
        self.first_strip = (features if schedule.joined else features * schedule.cluster + rank) * plan.part_strips
        """Of the results."""
        self.first_token = self.token_tile * schedule.tokens
        """Of the results."""
        share, shares = self.slice, slices
        if schedule.joined:
            self.first_token = self.first_token + rank * (schedule.tokens // 2)
            share, shares = rank, 2
        self.first_step = share * plan.steps // shares
        self.count = (share + 1) * plan.steps // shares - self.first_step


def _token_tile(w: Any, plan: WidePlan, index: Any) -> tuple[Any, Any]:
    """Of a part, and which of the parts of that tile it is."""
    tiles, together = plan.token_tiles, plan.schedule.together
    if not 0 < together < tiles:
        return index % tiles, index // tiles
    of_tile = plan.parts // tiles
    first = index // (together * of_tile) * together
    within = index - first * of_tile
    tile, rest = within % together, within // together
    fewer = tiles % together
    if fewer:  # are left at the end
        last = w.integer(tiles - fewer) <= first
        tile, rest = w.select(last, within % fewer, tile), w.select(last, within // fewer, rest)
    return first + tile, rest
