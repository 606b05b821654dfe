"""Kernels that overlap launches: each waits for the one before it before it lets the next one come."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_int4_matmul import make

from pallas_kernels.int4_matmul import mosaic, to_mosaic, wide, wide_tuning
from pallas_kernels.int4_matmul.plan import Schedule


@pytest.mark.parametrize("rows", [1, 64])
def test_a_product_waits_before_it_lets_the_next_kernel_come(rows: int) -> None:
    """In the other order a kernel of few blocks lets its successor come while its predecessor still runs."""
    weight = jax.tree.map(jnp.asarray, to_mosaic(make(64, 256, 128, "zero_point", np.float32)[0]))
    x = jnp.zeros((rows, 256), jnp.bfloat16)

    def product(x: jax.Array) -> jax.Array:
        if rows == 1:
            return mosaic.int4_matmul(x, weight, schedule=Schedule(warps=4), out_dtype=jnp.dtype(jnp.bfloat16))
        schedule = wide_tuning.wide_schedule(rows, weight)
        return wide.int4_matmul(x, weight, schedule=schedule, out_dtype=jnp.dtype(jnp.bfloat16))

    found = re.findall(r"griddepcontrol_\w+", str(jax.make_jaxpr(product)(x)))
    assert found
    assert found == ["griddepcontrol_wait", "griddepcontrol_launch_dependents"] * (len(found) // 2)
