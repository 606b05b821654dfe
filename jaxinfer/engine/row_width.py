"""How wide the page table of a sequence that decodes alone may be for the fastest of its kernels."""

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from pallas_kernels.decoder_block import attention_block_refusal
from pallas_kernels.int4_matmul import Packed


def attention_block_width(params: Params, config: ModelConfig, dtype: jnp.dtype, page_size: int, widest: int) -> int:
    """Pages of the widest table, at most `widest`, with which the attention half of a layer is one kernel; 0: none.

    It holds a table in shared memory, so it takes none that is as wide as a long context. Of narrower ones than
    `widest` powers of two are tried. `dtype` is that of activations and of the cache.
    """
    qkv, o, rope = params.layers[0].qkv, params.layers[0].o, config.layers[0].rope
    if not isinstance(qkv, Packed) or not isinstance(o, Packed):
        return 0
    x = jax.ShapeDtypeStruct((1, 1, config.hidden_size), dtype)
    pages = jax.ShapeDtypeStruct((1, config.num_kv_heads, page_size, config.head_dim), dtype)
    sizes = {"num_q_heads": config.num_heads, "rotary_dim": 0 if rope is None else rope.rotary_dim}
    refusals: list[str | None] = []

    def ask(x: jax.Array, pages: jax.Array, table: jax.Array) -> None:
        refusals.append(attention_block_refusal(x, 0, qkv, o, pages, table, **sizes))

    width = widest
    while width:
        jax.eval_shape(ask, x, pages, jax.ShapeDtypeStruct((1, width), jnp.int32))
        if refusals[-1] is None:
            break
        width = 1 << (width - 1).bit_length() - 1 if width > 1 else 0
    return width
