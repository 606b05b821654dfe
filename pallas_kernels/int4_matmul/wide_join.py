"""Sums of halves of the inputs, which the two blocks of a cluster exchange through shared memory.

Each block ends with half of the tokens. It sends its sums of the other half to where the other block's stages were:
in a part's only round they are free when all of the block's warps have multiplied.
"""

from typing import Any

from pallas_kernels.int4_matmul.wide_plan import WidePlan


def open_inbox(w: Any, plan: WidePlan) -> None:
    """Lets the other block send, once the barriers of both are ready."""
    leader = w.thread < 1
    w.barrier_init(w.integer(plan.ready_barrier), plan.consumer_warps, leader)
    w.barrier_init(w.integer(plan.sent_barrier), 1, leader)
    w.expect_bytes(w.integer(plan.sent_barrier), plan.sent_bytes, leader)


def join(w: Any, plan: WidePlan, sums: list[tuple[Any, Any]], rank: Any) -> list[tuple[Any, Any]]:
    """A multiplying warp's strips with the whole sums of this block's half of the tokens.

    Neither block need outlive the other: each waits for all that it is sent.
    """
    other = w.integer(1) - rank
    w.warp_barrier()
    w.arrive_in(w.integer(plan.ready_barrier), other, w.lane < 1)
    w.barrier_wait(w.integer(plan.ready_barrier), w.integer(0))
    half = plan.schedule.tokens // 4  # of a lane's sums of a strip
    own = w.warp * (plan.sent_bytes // plan.consumer_warps) + w.lane * 16
    first = rank < 1
    for tile, (_, values) in enumerate(sums):
        sent = [w.select(first, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
        for i in range(0, half, 4):
            w.send_words(own + (tile * half + i) * 128, sent[i : i + 4], other, plan.sent_barrier)
    w.barrier_wait(w.integer(plan.sent_barrier), w.integer(0))
    joined = []
    for tile, (strip, values) in enumerate(sums):
        kept = [w.select(first, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
        came = [w.as_number(word) for i in range(0, half, 4) for word in w.shared_words(own, (tile * half + i) * 128)]
        joined.append((strip, [a + b for a, b in zip(kept, came, strict=True)]))
    return joined
