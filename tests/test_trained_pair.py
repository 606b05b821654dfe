"""The pair that `benchmarks.train_pair` trained on a GPU, and that its training runs the model that inference runs."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pair_models import SHAPES, hugging_face_config, read_texts
from benchmarks.pair_training import next_logits, stacked, unstacked
from jaxinfer import steps
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.generation import generate
from jaxinfer.model import load
from jaxinfer.params import random_params
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.model_draft import ModelDraft
from jaxinfer.speculative.policy import FixedLength
from jaxinfer.speculative.speculation import Speculation

PAIR = pathlib.Path(__file__).parent / "fixtures" / "pair"


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


def test_the_distilled_draft_is_often_right_and_changes_nothing() -> None:
    """On text that neither was trained on. An untrained draft would be right once in a thousand times."""
    target, draft = (load(PAIR / name, dtype=jnp.float32, packed=False, progress=False) for name in ("target", "draft"))
    _, unseen = read_texts()
    prompts = [unseen[start : start + 120] for start in range(0, len(unseen) - 120, len(unseen) // 4)][:4]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = generate(target, prompts, params)
    speculation = Speculation(ModelDraft(draft, k=3), policy=FixedLength())
    drafted = generate(target, prompts, params, draft=speculation)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert speculation.report.acceptance_rate > 0.6  # 0.78
