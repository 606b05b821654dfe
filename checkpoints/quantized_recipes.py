"""How each format's parts are recognised among a module's tensors, and which decoder takes them."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import awq, bitsandbytes, compressed_tensors, fp4, fp8, gptq, hqq
from checkpoints.formats.codes import QuantizedTensor
from checkpoints.quantized_config import ORIGINAL, Announcement, WeightSettings
from checkpoints.tensors import TensorInfo

type Parts = Mapping[str, np.ndarray]
type Infos = Mapping[str, TensorInfo]

_SMALL_BYTES = 64
"""A part of HQQ that holds a few numbers is no larger."""

_MAX_SMALL_BYTES = 1 << 16
"""Nor is one that describes a weight of another format, in JSON."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a recipe may need beside the parts: the weight's name, its module's settings, and small tensors."""

    where: str
    module: str
    announcement: Announcement | None
    read: Callable[[str], np.ndarray]

    def read_small(self, info: TensorInfo) -> np.ndarray:
        """Reads a part that describes the others; raises CheckpointError for one that is too large to do so."""
        if info.nbytes > _MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{self.where}: {info.name} has {info.nbytes} bytes; the file is damaged: download it again"
            )
        return self.read(info.name)

    @property
    def settings(self) -> WeightSettings:
        return WeightSettings() if self.announcement is None else self.announcement.weight(self.module)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A weight whose parts fit each other: its shape (out, in), the width of its codes (4 or 8), and its decoder."""

    shape: tuple[int, int]
    code_bits: int
    decode: Callable[[Parts], QuantizedTensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A format: which parts a weight has. Recipes are tried in order.

    `anchor` is the part by which it is recognised, with its dtypes (None: any); `required` and `optional` are the
    others, `ignored` those that concern activations, which are not quantised here, or the format's own library.
    `open` checks the parts, by their shapes and dtypes only, and raises CheckpointError where they disagree.
    """

    name: str
    open: Callable[[Infos, Context], Opened]
    anchor: str
    required: tuple[str, ...]
    dtypes: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")


def _need(part: str, infos: Infos, context: Context, said: str) -> None:
    """Raises CheckpointError where a part is not there that the weight needs by what the configuration says of it."""
    if part not in infos:
        raise CheckpointError(
            f"{context.where}: has no {part}, which it needs as quantization_config says {said}; "
            "files are incomplete: download all of them again from one place"
        )


def _awq_or_gptq(infos: Infos, context: Context) -> Opened:
    where, settings, announcement = context.where, context.settings, context.announcement
    bits, group = settings.bits, settings.group_size
    if announcement is not None and announcement.method in ("awq", "gptq"):
        is_awq = announcement.method == "awq"
    else:  # GPTQ packs along the inputs, so its codes are as wide as its scales
        is_awq = "g_idx" not in infos and infos["qweight"].shape[-1:] != infos["scales"].shape[-1:]
    if is_awq:
        shape = awq.shape(infos, group, where)
        found = 4 if awq.is_gemv(infos) else awq.gemm_bits(infos["qweight"].shape[1], shape[0])
        if bits not in (None, found):
            raise CheckpointError(
                f"{where}: AWQ with {bits} bits is not supported where a word has {32 // found} codes; {ORIGINAL}"
            )
        return Opened(shape, found, lambda parts: awq.decode(parts, group, where))
    version = 1 if announcement is None else announcement.gptq_version
    shape = gptq.shape(infos, bits, group, where)
    if settings.scattered and infos["scales"].shape[0] > 1:
        _need("g_idx", infos, context, "desc_act is true")
    return Opened(
        shape,
        4 if infos["qweight"].shape[0] * 32 <= 4 * shape[1] else 8,
        lambda parts: gptq.decode(parts, bits, group, version, settings.symmetric, where),
    )


def _packed_integers(infos: Infos, context: Context) -> Opened:
    where, settings = context.where, context.settings
    bits, group = settings.bits, settings.group_size
    stated = context.read_small(infos["weight_shape"])
    shape = compressed_tensors.packed_shape(infos, stated, bits, group, where)
    if settings.symmetric is False:
        _need("weight_zero_point", infos, context, "symmetric is false")
    if settings.scattered and _has_groups(infos):
        _need("weight_g_idx", infos, context, "actorder is by group")
    width = compressed_tensors.field_bits(infos["weight_packed"].shape[1], shape[1], bits, where)
    decode = compressed_tensors.decode_packed
    return Opened(shape, 4 if width <= 4 else 8, lambda parts: decode(parts, bits, group, where))


def _has_groups(infos: Infos) -> bool:
    """Whether compressed-tensors' weight has more than one scale for an output."""
    return infos["weight_scale"].shape[1:] not in ((), (1,))


