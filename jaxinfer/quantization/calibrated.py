"""Quantises layer after layer by what each is given: only one layer's weights are in full precision at a time.

The calibration tokens run through the layers that are quantised already, so that each layer is fitted to the inputs it
will have. The evaluation tokens run through both, original and quantised, side by side: at the end their distributions
are compared, and the original model was never there as a whole.
"""

import functools
import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from checkpoints.progress import progress_bar
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams
from jaxinfer.layers.embedding import embed
from jaxinfer.layers.norm import rms_norm
from jaxinfer.packed_weights import DeviceWeight, HostWeight, device_layout
from jaxinfer.params import TOP, ParamSpec, Piece, has_own_head, layer_specs, linear_names, top_specs
from jaxinfer.quantization.calibration import FEW_TOKENS, Windows
from jaxinfer.quantization.checks import are_finite, check_tensors
from jaxinfer.quantization.folding import FIELDS, can_fold, fold, tie
from jaxinfer.quantization.fused import best_scales, names_of, quantize_fused
from jaxinfer.quantization.layer_pass import (
    InputMoments,
    input_moments,
    pass_through,
    representative,
    second_moments,
)
from jaxinfer.quantization.moments import values_of
from jaxinfer.quantization.plan import HEAD, Plan
from jaxinfer.quantization.quality import head_statistics, quality_of, row_batches
from jaxinfer.quantization.report import Quality, QuantizationReport, WeightError

log = logging.getLogger("jaxinfer")

type Batches = list[jax.Array]
"""Hidden states [rows, tokens, hidden] in float32, a few rows at a time."""


def check_request(config: ModelConfig, plan: Plan, windows: Windows, promote_above: object) -> None:
    """Raises ValueError for what `CalibratedQuantizer` cannot do, for those who have much to do before they make one.

    That is a plan that does not fit the model, no calibration tokens, and a `promote_above` that is no share.
    """
    plan.check(linear_names(config))
    if promote_above is not None and (
        isinstance(promote_above, bool) or not isinstance(promote_above, numbers.Real) or not float(promote_above) > 0
    ):
        raise ValueError(f"promote_above is {promote_above!r}; expected a share of the output, such as 0.01")
    if windows.calibration.size == 0:
        raise ValueError(f"{windows.source} has no tokens to calibrate with; give more text")


