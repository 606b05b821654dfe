"""What the INT4 kernel asks of a warp beyond `paged_attention.warp.Warp`: bulk-free asynchronous copies, and codes."""

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.paged_attention.warp import Value, Warp, Words


class Int4Warp(Warp):
    """Adds 16-byte copies to shared memory, 4-bit codes as bfloat16, and numbers of any width from shared memory.

    As in `Warp`, addresses of shared memory are byte offsets into this block's scratch.
    """

    def __init__(self, smem: ir.Value, threads: int):
        super().__init__(smem, threads)
        self._scratch = llvm.ptrtoint(_int(32), mgpu_utils.memref_ptr(smem))

    def integer(self, value: int) -> Value:
        return Value(mgpu_utils.c(value, _int(32)))

    def copy_async(
        self,
        address: Value,
        ref: ir.Value,
        offset: Value,
        size: Value,
        *,
        to: int = 0,
        source: int = 0,
        predicate: Value | None = None,
    ) -> None:
        """Starts a copy of 16 bytes from byte `offset + source` of `ref` to shared memory at `address + to`.

        `size` is 16, or 0 to write zeros and read nothing. Lanes whose predicate is false do neither.
        """
        operands = [arith.addi(self._scratch, address.ir), self._pointer(ref, offset, 1), size.ir]
        ptx = f"cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1 + {source}], 16, $2;"
        if predicate is None:
            self._emit(ptx, "r,l,r", *operands)
        else:
            self._emit(f"@$3 {ptx}", "r,l,r,b", *operands, predicate.ir)

    def copy_commit(self) -> None:
        """Closes a group of copies."""
        self._emit("cp.async.commit_group;", "")

    def copy_wait(self, pending: int) -> None:
        """Waits for this lane's copies, except those of the newest `pending` groups."""
        self._emit(f"cp.async.wait_group {pending};", "")

    def warp_barrier(self) -> None:
        """Makes shared memory written by one lane visible to the others of the warp."""
        self._emit("bar.warp.sync 0xffffffff;", "")

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

    def store_number(self, ref: ir.Value, offset: Value, value: Value, dtype: str, predicate: Value) -> None:
        """A float32 value, rounded to `dtype`, to element `offset`."""
        if dtype == "float32":
            self.store_f32(ref, offset, value, predicate)
            return
        suffix = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        half = llvm.inline_asm(_int(16), [value.ir], f"cvt.rn.{suffix}.f32 $0, $1;", "=h,f")
        self._emit("@$2 st.global.b16 [$0], $1;", "l,h,b", self._pointer(ref, offset, 2), half, predicate.ir)

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
