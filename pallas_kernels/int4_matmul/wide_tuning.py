"""Schedules of the Hopper INT4 kernel for many rows: the least of what a model of the card predicts."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from pallas_kernels.int4_matmul.packing import steps_per_run
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.tuning import MULTIPROCESSORS
from pallas_kernels.int4_matmul.wide_plan import MANY_TOKENS, WidePlan, WideSchedule

BLOCK_SHARED_BYTES = 227 * 1024 - 1024
"""What a block may have of shared memory, less what the compiler takes."""
WIDE_ROWS = 17
"""From how many rows on this kernel is faster than the one that keeps x in registers."""
DEQUANTIZED_ROWS = 4096
"""From how many rows on cuBLAS multiplies, after a pass that unpacks the weight, but where x as it is was measured
faster (`NATURAL`): the pass adds 7 % to 4096 rows, 13 % to 2048."""
GATED_ROWS = 9
"""From how many rows on a gated block is faster as a whole: at 16 by 7 %, at 4096 by 11 % (and by 6 % than cuBLAS with
bfloat16 weights)."""
TOGETHER_ROWS, TOGETHER_TOKENS = 8192, 2048
"""From how many rows on, if x is larger than the L2 cache, and how many tokens are multiplied by all weights before the
next ones are. Gated blocks of 8192 and 16384 rows of an 8B model took a fifteenth and a tenth less so."""
NATURAL = {
    (4096, 4096): (193, 8192),
    (4096, 6144): (129, 8192),
    (4096, 14336): (193, 8192),
    (14336, 4096): (193, 8192),
}
"""By in_features and out_features, from how many to how many rows x is read as it is, and not brought into order by a
kernel of its own, if codes are linear ones of 4 bits and a warpgroup has one tile. That is for products called alone,
and for o where attention writes no order."""
ROUNDS = {(4096, 4096): 193, (4096, 6144): 129, (4096, 14336): 513, (14336, 4096): 513}
"""From how many rows on x as it is gets the schedule with the shortest rounds (`_of_rounds`): measured at 20 to 30
numbers of rows from there to 8192. Below, the choice is that for x in order."""
JOINED = {(4096, 6144): (193, 384)}
"""From how many to how many rows two blocks have the same 192 outputs of half of the tokens, each over half of the
inputs: 128 parts for 132 multiprocessors where a block over all inputs leaves 36 idle. Measured 4 to 10 % faster at 208
to 256, 352 and 384 rows."""
TOGETHER_BYTES, TOGETHER_TILES = 16 << 20, 4
"""From what size of x as it is on, and how many tiles of tokens are multiplied by all weights before the next ones are.
Without, 3584 and 4096 rows took a fiftieth to a thirtieth longer."""
L2_BYTES = 50 << 20
CLUSTERS = (1, 2, 4)
RESIDENT = {1: 132, 2: 132, 4: 112}
"""Blocks that 132 multiprocessors run at once, by the blocks of a cluster: groups of multiprocessors are no multiples
of four. Clusters of 4 took two rounds at 128 blocks."""
SHAPES = ((1, 1, 256), (2, 1, 64), (2, 1, 128), (2, 2, 64), (2, 2, 128), (3, 1, 128), (2, 1, 256))
"""Multiplying warpgroups, tiles of each, and most tokens for which there are registers."""
MEASURED = {
    (16, 4096, 14336): WideSchedule(16),
    (64, 4096, 14336): WideSchedule(64, cluster=2),
    (64, 4096, 28672): WideSchedule(64, tiles=2, cluster=4, blocks=112),
    (64, 14336, 4096): WideSchedule(64, tiles=2, slices=8, cluster=2),
    (64, 4096, 4096): WideSchedule(64, slices=3, cluster=4, blocks=112),
    (64, 4096, 6144): WideSchedule(64, slices=2, cluster=4, blocks=112),
    (96, 4096, 28672): WideSchedule(96, tiles=2, cluster=4, blocks=112, turns=True),
    (128, 4096, 28672): WideSchedule(128, tiles=2, cluster=4, blocks=112, turns=True),
    (128, 4096, 4096): WideSchedule(128, warpgroups=1, slices=2, cluster=2),
    (128, 4096, 6144): WideSchedule(128, warpgroups=1, cluster=4, blocks=112),
    (192, 4096, 4096): WideSchedule(192, warpgroups=1, slices=2, cluster=2),
    (256, 4096, 14336): WideSchedule(256, cluster=4, blocks=112),
    (256, 4096, 28672): WideSchedule(128, tiles=2, cluster=4, blocks=112, turns=True),
    (256, 14336, 4096): WideSchedule(128, slices=2, cluster=2),
}
"""By rows, in_features and out_features: the fastest schedule, with the addition of its slices, of those tried on an
H200 (docs/kernels.md); it gets as many stages as there is room for."""


@dataclasses.dataclass(frozen=True)
class Span:
    """From `first` to `last` rows the fastest schedule found; its tokens are the rows' in so many even tiles."""

    first: int
    last: int
    token_tiles: int
    schedule: WideSchedule


