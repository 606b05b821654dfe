"""How `train_pair` trains: from a text or from a teacher's distributions, with dropout, keeping the best of a run.

Layers are stacked and scanned over: a program for 16 of them compiles in the time of one.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int32, UInt32

from benchmarks.pair_models import WINDOW
from jaxinfer import decoder
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.layers.embedding import embed
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.residual import settled
from jaxinfer.layers.rope import rope_tables
from jaxinfer.params import random_params
from jaxinfer.tokens import Tokens

CHECKS = 20
"""How often in a run the held-out loss is measured; the best state of these is kept."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a model learns from: the text, or, with a teacher, the teacher's distributions over it."""

    config: ModelConfig
    teacher: ModelConfig | None = None

    def loss(
        self,
        params: Params,
        teacher: Params | None,
        tokens: Int32[Array, "rows window"],
        key: UInt32[Array, "2"],
        dropout: Float[Array, ""],
    ) -> Float[Array, ""]:
        """Mean cross-entropy of each next token in nats, with the text's token or the teacher's distribution."""
        logits = next_logits(params, tokens[:, :-1], self.config, key, dropout)
        if self.teacher is None:
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        assert teacher is not None
        wanted = jax.nn.softmax(next_logits(teacher, tokens[:, :-1], self.teacher, key, jnp.float32(0.0)))
        return optax.softmax_cross_entropy(logits, wanted).mean()


def next_logits(
    params: Params,
    tokens: Int32[Array, "rows tokens"],
    config: ModelConfig,
    key: UInt32[Array, "2"],
    dropout: Float[Array, ""],
) -> Float[Array, "rows tokens vocab"]:
    """Logits after every token of a model whose layers are stacked, all of one kind; `dropout` is of what they add."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (rows, length))
    rope = config.layers[0].rope
    assert rope is not None
    tables = {rope: rope_tables(rope, positions, jnp.full(rows, length, jnp.int32))}
    place = Tokens(positions, None, tables, "first")

    def layer(x: jax.Array, scanned: tuple[decoder.LayerParams, jax.Array]):
        weights, own_key = scanned
        out, _ = decoder.decoder_layer(weights, x, None, 0, place, config)
        keep = jax.random.bernoulli(jax.random.wrap_key_data(own_key), 1.0 - dropout, x.shape)
        return x + jnp.where(keep, (settled(out) - x) / (1.0 - dropout), 0.0), None

    keys = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key), config.num_layers))
    x, _ = jax.lax.scan(layer, embed(tokens, params.embed_tokens, config), (params.layers[0], keys))
    return decoder.logits(params, rms_norm(x, params.norm, config.norm_eps), config)


def stacked(params: Params) -> Params:
    """The layers as one, with a first axis that counts them."""
    return dataclasses.replace(params, layers=[jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.layers)])


def unstacked(params: Params, num_layers: int) -> Params:
    (whole,) = params.layers
    layers = [jax.tree.map(lambda leaf, index=index: leaf[index], whole) for index in range(num_layers)]
    return dataclasses.replace(params, layers=layers)


class Trainer:
    """The compiled programs of a lesson: `num_steps` of AdamW with warm-up and a cosine."""

    def __init__(self, lesson: Lesson, batch: int, judged: int, num_steps: int, rate: float) -> None:
        """`batch` windows a step; `judged` windows are held out."""
        self.config, self.num_steps = lesson.config, num_steps
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, num_steps // 20), num_steps, rate / 20)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
        params: Any = jax.eval_shape(functools.partial(self._start, lesson.config))
        teacher = None if lesson.teacher is None else jax.eval_shape(functools.partial(self._start, lesson.teacher))
        state = jax.eval_shape(self._optimizer.init, params)
        key, number = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
        tokens, unseen = (jax.ShapeDtypeStruct((rows, WINDOW + 1), jnp.int32) for rows in (batch, judged))

        # optax's types know arrays and containers, not a dataclass that is a pytree: Any where it meets them.
        def update(params: Any, state: optax.OptState, teacher: Any, tokens: Any, key: Any, dropout: Any):
            _, gradients = jax.value_and_grad(lesson.loss)(params, teacher, tokens, key, dropout)
            updates, state = self._optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, teacher, tokens, key, number)
        self._update = lowered.compile()
        self._loss = jax.jit(lesson.loss).lower(params, teacher, unseen, key, number).compile()

    @staticmethod
    def _start(config: ModelConfig) -> Params:
        return stacked(random_params(config, jnp.float32, seed=0))

    def loss(self, params: Params, tokens: Int32[Array, "rows window"], teacher: Params | None = None) -> float:
        """Without dropout."""
        return float(self._loss(params, teacher, tokens, jnp.zeros(2, jnp.uint32), jnp.float32(0.0)))

    def train(
        self,
        name: str,
        batches: Iterator[np.ndarray],
        unseen: Int32[Array, "rows window"],
        *,
        dropout: float = 0.0,
        teacher: Params | None = None,
    ) -> tuple[Params, float]:
        """The best state on the way, and its loss on `unseen`; says how it goes. Raises ValueError if it diverges."""
        params: Any = self._start(self.config)
        state = self._optimizer.init(params)
        keys = np.random.default_rng(0).integers(0, 1 << 32, (self.num_steps, 2), np.uint32)
        best, least, at, shown = params, float("inf"), 0, []
        started = time.perf_counter()
        for index, key in enumerate(keys, 1):
            params, state = self._update(params, state, teacher, next(batches), key, np.float32(dropout))
            if index % max(1, self.num_steps // CHECKS) == 0 or index == self.num_steps:
                value = self.loss(params, unseen, teacher)
                shown.append(f"{value:.3f}")
                if value < least:
                    best, least, at = jax.tree.map(jnp.copy, params), value, index
        seconds = time.perf_counter() - started
        print(
            f"{name}, dropout {dropout}: {self.num_steps} steps in {seconds:.1f} s, loss on unseen text "
            f"{' '.join(shown)}; best after {at}",
            flush=True,
        )
        if least == float("inf"):
            raise ValueError(f"{name}: the loss is not finite from the first check on; lower --rate")
        return best, least


def windows(ids: np.ndarray, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Random windows of a text, int32 [batch, WINDOW + 1], without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(ids) - WINDOW, batch)
        yield ids[starts[:, None] + np.arange(WINDOW + 1)[None, :]]
