"""All decoder layers of a step for one row, in one kernel whose blocks, one a multiprocessor, never leave.

    hidden -> norm, qkv -> attention of slices -> slices together -> o, + residual
           -> norm, gate up, silu -> down, + residual -> the next layer

Six exchanges a layer, each through tagged words (`warp.py`). A block may write an exchange's words again when all
blocks have read them: every block has outputs in every product, so one that writes a layer's words has seen the sums
of all blocks that followed the last layer's.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.resident.attention import Attention
from pallas_kernels.resident.plan import Plan
from pallas_kernels.resident.products import Arguments, Block, fetch, product

REGISTERS = (32, 112)
"""Of a fetching and of a multiplying thread, with 16 multiplying warps: 640 threads start with 96 each."""


def run_layers(w: Any, plan: Plan, arguments: Arguments, block: Any) -> None:
    """What one warp does."""
    b = Block(w, plan, arguments, block)
    b.open_ring()
    b.keep_pointers()
    attention = Attention(b)
    attention.keep_tables()
    w.block_barrier()

    def multiplying() -> None:
        if plan.warps == 16:
            w.set_registers(REGISTERS[1], more=True)
        multiply(b, attention)

    def fetching() -> None:
        if plan.warps == 16:
            w.set_registers(REGISTERS[0], more=False)
        w.when(w.warp < plan.warps + 1, lambda: fetch(b))

    w.when(w.warp < plan.warps, multiplying)
    w.when(w.integer(plan.warps - 1) < w.warp, fetching)


def multiply(b: Block, attention: Attention) -> None:
    """A multiplying warp; warp m finishes the sums of token m, and keeps its part of the residual."""
    w, plan = b.w, b.plan
    qkv, o, gate_up, down = plan.matrices
    hidden_rows = plan.rows(o)
    owns, row = w.lane < hidden_rows, b.block * hidden_rows + w.lane
    residual = w.warp * 128 + w.lane * 4
    at = w.warp * plan.hidden + row

    def start() -> None:
        value = w.load_number(b.arguments.x, at, "bfloat16", owns)
        w.shared_store(residual, value, owns, plan.residual_start)
        b.publish("hidden", w.warp, plan.hidden, row, value, w.integer(1), owns)

    def add(to: str, tag: Any, total: Any) -> None:
        value = w.shared_number(residual, plan.residual_start) + total
        w.shared_store(residual, value, owns, plan.residual_start)
        b.publish(to, w.warp, plan.hidden, row, value, tag, owns)

    def layer(index: Any, carry: Sequence[Any]) -> Sequence[Any]:
        tag = index + 1

        def projected(sums: Any) -> None:
            rows = plan.rows(qkv)
            b.publish("qkv", w.warp, plan.qkv, b.block * rows + w.lane, sums(0), tag, w.lane < rows)

        def activated(sums: Any) -> None:
            rows = plan.rows(gate_up)
            gate, up = sums(0), sums(rows)
            value = gate * w.sigmoid(gate) * up
            b.publish("activated", w.warp, plan.ff, b.block * rows + w.lane, value, tag, w.lane < rows)

        carry = product(b, qkv, "hidden", carry, index, tag, "attn_norm", projected)
        attention.run(index, tag)
        carry = product(b, o, "attended", carry, index, tag, None, lambda sums: add("middle", tag, sums(0)))
        carry = product(b, gate_up, "middle", carry, index, tag, "mlp_norm", activated)
        return product(b, down, "activated", carry, index, tag, None, lambda sums: add("hidden", tag + 1, sums(0)))

    def finish() -> None:
        w.store_number(b.arguments.out, at, w.shared_number(residual, plan.residual_start), "bfloat16", owns)

    w.when(w.warp < plan.tokens, start)
    w.loop(w.integer(plan.layers), (w.integer(0), w.integer(0)), layer)
    w.when(w.warp < plan.tokens, finish)
