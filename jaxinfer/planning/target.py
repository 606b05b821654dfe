"""The device that a plan is for: this process's, or a GPU that is not here."""

import dataclasses
import math
import os
import re

import jax
import jax.numpy as jnp

from jaxinfer.memory import free_host_bytes, shown_binary
from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import Packed, PackedInt8, int8_to_mosaic, to_kernel_layout, to_mosaic
from pallas_kernels.int4_matmul.api import mosaic_refusal

MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_FRACTION = 0.75
"""Share of a GPU's memory that JAX takes unless the environment variable `MEM_FRACTION` says otherwise."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device: `backend` ("cpu", "gpu"), and `capacity`, the bytes that arrays may take there.

    `is_here` tells this process's own device from a GPU that is only assumed: then kernels are taken to be Hopper's.
    """

    name: str
    backend: str
    capacity: int
    is_here: bool

    @property
    def default_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.backend == "cpu" else jnp.bfloat16)

    def kernel_layout(self, weight: Packed) -> Packed:
        """The weight in the order that this device's kernel reads."""
        if self.is_here:
            return to_kernel_layout(weight)
        refusal = mosaic_refusal(1, jnp.bfloat16, jnp.bfloat16, dataclasses.replace(weight, layout="mosaic"))
        if refusal not in (None, dispatch.hopper_refusal()):
            return weight
        return int8_to_mosaic(weight) if isinstance(weight, PackedInt8) else to_mosaic(weight)


def target_for(gpu_memory: int | str | None) -> Target:
    """This process's device, or with `gpu_memory` a GPU of so many bytes (a number, or text such as "24GiB").

    Of a GPU, arrays get the share that JAX takes: what its allocator says here, of another GPU 75 %, or what the
    environment variable XLA_PYTHON_CLIENT_MEM_FRACTION says. Raises ValueError for a size, or a share, that is none.
    """
    device = jax.local_devices()[0]
    here = "cpu" if device.platform == "cpu" else "gpu"
    if gpu_memory is not None:
        size = parse_bytes(gpu_memory)
        if size < 1 << 20:
            raise ValueError(f"gpu_memory={gpu_memory!r} is a GPU of {size} bytes; write a size with its unit: 24GiB")
        share = _memory_fraction()
        name = f"a GPU of {shown_binary(size)}, of which JAX takes {share:.0%}"
        return Target(name, "gpu", int(share * size), here == "gpu")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    name = "this CPU" if here == "cpu" else device.device_kind
    return Target(name, here, limit or free_host_bytes(), True)


def _memory_fraction() -> float:
    """Beyond 1 a GPU may use the host's memory too."""
    given = os.environ.get(MEM_FRACTION) or str(JAX_FRACTION)
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError(f"{MEM_FRACTION}={given!r}: expected a number above 0, such as {JAX_FRACTION}")
    return share


def parse_bytes(size: int | str) -> int:
    """Bytes in text such as "24GiB", "80 GB" or "25769803776". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not 0 < float(match[1]) < 1e18:
        raise ValueError(f"{size!r} is no amount of memory; write it as 24GiB, 80GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])
