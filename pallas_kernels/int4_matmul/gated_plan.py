"""How a small model's feed-forward block of few rows is spread over clusters of blocks, see gated_once.py."""

import dataclasses
import math
from typing import Any, NamedTuple

from pallas_kernels.int4_matmul.cluster_sum import SumPlan
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PART, PIECE_BYTES, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.planes import MOST_TOKENS, Planes
from pallas_kernels.int4_matmul.shared_rows import Rows, row_bytes

SHAPES = ((12, 8), (8, 4))
"""Clusters, and blocks of each. What a block fetches and computes counts, so that there should be many blocks; more
slices than 12 cost the kernel behind this one time."""
MOST_WORDS = 160
"""Of weights, scales and offsets that a lane asks for at once: registers hold no more beside x and sums. A 0.6B model's
are 60 to 144."""


def shape_for(rows: int, gate_up: Packed, down: Packed) -> tuple[int, int] | None:
    """Clusters, and blocks of each, for a block that is faster in one kernel than in several; None for others."""
    for clusters, cluster in SHAPES:
        if GatedPlan.refusal(rows, gate_up, down, clusters, cluster) is not None:
            continue
        plan = GatedPlan.of(rows, gate_up, down, None, clusters, cluster, slices=0)
        if _words(plan.gate_up) + _words(plan.down) <= MOST_WORDS:
            return clusters, cluster
    return None


