"""Checks that the formats share: dtype and rank of a part, and whether a group size fits."""

from collections.abc import Collection

from checkpoints.errors import CheckpointError
from checkpoints.tensors import TensorInfo

SCALE_DTYPES = ("F16", "BF16", "F32")


def expect(info: TensorInfo, dtypes: Collection[str], rank: int | None, where: str) -> None:
    """Raises CheckpointError unless a tensor has one of the dtypes and the rank."""
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{where}: {info.name} is {info.dtype}, expected {' or '.join(dtypes)}; "
            "the file is damaged or of a newer layout: download it again, or use the original model"
        )
    if (rank is not None and len(info.shape) != rank) or 0 in info.shape:
        raise CheckpointError(
            f"{where}: {info.name} has shape {list(info.shape)}, expected {rank} axes, none empty; "
            "the file is damaged: download it again"
        )


def misfit(info: TensorInfo, expected: tuple[int, ...], where: str) -> CheckpointError:
    """The error for a part of another shape than the other parts call for."""
    return CheckpointError(
        f"{where}: {info.name} is {list(info.shape)}, expected {list(expected)} beside the other parts of the weight; "
        "the file is damaged: download it again"
    )


def check_group(in_features: int, groups: int, group_size: int | None, where: str, indexed: bool = False) -> int:
    """The inputs in a group of `groups`; `group_size` is what the configuration says (None: nothing, -1: all).

    Where it says nothing, all groups are of one size, unless the last may be shorter than the others: 16 groups of
    1984 inputs are of 124, or of 128. Raises CheckpointError then, and for groups that do not fit; with a group index
    (`indexed`) the size is not what tells the group of an input.
    """
    if group_size is None and not indexed and _may_be_ragged(in_features, groups):
        raise CheckpointError(
            f"{where}: {groups} groups of scales for {in_features} inputs, and nothing says how many a group has; "
            "add the group_size that it was made with to quantization_config in config.json"
        )
    size = -(-in_features // max(1, groups)) if group_size is None else group_size
    size = in_features if size == -1 else size
    if size < 1 or -(-in_features // size) != groups:
        raise CheckpointError(
            f"{where}: {groups} groups of scales do not fit {in_features} inputs"
            + ("" if group_size is None else f" in groups of {group_size}, as quantization_config says")
            + "; configuration and weights are of different models: download both from one revision"
        )
    return min(size, in_features)


def _may_be_ragged(in_features: int, groups: int) -> bool:
    """Whether groups of one size do not hold the inputs, or as many of a larger power of two, the usual sizes, do."""
    if groups <= 1:
        return False
    size, rest = divmod(in_features, groups)
    power = 1 << max(0, size - 1).bit_length()
    return bool(rest) or (power != size and -(-in_features // power) == groups)
