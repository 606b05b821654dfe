"""Schedules of the Hopper INT4 kernel by shape."""

import dataclasses
import functools
import itertools

from pallas_kernels.int4_matmul.columns import MOST_TOKENS
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PART, PLAIN, Fusion, Plan, Schedule

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
SCALED_SHAPES = {
    2: [(16, 2, 1, 4), (8, 2, 2, 2), (4, 2, 4, 4)],
    8: [(16, 2, 1, 2), (8, 2, 2, 2), (4, 2, 4, 2)],
}
"""Beside those, where x is taken in columns or lifted (columns.py, lifted.py): warps, parts, blocks at once, and
strips between additions."""
APART_SHAPES = {8: [(16, 2, 4)], 16: [(16, 2, 3), (16, 1, 6)]}
"""Before those, for groups of 128, with neither norm nor gate: four warps more (apart.py); warps, parts, strips ahead.

Sixteen rows took a sixth to a quarter less than halves; eight as much as without for seven strips a block, and 2 to 6 %
less for two or three. With a norm, which takes registers, and for groups of 32, they took more.
"""
APART_FEW_STRIPS, APART_FEW_DEPTH = 3, 2
"""For up to 8 rows: of so many strips a block so many are asked for at first."""
JOINED = {
    2: Schedule(16, 3, 2, 2, 132, scaled=True, joined=True),
    7: Schedule(8, 2, 2, 3, 7 * 32, scaled=True, joined=True),
}
"""Beside those, by slices of the inputs: for clusters of blocks that add up the slices themselves, see joined.py.

As many clusters as 132 multiprocessors run at once: 12288 inputs, K12288 N4096, took 9.6 us for one row and 10.5 for
five (8.9 and 9.9 and as much as `ADDING_SLICES` and a launch); 14336 inputs 10.6 and 11.4 (9.5 and 10.6).
"""
HALF_FEW, HALF, HALF_MANY = (
    Schedule(8, 2, strips, depth, 264, scaled=True, bulk=True, joined=True)
    for strips, depth in ((2, 2), (2, 3), (1, 2))
)
HALVES_BY_STRIPS = {2: HALF_FEW, 3: HALF_FEW, 7: HALF}
HALVES = {
    **{(rows, strips): way for rows in range(3, 9) for strips, way in HALVES_BY_STRIPS.items()},
    (16, 7): HALF_MANY,
}
"""Before all others, for 4096 inputs in groups of 128 and nothing around the product, by rows and most strips a block:
two blocks a multiprocessor with half of the inputs each, in clusters of two.

Eight rows took 7 % less than with four warps more (apart.py) for 14336 outputs, 3 % less for 6144, 4 % less for 4096;
sixteen 3 % less for 14336, and more for the others. With 9 to 15 rows registers leave no room for two.
In scratch runs three to seven rows took less for all three: 2 to 6 % for 14336, about 1 to 10 % for the others.
"""
HALVES_ADDING = {(rows, 2) for rows in range(3, 9)}
"""Of these also with a residual, as o has in a model: 1 to 9 % less in a scratch run."""
BULK_STRIPS = {2: 2, 16: 3}
"""By the most rows: from so many strips a block on, weights come by bulk copies, the first strip before x.

With two strips that took 4.3 us for one row (asynchronous copies: 4.4), 5.6 for five and eight (5.3, 5.5); with seven
10.7 for eight (12.4) and 15.1 for sixteen (16.9), in two blocks a multiprocessor 10.1 for eight (11.5).
"""
DIGITS_MAX_ROWS = 8
ADDING_SLICES, JOINING_SLICES = 1.3, 0.6
"""Microseconds of the kernel that adds partial sums, and of blocks that do it themselves. Of a small matrix, such as
the [1024, 3072] of a 0.6B model, the first are more than what fewer blocks lose."""
FUSED_MAX_ROWS = 8
"""Beyond, x is too much of what a block does: a norm in the kernel costs more there than the kernels it saves."""


