"""From the order of codes that a store has to the one that this device's kernel reads."""

import functools
from collections.abc import Callable, Mapping

import jax

from checkpoints.errors import CheckpointError
from pallas_kernels.int4_matmul import PackedInt4, to_canonical, to_kernel_layout, to_mosaic, to_triton

LAYOUT_VERSIONS: dict[str, int] = {"canonical": 1, "mosaic": 1, "triton": 1}
"""Whoever changes what a kernel reads raises its number, and keeps in `UNPACKERS` what undid the order until then."""

UNPACKERS: Mapping[tuple[str, int], Callable[[PackedInt4], PackedInt4]] = {
    ("canonical", 1): to_canonical,
    ("mosaic", 1): to_canonical,
    ("triton", 1): to_canonical,
}
"""How to get the canonical weight out of each layout that was ever stored."""


def to_layout(weight: PackedInt4, layout: str) -> PackedInt4:
    """A canonical weight in another layout."""
    return {"canonical": to_canonical, "mosaic": to_mosaic, "triton": to_triton}[layout](weight)


def check_known(layout: str, version: int, where: str) -> None:
    """Raises CheckpointError for a version of a layout that nothing here unpacks."""
    if (layout, version) not in UNPACKERS:
        raise CheckpointError(
            f"{where} has version {version} of the {layout} layout, which this version of jaxinfer cannot read; "
            "write the store again, or use the version that wrote it"
        )


def unpacked(weight: PackedInt4, version: int) -> PackedInt4:
    """The canonical form of a stored weight."""
    return UNPACKERS[weight.layout, version](weight)


@functools.partial(jax.jit, static_argnames="version")
def repacked(weight: PackedInt4, version: int) -> PackedInt4:
    """A stored weight as this device's kernel reads it."""
    return to_kernel_layout(unpacked(weight, version))
