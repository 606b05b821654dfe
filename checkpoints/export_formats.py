"""Codes in the layouts of AWQ and compressed-tensors, as their own libraries and other engines read them.

What the readers of `checkpoints.formats` document, the other way round; the codes, scales and zeros are not changed.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints.formats.awq import ORDER
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.fp8 import numbers

_E4M3 = numbers(ml_dtypes.float8_e4m3fn).tobytes()

DECODE = "--format safetensors writes it decoded"

type Format = Literal["awq", "compressed-tensors"]
type Rows = tuple[QuantizedTensor, int, int]
"""Rows start:stop of a weight."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What the weights of a `config_groups` entry have in common. `group_size` None is one group for all inputs.

    `block_rows` outputs together with `group_size` inputs are a block; 1 for all but 8-bit floats.
    """

    bits: int
    is_float: bool
    group_size: int | None
    symmetric: bool
    act_order: bool = False
    block_rows: int = 1

    def settings(self) -> dict[str, Any]:
        """The `weights` object of compressed-tensors' configuration."""
        kind = {"num_bits": self.bits, "type": "float" if self.is_float else "int", "symmetric": self.symmetric}
        grouped = {"strategy": "channel"} if self.group_size is None else {"strategy": "group"}
        grouped |= {} if self.group_size is None else {"group_size": self.group_size}
        if self.is_float and self.group_size is not None:
            grouped = {"strategy": "block", "block_structure": [self.block_rows, self.group_size]}
        return kind | grouped | {"dynamic": False, "actorder": "group" if self.act_order else None}

    @property
    def format(self) -> str:
        return "float-quantized" if self.is_float else "pack-quantized"


def scheme_of(tensor: QuantizedTensor, start: int, where: str) -> Scheme:
    """What a weight is to compressed-tensors, from its row `start`. Raises ValueError for what it has no form for."""
    codes, in_features = tensor.rows(start, start + 1), tensor.shape[1]
    channel = codes.group_size >= in_features
    group = None if channel else codes.group_size
    if codes.offsets is not None and codes.offsets.dtype != np.uint8:
        raise ValueError(f"{where} has minima in place of zero points, which no integer format has; {DECODE}")
    if codes.book is not None:
        if codes.bits == 8 and codes.book.tobytes() == _E4M3:
            return Scheme(8, True, group, True, block_rows=1 if channel else tensor.block_rows)
        raise ValueError(f"{where} has a code book, which the format has no form for; {DECODE}")
    if group is not None and in_features % group:
        raise ValueError(f"{where} has {in_features} inputs, which groups of {group} do not divide; {DECODE}")
    return Scheme(codes.bits, False, group, codes.offsets is None, tensor.permutation is not None)


def compressed_scheme(rows: Sequence[Rows], where: str) -> Scheme:
    """What a weight of one tensor, or of several one below the other, is to compressed-tensors, from a row of each.

    Raises ValueError, beginning with `where`, for codes of a kind that the format does not have, or of several kinds.
    """
    schemes = {scheme_of(tensor, start, where) for tensor, start, _ in rows}
    orders = {None if t.permutation is None else t.permutation.tobytes() for t, _, _ in rows}
    if len(schemes) > 1 or len(orders) > 1:
        raise ValueError(f"{where} is one tensor in this family, and its parts have several precisions; {DECODE}")
    (scheme,) = schemes
    counts = [start for _, start, _ in rows] + [stop - start for _, start, stop in rows[:-1]]
    if any(count % scheme.block_rows for count in counts):
        raise ValueError(f"{where} is one tensor in this family, and its parts begin within blocks; {DECODE}")
    return scheme


def compressed_parts(rows: Sequence[Rows], where: str) -> tuple[dict[str, np.ndarray], Scheme]:
    """A weight of compressed-tensors, of one tensor or of several one below the other, and what it is.

    Raises what `compressed_scheme` raises.
    """
    scheme = compressed_scheme(rows, where)
    permutation, in_features = rows[0][0].permutation, rows[0][0].shape[1]
    packed, scales, zeros = [], [], []
    for codes in _chunks(rows):
        values = codes.codes
        if permutation is not None:  # groups lie scattered in the format: column p[j] is our column j
            values = np.empty_like(codes.codes)
            values[:, permutation] = codes.codes
        packed.append(values.view(ml_dtypes.float8_e4m3fn) if scheme.is_float else pack_fields(values, scheme.bits))
        scales.append(codes.scales)
        if codes.offsets is not None:
            zeros.append(codes.offsets)
    scale = np.concatenate(scales)
    out_features = len(scale)
    if scheme.is_float:
        return {"weight": np.concatenate(packed), "weight_scale": scale[:: scheme.block_rows]}, scheme
    parts = {
        "weight_packed": np.concatenate(packed),
        "weight_scale": scale,
        "weight_shape": np.array([out_features, in_features], np.int64),
    }
    if zeros:  # a stream along the outputs, for each group
        parts["weight_zero_point"] = np.ascontiguousarray(pack_fields(np.concatenate(zeros).T, scheme.bits).T)
    if permutation is not None:
        group_of = np.empty(in_features, np.int32)
        group_of[permutation] = np.arange(in_features, dtype=np.int32) // (scheme.group_size or in_features)
        parts["weight_g_idx"] = group_of
    return parts, scheme


