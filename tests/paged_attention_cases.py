"""Cases for the paged attention ops, their float64 oracle, and the runs of the kernels' warp programs in NumPy."""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.paged_attention import decode_mosaic, mosaic
from pallas_kernels.paged_attention.formats import SMALLEST_SCALE
from pallas_kernels.paged_attention.merge import Outputs
from pallas_kernels.paged_attention.plan import Plan, plan_for
from pallas_kernels.paged_attention.tiles import Pools
from tests.simulated_warp import SimulatedWarp, run_cluster

BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """`lengths` counts stored tokens, the new ones included; for decode the last `tokens` are the new ones."""

    lengths: tuple[int, ...]
    tokens: int = 1
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    pages_per_row: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv: str = "bfloat16"  # what the pages of the bfloat16 tests hold
    # Of the decode op alone
    rotary_dim: int = 0
    interleaved: bool = False
    norm: bool = False
    # Of the plan; None is what plan_for picks
    splits: int | None = None
    warps: int | None = None
    depth: int | None = None
    most_halves: int | None = None
    late_values: bool | None = None
    every: int | None = None

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def plan(self) -> Plan:
        names = ("tokens", "q_heads", "kv_heads", "head_dim", "page_size", "pages_per_row", "scale", "window")
        plan = plan_for(
            batch=self.batch,
            softcap=self.softcap,
            sinks=self.sinks,
            kv=self.kv,
            **{name: getattr(self, name) for name in names},
        )
        fields = ("splits", "warps", "depth", "most_halves", "late_values", "every")
        schedule = {name: getattr(self, name) for name in fields}
        return dataclasses.replace(plan, **{name: value for name, value in schedule.items() if value is not None})

    def decode_plan(self) -> decode_mosaic.DecodePlan:
        return decode_mosaic.DecodePlan(self.plan(), self.rotary_dim, self.interleaved, NORM_EPS if self.norm else None)


NORM_EPS = 1e-5


@dataclasses.dataclass
class Arrays:
    """Inputs of one case. Everything that must not be read is NaN: free pages, scratch, positions past the length."""

    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    lengths: np.ndarray
    sinks: np.ndarray | None
    scales: tuple[np.ndarray, np.ndarray] | None
    q: np.ndarray
    qkv: np.ndarray
    rope: tuple[np.ndarray, np.ndarray] | None
    norms: tuple[np.ndarray, np.ndarray] | None

    @property
    def pools(self) -> list[np.ndarray]:
        return [self.k_pages, self.v_pages, *(self.scales or ())]