ONCE_MAX_ROWS, ONCE_WARPS, ONCE_CODES = 32, 12, 6144 * 1024
"""Up to so many rows, and for matrices of so many warps and codes, a block has a strip of results or two, see once.py.

The codes are those of the gate and up of a 0.6B model, the largest that has been timed (at 1, 2, 16 and 32 rows).
"""
ONCE_TOKENS = 16
"""For which a warp of 256 inputs has registers, and one of 128 where two blocks share a multiprocessor."""


def plan_for(rows: int, weight: Packed, device_kind: str = "NVIDIA H200", fusion: Fusion = PLAIN) -> Plan:
    """The plan for `rows` (1 to 64) rows times a weight of the mosaic layout."""
    small = once_for(rows, weight, device_kind, fusion)
    if small is not None:
        return small
    digits = rows <= DIGITS_MAX_ROWS and (weight.kind != "code_book" or weight.whole)
    plan = Plan.of(rows, weight, Schedule(digits=digits), fusion)
    return _best(plan, _is_measured(plan, weight), MULTIPROCESSORS.get(device_kind, 132))


def once_for(rows: int, weight: Packed, device_kind: str = "NVIDIA H200", fusion: Fusion = PLAIN) -> Plan | None:
    """The plan with a block for each strip of results, for matrices so small that all are on the card at once."""
    small = rows <= ONCE_MAX_ROWS and weight.shape[0] * weight.shape[1] <= ONCE_CODES
    if not small or weight.bits != 4 or weight.kind == "code_book":
        return None
    unit, parts = 2 if fusion.gated else 1, 1 if weight.shape[1] <= 8 * PART else 2
    warps, strips = weight.shape[1] // (parts * PART), -(-weight.shape[0] // (unit * STRIP))
    many, multiprocessors = rows > ONCE_TOKENS, MULTIPROCESSORS.get(device_kind, 132)
    # 32 tokens are two tiles, or a block has two strips of them for which it is alone on its multiprocessor.
    tiles = 2 if many and parts > 1 else 1
    each = 2 if many and parts == 1 and strips > multiprocessors and strips % 2 == 0 else 1
    # Two blocks of 256 threads have room where they take at most 128 registers each: not 256 inputs of so many tokens.
    resident = 1 if warps > 8 or many or (parts > 1 and rows > DIGITS_MAX_ROWS) else 2
    blocks = strips // each
    if not 4 <= warps <= ONCE_WARPS or warps % 4 or blocks * tiles > resident * multiprocessors:
        return None
    schedule = Schedule(warps, parts, unit * each, unit * each, blocks, once=True, tiles=tiles)
    plan = Plan.of(rows, weight, schedule, fusion)
    return plan if plan.whole else None


def _is_measured(plan: Plan, weight: Packed) -> bool:
    """Whether weights may come by bulk copies, and x be lifted: only what has run on a GPU, more would do."""
    return plan.bits == 4 and weight.kind != "code_book" and plan.group_size in (32, 64, PART)


