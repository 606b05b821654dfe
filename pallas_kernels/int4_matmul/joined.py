"""A product's slices, added by the blocks that made them: those that share outputs are a cluster.

Each block adds up its warps' sums as soon as it has a few strips of them, and sends every result to the block of the
cluster that will write it: strip i of the cluster's to block i % slices. So slices travel while later strips are read,
nothing is written but results, and the residual is added on the way.
"""

from typing import Any

from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.strip import Arguments, sum_over_warps


def open_inbox(w: Any, plan: Plan, slice_: Any, count: Any) -> None:
    """Lets this cluster's blocks send, once `cluster_wait` followed; the cluster has `count` strips."""
    barrier, one = w.integer(plan.inbox_barrier), w.thread < 1
    w.barrier_init(barrier, plan.inbox_strips, one)
    for place in range(plan.inbox_strips):
        mine = slice_ + place * plan.slices < count
        w.expect_bytes(barrier, plan.slices * plan.rows * STRIP * 4, one & mine)
        w.arrive_in(barrier, None, one & (count <= slice_ + place * plan.slices))
    w.barriers_ready()
    w.cluster_arrive()


def send(w: Any, plan: Plan, slice_: Any, first: Any, strips: Any, buffer: Any) -> None:
    """Adds up the warps' sums of `strips` strips, the cluster's `first` and its followers, and sends them."""
    for base in range(0, plan.schedule.strips * plan.rows * STRIP, plan.threads):
        index = w.thread + base
        row, token, strip = index % STRIP, index // STRIP % plan.rows, index // (STRIP * plan.rows)
        inside = strip < strips
        address = strip * plan.strip_bytes + token * plan.token_bytes + row * 4
        address = w.select(inside, buffer + address, w.integer(0))
        total = sum_over_warps(w, plan, address, plan.sums_start, plan.sums_bytes)
        strip = w.select(inside, first + strip, w.integer(0))
        place = (strip // plan.slices * plan.slices + slice_) * (plan.rows * STRIP) + token * STRIP + row
        w.send_words(place * 4 + plan.inbox_start, [total], strip % plan.slices, plan.inbox_barrier, inside)


def finish(w: Any, plan: Plan, a: Arguments, slice_: Any, first_strip: Any, count: Any) -> None:
    """Waits for the slices of this block's strips, adds them in order, and writes the results."""
    waiting = []
    for base in range(0, plan.inbox_strips * plan.rows * STRIP, plan.threads):
        index = w.thread + base
        row, token, place = index % STRIP, index // STRIP % plan.rows, index // (STRIP * plan.rows)
        strip = place * plan.slices + slice_
        feature = (first_strip + strip) * STRIP + row
        inside = (place < plan.inbox_strips) & (strip < count) & (feature < plan.results)
        address = w.select(inside, place * plan.slices * (plan.rows * STRIP) + token * STRIP + row, w.integer(0)) * 4
        result = token * plan.results + feature
        residual = w.load_number(a.residual, result, a.out_dtype, inside) if plan.fusion.residual else None
        waiting.append((address, result, inside, residual))
    w.wait_sent(plan.inbox_barrier)
    for address, result, inside, residual in waiting:
        total = w.shared_number(address, plan.inbox_start)
        for sender in range(1, plan.slices):
            total = total + w.shared_number(address, plan.inbox_start + sender * (plan.rows * STRIP * 4))
        w.store_number(a.out, result, total if residual is None else total + residual, a.out_dtype, inside)
