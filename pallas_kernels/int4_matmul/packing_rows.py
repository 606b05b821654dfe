"""Weights of a byte a code as the Hopper kernel takes them in the order of the file: rows of inputs."""

import dataclasses

import jax

from pallas_kernels.int4_matmul.packing import Kind, Layout
from pallas_kernels.int4_matmul.packing_int8 import PackedInt8


@dataclasses.dataclass(frozen=True)
class InRows:
    """What a plan has to know of such a weight: the codes' type, and how many outputs have the same scales."""

    dtype: str
    block_rows: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByteRows(PackedInt8):
    """A weight of signed bytes or of 8-bit floats. The value of a code is `scale * code`.

    `codes` are int8, float8_e4m3fn or float8_e5m2 [out, in], `scales` float32 [out / block rows, in / group_size],
    without remainders: a scale is that of a block of so many outputs and inputs. There are no offsets.
    """

    layout: Layout = dataclasses.field(metadata={"static": True}, default="rows")

    @property
    def kind(self) -> Kind:
        return "code_book"  # of the 256 numbers of the type, which the kernel knows by itself

    @property
    def in_rows(self) -> InRows:
        return InRows(str(self.codes.dtype), self.shape[0] // self.scales.shape[0])
