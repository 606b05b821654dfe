"""HQQ: codes of 1, 2, 3, 4 or 8 bits with a floating zero point for each group.

    W_q     the codes of [groups, group_size] (axis 1) or [group_size, groups] (axis 0), the first axis folded:
            of 4 bits, uint8 [n / 2, m] with row r in the high half and row r + n / 2 in the low half of a byte;
            likewise four parts of 2 bits and eight of 1; of 3 bits, int32 [ceil(n / 10), m], the first part highest
    scale, zero   [groups, 1] or [1, groups], floating
    nbits, group_size, axis int32, shape int64 [2], packing: bytes of a name

The value is (code - zero) * scale, here scale * code + minimum with the minimum -zero * scale in float32. Along axis
0 each weight of a row has a scale of its own. https://github.com/dropbox/hqq
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import SCALE_DTYPES, expect, misfit
from checkpoints.tensors import TensorInfo

PARTS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Codes in a byte, of 3 bits in a word."""

MAX_FEATURES = 2**31


@dataclasses.dataclass(frozen=True)
class Meta:
    """The small tensors beside a weight. `group_size` None is one group for each output (or input, axis 0)."""

    shape: tuple[int, int]
    bits: int
    group_size: int
    axis: int

    @property
    def packed_shape(self) -> tuple[int, int]:
        count = self.shape[0] * self.shape[1] // self.group_size
        rows, columns = (count, self.group_size) if self.axis == 1 else (self.group_size, count)
        return -(-rows // PARTS[self.bits]), columns

    @property
    def scale_shape(self) -> tuple[int, int]:
        count = self.shape[0] * self.shape[1] // self.group_size
        return (count, 1) if self.axis == 1 else (1, count)


def read_meta(parts: Mapping[str, np.ndarray], where: str) -> Meta:
    """Reads shape, nbits, group_size and axis. Raises CheckpointError where they are impossible."""

    def number(name: str) -> int | None:
        value = parts.get(name)
        return int(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.dtype.kind in "iu" else None

    stated = parts.get("shape")
    size = [int(n) for n in stated.reshape(-1)] if stated is not None and stated.dtype.kind in "iu" else []
    bits, axis, group_size = number("nbits"), number("axis"), number("group_size")
    if len(size) != 2 or not all(1 <= n <= MAX_FEATURES for n in size) or bits not in PARTS or axis not in (0, 1):
        raise CheckpointError(
            f"{where}: HQQ with shape {size}, nbits {bits} and axis {axis} is not known; "
            f"expected two axes, {', '.join(map(str, PARTS))} bits, axis 0 or 1: use the original model"
        )
    if number("quant_scale") or number("quant_zero"):
        raise CheckpointError(
            f"{where}: HQQ with quantised scales or zeros is not supported; quantise again without them"
        )
    group_size = group_size or size[axis]
    count = size[0] * size[1]
    if not 1 <= group_size <= count or count % group_size:
        raise CheckpointError(
            f"{where}: group_size {group_size} does not divide a weight of {size}; "
            "the file is damaged: download it again"
        )
    return Meta((size[0], size[1]), bits, group_size, axis)


def shape(infos: Mapping[str, TensorInfo], meta: Meta, where: str) -> tuple[int, int]:
    """Checks the tensors of one weight against its meta data; returns (out, in)."""
    wanted_bytes = math.prod(meta.packed_shape) * (4 if meta.bits == 3 else 1)
    if infos["W_q"].nbytes != wanted_bytes:  # bytes: the codes may be viewed as floats of another width
        raise misfit(infos["W_q"], meta.packed_shape, where)
    for part in ("scale", "zero"):
        expect(infos[part], SCALE_DTYPES, None, where)
        if math.prod(infos[part].shape) != math.prod(meta.scale_shape):
            raise misfit(infos[part], meta.scale_shape, where)
    return meta.shape


def decode(parts: Mapping[str, np.ndarray], meta: Meta) -> QuantizedTensor:
    """The weight whose shapes `shape` has checked."""
    out_features, in_features = meta.shape
    packed = parts["W_q"].reshape(-1).view(np.uint32 if meta.bits == 3 else np.uint8).reshape(meta.packed_shape)
    scales = parts["scale"].reshape(-1)
    minimums = -(parts["zero"].reshape(-1).astype(np.float32) * scales.astype(np.float32))
    container: Literal[4, 8] = 4 if meta.bits <= 4 else 8
    # Groups of the flattened weight may cross rows; along axis 0 no two weights of a row share one.
    size = math.gcd(meta.group_size, in_features) if meta.axis == 1 else 1
    count = out_features * in_features // meta.group_size

    def rows(start: int, stop: int) -> Codes:
        flat = np.arange(start * in_features, stop * in_features)
        if meta.axis == 1:
            # Weights of these rows are in whole rows of the folded array, but perhaps not at their edges.
            first, last = flat[0] // meta.group_size, flat[-1] // meta.group_size + 1
            codes = _unfold(packed, meta.bits, np.arange(first, last)).reshape(-1)
            codes = codes[flat[0] - first * meta.group_size :][: flat.size]
            groups = flat[::size] // meta.group_size
        else:
            row, groups = np.divmod(flat, count)
            codes = _unfold(packed, meta.bits, row, groups)
        shape = (stop - start, -1)
        by_group = scales[groups].reshape(shape), minimums[groups].reshape(shape)
        return Codes(codes.reshape(shape), *by_group, None, container, size)

    return QuantizedTensor((out_features, in_features), rows)


def _unfold(packed: np.ndarray, bits: int, rows: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    """Codes of some rows of the unfolded array, or of single places in it."""
    part, row = np.divmod(rows, packed.shape[0])
    shifts = ((PARTS[bits] - 1 - part) * bits).astype(packed.dtype)
    words = packed[row] >> shifts[:, None] if columns is None else packed[row, columns] >> shifts
    return (words & packed.dtype.type(2**bits - 1)).astype(np.uint8)
