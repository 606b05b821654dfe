"""What the prefill kernel needs beyond `WideWarp`: swizzled matrices in shared memory, and copies of rows.

The tests have a NumPy twin.
"""

from collections.abc import Callable, Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.words import Value, WordInstructions, Words

SWIZZLES = {128: 1, 64: 2, 32: 3}
"""How a matrix descriptor names a swizzle of so many bytes."""


class PrefillWarp(WideWarp, WordInstructions):
    """Emits at MLIR's current insertion point."""

    # Numbers
    def maximum(self, a: Value, b: Value) -> Value:
        """NaN is ignored: one instruction."""
        return Value(arith.maxnumf(a.ir, b.ir) if a.is_float else arith.maxsi(a.ir, b.ir))

    def minimum(self, a: Value, b: Value) -> Value:
        return Value(arith.minnumf(a.ir, b.ir) if a.is_float else arith.minsi(a.ir, b.ir))

    def exp2(self, x: Value) -> Value:
        return self._unary("ex2.approx.ftz.f32", x)

    def reciprocal(self, x: Value) -> Value:
        return self._unary("rcp.approx.ftz.f32", x)

    def log2(self, x: Value) -> Value:
        return self._unary("lg2.approx.ftz.f32", x)

    def _unary(self, instruction: str, x: Value) -> Value:
        return Value(llvm.inline_asm(ir.F32Type.get(), [x.ir], f"{instruction} $0, $1;", "=f,f"))

    def broadcast(self, x: Value, lane: int) -> Value:
        """The int32 x of that lane."""
        ptx = f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1F, 0xFFFFFFFF;"
        return Value(llvm.inline_asm(x.ir.type, [x.ir], ptx, "=r,r", has_side_effects=True))

    def either(self, a: Value, b: Value) -> Value:
        """a xor b."""
        return Value(arith.xori(a.ir, b.ir))

    def shift_right(self, word: Value, bits: Value) -> Value:
        return Value(arith.shrui(word.ir, bits.ir))

    def any(self, a: Value, b: Value) -> Value:
        return Value(arith.ori(a.ir, b.ir))

    def any_lane(self, condition: Value) -> Value:
        """Whether it is true in any lane of the warp."""
        ptx = "vote.sync.any.pred $0, $1, 0xFFFFFFFF;"
        return Value(llvm.inline_asm(condition.ir.type, [condition.ir], ptx, "=b,b", has_side_effects=True))

    def pick(self, x: Value, lane: Value) -> Value:
        """The int32 x of a lane, which may differ from lane to lane."""
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1F, 0xFFFFFFFF;"
        return Value(llvm.inline_asm(x.ir.type, [x.ir, lane.ir], ptx, "=r,r,r", has_side_effects=True))

    # Control
    def choose(self, condition: Value, carry: Sequence[Value], body: Callable[[], Sequence[Value]]) -> Words:
        """body() if the condition, the same in all lanes, is true; else carry."""
        if_op = scf.IfOp(condition.ir, [v.ir.type for v in carry], has_else=True)
        then_block, else_block = if_op.then_block, if_op.else_block
        assert then_block is not None and else_block is not None
        with ir.InsertionPoint(then_block):
            scf.YieldOp([v.ir for v in body()])
        with ir.InsertionPoint(else_block):
            scf.YieldOp([v.ir for v in carry])
        return tuple(Value(v) for v in if_op.results)

    # Memory
    def load_integer(self, ref: ir.Value, offset: Value, predicate: Value) -> Value:
        """int32 element `offset`; zero where the predicate is false."""
        i32 = ir.IntegerType.get_signless(32)
        ptx = "mov.b32 $0, 0; @$2 ld.global.nc.b32 $0, [$1];"
        operands = [self._pointer(ref, offset, 4), predicate.ir]
        return Value(llvm.inline_asm(i32, operands, ptx, "=&r,l,b", has_side_effects=True))

    def copy_chunk(
        self,
        address: Value,
        to: int,
        ref: ir.Value,
        chunk: Value,
        skip: int,
        inside: Value,
        predicate: Value | None,
    ) -> None:
        """Starts a copy of 16 bytes from byte `16 * chunk + skip` of `ref`, or of zeros where `inside` is false.

        They go to shared memory at `address + to`. Counted in chunks, 32 bits reach all of a pool.
        """
        size = self.select(inside, self.integer(16), self.integer(0))
        ptx, constraints = f"cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1 + {skip}], 16, $2;", "r,l,r"
        operands = [self._shared(address), self._pointer(ref, chunk, 16), size.ir]
        if predicate is not None:
            ptx, constraints = f"@$3 {ptx}", constraints + ",b"
            operands.append(predicate.ir)
        self._emit(ptx, constraints, *operands)

    def store_shared(self, address: Value, to: int, words: Sequence[Value], predicate: Value | None) -> None:
        """Four words to shared memory at `address + to`."""
        guard = "" if predicate is None else "@$5 "
        operands = [self._shared(address), *(word.ir for word in words), *([] if predicate is None else [predicate.ir])]
        constraints = ",".join(["r"] * 5 + ["b"] * (predicate is not None))
        self._emit(f"{guard}st.shared.v4.b32 [$0 + {to}], {{$1, $2, $3, $4}};", constraints, *operands)

    def store_pair(self, ref: ir.Value, offset: Value, skip: int, word: Value, predicate: Value) -> None:
        """A word to 16-bit elements `offset + skip` and the next."""
        pointer = self._pointer(ref, offset, 2)
        self._emit(f"@$2 st.global.b32 [$0 + {2 * skip}], $1;", "l,r,b", pointer, word.ir, predicate.ir)

    def copies_to_products(self) -> None:
        """What copies wrote to shared memory, as far as this thread waited for it, is seen by the products after."""
        self._emit("fence.proxy.async.shared::cta;", "")

    # Matrix products of a warpgroup
    def matrix(self, address: Value, leading: int, stride: int, swizzle: int) -> Value:
        """The descriptor of a bfloat16 matrix of swizzled 8 x `swizzle` bytes pieces.

        `stride` bytes lie between pieces of neighbouring rows, `leading` bytes between those of neighbouring columns.
        """
        i64 = ir.IntegerType.get_signless(64)
        start = arith.shrui(self._shared(address), mgpu_utils.c(4, ir.IntegerType.get_signless(32)))
        fields = (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLES[swizzle] << 62
        # As a signed number: MLIR's attributes do not take the highest bit.
        signed = fields - (1 << 64) if fields >> 63 else fields
        return Value(llvm.or_(arith.extui(i64, start), mgpu_utils.c(signed, i64)))

    def hold_back(self, value: Value, address: Value) -> None:
        """Keeps the next wait for products behind the computation of a value that is never negative.

        Nothing else does: ptxas moves waits up to the last access to memory, and what should run beside the products
        runs after them. So here is one, a store that never happens.
        """
        self.shared_store(address, value, value < 0)

    def product(
        self, acc: Sequence[Value] | None, a: Value | Sequence[Value], b: Value, columns: int, *, transposed: bool
    ) -> Words:
        """Starts acc + a b for 16 of k: wgmma.m64nNk16 with N = `columns`; None stands for sums of zero.

        a is a descriptor, or four words a lane. b is a descriptor of [columns, k], `transposed` of [k, columns].
        """
        count, f32 = columns // 2, ir.F32Type.get()
        in_registers = not isinstance(a, Value)
        before = [] if acc is None else [v.ir for v in acc]
        operands = [*before, *([v.ir for v in a] if in_registers else [a.ir]), b.ir]
        constraints = [f"={'&' if acc is None else ''}f"] * count + [str(i) for i in range(len(before))]
        constraints += (["r"] * 4 if in_registers else ["l"]) + ["l"]
        place = [f"${i}" for i in range(len(constraints))]
        sums, rest = ", ".join(place[:count]), place[count + len(before) :]
        left = f"{{{', '.join(rest[:4])}}}" if in_registers else rest[0]
        flags = f"1, 1, {int(transposed)}" if in_registers else f"1, 1, 0, {int(transposed)}"
        kind = f"m64n{columns}k16.f32.bf16.bf16"
        ptx = (
            f"{{ .reg .pred add; setp.ne.b32 add, {int(acc is not None)}, 0; "
            f"wgmma.mma_async.sync.aligned.{kind} {{{sums}}}, {left}, {rest[-1]}, add, {flags}; }}"
        )
        return self._many(ptx, ",".join(constraints), operands, f32, count)

    def ahead(self, matrix: Value, nbytes: int) -> Value:
        """The descriptor of what begins `nbytes` later."""
        return Value(arith.addi(matrix.ir, mgpu_utils.c(nbytes >> 4, matrix.ir.type))) if nbytes else matrix
