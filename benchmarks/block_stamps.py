"""Where the time of an attention block goes: clocks that the kernel writes in place of its slices."""

from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.clocks import read_register
from pallas_kernels.decoder_block import mosaic
from pallas_kernels.decoder_block.mosaic import Arguments, attend
from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul.warp import Value
from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.warp import Warp

STAMPS = 32
"""Of a warp."""
NAMES = (
    "start; x asked for; all asked for, tables there; (x) in order; keys asked for; weights there; and; and; and; "
    "(product) warps' sums made; all; (sum, send) before heads; heads there; (norm, RoPE) staged; all; (attend) "
    "stored; all; (send) o's weights there; (read) before sums; sums there; (merge) merged; all; end"
)


class Stamps:
    """Clocks of all warps, of half of the blocks: the slices of a token have no more room."""

    def __init__(self, m: WideWarp, args: Arguments, kv_head: Value, split: Value):
        self._m, self._out, self._next = m, args.o.out, 0
        self._lead = (m.lane < 1) & (kv_head % 2 < 1)
        self._base = ((kv_head // 2 * BLOCKS + split) * WARPS + m.warp) * STAMPS

    def put(self, behind: Value | None = None) -> None:
        """`behind`: a number that the clock is read after."""
        m = self._m
        bits = read_register("%clock", [] if behind is None else [behind])
        pointer = m._pointer(self._out, self._base + self._next, 4)
        m._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", pointer, bits.ir, self._lead.ir)
        self._next += 1


class StampedWarp(Warp):
    stamps: Stamps

    def block_barrier(self) -> None:
        self.stamps.put()
        super().block_barrier()
        self.stamps.put(self.shared_load(self.const(0, "i32"), 1, "i32")[0])  # else the clock is read before the wait

    def wait_inbox(self, barrier: int, scope: str = "cluster") -> None:
        self.stamps.put()
        super().wait_inbox(barrier, scope)
        self.stamps.put()


class StampedWideWarp(WideWarp):
    stamps: Stamps

    def warp_barrier(self) -> None:
        super().warp_barrier()
        self.stamps.put()

    def store_number(self, ref: Any, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        super().store_number(ref, offset, value, dtype, predicate & (value < -1e30))


def stamped(w: Warp, m: WideWarp, plan: BlockPlan, args: Arguments, kv_head: Value, split: Value) -> None:
    stamps = Stamps(m, args, kv_head, split)
    both = StampedWarp.__new__(StampedWarp), StampedWideWarp.__new__(StampedWideWarp)
    for given, made in zip((w, m), both, strict=True):
        made.__dict__.update(given.__dict__, stamps=stamps)
    stamps.put()
    attend(*both, plan, args, kv_head, split)
    stamps.put()


def layers_stamped(plan: BlockPlan, layers: Any, pools: Any, call: dict[str, Any]) -> list[jax.Array]:
    """Each layer's block with stamps for slices, one after the other."""
    given, rope, outs = (call["x"][0], call["partial"][:, 0]), (call["cos"], call["sin"]), []
    for layer, pool in zip(layers, pools, strict=True):
        x, partial, _ = lax.optimization_barrier((*given, outs[-1:]))
        weights = (layer["norm"], layer["qkv"], layer["o"], pool["k_pages"], pool["v_pages"])
        others = (call["page_table"], call["positions"], rope, (layer["q_norm"], layer["k_norm"]))
        outs.append(mosaic.attention_block(x, partial, *weights, *others, plan=plan, program=stamped)[0])
    return outs


def show(launches: list[jax.Array], clusters: int) -> None:
    """Prints medians over layers and blocks of clocks since the block's start, of each warp."""
    blocks, count = clusters // 2 * BLOCKS, len(NAMES.split(";"))
    clocks = np.stack([np.asarray(launch).reshape(-1)[: blocks * WARPS * STAMPS] for launch in launches])
    clocks = clocks.view(np.uint32).reshape(-1, WARPS, STAMPS).astype(np.int64)
    since = (clocks - clocks[:, :, :1].min(1, keepdims=True)) & 0xFFFFFFFF
    print(f"clocks: {NAMES}")
    for warp in range(WARPS):
        print(f"  warp {warp}:", " ".join(f"{np.median(column):.0f}" for column in since[:, warp, :count].T))
    # What the others of a cluster wait for.
    last = since.max(1).reshape(-1, BLOCKS, STAMPS)[..., :count]
    for split in range(BLOCKS):
        print(f"  block {split}, last warp:", " ".join(f"{np.median(column):.0f}" for column in last[:, split].T))
    print(f"  of all: {' '.join(f'{np.median(column):.0f}' for column in last.max(1).T)}", flush=True)
