"""Matrix product with weights of a byte a code, with a scale for each output or each block."""

from pallas_kernels.byte_matmul.api import byte_matmul
from pallas_kernels.byte_matmul.reference import decode_blocks

__all__ = ["byte_matmul", "decode_blocks"]
