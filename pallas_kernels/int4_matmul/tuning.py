"""Schedules of the Hopper INT4 kernel by shape."""

import functools

from pallas_kernels.int4_matmul.plan import PART, STRIP, Schedule

MULTIPROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA GH200 480GB": 132, "NVIDIA H100 PCIe": 114}
"""By device kind; what is not listed is taken for the most common, 132."""


@functools.cache
def schedule_for(rows: int, in_features: int, out_features: int, device_kind: str = "NVIDIA H200") -> Schedule:
    """The schedule for `rows` (1 to 64) rows times a weight [out_features, in_features].

    x of 32 rows and more leaves registers for one block on a multiprocessor, fewer rows for two. Units are 32 output
    features, or 16 where that divides the work more evenly.
    """
    multiprocessors = MULTIPROCESSORS.get(device_kind, 132)
    warps = 4 if in_features <= 4 * PART else 8
    slices = -(-in_features // (warps * PART))
    blocks = multiprocessors * (2 if rows <= 16 else 1)
    per_slice = max(1, round(blocks / slices))

    def idle_share(strips: int) -> float:
        units = -(-out_features // 64) * 64 // (STRIP * strips)
        each = units / min(units, per_slice)
        return 1 - each / -(-units // min(units, per_slice))

    few_units = out_features < per_slice * 2 * STRIP
    strips = 1 if rows > 32 or few_units or idle_share(1) + 0.05 < idle_share(2) else 2
    return Schedule(warps=warps, strips=strips, depth=6 // strips, blocks=blocks)
