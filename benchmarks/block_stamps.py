"""Where the time of an attention block goes: clocks that the kernel writes in place of its slices."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.decoder_block import mosaic
from pallas_kernels.decoder_block.mosaic import Arguments, attend
from pallas_kernels.decoder_block.plan import BLOCKS, BlockPlan
from pallas_kernels.int4_matmul.warp import Value
from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.warp import Warp

STAMPS = 64
NAMES = (
    "x asked for; all asked for, tables there; (x) in order; keys asked for; weights there (a strip, times four); "
    "(product) warps' sums made; all; (sum, send) before heads; heads there; (norm, RoPE) staged; all; (attend) "
    "stored; all; (send) o's weights there; (read) before sums; sums there; (merge) merged; all; end. "
    "`all` is read before the wait"
)


class Stamps:
    """Clocks of the first and of the last warp of a block."""

    def __init__(self, m: WideWarp, args: Arguments, block: Value):
        last = m.integer(6) < m.warp
        self._m, self._out, self._next = m, args.o.out, 0
        self._lead = (m.lane < 1) & m.select(m.warp < 1, m.warp < 1, last)
        self._base = block * (2 * STAMPS) + m.select(last, m.integer(STAMPS), m.integer(0))

    def put(self) -> None:
        m, i32 = self._m, ir.IntegerType.get_signless(32)
        bits = llvm.inline_asm(i32, [], "mov.u32 $0, %clock;", "=r,~{memory}", has_side_effects=True)
        pointer = m._pointer(self._out, self._base + self._next, 4)
        m._emit("@$2 st.global.b32 [$0], $1;", "l,r,b", pointer, bits, self._lead.ir)
        self._next += 1


class StampedWarp(Warp):
    stamps: Stamps

    def block_barrier(self) -> None:
        self.stamps.put()
        super().block_barrier()
        self.stamps.put()

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
    stamps = Stamps(m, args, kv_head * BLOCKS + split)
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
    """Prints medians over layers and blocks of clocks since the kernel's start."""
    blocks = clusters * BLOCKS
    clocks = np.stack([np.asarray(launch).reshape(-1)[: blocks * 2 * STAMPS] for launch in launches]).view(np.uint32)
    clocks = clocks.reshape(-1, 2, STAMPS).astype(np.int64)
    print(f"clocks: {NAMES}")
    for which, label in enumerate(("first warp", "last warp")):
        since = (clocks[:, which] - clocks[:, which, :1]) & 0xFFFFFFFF
        print(f"  {label}:", " ".join(f"{np.median(column):.0f}" for column in since.T[1:23]), flush=True)
