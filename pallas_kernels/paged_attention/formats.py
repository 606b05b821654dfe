"""How pages hold keys and values: as they are, or as codes with one float32 scale for each token and head.

A quantised pool [num_pages, kv_heads, page_size, width] has scales [num_pages, kv_heads, page_size] beside it; an
element is code * scale. Scales are float32: those of a page of 16 tokens are then one 64-byte burst of the memory, and
bfloat16 ones would take the same burst and round.

    int8            codes -127 .. 127, width head_dim
    float8_e4m3fn   codes up to 448, width head_dim
    int4            codes -7 .. 7, kept as code + 8 in uint8, width head_dim / 2: byte j has element j in its lower
                    half and element head_dim / 2 + j in its upper half
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros: positive, so that its logarithm and its reciprocal are finite."""


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """`largest` is the largest magnitude of a code, `bits` its size, `storage` the dtype of the pools."""

    name: str
    storage: jnp.dtype
    bits: int
    largest: float

    def width(self, head_dim: int) -> int:
        """Elements of a pool's last axis. ValueError for an odd head_dim that would share a byte with its neighbour."""
        if head_dim * self.bits % 8:
            raise ValueError(f"{self.name} keys and values need an even head_dim, not {head_dim}")
        return head_dim * self.bits // 8


FORMATS = {
    form.name: form
    for form in (
        KVFormat("int8", jnp.dtype(jnp.int8), 8, 127.0),
        KVFormat("float8_e4m3fn", jnp.dtype(jnp.float8_e4m3fn), 8, 448.0),
        KVFormat("int4", jnp.dtype(jnp.uint8), 4, 7.0),
    )
}


def format_of(storage: jnp.dtype) -> KVFormat | None:
    """The format that keeps its codes in pools of this dtype; None for pools that hold the elements themselves."""
    return next((form for form in FORMATS.values() if form.storage == jnp.dtype(storage)), None)


def quantise(
    x: Float[Array, "*rows head_dim"], form: KVFormat
) -> tuple[Shaped[Array, "*rows width"], Float32[Array, "*rows"]]:
    """Codes as a pool holds them, and scales: the largest magnitude of a row over the largest code.

    A row with NaN or an infinity gets such a scale, so that what is read from it is NaN and does not pass unseen.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    scales = jnp.maximum(largest * jnp.float32(1 / form.largest), jnp.float32(SMALLEST_SCALE))
    scaled = wide * (jnp.float32(1) / scales)[..., None]
    if form.name == "float8_e4m3fn":
        return scaled.astype(form.storage), scales
    codes = jnp.nan_to_num(jnp.round(scaled)).astype(jnp.int32)
    if form.name == "int8":
        return codes.astype(form.storage), scales
    low, high = jnp.split(codes + 8, 2, axis=-1)
    return (low + high * 16).astype(form.storage), scales


def unpack(codes: Shaped[Array, "*rows width"], dtype: jnp.dtype | type) -> Float[Array, "*rows head_dim"]:
    """The codes of a pool as numbers, without their scales: exact in bfloat16, float16 and float32."""
    form = format_of(codes.dtype)
    if form is None:
        raise ValueError(f"pages of {codes.dtype} hold no codes; formats: {', '.join(FORMATS)}")
    if form.name != "int4":
        return codes.astype(dtype)
    pairs = codes.astype(jnp.int32)
    return (jnp.concatenate([pairs % 16, pairs // 16], axis=-1) - 8).astype(dtype)


def dequantise(
    codes: Shaped[Array, "*rows width"], scales: Float32[Array, "*rows"]
) -> Float32[Array, "*rows head_dim"]:
    """code * scale in float32; the format is known by the codes' dtype."""
    return unpack(codes, jnp.float32) * scales[..., None]


def check_limits(window: int | None, softcap: float | None) -> None:
    """Refuses a window or a cap that no kernel can have."""
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"window is {window}; it needs at least 1 and less than 2^31, or None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it needs a positive number, or None for no cap")


def check_pools(
    op: str,
    dtype: jnp.dtype,
    head_dim: int,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> str:
    """What the pages hold: the name of a format, or of `dtype`, the queries'. ValueError for arrays that do not fit."""
    if k_pages.shape != v_pages.shape or k_pages.ndim != 4 or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"{op} takes k_pages and v_pages of one dtype and one shape [num_pages, kv_heads, page_size, head_dim], "
            f"not {k_pages.dtype}{k_pages.shape} and {v_pages.dtype}{v_pages.shape}"
        )
    if k_scales is None and v_scales is None:
        if format_of(k_pages.dtype) is not None:
            raise ValueError(f"pages of {k_pages.dtype} hold codes; give k_scales and v_scales")
        if k_pages.dtype != dtype:
            raise ValueError(
                f"the tokens are {dtype} and the pages {k_pages.dtype}; cast the tokens to the pages' dtype"
            )
        name, width = dtype.name, head_dim
    else:
        form = format_of(k_pages.dtype)
        if form is None:
            stores = ", ".join(f"{form.storage} ({form.name})" for form in FORMATS.values())
            raise ValueError(f"pages of {k_pages.dtype} take no scales; codes are {stores}")
        for scales in (k_scales, v_scales):
            if scales is None or scales.shape != k_pages.shape[:3] or scales.dtype != jnp.float32:
                got = None if scales is None else f"{scales.dtype}{scales.shape}"
                raise ValueError(f"k_scales and v_scales need float32{k_pages.shape[:3]}, one of them is {got}")
        name, width = form.name, form.width(head_dim)
    if k_pages.shape[3] != width:
        raise ValueError(
            f"the tokens have head_dim {head_dim}, for which pages of {name} are {width} wide, not {k_pages.shape[3]}"
        )
    return name