SPANS = {
    (4096, 4096): [Span(193, 288, 2, WideSchedule(warpgroups=1, cluster=2))],
    (4096, 6144): [
        Span(193, 256, 1, WideSchedule(warpgroups=1, cluster=4, blocks=112)),
        Span(577, 768, 4, WideSchedule(warpgroups=3, cluster=2)),
    ],
}
"""By in_features and out_features, measured at 224 and 256, at 208, 240 and 256, and at 640 and 768 rows; other rows of
a span, and up to 288, are nearer to those than to what was measured otherwise. Only for linear codes of 4 bits, for
which they were measured. Tiles of 184 and 192 tokens in three warpgroups spill up to 11 registers, and are the fastest
all the same."""

# A model of the card, fitted to the times of these and others, in clocks of 1.75 GHz.
CLOCK = 1.75e9
WEIGHTS = 11.5
"""Bytes of weights and scales that a multiprocessor takes in a clock, wherever they come from."""
ALL_FROM_L2 = 5.5e12 / CLOCK
"""Bytes a clock that L2 gives to all multiprocessors."""
CLUSTERED = 57.0
"""Clocks by which a stage takes longer where blocks of a cluster wait for each other."""
START, PART = 4800.0, 700.0
"""Clocks of a launch with its first copies, and from one part to the next."""
UNPACKED, STAGE_START = 130.0, 160.0
"""For x as it is: clocks in which a warpgroup unpacks a stage's words of 64 outputs, beside 4 for the products of each
token, as if no two of them overlapped; and what a stage takes besides in a block alone, shared by a cluster's
blocks."""
ONE_WARPGROUP_ROWS = 448
"""Up to how many rows 64 outputs a block are in question: x is read twice as often."""
REDUCTION, REDUCED = 1.0e-6, 3.5e12
"""Seconds of a kernel that adds slices, and the bytes that it reads in one."""


