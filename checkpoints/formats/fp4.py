"""FP4 weights: NVFP4 in both conventions of its global scale, and MXFP4.

                 codes                       scale of a group         global scale
    modelopt     weight uint8 [out, in / 2]  weight_scale float8_e4m3 [out, in / 16]   weight_scale_2: multiplies
    nvfp4-pack   weight_packed, the same     the same                                  weight_global_scale: divides
    mxfp4-pack   the same                    weight_scale uint8 [out, in / 32]         none

A code is E2M1, the even input in the low half of a byte. An MXFP4 scale is the power of two with that exponent plus
127. gpt-oss stores the same bytes as blocks [out, in / 32, 16].
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.bits import fields
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import expect, misfit
from checkpoints.tensors import TensorInfo

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen numbers of FP4: one bit of sign, two of exponent, one of mantissa."""

NVFP4_GROUP, MXFP4_GROUP = 16, 32


def shape(infos: Mapping[str, TensorInfo], codes: str, global_scale: str | None, where: str) -> tuple[int, int]:
    """Checks the tensors of a weight; `codes` and `global_scale` name those parts, MXFP4 has no global scale."""
    expect(infos[codes], ("U8",), 2, where)
    group = MXFP4_GROUP if global_scale is None else NVFP4_GROUP
    expect(infos["weight_scale"], ("U8", "F8_E8M0") if global_scale is None else ("F8_E4M3",), 2, where)
    out_features, in_features = infos[codes].shape[0], 2 * infos[codes].shape[1]
    wanted = (out_features, in_features // group)
    if in_features % group or infos["weight_scale"].shape != wanted:
        raise misfit(infos["weight_scale"], wanted, where)
    if global_scale is not None:
        expect(infos[global_scale], ("F32", "BF16", "F16"), None, where)
        if infos[global_scale].shape not in ((), (1,), (1, 1)):
            raise misfit(infos[global_scale], (1,), where)
    return out_features, in_features


def decode_nvfp4(parts: Mapping[str, np.ndarray], codes: str, global_scale: str, where: str) -> QuantizedTensor:
    """An NVFP4 weight whose shapes `shape` has checked.

    The global scale goes into the code book: a group's own scale stays exact in 16 bits, where the product of the two
    would need 32.
    """
    factor = np.float32(parts[global_scale].astype(np.float32).reshape(-1)[0])
    if global_scale == "weight_global_scale":
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / factor
    if not np.isfinite(factor):
        raise CheckpointError(
            f"{where}: {global_scale} gives a factor of {factor}; the file is damaged: download it again"
        )
    scales = parts["weight_scale"].astype(ml_dtypes.bfloat16)  # four significant bits, exponents from -9 to 8: exact
    return _decode(parts[codes], scales, E2M1 * factor, NVFP4_GROUP)


def decode_mxfp4(parts: Mapping[str, np.ndarray], where: str) -> QuantizedTensor:
    """An MXFP4 weight whose shapes `shape` has checked."""
    exponents = parts["weight_scale"].view(np.uint8)
    if bool((exponents == 255).any()):
        raise CheckpointError(f"{where}: weight_scale has NaN (255); the file is damaged: download it again")
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)
    return _decode(parts["weight_packed"], scales, E2M1, MXFP4_GROUP)


def _decode(packed: np.ndarray, scales: np.ndarray, book: np.ndarray, group_size: int) -> QuantizedTensor:
    def rows(start: int, stop: int) -> Codes:
        return Codes(fields(packed[start:stop], 4), scales[start:stop], None, book, 4, group_size)

    return QuantizedTensor((packed.shape[0], 2 * packed.shape[1]), rows)
