"""Which backend runs an op, and why: shared by every kernel's `api.py`."""

import dataclasses
import os
from collections.abc import Mapping

import jax

KERNELS_VARIABLE = "JAXINFER_KERNELS"
BACKENDS = ("mosaic", "triton", "reference")
NO_GPU = "this process has no GPU"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One backend's answer to a call: taken, or the reason why not."""

    backend: str
    taken: bool
    reason: str


def choose(
    op: str, refusals: Mapping[str, str | None], forced: str | None = None, *, or_last: bool = False
) -> list[Choice]:
    """Takes the first backend that does not refuse.

    `refusals` maps each backend, in order of preference, to its reason or to None. `forced`, or else the environment
    variable JAXINFER_KERNELS, names the only backend that may be taken; an unknown name or a refusal of the forced
    backend is a ValueError, which says so if the variable asked. With `or_last` the last backend is taken in place of
    one of `BACKENDS` that only the variable names.
    """
    asked, remedy = "", ""
    if forced is None and (named := os.environ.get(KERNELS_VARIABLE)):
        if or_last and named in BACKENDS and refusals.get(named, "there is none") is not None:
            *others, last = refusals
            refusals = {other: refusals[other] or f"{KERNELS_VARIABLE} names {named}" for other in others} | {
                last: None
            }
        else:
            forced = named
            asked, remedy = f"{KERNELS_VARIABLE}={named}: ", "; unset it to let each call choose"
    if forced is not None and forced not in refusals:
        raise ValueError(f"{asked}{op} has no backend {forced!r}; it has {', '.join(refusals)}")
    choices: list[Choice] = []
    for name, refusal in refusals.items():
        if forced == name and refusal is not None:
            if asked and refusal != NO_GPU and jax.default_backend() != "gpu":
                refusal = f"{NO_GPU}, and {refusal}"  # what most users of the variable have to know
            raise ValueError(f"{asked}{op} cannot run on {name}: {refusal}{remedy}")
        if forced not in (None, name):
            choices.append(Choice(name, False, f"{forced} was asked for"))
        elif any(choice.taken for choice in choices):
            choices.append(Choice(name, False, "a backend before it was taken"))
        elif refusal is not None:
            choices.append(Choice(name, False, refusal))
        else:
            choices.append(Choice(name, True, "asked for" if forced else "the first that supports this call"))
    return choices


def in_memory[Arrays](arrays: Arrays) -> Arrays:
    """The arrays, each in a buffer of its own where a Mosaic kernel is called with them inside a jitted program.

    XLA hands a custom call that takes a slice the address of the slice, and Mosaic refuses at run time what is not
    aligned to 256 bytes: `page_table[row]`, say.
    """
    return jax.lax.optimization_barrier(arrays)


def hopper_refusal() -> str | None:
    """Why a kernel for compute capability 9.0 cannot run in this process; None if it can."""
    if jax.default_backend() != "gpu":
        return NO_GPU
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if capability != "9.0":
        return f"it is written for Hopper (compute capability 9.0), not {capability}"
    return None
