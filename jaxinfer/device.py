"""Starts JAX on its device: what went wrong in one line, and a word for options that come too late."""

import logging
import os

import jax

log = logging.getLogger("jaxinfer")

READ_ONCE = (
    "CUDA_VISIBLE_DEVICES",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
"""Environment variables that JAX reads when it starts its device, and never again."""

_seen: dict[str, str | None] = {}


def start_device() -> None:
    """Has JAX start its default device, unless it runs already. `load` calls it.

    Raises ValueError where there is none, such as with JAX_PLATFORMS=cuda on a machine without a GPU. Warns of each of
    `READ_ONCE` that was changed since the first call: somebody who sets a memory option in a notebook after running
    out of memory must learn that it does nothing. (What was changed between JAX's own start and the first call here
    cannot be told from what was set in time.)
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where the CUDA build is not installed (JAX 0.11)
        reason = " ".join(str(error).split()) or "this build of JAX does not have it"
        platforms = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        chosen = f"JAX_PLATFORMS={platforms}" if platforms else "JAX"
        raise ValueError(
            f"{chosen} finds no device ({reason[:300]}); set JAX_PLATFORMS=cpu to use the CPU, or check the driver and "
            "install the CUDA build of JAX (the extra cuda13 or cuda12)"
        ) from error
    for name in READ_ONCE:
        value = os.environ.get(name)
        if _seen.setdefault(name, value) != value:
            _seen[name] = value  # once for each change
            log.warning(
                "%s was changed after JAX had started, which reads it only then: it does nothing in this process; "
                "start a new one (in a notebook: restart the kernel) with it set before JAX is used",
                name,
            )
