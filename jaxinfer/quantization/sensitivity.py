"""What each weight's precision costs: one weight at a time is quantised, and the rest of the model runs on.

    found = ji.sensitivity(model, "support.jsonl")
    found.propose("int4").save("plan.toml")     # the plan of least loss in the room of int4
    ji.quantize(model, "plan.toml")

Two losses are measured for every weight and candidate precision, on calibration text: the error of the weight's own
outputs, E|D x|^2 / E|W x|^2 with D what rounding changes of W, and the KL divergence of the model's next-token
distributions from the original's. The second is what counts: an output may be wrong where it hardly matters.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from checkpoints.progress import is_watched, progress_bar
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams
from jaxinfer.layers.embedding import embed, head
from jaxinfer.layers.norm import rms_norm
from jaxinfer.model import Model
from jaxinfer.params import layer_specs, top_specs
from jaxinfer.planning.weights import codes_of, num_bytes
from jaxinfer.quantization.api import CalibrationText, windows_for
from jaxinfer.quantization.checks import check_tensors
from jaxinfer.quantization.layer_pass import (
    PRECISION,
    UNTUNED,
    input_moments,
    pass_through,
    representative,
    second_moments,
)
from jaxinfer.quantization.moments import output_errors, share_of_output, values_of
from jaxinfer.quantization.plan import HEAD, Precision
from jaxinfer.quantization.quality import head_of, row_batches
from jaxinfer.quantization.quantizer import quantize_weight
from jaxinfer.quantization.sensitivity_table import Sensitivity

CANDIDATES = (Precision(4, 128), Precision(4, 64), Precision(4, 32), Precision(8))
"""By default. Codes of 2 and 3 bits take the room of 4, so a budget gains nothing by them."""

MOST_TOKENS = 4096
POSITIONS_AT_ONCE = 256
"""Positions whose logits, two rows of the vocabulary each, are in memory together."""

type Batches = list[jax.Array]
"""Hidden states [rows, tokens, hidden] in float32, a few rows at a time."""


def sensitivity(
    model: Model,
    calibration: CalibrationText | None = None,
    *,
    precisions: Sequence[Precision] = CANDIDATES,
    measure_head: bool = False,
    max_tokens: int = MOST_TOKENS,
    quick: bool = False,
    progress: bool | None = None,
) -> Sensitivity:
    """Measures every projection of the layers, and with `measure_head` the head, in every one of `precisions`.

    `calibration` is as for `jaxinfer.quantize`; at most `max_tokens` tokens of it are used. Each weight and precision
    takes a pass through the layers above, half a forward pass of all tokens on the average, and the head. Precisions
    may use every method but "awq", whose scales concern several weights at once; "gptq" is fitted to the original's
    inputs.

    `quick` runs the layers above only for each weight's coarsest precision. The KL divergence of the others is that
    one, times the ratio of their output errors: both grow with the square of what rounding changes.

    Raises ValueError for a model that is packed already, for no text, for precisions that cannot be measured, for
    `max_tokens` below 1, and for NaN and infinity in weights or in the original's logits.
    """
    table = unmeasured(model, precisions, measure_head=measure_head)
    _check(model, max_tokens)
    windows = windows_for(calibration, model.tokenizer, model.config, model.name).calibration
    windows = windows[: max(1, max_tokens // max(1, windows.shape[1])), :max_tokens]
    if windows.size == 0:
        raise ValueError("there are no tokens to calibrate with; give more text")
    _check_weights(model, table.precisions, measure_head)
    progress = is_watched() if progress is None else progress
    total = _steps(table.names, model.config, 1 if quick else len(table.precisions))
    options = {"unit": "layer", "desc": f"Measuring {len(table.names)} weights", "leave": False}
    with progress_bar(total=total, shown=progress, **options) as bar:
        measured = list(_Measurement(model, windows, table.precisions, quick, bar.update).weights(measure_head))
    assert tuple(one.name for one in measured) == table.names
    return dataclasses.replace(
        table,
        output_errors=np.array([one.output_errors for one in measured]),
        divergences=np.array([one.divergences for one in measured]),
        num_tokens=int(windows.size),
    )


def _steps(names: Sequence[str], config: ModelConfig, passes: int) -> int:
    """What measuring takes, in passes of all tokens through a layer: once through the original, and `passes` times
    through a weight's layer, those above and the head."""
    indices = [int(name.split(".")[1]) for name in names if name != HEAD]
    upper = sum(config.num_layers - index for index in indices)
    return config.num_layers + passes * (upper + len(names) * _head_steps(config))


def _head_steps(config: ModelConfig) -> int:
    """How many layers have about as many weights as the head twice, for the changed states and the original's."""
    layer = [spec for spec in layer_specs(config, 0).values() if spec.is_linear]
    weights = sum(sum(spec.rows) * (spec.columns or 0) for spec in layer)
    return max(1, round(2 * config.vocab_size * config.hidden_size / weights))


