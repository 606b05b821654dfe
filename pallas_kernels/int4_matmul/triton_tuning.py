"""Schedules of the Triton INT4 kernels by number of rows and card, chosen by reasoning about what each has room for.

A block of the tensor-core kernel keeps `stages - 1` tiles in flight, 8 KB of words each for 128 output features. To be
limited by memory, a multiprocessor needs its share of (bandwidth x latency) in flight: about 27 KB on an H200, 12 KB on
an A100, 6 KB on an RTX 4090. Two to four blocks give that, and hide each other's barriers.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What tuning chooses.

    A block computes `block_n` output features for `block_m` rows (0: the kernel without tensor cores, up to 4 rows)
    with `warps` warps and `stages` tiles of weights between memory and use, over one of `splits` shares of the inputs,
    whose float32 partial sums XLA adds inside whatever comes next. `rescaled` blocks keep one set of sums, measured in
    the scale of the group at hand, instead of a group's beside the whole: half the registers of a wide block.
    """

    block_n: int
    block_m: int
    warps: int
    stages: int
    splits: int = 1
    rescaled: bool = False

    @property
    def kernel(self) -> str:
        return "dot" if self.block_m else "gemv"


# By the most rows: block_n, block_m, warps, stages, bytes of shared memory.
DOT: dict[int, tuple[Schedule, int]] = {
    8: (Schedule(128, 8, 4, 4), 33 << 10),
    16: (Schedule(128, 16, 4, 4), 41 << 10),
    32: (Schedule(128, 32, 4, 3), 41 << 10),
    64: (Schedule(128, 64, 8, 3), 74 << 10),
}
# For weights of 4 bits with zero points in groups of 128 or more, where the card is one that they were timed on. A
# weight is unpacked for twice the rows.
WIDE: dict[str, dict[int, tuple[Schedule, int]]] = {
    "9.0": {256: (Schedule(128, 128, 8, 2, rescaled=True), 73 << 10)},
}
# The kernel without tensor cores takes 4.7 instructions a code against 2.4 (counted in the machine code), but for
# float32 rows tensor cores need three products for one, and 64 such rows more than the 99 KB that a block can have.
EXACT: dict[int, tuple[Schedule, int]] = {
    4: (Schedule(128, 0, 4, 3), 19 << 10),
    16: (Schedule(128, 16, 4, 4), 54 << 10),
    32: (Schedule(128, 32, 4, 3), 58 << 10),
}

SHARED_BYTES = {"8.0": 164 << 10, "8.6": 100 << 10, "8.7": 164 << 10, "8.9": 100 << 10, "9.0": 228 << 10}
"""Shared memory of a multiprocessor by compute capability; of what is not listed at least 100 KB are assumed."""
MOST_BLOCKS = 4
"""Blocks of 4 warps on a multiprocessor: what 128 registers a thread leave room for."""
MOST_BLOCKS_WITH_BOOK = 3
"""Code books of 16 bits take 168 registers in blocks of 4 warps."""
LEAST_TILES = 4
"""Tiles of a share of the inputs, so that its pipeline fills."""


def schedule_for(
    rows: int,
    out_features: int,
    tiles: int,
    *,
    exact: bool,
    book: bool,
    multiprocessors: int,
    capability: str,
    wide: bool = False,
) -> Schedule:
    """The schedule for `rows` rows and `tiles` tiles of inputs; `exact` where rows are float32, `book` for code books.

    `wide`: the weight is one that `WIDE` is for, from its 65th row on where the card has an entry there.
    Blocks that share an output feature split its inputs until all multiprocessors have their blocks at once.
    """
    table = EXACT if exact else DOT
    if wide and rows > max(DOT):
        table = WIDE.get(capability, DOT)
    schedule, shared = table[next((most for most in table if rows <= most), max(table))]
    resident = max(1, min(MOST_BLOCKS * 4 // schedule.warps, SHARED_BYTES.get(capability, 100 << 10) // shared))
    if book and not exact:
        resident = min(resident, MOST_BLOCKS_WITH_BOOK)
    row_blocks = -(-rows // schedule.block_m) if schedule.block_m else 1
    blocks = -(-out_features // schedule.block_n) * row_blocks
    splits = max(1, min(resident * multiprocessors // blocks, tiles // LEAST_TILES))
    return dataclasses.replace(schedule, splits=splits)