class CalibratedQuantizer:
    """Takes a model's pieces in order and gives them back quantised; afterwards, `report` tells what became of it.

    What the plan leaves alone has `dtype`. With `promote_above` a weight whose error (`WeightError.error`) is larger is
    quantised again with the next more exact precision, until it is not or has 16 bits; `plan` grows rules that say so.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        windows: Windows,
        dtype: jnp.dtype,
        *,
        promote_above: float | None = None,
    ) -> None:
        """Raises what `check_request` raises, and warns of a plan that is fitted to fewer tokens than `FEW_TOKENS`."""
        check_request(config, plan, windows, promote_above)
        if plan.needs_calibration and windows.calibration.size < FEW_TOKENS:
            log.warning(
                "%s: %d tokens to calibrate with; codes fitted to fewer than %d can be worse than rounded ones (int4): "
                "give more text",
                *(windows.source, windows.calibration.size, FEW_TOKENS),
            )
        self.plan = plan
        self._config, self._windows, self._dtype, self._promote_above = config, windows, dtype, promote_above
        self._errors: list[WeightError] = []
        self._quality: Quality | None = None

    def pieces(self, originals: Iterable[Piece], *, progress: bool = False) -> Iterator[Piece]:
        """Quantises the pieces of a model whose weights are arrays, layer by layer.

        Embedding, last norm and head come first, or last if the head is quantised: by what the layers make of text.
        """
        layers = self._config.num_layers
        with progress_bar(total=layers, unit="layer", desc=f"Quantising ({self.plan.name})", shown=progress) as bar:
            for index, (name, fields) in enumerate(originals):
                if name == TOP:
                    self.start(fields)
                    if not has_own_head(self.plan):
                        yield name, self._top
                    continue
                yield name, self.layer(index - 1, fields)
                bar.update()
            if has_own_head(self.plan):
                yield TOP, self.head()
            self.finish()

    def start(self, top: Mapping[str, Any]) -> None:
        """Looks up the tokens of all windows. Raises ValueError where the text cannot be run through the model."""
        self._top = dict(top)
        embedding = jnp.asarray(top["embed_tokens"])

        def looked_up(windows: np.ndarray) -> Batches:
            rows = [jnp.asarray(batch) for batch in row_batches(windows)]
            return [embed(tokens, embedding, self._config).astype(jnp.float32) for tokens in rows]

        self._inputs = looked_up(self._windows.calibration)
        self._evaluated = looked_up(self._windows.evaluation)
        self._originals = list(self._evaluated)
        self._original_head = self._head = jnp.asarray(top.get(HEAD, embedding))
        self._norm = jnp.asarray(top["norm"])
        if has_own_head(self.plan):
            self._check(self._original_head, top_specs(self._config, own_head=True)[HEAD])
        if self._originals or has_own_head(self.plan):  # else nothing here reads them
            self._check_finite("the last norm", [self._norm])
            self._check_finite("the head", [self._original_head], self._config.num_tokens)
        self._check_finite("the embedding", [*self._inputs, *self._originals])

    def layer(self, index: int, fields: Mapping[str, Any]) -> dict[str, DeviceWeight]:
        """Quantises layer `index`, whose weights are arrays; the result lies as this device's kernels read it.

        Raises ValueError for NaN and infinity in weights that are quantised, and in what the layer makes of the text.
        """
        config, same = self._config, representative(self._config, index)
        specs = layer_specs(config, index)
        original = LayerParams(**{field: jnp.asarray(value).astype(jnp.float32) for field, value in fields.items()})
        for field, spec in specs.items():
            if spec.is_linear:
                self._check(getattr(original, field), spec)
        moments = input_moments(original, self._inputs, config=config, index=same)
        self._check_finite(f"layer {index}", jax.tree.leaves(moments))
        scaled, moments = self._scale(original, moments, specs)
        made: dict[str, Any] = {}
        rounded: dict[str, Any] = {}
        for field, spec in specs.items():
            value = getattr(scaled, field)
            if spec.is_linear:
                packed = self._quantize(value, getattr(moments, field), spec)
                made[field], rounded[field] = device_layout(packed), values_of(packed)
            else:
                made[field] = value if spec.is_norm else value.astype(self._dtype)
                rounded[field] = made[field].astype(jnp.float32)
        self._originals = [pass_through(original, x, config=config, index=same) for x in self._originals]
        quantised = LayerParams(**rounded)
        self._evaluated = [pass_through(quantised, x, config=config, index=same) for x in self._evaluated]
        self._inputs = [pass_through(quantised, x, config=config, index=same) for x in self._inputs]
        self._check_finite(f"layer {index}", [*self._originals, *self._inputs])
        return made

    def head(self) -> dict[str, DeviceWeight]:
        """Quantises the head, after the layers; AWQ's scales go into the norm before it, which nothing else reads."""
        spec, weight = top_specs(self._config, own_head=True)[HEAD], self._original_head.astype(jnp.float32)
        states = [rms_norm(x, self._norm, self._config.norm_eps) for x in self._inputs]
        count = sum(math.prod(x.shape[:2]) for x in states)
        moments = functools.reduce(jnp.add, map(second_moments, states)) / count
        scales = best_scales(weight, moments, jnp.sqrt(jnp.diagonal(moments)), spec, self.plan)
        if scales is not None:
            weight, moments = weight * scales[None, :], moments / (scales[:, None] * scales[None, :])
            self._norm = self._norm / scales
        packed = self._quantize(weight, moments, spec)
        self._head = values_of(packed)
        return self._top | {"norm": self._norm, HEAD: device_layout(packed)}

    def finish(self) -> None:
        """Compares what was evaluated."""
        norm, eps = self._top["norm"], self._config.norm_eps
        heads = self._head.astype(jnp.float32), self._original_head.astype(jnp.float32)
        rows = zip(self._evaluated, self._originals, row_batches(self._windows.evaluation), strict=True)
        statistics = []
        for hidden, original, tokens in rows:
            normalised = rms_norm(hidden, self._norm, eps), rms_norm(original, norm, eps)
            statistics.append(head_statistics(*normalised, *heads, jnp.asarray(tokens), config=self._config))
        self._quality = quality_of(statistics) if statistics else None
        if self._quality is not None and not self._quality.is_finite:
            log.warning("%s: perplexity or KL is no finite number; the quality is not recorded", self._windows.source)
            self._quality = None

    def report(self) -> QuantizationReport:
        """What was done; after `finish`."""
        tokens = self._windows.calibration.size
        return QuantizationReport(self.plan, self._windows.source, tokens, tuple(self._errors), self._quality)

    def _check(self, weight: Float[Array, "out in"], spec: ParamSpec) -> None:
        names = names_of(spec)
        check_tensors(weight, names, spec.rows, [self.plan.precision(name) for name in names])

    def _check_finite(self, what: str, arrays: list[jax.Array], rows: int | None = None) -> None:
        if not are_finite(arrays, rows):
            raise ValueError(
                f"{self._windows.source}: {what} of the model holds or gives NaN or infinity, so nothing can be fitted "
                "or judged: the checkpoint is damaged; get it anew, or quantise without calibration"
            )

    def _scale(
        self, layer: LayerParams, moments: InputMoments, specs: dict[str, ParamSpec]
    ) -> tuple[LayerParams, InputMoments]:
        """Folds AWQ's scales into a layer, where they help."""
        for field in FIELDS:
            if can_fold(layer, field):
                own = getattr(moments, field)
                magnitudes = tie(jnp.sqrt(jnp.diagonal(own)), field, self._config)
                scales = best_scales(getattr(layer, field), own, magnitudes, specs[field], self.plan)
                if scales is not None:
                    layer, moments = fold(layer, moments, field, scales, self._config)
        return layer, moments

    def _quantize(
        self, weight: Float[Array, "out in"], moments: Float[Array, "in in"], spec: ParamSpec
    ) -> HostWeight | DeviceWeight:
        """A weight by its plan, promoted as long as it errs too much."""
        promoted: set[str] = set()
        while True:
            packed, errors = quantize_fused(weight, moments, spec, self.plan, self._dtype)
            limit = self._promote_above
            over = [name for name, error in errors.items() if limit is not None and error > limit]
            if not over:
                break
            promoted |= set(over)
            self.plan = self.plan.promote(over)
        for name in names_of(spec):
            if name in errors or name in promoted:
                precision = self.plan.precision(name)
                shown = "16 bits" if precision is None else str(precision)
                self._errors.append(WeightError(name, shown, errors.get(name, 0.0), name in promoted))
        return packed
