"""AWQ, as AutoAWQ writes it: 4 bits with zero points, packed along the outputs (gemm) or the inputs (gemv).

    gemm  qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]
    gemv  qweight int32 [out, in / 8], qzeros int32 [out, padded groups / 8], scales [out, padded groups]

Nibble j of a gemm word is column `ORDER[j]` of its eight, in weights and zeros alike; gemv words are in order.
The value is scale * (code - zero): nothing is added to the zero. AutoAWQ has no 8 bits; vLLM reads a gemm layout of
them, with `ORDER_8` of four columns a word. How many a word has is told by the shapes.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.bits import fields
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import check_group, expect
from checkpoints.tensors import TensorInfo

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ORDER_8 = (0, 2, 1, 3)
_PLACES = {4: np.argsort(np.array(ORDER)), 8: np.argsort(np.array(ORDER_8))}
"""By number of bits: which field holds column 0, 1, ..."""


def is_gemv(infos: Mapping[str, TensorInfo]) -> bool:
    """Whether the outputs run along the first axis: scales have as many rows as the codes."""
    return infos["qweight"].shape[:1] == infos["scales"].shape[:1]


def gemm_bits(columns: int, out_features: int) -> Literal[4, 8]:
    """The width of gemm codes in so many words a row: 8 where a word has four of them, else 4."""
    return 8 if out_features == 4 * columns else 4


def shape(infos: Mapping[str, TensorInfo], group_size: int | None, where: str) -> tuple[int, int]:
    """Checks the tensors of one weight against each other; returns (out, in)."""
    for part, dtypes in {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32")}.items():
        expect(infos[part], dtypes, 2, where)
    rows, columns = infos["qweight"].shape
    if is_gemv(infos):
        out_features, in_features = rows, 8 * columns
        group_size = _gemv_group_size(in_features, group_size, where)
        # The width is padded so that it divides among the threads of AutoAWQ's kernel.
        multiple = {32: 4, 64: 2}.get(group_size, 1)
        words = -(-(in_features // group_size) // 8)
        words = -(-words // multiple) * multiple
        wanted = {"qzeros": (out_features, words), "scales": (out_features, 8 * words)}
    else:
        bits = gemm_bits(columns, infos["scales"].shape[1])
        out_features, in_features = 32 // bits * columns, rows
        groups = infos["scales"].shape[0]
        check_group(in_features, groups, group_size, where)
        wanted = {"qzeros": (groups, columns), "scales": (groups, out_features)}
    for part, expected in wanted.items():
        if infos[part].shape != expected:
            raise CheckpointError(
                f"{where}: {part} is {list(infos[part].shape)} where qweight {[rows, columns]} needs {list(expected)}; "
                "the file is damaged: download it again"
            )
    return out_features, in_features


def decode(parts: Mapping[str, np.ndarray], group_size: int | None, where: str) -> QuantizedTensor:
    """The weight in the tensors qweight, qzeros and scales, whose shapes `shape` has checked."""
    qweight, scales = parts["qweight"], parts["scales"]
    if qweight.shape[0] == scales.shape[0]:
        return _decode_gemv(parts, group_size, where)
    in_features, groups = qweight.shape[0], scales.shape[0]
    size = check_group(in_features, groups, group_size, where)
    out_features = scales.shape[1]
    bits = gemm_bits(qweight.shape[1], out_features)
    per_word = 32 // bits
    zeros = np.ascontiguousarray(_in_order(parts["qzeros"], bits).T)
    scales = np.ascontiguousarray(scales.T)

    def rows(start: int, stop: int) -> Codes:
        first = start // per_word
        here = slice(start - per_word * first, stop - per_word * first)
        codes = _in_order(qweight[:, first : -(-stop // per_word)], bits)[:, here]
        return Codes(np.ascontiguousarray(codes.T), scales[start:stop], zeros[start:stop], None, bits, size)

    return QuantizedTensor((out_features, in_features), rows)


def _in_order(words: np.ndarray, bits: Literal[4, 8]) -> np.ndarray:
    """int32 [n, w] -> uint8 [n, w * 32 // bits] with the columns where they belong."""
    codes = fields(words, bits).reshape(*words.shape, 32 // bits)
    return codes[..., _PLACES[bits]].reshape(words.shape[0], -1)


def _decode_gemv(parts: Mapping[str, np.ndarray], group_size: int | None, where: str) -> QuantizedTensor:
    qweight = parts["qweight"]
    out_features, in_features = qweight.shape[0], 8 * qweight.shape[1]
    size = _gemv_group_size(in_features, group_size, where)
    groups = in_features // size
    zeros, scales = fields(parts["qzeros"], 4)[:, :groups], parts["scales"][:, :groups]

    def rows(start: int, stop: int) -> Codes:
        return Codes(fields(qweight[start:stop], 4), scales[start:stop], zeros[start:stop], None, 4, size)

    return QuantizedTensor((out_features, in_features), rows)


def _gemv_group_size(in_features: int, group_size: int | None, where: str) -> int:
    """The widths of a gemv file are padded, so only the configuration knows the group size."""
    if group_size is None:
        raise CheckpointError(
            f"{where}: AWQ in the gemv layout needs group_size in quantization_config; add the one it was made with"
        )
    size = in_features if group_size == -1 else group_size
    if size < 32 or in_features % size:
        raise CheckpointError(
            f"{where}: group_size {group_size} does not fit {in_features} inputs in AWQ's gemv layout; "
            "the configuration belongs to another file: download both from one revision"
        )
    return size
