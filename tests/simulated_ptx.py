"""Inline assembly on NumPy arrays: as much of PTX as the Triton kernels have in theirs."""

import ctypes
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


def run(assembly: str, registers: list[np.ndarray], num_results: int) -> list[np.ndarray]:
    """Runs straight-line PTX on registers uint32 [instances], uint64 for addresses; gives registers $0, $1, ... ."""
    values = {f"${num_results + i}": register for i, register in enumerate(registers)}
    instances = registers[0].shape

    def read(operand: str) -> np.ndarray:
        operand = operand.strip("[]")
        return values[operand] if operand in values else np.full(instances, int(operand, 0), np.uint32)

    for line in re.sub(r"[{}]", "", assembly).split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation not in NOTHING:
            result, *sources = [operand.strip() for operand in operands.split(",")]
            values[result] = OPERATIONS[operation](*map(read, sources))
    return [values[f"${i}"] for i in range(num_results)]


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit by bit, the bit of the table that the three select."""
    result = np.zeros_like(a)
    for which in range(8):
        if int(table[0]) >> which & 1:
            result |= (a if which & 4 else ~a) & (b if which & 2 else ~b) & (c if which & 1 else ~c)
    return result


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of a and b; a selector's upper bit would replicate a sign."""
    octets = np.concatenate([x[:, None].view(np.uint8) for x in (a, b)], axis=1)
    which = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    assert (which < 8).all()
    return np.take_along_axis(octets, which.astype(np.intp), 1).view(np.uint32)[:, 0]


def halves(dtype: np.dtype, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on both 16-bit numbers of a register, rounded once."""

    def apply(*sources: np.ndarray) -> np.ndarray:
        numbers = [x[:, None].view(dtype).astype(np.float64) for x in sources]
        with np.errstate(invalid="ignore"):  # infinity times zero is NaN here too
            result = function(*numbers)
        return result.astype(np.float32).astype(dtype).view(np.uint32)[:, 0]

    return apply


def load_float(addresses: np.ndarray) -> np.ndarray:
    return np.array([ctypes.c_uint32.from_address(int(address)).value for address in addresses], np.uint32)


NOTHING = ("", ".reg", "prefetch.global.L2")
"""What gives no number."""
OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": halves(BF16, lambda a, b, c: a * b + c),
    "add.rn.f16x2": halves(F16, lambda a, b: a + b),
    "ld.global.nc.f32": load_float,
}
