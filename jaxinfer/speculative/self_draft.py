"""The target as its own draft: its layers in 4 bits, or its lower layers alone, on the target's own pages."""

import dataclasses
import logging
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LINEAR, LayerParams
from jaxinfer.layers.linear import Weight
from jaxinfer.model import Model
from jaxinfer.packed_weights import device_layout
from jaxinfer.speculative.compatibility import check_model
from jaxinfer.speculative.model_draft import ModelProposer
from jaxinfer.speculative.ngram import check_k
from jaxinfer.speculative.policy import is_length
from jaxinfer.speculative.proposer import KeepsNothing
from pallas_kernels.int4_matmul import PackedInt4, from_codes

log = logging.getLogger("jaxinfer")

GROUP_SIZE = 64


class SelfDraft(KeepsNothing):
    """Drafts with the target itself: cheaper weights, no second model, no second cache, no prefill of its own.

        draft = ji.SelfDraft(model, k=4)                              # all layers, in 4 bits
        draft = ji.SelfDraft(model, k=4, num_layers=12)               # the lower 12 of them, in 4 bits
        draft = ji.SelfDraft(model, k=4, int4=False, num_layers=12)   # the lower 12 as they are: no memory at all
        outputs = ji.generate(model, prompts, params, draft=draft)
        engine = ji.Engine(model, config, draft=draft)

    `int4` packs the layers' projections in 4 bits, rounded to the nearest of 16 values in groups of 64 inputs. The
    packed copy is made here and held beside the model: about 0.28 of a bfloat16 model's layers. A pass reads that
    much less where a kernel reads weights packed (a Hopper GPU); elsewhere they are unpacked first and nothing is won.
    `num_layers` uses the lower layers only, their output going straight to the head: cheaper still, and less often
    right, for layers that were not trained to be the last. Weights that are packed already stay as they are (a target
    of 4 bits wins nothing without `num_layers`, and a warning says so); embedding, head and norms are the target's own
    arrays.

    The output is the target's: each drafted token is verified by the target's own weights, whose keys and values
    replace those that the draft wrote. `k` is the most that a step drafts (1 to 15); the policy may draft fewer.
    """

    draws = True

    @typing.no_type_check  # it checks more, and its errors are the ones users must see
    def __init__(self, model: Model, k: int = 4, *, int4: bool = True, num_layers: int | None = None) -> None:
        """Raises ValueError for what is no model, for a k outside 1 to 15, for layers that do not exist, and for all of
        them without `int4`."""
        check_model(model, "SelfDraft: the target")
        check_k(k, "SelfDraft")
        if not isinstance(int4, bool):
            raise ValueError(f"SelfDraft: int4={int4!r}; expected True (layers packed in 4 bits) or False")
        total = model.config.num_layers
        if num_layers is not None and not (is_length(num_layers) and 1 <= num_layers <= total):
            raise ValueError(f"SelfDraft: num_layers={num_layers!r}; {model.name} has {total} layers")
        if not int4 and num_layers in (None, total):
            raise ValueError(
                "SelfDraft: without int4 and with all layers the draft costs what the target costs; "
                "give int4=True or fewer num_layers"
            )
        self.model, self.k = model, k
        self.int4, self.num_layers = int4, total if num_layers is None else num_layers
        layers = model.params.layers[: self.num_layers]
        weights = (getattr(layer, name) for layer in layers for name in LINEAR)
        if self.num_layers == total and not any(isinstance(weight, jax.Array) for weight in weights):
            log.warning(
                "SelfDraft: the layers of %s are packed already, so a drafted token costs what a plain step does; "
                "give fewer num_layers",
                model.name,
            )
        self.params = dataclasses.replace(model.params, layers=[packed(layer) if int4 else layer for layer in layers])

    def __repr__(self) -> str:
        return f"SelfDraft({self.model.name!r}, k={self.k}, int4={self.int4}, num_layers={self.num_layers})"

    @property
    def name(self) -> str:
        return f"self({'int4' if self.int4 else self.model.dtype}, {self.num_layers} layers)"

    def check(self, target: Model, longest: int) -> None:
        if target.params is not self.model.params:
            raise ValueError(
                f"the self-draft was made from {self.model.name}, which is not the target {target.name}; "
                "make it from the model that generates"
            )

    def proposer(self, target: Model) -> ModelProposer:
        return ModelProposer(self.config, target.config.vocab_size)

    @property
    def config(self) -> ModelConfig:
        return dataclasses.replace(self.model.config, layers=self.model.config.layers[: self.num_layers])


def packed(layer: LayerParams) -> LayerParams:
    """The layer with its projections in 4 bits."""
    return dataclasses.replace(layer, **{name: _packed_weight(getattr(layer, name)) for name in LINEAR})


def _packed_weight(weight: Weight) -> Weight:
    return device_layout(round_to_nearest(weight)) if isinstance(weight, jax.Array) else weight


@jax.jit
def round_to_nearest(weight: Float[Array, "out_features in_features"]) -> PackedInt4:
    """Asymmetric 4-bit codes: each group of inputs spans 0 and its own extremes; zero points are codes."""
    out_features, in_features = weight.shape
    groups = -(-in_features // GROUP_SIZE)
    wide = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, groups * GROUP_SIZE - in_features)))
    wide = wide.reshape(out_features, groups, GROUP_SIZE)
    low, high = jnp.minimum(wide.min(axis=2), 0.0), jnp.maximum(wide.max(axis=2), 0.0)
    scales = ((high - low) / 15.0).astype(jnp.bfloat16)
    divisor = jnp.maximum(scales.astype(jnp.float32), 1e-30)
    zeros = jnp.clip(jnp.round(-low / divisor), 0.0, 15.0)
    codes = jnp.clip(jnp.round(wide / divisor[:, :, None]) + zeros[:, :, None], 0.0, 15.0)
    codes = codes.reshape(out_features, -1)[:, :in_features].astype(jnp.uint8)
    return from_codes(codes, scales, zeros.astype(jnp.uint8), group_size=GROUP_SIZE)