@functools.cache
def _best(plan: Plan, measured: bool, multiprocessors: int) -> Plan:
    plans, many = [], plan.rows > max(SCALED_SHAPES)
    if measured:
        halves = _halves(plan, multiprocessors)
        if halves is not None:
            return halves
        plans += _apart(plan, multiprocessors)
    if measured and not many:
        for warps, parts, resident, strips in _of_rows(SCALED_SHAPES, plan.rows):
            schedule = Schedule(warps, parts, strips, blocks=multiprocessors * resident, scaled=True)
            plans += [_streamed(p) for p in _fitted(plan, schedule, resident) if p.even]
        # Where there is nothing to be added, XLA adds slices on the way of what comes next.
        if plan.fusion == Fusion(residual=True) and multiprocessors == 132:
            for slices, schedule in JOINED.items():
                p = _streamed(dataclasses.replace(plan, schedule=schedule))
                if p.slices == slices and p.even and _fits(p, -(-schedule.blocks // multiprocessors)):
                    plans.append(p)
    for warps, parts, resident in _of_rows(SHAPES, plan.rows):
        schedule = Schedule(warps, parts, blocks=multiprocessors * resident, digits=plan.schedule.digits)
        fitted = _fitted(plan, schedule, resident)
        streamed = measured and many and plan.rows <= max(BULK_STRIPS)
        plans += [_streamed(p) if streamed and p.even else p for p in fitted]
    return min(plans, key=_waste)


def _halves(plan: Plan, multiprocessors: int) -> Plan | None:
    """The plan with a cluster for the two halves of the inputs, where it has been measured."""
    two_halves = plan.in_features == 2 * HALF.warps * HALF.parts * PART
    if multiprocessors != 132 or not two_halves or plan.group_size != PART:
        return None
    size = plan.rows, dataclasses.replace(plan, schedule=HALF).most_strips
    if plan.fusion != PLAIN and (plan.fusion != Fusion(residual=True) or size not in HALVES_ADDING):
        return None
    schedule = HALVES.get(size)
    return None if schedule is None else dataclasses.replace(plan, schedule=schedule)


def _apart(plan: Plan, multiprocessors: int) -> list[Plan]:
    """Plans with four warps more, where these have been measured."""
    fusion = plan.fusion
    if plan.rows <= MOST_TOKENS or plan.rows > max(APART_SHAPES) or plan.group_size != PART:
        return []
    if fusion.norm_eps is not None or fusion.gated:
        return []
    plans = []
    for warps, parts, depth in _of_rows(APART_SHAPES, plan.rows):
        schedule = Schedule(warps, parts, 1, depth, multiprocessors, scaled=True, bulk=True, apart=True)
        p = dataclasses.replace(plan, schedule=schedule)
        if plan.rows <= DIGITS_MAX_ROWS and p.most_strips <= APART_FEW_STRIPS:
            p = dataclasses.replace(plan, schedule=dataclasses.replace(schedule, depth=APART_FEW_DEPTH))
        if p.even and _fits(p, 1):
            plans.append(p)
    return plans


def _of_rows[Entry](table: dict[int, Entry], rows: int) -> Entry:
    return table[min(most for most in table if rows <= most)]


def _streamed(plan: Plan) -> Plan:
    bulk = plan.most_strips >= _of_rows(BULK_STRIPS, plan.rows)
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, bulk=bulk))


def _fitted(plan: Plan, schedule: Schedule, resident: int) -> list[Plan]:
    """The plan with most weights in flight and fewest additions of sums for which shared memory has room, if any."""
    plans, unit = [], plan.strip_parts
    for depth, strips in itertools.product(range(1, schedule.depth + 1), range(unit, schedule.strips + 1, unit)):
        fitted = dataclasses.replace(plan, schedule=dataclasses.replace(schedule, strips=strips, depth=depth))
        if _fits(fitted, resident):
            plans.append(fitted)
    return sorted(plans, key=lambda p: (p.schedule.depth * p.schedule.strips, p.schedule.depth))[-1:]


def _fits(plan: Plan, resident: int) -> bool:
    """Whether shared memory has room for so many blocks."""
    return (plan.shared_bytes + RESERVED_BYTES) * resident <= SHARED_BYTES


def _waste(plan: Plan) -> float:
    """Microseconds beyond those that reading the weights at 3 TB/s takes: blocks wait for the one with most strips,

    inputs or blocks are missing, and partial sums are added by another kernel.
    """
    blocks = plan.blocks_per_slice
    idle = 1 - plan.result_strips / blocks / -(-plan.result_strips // blocks)
    ragged = 1 - plan.in_features / (plan.slices * plan.block_columns)
    missing = 1 - min(1.0, blocks * plan.slices / plan.schedule.blocks)
    reading = plan.in_features * plan.out_features * plan.bits / 8 / 3e6
    adding = 0.0 if plan.slices == 1 else JOINING_SLICES if plan.schedule.joined else ADDING_SLICES
    return reading * (idle + ragged + missing) + adding