def wide_schedule(
    rows: int, weight: Packed, device_kind: str = "NVIDIA H200", *, natural: bool = False
) -> WideSchedule:
    """The schedule for `rows` rows times a weight of the mosaic layout.

    `natural`: for x as it is, which the schedule may take so; else for x in order.
    """
    plan = WidePlan.of(rows, weight, WideSchedule())
    shape = plan.in_features, plan.out_features
    taken = natural and natural_taken(rows, weight, device_kind)
    if taken and rows >= ROUNDS[shape]:
        best = _of_rounds(plan)
        if best is not None:
            return best
    schedule = _chosen(plan, device_kind, SPANS.get(shape, ()) if _linear(weight) else ())
    if not taken or schedule.tiles > 1:
        return schedule
    tokens = -(-schedule.tokens // (4 * schedule.cluster)) * 4 * schedule.cluster  # whole boxes of 8 tokens
    best = fitted(plan, dataclasses.replace(schedule, tokens=tokens, natural=True))
    return schedule if best is None else best.schedule


def _linear(weight: Packed) -> bool:
    return weight.bits == 4 and weight.kind != "code_book"


def natural_taken(rows: int, weight: Packed, device_kind: str) -> bool:
    """Whether x as it is was measured faster for so many rows, and can be taken so."""
    if not _linear(weight) or steps_per_run(weight.group_size) == 1:
        return False
    if MULTIPROCESSORS.get(device_kind, 132) != 132:
        return False
    first, last = NATURAL.get((weight.shape[1], weight.shape[0]), (1, 0))
    return first <= rows <= last


@functools.cache
def _of_rounds(plan: WidePlan) -> WideSchedule | None:
    """For x as it is: the tiles with which the multiprocessors' rounds take the fewest clocks."""
    first, last = JOINED.get((plan.in_features, plan.out_features), (1, 0))
    if first <= plan.rows <= last:
        joined = WideSchedule(16 * -(-plan.rows // 32), 3, cluster=2, natural=True, joined=True)
        found = fitted(plan, joined)
        if found is not None:
            return found.schedule

    def clocks(schedule: WideSchedule) -> float:
        taken = dataclasses.replace(plan, schedule=schedule)
        stage = schedule.warpgroups * (4 * schedule.tokens + UNPACKED) + STAGE_START / schedule.cluster
        return -(-taken.parts // taken.clusters) * stage

    tiles = [(2, 256, 2), (3, 192, 2)]
    if plan.rows <= ONE_WARPGROUP_ROWS:
        tiles += [(1, 256, 2), (1, 256, 4)]
    schedules = []
    for warpgroups, most, cluster in tiles:
        for count in range(-(-plan.rows // most), plan.rows // 64 + 2):
            boxes = -(-plan.rows // (4 * cluster * count))
            way = WideSchedule(4 * cluster * boxes, warpgroups, cluster=cluster, blocks=RESIDENT[cluster], natural=True)
            schedules.append(way)
    plans = (fitted(plan, schedule) for schedule in sorted(schedules, key=clocks))
    best = next((p.schedule for p in plans if p is not None), None)
    if best is None or plan.rows * plan.in_features * 2 <= TOGETHER_BYTES:
        return best
    return dataclasses.replace(best, together=TOGETHER_TILES)


def gated_schedules(
    rows: int, gate_up: Packed, down: Packed, device_kind: str = "NVIDIA H200"
) -> tuple[WideSchedule, WideSchedule]:
    """Those of `wide.gated_mlp`."""
    second = wide_schedule(rows, down, device_kind)
    order = WidePlan.of(rows, down, second).token_order
    plan = WidePlan.of(rows, gate_up, WideSchedule())
    return _chosen(dataclasses.replace(plan, gated=True, result_order=order), device_kind), second


def _chosen(plan: WidePlan, device_kind: str, spans: Sequence[Span] = ()) -> WideSchedule:
    multiprocessors = MULTIPROCESSORS.get(device_kind, 132)
    measured = MEASURED.get((plan.rows, plan.in_features, plan.out_features))
    if measured is not None and multiprocessors == 132:
        best = fitted(plan, measured)
        if best is not None:
            return best.schedule
    for span in spans:
        if span.first <= plan.rows <= span.last and multiprocessors == 132:
            tokens = -(-plan.rows // (8 * span.token_tiles)) * 8
            best = fitted(plan, dataclasses.replace(span.schedule, tokens=tokens))
            if best is not None:
                return best.schedule
    return _in_groups(plan, _sorted(plan, multiprocessors)[0])


def _in_groups(plan: WidePlan, schedule: WideSchedule) -> WideSchedule:
    """The schedule with groups of tokens where x does not stay in the L2 cache as a whole."""
    if plan.rows < TOGETHER_ROWS or plan.rows * plan.in_features * 2 <= L2_BYTES:
        return schedule
    return dataclasses.replace(schedule, together=TOGETHER_TOKENS // schedule.tokens)


def schedules(rows: int, weight: Packed, multiprocessors: int = 132) -> list[WideSchedule]:
    """All that fit, the best prediction first."""
    return _sorted(WidePlan.of(rows, weight, WideSchedule()), multiprocessors)


@functools.cache
def _sorted(plan: WidePlan, multiprocessors: int) -> list[WideSchedule]:
    plans = [p for p in _candidates(plan, multiprocessors) if p is not None]
    return list(dict.fromkeys(p.schedule for p in sorted(plans, key=predicted_seconds)))


def _candidates(plan: WidePlan, multiprocessors: int) -> list[WidePlan | None]:
    slices = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= plan.steps]
    return [
        fitted(plan, WideSchedule(tokens, warpgroups, tiles, s, c, blocks=resident(c, multiprocessors)))
        for (warpgroups, tiles, most), s, c in itertools.product(SHAPES, slices, CLUSTERS)
        for tokens in _even(plan.rows, most)
    ]


def resident(cluster_blocks: int, multiprocessors: int) -> int:
    """Blocks that run at once."""
    return RESIDENT[cluster_blocks] * multiprocessors // 132 // cluster_blocks * cluster_blocks


def _even(rows: int, most: int) -> list[int]:
    """Tokens of a tile, multiples of 8, with which a few more or less tiles are of one size.

    The more choices, the better parts fill the card: 11 tiles of 96 tokens for 1024 rows take 3 rounds where 8 of 128
    take 4.
    """
    fewest = -(-rows // most)
    return sorted({8 * -(-rows // (8 * tiles)) for tiles in range(fewest, fewest + min(fewest // 2, 8) + 1)})


def fitted(plan: WidePlan, schedule: WideSchedule) -> WidePlan | None:
    """The plan with as many stages as shared memory has room for; None if there are less than three.

    None, too, if blocks that join their sums have a second part (sums are sent to where its stages would be), or a gate
    or a result in order; if a gate's outputs and others would be of several slices, or in one tile and not in the next
    product's order. One tile of more than MANY_TOKENS was only measured where it holds all tokens, with two warpgroups.
    """
    fitted = dataclasses.replace(plan, schedule=schedule)
    if plan.gated and schedule.slices > 1:
        return None
    if fitted.halves and plan.result_order is None:
        return None
    if fitted.halves and schedule.tokens > MANY_TOKENS and (fitted.token_tiles > 1 or schedule.warpgroups < 2):
        return None
    if schedule.joined and (plan.gated or plan.result_order is not None or schedule.tokens % 16):
        return None
    if schedule.joined and (schedule.cluster != 2 or schedule.slices > 1 or not plan.steps >= 2):
        return None
    if schedule.joined and fitted.parts > fitted.clusters:
        return None
    if schedule.natural and (plan.bits != 4 or fitted.box_tokens % 8 or steps_per_run(plan.group_size) == 1):
        return None
    rest = fitted.shared_bytes - fitted.full_barriers - 16 * schedule.stages  # beside stages and their barriers
    stages = min(10, (BLOCK_SHARED_BYTES - rest) // (fitted.stage_bytes + 16))
    if stages < 3:
        return None
    return dataclasses.replace(fitted, schedule=dataclasses.replace(schedule, stages=stages))


def predicted_seconds(plan: WidePlan) -> float:
    """What the kernel and the addition of its slices should take."""
    schedule = plan.schedule
    active = plan.clusters * schedule.cluster
    weights = plan.stage_bytes - plan.x_bytes
    costs = (
        schedule.warpgroups * schedule.tiles * 8 * max(schedule.tokens / 2, 16.0),  # tensor cores
        weights / WEIGHTS,
        (plan.x_bytes / schedule.cluster + weights) * active / ALL_FROM_L2,
    )
    stage = 0.9 * max(costs) + 0.1 * sum(costs)  # they get in each other's way
    if schedule.cluster > 1:
        stage += CLUSTERED
    rounds, steps = -(-plan.parts // plan.clusters), -(-plan.steps // schedule.slices)
    clocks = START + rounds * (steps * stage + PART)
    seconds = clocks / CLOCK
    if schedule.slices > 1:
        seconds += REDUCTION + 4 * schedule.slices * plan.rows * plan.out_features / REDUCED
    return seconds
