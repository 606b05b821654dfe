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
DEQUANTIZED_ROWS = 2048
"""From how many rows on cuBLAS multiplies, after a pass that unpacks the weight. Both should take less than 15 % more
than cuBLAS alone; this kernel has not been timed with more than 64 rows."""
CLUSTERS = (1, 2, 4)
SHAPES = ((1, 64), (1, 128), (2, 64), (2, 128))
"""Tiles and most tokens for which there are registers."""
MEASURED = {
    (64, 4096, 14336): WideSchedule(64, cluster=2),
    (64, 14336, 4096): WideSchedule(64, tiles=2, slices=8, cluster=2),
    (64, 4096, 4096): WideSchedule(64, slices=3, cluster=4, blocks=112),
    (64, 4096, 6144): WideSchedule(64, slices=2, cluster=4, blocks=112),
}
"""By rows, in_features and out_features: the fastest schedule, with the addition of its slices, of those tried on an
H200 (docs/kernels.md); it gets as many stages as there is room for."""

# A model of the card, fitted to the times of these and others, in clocks of 1.75 GHz. What a multiprocessor receives
# comes one after the other: so many bytes a clock from memory, more from L2.
CLOCK = 1.75e9
FROM_MEMORY, FROM_L2 = 16.0, 56.0
ALL_FROM_L2 = 5.0e12 / CLOCK
"""Bytes a clock that L2 gives to all multiprocessors."""
START, PART = 4800.0, 700.0
"""Clocks of a launch with its first copies, and from one part to the next."""
REDUCTION, REDUCED = 1.0e-6, 3.5e12
"""Seconds of a kernel that adds slices, and the bytes that it reads in one."""


def wide_schedule(rows: int, weight: PackedInt4, device_kind: str = "NVIDIA H200") -> WideSchedule:
    """The schedule for `rows` rows times a weight of the mosaic layout."""
    multiprocessors = MULTIPROCESSORS.get(device_kind, 132)
    out_features, in_features = weight.shape
    measured = MEASURED.get((rows, in_features, out_features))
    if measured is not None and multiprocessors == 132:
        plan = _fitted(WidePlan.of(rows, weight, WideSchedule()), measured)
        if plan is not None:
            return plan.schedule
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
        _fitted(plan, WideSchedule(_even(plan.rows, most), 2, tiles, s, c, blocks=resident(c, multiprocessors)))
        for (tiles, most), s, c in itertools.product(SHAPES, slices, CLUSTERS)
    ]


def _even(rows: int, most: int) -> int:
    """Tokens of a tile if as many tiles as it takes are of one size, a multiple of 8."""
    tiles = -(-rows // most)
    return 8 * -(-rows // (8 * tiles))


def _fitted(plan: WidePlan, schedule: WideSchedule) -> WidePlan | None:
    """The plan with as many stages as shared memory has room for; None if there are less than three."""
    fitted = dataclasses.replace(plan, schedule=schedule)
    rest = schedule.warpgroups * fitted.lines_bytes
    stages = min(10, (BLOCK_SHARED_BYTES - rest) // (fitted.stage_bytes + 16))
    if stages < 3:
        return None
    return dataclasses.replace(fitted, schedule=dataclasses.replace(schedule, stages=stages))


def predicted_seconds(plan: WidePlan) -> float:
    """What the kernel and the addition of its slices should take."""
    schedule = plan.schedule
    active = plan.clusters * schedule.cluster
    weights = plan.stage_bytes - plan.x_bytes
    new = 1 / plan.token_tiles  # the share of the weights that no other block has brought into L2
    costs = (
        schedule.warpgroups * schedule.tiles * 8 * max(schedule.tokens / 2, 16.0),  # tensor cores
        plan.x_bytes / FROM_L2 + weights * (new / FROM_MEMORY + (1 - new) / FROM_L2),
        (plan.x_bytes / schedule.cluster + weights) * active / ALL_FROM_L2,
    )
    stage = 0.9 * max(costs) + 0.1 * sum(costs)  # they get in each other's way
    rounds, steps = -(-plan.parts // plan.clusters), -(-plan.steps // schedule.slices)
    seconds = (START + rounds * (steps * stage + PART)) / CLOCK
    if schedule.slices > 1:
        seconds += REDUCTION + 4 * schedule.slices * plan.rows * plan.out_features / REDUCED
    return seconds
