"""One warp's instructions for the INT4 kernel, written to the PTX level of Mosaic GPU.

`mosaic.py` describes the kernel as what the 32 lanes of a warp do, through the methods of `Int4Warp`; here they emit
MLIR inside `plgpu.inline_mgpu`. The tests run the same description through a NumPy twin.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from pallas_kernels.paged_attention.warp import Value, Words


class Int4Warp:
    """Emits at MLIR's current insertion point.

    `smem` is the base of this block's shared memory scratch; addresses of shared memory are byte offsets into it.
    """

    def __init__(self, smem: ir.Value):
        self._scratch = llvm.ptrtoint(_int(32), mgpu_utils.memref_ptr(smem))
        self.thread = Value(arith.index_cast(_int(32), gpu.thread_id(gpu.Dimension.x)))
        self.lane = self.thread % 32
        # A shuffle makes the warp index provably uniform, so branches and addresses that hang on it stay uniform.
        self.warp = Value(mgpu_utils.warp_idx(sync=True))

    # Values
    def scalar(self, value: Any) -> Value:
        """A scalar argument of `inline_mgpu` (a one-register fragmented array)."""
        return Value(value.registers.item())

    def integer(self, value: int) -> Value:
        return Value(mgpu_utils.c(value, _int(32)))

    def number(self, value: float) -> Value:
        return Value(mgpu_utils.c(value, ir.F32Type.get()))

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return Value(arith.select(condition.ir, a.ir, b.ir))

    def codes(self, word: Value) -> Words:
        """Eight codes -> four words of two bfloat16 each, every one of them 128 + code."""
        i32 = _int(32)
        words = []
        for nibble in range(4):
            shifted = arith.shrui(word.ir, mgpu_utils.c(4 * nibble, i32)) if nibble else word.ir
            # One instruction for mask and exponent; written as `and` and `or`, ptxas often keeps two.
            ptx = "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;"
            words.append(Value(llvm.inline_asm(i32, [shifted], ptx, "=r,r")))
        return tuple(words)

    def mma(self, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> Words:
        """mma.m16n8k16, bf16 operands, float32 sums: four acc values, four words of a, two words of b."""
        ptx = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        operands = [v.ir for v in (*a, *b, *acc)]
        return tuple(Value(v) for v in mgpu_utils.inline_ptx(ptx, *operands, result_types=[ir.F32Type.get()] * 4))

    # From global to shared memory
    def copy_async(
        self, address: Value, ref: ir.Value, offset: Value, predicate: Value, *, to: int = 0, source: int = 0
    ) -> None:
        """Starts a copy of 16 bytes from byte `offset + source` of `ref` to shared memory at `address + to`."""
        ptx = f"@$2 cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1 + {source}], 16;"
        operands = [arith.addi(self._scratch, address.ir), self._pointer(ref, offset, 1), predicate.ir]
        self._emit(ptx, "r,l,b", *operands)

    def copy_commit(self) -> None:
        """Closes a group of copies."""
        self._emit("cp.async.commit_group;", "")

    def copy_wait(self, pending: int) -> None:
        """Waits for this lane's copies, except those of the newest `pending` groups."""
        self._emit(f"cp.async.wait_group {pending};", "")

    def copy_bulk(
        self, address: Value, ref: ir.Value, offset: Value, size: int, barrier: Value, predicate: Value
    ) -> None:
        """Orders `size` bytes (a multiple of 16) from byte `offset` of `ref`; `barrier` counts them as they arrive."""
        ptx = f"@$3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
        places = [arith.addi(self._scratch, place.ir) for place in (address, barrier)]
        self._emit(ptx, "r,l,r,b", places[0], self._pointer(ref, offset, 1), places[1], predicate.ir)

    def one_lane(self) -> Value:
        """True in one lane, in a form from which ptxas knows that it is one: copies need no loop over lanes."""
        return Value(nvvm.elect_sync())

    def arrival_init(self, barrier: Value, predicate: Value) -> None:
        """Makes 8 bytes of shared memory a barrier of one arrival a phase."""
        self._emit("@$1 mbarrier.init.shared.b64 [$0], 1;", "r,b", arith.addi(self._scratch, barrier.ir), predicate.ir)

    def arrival_init_fence(self) -> None:
        """Shows new barriers to the copy engine."""
        self._emit("fence.mbarrier_init.release.cluster;", "")

    def arrival_expect(self, barrier: Value, size: int, predicate: Value) -> None:
        """The phase's one arrival, which announces `size` bytes."""
        ptx = f"@$1 mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};"
        self._emit(ptx, "r,b", arith.addi(self._scratch, barrier.ir), predicate.ir)

    def arrival_wait(self, barrier: Value, parity: Value) -> None:
        """Waits for the end of the phase of that parity, when its bytes are in place and visible."""
        ptx = (
            "{ .reg .pred done; wait_${:uid}: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; "
            "@!done bra wait_${:uid}; }"
        )
        self._emit(ptx, "r,r", arith.addi(self._scratch, barrier.ir), parity.ir)

    # Global memory
    def load_two_words(self, ref: ir.Value, offset: Value, predicate: Value) -> Words:
        """Two words of 16-bit elements from `offset` on; zero where the predicate is false.

        A coherent load: with early launch, the kernel before may have written the array while this one had started.
        """
        i32 = _int(32)
        ptx = "mov.b32 $0, 0; mov.b32 $1, 0; @$3 ld.global.v2.b32 {$0, $1}, [$2];"
        pair = llvm.inline_asm(
            llvm.StructType.get_literal([i32, i32]),
            [self._pointer(ref, offset, 2), predicate.ir],
            ptx,
            "=&r,=&r,l,b,~{memory}",
            has_side_effects=True,
        )
        return tuple(Value(llvm.extractvalue(i32, pair, [i])) for i in range(2))

    def store_number(self, ref: ir.Value, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        """A float32 value, rounded to `dtype`, to element `offset`."""
        if dtype == "float32":
            pointer = self._pointer(ref, offset, 4)
            self._emit("@$2 st.global.f32 [$0], $1;", "l,f,b", pointer, value.ir, predicate.ir)
            return
        suffix = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        half = llvm.inline_asm(_int(16), [value.ir], f"cvt.rn.{suffix}.f32 $0, $1;", "=h,f")
        self._emit("@$2 st.global.b16 [$0], $1;", "l,h,b", self._pointer(ref, offset, 2), half, predicate.ir)

    # Shared memory
    def shared_words(self, address: Value) -> Words:
        """Four words from a multiple of 16 on."""
        ptx = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        pointer = arith.addi(self._scratch, address.ir)
        got = mgpu_utils.inline_ptx(ptx, pointer, result_types=[_int(32)] * 4, has_side_effects=True)
        return tuple(Value(v) for v in got)

    def shared_number(self, address: Value, dtype: str, constant: int = 0) -> Value:
        """A number of shared memory as float32; `dtype` is a NumPy name."""
        i16, i32, f32 = _int(16), _int(32), ir.F32Type.get()
        pointer = arith.addi(self._scratch, address.ir)

        def load(instruction: str, kind: ir.Type, constraint: str) -> ir.Value:
            ptx = f"{instruction} $0, [$1 + {constant}];"
            return llvm.inline_asm(kind, [pointer], ptx, f"={constraint},r", has_side_effects=True)

        match dtype:
            case "float32":
                return Value(load("ld.shared.f32", f32, "f"))
            case "bfloat16":
                half = arith.extui(i32, load("ld.shared.u16", i16, "h"))
                return Value(llvm.bitcast(f32, arith.shli(half, mgpu_utils.c(16, i32))))
            case "float16":
                half = llvm.bitcast(ir.F16Type.get(), load("ld.shared.u16", i16, "h"))
                return Value(arith.extf(f32, half))
            case "uint8":
                return Value(arith.uitofp(f32, load("ld.shared.u8", i32, "r")))
        raise ValueError(f"shared_number does not read {dtype}")

    def shared_store(self, address: Value, value: Value, predicate: Value | None = None) -> None:
        """A float32 number."""
        operands = [arith.addi(self._scratch, address.ir), value.ir]
        if predicate is None:
            self._emit("st.shared.f32 [$0], $1;", "r,f", *operands)
        else:
            self._emit("@$2 st.shared.f32 [$0], $1;", "r,f,b", *operands, predicate.ir)

    # Control
    def loop(self, count: Value, carry: Sequence[Value], body: Callable[[Value, Words], Sequence[Value]]) -> Words:
        """carry = body(i, carry) for i in range(count); count is the same in all lanes."""
        for_op = scf.ForOp(self.integer(0).ir, count.ir, self.integer(1).ir, [v.ir for v in carry])
        with ir.InsertionPoint(for_op.body):
            inner = tuple(Value(v) for v in for_op.inner_iter_args)
            scf.YieldOp([v.ir for v in body(Value(for_op.induction_variable), inner)])
        return tuple(Value(v) for v in for_op.results)

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """body() if the condition, the same in all lanes, is true."""
        with ir.InsertionPoint(scf.IfOp(condition.ir).then_block):
            body()
            scf.YieldOp([])

    def warp_barrier(self) -> None:
        """Makes shared memory written by one lane visible to the others of the warp."""
        self._emit("bar.warp.sync 0xffffffff;", "")

    def block_barrier(self) -> None:
        gpu.barrier()

    def early_launch_wait(self) -> None:
        """Waits until the kernel before has finished and its writes are visible."""
        self._emit("griddepcontrol.wait;", "")

    def _pointer(self, ref: ir.Value, offset: Value, itemsize: int) -> ir.Value:
        base = llvm.ptrtoint(_int(64), mgpu_utils.memref_ptr(ref))
        wide = arith.extui(_int(64), offset.ir)
        return arith.addi(base, arith.muli(wide, mgpu_utils.c(itemsize, _int(64))))

    def _emit(self, ptx: str, constraints: str, *operands: ir.Value) -> None:
        clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), ptx, clobber, has_side_effects=True)


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)