def awq_scheme(rows: Sequence[Rows], where: str) -> Scheme:
    """What a weight is to AWQ, from a row of each of its tensors.

    Raises ValueError, beginning with `where`, for codes that the format does not have.
    """
    schemes = {scheme_of(tensor, start, where) for tensor, start, _ in rows}
    scheme = next(iter(schemes))
    if len(schemes) > 1 or scheme.bits != 4:
        kind = "several precisions" if len(schemes) > 1 else "8 bits"
        raise ValueError(f"{where} has {kind}, AWQ has 4 bits for all; --format compressed-tensors takes it")
    if scheme.act_order:
        raise ValueError(f"{where} has its inputs in another order, AWQ has none; --format compressed-tensors takes it")
    out_features = sum(stop - start for _, start, stop in rows)
    if out_features % 8:
        raise ValueError(f"{where} has {out_features} outputs, AWQ needs a multiple of 8; {DECODE}")
    return dataclasses.replace(scheme, symmetric=False)


def awq_parts(rows: Sequence[Rows], where: str) -> tuple[dict[str, np.ndarray], Scheme]:
    """A weight of AWQ's gemm layout, and what it is; symmetric codes get their zero, 8, written out.

    Raises what `awq_scheme` raises.
    """
    scheme = awq_scheme(rows, where)
    words, scales, zeros = [], [], []
    for codes in _chunks(rows):
        words.append(_gemm_words(codes.codes.T))
        scales.append(codes.scales)
        middle = np.full(codes.scales.shape, 8, np.uint8)
        zeros.append(middle if codes.offsets is None else codes.offsets)
    parts = {
        "qweight": np.concatenate(words, axis=1),
        "qzeros": _gemm_words(np.concatenate(zeros).T),
        "scales": np.ascontiguousarray(np.concatenate(scales).T),
    }
    return parts, scheme


def pack_fields(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, n] of 4 or 8 bits each -> int32 [rows, ceil(n * bits / 32)], little-endian, padded with zeros."""
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % (32 // bits))))
    stream = values if bits == 8 else values[:, 0::2] | (values[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(stream).view(np.int32)


def configuration(format: Format, modules: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a model with these modules quantised and those not.

    Raises ValueError for modules that the format cannot describe side by side.
    """
    ignored = sorted(plain)
    schemes = dict.fromkeys(modules.values())
    if format == "awq":
        sizes = sorted({scheme.group_size or -1 for scheme in schemes})
        if len(sizes) != 1:
            shown = " and of ".join("all" if size == -1 else str(size) for size in sizes)
            raise ValueError(f"groups are of {shown} inputs, AWQ has one size; --format compressed-tensors takes them")
        settings = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": sizes[0], "zero_point": True}
        return settings | {"modules_to_not_convert": ignored or None}
    groups = {}
    for number, scheme in enumerate(schemes):
        targets = [module for module, own in modules.items() if own == scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 and "lm_head" not in targets else targets,
            "weights": scheme.settings(),
            "input_activations": None,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {scheme.format for scheme in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": ignored,
        "quantization_status": "compressed",
    }


def _chunks(rows: Sequence[Rows]) -> Iterable[Codes]:
    for tensor, start, stop in rows:
        for first, last in tensor.chunks(start, stop):
            yield tensor.rows(first, last)


def _gemm_words(codes: np.ndarray) -> np.ndarray:
    """uint8 [n, out] -> int32 [n, out / 8]: nibble j of a word is column `ORDER[j]` of its eight."""
    columns = codes.reshape(codes.shape[0], -1, 8)
    words = np.zeros(columns.shape[:2], np.uint32)
    for place, column in enumerate(ORDER):
        words |= columns[..., column].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)
