"""Attention of decode steps writes its heads in the order in which the output projection's kernel takes them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import decoder, kv_cache
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.layers import linear
from jaxinfer.params import random_params
from jaxinfer.quantization.plan import resolve
from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import Ordered, int4_slices, product_order, to_mosaic
from pallas_kernels.paged_attention import decode_attention
from pallas_kernels.token_order import TokenOrder, image_shape, ordered
from tests import paged_attention_cases as cases
from tests.test_decode_attention import make
from tests.test_int4_wide import described
from tests.test_int4_wide import make as make_weight


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    order: TokenOrder | None = None

    def plan(self):
        return dataclasses.replace(super().plan(), order=self.order)


CASES = [
    Case((0, 18), tokens=2, q_heads=2, kv_heads=1, rotary_dim=64, norm=True, warps=4, order=TokenOrder(2, 2)),
    Case((17, 40), q_heads=4, kv_heads=1, head_dim=96, splits=2, warps=4, order=TokenOrder(2, 1)),
]


def call(case: Case, arrays: cases.Arrays, o=None, backend=None, order: TokenOrder | None = None):
    """The heads as rows, or in an order; with `o` what it makes of them."""
    fixed = (arrays.page_table, cases.first_places(case), arrays.rope or (None, None), arrays.norms or (None, None))
    table, places, rope, norms = jax.tree.map(jnp.asarray, fixed)
    options = {"num_q_heads": case.q_heads, "scale": case.scale, "norm_eps": cases.NORM_EPS, "order": order}

    def run(qkv, k_pages, v_pages, o):
        inputs = (qkv, k_pages, v_pages, table, places, *rope)
        heads = decode_attention(*inputs, q_norm=norms[0], k_norm=norms[1], backend=backend, **options)[0]
        if o is None:
            return heads
        return int4_slices(heads if order is None else Ordered(heads, (*qkv.shape[:2], o.shape[1])), o)

    return np.asarray(jax.jit(run)(arrays.qkv, arrays.k_pages, arrays.v_pages, o))


@pytest.mark.parametrize("case", CASES)
def test_heads_are_written_in_a_products_order(case: Case) -> None:
    arrays = make(case)
    assert case.order is not None
    plain, *_ = cases.simulate_decode(dataclasses.replace(case, order=None), arrays)
    image, *_ = cases.simulate_decode(case, arrays)
    rows = jnp.asarray(plain.reshape(case.batch * case.tokens, -1))
    assert (image.reshape(-1).view(np.int32) == np.asarray(ordered(rows, case.order)).reshape(-1)).all()
    by_reference = [call(case, arrays, None, "reference", order) for order in (None, case.order)]
    rows = jnp.asarray(by_reference[0].reshape(rows.shape))
    assert (by_reference[1] == np.asarray(ordered(rows, case.order))).all()


def test_heads_of_a_part_of_a_stage_have_no_order() -> None:
    case = dataclasses.replace(CASES[0], head_dim=32, rotary_dim=32)
    with pytest.raises(ValueError, match="an order is of a multiple of 128 features, not 2 x 32"):
        call(case, make(case), order=case.order)


def test_which_products_have_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    o = described(64, 512, 32, "zero_point")
    if jax.default_backend() != "gpu":
        assert product_order(64, jnp.bfloat16, o) is None  # the reference takes rows
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    assert product_order(64, jnp.bfloat16, o) == TokenOrder(64, 2)
    assert product_order(64, jnp.bfloat16, described(64, 512, 16, "zero_point")) == TokenOrder(64, 1)
    assert product_order(64, jnp.bfloat16, described(64, 576, 32, "zero_point")) is None
    assert product_order(64, jnp.float32, o) is None
    assert product_order(16, jnp.bfloat16, o) is None
    image = jax.ShapeDtypeStruct(image_shape(64, 512, TokenOrder(64, 2)), jnp.int32)
    text = cases.lower_for_cuda(lambda image, o: int4_slices(Ordered(image, (16, 4, 512)), o), image, o)
    assert text.count("@mosaic_gpu_v2") == 1


# Of sizes that no other test packs: how codes are laid out, with a GPU or without, is traced once a process.
LAYERS = (LayerConfig(RopeConfig("default", 1e4, 128)),) * 2
MODEL = ModelConfig("llama", 272, 272, 512, 640, 4, 2, 128, LAYERS, 4096, 1e-5, attention_scale=128**-0.5)


def decoded(config: ModelConfig, params: Any, cache: Any, ids: jax.Array, table: jax.Array) -> jax.Array:
    positions = jnp.full(ids.shape, 3, jnp.int32)
    return decoder.forward(params, ids, positions, cache, table, config=config, stage="decode")[0]


def step_arrays(config: ModelConfig, rows: int, dtype: str = "bfloat16") -> tuple[Any, ...]:
    params = random_params(config, jnp.bfloat16, 0, plan=resolve("int4"))
    ids, table = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None]
    return params, kv_cache.create(config, rows + 1, dtype=dtype), ids, table


@pytest.mark.parametrize(
    ("rows", "change", "dtype", "count"),
    [
        (100, {}, "bfloat16", 2),
        (100, {}, "int8", 2),
        (100, {}, "float32", 0),  # what pages hold is what comes out
        (100, {"output_bias": True}, "bfloat16", 0),
        (100, {"residual_multiplier": 0.5}, "bfloat16", 0),
        (16, {}, "bfloat16", 0),  # kernels for few rows take them as they are
    ],
)
def test_which_decode_steps_write_them_so(monkeypatch: pytest.MonkeyPatch, rows, change, dtype, count) -> None:
    """Nothing is between attention and the output projection then."""
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    config = dataclasses.replace(MODEL, **change)
    shapes = jax.eval_shape(functools.partial(step_arrays, config, rows, dtype))
    text = cases.lower_for_cuda(functools.partial(decoded, config), *shapes)
    assert text.count("call @product_of_image") == count


def rows_of(image: jax.Array, rows: int, in_features: int, order: TokenOrder) -> jax.Array:
    """What `ordered` made this image of."""
    places = np.arange(256, rows * in_features + 256, dtype=np.uint16).reshape(rows, in_features)  # as normal numbers
    with jax.ensure_compile_time_eval():
        places = np.asarray(ordered(jnp.asarray(places.view(ml_dtypes.bfloat16)), order)).view(np.uint16).reshape(-1)
    first = np.zeros(rows * in_features, np.int32)
    first[places[places > 0] - 256] = np.flatnonzero(places)
    halves = jax.lax.bitcast_convert_type(image, jnp.bfloat16).reshape(-1)
    return halves[first].reshape(rows, in_features)


def test_a_decode_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the references, which write rows and read rows: here both are given an order."""
    order, arrays, seen = TokenOrder(8, 2), step_arrays(MODEL, 20), []
    plain = jax.jit(functools.partial(decoded, MODEL))(*arrays)

    def slices(x: Any, w: Any) -> jax.Array:
        seen.append(x.shape)
        rows = rows_of(x.image, 20, 512, order)
        return int4_slices(rows.reshape(x.shape), w)

    monkeypatch.setattr(decoder, "add_order", lambda like, w: order)
    monkeypatch.setattr(linear, "int4_slices", slices)
    given = jax.jit(lambda *arrays: decoded(MODEL, *arrays))(*arrays)
    assert seen == [(20, 1, 512)] * len(LAYERS)
    np.testing.assert_array_equal(np.asarray(given), np.asarray(plain))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "tokens"), [(20, 1), (100, 1), (16, 5)])
def test_the_same_bits_on_the_gpu(rows: int, tokens: int) -> None:
    case = Case((40,) * rows, tokens=tokens, q_heads=8, kv_heads=2, rotary_dim=64)
    arrays, o = make(case), jax.tree.map(jnp.asarray, to_mosaic(make_weight(256, 512, 128, "zero_point")))
    run = functools.partial(call, case, arrays, o)
    order = product_order(rows * tokens, jnp.bfloat16, o)
    assert order is not None
    plain, image, again = run(), run(order=order), run(order=order)
    assert (plain == image).all()
    assert (image == again).all()
