"""The attention block of few tokens: the kernel's warp program against the separate ops, and GPU runs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_attention_cases import lower_for_cuda
from simulated_int4_warp import flat_weights
from simulated_warp import Cluster, SimulatedWarp, run_cluster
from simulated_wide_warp import Barriers, SimulatedWideWarp

from jaxinfer import kv_cache
from jaxinfer.batch import pool_pages
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.decoder import forward
from jaxinfer.layers import packed_attention
from jaxinfer.params import random_params
from jaxinfer.quantization.plan import resolve
from pallas_kernels.decoder_block import attention_block, attention_block_refusal, mosaic
from pallas_kernels.decoder_block.plan import BLOCKS, WARPS, BlockPlan
from pallas_kernels.int4_matmul import PackedInt4, from_codes, strip, to_mosaic
from pallas_kernels.int4_matmul import api as int4_api
from pallas_kernels.int4_matmul.packing import unpack_codes
from pallas_kernels.paged_attention.merge import Outputs
from pallas_kernels.paged_attention.new_token import Arguments as AttentionArguments
from pallas_kernels.paged_attention.new_token import DecodePlan
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tiles import Pools

BF16, EPS, PAGE = ml_dtypes.bfloat16, 1e-6, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """`length` counts the tokens before the new ones; -1 is an idle row."""

    length: int
    tokens: int = 1
    hidden: int = 1024
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    pages: int = 24
    slices: int = 3
    norm: bool = True
    group_size: int = 128
    kind: str = "zero_point"

    @property
    def plan(self) -> DecodePlan:
        attention = Plan(
            1,
            self.tokens,
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            PAGE,
            self.pages,
            self.head_dim**-0.5,
            splits=BLOCKS,
            warps=WARPS,
            depth=1,
        )
        return DecodePlan(attention, self.head_dim, False, EPS if self.norm else None)


CASES = [
    Case(37, slices=0),
    Case(1100, tokens=2, pages=72),  # some warps have two tiles of keys
    Case(31, tokens=2, norm=False, group_size=32, kind="symmetric", slices=1),
    Case(-1),
    Case(0, q_heads=8, kv_heads=1, pages=1, group_size=64),
    Case(14, tokens=2, q_heads=1, head_dim=128, pages=1, slices=16),
    Case(40, tokens=2, q_heads=4, head_dim=128, slices=1, group_size=256, kind="minimum"),
]
ON_GPU = [
    *CASES,
    Case(0),
    Case(400, q_heads=16, kv_heads=8, head_dim=128, pages=64, slices=8),
    Case(1000, tokens=2, q_heads=16, kv_heads=8, head_dim=128, pages=64, slices=8),
    Case(2000, q_heads=16, kv_heads=8, head_dim=128, pages=128, slices=8),
    Case(15, tokens=2, slices=2),
]


@functools.cache
def make(case: Case) -> dict[str, Any]:
    """The op's arrays. What nobody may read is NaN: pages that are not the row's, places from the new ones on."""
    rng = np.random.default_rng(case.length + case.tokens)
    q, kv = case.q_heads * case.head_dim, case.kv_heads * case.head_dim

    def weight(out: int, inputs: int) -> PackedInt4:
        codes = rng.integers(0, 16, (out, inputs), dtype=np.uint8)
        groups = (out, inputs // case.group_size)
        scales = rng.uniform(0.5, 1.5, groups) / (4 * np.sqrt(inputs))
        offsets = rng.integers(6, 10, groups, dtype=np.uint8) if case.kind == "zero_point" else None
        if case.kind == "minimum":
            offsets = (scales * rng.uniform(-9, -6, groups)).astype(np.float32).astype(BF16)
        return from_codes(codes, scales.astype(np.float32).astype(BF16), offsets, group_size=case.group_size)

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    pools = normal(2, case.pages + 8, case.kv_heads, PAGE, case.head_dim, dtype=BF16)
    table = rng.permutation(case.pages + 7)[: case.pages].astype(np.int32) + 1
    stored = np.full(pools.shape[1:4:2], False)
    for place in range(max(case.length, 0)):
        stored[table[place // PAGE], place % PAGE] = True
    pools[:, ~stored.any(1)] = np.nan
    pools.transpose(0, 1, 3, 2, 4)[:, ~stored] = np.nan
    angles = rng.uniform(0, 6, (1, case.tokens, case.head_dim // 2)).astype(np.float32)
    norms = rng.uniform(0.5, 1.5, (2, case.head_dim)).astype(np.float32)
    return {
        "x": normal(1, case.tokens, case.hidden, dtype=BF16),
        "partial": normal(case.slices, 1, case.tokens, case.hidden) if case.slices else None,
        "qkv": weight(q + 2 * kv, case.hidden),
        "o": weight(case.hidden, q),
        "k_pages": pools[0],
        "v_pages": pools[1],
        "page_table": table[None],
        "positions": np.array([case.length], np.int32),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "norm": rng.uniform(0.5, 1.5, case.hidden).astype(np.float32),
        "q_norm": norms[0] if case.norm else None,
        "k_norm": norms[1] if case.norm else None,
    }


def values_of(weight: PackedInt4) -> np.ndarray:
    codes, scales = (
        unpack_codes(weight).astype(np.float64),
        np.repeat(weight.scales.astype(np.float64), weight.group_size, 1),
    )
    if weight.kind == "minimum":
        return codes * scales + np.repeat(weight.offsets.astype(np.float64), weight.group_size, 1)
    middle = 8.0 if weight.offsets is None else np.repeat(weight.offsets.astype(np.float64), weight.group_size, 1)
    return (codes - middle) * scales


@functools.cache
def expected(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """o's result, y, and the new keys and values [token, head, element], in float64 but for what is rounded between."""
    a, d = make(case), case.head_dim

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(BF16).astype(np.float64)

    y = a["x"][0].astype(np.float32)
    if a["partial"] is not None:
        y = y + a["partial"].sum(0)[0]
    y = y.astype(BF16)
    x = y.astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * a["norm"]
    heads = rounded(x @ values_of(a["qkv"]).T).reshape(case.tokens, -1, d)
    q, k, v = np.split(heads, [case.q_heads, case.q_heads + case.kv_heads], axis=1)
    if case.norm:
        q, k = (
            rounded(head / np.sqrt((head * head).mean(-1, keepdims=True) + EPS) * weight)
            for head, weight in ((q, a["q_norm"]), (k, a["k_norm"]))
        )
    cos, sin = a["cos"][0][:, None], a["sin"][0][:, None]
    q, k = (
        rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))
        for first, second in (np.split(head, 2, -1) for head in (q, k))
    )
    attended = np.zeros(q.shape)
    table, old = a["page_table"][0], np.arange(max(case.length, 0))
    for token in range(case.tokens if case.length >= 0 else 0):
        for head in range(case.q_heads):
            kv = head * case.kv_heads // case.q_heads
            stored = (pool[table[old // PAGE], kv, old % PAGE] for pool in (a["k_pages"], a["v_pages"]))
            new = (k[: token + 1, kv], v[: token + 1, kv])
            keys, values = (np.concatenate([x, y]) for x, y in zip(stored, new, strict=True))
            logits = keys.astype(np.float64) @ q[token, head] * d**-0.5
            weights = np.exp(logits - logits.max())
            attended[token, head] = weights @ values.astype(np.float64) / weights.sum()
    return attended.reshape(case.tokens, -1) @ values_of(a["o"]).T, y, k, v


def check(case: Case, slices: np.ndarray, y: np.ndarray, pools: list[np.ndarray]) -> None:
    out, want_y, *new = expected(case)
    np.testing.assert_array_equal(y.reshape(want_y.shape), want_y)
    got = slices.sum(0, dtype=np.float64).reshape(out.shape)
    if case.length < 0:
        assert not got.any()
    else:
        assert np.linalg.norm(got - out) < 1e-2 * np.linalg.norm(out)
    places = case.length + np.arange(case.tokens if case.length >= 0 else 0)
    pages, inside = make(case)["page_table"][0][places // PAGE], places % PAGE
    for pool, want, name in zip(pools, new, ("k_pages", "v_pages"), strict=True):
        got, before = pool.copy(), make(case)[name]
        if len(places):
            written = got[pages, :, inside].astype(np.float64)
            assert np.linalg.norm(written - want) < 1e-2 * np.linalg.norm(want)
        got[pages, :, inside] = before[pages, :, inside]
        np.testing.assert_array_equal(got.view(np.uint16), before.view(np.uint16))


def simulate(case: Case) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """What the kernel returns, run on NumPy twins of its warps."""
    a = make(case)
    qkv, o = to_mosaic(a["qkv"]), to_mosaic(a["o"])
    plan = BlockPlan.of(case.plan, qkv, o, case.slices, EPS)

    def flat(array: np.ndarray | None, dtype: Any = np.uint8) -> Any:
        return None if array is None else np.ascontiguousarray(array).reshape(-1).view(dtype)

    pools = [flat(a[name].copy()) for name in ("k_pages", "v_pages")]
    slices = np.full(case.kv_heads * case.tokens * case.hidden, np.nan, np.float32)
    y = np.full(case.tokens * case.hidden, np.nan, BF16)
    tables = {name: flat(a[name], np.float32) for name in ("cos", "sin", "q_norm", "k_norm")}
    attention = AttentionArguments(
        qkv=None,
        pools=Pools(*pools),
        page_table=flat(a["page_table"], np.int32),
        positions=a["positions"],
        outputs=Outputs(None, None, None),
        **tables,
    )
    products = [
        strip.arguments_of(weight, weights=flat_weights(weight), x=None, out=slices, out_dtype="float32")
        for weight in (qkv, o)
    ]
    arguments = mosaic.Arguments(
        flat(a["x"]), flat(a["partial"], np.float32), a["norm"], y, attention, products[0], products[1]
    )

    def program(kv_head: int, of_products: Cluster, w: SimulatedWarp, block: int) -> None:
        m = SimulatedWideWarp(SimulatedWarp(of_products, block, w.warp[0]), Barriers())
        mosaic.attend(w, m, plan, arguments, w.const(kv_head, "i32"), w.const(block, "i32"))

    for kv_head in range(case.kv_heads):
        of_products = Cluster(BLOCKS, WARPS, plan.product_bytes)
        run_cluster(BLOCKS, WARPS, plan.attention_bytes, functools.partial(program, kv_head, of_products))
    shape = a["k_pages"].shape
    return slices.reshape(case.kv_heads, case.tokens, -1), y, [pool.view(BF16).reshape(shape) for pool in pools]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_warp_of_the_kernel_together(case: Case) -> None:
    slices, y, pools = simulate(case)
    check(case, slices, y, pools)


def block_of(case: Case) -> Any:
    options = {"norm_eps": EPS, "num_q_heads": case.q_heads, "scale": case.head_dim**-0.5}
    return lambda arrays: attention_block(**arrays, **options)


def packed(case: Case) -> dict[str, Any]:
    arrays = make(case)
    return jax.tree.map(jnp.asarray, arrays | {name: to_mosaic(arrays[name]) for name in ("qkv", "o")})


def test_lowers_for_cuda() -> None:
    assert lower_for_cuda(block_of(CASES[1]), packed(CASES[1])).count("@mosaic_gpu_v2") == 1


def refusal(
    case: Case, slices: int = 3, rotary_dim: int = 64, batch: int = 1, dtype: Any = None, scales: Any = None
) -> str | None:
    a = packed(case)
    if scales is not None:
        a |= {name: dataclasses.replace(a[name], scales=a[name].scales.astype(scales)) for name in ("qkv", "o")}
    x, table = (jnp.broadcast_to(a[name][:1], (batch, *a[name].shape[1:])) for name in ("x", "page_table"))
    pages = a["k_pages"] if dtype is None else a["k_pages"].astype(dtype)
    given = (x, slices, a["qkv"], a["o"], pages, table)
    return attention_block_refusal(*given, num_q_heads=case.q_heads, rotary_dim=rotary_dim)


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(CASES[0]) == "the reference backend multiplies"
    monkeypatch.setattr(int4_api.dispatch, "hopper_refusal", lambda: None)
    case = CASES[0]
    assert refusal(case) is None
    assert refusal(case, batch=2) == "it takes one sequence of up to 2 new tokens, not 2 of 1"
    assert refusal(case, slices=17) == "it adds up to 16 slices, not 17"
    assert refusal(case, dtype=jnp.int8) == "it reads pages of bfloat16, not int8"
    assert refusal(case, rotary_dim=20) == "it rotates a multiple of 8 dimensions, not 20"
    wide = dataclasses.replace(case, q_heads=16, tokens=2)
    assert refusal(wide) == "it takes 8 KV heads of 8 query rows, not 1 of 32"
    long = dataclasses.replace(case, pages=130)
    assert refusal(long) == "it is for page tables of up to 2064 places, not 2080"
    large = dataclasses.replace(case, q_heads=4, tokens=2, head_dim=128, group_size=16)
    assert refusal(large) is None
    assert str(refusal(large, scales=jnp.float32)).endswith("bytes of shared memory, more than 231424")


def test_a_table_with_room_for_drafted_tokens_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of 15 tokens take a page behind the widest table that is taken without."""
    monkeypatch.setattr(int4_api.dispatch, "hopper_refusal", lambda: None)
    for spare in (0, 15):
        pages = pool_pages(1, 2048, spare) - 1  # less the scratch page
        assert refusal(dataclasses.replace(CASES[0], pages=pages)) is None


def test_why_a_layer_is_not_one_kernel_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    packed_attention._say_once.cache_clear()
    with caplog.at_level("DEBUG", "jaxinfer"):
        packed_attention._say_once("a reason")
        packed_attention._say_once("a reason")
    assert caplog.messages == ["a layer's attention is not one kernel: a reason"]


def test_a_small_models_layers_are_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_api.dispatch, "hopper_refusal", lambda: None)
    rope = RopeConfig("default", 1e6, 128)
    layers = (LayerConfig(rope),) * 2
    sizes = (4096, 256, 1024, 3072, 16, 8, 128)
    config = ModelConfig("qwen3", *sizes, layers, 4096, 1e-6, attention_scale=128**-0.5, qk_norm="head")
    plan = resolve("int4")
    params = jax.eval_shape(lambda: random_params(config, jnp.bfloat16, 0, plan=plan))
    cache = jax.eval_shape(lambda: kv_cache.create(config, 40, dtype="bfloat16"))
    positions, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 2), (1, 32)))

    def step(params: Any, cache: Any, ids: Any, positions: Any, table: Any) -> Any:
        return forward(params, ids, positions, cache, table, config=config, stage="decode")

    text = lower_for_cuda(step, params, cache, positions, positions, table)
    assert text.count("@mosaic_gpu_v2") == 2 * len(layers)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernel_on_the_gpu(case: Case) -> None:
    arrays, block = packed(case), jax.jit(block_of(case))
    assert refusal(case, rotary_dim=case.head_dim) is None
    first = [np.asarray(array) for array in block(arrays)]
    check(case, first[0], first[1], first[2:])
    for _ in range(20):
        for got, want in zip(block(arrays), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
