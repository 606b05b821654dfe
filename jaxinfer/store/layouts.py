"""From the order of codes that a store has to the one that this device's kernel reads."""

import functools
from collections.abc import Callable, Mapping

import jax

from checkpoints.errors import CheckpointError
from pallas_kernels.int4_matmul import (
    Packed,
    PackedInt8,
    int8_to_canonical,
    int8_to_mosaic,
    int8_to_triton,
    to_canonical,
    to_kernel_layout,
    to_mosaic,
    to_triton,
)

LAYOUT_VERSIONS: dict[str, int] = {"canonical": 1, "mosaic": 1, "triton": 1}
"""Whoever changes what a kernel reads raises its number, and keeps in `UNPACKERS` what undid the order until then."""


def _canonical(weight: Packed) -> Packed:
    return int8_to_canonical(weight) if isinstance(weight, PackedInt8) else to_canonical(weight)


UNPACKERS: Mapping[tuple[str, int], Callable[[Packed], Packed]] = {
    ("canonical", 1): _canonical,
    ("mosaic", 1): _canonical,
    ("triton", 1): _canonical,
}
"""How to get the canonical weight out of each layout that was ever stored."""


def to_layout(weight: Packed, layout: str) -> Packed:
    """A canonical weight in another layout. Raises KeyError for one that there is not."""
    if isinstance(weight, PackedInt8):
        return {"canonical": int8_to_canonical, "mosaic": int8_to_mosaic, "triton": int8_to_triton}[layout](weight)
    return {"canonical": to_canonical, "mosaic": to_mosaic, "triton": to_triton}[layout](weight)


def check_known(layout: str, version: int, where: str) -> None:
    """Raises CheckpointError for a version of a layout that nothing here unpacks."""
    if (layout, version) not in UNPACKERS:
        raise CheckpointError(
            f"{where} has version {version} of the {layout} layout, which this version of jaxinfer cannot read; "
            "write the store again, or use the version that wrote it"
        )


def unpacked(weight: Packed, version: int) -> Packed:
    """The canonical form of a stored weight."""
    return UNPACKERS[weight.layout, version](weight)


@functools.partial(jax.jit, static_argnames="version")
def repacked(weight: Packed, version: int) -> Packed:
    """A stored weight as this device's kernel reads it."""
    return to_kernel_layout(unpacked(weight, version))
