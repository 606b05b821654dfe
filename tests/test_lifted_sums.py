"""How right float32 sums with codes as bfloat16 subnormals can be: a tensor core in NumPy.

The model: what an mma adds, its accumulator too, is cut to 25 bits below the largest exponent among them, and a
factor's exponent is the one that it is written with, -126 for every subnormal. The width is the one that fitted best
what an H200 gave when codes were float16 subnormals (3.1e-6, 2.4e-6, twice less than 2e-6, and 3.8e-6 of these tokens,
where the model with -14 comes to 2e-6 to 5e-6).
"""

import numpy as np
import pytest
from test_int4_matmul import make, tokens

from pallas_kernels.int4_matmul import PackedInt4

OUTPUTS, INPUTS, GROUP, BITS = 64, 4096, 128, 25
LIFT, UNIT = 2.0**48, 2.0**85


def exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, -1000.0, np.frexp(x)[1] - 1.0)


def cut(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.trunc(x / unit) * unit


def added(total: np.ndarray, x: np.ndarray, codes: np.ndarray, as_written: bool) -> np.ndarray:
    """total [out] + codes [out, 16] x [16], as one mma adds them."""
    of_codes = np.where(codes == 0, -1000.0, -126.0) if as_written else exponent(codes)
    top = np.maximum((exponent(x)[None, :] + of_codes).max(axis=1), exponent(total))
    unit = 2.0 ** (top - BITS)
    total = cut(total, unit) + cut(codes * x[None, :], unit[:, None]).sum(axis=1)
    return cut(total, 2.0 ** (exponent(total) - 23))


def product(x: np.ndarray, weight: PackedInt4, as_written: bool) -> np.ndarray:
    """The kernel's sums: x lifted, 16 inputs an mma, scale and zero point once a group."""
    halves = np.asarray(weight.codes)[:OUTPUTS]
    codes = np.stack([halves & 15, halves >> 4], axis=-1).reshape(OUTPUTS, INPUTS).astype(float)
    scales, zeros = (np.asarray(array)[:OUTPUTS].astype(float) for array in (weight.scales, weight.offsets))
    out = np.zeros(OUTPUTS, np.float32)
    for first in range(0, INPUTS, GROUP):
        sums, ones = np.zeros(OUTPUTS), np.zeros(1)
        for block in range(first, first + GROUP, 32):
            for half in (0, 4):
                columns = np.array([block + 8 * q + half + i for q in range(4) for i in range(4)])
                sums = added(sums, x[columns] * LIFT, codes[:, columns] * 2.0**-133, as_written)
                ones = added(ones, x[columns] * LIFT, np.full((1, 16), 2.0**-133), as_written)
        group = first // GROUP
        values = scales[:, group] * (sums - zeros[:, group] * ones) * UNIT
        out += values.astype(np.float32)
    return out


@pytest.mark.parametrize(("rows", "token"), [(1, 0), (2, 0), (8, 0), (8, 1), (8, 2)])
def test_exponents_as_written_cost_little(rows: int, token: int) -> None:
    weight, values = make(4096, INPUTS, GROUP, "zero_point")
    x = tokens(rows, INPUTS)[token].astype(float)  # a power of two for a whole token changes nothing here
    expected = values[:OUTPUTS] @ x

    def error(as_written: bool) -> float:
        return float(np.linalg.norm(product(x, weight, as_written) - expected) / np.linalg.norm(expected))

    assert error(as_written=False) < 1.5e-7
    assert 1.2e-7 < error(as_written=True) < 5e-7
