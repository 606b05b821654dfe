"""Matrix product with weights of 8-bit floats that have a scale for each block."""

from pallas_kernels.float8_matmul.api import float8_matmul
from pallas_kernels.float8_matmul.reference import decode_blocks

__all__ = ["decode_blocks", "float8_matmul"]
