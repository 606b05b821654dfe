"""Instructions on words of codes and of bfloat16 pairs: what code books and codes of 8 bits need."""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.paged_attention.warp import Value, Words

PAIR_OF_128 = 0x43004300  # two bfloat16


def bytes_to_pairs(w: Any, word: Any) -> list[Any]:
    """Four int8 -> words of two bfloat16: of bytes 0 and 2, of bytes 1 and 3."""
    pairs = []
    for shift in (0, 8):
        # The highest bit is the lowest of the exponent: 128 becomes 256.
        rest, sign = (w.masked(word, mask, shift=shift, ones=PAIR_OF_128) for mask in (0x007F007F, 0x00800080))
        pairs.append(w.subtract_pairs(rest, sign))
    return pairs


class CodeWords:
    """Emits at MLIR's current insertion point; a part of `Int4Warp`. The tests have a NumPy twin."""

    def masked(self, word: Value, mask: int, *, shift: int = 0, ones: int = 0) -> Value:
        """(word >> shift) & mask | ones, in one instruction beside the shift."""
        shifted = Value(arith.shrui(word.ir, mgpu_utils.c(shift, word.ir.type))) if shift else word
        return self._word(f"lop3.b32 $0, $1, {mask:#x}, {ones:#x}, 0xEA;", shifted)

    def pick_bytes(self, a: Value, b: Value, selector: Value | int) -> Value:
        """Four bytes: nibble i of the selector, below 8, names byte i of the result, 0-3 of a and 4-7 of b."""
        if isinstance(selector, int):
            return self._word(f"prmt.b32 $0, $1, $2, {selector:#x};", a, b)
        return self._word("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def multiply_pairs(self, a: Value, b: Value) -> Value:
        return self._word("mul.rn.bf16x2 $0, $1, $2;", a, b)

    def subtract_pairs(self, a: Value, b: Value) -> Value:
        return self._word("sub.rn.bf16x2 $0, $1, $2;", a, b)

    def pair(self, low: Value, high: Value) -> Value:
        """Two float32, rounded to bfloat16, in a word."""
        return self._word("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)

    def byte_pairs(self, word: Value, kind: str) -> Words:
        """Four bytes, "e4m3", "e5m2" or signed ("s8") -> two words of two float16 each, in order."""
        if kind == "s8":
            ptx = (
                "{ .reg .b32 codes, middle; xor.b32 codes, $2, 0x80808080; mov.b32 middle, 0x64806480; "
                "prmt.b32 $0, codes, 0x64646464, 0x4140; prmt.b32 $1, codes, 0x64646464, 0x4342; "
                "sub.rn.f16x2 $0, $0, middle; sub.rn.f16x2 $1, $1, middle; }"
            )
        else:
            halves = "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            ptx = f"{halves} cvt.rn.f16x2.{kind}x2 $0, low; cvt.rn.f16x2.{kind}x2 $1, high; }}"
        return tuple(Value(v) for v in mgpu_utils.inline_ptx(ptx, word.ir, result_types=[word.ir.type] * 2))

    def rounded(self, number: Value) -> Value:
        """The integer that is nearest to a float32."""
        return self._word("cvt.rni.s32.f32 $0, $1;", number)

    def reciprocal(self, x: Value) -> Value:
        """1 / x in float32."""
        return Value(llvm.inline_asm(ir.F32Type.get(), [x.ir], "rcp.rn.f32 $0, $1;", "=f,f"))

    def first_numbers(self, ref: ir.Value, count: int) -> Words:
        """The first float32 numbers, a multiple of 4, of an array; the same for all lanes."""
        f32, base, numbers = ir.F32Type.get(), mgpu_utils.memref_ptr(ref), []
        for first in range(0, count, 4):
            ptx = f"ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * first}];"
            got = mgpu_utils.inline_ptx(ptx, base, result_types=[f32] * 4, has_side_effects=True)
            numbers += [Value(v) for v in got]
        return tuple(numbers)

    def _word(self, ptx: str, *operands: Any) -> Value:
        kinds = ["f" if operand.is_float else "r" for operand in operands]
        i32 = ir.IntegerType.get_signless(32)
        return Value(llvm.inline_asm(i32, [operand.ir for operand in operands], ptx, ",".join(["=r", *kinds])))
