"""Training for `benchmarks.train_pair` runs the model that inference runs."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pair_models import SHAPES, hugging_face_config
from benchmarks.pair_training import next_logits, stacked, unstacked
from jaxinfer import steps
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.params import random_params


def test_stacked_layers_are_the_decoder_and_dropout_is_of_what_layers_add() -> None:
    config = from_hugging_face(hugging_face_config(SHAPES["draft"] | {"num_hidden_layers": 2}))
    params = random_params(config, jnp.float32, seed=0)
    whole = stacked(params)
    assert jax.tree.all(jax.tree.map(np.array_equal, unstacked(whole, 2), params))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 64)), jnp.int32)
    expected = steps.full_logits(params, tokens, jnp.full(2, 64, jnp.int32), config=config)
    forward = jax.jit(next_logits, static_argnames="config")
    key = jnp.zeros(2, jnp.uint32)
    kept = forward(whole, tokens, config=config, key=key, dropout=jnp.float32(0.0))
    np.testing.assert_allclose(kept, expected, atol=1e-5)
    # Without what the layers add, a token's logits depend on itself alone.
    alone = forward(whole, jnp.full((2, 64), 7, jnp.int32), config=config, key=key, dropout=jnp.float32(1.0 - 1e-6))
    np.testing.assert_allclose(alone, jnp.broadcast_to(alone[:1, :1], alone.shape), atol=1e-5)
