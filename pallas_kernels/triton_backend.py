"""What the Triton kernels share: whether this process can run them, and the call, alike in jax-triton 0.3 and 0.4.

jax-triton and triton are an optional extra (`pip install jaxinfer[triton]`) and imported only when a kernel is traced:
nothing but the files `triton_kernels.py` and `triton_codes.py` imports them when it is itself imported.
"""
# The optional extra need not be there for the type checker:
# pyright: reportMissingImports=false

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

OLDEST_CAPABILITY = 8.0
"""Ampere: asynchronous copies and bfloat16 on tensor cores."""


def refusal() -> str | None:
    """Why no Triton kernel can run in this process; None if they can."""
    if jax.default_backend() != "gpu":
        return "this process has no GPU"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if not capability.replace(".", "", 1).isdigit():
        return f"it is written for NVIDIA GPUs, not one of architecture {capability}"
    if float(capability) < OLDEST_CAPABILITY:
        return f"it needs compute capability {OLDEST_CAPABILITY} (A100, RTX 30 series) or later, not {capability}"
    return package_refusal()


@functools.cache
def package_refusal() -> str | None:
    """What is wrong with the installed packages, and what would mend it; None if nothing."""
    versions = []
    for package in ("jax-triton", "triton"):
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed: pip install jaxinfer[triton]"
    jax_triton, triton = versions
    if _release(jax_triton) >= (0, 4) and _release(triton) < (3, 7):
        return f"jax-triton {jax_triton} needs triton 3.7 or 3.8, not {triton}: pip install 'jax-triton==0.3.1'"
    return None


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the function as written: the tests' type checks wrap functions, and Triton reads their source."""
    import triton

    return triton.jit(inspect.unwrap(function))


def call(
    kernel: Any,
    *inputs: jax.Array,
    out_type: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    **constants: int | float | bool | str | None,
) -> list[jax.Array]:
    """Runs `kernel(*inputs, *outputs, **constants)` on every point of the grid; outputs start out as whatever is there.

    Only arrays and compile-time constants: jax-triton would make a number argument float64.
    """
    import jax_triton

    outputs = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        name=kernel.fn.__name__,
        **{outputs: list(out_type)},
        **constants,
    )


def multiprocessors() -> int:
    """Multiprocessors of the device that the kernels run on."""
    return int(jax.devices()[0].core_count)


def capability() -> str:
    """Its compute capability, such as "8.6"."""
    return str(jax.devices()[0].compute_capability)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
