"""ggml's block formats as `Codes`: which types fit 4 bits, and what their codes mean.

    4 bits    Q4_0, Q4_1, Q4_K, Q2_K, Q3_K; IQ4_NL and IQ4_XS through their code book
    8 bits    Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

Scales that are one float16 in the file stay so. Those of the K-quants and IQ4_XS are products of two numbers and need
17 bits: they are float32.
"""

from typing import Literal

import numpy as np

from checkpoints.formats import ggml
from checkpoints.formats.codes import Codes

CODE_BITS: dict[str, Literal[4, 8]] = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "Q2_K": 4,
    "Q3_K": 4,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "Q5_0": 8,
    "Q5_1": 8,
    "Q5_K": 8,
    "Q6_K": 8,
    "Q8_0": 8,
}
"""The width of the codes of each quantised type."""

_HALF_SCALES = frozenset(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"))
_BOOKS = frozenset(("IQ4_NL", "IQ4_XS"))
_BOOK = ggml.IQ4_VALUES.astype(np.float32)
_CODE_OF = np.zeros(256, np.uint8)
_CODE_OF[ggml.IQ4_VALUES.view(np.uint8)] = np.arange(16, dtype=np.uint8)


def unpack(blocks: np.ndarray, name: str) -> Codes:
    """Takes packed rows apart, losslessly."""
    parts, bits = ggml.unpack(blocks, name), CODE_BITS[name]
    codes, scales, minimums, book = parts.codes, parts.scales, parts.minimums, None
    if name in _HALF_SCALES:
        scales = scales.astype(np.float16)
        minimums = None if minimums is None else minimums.astype(np.float16)
    if name in _BOOKS:
        codes, book = _CODE_OF[codes.view(np.uint8)], _BOOK
    elif minimums is None:
        codes = codes.view(np.uint8) + np.uint8(2 ** (bits - 1))
    return Codes(codes, scales, minimums, book, bits, parts.group_size)
