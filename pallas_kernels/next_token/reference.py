"""The next token op in plain JAX."""

import jax
import jax.numpy as jnp


def choose_next(
    logits: jax.Array,
    table: jax.Array,
    places: jax.Array,
    start: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_tokens: int,
) -> tuple[jax.Array, ...]:
    """As `mosaic.choose_next`."""
    token = jnp.argmax(logits[:num_tokens]).astype(jnp.int32)
    newest = places[1]
    idle = newest < 0
    row = jnp.minimum(jnp.where(idle, 0, newest + 1 - start[0]), cos.shape[0] - 1)
    x = jnp.where(idle, jnp.zeros((), table.dtype), table[token])
    following = jnp.where(idle, newest, newest + 1)
    return token[None], x, jnp.stack([following, following]), cos[row], sin[row]
