"""Adding up the partial results of a block's warps and of a cluster's blocks, and writing the output."""

import dataclasses
from typing import Any

from pallas_kernels.paged_attention.plan import TASK_BYTES, Plan
from pallas_kernels.paged_attention.softmax import LOG2_E
from pallas_kernels.token_order import STAGE


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where results go, in global memory; `sinks` is float32 logits that take part in the normalisation, or None."""

    out: Any
    lse: Any
    sinks: Any


@dataclasses.dataclass(frozen=True)
class Place:
    """The sequence, KV head and first query row that a block works on."""

    row: Any
    kv_head: Any
    first_row: Any


def start_merge(w: Any, plan: Plan, split: Any) -> None:
    """Says that this block runs and can be sent to: long before `merge` waits until all blocks do."""
    if plan.splits > 1:
        tasks = w.const(plan.share, "i32")
        if plan.tasks % plan.splits:  # the last blocks finish fewer
            left = w.const(plan.tasks, "i32") - split * plan.share
            tasks = w.maximum(w.const(0, "i32"), w.select(left < plan.share, left, tasks))
        w.open_inbox(plan.inbox_barrier, tasks * (plan.splits * TASK_BYTES))
        w.cluster_arrive()


def merge(w: Any, plan: Plan, outputs: Outputs, place: Place, split: Any) -> None:
    """Merges and writes; a task is four elements of one query row.

    The warps' partial results are in shared memory. In a cluster, each block adds up its own warps' and sends every
    block the tasks that it finishes, so that all reads are local and no block need outlive another. The caller has
    called `start_merge` when it started.
    """
    pieces = plan.head_dim // 4

    def of_warps(task: Any) -> tuple[Any, Any, Any]:
        query, piece = task // pieces, task % pieces
        parts = []
        for warp in range(plan.warps):
            part = w.const(plan.parts_start + warp * plan.part_bytes, "i32")
            statistics = w.shared_load(part + query * 8, 2, "f32")
            offset = query * plan.row_stride + piece * 16 + 8 * plan.block_rows
            parts.append((statistics, w.shared_load(part + offset, 4, "f32")))
        return combine(w, parts)

    if plan.splits == 1:
        for start in range(0, plan.tasks, plan.threads):
            valid = w.thread + start < plan.tasks
            task = clamp(w, w.thread + start, plan.tasks)
            finish(w, plan, outputs, place, task, of_warps(task), valid)
        return
    w.cluster_wait()
    inbox_sums = plan.inbox_start + plan.splits * plan.share * 8
    for start in range(0, plan.tasks, plan.threads):
        valid = w.thread + start < plan.tasks
        task = clamp(w, w.thread + start, plan.tasks)
        maximum, total, out = of_warps(task)
        owner = task // plan.share
        slot = split * plan.share + task % plan.share
        w.send(slot * 8 + plan.inbox_start, [maximum, total], valid, owner, plan.inbox_barrier)
        w.send(slot * 16 + inbox_sums, out, valid, owner, plan.inbox_barrier)
    w.wait_inbox(plan.inbox_barrier)
    for start in range(0, plan.share, plan.threads):
        mine = w.thread + start
        task = split * plan.share + mine
        valid = (mine < plan.share) & (task < plan.tasks)
        mine = clamp(w, mine, plan.share)
        parts = []
        for sender in range(plan.splits):
            slot = mine + sender * plan.share
            statistics = w.shared_load(slot * 8 + plan.inbox_start, 2, "f32")
            parts.append((statistics, w.shared_load(slot * 16 + inbox_sums, 4, "f32")))
        finish(w, plan, outputs, place, clamp(w, task, plan.tasks), combine(w, parts), valid)


def clamp(w: Any, index: Any, limit: int) -> Any:
    last = w.const(limit - 1, "i32")
    return w.select(index < limit, index, last)


def combine(w: Any, parts: list[tuple[Any, Any]]) -> tuple[Any, Any, Any]:
    """Maximum, sum and weighted sums of `parts`, pairs of (maximum, sum) and some weighted sums, often four."""
    maximum = parts[0][0][0]
    for (m, _), _ in parts[1:]:
        maximum = w.maximum(maximum, m)
    total, out = w.const(0.0), [w.const(0.0)] * len(parts[0][1])
    for (m, s), sums in parts:
        weight = w.exp2(m - maximum)
        total = total + s * weight
        out = [a + b * weight for a, b in zip(out, sums, strict=True)]
    return maximum, total, out


def finish(w: Any, plan: Plan, outputs: Outputs, place: Place, task: Any, merged: Any, valid: Any) -> None:
    """Normalises four elements of one query row and writes them (and the row's log-sum-exp)."""
    pieces = plan.head_dim // 4
    query, piece = place.first_row + task // pieces, task % pieces
    valid = valid & (query < plan.rows)
    token, head = query // plan.group, place.kv_head * plan.group + query % plan.group
    position = (place.row * plan.tokens + token) * plan.q_heads + head
    maximum, total, out = merged
    if outputs.sinks is not None:
        sink = w.load_floats(outputs.sinks, head, 1, valid)[0] * LOG2_E
        peak = w.maximum(maximum, sink)
        decay = w.exp2(maximum - peak)
        total = total * decay + w.exp2(sink - peak)
        out = [x * decay for x in out]
        maximum = peak
    inverse = w.select(total > 0.0, w.reciprocal(total), w.const(0.0))
    out = [x * inverse for x in out]
    words = [w.pack_bf16(out[0], out[1]), w.pack_bf16(out[2], out[3])]
    if plan.order is None:
        w.store_words(outputs.out, position * plan.head_dim + piece * 4, words, valid)
    else:
        # From lane 0: ptxas would hold what follows from the row in registers all along, too many for a third block.
        row = w.shuffle(place.row, w.const(0, "i32")) * plan.tokens + token
        _store_ordered(w, plan, outputs.out, row, head * plan.head_dim + piece * 4, words, valid)
    if outputs.lse is not None:
        w.store_f32(outputs.lse, position, (maximum + w.log2(total)) * (1.0 / LOG2_E), valid & (piece < 1))


def _store_ordered(w: Any, plan: Plan, out: Any, row: Any, feature: Any, words: list[Any], valid: Any) -> None:
    """Two words of a row, from a multiple of four features on, as `token_order.ordered` has them in its pieces."""
    assert plan.order is not None
    tokens, run = plan.order.tokens, plan.order.run
    stages = -(-plan.q_heads * plan.head_dim // STAGE)
    word = feature % 32 // 2
    first, slot = (word % 4, word // 4) if run == 2 else (word // 8 * 2, word % 8 // 2)
    piece = row // tokens * (stages * STAGE // 8) + feature // 32 * 4 + first
    at = (piece * tokens + row % tokens) * 8 + slot * 2
    for i, value in enumerate(words):
        w.store_words(out, at + i * (8 * tokens), [value], valid)
