"""Checks of the decode op's kernel against its reference on the same device, before it is timed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_workload import Shape
from pallas_kernels.paged_attention import decode_mosaic, decode_reference
from pallas_kernels.paged_attention.formats import FORMATS, quantise


@dataclasses.dataclass(frozen=True)
class Check:
    positions: tuple[int, ...]
    shape: Shape
    norm: bool
    interleaved: bool
    rotary_dim: int
    window: int | None = None


CHECKS = [
    Check((-1, 0, 15, 16, 1000, 2047), Shape(6, 2048), True, False, 128),
    Check((1500, 7, -1, 255), Shape(4, 2048, q_heads=9, kv_heads=3, head_dim=64), False, False, 64),
    Check((100, 2047), Shape(2, 2048, q_heads=32, kv_heads=2), False, True, 64, window=500),
    Check((-1, 0, 15, 16, 1000, 2047), Shape(6, 2048, kv="int8"), True, False, 128),
    Check((-1, 0, 15, 16, 1000, 2047), Shape(6, 2048, kv="float8_e4m3fn"), True, False, 128),
    Check((1500, 7, -1, 255), Shape(4, 2048, kv="int4"), True, False, 128, window=500),
    Check((-1, 0, 13, 16, 1000, 2043), Shape(6, 2048, tokens=5), True, False, 128),
    Check((1000,), Shape(1, 2048, tokens=5, kv="int8"), True, False, 128, window=500),
    Check((-1, 2032, 15, 0), Shape(4, 2048, tokens=16, q_heads=16), False, False, 128),
    Check(tuple(range(-1, 511, 5)), Shape(103, 512), False, False, 128),
]


def check(case: Check) -> None:
    """The kernel against the reference through XLA on the same device: outputs, pools, the same bits three times."""
    shape = case.shape
    rng = np.random.default_rng(0)
    form = FORMATS.get(shape.kv)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32)).astype(jnp.bfloat16)

    pool = (shape.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
    pools = [normal(*pool), normal(*pool)]
    if form is None:
        pools = [x.at[0].set(jnp.nan) for x in pools]
    else:
        (k_codes, k_scales), (v_codes, v_scales) = (quantise(x, form) for x in pools)
        pools = [k_codes, v_codes, *(scales.at[0].set(jnp.nan) for scales in (k_scales, v_scales))]
    table = rng.permutation(shape.num_pages - 1).astype(np.int32).reshape(shape.batch, -1) + 1
    positions = np.array(case.positions, np.int32)
    for row, position in enumerate(positions):
        table[row, (position + shape.tokens - 1) // shape.page_size + 1 :] = 0
    angles = rng.uniform(-3, 3, (shape.batch, shape.tokens, case.rotary_dim // 2)).astype(np.float32)
    rope = (jnp.cos(angles), jnp.sin(angles))
    norms = (jnp.full(shape.head_dim, 0.9), jnp.full(shape.head_dim, 1.1)) if case.norm else None
    qkv = normal(shape.batch, shape.tokens, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim)
    rows = (jnp.asarray(table), jnp.asarray(positions), rope, norms, None)
    arrays = (qkv, pools[0], pools[1], *rows, tuple(pools[2:]) or None)
    plan = decode_mosaic.DecodePlan(
        shape.plan(window=case.window), case.rotary_dim, case.interleaved, 1e-6 if case.norm else None
    )
    run = jax.jit(functools.partial(decode_mosaic.decode_attention, plan=plan))
    runs = [[np.asarray(x) for x in run(*arrays)] for _ in range(3)]
    options = {"num_q_heads": shape.q_heads, "scale": shape.head_dim**-0.5, "interleaved": case.interleaved}
    options |= {"head_dim": shape.head_dim, "norm_eps": 1e-6, "window": case.window, "softcap": None}
    reference = functools.partial(decode_reference.decode_attention, **options)
    # Without this XLA drops the rounding between norm and rotation, and a quarter of the keys differ in their last bit.
    want = jax.jit(reference, compiler_options={"xla_allow_excess_precision": False})(*arrays)
    out, want_out = (np.asarray(x[0]).astype(np.float64) for x in (runs[0], want))
    error = float(np.linalg.norm(out - want_out) / np.linalg.norm(want_out))
    # XLA may contract a product and a sum otherwise, and a key then rounds to its neighbour; a scale in its last bit.
    differing = [int((bits(got) != bits(np.asarray(x))).sum()) for got, x in zip(runs[0][1:], want[1:], strict=True)]
    same_bits = all(
        np.array_equal(bits(x), bits(first)) for again in runs[1:] for x, first in zip(again, runs[0], strict=True)
    )
    limits = [40, 0] if form is None else [80, 8, 40, 40]
    limits = [limit * shape.tokens for limit in limits]
    ok = error < 6e-3 and same_bits and all(a <= b for a, b in zip(differing, limits, strict=True))
    print(
        f"check {case}: {'ok' if ok else 'WRONG'}: error {error:.2e}, same bits {same_bits}, elements of pools and "
        f"scales that differ from the reference's {differing}, allowed {limits}",
        flush=True,
    )
    if not ok:
        raise AssertionError("the kernel disagrees with its reference")


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")
