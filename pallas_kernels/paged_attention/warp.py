"""One warp's instructions, written to the PTX level of Mosaic GPU.

`mosaic.py` describes its kernel as what the 32 lanes of a warp do, through the methods of `Warp`. Here they emit MLIR
inside `plgpu.inline_mgpu`. The tests run the same description through a NumPy twin of this class (32-element arrays for
values), so fragment layouts, masks and merges are checked on a machine with no GPU.

Values are per-lane scalars (`Value`: int32, int64, float32 or bool) with Python's operators. Integers are never
negative where `//` and `%` are used.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from pallas_kernels.paged_attention.words import Value, WordInstructions, Words, ir_type


class Warp(WordInstructions):
    """Emits one warp's instructions at MLIR's current insertion point.

    `smem` is the base of this block's shared memory scratch; addresses passed to the shared-memory methods are byte
    offsets into it. Global references are (memref) arguments of the kernel; offsets into them count elements.
    """

    def __init__(self, smem: ir.Value):
        self._smem = mgpu_utils.memref_ptr(smem)
        thread = Value(arith.index_cast(ir_type("i32"), gpu.thread_id(gpu.Dimension.x)))
        self.thread = thread
        self.lane = thread % 32
        # A shuffle makes the warp index provably uniform, so branches and addresses that hang on it stay uniform.
        self.warp = Value(mgpu_utils.warp_idx(sync=True))

    # Values
    def scalar(self, value: Any) -> Value:
        """A scalar argument of `inline_mgpu` (a one-register fragmented array)."""
        return Value(value.registers.item())

    def const(self, value: int | float, kind: str = "f32") -> Value:
        return Value(mgpu_utils.c(value, ir_type(kind)))

    def wide(self, value: Value) -> Value:
        """int32 -> int64, for offsets into arrays of more than 2**31 elements."""
        return Value(arith.extui(ir_type("i64"), value.ir))

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return Value(arith.select(condition.ir, a.ir, b.ir))

    def maximum(self, a: Value, b: Value) -> Value:
        return Value(arith.maximumf(a.ir, b.ir) if a.is_float else arith.maxsi(a.ir, b.ir))

    def minimum(self, a: Value, b: Value) -> Value:
        return Value(arith.minimumf(a.ir, b.ir))

    def exp2(self, x: Value) -> Value:
        return self._unary("ex2.approx.ftz.f32", x)

    def log2(self, x: Value) -> Value:
        return self._unary("lg2.approx.ftz.f32", x)

    def reciprocal(self, x: Value) -> Value:
        return self._unary("rcp.approx.ftz.f32", x)

    def rsqrt(self, x: Value) -> Value:
        return self._unary("rsqrt.approx.ftz.f32", x)

    def exact_reciprocal(self, x: Value) -> Value:
        """Rounded as IEEE 754 asks, unlike `reciprocal`."""
        return self._unary("rcp.rn.f32", x)

    def _unary(self, instruction: str, x: Value) -> Value:
        return Value(mgpu_utils.inline_ptx(f"{instruction} $0, $1;", x.ir, result_types=ir_type("f32")))

    # Between lanes
    def shuffle_xor(self, x: Value, mask: int) -> Value:
        return Value(mgpu_utils.shfl_bfly(x.ir, mask))

    def shuffle(self, x: Value, source_lane: Value) -> Value:
        """x of lane `source_lane`, which may differ from lane to lane."""
        i32 = ir_type("i32")
        every = mgpu_utils.c(0xFFFFFFFF, i32)
        bits = llvm.bitcast(i32, x.ir)
        got = nvvm.shfl_sync(every, bits, source_lane.ir, mgpu_utils.c(0x1F, i32), nvvm.ShflKind.idx)
        return Value(llvm.bitcast(x.ir.type, got))

    def mma(self, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str) -> Words:
        """mma.m16n8k16, operands bf16 or f16 (`kind`), float32 sums: four acc values, four words of a, two of b."""
        ptx = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        operands = [v.ir for v in (*a, *b, *acc)]
        return tuple(Value(v) for v in mgpu_utils.inline_ptx(ptx, *operands, result_types=[ir_type("f32")] * 4))

    # Memory
    def load_words(self, ref: ir.Value, offset: Value, count: int, predicate: Value) -> Words:
        """`count` (1, 2, 4) words from bfloat16 elements `offset` on; zero where the predicate is false."""
        return self._load_global(self._address(ref, offset, 2), 4 * count, predicate, ".nc.L1::no_allocate", "b32")

    def load_bytes(self, ref: ir.Value, offset: Value, size: int, predicate: Value, constant: int) -> Words:
        """`size` (2, 4, 8, 16) bytes from `offset + constant` on as words; zero where the predicate is false.

        The constant costs no register: it is part of the instruction. Read-only and not kept in L1: each byte of the
        cache is used once.
        """
        address = self._address(ref, offset, 1)
        return self._load_global(address, size, predicate, ".nc.L1::no_allocate", "b32", constant)

    def load_scale(self, ref: ir.Value, offset: Value, predicate: Value, constant: int) -> Value:
        """float32 element `offset + constant`; zero where the predicate is false."""
        return self._load_global(self._address(ref, offset, 4), 4, predicate, ".nc", "f32", 4 * constant)[0]

    def load_i32(self, ref: ir.Value, offset: Value, predicate: Value) -> Value:
        return self._load_global(self._address(ref, offset, 4), 4, predicate, ".nc", "b32")[0]

    def load_floats(self, ref: ir.Value, offset: Value, count: int, predicate: Value) -> Words:
        """`count` (1, 2, 4) float32 from element `offset` on; zero where the predicate is false."""
        return self._load_global(self._address(ref, offset, 4), 4 * count, predicate, ".nc", "f32")

    def _load_global(
        self, address: ir.Value, size: int, predicate: Value, modifier: str, kind: str, constant: int = 0
    ) -> Words:
        """`size` bytes as 32-bit registers; two bytes are the lower half of one."""
        count = max(1, size // 4)
        outs = ", ".join(f"${i}" for i in range(count))
        vector, braces = (f".v{count}", f"{{{outs}}}") if count > 1 else ("", outs)
        zero = "0f00000000" if kind == "f32" else "0"
        clear = " ".join(f"mov.{kind} ${i}, {zero};" for i in range(count))
        ptx = f"{clear} @${count + 1} ld.global{modifier}{vector}.{'u16' if size == 2 else kind} "
        ptx += f"{braces}, [${count} + {constant}];"
        # Early-clobber outputs: they are written before the address is read.
        constraint = "=&f" if kind == "f32" else "=&r"
        result_type = ir_type("f32" if kind == "f32" else "i32")
        struct = llvm.StructType.get_literal([result_type] * count) if count > 1 else result_type
        # Side effects keep a prefetch where it was written: LLVM may otherwise sink it to its first use.
        result = llvm.inline_asm(
            struct,
            [address, predicate.ir],
            ptx,
            ",".join([constraint] * count + ["l", "b"]),
            has_side_effects=True,
        )
        if count == 1:
            return (Value(result),)
        return tuple(Value(llvm.extractvalue(result_type, result, [i])) for i in range(count))

    def store_words(self, ref: ir.Value, offset: Value, words: Sequence[Value], predicate: Value) -> None:
        """Words to bfloat16 elements `offset` on."""
        self._store_words(self._address(ref, offset, 2), words, predicate)

    def store_bytes(self, ref: ir.Value, offset: Value, words: Sequence[Value], predicate: Value) -> None:
        """Words to bytes `offset` on."""
        self._store_words(self._address(ref, offset, 1), words, predicate)

    def _store_words(self, address: ir.Value, words: Sequence[Value], predicate: Value) -> None:
        names = ", ".join(f"${i + 1}" for i in range(len(words)))
        vector, names = (f".v{len(words)}", f"{{{names}}}") if len(words) > 1 else ("", names)
        ptx = f"st.global{vector}.b32 [$0], {names};"
        mgpu_utils.inline_ptx(ptx, address, *[w.ir for w in words], predicate=predicate.ir)

    def store_f32(self, ref: ir.Value, offset: Value, value: Value, predicate: Value) -> None:
        address = self._address(ref, offset, 4)
        mgpu_utils.inline_ptx("st.global.f32 [$0], $1;", address, value.ir, predicate=predicate.ir)

    def _address(self, ref: ir.Value, offset: Value, size: int) -> ir.Value:
        if offset.ir.type != ir_type("i64"):
            offset = self.wide(offset)
        base = llvm.ptrtoint(ir_type("i64"), mgpu_utils.memref_ptr(ref))
        return arith.addi(base, (offset * size).ir)

    def shared_load(self, address: Value, count: int, kind: str) -> Words:
        """`count` (1, 2, 4) 32-bit values of this block's scratch."""
        names = ", ".join(f"${i}" for i in range(count))
        vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        ptx = f"ld.shared{vector}.{'f32' if kind == 'f32' else 'b32'} {names}, [${count}];"
        address_ir = arith.addi(self._shared_base(), address.ir)
        got = mgpu_utils.inline_ptx(ptx, address_ir, result_types=[ir_type(kind)] * count, has_side_effects=True)
        return tuple(Value(v) for v in got)

    def shared_store(self, address: Value, values: Sequence[Value], predicate: Value | None = None) -> None:
        """Values to this block's scratch."""
        suffix = "f32" if values[0].is_float else "b32"
        names = ", ".join(f"${i + 1}" for i in range(len(values)))
        vector, names = (f".v{len(values)}", f"{{{names}}}") if len(values) > 1 else ("", names)
        ptx = f"st.shared{vector}.{suffix} [$0], {names};"
        operands = [arith.addi(self._shared_base(), address.ir), *[v.ir for v in values]]
        mgpu_utils.inline_ptx(ptx, *operands, predicate=None if predicate is None else predicate.ir)

    # Between the blocks of a cluster. A block's inbox has a barrier of 8 bytes, which counts the bytes that came: a
    # sender needs no fence. The release of a cluster barrier is one for the whole card (MEMBAR.ALL.GPU).
    def open_inbox(self, barrier: int, num_bytes: Value) -> None:
        """Lets `num_bytes` be sent to this block, once `cluster_arrive` and `cluster_wait` followed in all blocks."""
        address, first = arith.addi(self._shared_base(), self.const(barrier, "i32").ir), (self.thread < 1).ir
        mgpu_utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", address, predicate=first)
        expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        mgpu_utils.inline_ptx(expect, address, num_bytes.ir, predicate=first)
        mgpu_utils.inline_ptx("fence.mbarrier_init.release.cluster;")

    def send(self, address: Value, values: Sequence[Value], predicate: Value, block: Value, barrier: int) -> None:
        """Two or four float32 to the scratch of block `block` of the cluster, which may differ by lane."""
        names = ", ".join(f"${i + 2}" for i in range(len(values)))
        ptx = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{len(values)}.f32 [$0], {{{names}}}, [$1];"
        mapa = "mapa.shared::cluster.u32 $0, $1, $2;"
        base = mgpu_utils.inline_ptx(mapa, self._shared_base(), block.ir, result_types=ir_type("i32"))
        places = [arith.addi(base, place.ir) for place in (address, self.const(barrier, "i32"))]
        mgpu_utils.inline_ptx(ptx, *places, *[v.ir for v in values], predicate=predicate.ir)

    def wait_inbox(self, barrier: int, scope: str = "cluster") -> None:
        """Waits until all that this block's inbox was opened for has come.

        What came is in shared memory, so that "cta" will do; "cluster" empties the L1 cache, and waits for loads.
        """
        ptx = (
            f"{{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [$0], 0; "
            "@!done bra again; }"
        )
        mgpu_utils.inline_ptx(ptx, arith.addi(self._shared_base(), self.const(barrier, "i32").ir))

    def _shared_base(self) -> ir.Value:
        return llvm.ptrtoint(ir_type("i32"), self._smem)

    # Control
    def loop(self, count: Value, carry: Sequence[Value], body: Callable[[Value, Words], Sequence[Value]]) -> Words:
        """carry = body(i, carry) for i in range(count); count is the same in all lanes."""
        zero, one = self.const(0, "i32"), self.const(1, "i32")
        for_op = scf.ForOp(zero.ir, count.ir, one.ir, [v.ir for v in carry])
        with ir.InsertionPoint(for_op.body):
            inner = tuple(Value(v) for v in for_op.inner_iter_args)
            scf.YieldOp([v.ir for v in body(Value(for_op.induction_variable), inner)])
        return tuple(Value(v) for v in for_op.results)

    def when(self, condition: Value, carry: Sequence[Value], body: Callable[[], Sequence[Value]]) -> Words:
        """body() if condition else carry; condition is the same in all lanes."""
        if_op = scf.IfOp(condition.ir, [v.ir.type for v in carry], has_else=True)
        then_block, else_block = if_op.then_block, if_op.else_block
        assert then_block is not None and else_block is not None
        with ir.InsertionPoint(then_block):
            scf.YieldOp([v.ir for v in body()])
        with ir.InsertionPoint(else_block):
            scf.YieldOp([v.ir for v in carry])
        return tuple(Value(v) for v in if_op.results)

    def block_barrier(self) -> None:
        gpu.barrier()

    def cluster_arrive(self) -> None:
        """Says that this warp came here. Of what it wrote, those that wait for it see an opened inbox only."""
        mgpu_utils.inline_ptx("barrier.cluster.arrive.relaxed.aligned;")

    def cluster_wait(self) -> None:
        """Waits until every warp of the cluster arrived."""
        mgpu_utils.inline_ptx("barrier.cluster.wait.acquire.aligned;")