def unmeasured(
    model: Model, precisions: Sequence[Precision] = CANDIDATES, *, measure_head: bool = False
) -> Sensitivity:
    """The table of `sensitivity` before it measures: names and sizes; no tokens, and all losses are 0.

    Its `propose` refuses what that of the measured table will refuse, without the wait. Raises ValueError for
    precisions that cannot be measured.
    """
    precisions = tuple(dict.fromkeys(precisions))
    _check_precisions(precisions)
    names, shapes = [], []
    specs = [spec for index in range(model.config.num_layers) for spec in layer_specs(model.config, index).values()]
    if measure_head:
        specs.append(top_specs(model.config, own_head=True)[HEAD])
    for spec in specs:
        if spec.is_linear and spec.columns is not None:
            names += [name.removesuffix(".weight") for name in spec.sources]
            shapes += [(rows, spec.columns) for rows in spec.rows]
    originals = np.array([2 * rows * columns for rows, columns in shapes], np.int64)
    if measure_head and model.params.lm_head is None:
        originals[-1] = 0  # a tied head is no weight of its own until it is quantised
    losses = np.zeros((len(names), len(precisions)))
    return Sensitivity(
        names=tuple(names),
        precisions=precisions,
        output_errors=losses,
        divergences=losses,
        sizes=np.array([[num_bytes(codes_of(shape, p)) for p in precisions] for shape in shapes], np.int64),
        original_sizes=originals,
        num_tokens=0,
        model=model.name,
    )


@dataclasses.dataclass
class _Measured:
    """One weight, and an entry for each precision."""

    name: str
    output_errors: list[float] = dataclasses.field(default_factory=list)
    divergences: list[float] = dataclasses.field(default_factory=list)


class _Measurement:
    """The original's hidden states before every layer, from which each change runs on.

    `passed` is called with what has been done of `_steps`.
    """

    def __init__(
        self,
        model: Model,
        windows: np.ndarray,
        precisions: Sequence[Precision],
        quick: bool,
        passed: Callable[[int], object],
    ) -> None:
        self._done, self._head_steps = passed, _head_steps(model.config)
        self._config, self._params, self._precisions, self._quick = model.config, model.params, precisions, quick
        self._num_tokens = windows.size
        tokens = [jnp.asarray(batch) for batch in row_batches(windows)]
        embedded = [embed(batch, model.params.embed_tokens, model.config).astype(jnp.float32) for batch in tokens]
        self._states: list[Batches] = [embedded]
        for index in range(model.config.num_layers):
            self._states.append(self._passed(self._states[-1], index, index + 1))
        self._head = values_of(head_of(model.params))
        self._original = self._normalised(self._states[-1])
        if not math.isfinite(self._diverged(self._original, self._head)):  # from itself: 0 of finite logits, else NaN
            raise ValueError(
                f"{model.name}: its logits on this text are not finite, so nothing can be compared with them: the "
                "checkpoint is damaged, or its numbers are beyond float32"
            )

    def weights(self, measure_head: bool) -> Iterator[_Measured]:
        for index in range(self._config.num_layers):
            yield from self._layer(index)
        if measure_head:
            rows = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in self._original])
            moments = second_moments(rows) / rows.shape[0]
            found = _Measured(HEAD)
            self._fill(found, self._head, moments, lambda values: self._divergence(self._original, values))
            yield found

    def _layer(self, index: int) -> Iterator[_Measured]:
        config, same = self._config, representative(self._config, index)
        layer = _float32(self._params.layers[index])
        moments = input_moments(layer, self._states[index], config=config, index=same)
        for field, spec in layer_specs(config, index).items():
            if not spec.is_linear:
                continue
            whole, inputs = getattr(layer, field), getattr(moments, field)
            starts = [0, *itertools.accumulate(spec.rows)]
            for name, (start, stop) in zip(spec.sources, itertools.pairwise(starts), strict=True):
                weight = whole[start:stop]

                def diverges(values: jax.Array, field: str = field, rows: slice = slice(start, stop)) -> float:
                    changed = dataclasses.replace(layer, **{field: getattr(layer, field).at[rows].set(values)})
                    x = self._through_layer(changed, self._states[index], same)
                    last = self._normalised(self._passed(x, index + 1, config.num_layers))
                    return self._divergence(last, self._head)

                found = _Measured(name.removesuffix(".weight"))
                self._fill(found, weight, inputs, diverges)
                yield found

    def _fill(
        self,
        found: _Measured,
        weight: Float[Array, "out in"],
        moments: Float[Array, "in in"],
        diverges: Callable[[jax.Array], float],
    ) -> None:
        """Quantises a weight in every precision; `diverges` tells what its new values do to the model."""
        outputs = float(jnp.sum(output_errors(weight, moments)))
        rounded = []
        for precision in self._precisions:
            rounded.append(values_of(quantize_weight(weight, precision, moments)))
            added = float(jnp.sum(output_errors(rounded[-1] - weight, moments)))
            found.output_errors.append(share_of_output(added, outputs, found.name))
        if not self._quick:
            found.divergences += [diverges(values) for values in rounded]
            return
        errors = found.output_errors
        worst = int(np.argmax(errors))
        divergence = diverges(rounded[worst])
        found.divergences += [divergence * error / errors[worst] if errors[worst] else 0.0 for error in errors]

    def _passed(self, x: Batches, first: int, last: int) -> Batches:
        """The states after the original layers `first` to `last` - 1."""
        for index in range(first, last):
            layer, same = _float32(self._params.layers[index]), representative(self._config, index)
            x = self._through_layer(layer, x, same)
        return x

    def _through_layer(self, layer: LayerParams, x: Batches, index: int) -> Batches:
        # Waited for: the bar tells the time that is left.
        x = jax.block_until_ready([pass_through(layer, batch, config=self._config, index=index) for batch in x])
        self._done(1)
        return x

    def _normalised(self, x: Batches) -> Batches:
        return [rms_norm(batch, self._params.norm, self._config.norm_eps) for batch in x]

    def _divergence(self, hidden: Batches, head_weight: Float[Array, "vocab hidden"]) -> float:
        """KL divergence from the original, mean over all positions. Raises ValueError where logits are not finite."""
        divergence = self._diverged(hidden, head_weight)
        if not math.isfinite(divergence):
            raise ValueError("a quantised weight makes logits that are not finite; leave out precisions of few bits")
        self._done(self._head_steps)
        return max(0.0, divergence)

    def _diverged(self, hidden: Batches, head_weight: Float[Array, "vocab hidden"]) -> float:
        """`_divergence` as it is computed: below 0 by rounding, and NaN where logits are not finite."""
        parts = [
            summed_divergence(changed, original, head_weight, self._head, config=self._config)
            for changed, original in zip(hidden, self._original, strict=True)
        ]
        return sum(float(part) for part in parts) / self._num_tokens


