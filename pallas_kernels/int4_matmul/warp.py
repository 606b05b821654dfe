"""One warp's instructions for the INT4 kernel, written to the PTX level of Mosaic GPU.

`mosaic.py` describes the kernel as what the 32 lanes of a warp do, through the methods of `Int4Warp`; here they emit
MLIR inside `plgpu.inline_mgpu`. The tests run the same description through a NumPy twin.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from pallas_kernels.int4_matmul.code_words import CodeWords
from pallas_kernels.paged_attention.warp import Value, Words

LOG2_E = 1.4426950408889634


class Int4Warp(CodeWords):
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

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return Value(llvm.intr_fma(a.ir, b.ir, c.ir))

    def rsqrt(self, x: Value) -> Value:
        return self._approximate("rsqrt.approx.f32", x)

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + exp(-x)), to a few units in the last place."""
        return self._approximate("rcp.approx.f32", self._approximate("ex2.approx.f32", x * -LOG2_E) + 1.0)

    def _approximate(self, instruction: str, x: Value) -> Value:
        return Value(llvm.inline_asm(ir.F32Type.get(), [x.ir], f"{instruction} $0, $1;", "=f,f"))

    def numbers_of(self, word: Value) -> Words:
        """The two bfloat16 of a word, as float32."""
        i32 = _int(32)
        low, high = arith.shli(word.ir, mgpu_utils.c(16, i32)), arith.andi(word.ir, mgpu_utils.c(-65536, i32))
        return self.as_number(Value(low)), self.as_number(Value(high))

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

    def mma(self, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str = "bf16") -> Words:
        """mma.m16n8k16, bf16 or f16 operands, float32 sums: four acc values, four words of a, two words of b."""
        ptx = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        operands = [v.ir for v in (*a, *b, *acc)]
        return tuple(Value(v) for v in mgpu_utils.inline_ptx(ptx, *operands, result_types=[ir.F32Type.get()] * 4))

    # x in float16
    def factor_to_halves(self, bits: Value) -> Value:
        """The power of two that takes numbers up to the magnitude with these bfloat16 bits to less than 2^15."""
        exponent = arith.maxui(arith.shrui(bits.ir, mgpu_utils.c(7, _int(32))), mgpu_utils.c(15, _int(32)))
        field = arith.subi(mgpu_utils.c(268, _int(32)), exponent)
        return self.as_number(Value(arith.shli(field, mgpu_utils.c(23, _int(32)))))

    def factor_from_halves(self, bits: Value) -> Value:
        """Its inverse; NaN for a magnitude that is not finite."""
        exponent = arith.maxui(arith.shrui(bits.ir, mgpu_utils.c(7, _int(32))), mgpu_utils.c(15, _int(32)))
        field = arith.subi(exponent, mgpu_utils.c(14, _int(32)))
        number = self.as_number(Value(arith.shli(field, mgpu_utils.c(23, _int(32)))))
        return self.select(bits < 0x7F80, number, self.number(float("nan")))

    def half_pair(self, low: Value, high: Value) -> Value:
        """Two float32, rounded to float16, in a word."""
        return self._word("cvt.rn.f16x2.f32 $0, $2, $1;", low, high)

    # x as three bytes, and codes as bytes
    def code_bytes(self, word: Value) -> Words:
        """Eight codes -> two words of four bytes."""
        i32, words = _int(32), []
        for shift in (0, 4):
            shifted = arith.shrui(word.ir, mgpu_utils.c(shift, i32)) if shift else word.ir
            words.append(Value(arith.andi(shifted, mgpu_utils.c(0x0F0F0F0F, i32))))
        return tuple(words)

    def mma_bytes(
        self, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], *, signed: tuple[bool, bool]
    ) -> Words:
        """mma.m16n8k32 of bytes, each operand's signed or not, integer sums; m16n8k16 for two words of a."""
        count = len(a)
        registers = [f"${i}" for i in range(4 + count + len(b) + 4)]
        braces = ["{" + ", ".join(registers[i:j]) + "}" for i, j in itertools.pairwise((0, 4, 4 + count, -4, None))]
        of_a, of_b = ("s8" if is_signed else "u8" for is_signed in signed)
        kind = f"m16n8k{8 * count}.row.col.s32.{of_a}.{of_b}.s32"
        operands = [v.ir for v in (*a, *b, *acc)]
        got = mgpu_utils.inline_ptx(
            f"mma.sync.aligned.{kind} {', '.join(braces)};", *operands, result_types=[_int(32)] * 4
        )
        return tuple(Value(v) for v in got)

    def as_number(self, bits: Value) -> Value:
        return Value(llvm.bitcast(ir.F32Type.get(), bits.ir))

    def largest(self, words: Sequence[Value]) -> Value:
        """The bits of the largest magnitude among pairs of bfloat16; infinity and NaN are larger than all numbers."""
        i32 = _int(32)
        pairs = [arith.andi(word.ir, mgpu_utils.c(0x7FFF7FFF, i32)) for word in words]
        both = functools.reduce(lambda x, y: llvm.inline_asm(i32, [x, y], "max.u16x2 $0, $1, $2;", "=r,r,r"), pairs)
        low, high = arith.andi(both, mgpu_utils.c(0xFFFF, i32)), arith.shrui(both, mgpu_utils.c(16, i32))
        return Value(arith.maxui(low, high))

    def factor_to_integers(self, bits: Value) -> Value:
        """The power of two that takes numbers up to the magnitude with these bfloat16 bits to less than 2^22."""
        exponent = arith.maxui(arith.shrui(bits.ir, mgpu_utils.c(7, _int(32))), mgpu_utils.c(30, _int(32)))
        field = arith.subi(mgpu_utils.c(275, _int(32)), exponent)
        return self.as_number(Value(arith.shli(field, mgpu_utils.c(23, _int(32)))))

    def factor_from_integers(self, bits: Value) -> Value:
        """Its inverse; NaN for a magnitude that is not finite, whose integers mean nothing."""
        exponent = arith.maxui(arith.shrui(bits.ir, mgpu_utils.c(7, _int(32))), mgpu_utils.c(30, _int(32)))
        field = arith.subi(exponent, mgpu_utils.c(21, _int(32)))
        number = self.as_number(Value(arith.shli(field, mgpu_utils.c(23, _int(32)))))
        return self.select(bits < 0x7F80, number, self.number(float("nan")))

    def digits(self, words: Sequence[Value], factor: Value, *, balanced: bool = False) -> Words:
        """Four bfloat16 numbers times `factor`, as integers of up to 22 bits and sign -> their bytes, lowest first.

        The order within a word is that of the numbers 0, 2, 1, 3, as in a word of codes. The highest byte is signed;
        where `balanced` all are, and integers have up to 21 bits.
        """
        i32, f32 = _int(32), ir.F32Type.get()
        middle = 0x8080 if balanced else 0

        def integer(bits: ir.Value) -> ir.Value:
            # Added to 1.5 x 2^23, an integer stands in the bits of the sum, 0x400000 above itself.
            addend = mgpu_utils.c(12582912.0 + middle, f32)
            return llvm.bitcast(i32, llvm.intr_fma(llvm.bitcast(f32, bits), factor.ir, addend))

        def lower(bytes_: ir.Value) -> Value:
            return Value(arith.xori(bytes_, mgpu_utils.c(-0x7F7F7F80, i32)) if balanced else bytes_)

        def permute(a: ir.Value, b: ir.Value, selector: int) -> ir.Value:
            return llvm.inline_asm(i32, [a, b], f"prmt.b32 $0, $1, $2, {selector:#06x};", "=r,r,r")

        a, c = (integer(arith.shli(word.ir, mgpu_utils.c(16, i32))) for word in words)
        b, d = (integer(arith.andi(word.ir, mgpu_utils.c(-65536, i32))) for word in words)
        even, odd = permute(a, c, 0x5140), permute(b, d, 0x5140)
        top = permute(permute(a, c, 0x0062), permute(b, d, 0x0062), 0x5410)
        # Byte by byte less 0x40: with the highest bit set no byte borrows from the next.
        ones = mgpu_utils.c(-0x7F7F7F80, i32)
        top = arith.xori(arith.subi(arith.ori(top, ones), mgpu_utils.c(0x40404040, i32)), ones)
        return lower(permute(even, odd, 0x5410)), lower(permute(even, odd, 0x7632)), Value(top)

    def shuffle_xor(self, x: Value, mask: int) -> Value:
        return Value(mgpu_utils.shfl_bfly(x.ir, mask))

    def shuffle(self, x: Value, source_lane: Value) -> Value:
        """x, a float32, of lane `source_lane`, which may differ from lane to lane."""
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1F, 0xFFFFFFFF;"
        return Value(llvm.inline_asm(ir.F32Type.get(), [x.ir, source_lane.ir], ptx, "=f,f,r", has_side_effects=True))

    # From global to shared memory
    def copy_async(
        self,
        address: Value,
        ref: ir.Value,
        offset: Value,
        predicate: Value,
        *,
        to: int = 0,
        source: int = 0,
        nbytes: int = 16,
        inside: Value | None = None,
    ) -> None:
        """Starts a copy of 4 or 16 bytes from byte `offset + source` of `ref` to shared memory at `address + to`.

        Where `inside` is false, of as many zeros; `offset` is then any place of `ref`.
        """
        through = "cg.shared.global.L2::128B" if nbytes == 16 else "ca.shared.global"
        ptx = f"@$2 cp.async.{through} [$0 + {to}], [$1 + {source}], {nbytes}"
        operands = [arith.addi(self._scratch, address.ir), self._pointer(ref, offset, 1), predicate.ir]
        if inside is None:
            self._emit(ptx + ";", "r,l,b", *operands)
        else:
            size = self.select(inside, self.integer(nbytes), self.integer(0))
            self._emit(ptx + ", $3;", "r,l,b,r", *operands, size.ir)

    def copy_commit(self) -> None:
        """Closes a group of copies."""
        self._emit("cp.async.commit_group;", "")

    def copy_wait(self, pending: int) -> None:
        """Waits for this lane's copies, except those of the newest `pending` groups."""
        self._emit(f"cp.async.wait_group {pending};", "")

    # Global memory
    def load_words(self, ref: ir.Value, offset: Value, count: int, predicate: Value | None, constant: int = 0) -> Words:
        """2 or 4 words of 16-bit elements from element `offset + constant` on; zero where the predicate is false."""
        return self._load(self._pointer(ref, offset, 2), count, predicate, 2 * constant)

    def load_four(self, ref: ir.Value, offset: Value, predicate: Value | None, constant: int = 0) -> Words:
        """Four float32 from element `offset + constant` on; zero where the predicate is false."""
        words = self._load(self._pointer(ref, offset, 4), 4, predicate, 4 * constant)
        return tuple(self.as_number(word) for word in words)

    def _load(self, pointer: ir.Value, count: int, predicate: Value | None, constant: int) -> Words:
        i32, early = _int(32), "" if predicate is None else "&"
        results = [f"${i}" for i in range(count)]
        ptx = f"ld.global.v{count}.b32 {{{', '.join(results)}}}, [${count} + {constant}];"
        operands, constraints = [pointer], [f"={early}r"] * count + ["l"]
        if predicate is not None:
            operands.append(predicate.ir)
            constraints.append("b")
            ptx = "".join(f"mov.b32 {result}, 0; " for result in results) + f"@${count + 1} {ptx}"
        words = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * count),
            operands,
            ptx,
            ",".join([*constraints, "~{memory}"]),
            has_side_effects=True,
        )
        return tuple(Value(llvm.extractvalue(i32, words, [i])) for i in range(count))

    def load_pair(self, ref: ir.Value, offset: Value, dtype: str, constant: int = 0) -> Words:
        """Elements `offset + constant` and the next, as `pair_numbers` takes them; the first is of even number."""
        size = {"uint8": 1, "float32": 4}.get(dtype, 2)
        if size == 4:
            return self._load(self._pointer(ref, offset, 4), 2, None, 4 * constant)
        ptx = f"ld.global.{'u16' if size == 1 else 'b32'} $0, [$1 + {size * constant}];"
        pointer = self._pointer(ref, offset, size)
        got = llvm.inline_asm(_int(32), [pointer], ptx, "=r,l,~{memory}", has_side_effects=True)
        return (Value(got),)

    def load_number(self, ref: ir.Value, offset: Value, dtype: str, predicate: Value) -> Value:
        """Element `offset` of an array of `dtype`, as float32; zero where the predicate is false."""
        f32 = ir.F32Type.get()
        if dtype == "float32":
            ptx, kind, constraint, size = "ld.global.f32", f32, "f", 4
        else:
            ptx, kind, constraint, size = "ld.global.b16", _int(16), "h", 2
        zero = "mov.f32 $0, 0f00000000;" if size == 4 else "mov.b16 $0, 0;"
        got = llvm.inline_asm(
            kind,
            [self._pointer(ref, offset, size), predicate.ir],
            f"{zero} @$2 {ptx} $0, [$1];",
            f"=&{constraint},l,b,~{{memory}}",
            has_side_effects=True,
        )
        if size == 4:
            return Value(got)
        half = ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get()
        return Value(arith.extf(f32, llvm.bitcast(half, got)))

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
    def shared_words(self, address: Value, constant: int = 0, count: int = 4) -> Words:
        """2 or 4 words from `address + constant`, a multiple of their bytes, on."""
        results = ", ".join(f"${i}" for i in range(count))
        ptx = f"ld.shared.v{count}.b32 {{{results}}}, [${count} + {constant}];"
        pointer = arith.addi(self._scratch, address.ir)
        got = mgpu_utils.inline_ptx(ptx, pointer, result_types=[_int(32)] * count, has_side_effects=True)
        return tuple(Value(v) for v in got)

    def shared_store_words(self, address: Value, words: Sequence[Value], constant: int = 0) -> None:
        """2 or 4 words, to `address + constant`, a multiple of their bytes."""
        pointer, names = arith.addi(self._scratch, address.ir), ", ".join(f"${i + 1}" for i in range(len(words)))
        ptx = f"st.shared.v{len(words)}.b32 [$0 + {constant}], {{{names}}};"
        self._emit(ptx, ",".join("r" * (len(words) + 1)), pointer, *(word.ir for word in words))

    def shared_number(self, address: Value, constant: int = 0) -> Value:
        """The float32 number at `address + constant`."""
        return Value(self._shared_load("ld.shared.f32", address, constant, ir.F32Type.get(), "f"))

    def shared_pair(self, address: Value, dtype: str, constant: int = 0) -> Words:
        """Two neighbouring numbers from `address + constant` on, as float32; `dtype` is a NumPy name."""
        if dtype == "float32":
            return tuple(self.shared_number(address, constant + place) for place in (0, 4))
        if dtype == "uint8":
            both = self._shared_load("ld.shared.u16", address, constant, _int(16), "h")
            return self.pair_numbers((Value(arith.extui(_int(32), both)),), dtype)
        both = self._shared_load("ld.shared.b32", address, constant, _int(32), "r")
        return self.pair_numbers((Value(both),), dtype)

    def pair_numbers(self, words: Sequence[Value], dtype: str) -> Words:
        """Two neighbouring numbers in a word (two words of float32), as float32; `dtype` is a NumPy name."""
        i32, f32 = _int(32), ir.F32Type.get()
        if dtype == "float32":
            return tuple(self.as_number(word) for word in words)
        both = words[0].ir
        if dtype == "uint8":
            # The byte as the last one of a float of exponent 23: a permutation and a sum cost less than a conversion.
            numbers = []
            for selector in ("0x7440", "0x7441"):
                word = llvm.inline_asm(i32, [both], f"prmt.b32 $0, $1, 0x4B000000, {selector};", "=r,r")
                numbers.append(Value(llvm.bitcast(f32, word)) - 8388608.0)
            return tuple(numbers)
        if dtype == "bfloat16":
            return self.numbers_of(Value(both))
        if dtype == "float16":
            halves = (arith.trunci(_int(16), word) for word in (both, arith.shrui(both, mgpu_utils.c(16, i32))))
            return tuple(Value(arith.extf(f32, llvm.bitcast(ir.F16Type.get(), half))) for half in halves)
        raise ValueError(f"pair_numbers does not read {dtype}")

    def _shared_load(self, ptx: str, address: Value, constant: int, kind: ir.Type, constraint: str) -> ir.Value:
        pointer = arith.addi(self._scratch, address.ir)
        return llvm.inline_asm(
            kind, [pointer], f"{ptx} $0, [$1 + {constant}];", f"={constraint},r", has_side_effects=True
        )

    def shared_store(self, address: Value, value: Value, predicate: Value | None = None, constant: int = 0) -> None:
        """A float32 number, to `address + constant`."""
        operands = [arith.addi(self._scratch, address.ir), value.ir]
        if predicate is None:
            self._emit(f"st.shared.f32 [$0 + {constant}], $1;", "r,f", *operands)
        else:
            self._emit(f"@$2 st.shared.f32 [$0 + {constant}], $1;", "r,f,b", *operands, predicate.ir)

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

    def _pointer(self, ref: ir.Value, offset: Value, itemsize: int) -> ir.Value:
        base = llvm.ptrtoint(_int(64), mgpu_utils.memref_ptr(ref))
        wide = arith.extui(_int(64), offset.ir)
        return arith.addi(base, arith.muli(wide, mgpu_utils.c(itemsize, _int(64))))

    def _emit(self, ptx: str, constraints: str, *operands: ir.Value) -> None:
        clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), ptx, clobber, has_side_effects=True)


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)