def make(case: Case, dtype: Any = BF16, seed: int = 0, stored: tuple[int, ...] | None = None) -> Arrays:
    """Random arrays; `stored` is how many tokens the pools hold of each row, by default `lengths`."""
    rng = np.random.default_rng(seed)
    stored = case.lengths if stored is None else stored
    num_pages = case.batch * case.pages_per_row + 3
    shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    pools = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    table = (rng.permutation(num_pages - 1) + 1)[: case.batch * case.pages_per_row].astype(np.int32)
    table = table.reshape(case.batch, -1)
    used = np.zeros((num_pages, case.page_size), bool)
    for row, length in enumerate(stored):
        for slot in range(case.pages_per_row):
            used[table[row, slot], : max(0, length - slot * case.page_size)] = True
    scales = None
    if case.kv == "bfloat16":
        for pages in pools:
            pages[:] = np.where(used[:, None, :, None], pages, np.array(np.nan, dtype))
    else:
        # Values of very different size, as real caches have them; and rows of zeros.
        sizes = np.exp(np.array([0.3, 2])[:, None, None, None] * rng.standard_normal((2, *shape[:3])))
        sizes[:, table[0, 0], 0, 0] = 0
        (k_codes, k_scales), (v_codes, v_scales) = (
            quantise(x.astype(np.float32) * size[..., None].astype(np.float32), case.kv)
            for x, size in zip(pools, sizes, strict=True)
        )
        # A code may be anything where nothing is stored; all bits set is fp8's NaN.
        pools = [np.where(used[:, None, :, None], x.view(np.uint8), 0xFF).view(x.dtype) for x in (k_codes, v_codes)]
        k_scales, v_scales = (np.where(used[:, None, :], x, np.float32(np.nan)) for x in (k_scales, v_scales))
        scales = (k_scales, v_scales)
    k_pages, v_pages = pools
    for row, length in enumerate(case.lengths):  # what lies behind the last page is any page
        table[row, -(-length // case.page_size) :] = rng.integers(0, num_pages)
    heads = case.q_heads + 2 * case.kv_heads
    half = case.rotary_dim // 2
    angles = rng.uniform(-np.pi, np.pi, (case.batch, case.tokens, half))
    norms = tuple((1 + 0.3 * rng.standard_normal(case.head_dim)).astype(np.float32) for _ in range(2))
    return Arrays(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=table,
        lengths=np.array(case.lengths, np.int32),
        scales=scales,
        sinks=rng.standard_normal(case.q_heads).astype(np.float32) if case.sinks else None,
        q=(2 * rng.standard_normal((case.batch, case.tokens, case.q_heads, case.head_dim))).astype(dtype),
        qkv=rng.standard_normal((case.batch, case.tokens, heads * case.head_dim)).astype(dtype),
        rope=(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if half else None,
        norms=(norms[0], norms[1]) if case.norm else None,
    )


def quantise(x: np.ndarray, kv: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes as pages hold them and float32 scales of float32 rows, written out once more."""
    largest = {"int8": 127, "float8_e4m3fn": 448, "int4": 7}[kv]
    scales = np.maximum(np.abs(x).max(-1) * np.float32(1 / largest), np.float32(SMALLEST_SCALE))
    scaled = x * (np.float32(1) / scales)[..., None]
    if kv == "float8_e4m3fn":
        return scaled.astype(ml_dtypes.float8_e4m3fn), scales
    codes = np.rint(scaled).astype(np.int8)
    if kv == "int8":
        return codes, scales
    half = x.shape[-1] // 2
    low, high = (codes[..., :half] + 8).astype(np.uint8), (codes[..., half:] + 8).astype(np.uint8)
    return low | high << 4, scales


def elements(codes: np.ndarray, scales: np.ndarray | None, head_dim: int) -> np.ndarray:
    """float64 keys or values of a pool."""
    if scales is None:
        return codes.astype(np.float64)
    if codes.shape[-1] != head_dim:
        codes = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int8) - 8
    return codes.astype(np.float64) * scales[..., None].astype(np.float64)


def attention(case: Case, q: np.ndarray, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """float64 output and log-sum-exp, row by row, head by head."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for row, length in enumerate(case.lengths):
        pages = arrays.page_table[row, : -(-length // case.page_size)]
        keys, values = (
            elements(pool[pages], None if scales is None else scales[pages], case.head_dim)
            .transpose(1, 0, 2, 3)
            .reshape(case.kv_heads, -1, case.head_dim)[:, :length]
            for pool, scales in zip((arrays.k_pages, arrays.v_pages), arrays.scales or (None, None), strict=True)
        )
        for token in range(case.tokens):
            last = length - case.tokens + token
            first = 0 if case.window is None else max(0, last - case.window + 1)
            for head in range(case.q_heads):
                visible = slice(first, max(0, last + 1))
                logits = keys[head // case.group, visible] @ q[row, token, head].astype(np.float64) * case.scale
                if case.softcap is not None:
                    logits = case.softcap * np.tanh(logits / case.softcap)
                weights = np.exp(logits)
                total = weights.sum() + (0 if arrays.sinks is None else np.exp(np.float64(arrays.sinks[head])))
                if total > 0:
                    out[row, token, head] = weights @ values[head // case.group, visible] / total
                    lse[row, token, head] = np.log(total)
    return out, lse


def decode(case: Case, arrays: Arrays) -> tuple[np.ndarray, ...]:
    """float64 output of the decode op, and the pools (and scales) after it."""
    q, after = appended(case, arrays)
    out, _ = attention(case, q, after)
    return out.reshape(case.batch, case.tokens, -1), *after.pools


def appended(case: Case, arrays: Arrays) -> tuple[np.ndarray, Arrays]:
    """The new tokens' queries as they attend, and the arrays with their keys and values in the pools."""
    dtype = arrays.qkv.dtype
    heads = arrays.qkv.reshape(case.batch, case.tokens, -1, case.head_dim)
    q, k, v = np.split(heads, [case.q_heads, case.q_heads + case.kv_heads], axis=2)
    if arrays.norms is not None:
        q, k = (
            (x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS) * weight).astype(dtype)
            for x, weight in ((q.astype(np.float64), arrays.norms[0]), (k.astype(np.float64), arrays.norms[1]))
        )
    if arrays.rope is not None:
        q, k = _rotate(q, case, *arrays.rope), _rotate(k, case, *arrays.rope)
    new = [k, v]
    if arrays.scales is not None:
        (k, k_scale), (v, v_scale) = (quantise(x.astype(np.float32), case.kv) for x in new)
        new = [k, v, k_scale, v_scale]
    pools = [pool.copy() for pool in arrays.pools]
    for row, token, page, offset in new_places(case, arrays):
        for pool, x in zip(pools, new, strict=True):
            pool[page, :, offset] = x[row, token]
    k_pages, v_pages, *scales = pools
    return q, dataclasses.replace(arrays, k_pages=k_pages, v_pages=v_pages, scales=tuple(scales) or None)


def new_places(case: Case, arrays: Arrays) -> list[tuple[int, int, int, int]]:
    """(row, token, page, offset in the page) of the new tokens of rows that are not idle."""
    places = []
    for row, length in enumerate(case.lengths):
        for token in range(case.tokens if length else 0):
            slot, offset = divmod(length - case.tokens + token, case.page_size)
            places.append((row, token, int(arrays.page_table[row, slot]), offset))
    return places


def _rotate(x: np.ndarray, case: Case, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Each pair as a complex number."""
    half = case.rotary_dim // 2
    pairs = np.arange(2 * half).reshape((half, 2) if case.interleaved else (2, half))
    first, second = (pairs[:, 0], pairs[:, 1]) if case.interleaved else pairs
    turns = (cos + 1j * sin)[:, :, None]
    turned = (x[..., first].astype(np.float64) + 1j * x[..., second].astype(np.float64)) * turns
    out = x.copy()
    out[..., first], out[..., second] = turned.real.astype(x.dtype), turned.imag.astype(x.dtype)
    return out


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def simulate(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Runs `mosaic.attend` in NumPy; returns output and log-sum-exp."""
    plan = case.plan()
    out, lse = np.full(arrays.q.shape, np.nan, BF16), np.full(arrays.q.shape[:3], np.nan, np.float32)
    args = mosaic.Arguments(
        _bytes(arrays.q),
        _pools(arrays.pools),
        arrays.page_table.reshape(-1),
        arrays.lengths,
        outputs=Outputs(_bytes(out), lse.reshape(-1), arrays.sinks),
    )
    _run_grid(plan, plan.smem_bytes, lambda w, *indices: mosaic.attend(w, plan, args, *indices))
    return out, lse


def first_places(case: Case) -> np.ndarray:
    """Of the new tokens, -1 in idle rows."""
    return np.array([length - case.tokens if length else -1 for length in case.lengths], np.int32)


def simulate_decode(case: Case, arrays: Arrays, lse: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Runs `decode_mosaic.decode` in NumPy; returns output and the pools (and scales), which it wrote in copies.

    Fills `lse`, float32 [batch * tokens * q_heads], if it is given.
    """
    plan = case.decode_plan()
    out = np.full((case.batch, case.tokens, case.q_heads * case.head_dim), np.nan, BF16)
    pools = [pool.copy() for pool in arrays.pools]
    cos, sin = (None, None) if arrays.rope is None else [x.reshape(-1) for x in arrays.rope]
    q_norm, k_norm = arrays.norms or (None, None)
    args = decode_mosaic.Arguments(
        _bytes(arrays.qkv),
        _pools(pools),
        arrays.page_table.reshape(-1),
        first_places(case),
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        outputs=Outputs(_bytes(out), lse, arrays.sinks),
    )
    _run_grid(plan.attention, plan.smem_bytes, lambda w, *indices: decode_mosaic.decode(w, plan, args, *indices))
    return out, *pools


def lower_for_cuda(function: Any, *arguments: Any) -> str:
    """StableHLO for an H200, on a machine without one: Mosaic builds and verifies the kernel's MLIR on the way."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def _pools(pools: list[np.ndarray]) -> Pools:
    return Pools(*[_bytes(pool) for pool in pools[:2]], *[scales.reshape(-1) for scales in pools[2:]])


def _run_grid(plan: Plan, smem_bytes: int, program: Any) -> None:
    for row, kv_head, row_block in np.ndindex(plan.batch, plan.kv_heads, plan.row_blocks):

        def warp(w: SimulatedWarp, split: int, place: tuple[int, int, int] = (row, kv_head, row_block)) -> None:
            program(w, *[w.const(i, "i32") for i in (*place, split)])

        run_cluster(plan.splits, plan.warps, smem_bytes, warp)
