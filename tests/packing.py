"""Packs codes as the documents of the formats say, one field at a time in Python integers: slow and plain.

The formats' decoders work on whole arrays; what is packed here bit by bit has to come back from them.
"""

import numpy as np

from checkpoints.safetensors_file import DTYPES
from checkpoints.tensors import TensorInfo

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def infos(parts: dict[str, np.ndarray]) -> dict[str, TensorInfo]:
    """The tensor table that a file with these arrays would have."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: TensorInfo(name, a.shape, names[a.dtype], a.nbytes) for name, a in parts.items()}


def words(stream: list[int], bits: int) -> list[int]:
    """Fields into signed 32-bit words, lowest bits first, straddling words where they must."""
    number = sum(int(field) << (bits * i) for i, field in enumerate(stream))
    count = -(-len(stream) * bits // 32)
    return [signed((number >> (32 * i)) & 0xFFFFFFFF) for i in range(count)]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> int32 [rows, words]: each row a stream."""
    return np.array([words(row.tolist(), bits) for row in codes], np.int32)


def pack_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """[n, columns] -> int32 [words, columns]: each column a stream."""
    return np.ascontiguousarray(pack_rows(codes.T, bits).T)


def awq_gemm(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int = 4) -> dict[str, np.ndarray]:
    """codes [out, in], zeros and scales [out, groups]."""
    order = {4: AWQ_ORDER, 8: (0, 2, 1, 3)}[bits]
    count = len(order)

    def word(columns: np.ndarray) -> int:
        return signed(sum(int(columns[order[field]]) << (bits * field) for field in range(count)))

    def interleave(values: np.ndarray) -> np.ndarray:  # [n, out] -> [n, out / count]
        words = [[word(row[first : first + count]) for first in range(0, len(row), count)] for row in values]
        return np.array(words, np.int32)

    return {
        "qweight": interleave(codes.T),
        "qzeros": interleave(zeros.T),
        "scales": np.ascontiguousarray(scales.T),
    }


def gptq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, version: int, g_idx: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """codes [out, in], zeros and scales [out, groups]. Version 1 takes one from each zero of a word, with borrows."""
    qzeros = pack_rows(zeros.T, bits)
    if version == 1 and bits != 3:
        ones = int("1".rjust(bits, "0") * (32 // bits), 2)
        qzeros = np.array([[signed((int(w) - ones) % 2**32) for w in row] for row in qzeros], np.int32)
    elif version == 1:
        qzeros = pack_rows((zeros.T.astype(int) - 1) % 8, bits)
    parts = {"qweight": pack_columns(codes.T, bits), "qzeros": qzeros, "scales": np.ascontiguousarray(scales.T)}
    return parts | ({} if g_idx is None else {"g_idx": g_idx.astype(np.int32)})


def random_weight(
    rng: np.random.Generator, out_features: int, in_features: int, group_size: int, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zeros (all values, 0 and the largest among them) uint8, and float16 scales."""
    codes = rng.integers(0, 2**bits, (out_features, in_features), dtype=np.uint8)
    groups = -(-in_features // group_size)
    zeros = rng.integers(0, 2**bits, (out_features, groups), dtype=np.uint8)
    zeros.flat[0], zeros.flat[-1] = 0, 2**bits - 1
    scales = rng.uniform(0.001, 0.1, (out_features, groups)).astype(np.float16)
    return codes, zeros, scales


def values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    """scale * (code - zero), one weight at a time, float32; `group` [in] says which group an input is of."""
    out = np.empty(codes.shape, np.float32)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            difference = np.float32(int(codes[i, j]) - int(zeros[i, group[j]]))
            out[i, j] = difference * np.float32(scales[i, group[j]])
    return out
