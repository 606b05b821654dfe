"""Schedules of the Hopper INT4 kernel for many rows: the least of what a model of the card predicts."""

import dataclasses
import functools
import itertools

from pallas_kernels.int4_matmul.packing import PackedInt4
from pallas_kernels.int4_matmul.tuning import MULTIPROCESSORS
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule

BLOCK_SHARED_BYTES = 227 * 1024 - 1024
"""What a block may have of shared memory, less what the compiler takes."""
WIDE_ROWS = 17
"""From how many rows on this kernel is faster than the one that keeps x in registers."""
DEQUANTIZED_ROWS = 4096
"""From how many rows on cuBLAS is faster, even after a pass that unpacks the weight."""
CLUSTERS = (1, 2, 4)
SHAPES = ((1, 64, 2), (1, 64, 1), (1, 128, 1), (2, 64, 1), (2, 128, 1))
"""Tiles, most tokens, and teams for which there are registers."""
MEASURED: dict[tuple[int, int, int], WideSchedule] = {}
"""By rows, in_features and out_features: the fastest schedule of those tried on an H200 (docs/kernels.md)."""

# The card, per clock of 1.75 GHz: bytes from memory, from L2, and into one multiprocessor.
CLOCK = 1.75e9
MEMORY, L2, INGEST = 4.39e12 / CLOCK, 5.0e12 / CLOCK, 50.0
START, PART = 2500.0, 700.0
"""Clocks until the first product, and from one part to the next."""
WAIT, UNPACK, ALONE, MULTIPLY = 130.0, 570.0, 300.0, 4.2
"""Clocks of a warpgroup for a stage, from a fit to measurements: until its words are there; to unpack 64 features,
with another warpgroup beside it and if nothing but the arithmetic units limits both; to multiply them by a token."""
REDUCTION, REDUCED = 1.0e-6, 3.5e12
"""Seconds of a kernel that adds slices, and the bytes that it reads in one."""


def wide_schedule(rows: int, weight: PackedInt4, device_kind: str = "NVIDIA H200") -> WideSchedule:
    """The schedule for `rows` rows times a weight of the mosaic layout."""
    multiprocessors = MULTIPROCESSORS.get(device_kind, 132)
    out_features, in_features = weight.shape
    measured = MEASURED.get((rows, in_features, out_features))
    if measured is not None and multiprocessors == 132:
        return measured
    return schedules(rows, weight, multiprocessors)[0]


def schedules(rows: int, weight: PackedInt4, multiprocessors: int = 132) -> list[WideSchedule]:
    """All that fit, the best prediction first."""
    return _sorted(WidePlan.of(rows, weight, WideSchedule()), multiprocessors)


@functools.cache
def _sorted(plan: WidePlan, multiprocessors: int) -> list[WideSchedule]:
    plans = [p for p in _candidates(plan, multiprocessors) if p is not None]
    return list(dict.fromkeys(p.schedule for p in sorted(plans, key=predicted_seconds)))


def resident(cluster: int, multiprocessors: int) -> int:
    """Blocks that run at once: not every group of multiprocessors is a multiple of four."""
    return multiprocessors if cluster < 4 else multiprocessors * 28 // 33 // 4 * 4


def _candidates(plan: WidePlan, multiprocessors: int) -> list[WidePlan | None]:
    slices = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= plan.steps]
    return [
        _fitted(
            plan, WideSchedule(_even(plan.rows, most), 2, tiles, s, c, blocks=resident(c, multiprocessors), teams=n)
        )
        for (tiles, most, n), s, c in itertools.product(SHAPES, slices, CLUSTERS)
        if n * s <= plan.steps
    ]


def _even(rows: int, most: int) -> int:
    """Tokens of a tile if as many tiles as it takes are of one size, a multiple of 8."""
    tiles = -(-rows // most)
    return 8 * -(-rows // (8 * tiles))


def _fitted(plan: WidePlan, schedule: WideSchedule) -> WidePlan | None:
    """The plan with as many stages as shared memory has room for; None if there are less than three."""
    fitted = dataclasses.replace(plan, schedule=schedule)
    rest = schedule.warpgroups * (fitted.lines_bytes + fitted.sums_bytes)
    stages = min(10, (BLOCK_SHARED_BYTES - rest) // (fitted.stage_bytes + 16))
    if stages < 3:
        return None
    return dataclasses.replace(fitted, schedule=dataclasses.replace(schedule, stages=stages))


def predicted_seconds(plan: WidePlan) -> float:
    """What the kernel and the addition of its slices should take."""
    schedule = plan.schedule
    tiles = schedule.warpgroups * schedule.tiles
    active = plan.clusters * schedule.cluster
    weights = plan.stage_bytes - plan.x_bytes
    costs = (
        (WAIT + schedule.tiles * (UNPACK + MULTIPLY * schedule.tokens)) / schedule.teams,
        tiles * 8 * max(schedule.tokens / 2, 16.0),  # tensor cores
        schedule.tiles * ALONE,
        plan.stage_bytes / INGEST,
        (plan.x_bytes / schedule.cluster + weights) * active / L2,
    )
    stage = 0.9 * max(costs) + 0.1 * sum(costs)  # they get in each other's way
    rounds, steps = -(-plan.parts // plan.clusters), -(-plan.steps // schedule.slices)
    clocks = START + rounds * (steps * stage + PART)
    from_memory = START + weights * plan.steps * plan.strips / plan.block_strips / MEMORY
    seconds = max(clocks, from_memory) / CLOCK
    if schedule.slices > 1:
        seconds += REDUCTION + 4 * schedule.slices * plan.rows * plan.out_features / REDUCED
    return seconds
