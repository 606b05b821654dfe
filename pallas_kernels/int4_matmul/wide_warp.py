"""What the INT4 kernel for many rows needs beyond `Int4Warp`: barriers in shared memory, bulk copies, `wgmma`.

Addresses of shared memory are byte offsets into the block's scratch. The tests have a NumPy twin.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.int4_matmul.warp import Int4Warp
from pallas_kernels.paged_attention.warp import Value, Words

# Bits 16-29 of a descriptor are the distance, in 16 bytes, between the two 8 x 8 matrices along the inputs, bits 32-45
# that between those of neighbouring tokens; bits 62-63 are zero: not swizzled.
NEXT_TOKENS = (8 * 16 // 16) << 32
# Swizzled by 128 bytes: the next 8 tokens are 1024 bytes on, inputs within 128 bytes follow by themselves.
SWIZZLED = 1 << 62 | (8 * 128 // 16) << 32 | 1 << 16


def boxes_of(ctx: Any, array: ir.Value, box: tuple[int, int]) -> ir.Value:
    """What the copy engine has to know of an array of a kernel to fetch boxes of its two dimensions, swizzled.

    The public way, `ctx.async_copy`, wants views of shared memory and barriers of its own.
    """
    return ctx._get_tma_desc(array, (), None, box, 128, None)


class WideWarp(Int4Warp):
    """Emits at MLIR's current insertion point."""

    # Two bfloat16 in a word
    def add_pairs(self, a: Value, b: Value) -> Value:
        return self._word("add.rn.bf16x2 $0, $1, $2;", a, b)

    def fma_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._word("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)

    def twice(self, number: Value) -> Value:
        """A float32 rounded to bfloat16, in both halves of a word."""
        return self._word("cvt.rn.bf16x2.f32 $0, $1, $1;", number)

    def low_number(self, word: Value) -> Value:
        """The bfloat16 in the lower half as float32."""
        bits = arith.shli(word.ir, mgpu_utils.c(16, ir.IntegerType.get_signless(32)))
        return Value(llvm.bitcast(ir.F32Type.get(), bits))

    def half_number(self, word: Value, half: int) -> Value:
        """One of a word's two float16 as float32."""
        name = ("low", "high")[half]
        ptx = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {name}; }}"
        return Value(llvm.inline_asm(ir.F32Type.get(), [word.ir], ptx, "=f,r"))

    def as_float(self, word: Value) -> Value:
        return Value(llvm.bitcast(ir.F32Type.get(), word.ir))

    def permute(self, a: Value, b: int, selector: int) -> Value:
        """Four bytes: nibble i of the selector names byte i of the result, 0-3 of a and 4-7 of the constant b."""
        return self._word(f"prmt.b32 $0, $1, {b:#x}, {selector:#x};", a)

    def shared_word(self, address: Value, constant: int = 0) -> Value:
        return Value(self._shared_load("ld.shared.b32", address, constant, ir.IntegerType.get_signless(32), "r"))

    def shared_half(self, address: Value, constant: int = 0) -> Value:
        """The 16 bits at `address + constant`, in a word."""
        half = self._shared_load("ld.shared.u16", address, constant, ir.IntegerType.get_signless(16), "h")
        return Value(arith.extui(ir.IntegerType.get_signless(32), half))

    # Global memory
    def global_words(self, ref: ir.Value, offset: Value, count: int) -> Words:
        """1, 2 or 4 words from byte `offset` on of an array that no kernel before this one has just written."""
        i32, names = ir.IntegerType.get_signless(32), ", ".join(f"${i}" for i in range(count))
        vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        ptx = f"ld.global.nc{vector}.b32 {names}, [${count}];"
        got = mgpu_utils.inline_ptx(
            ptx, self._pointer(ref, offset, 1), result_types=[i32] * count, has_side_effects=True
        )
        return tuple(Value(v) for v in got)

    def global_half(self, ref: ir.Value, offset: Value) -> Value:
        """The 16 bits at byte `offset`, in a word."""
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        pointer = self._pointer(ref, offset, 1)
        return Value(arith.extui(i32, llvm.inline_asm(i16, [pointer], "ld.global.nc.u16 $0, [$1];", "=h,l")))

    def store_words(self, ref: ir.Value, offset: Value, words: Sequence[Value], predicate: Value) -> None:
        """2 or 4 words to 16-bit elements `offset` on."""
        count = len(words)
        names = ", ".join(f"${i + 1}" for i in range(count))
        ptx = f"@${count + 1} st.global.v{count}.b32 [$0], {{{names}}};"
        operands = [self._pointer(ref, offset, 2), *[word.ir for word in words], predicate.ir]
        self._emit(ptx, ",".join(["l", *["r"] * count, "b"]), *operands)

    def give_up(self, ref: ir.Value, offset: Value, size: int, predicate: Value) -> None:
        """Makes 128 bytes, from element `offset` of `size` bytes on, anything: L2 need not write them to memory."""
        self._emit("@$1 discard.global.L2 [$0], 128;", "l,b", self._pointer(ref, offset, size), predicate.ir)

    # Copies
    def copy_or_clear(
        self, address: Value, ref: ir.Value, offset: Value, inside: Value | None, predicate: Value | None, to: int
    ) -> None:
        """Starts a copy of 16 bytes from byte `offset` of `ref`, or of zeros where `inside` is false.

        They go to shared memory at `address + to`. None stands for true.
        """
        ptx, constraints = f"cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1], 16", "r,l"
        operands = [self._shared(address)]
        if inside is None:
            operands.append(self._pointer(ref, offset, 1))
        else:
            operands.append(self._pointer(ref, self.select(inside, offset, self.integer(0)), 1))
            operands.append(self.select(inside, self.integer(16), self.integer(0)).ir)
            ptx, constraints = ptx + ", $2", constraints + ",r"
        if predicate is not None:
            ptx, constraints = f"@${len(operands)} {ptx}", constraints + ",b"
            operands.append(predicate.ir)
        self._emit(ptx + ";", constraints, *operands)

    def arrive_when_copied(self, barrier: Value) -> None:
        """Arrives at a barrier when this lane's copies so far have landed."""
        self._emit("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", self._shared(barrier))

    def copy_to_cluster(
        self, address: Value, ref: ir.Value, offset: Value, nbytes: int, barrier: Value, blocks: int, predicate: Value
    ) -> None:
        """Starts a copy from byte `offset` of `ref` to the same place in the first `blocks` blocks of the cluster.

        It reports its bytes to the barrier, in each of them.
        """
        operation = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        operands = [self._shared(address), self._pointer(ref, offset, 1), self._shared(barrier), predicate.ir]
        self._copy(operation, f"[$0], [$1], {nbytes}, [$2]", "r,l,r,b", operands, blocks)

    def copy_box(
        self, address: Value, boxes: ir.Value, column: Value, row: Value, barrier: Value, blocks: int, predicate: Value
    ) -> None:
        """Starts a copy of a box from `row` and `column` on to the same place in the first blocks of the cluster.

        See `boxes_of`. It reports its bytes to the barrier, in each of them; outside the array it gives zeros.
        """
        operation = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        operands = [self._shared(address), boxes, column.ir, row.ir, self._shared(barrier), predicate.ir]
        self._copy(operation, "[$0], [$1, {$2, $3}], [$4]", "r,l,r,r,r,b", operands, blocks)

    def _copy(self, operation: str, places: str, constraints: str, operands: Sequence[ir.Value], blocks: int) -> None:
        """A copy to the first `blocks` blocks of the cluster, under the last operand."""
        under = len(operands) - 1
        if blocks > 1:
            mask = mgpu_utils.c((1 << blocks) - 1, ir.IntegerType.get_signless(16))
            operation, places = f"{operation}.multicast::cluster", f"{places}, ${under + 1}"
            constraints, operands = f"{constraints},h", [*operands, mask]
        self._emit(f"@${under} {operation} {places};", constraints, *operands)

    def copy_once(
        self, address: Value, ref: ir.Value, offset: Value, nbytes: int, barrier: Value, predicate: Value
    ) -> None:
        """Starts a copy from byte `offset` of `ref` to this block; it reports its bytes to the barrier.

        The bytes are the first to leave the L2 cache, so that what is read again stays: x, and the kernels' code.
        """
        ptx = (
            "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
            "@$3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            f"[$0], [$1], {nbytes}, [$2], policy; }}"
        )
        operands = [self._shared(address), self._pointer(ref, offset, 1), self._shared(barrier), predicate.ir]
        self._emit(ptx, "r,l,r,b", *operands)

    def store_at(self, ref: ir.Value, offset: Value, constant: int, value: Value, dtype: str, predicate: Value) -> None:
        """A float32 value, rounded to `dtype`, to element `offset + constant`.

        The constant is part of the instruction: LLVM would compute the addresses of a hundred stores ahead of them.
        """
        if dtype == "float32":
            pointer = self._pointer(ref, offset, 4)
            self._emit(f"@$2 st.global.f32 [$0 + {4 * constant}], $1;", "l,f,b", pointer, value.ir, predicate.ir)
            return
        suffix = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        ptx = f"{{ .reg .b16 half; cvt.rn.{suffix}.f32 half, $1; @$2 st.global.b16 [$0 + {2 * constant}], half; }}"
        self._emit(ptx, "l,f,b", self._pointer(ref, offset, 2), value.ir, predicate.ir)

    def pack(self, low: Value, high: Value, dtype: str) -> Value:
        """Two float32, rounded to bfloat16 or float16, in a word."""
        suffix = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
        return self._word(f"cvt.rn.{suffix}.f32 $0, $2, $1;", low, high)

    def store_transposed(self, address: Value, constant: int, words: Sequence[Value]) -> None:
        """Two 8 x 8 matrices of 16 bits, a lane holding two neighbours of row lane // 4, to shared memory by columns.

        Lanes 0-7 give where the first matrix' columns go, 16 bytes each, lanes 8-15 those of the second.
        """
        ptx = f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0 + {constant}], {{$1, $2}};"
        self._emit(ptx, "r,r,r", self._shared(address), *[word.ir for word in words])

    def warpgroup_barrier(self) -> None:
        """Waits for the other warps of the warpgroup; they see what was written to shared memory."""
        mgpu_utils.warpgroup_barrier()

    # Barriers in shared memory
    def barrier_init(self, barrier: Value, arrivals: int, predicate: Value) -> None:
        self._emit(f"@$1 mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r,b", self._shared(barrier), predicate.ir)

    def barriers_ready(self) -> None:
        """Makes this thread's initialisations visible to the cluster and to bulk copies; a block barrier follows."""
        self._emit("fence.mbarrier_init.release.cluster;", "")
        self._emit("fence.proxy.async.shared::cta;", "")

    def expect_bytes(self, barrier: Value, nbytes: int, predicate: Value) -> None:
        """Arrives, and makes the barrier wait for that many bytes of bulk copies too."""
        ptx = f"@$1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};"
        self._emit(ptx, "r,b", self._shared(barrier), predicate.ir)

    def arrive_in(self, barrier: Value, block: Value | None, predicate: Value) -> None:
        """Arrives at the barrier of this block (None) or of a block of the cluster."""
        if block is None:
            ptx = "@$1 mbarrier.arrive.shared::cta.b64 _, [$0];"
            self._emit(ptx, "r,b", self._shared(barrier), predicate.ir)
            return
        ptx = (
            "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $2; "
            "@$1 mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
        )
        self._emit(ptx, "r,b,r", self._shared(barrier), predicate.ir, block.ir)

    def barrier_wait(self, barrier: Value, parity: Value) -> None:
        """Waits until the phase of that parity is complete."""
        ptx = (
            "{ .reg .pred done; "
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
            "@done bra.uni ready; bra.uni again; "
            "ready: }"
        )
        self._emit(ptx, "r,r", self._shared(barrier), parity.ir)

    def cluster_barrier(self) -> None:
        """Waits for every thread of the cluster; of what they wrote, only `barriers_ready`'s is surely visible then.

        A fence of everything would wait for the whole card's memory.
        """
        self._emit("barrier.cluster.arrive.relaxed.aligned;", "")
        self._emit("barrier.cluster.wait.acquire.aligned;", "")

    def send_words(
        self, address: Value, words: Sequence[Value], block: Value, barrier: int, predicate: Value | None = None
    ) -> None:
        """1, 2 or 4 words, or float32, to the inbox of block `block` of the cluster, which may differ by lane."""
        names = ", ".join(f"${i + 3}" for i in range(len(words)))
        vector, names = (f".v{len(words)}", f"{{{names}}}") if len(words) > 1 else ("", names)
        kind = f"{vector}.{'f32' if words[0].is_float else 'b32'}"
        guard = "" if predicate is None else f"@${len(words) + 3} "
        ptx = (
            "{ .reg .b32 place, counter; mapa.shared::cluster.u32 place, $0, $2; "
            "mapa.shared::cluster.u32 counter, $1, $2; "
            f"{guard}st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{kind} [place], {names}, "
            "[counter]; }"
        )
        places = [self._shared(address), self._shared(self.integer(barrier)), block.ir]
        constraints = ["r"] * 3 + ["f" if words[0].is_float else "r"] * len(words)
        operands = [*places, *(word.ir for word in words)]
        if predicate is not None:
            constraints, operands = [*constraints, "b"], [*operands, predicate.ir]
        self._emit(ptx, ",".join(constraints), *operands)

    # Turns of two warpgroups
    def wait_turn(self, barrier: Value) -> None:
        """Waits until another warpgroup gives the turn at one of the block's sixteen barriers."""
        self._emit("bar.sync $0, 256;", "r", barrier.ir)

    def give_turn(self, barrier: Value) -> None:
        self._emit("bar.arrive $0, 256;", "r", barrier.ir)

    # Matrix products of a warpgroup
    def token_matrix(self, address: Value, tokens: int) -> Value:
        """The descriptor of x in shared memory: 8 x 8 matrices [8 tokens, 16 bytes], tokens first."""
        return self._matrix(address, NEXT_TOKENS | tokens << 16)

    def swizzled_matrix(self, address: Value) -> Value:
        """The same of x as `copy_box` brings it: tokens of 128 bytes each, whose pieces of 16 are swizzled."""
        return self._matrix(address, SWIZZLED)

    def _matrix(self, address: Value, layout: int) -> Value:
        # In a cluster the upper bits of an address are the block's rank: the descriptor has other things there.
        start = arith.andi(self._shared(address), mgpu_utils.c(0x3FFFF, ir.IntegerType.get_signless(32)))
        start = arith.shrui(start, mgpu_utils.c(4, start.type))
        wide = arith.extui(ir.IntegerType.get_signless(64), start)
        return Value(llvm.or_(wide, mgpu_utils.c(layout, wide.type)))

    def wgmma(self, acc: Sequence[Value], a: Sequence[Value], matrix: Value, advance: int) -> Words:
        """Starts acc += a x^T for 16 inputs: wgmma.m64nNk16 with N = len(acc) * 2 tokens, a in registers.

        `advance`: bytes from the descriptor's address. Sums may be used after `wgmma_wait`.
        """
        count, f32 = len(acc), ir.F32Type.get()
        place = [f"${i}" for i in range(2 * count + 5)]
        ptx = (
            "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 {{{', '.join(place[:count])}}}, "
            f"{{{', '.join(place[2 * count : 2 * count + 4])}}}, {place[-1]}, add, 1, 1, 0; }}"
        )
        constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"])
        shifted = arith.addi(matrix.ir, mgpu_utils.c(advance >> 4, matrix.ir.type))
        operands = [v.ir for v in (*acc, *a)] + [shifted]
        return self._many(ptx, constraints, operands, f32, count)

    def wgmma_fence(self, values: Sequence[Value]) -> Words:
        """Orders what wrote these registers before the products that read them."""
        return self._tied("wgmma.fence.sync.aligned;", values)

    def wgmma_commit(self) -> None:
        """Closes a group of products."""
        self._emit("wgmma.commit_group.sync.aligned;", "")

    def wgmma_wait(self, pending: int, values: Sequence[Value] = ()) -> Words:
        """Waits for all groups but the newest `pending`; gives the finished sums."""
        return self._tied(f"wgmma.wait_group.sync.aligned {pending};", values)

    def _tied(self, ptx: str, values: Sequence[Value]) -> Words:
        """An instruction which LLVM takes to rewrite the values, so that no use of them moves across it."""
        if not values:
            self._emit(ptx, "")
            return ()
        count, kind = len(values), "f" if values[0].is_float else "r"
        constraints = ",".join([f"={kind}"] * count + [str(i) for i in range(count)])
        return self._many(ptx, constraints, [value.ir for value in values], values[0].ir.type, count)

    def _many(self, ptx: str, constraints: str, operands: list[ir.Value], kind: ir.Type, count: int) -> Words:
        struct = llvm.StructType.get_literal([kind] * count)
        result = llvm.inline_asm(struct, operands, ptx, f"{constraints},~{{memory}}", has_side_effects=True)
        return tuple(Value(llvm.extractvalue(kind, result, [i])) for i in range(count))

    def set_registers(self, count: int, more: bool) -> None:
        """Registers of each thread from here on; all warps of the warpgroup must come here."""
        self._emit(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", "")

    def _shared(self, address: Value) -> Any:
        return arith.addi(self._scratch, address.ir)
