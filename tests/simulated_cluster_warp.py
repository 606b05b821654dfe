"""The NumPy twin of `pallas_kernels.int4_matmul.cluster_warp.ClusterWarp`, and the kernels of clusters run on it."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from simulated_int4_warp import flat_weights
from simulated_warp import SimulatedWarp, run_cluster
from simulated_wide_warp import Barriers, SimulatedWideWarp

from pallas_kernels.int4_matmul import gated_once, once
from pallas_kernels.int4_matmul.ahead import Ahead
from pallas_kernels.int4_matmul.cluster_sum import Addend
from pallas_kernels.int4_matmul.gated_plan import GatedPlan
from pallas_kernels.int4_matmul.once_of_sum import OfSumPlan
from pallas_kernels.int4_matmul.packing import PackedInt4
from pallas_kernels.int4_matmul.plan import Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.strip import arguments_of

BF16 = ml_dtypes.bfloat16


class SimulatedClusterWarp(SimulatedWideWarp):
    def load_words(
        self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray | None, constant: int = 0
    ) -> tuple[np.ndarray, ...]:
        return super().load_words(ref.view(np.uint8), offset, count, predicate, constant)

    def expect_sent(self, barrier: int, nbytes: int, warp: int = 0) -> None:
        assert barrier % 8 == 0 and barrier + 8 <= self.bytes.size, "no place for a barrier"
        if self.warp[0] == warp:
            self.barriers.state[self.block, barrier] = [1, 1, 0, 0]
            self.barriers.update(self.block, barrier, arrivals=1, nbytes=nbytes)

    def order_of(self, number: np.ndarray) -> np.ndarray:
        bits = number.view(np.int32)
        return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))

    def largest_integer(self, x: np.ndarray) -> np.ndarray:
        return np.full(32, x.max(), np.int32)

    def smallest_integer(self, x: np.ndarray) -> np.ndarray:
        return np.full(32, x.min(), np.int32)

    def load_integers(self, ref: np.ndarray) -> tuple[np.ndarray, ...]:
        assert ref.dtype == np.int32
        return tuple(np.full(32, number, np.int32) for number in ref[:2])

    def store_integers(self, ref: np.ndarray, integers: Sequence[np.ndarray], predicate: np.ndarray) -> None:
        for lane in np.flatnonzero(predicate):
            ref[: len(integers)] = [integer[lane] for integer in integers]

    def prefetch(self, ref: np.ndarray, offset: np.ndarray, nbytes: np.ndarray, predicate: np.ndarray) -> None:
        """Counts how often each of the array's bytes was asked for."""
        for lane in np.flatnonzero(predicate):
            start, size = int(offset[lane]), int(nbytes[lane])
            assert start % 16 == size % 16 == 0 and size > 0, "unaligned prefetch"
            assert start + size <= ref.nbytes, "prefetch from outside the array"
            with self.barriers.changed:
                ref[start : start + size] += 1

    def computed(self, words: Sequence[np.ndarray]) -> None:
        assert len(words) % 4 == 0

    def wait_sent(self, barrier: int) -> None:
        self.barriers.wait(self.block, barrier, 0)
        arrivals, left, nbytes, _ = self.barriers.state[self.block, barrier]
        assert (left, nbytes) == (arrivals, 0), "more was sent than expected"


def simulate_gated_once(
    x: np.ndarray,
    partial: np.ndarray | None,
    weights: tuple[PackedInt4, PackedInt4],
    norm: np.ndarray | None,
    ahead: Sequence[np.ndarray] = (),
    *,
    clusters: int,
    cluster: int,
    norm_eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel of a feed-forward block returns for x [rows, inputs] (bfloat16): slices, and y."""
    slices = 0 if partial is None else len(partial)
    plan = GatedPlan.of(len(x), *weights, None if norm is None else norm_eps, clusters, cluster, slices)
    out = np.full(clusters * len(x) * weights[1].shape[0], np.nan, np.float32)
    total = np.full(x.size, np.nan, BF16)
    flat, sums = (np.ascontiguousarray(x).reshape(-1).view(np.uint8), None if partial is None else partial.reshape(-1))
    first, second = (flat_weights(weight) for weight in weights)
    arguments = (
        arguments_of(weights[0], weights=first, x=flat, norm=norm, out=None, out_dtype="float32"),
        arguments_of(weights[1], weights=second, x=None, out=out, out_dtype="float32"),
    )
    asked = [Ahead(array, array.nbytes) for array in ahead]
    addend = None if partial is None else Addend(plan.sum, sums, total)
    run_clusters(
        clusters,
        cluster,
        plan.warps,
        plan.shared_bytes,
        lambda w, block: gated_once.feed_forward(w, plan, *arguments, block, addend, asked),
    )
    return out.reshape(clusters, len(x), -1), x if partial is None else total.reshape(x.shape)


def simulate_once_of_sum(
    x: np.ndarray,
    partial: np.ndarray,
    weight: PackedInt4,
    norm: np.ndarray,
    *,
    schedule: Schedule,
    cluster: int,
    norm_eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel of a product of a sum returns for x [rows, inputs] (bfloat16): the product in float32, and y."""
    product = Plan.of(len(x), weight, schedule, Fusion(norm_eps=norm_eps))
    plan = OfSumPlan(product, cluster, len(partial))
    out = np.full(len(x) * product.results, np.nan, np.float32)
    total = np.full(x.size, np.nan, BF16)
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    arguments = arguments_of(weight, weights=flat_weights(weight), x=flat, norm=norm, out=out, out_dtype="float32")
    addend = Addend(plan.sum, partial.reshape(-1), total)
    run_clusters(
        product.blocks_per_slice // cluster,
        cluster,
        schedule.warps,
        plan.shared_bytes,
        lambda w, block: once.multiply(w, product, arguments, w.integer(0), block, addend),
    )
    return out.reshape(len(x), -1), total.reshape(x.shape)


def run_clusters(
    clusters: int,
    cluster: int,
    warps: int,
    shared_bytes: int,
    program: Callable[[SimulatedClusterWarp, np.ndarray], None],
) -> None:
    """Runs `program(w, block)` in every warp, cluster by cluster."""
    for index in range(clusters):
        barriers = Barriers()

        def run(warp: SimulatedWarp, rank: int, index: int = index, barriers: Barriers = barriers) -> None:
            w = SimulatedClusterWarp(warp, barriers)
            program(w, w.integer(index * cluster + rank))

        run_cluster(cluster, warps, shared_bytes, run)
