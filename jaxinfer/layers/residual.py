"""The residual stream where a layer's last branch is not added to it yet.

Kernels for many rows leave a product's sums in slices. The norm that follows reads the stream anyway, so its kernel
adds them; whatever else reads the stream asks for it `settled`.
"""

import typing

import flax.struct
import jax

from pallas_kernels.int4_matmul import sum_slices


@typing.no_type_check
@flax.struct.dataclass
class Pending:
    """x [batch, tokens, hidden] plus the sum of partial [slices, batch, tokens, hidden]."""

    x: jax.Array
    partial: jax.Array


type Residual = jax.Array | Pending


def settled(x: Residual) -> jax.Array:
    return x.x + sum_slices(x.partial, x.x.dtype) if isinstance(x, Pending) else x
