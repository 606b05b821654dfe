"""Per-lane values of a warp's program, and words: 32 bits that hold two 16-bit floats or four bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def ir_type(name: str) -> ir.Type:
    if name == "f32":
        return ir.F32Type.get()
    return ir.IntegerType.get_signless({"i1": 1, "i32": 32, "i64": 64}[name])


class Value:
    """A per-lane scalar with the arithmetic of its type."""

    __slots__ = ("ir",)

    def __init__(self, value: Any):  # an ir.Value; the name is taken by the attribute inside the class
        self.ir = value

    @property
    def is_float(self) -> bool:
        return isinstance(self.ir.type, ir.FloatType)

    def _operand(self, other: Any) -> Any:
        if isinstance(other, Value):
            return other.ir
        return mgpu_utils.c(float(other) if self.is_float else int(other), self.ir.type)

    def _binary(self, other: Any, on_int: Callable, on_float: Callable | None, swap: bool = False) -> "Value":
        left, right = self.ir, self._operand(other)
        if swap:
            left, right = right, left
        emit = on_float if self.is_float else on_int
        if emit is None:
            raise TypeError(f"operation is not defined for {self.ir.type}")
        return Value(emit(left, right))

    def __add__(self, other: Any) -> "Value":
        return self._binary(other, arith.addi, arith.addf)

    def __sub__(self, other: Any) -> "Value":
        return self._binary(other, arith.subi, arith.subf)

    def __rsub__(self, other: Any) -> "Value":
        return self._binary(other, arith.subi, arith.subf, swap=True)

    def __mul__(self, other: Any) -> "Value":
        return self._binary(other, arith.muli, arith.mulf)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> "Value":
        return self._binary(other, arith.divui, None)

    def __mod__(self, other: Any) -> "Value":
        return self._binary(other, arith.remui, None)

    def __and__(self, other: Any) -> "Value":
        return self._binary(other, arith.andi, None)

    def _compare(self, other: Any, on_int: Any, on_float: Any) -> "Value":
        right = self._operand(other)
        if self.is_float:
            return Value(arith.cmpf(on_float, self.ir, right))
        return Value(arith.cmpi(on_int, self.ir, right))

    def __lt__(self, other: Any) -> "Value":
        return self._compare(other, arith.CmpIPredicate.slt, arith.CmpFPredicate.OLT)

    def __le__(self, other: Any) -> "Value":
        return self._compare(other, arith.CmpIPredicate.sle, arith.CmpFPredicate.OLE)

    def __gt__(self, other: Any) -> "Value":
        return self._compare(other, arith.CmpIPredicate.sgt, arith.CmpFPredicate.OGT)


Words = tuple[Value, ...]


class WordInstructions:
    """Packs, unpacks and rearranges words. The lower index of two 16-bit floats is in the lower half."""

    def pack_bf16(self, low: Value, high: Value) -> Value:
        return self._word("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)

    def pack_f16(self, low: Value, high: Value) -> Value:
        return self._word("cvt.rn.f16x2.f32 $0, $2, $1;", low, high)

    def unpack_bf16(self, word: Value) -> Words:
        bits = (arith.shli(word.ir, mgpu_utils.c(16, ir_type("i32"))), (word & -65536).ir)
        return tuple(Value(llvm.bitcast(ir_type("f32"), b)) for b in bits)

    def unpack_f16(self, word: Value) -> Words:
        ptx = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        got = mgpu_utils.inline_ptx(ptx, word.ir, result_types=[ir_type("f32")] * 2)
        return tuple(Value(v) for v in got)

    # Codes. float16 1024 + n has n in its low bits, so a byte is a float16 with one permute and one subtraction.
    def int8_to_f16(self, word: Value) -> Words:
        """Four int8 as two words of float16."""
        return self.uint8_to_f16(self._word("xor.b32 $0, $1, 0x80808080;", word), 128)

    def uint8_to_f16(self, word: Value, bias: int) -> Words:
        """Four uint8 minus `bias` as two words of float16."""
        magic = mgpu_utils.c(0x64646464, ir_type("i32"))
        base = 0x6400 + bias  # 1024 + bias
        pairs = (self._permute(word, Value(magic), selector) for selector in (0x4140, 0x4342))
        subtract = f"{{ .reg .b32 t; mov.b32 t, {base << 16 | base:#x}; sub.f16x2 $0, $1, t; }}"
        return tuple(self._word(subtract, pair) for pair in pairs)

    def e4m3_to_f16(self, word: Value) -> Words:
        """Four float8_e4m3fn as two words of float16."""
        ptx = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, HALF; }"
        return tuple(self._word(ptx.replace("HALF", half), word) for half in ("l", "h"))

    def nibbles(self, word: Value) -> Words:
        """The lower and the upper halves of four bytes, as four bytes each."""
        upper = Value(arith.shrui(word.ir, mgpu_utils.c(4, ir_type("i32"))))
        return word & 0x0F0F0F0F, upper & 0x0F0F0F0F

    def interleave(self, a: Value, b: Value, pair: int) -> Value:
        """Bytes a0 b0 a1 b1 (pair 0) or a2 b2 a3 b3 (pair 1)."""
        return self._permute(a, b, (0x5140, 0x7362)[pair])

    def pack_int8(self, values: Sequence[Value]) -> Value:
        """Four float32 rounded to the nearest even int8, NaN as 0."""
        ptx = (
            "{ .reg .b32 a, b, c, d; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.rni.s32.f32 c, $3; "
            "cvt.rni.s32.f32 d, $4; cvt.pack.sat.s8.s32.b32 c, d, c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, c; }"
        )
        return self._word(ptx, *values)

    def pack_e4m3(self, values: Sequence[Value]) -> Value:
        """Four float32 rounded to the nearest even float8_e4m3fn."""
        ptx = (
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
            "mov.b32 $0, {l, h}; }"
        )
        return self._word(ptx, *values)

    def _word(self, ptx: str, *operands: Value) -> Value:
        return Value(mgpu_utils.inline_ptx(ptx, *[x.ir for x in operands], result_types=ir_type("i32")))

    def upper_half(self, word: Value) -> Value:
        """The upper half as the lower one."""
        return Value(arith.shrui(word.ir, mgpu_utils.c(16, ir_type("i32"))))

    def low_halves(self, a: Value, b: Value) -> Value:
        return self._permute(a, b, 0x5410)

    def high_halves(self, a: Value, b: Value) -> Value:
        return self._permute(a, b, 0x7632)

    def _permute(self, a: Value, b: Value, selector: int) -> Value:
        ptx = f"prmt.b32 $0, $1, $2, {selector:#x};"
        return Value(mgpu_utils.inline_ptx(ptx, a.ir, b.ir, result_types=ir_type("i32")))
