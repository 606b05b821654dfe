"""What a kernel whose blocks talk to each other needs beyond `WideWarp`: words with tags, and waits that end.

A number travels from block to block as 8 bytes, two bfloat16 and a tag, written and read at once. Who reads the tag
that it waits for has the numbers too, so nothing has to be ordered: no fence, no counter, one way through L2.
"""

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.warp import Value, Words

POLLS = 1 << 21
"""How often a lane asks for a word before it traps: about a second. A wait in shared memory ends likewise."""
TRIES, TRY_NS = 1 << 17, 10_000


class ResidentWarp(WideWarp):
    """Emits at MLIR's current insertion point."""

    def poll(self, ref: ir.Value, first: Value, starts: Sequence[int], count: int, tag: Value) -> Words:
        """`count` tagged words (an even number) from word `first + start` on, for each start, when they have come."""
        places = [start + i for start in starts for i in range(0, count, 2)]
        total = 2 * len(places)
        lines = [f"{{ .reg .b64 d<{total}>; .reg .b32 t<{total}>, n; .reg .pred bad, late; mov.b32 n, 0; again:"]
        for i, place in enumerate(places):
            lines.append(f"ld.relaxed.gpu.global.v2.b64 {{d{2 * i}, d{2 * i + 1}}}, [${total} + {8 * place}];")
        for i in range(total):
            lines.append(f"mov.b64 {{${i}, t{i}}}, d{i};")
            lines.append(
                f"setp.ne.b32 bad, t{i}, ${total + 1};" if i == 0 else f"setp.ne.or.b32 bad, t{i}, ${total + 1}, bad;"
            )
        lines.append(f"@!bad bra done; add.u32 n, n, 1; setp.gt.u32 late, n, {POLLS}; @late trap; bra again; done: }}")
        i32 = ir.IntegerType.get_signless(32)
        got = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * total),
            [self._pointer(ref, first, 8), tag.ir],
            " ".join(lines),
            ",".join([*["=&r"] * total, "l", "r", "~{memory}"]),
            has_side_effects=True,
        )
        return tuple(Value(llvm.extractvalue(i32, got, [i])) for i in range(total))

    def publish(self, ref: ir.Value, place: Value, word: Value, tag: Value, predicate: Value) -> None:
        """Writes tagged word `place`."""
        ptx = "{ .reg .b64 d; mov.b64 d, {$1, $2}; @$3 st.relaxed.gpu.global.b64 [$0], d; }"
        self._emit(ptx, "l,r,r,b", self._pointer(ref, place, 8), word.ir, tag.ir, predicate.ir)

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        """Waits until the phase of that parity is complete; traps when it never is."""
        ptx = (
            "{ .reg .pred done; .reg .b32 n; mov.b32 n, 0; "
            f"again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1, {TRY_NS}; "
            f"@done bra.uni ready; add.u32 n, n, 1; setp.gt.u32 done, n, {TRIES}; @done trap; bra.uni again; "
            "ready: }"
        )
        self._emit(ptx, "r,r", self._shared(barrier), parity.ir)

    def some_warps_barrier(self, warps: int) -> None:
        """Waits for the first `warps` warps of the block; they see what was written to shared memory."""
        self._emit(f"bar.sync 1, {32 * warps};", "")
