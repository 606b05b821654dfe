"""Which programs get XLA's options for products by cuBLAS."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.decoder import LayerParams, Params
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.program import CUBLAS, Program, decoded_by_xla, program
from pallas_kernels.int4_matmul import from_codes, to_mosaic

ARRAY = jnp.zeros((64, 64), jnp.bfloat16)
CANONICAL = from_codes(jnp.zeros((64, 64), jnp.uint8), jnp.ones((64, 1), jnp.bfloat16), group_size=64)
PACKED = to_mosaic(CANONICAL)
SCALED = ScaledCodes(jnp.zeros((64, 64), jnp.int8), jnp.ones(64))
BLOCKS = BlockCodes(jnp.zeros((64, 64), jnp.float8_e4m3fn), jnp.ones((1, 1)), (64, 64))
ORDER = jnp.arange(64)


def weights(**changes: object) -> Params:
    plain = LayerParams(ARRAY, ARRAY, ARRAY, ARRAY)
    head = changes.pop("lm_head", None)
    return Params(ARRAY, jnp.ones(64), [plain, dataclasses.replace(plain, **changes)], head)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (weights(), False),
        (weights(o=PACKED, down=PermutedInputs(PACKED, ORDER), qkv=StackedOutputs((PACKED, ARRAY))), False),
        (weights(down=CANONICAL), True),
        (weights(down=PermutedInputs(CANONICAL, ORDER)), True),
        (weights(gate_up=SCALED), True),
        (weights(o=BLOCKS), True),
        (weights(qkv=StackedOutputs((ARRAY, SCALED))), True),
        (weights(lm_head=SCALED), True),
        (weights(lm_head=PACKED), False),
        ((), False),  # a draft without weights
    ],
)
def test_weights_that_xla_decodes_keep_its_own_products(params, expected):
    assert decoded_by_xla(params) == expected
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    assert decoded_by_xla(shapes) == expected


def test_the_options_are_those_of_a_gpu_and_of_the_weights(monkeypatch):
    monkeypatch.setitem(CUBLAS, "no_such_option", True)  # who compiles with these options fails

    @program(static_argnames="times", donate_argnames="x", rows=lambda params, x: x.shape[0])
    def scale(params: Params, x: jax.Array, *, times: int) -> jax.Array:
        """x times a number."""
        return params.norm * x * times

    assert isinstance(scale, Program)
    assert scale.__doc__ == "x times a number."
    x = jnp.ones(64)
    assert scale(weights(), x, times=3).tolist() == [3.0] * 64
    assert x.is_deleted()

    x = jnp.ones(64)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for params in (weights(o=SCALED), weights(o=CANONICAL)):
        scale.lower(params, x, times=4).compile()
    few, halves = jnp.ones(1), dataclasses.replace(weights(), norm=jnp.full(1, 0.5))
    assert scale(halves, few, times=4).tolist() == [2.0]
    for params in (weights(), weights(o=PACKED)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            scale.lower(params, x, times=4).compile()
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            scale(params, x, times=4)
