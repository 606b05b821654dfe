"""What is refused before it is quantised: codes would make plausible numbers of it."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.quantization.plan import Precision

LARGEST_SCALE = float(np.finfo(np.float16).max)
SCALE_STEP = float(np.finfo(np.float16).smallest_subnormal)


def check_tensors(
    weight: Float[Array, "out in"], names: Sequence[str], rows: Sequence[int], precisions: Sequence[Precision | None]
) -> None:
    """Looks at the tensors, so many rows each, that are joined in a weight; those without a precision are passed over.

    Raises ValueError, naming the tensor, for NaN and infinity, and for numbers whose scales float16 cannot hold. One
    reduction on the device, without a copy.
    """
    if all(precision is None for precision in precisions):
        return
    largest = np.asarray(_magnitudes(weight, tuple(rows)))
    for name, precision, most in zip(names, precisions, largest.tolist(), strict=True):
        if precision is None or precision.bits == 16:
            continue
        name = name.removesuffix(".weight")
        if not math.isfinite(most):
            raise ValueError(
                f"{name} holds NaN or infinity: the checkpoint is damaged; get it anew, or keep {name} as it is by a "
                "rule of the plan with 16 bits"
            )
        if (wrong := _out_of_range(precision, most)) is not None:
            raise ValueError(
                f"{name}: its largest number, {most:.3g}, is too {wrong} for the float16 scales of {precision}; give "
                f"{name} 8 bits without groups, whose scales are float32, or 16 bits, by a rule of the plan"
            )


def are_finite(arrays: Iterable[jax.Array], rows: int | None = None) -> bool:
    """Whether all numbers are, of the first `rows` rows; those of a head that belong to no token are never read."""
    return all(math.isfinite(float(_magnitudes(array, (rows or len(array),))[0])) for array in arrays)


def _out_of_range(precision: Precision, largest: float) -> str | None:
    """Whether groups around a tensor's largest number have scales that float16 lacks.

    Groups of far smaller numbers than that become zeros, as they do beside it in the product: rows that training has
    left unused are in many models.
    """
    if precision.group_size is None:
        return None
    scale = largest / (2 ** (precision.bits - 1) - 1)
    if max(scale, largest if precision.method == "hqq" else 0.0) > LARGEST_SCALE:  # HQQ stores the smallest number too
        return "large"
    # Below float16's normal numbers scales are rounded to its smallest step; that may cost what a code's step does.
    return "small" if 0.0 < scale < SCALE_STEP * 2**precision.bits else None


@functools.partial(jax.jit, static_argnames="rows")
def _magnitudes(values: Float[Array, "all ..."], rows: tuple[int, ...]) -> Float[Array, " tensors"]:
    """The largest magnitude of each run of rows, float32; infinity if it holds a NaN, which a CPU's maximum drops."""
    sizes = jnp.where(jnp.isfinite(values), jnp.abs(values).astype(jnp.float32), jnp.inf)
    starts = itertools.pairwise(itertools.accumulate(rows, initial=0))
    return jnp.stack([jnp.max(sizes[start:stop]) for start, stop in starts])