def _words(plan: Plan) -> int:
    """Of a lane: those of its strips, and those of their scales and offsets, of two rows each."""
    factors = sum(max(1, nbytes // 2) for nbytes in (plan.scale_bytes, plan.offset_bytes) if nbytes)
    return plan.schedule.strips * (4 * plan.warp_tiles + factors * plan.segments)


def _shares_of(cluster: int) -> int:
    """Two threads send a pair of features, each to as many blocks of its share as the other."""
    return max(1, cluster // 4)


class GatePlan(Plan):
    """A block's part of the first product. Its weights, and the norm's, go straight into registers."""

    # All warps' sums of a number lie side by side: [strip, token, row][warp], then the squares [token][warp].
    @property
    def number_bytes(self) -> int:
        """With so many between, eight lanes' pieces of 16 bytes fall into different banks."""
        return 48 if self.schedule.warps > 4 else 16

    @property
    def squares_start(self) -> int:
        return self.schedule.strips * self.rows * STRIP * self.number_bytes

    @property
    def squares_bytes(self) -> int:
        return 4

    @property
    def norm_start(self) -> int:
        return self.squares_start + self.rows * self.number_bytes

    @property
    def shared_bytes(self) -> int:
        return self.norm_start + self.schedule.warps * self.norm_bytes


@dataclasses.dataclass(frozen=True)
class DownPlan(Plan):
    """A cluster's part of the second product, of `tiles_each` tiles of inputs: a warp has whole strips of results."""

    tiles_each: int = 1

    @property
    def warp_columns(self) -> int:
        return self.tiles_each * COLUMNS

    @property
    def segment(self) -> int:
        """Inputs that share a group wherever a cluster's begin."""
        return math.gcd(self.group_size, self.warp_columns, PART)

    @property
    def ragged(self) -> bool:
        return False


class Barriers(NamedTuple):
    """Where those are in shared memory that count the bytes that blocks send each other."""

    sum: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class GatedPlan:
    """`gate_up` is a block's part of the first product, of all inputs.

    `slices` of what came before, or 0, are added by a cluster's blocks together.
    """

    gate_up: GatePlan
    down: DownPlan
    clusters: int
    cluster: int
    slices: int

    @classmethod
    def of(
        cls,
        rows: int,
        gate_up: Packed,
        down: Packed,
        norm_eps: float | None,
        clusters: int,
        cluster: int,
        slices: int,
    ) -> "GatedPlan":
        """For weights that `refusal` does not refuse."""
        inputs, hidden, outputs = gate_up.shape[1], down.shape[1], down.shape[0]
        warps = inputs // PART
        each = gate_up.shape[0] // STRIP // (clusters * cluster)
        first = Plan.of(rows, gate_up, Schedule(warps, 1, each, 0, once=True), Fusion(norm_eps))
        each = -(-(outputs // STRIP // cluster) // warps)
        second = Plan.of(rows, down, Schedule(warps, 1, each, 0, once=True))
        tiles = hidden // COLUMNS // clusters
        return cls(GatePlan(**vars(first)), DownPlan(**vars(second), tiles_each=tiles), clusters, cluster, slices)

    @staticmethod
    def refusal(rows: int, gate_up: Packed, down: Packed, clusters: int, cluster: int) -> str | None:
        """Why there is no such plan; None if there is."""
        (gates, inputs), (outputs, hidden) = gate_up.shape, down.shape
        if rows > MOST_TOKENS:
            return f"it is for up to {MOST_TOKENS} rows"
        for weight in (gate_up, down):
            if weight.bits != 4 or weight.kind == "code_book":
                return "it is for linear codes of 4 bits"
            if weight.group_size not in (32, 64, PART):
                return f"it takes groups of 32, 64 or {PART} inputs, not {weight.group_size}"
        warps = inputs // PART
        if inputs % (4 * PART) or warps > 8:
            return f"it takes 512 or 1024 inputs, not {inputs}"
        unit = max(COLUMNS, down.group_size) * clusters
        if gates != 2 * hidden or gates % (2 * STRIP * clusters * cluster) or hidden % unit:
            return f"{clusters} clusters of {cluster} blocks do not share {hidden} hidden features evenly"
        if cluster % (2 * _shares_of(cluster)):
            return f"threads share the blocks they send to evenly, not {cluster} of them"
        strips = outputs // STRIP // cluster
        if outputs % (STRIP * cluster) or strips % min(strips, warps):
            return f"{cluster} blocks of {warps} warps do not share {outputs} results evenly"
        return SumPlan.refusal(inputs, cluster, warps)

    @property
    def rows(self) -> int:
        return self.gate_up.rows

    @property
    def warps(self) -> int:
        return self.gate_up.schedule.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        return self.clusters * self.cluster

    @property
    def features(self) -> int:
        """Hidden features of a cluster."""
        return self.down.warp_columns

    @property
    def strips(self) -> int:
        """Of a block's first product."""
        return self.gate_up.schedule.strips

    @property
    def send_shares(self) -> int:
        """Threads that add up the same feature, and send it to different blocks."""
        return _shares_of(self.cluster)

    @property
    def send_tasks(self) -> int:
        """Threads that add up features."""
        return self.rows * self.strips // 2 * STRIP * self.send_shares

    @property
    def down_strips(self) -> int:
        """Of a block's second product."""
        return self.down.strips // self.cluster

    # Shared memory, in bytes: the first product's, then what blocks exchange.
    @property
    def sum_start(self) -> int:
        """x and its slices, added: all inputs."""
        return self.gate_up.shared_bytes

    @property
    def hidden(self) -> Rows:
        """The cluster's hidden features, bfloat16."""
        start = self.sum_start + (SumPlan.nbytes(self.rows, self.gate_up.in_features) if self.slices else 0)
        return Rows.at(start, self.features)

    def planes_of(self, warp: Any) -> Any:
        """Where a warp takes x apart."""
        return warp * Planes.bytes_of(self.gate_up) + (self.hidden.start + self.rows * row_bytes(self.features))

    @property
    def later_bytes(self) -> int:
        """A warp's words of the second product."""
        return self.down.schedule.strips * self.down.warp_tiles * PIECE_BYTES

    @property
    def later_start(self) -> int:
        return self.planes_of(self.warps)

    @property
    def fetched_start(self) -> int:
        return self.later_start + self.warps * self.later_bytes

    @property
    def barriers(self) -> "Barriers":
        start = self.fetched_start + (self.warps * self.sum.fetched_bytes if self.slices else 0)
        return Barriers(*range(start, start + 8 * len(Barriers._fields), 8))

    @property
    def shared_bytes(self) -> int:
        return self.barriers.sum + 8 * len(Barriers._fields)

    @property
    def sum(self) -> SumPlan:
        shape = (self.rows, self.gate_up.in_features, self.slices, self.cluster, self.warps)
        plan = SumPlan(*shape, start=self.sum_start, barrier=0, fetched=self.fetched_start)
        return dataclasses.replace(plan, barrier=self.fetched_start + self.warps * plan.fetched_bytes)
