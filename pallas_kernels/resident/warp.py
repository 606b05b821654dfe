"""What a kernel whose blocks talk to each other needs beyond `WideWarp`: words with tags, and waits that end.

A number travels from block to block as 8 bytes, two bfloat16 (or a float32) and a tag, written and read at once. Who
reads the tag that it waits for has the numbers too, so nothing has to be ordered: no fence, no counter, one way
through L2.
"""

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.warp import Value, Words

POLLS = 1 << 21
"""How often a lane asks for words before it traps: about a second. A wait in shared memory ends likewise."""
TRIES, TRY_NS = 1 << 17, 10_000


class ResidentWarp(WideWarp):
    """Emits at MLIR's current insertion point. A reference may also be a pointer of `pointer_at`."""

    # Between blocks
    def poll(self, ref: ir.Value, pairs: Sequence[tuple[Value, int]], tag: Value, wanted: Value | None = None) -> Words:
        """Tagged words `place + constant` and the next, for each pair of these, when all have come.

        `place + constant` is even. Lanes where `wanted` is false get zeros and do not wait.
        """
        total, bases = 2 * len(pairs), list({id(place): place for place, _ in pairs}.values())
        base = {id(place): f"${total + i}" for i, place in enumerate(bases)}
        expected = f"${total + len(bases)}"
        lines = [f"{{ .reg .b64 d<{total}>; .reg .b32 t<{total}>, n; .reg .pred bad, late; mov.b32 n, 0;"]
        operands = [*[self._pointer(ref, place, 8) for place in bases], tag.ir]
        constraints = [*["=&r"] * total, *["l"] * len(bases), "r"]
        if wanted is not None:
            lines += [f"mov.b32 ${i}, 0;" for i in range(total)] + [f"@!${total + len(operands)} bra done;"]
            operands.append(wanted.ir)
            constraints.append("b")
        lines.append("again:")
        for i, (place, constant) in enumerate(pairs):
            source = f"[{base[id(place)]} + {8 * constant}]"
            lines.append(f"ld.relaxed.gpu.global.v2.b64 {{d{2 * i}, d{2 * i + 1}}}, {source};")
        for i in range(total):
            lines.append(f"mov.b64 {{${i}, t{i}}}, d{i};")
            lines.append(f"setp.ne{'.or' if i else ''}.b32 bad, t{i}, {expected}{', bad' if i else ''};")
        lines.append(f"@!bad bra done; add.u32 n, n, 1; setp.gt.u32 late, n, {POLLS}; @late trap; bra again; done: }}")
        i32 = ir.IntegerType.get_signless(32)
        got = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * total),
            operands,
            " ".join(lines),
            ",".join([*constraints, "~{memory}"]),
            has_side_effects=True,
        )
        return tuple(Value(llvm.extractvalue(i32, got, [i])) for i in range(total))

    def publish(self, ref: ir.Value, place: Value, word: Value, tag: Value, predicate: Value) -> None:
        """Writes tagged word `place`."""
        ptx = "{ .reg .b64 d; mov.b64 d, {$1, $2}; @$3 st.relaxed.gpu.global.b64 [$0], d; }"
        self._emit(ptx, "l,r,r,b", self._pointer(ref, place, 8), word.ir, tag.ir, predicate.ir)

    # Within a block
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

    # Arrays by number: a loop over layers takes another one each time
    def keep_pointer(self, address: Value, ref: ir.Value, constant: int, predicate: Value) -> None:
        """Where array `ref` starts, to shared memory at `address + constant`."""
        operands = [self._shared(address), self._pointer(ref, self.integer(0), 1), predicate.ir]
        self._emit(f"@$2 st.shared.b64 [$0 + {constant}], $1;", "r,l,b", *operands)

    def pointer_at(self, address: Value, constant: int) -> Value:
        i64 = ir.IntegerType.get_signless(64)
        pointer = arith.addi(self._scratch, address.ir)
        ptx = f"ld.shared.b64 $0, [$1 + {constant}];"
        return Value(llvm.inline_asm(i64, [pointer], ptx, "=l,r", has_side_effects=True))

    def _pointer(self, ref: ir.Value | Value, offset: Value, itemsize: int) -> ir.Value:
        if not isinstance(ref, Value):
            return super()._pointer(ref, offset, itemsize)
        i64 = ir.IntegerType.get_signless(64)
        size = arith.constant(i64, ir.IntegerAttr.get(i64, itemsize))
        return arith.addi(ref.ir, arith.muli(arith.extui(i64, offset.ir), size))

    # Numbers
    def exp2(self, x: Value) -> Value:
        return self._approximate("ex2.approx.ftz.f32", x)

    def log2(self, x: Value) -> Value:
        return self._approximate("lg2.approx.ftz.f32", x)

    def reciprocal(self, x: Value) -> Value:
        return self._approximate("rcp.approx.ftz.f32", x)

    def maximum(self, a: Value, b: Value) -> Value:
        return Value(arith.maximumf(a.ir, b.ir))

    def bits(self, number: Value) -> Value:
        return Value(llvm.bitcast(ir.IntegerType.get_signless(32), number.ir))