@functools.partial(jax.jit, static_argnames="config", compiler_options=UNTUNED)
def summed_divergence(
    hidden: Float[Array, "rows tokens hidden"],
    original_hidden: Float[Array, "rows tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    original_head: Float[Array, "vocab hidden"],
    *,
    config: ModelConfig,
) -> Float[Array, ""]:
    """Sum over positions of the KL divergence, in nats, of next-token distributions from the original's."""
    count = hidden.shape[0] * hidden.shape[1]
    missing = -count % POSITIONS_AT_ONCE

    def chunks(states: jax.Array) -> jax.Array:
        # Where zeros fill up, all logits are zeros and nothing diverges.
        flat = jnp.pad(states.reshape(count, -1), ((0, missing), (0, 0)))
        return flat.reshape(-1, POSITIONS_AT_ONCE, flat.shape[1])

    def one(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, original_rows = chunk
        with jax.default_matmul_precision(PRECISION):
            logprobs = jax.nn.log_softmax(head(rows, head_weight, config)[:, : config.num_tokens])
            original = jax.nn.log_softmax(head(original_rows, original_head, config)[:, : config.num_tokens])
        return jnp.sum(jnp.exp(original) * (original - logprobs))

    return jnp.sum(jax.lax.map(one, (chunks(hidden), chunks(original_hidden))))


def _float32(layer: LayerParams) -> LayerParams:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)


def _check_precisions(precisions: Sequence[Precision]) -> None:
    if not precisions:
        raise ValueError("precisions is empty; give at least one candidate, such as Precision(4, 64)")
    for precision in precisions:
        if precision.bits == 16 or precision.method == "awq":
            why = "quantises nothing" if precision.bits == 16 else "scales several weights at once"
            raise ValueError(f"{precision} {why} and cannot be measured for one weight; leave it out")


def _check(model: Model, max_tokens: int) -> None:
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens!r}: expected a whole number from 1, such as {MOST_TOKENS}")
    for index, layer in enumerate(model.params.layers):
        for field, spec in layer_specs(model.config, index).items():
            if spec.is_linear and not isinstance(getattr(layer, field), jax.Array):
                raise ValueError(f"layers.{index}.{field} is packed already; load the original with packed=False")


def _check_weights(model: Model, precisions: Sequence[Precision], measure_head: bool) -> None:
    for index, layer in enumerate(model.params.layers):
        for field, spec in layer_specs(model.config, index).items():
            if spec.is_linear:
                for precision in precisions:
                    check_tensors(getattr(layer, field), spec.sources, spec.rows, [precision] * len(spec.sources))
    if measure_head:
        weight = values_of(head_of(model.params))
        for precision in precisions:
            check_tensors(weight, [HEAD], [len(weight)], [precision])
