"""Schedules of the Hopper INT4 kernel by shape."""

import dataclasses
import functools

from pallas_kernels.int4_matmul.packing import PackedInt4
from pallas_kernels.int4_matmul.plan import PART, Plan, Schedule

MULTIPROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA GH200 480GB": 132, "NVIDIA H100 PCIe": 114}
"""By device kind; what is not listed is taken for the most common, 132."""
SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor, of which every block takes another kilobyte for the system."""


def plan_for(rows: int, weight: PackedInt4, device_kind: str = "NVIDIA H200") -> Plan:
    """The plan for `rows` (1 to 64) rows times a weight of the mosaic layout."""
    return _best(Plan.of(rows, weight, Schedule()), device_kind)


@functools.cache
def _best(plan: Plan, device_kind: str) -> Plan:
    """x of 17 rows and more leaves registers for one block on a multiprocessor, fewer rows for two; more than 8 rows

    leave none for twice the inputs a warp. Among what is left, the least waste.
    """
    resident = 2 if plan.rows <= 16 else 1
    blocks = MULTIPROCESSORS.get(device_kind, 132) * resident
    warps = 4 if plan.in_features <= 4 * PART else 8
    choices = [(1, 1)] if plan.rows > 32 else [(1, 2), (1, 1), (2, 1)] if plan.rows <= 8 else [(1, 2), (1, 1)]
    plans = []
    for parts, strips in choices:
        for depth in range(6 // (parts * strips), 0, -1):
            schedule = Schedule(warps=warps, parts=parts, strips=strips, depth=depth, blocks=blocks)
            candidate = dataclasses.replace(plan, schedule=schedule)
            if (candidate.shared_bytes + 1024) * resident <= SHARED_BYTES:
                plans.append(candidate)
                break
    return min(plans, key=_waste)


def _waste(plan: Plan) -> float:
    """Share of the time that blocks wait for the one with most units or are missing, and of bytes for partial sums."""
    blocks = plan.blocks_per_slice
    idle = 1 - plan.units / blocks / -(-plan.units // blocks)
    missing = 1 - min(1.0, blocks * plan.slices / plan.schedule.blocks)
    sums = 8 * plan.slices * plan.rows / plan.in_features if plan.slices > 1 else 0.0
    short_units = 0.03 if plan.schedule.strips == 1 else 0.0
    return idle + missing + sums + short_units
