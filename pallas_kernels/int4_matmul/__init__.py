"""Matrix product with weights of 4 bits."""

from pallas_kernels.int4_matmul.api import int4_matmul, to_kernel_layout
from pallas_kernels.int4_matmul.packing import PackedInt4, from_codes, to_canonical, to_mosaic, to_triton, unpack_codes
from pallas_kernels.int4_matmul.reference import dequantize

__all__ = [
    "PackedInt4",
    "dequantize",
    "from_codes",
    "int4_matmul",
    "to_canonical",
    "to_kernel_layout",
    "to_mosaic",
    "to_triton",
    "unpack_codes",
]
