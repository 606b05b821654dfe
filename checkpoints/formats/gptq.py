"""GPTQ, as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits with zero points, packed along the inputs.

    qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx int32 [in]

Fields are little-endian streams, also those of 3 bits, which straddle words. The first version of the format stores
every zero less one; the subtraction was of whole words, so that a zero of 0 borrows from its neighbour, and only the
same addition of whole words undoes it. Some files say they are of the first version and are not
(https://github.com/vllm-project/vllm/issues/38966): where all zeros are alike, they are symmetric ones, and their value
tells the version.

g_idx says which group an input is of. With act-order it is not sorted.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.bits import fields
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import SCALE_DTYPES, check_group, expect, misfit
from checkpoints.tensors import TensorInfo

BITS = (2, 3, 4, 8)


def shape(infos: Mapping[str, TensorInfo], bits: int | None, group_size: int | None, where: str) -> tuple[int, int]:
    """Checks the tensors of one weight against each other; returns (out, in)."""
    for part in ("qweight", "qzeros"):
        expect(infos[part], ("I32",), 2, where)
    expect(infos["scales"], SCALE_DTYPES, 2, where)
    words, out_features = infos["qweight"].shape
    bits = _bits(words, out_features, infos["qzeros"].shape[1], bits, where)
    in_features = words * 32 // bits
    groups = infos["scales"].shape[0]
    wanted: dict[str, tuple[int, ...]] = {
        "qzeros": (groups, out_features * bits // 32),
        "scales": (groups, out_features),
    }
    if "g_idx" in infos:
        expect(infos["g_idx"], ("I32", "I64"), 1, where)
        wanted["g_idx"] = (in_features,)
    for part, expected in wanted.items():
        if infos[part].shape != expected:
            raise misfit(infos[part], expected, where)
    check_group(in_features, groups, group_size, where, indexed="g_idx" in infos)
    return out_features, in_features


def decode(
    parts: Mapping[str, np.ndarray],
    bits: int | None,
    group_size: int | None,
    version: Literal[1, 2],
    symmetric: bool | None,
    where: str,
) -> QuantizedTensor:
    """The weight in the tensors qweight, qzeros, scales and perhaps g_idx, whose shapes `shape` has checked.

    `version` and `symmetric` are what the configuration says of the zeros (None: nothing). Raises CheckpointError for
    a group index out of range.
    """
    qweight = parts["qweight"]
    words, out_features = qweight.shape
    bits = _bits(words, out_features, parts["qzeros"].shape[1], bits, where)
    in_features, groups = words * 32 // bits, parts["scales"].shape[0]
    size = check_group(in_features, groups, group_size, where, indexed=has_order(parts.get("g_idx")))
    zeros = np.ascontiguousarray(_zeros(parts["qzeros"], bits, version, symmetric).T)
    scales = np.ascontiguousarray(parts["scales"].T)
    order = group_order(parts.get("g_idx"), size, groups, in_features, where)
    container: Literal[4, 8] = 4 if bits <= 4 else 8

    def rows(start: int, stop: int) -> Codes:
        codes = fields(qweight[:, start:stop].T, bits)
        return order.apply(Codes(codes, scales[start:stop], zeros[start:stop], None, container, size))

    return QuantizedTensor((out_features, in_features), rows, order.permutation)


class GroupOrder:
    """What a group index does to a weight: nothing, a permutation of its columns, or a scale for every column.

    The last is for groups of other sizes than `group_size`, which no packed form has.
    """

    def __init__(self, permutation: np.ndarray | None, gather: np.ndarray | None) -> None:
        self.permutation = permutation
        self._gather = gather

    def apply(self, codes: Codes) -> Codes:
        if self.permutation is not None:
            columns = np.take(codes.codes, self.permutation, axis=1)
            return Codes(columns, codes.scales, codes.offsets, codes.book, codes.bits, codes.group_size)
        if self._gather is not None:
            scales = codes.scales[:, self._gather]
            offsets = None if codes.offsets is None else codes.offsets[:, self._gather]
            return Codes(codes.codes, scales, offsets, codes.book, codes.bits, 1)
        return codes


def has_order(g_idx: np.ndarray | None) -> bool:
    """Whether a group index says anything: compressed-tensors leaves one of -1 where there is no order."""
    return g_idx is not None and not bool((g_idx == -1).all())


def group_order(g_idx: np.ndarray | None, group_size: int, groups: int, in_features: int, where: str) -> GroupOrder:
    """Reads a group index [in]; one that is absent or says nothing is the plain order."""
    if g_idx is None or not has_order(g_idx):
        return GroupOrder(None, None)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise CheckpointError(
            f"{where}: the group index runs from {int(g_idx.min())} to {int(g_idx.max())}, there are {groups} groups; "
            "the file is damaged: download it again"
        )
    plain = np.arange(in_features) // group_size
    if np.array_equal(g_idx, plain):
        return GroupOrder(None, None)
    permutation = np.argsort(g_idx, kind="stable").astype(np.int32)
    if np.array_equal(g_idx[permutation], plain):
        return GroupOrder(permutation, None)
    return GroupOrder(None, g_idx.astype(np.int64))


def _bits(words: int, out_features: int, zero_words: int, bits: int | None, where: str) -> int:
    """The width of a field: the zeros take as many bits for each output."""
    found, rest = divmod(32 * zero_words, out_features)
    if rest or found not in BITS or (words * 32) % found:
        raise CheckpointError(
            f"{where}: {zero_words} words of zero points for {out_features} outputs are no GPTQ weight of "
            f"{', '.join(map(str, BITS))} bits; the file is damaged: download it again"
        )
    if bits is not None and bits != found:
        raise CheckpointError(
            f"{where}: has {found} bits, quantization_config says {bits}; "
            "configuration and weights are of different models: download both from one revision"
        )
    return found


def _zeros(qzeros: np.ndarray, bits: int, version: Literal[1, 2], symmetric: bool | None) -> np.ndarray:
    """Zero points uint8 [groups, out]."""
    stored = fields(qzeros, bits)
    middle = 2 ** (bits - 1)
    alike = symmetric is not False and bool((stored == stored.flat[0]).all())
    if alike and stored.flat[0] in (middle - 1, middle):
        return np.full_like(stored, middle)
    if version == 2:
        return stored
    if bits == 3:  # fields straddle words, so they are added to one by one
        return (stored + np.uint8(1)) & np.uint8(7)
    one_each = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    return fields(qzeros.view(np.uint32) + one_each, bits)
