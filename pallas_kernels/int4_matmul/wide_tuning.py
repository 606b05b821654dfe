"""Schedules of the Hopper INT4 kernel for many rows: the least of what a model of the card predicts."""

import dataclasses
import functools
import itertools

from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.tuning import MULTIPROCESSORS
from pallas_kernels.int4_matmul.wide_plan import UNIT_BYTES, WidePlan, WideSchedule

BLOCK_SHARED_BYTES = 227 * 1024 - 1024
"""What a block may have of shared memory, less what the compiler takes."""
WIDE_ROWS = 17
"""From how many rows on this kernel is faster than the one that keeps x in registers."""
DEQUANTIZED_ROWS = 2048
"""From how many rows on cuBLAS multiplies, after a pass that unpacks the weight. Both should take less than 15 % more
than cuBLAS alone; this kernel has not been timed with more than 64 rows."""
CLUSTERS = (1, 2, 4)
MOST_SLICES = 8
"""Blocks that a cluster may have everywhere."""
SHAPES = ((2, 1, 64), (2, 1, 128), (2, 2, 64), (2, 2, 128), (4, 1, 64))
"""Multiplying warpgroups, tiles of each, and most tokens for which there are registers."""

# A model of the card, fitted to the times of these and others, in clocks of 1.75 GHz. What a multiprocessor receives
# comes one after the other: so many bytes a clock from memory, more from L2.
CLOCK = 1.75e9
FROM_MEMORY, FROM_L2 = 16.0, 56.0
ALL_FROM_L2 = 5.0e12 / CLOCK
"""Bytes a clock that L2 gives to all multiprocessors."""
START, PART = 4800.0, 700.0
"""Clocks of a launch with its first copies, and from one part to the next."""
EXCHANGE, EXCHANGED = 1500.0, 32.0
"""Clocks in which a cluster meets twice to add its slices, and the bytes that a block gets of the others in one."""


def wide_schedule(rows: int, weight: Packed, device_kind: str = "NVIDIA H200") -> WideSchedule:
    """The schedule for `rows` rows times a weight of the mosaic layout."""
    multiprocessors = MULTIPROCESSORS.get(device_kind, 132)
    return schedules(rows, weight, multiprocessors)[0]


def schedules(rows: int, weight: Packed, multiprocessors: int = 132) -> list[WideSchedule]:
    """All that fit, the best prediction first."""
    return _sorted(WidePlan.of(rows, weight, WideSchedule()), multiprocessors)


@functools.cache
def _sorted(plan: WidePlan, multiprocessors: int) -> list[WideSchedule]:
    plans = [p for p in _candidates(plan, multiprocessors) if p is not None]
    return list(dict.fromkeys(p.schedule for p in sorted(plans, key=predicted_seconds)))


def resident(cluster_blocks: int, multiprocessors: int) -> int:
    """Blocks that run at once: not every group of multiprocessors is a multiple of four."""
    if cluster_blocks <= 2:
        return multiprocessors // cluster_blocks * cluster_blocks
    return multiprocessors * 28 // 33 // cluster_blocks * cluster_blocks


def _candidates(plan: WidePlan, multiprocessors: int) -> list[WidePlan | None]:
    together = [(s, 1) for s in range(2, min(MOST_SLICES, plan.steps) + 1)] + [(1, c) for c in CLUSTERS]
    return [
        _fitted(
            plan, WideSchedule(_even(plan.rows, most), warpgroups, tiles, s, c, blocks=resident(s * c, multiprocessors))
        )
        for (warpgroups, tiles, most), (s, c) in itertools.product(SHAPES, together)
    ]


def _even(rows: int, most: int) -> int:
    """Tokens of a tile if as many tiles as it takes are of one size, a multiple of 8."""
    tiles = -(-rows // most)
    return 8 * -(-rows // (8 * tiles))


def _fitted(plan: WidePlan, schedule: WideSchedule) -> WidePlan | None:
    """The plan with as many stages as shared memory has room for; None if there are less than three.

    None, too, if a cluster that adds its slices would have more than one part.
    """
    fitted = dataclasses.replace(plan, schedule=schedule)
    if schedule.slices > 1 and fitted.parts * schedule.slices > schedule.blocks:
        return None
    rest = schedule.warpgroups * fitted.lines_bytes
    stages = min(10, (BLOCK_SHARED_BYTES - rest) // (fitted.stage_bytes + 16))
    if stages < 3:
        return None
    return dataclasses.replace(fitted, schedule=dataclasses.replace(schedule, stages=stages))


def predicted_seconds(plan: WidePlan) -> float:
    """What the kernel should take."""
    schedule = plan.schedule
    active = plan.clusters * plan.cluster_blocks
    weights = plan.stage_bytes - plan.x_bytes
    new = 1 / plan.token_tiles  # the share of the weights that no other block has brought into L2
    costs = (
        schedule.warpgroups * schedule.tiles * 8 * max(schedule.tokens / 2, 16.0),  # tensor cores
        plan.x_bytes / FROM_L2 + weights * (new / FROM_MEMORY + (1 - new) / FROM_L2),
        (plan.x_bytes / schedule.cluster + weights) * active / ALL_FROM_L2,
    )
    stage = 0.9 * max(costs) + 0.1 * sum(costs)  # they get in each other's way
    rounds, steps = -(-plan.parts // plan.clusters), -(-plan.steps // schedule.slices)
    clocks = START + rounds * (steps * stage + PART)
    if schedule.slices > 1:
        clocks += EXCHANGE + plan.units * UNIT_BYTES / EXCHANGED
    return clocks / CLOCK
