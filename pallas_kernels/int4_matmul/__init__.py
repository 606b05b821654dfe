"""Matrix product with packed weights of 4 or 8 bits."""

from pallas_kernels.int4_matmul.api import fused_refusal, int4_matmul, int4_matmul_fused, to_kernel_layout
from pallas_kernels.int4_matmul.mlp import gated_mlp_refusal, int4_gated_mlp
from pallas_kernels.int4_matmul.packing import (
    PackedInt4,
    from_codes,
    is_whole,
    to_canonical,
    to_mosaic,
    to_triton,
    unpack_codes,
)
from pallas_kernels.int4_matmul.packing_int8 import (
    Packed,
    PackedInt8,
    from_int8_codes,
    int8_to_canonical,
    int8_to_mosaic,
    int8_to_triton,
    unpack_int8_codes,
)
from pallas_kernels.int4_matmul.pending import (
    Ordered,
    int4_gated_mlp_of_sum,
    int4_matmul_of_sum,
    int4_slices,
    product_order,
    slices_refusal,
    sum_slices,
)
from pallas_kernels.int4_matmul.reference import dequantize

__all__ = [
    "Ordered",
    "Packed",
    "PackedInt4",
    "PackedInt8",
    "dequantize",
    "from_codes",
    "from_int8_codes",
    "fused_refusal",
    "gated_mlp_refusal",
    "int4_gated_mlp",
    "int4_gated_mlp_of_sum",
    "int4_matmul",
    "int4_matmul_fused",
    "int4_matmul_of_sum",
    "int4_slices",
    "int8_to_canonical",
    "int8_to_mosaic",
    "int8_to_triton",
    "is_whole",
    "product_order",
    "slices_refusal",
    "sum_slices",
    "to_canonical",
    "to_kernel_layout",
    "to_mosaic",
    "to_triton",
    "unpack_codes",
    "unpack_int8_codes",
]