def _int8(infos: Infos, context: Context) -> Opened:
    where, settings = context.where, context.settings
    bits, group = settings.bits, settings.group_size
    shape, decode = compressed_tensors.int8_shape(infos, group, where), compressed_tensors.decode_int8
    if settings.symmetric is False:
        _need("weight_zero_point", infos, context, "symmetric is false")
    if settings.scattered and _has_groups(infos):
        raise CheckpointError(f"{where}: int-quantized with actorder by group is not supported; {ORIGINAL}")
    return Opened(shape, 4 if bits is not None and bits <= 4 else 8, lambda parts: decode(parts, bits, group, where))


def _nvfp4(codes: str, scale: str) -> Callable[[Infos, Context], Opened]:
    def open_(infos: Infos, context: Context) -> Opened:
        where = context.where
        shape = fp4.shape(infos, codes, scale, where)
        return Opened(shape, 4, lambda parts: fp4.decode_nvfp4(parts, codes, scale, where))

    return open_


def _mxfp4(infos: Infos, context: Context) -> Opened:
    where = context.where
    return Opened(fp4.shape(infos, "weight_packed", None, where), 4, lambda parts: fp4.decode_mxfp4(parts, where))


def _fp8(scale: str) -> Callable[[Infos, Context], Opened]:
    def open_(infos: Infos, context: Context) -> Opened:
        where, settings = context.where, context.settings
        block = settings.block
        scale_shape = infos[scale].shape
        if settings.group_size not in (None, -1) and len(scale_shape) == 2 and scale_shape[1] > 1:
            raise CheckpointError(
                f"{where}: FP8 with a scale for every {settings.group_size} inputs (strategy group) is not supported; "
                f"{ORIGINAL}"
            )
        shape = fp8.shape(infos, scale, block, where)
        return Opened(shape, 8, lambda parts: fp8.decode(parts, scale, block, where))

    return open_


def _bitsandbytes(state_part: str) -> Callable[[Infos, Context], Opened]:
    def open_(infos: Infos, context: Context) -> Opened:
        state = bitsandbytes.read_state(context.read_small(infos[state_part]), context.where)
        shape = bitsandbytes.shape(infos, state, context.where)
        return Opened(shape, 4, lambda parts: bitsandbytes.decode(parts, state))

    return open_


def _hqq(infos: Infos, context: Context) -> Opened:
    small = {part: context.read(info.name) for part, info in infos.items() if info.nbytes <= _SMALL_BYTES}
    meta = hqq.read_meta(small, context.where)
    shape = hqq.shape(infos, meta, context.where)
    return Opened(shape, 4 if meta.bits <= 4 else 8, lambda parts: hqq.decode(parts, meta))


RECIPES = (
    Recipe("AWQ or GPTQ", _awq_or_gptq, "qweight", ("qzeros", "scales"), optional=("g_idx",)),
    Recipe(
        "packed integers",
        _packed_integers,
        "weight_packed",
        ("weight_scale", "weight_shape"),
        dtypes=("I32",),
        optional=("weight_zero_point", "weight_g_idx"),
    ),
    Recipe(
        "NVFP4",
        _nvfp4("weight_packed", "weight_global_scale"),
        "weight_global_scale",
        ("weight_packed", "weight_scale"),
    ),
    Recipe("MXFP4", _mxfp4, "weight_packed", ("weight_scale",), dtypes=("U8",)),
    Recipe("NVFP4", _nvfp4("weight", "weight_scale_2"), "weight_scale_2", ("weight", "weight_scale")),
    *(
        Recipe(
            "bitsandbytes",
            _bitsandbytes(state),
            state,
            ("weight", "weight.absmax", "weight.quant_map"),
            optional=("weight.nested_absmax", "weight.nested_quant_map"),
        )
        for state in bitsandbytes.QUANT_STATES
    ),
    Recipe(
        "HQQ",
        _hqq,
        "W_q",
        ("scale", "zero", "shape", "nbits", "axis"),
        optional=("group_size", "quant_scale", "quant_zero"),
        ignored=(
            "packing", "view_as_float", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict",
            "stores_quant_config", "channel_wise", "optimize", "round_zero",
        ),
    ),
    Recipe("FP8", _fp8("weight_scale_inv"), "weight_scale_inv", ("weight",)),
    Recipe("FP8", _fp8("weight_scale"), "weight", ("weight_scale",), dtypes=fp8.FLOAT8_DTYPES),
    Recipe("8-bit integers", _int8, "weight", ("weight_scale",), dtypes=("I8",), optional=("weight_zero_point",)),
)  # fmt: skip
