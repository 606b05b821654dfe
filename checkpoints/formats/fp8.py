"""FP8 weights with a scale for the tensor, each output, or each block: DeepSeek's and Qwen's fp8, compressed-tensors'
float-quantized and naive-quantized, ModelOpt's FP8, fbgemm_fp8.

    weight float8 [out, in]
    weight_scale [] or [1] or [out, 1] or [ceil(out / rows), ceil(in / columns)]
    weight_scale_inv [ceil(out / rows), ceil(in / columns)] or []    float32, bfloat16 or float8_e8m0

The value is weight * scale, also where the scale is called "inv": the name is from the point of view of quantising.
A float8 is an 8-bit code whose code book are the 256 numbers of its type.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import SCALE_DTYPES, expect, misfit
from checkpoints.tensors import TensorInfo

FLOAT8_DTYPES = ("F8_E4M3", "F8_E5M2")
DEFAULT_BLOCK = (128, 128)


def numbers(dtype: np.dtype | type) -> np.ndarray:
    """The code book of a float8 type: float32 [256]."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def shape(infos: Mapping[str, TensorInfo], scale: str, block: tuple[int, int] | None, where: str) -> tuple[int, int]:
    """Checks a float8 weight and its scale, the part called `scale`; returns (out, in)."""
    expect(infos["weight"], FLOAT8_DTYPES, 2, where)
    expect(infos[scale], (*SCALE_DTYPES, "F8_E8M0"), None, where)
    _block_of(infos["weight"].shape, infos[scale].shape, block, where, infos[scale])
    out_features, in_features = infos["weight"].shape
    return out_features, in_features


def decode(parts: Mapping[str, np.ndarray], scale: str, block: tuple[int, int] | None, where: str) -> QuantizedTensor:
    """The weight in `weight` and the part called `scale`, whose shapes `shape` has checked."""
    weight, scales = parts["weight"], parts[scale]
    out_features, in_features = weight.shape
    block_rows, block_columns = _block_of(weight.shape, scales.shape, block, where, None)
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        scales = scales.astype(np.float32)
    scales = scales.reshape(-(-out_features // block_rows), -1)
    book = numbers(weight.dtype)
    codes = weight.view(np.uint8)

    def rows(start: int, stop: int) -> Codes:
        return Codes(codes[start:stop], scales[np.arange(start, stop) // block_rows], None, book, 8, block_columns)

    return QuantizedTensor((out_features, in_features), rows, block_rows=block_rows)


def _block_of(
    weight: tuple[int, ...],
    scale: tuple[int, ...],
    block: tuple[int, int] | None,
    where: str,
    info: TensorInfo | None,
) -> tuple[int, int]:
    """Rows and columns that share a scale, from the two shapes."""
    out_features, in_features = weight
    if scale in ((), (1,), (1, 1)):
        return out_features, in_features
    if scale in ((out_features,), (out_features, 1)):
        return 1, in_features
    rows, columns = block or DEFAULT_BLOCK
    expected = (-(-out_features // max(1, rows)), -(-in_features // max(1, columns)))
    if rows < 1 or columns < 1 or scale != expected:
        if info is not None and rows >= 1 and columns >= 1:
            raise misfit(info, expected, where)
        raise CheckpointError(
            f"{where}: blocks of {rows} x {columns}, as quantization_config says, do not exist; "
            "configuration and weights are of different models: download both from one revision"
        )
    return rows, min(columns, in_features)
