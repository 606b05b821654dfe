"""Schedules of the Hopper INT4 kernel by shape."""

import dataclasses
import functools
import itertools

from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Plan, Schedule

MULTIPROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA GH200 480GB": 132, "NVIDIA H100 PCIe": 114}
"""By device kind; what is not listed is taken for the most common, 132."""
SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 2048
"""Shared memory of a multiprocessor, and what every block takes for the system (1 KB) and the compiler."""
SHAPES = {
    4: [(16, 2, 1), (16, 1, 1), (8, 1, 2), (4, 1, 4)],
    8: [(16, 2, 1), (8, 2, 2), (16, 1, 1), (8, 1, 2), (4, 1, 4)],
    16: [(16, 2, 1), (16, 1, 1), (8, 1, 2), (4, 1, 4)],
    32: [(16, 1, 1), (8, 1, 2), (4, 1, 4)],
    64: [(8, 1, 1), (4, 1, 2)],
}
"""By the most rows, what x leaves registers for: warps, parts and blocks at once; the first of equals is taken.

Two blocks of 8 warps x 2 parts need at most 128 registers a thread each, to which ptxas keeps only for 5 to 8 rows.
"""
DIGITS_MAX_ROWS = 8
FUSED_MAX_ROWS = 8
"""Beyond, x is too much of what a block does: a norm in the kernel costs more there than the kernels it saves."""


def plan_for(rows: int, weight: Packed, device_kind: str = "NVIDIA H200", fusion: Fusion = PLAIN) -> Plan:
    """The plan for `rows` (1 to 64) rows times a weight of the mosaic layout."""
    digits = rows <= DIGITS_MAX_ROWS and (weight.kind != "code_book" or weight.whole)
    return _best(Plan.of(rows, weight, Schedule(digits=digits), fusion), MULTIPROCESSORS.get(device_kind, 132))


@functools.cache
def _best(plan: Plan, multiprocessors: int) -> Plan:
    most_rows = min(most for most in SHAPES if plan.rows <= most)
    plans = []
    for warps, parts, resident in SHAPES[most_rows]:
        blocks = multiprocessors * resident
        schedule = Schedule(warps=warps, parts=parts, blocks=blocks, digits=plan.schedule.digits)
        plans += _fitted(plan, schedule, resident)
    return min(plans, key=_waste)


def _fitted(plan: Plan, schedule: Schedule, resident: int) -> list[Plan]:
    """The plan with most weights in flight and fewest additions of sums for which shared memory has room, if any."""
    plans, unit = [], plan.strip_parts
    for depth, strips in itertools.product(range(1, schedule.depth + 1), range(unit, schedule.strips + 1, unit)):
        fitted = dataclasses.replace(plan, schedule=dataclasses.replace(schedule, strips=strips, depth=depth))
        if (fitted.shared_bytes + RESERVED_BYTES) * resident <= SHARED_BYTES:
            plans.append(fitted)
    return sorted(plans, key=lambda p: (p.schedule.depth * p.schedule.strips, p.schedule.depth))[-1:]


def _waste(plan: Plan) -> float:
    """Share of the time that blocks wait for the one with most strips, that inputs or blocks are missing, and that

    partial sums take: adding them is a kernel of about a microsecond.
    """
    blocks = plan.blocks_per_slice
    idle = 1 - plan.result_strips / blocks / -(-plan.result_strips // blocks)
    ragged = 1 - plan.in_features / (plan.slices * plan.block_columns)
    missing = 1 - min(1.0, blocks * plan.slices / plan.schedule.blocks)
    return idle + ragged + missing + (0.1 if plan.slices > 1 else 0.0)
