"""Reading a multiprocessor's registers from within a kernel."""

import functools
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.int4_matmul.warp import Value


def read_register(name: str, behind: Sequence[Value] = ()) -> Value:
    """A register such as `%clock`, read when the words or float32 numbers `behind` are there."""
    i32 = ir.IntegerType.get_signless(32)
    ptx, constraints, operands = f"mov.u32 $0, {name};", "=r,~{memory}", []
    if behind:
        words = [llvm.bitcast(i32, value.ir) if value.is_float else value.ir for value in behind]
        operands = [functools.reduce(arith.ori, words)]
        ptx = f"{{ .reg .pred there; setp.ne.b32 there, $1, 0x12345678; mov.b32 $0, 0; @there {ptx} }}"
        constraints = "=&r,r,~{memory}"
    return Value(llvm.inline_asm(i32, operands, ptx, constraints, has_side_effects=True))
