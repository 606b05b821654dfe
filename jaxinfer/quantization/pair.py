"""A draft quantised for its target: calibrated on what the target writes, judged by how far the two agree."""

import dataclasses
import numbers
import os
import pathlib
import typing

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from checkpoints.progress import is_watched, progress_bar
from jaxinfer.config import ModelConfig
from jaxinfer.generation import stream
from jaxinfer.model import Model, load, weights_dtype_for
from jaxinfer.quantization.api import CalibrationText, dense_pieces, quantize, windows_for
from jaxinfer.quantization.calibrated import check_request
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.quantization.quality import compared, joined
from jaxinfer.quantization.report import Agreement, PairReport, QuantizationReport
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.source import open_source
from jaxinfer.speculative.compatibility import WithTokens, check_model, check_tokens
from jaxinfer.store.create import STORE_DTYPE, save
from jaxinfer.store.unfinished import check_store_free
from jaxinfer.tokenization import Tokenizer

PROMPT_TOKENS = 32
"""Of each window, what the target continues."""


@typing.no_type_check  # it checks more, and its errors are the ones users must see
def quantize_draft(
    draft: Model,
    target: Model,
    plan: Plan | str | os.PathLike[str],
    *,
    calibration: CalibrationText | None = None,
    promote_above: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Model:
    """Quantises a draft on texts that its target has written, which are those that it will have to guess.

    The target, as it will serve (quantise it first), continues the beginning of every window of `calibration` (as for
    `jaxinfer.quantize`) by sampling at temperature 1 with `seed`, from 0 to 2**64 - 1. The new draft's
    `quantization.pair` has the KL divergence of its next-token distributions from the target's, and the share of
    drafted tokens that sampling would accept, before and after, on continuations of text that was kept apart.

    Raises ValueError for a draft that is packed already, for tokens that differ, for a seed out of range, and what
    `quantize` raises: all before the target writes.
    """
    check_model(draft, "quantize_draft: the draft")
    check_model(target, "quantize_draft: the target")
    plan = resolve(plan, "plan=")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to 2**64 - 1")
    seed = int(seed)  # NumPy's would overflow below
    dense_pieces(draft)  # for its errors
    windows = _checked(draft, target, plan, calibration, promote_above)
    progress = is_watched() if progress is None else progress
    written = Windows(
        continued(target, windows.calibration, seed, progress=progress),
        continued(target, windows.evaluation, seed + len(windows.calibration), progress=progress),
        f"what {target.name} writes after {windows.source}",
    )
    before = agreement(draft, target, written.evaluation, progress=progress)
    made = quantize(draft, plan, calibration=written, promote_above=promote_above, progress=progress)
    assert made.quantization is not None
    pair = PairReport(target.name, before, agreement(made, target, written.evaluation, progress=progress))
    return dataclasses.replace(made, quantization=dataclasses.replace(made.quantization, pair=pair))


def _checked(
    draft: WithTokens,
    target: WithTokens,
    plan: Plan,
    calibration: CalibrationText | None,
    promote_above: object,
) -> Windows:
    """The windows that the target will continue. Raises ValueError for all that can be told without the weights."""
    check_tokens(target, draft)
    shorter = min(target.config, draft.config, key=lambda config: config.max_position_embeddings)
    windows = windows_for(calibration, target.tokenizer, shorter, target.name)
    check_request(draft.config, plan, windows, promote_above)
    return windows


@dataclasses.dataclass(frozen=True)
class _Unread:
    """What is known of a model before its weights are read."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None


def _unread(path_or_name: str | os.PathLike[str], progress: bool) -> _Unread:
    with open_source(path_or_name, progress=progress) as source:
        return _Unread(os.fspath(path_or_name), source.config, source.tokenizer)


def write_draft(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    calibration: CalibrationText | None = None,
    promote_above: float | None = None,
    dtype: jnp.dtype | type | str | None = None,
    progress: bool | None = None,
) -> QuantizationReport | None:
    """`quantize_draft` of a checkpoint into a store, for a target of another. Both fit the device at once.

    What is not packed in the store is bfloat16, unless `dtype` is another. Raises FileExistsError for an `out` that
    exists, and what `load` and `quantize_draft` raise, before any weight is read where it can be told.
    """
    check_store_free(out)
    dtype = weights_dtype_for(STORE_DTYPE if dtype is None else dtype)
    progress = is_watched() if progress is None else progress
    windows = _checked(_unread(draft, progress), _unread(target, progress), plan, calibration, promote_above)
    large = load(target, progress=progress)
    small = load(draft, dtype=dtype, packed=False, progress=progress)
    options = {"calibration": windows, "promote_above": promote_above, "progress": progress}
    made = quantize_draft(small, large, plan, **options)
    save(made, out)
    return made.quantization


def continued(
    model: Model, windows: Int32[np.ndarray, "rows tokens"], seed: int, *, progress: bool = False
) -> Int32[np.ndarray, "rows tokens"]:
    """The windows with all but their first tokens written by the model. Rows have seeds that follow one another."""
    rows, length = windows.shape
    kept = min(PROMPT_TOKENS, max(1, length // 2))
    if not rows or kept == length:
        return windows
    options = {"max_tokens": length - kept, "temperature": 1.0, "ignore_eos": True}
    params = [SamplingParams(seed=(seed + row) % 2**64, **options) for row in range(rows)]
    written = windows[:, :kept].tolist()
    deltas = stream(model, windows[:, :kept].tolist(), params)
    total, name = rows * (length - kept), pathlib.Path(model.name).name
    with progress_bar(total=total, unit="token", desc=f"{name} writes", shown=progress, leave=False) as bar:
        for delta in deltas:
            written[delta.prompt_index].extend(delta.token_ids)
            bar.update(len(delta.token_ids))
    return np.array(written, np.int32)


def agreement(
    draft: Model, target: Model, windows: Int32[np.ndarray, "rows tokens"], *, progress: bool = False
) -> Agreement | None:
    """How far two models of the same tokens agree on rows of token ids; None on none."""
    statistics = compared(draft, target, windows, progress=progress)
    if not statistics:
        return None
    _, _, divergence, _, shared = joined(statistics)
    return Agreement.from_positions(divergence, shared)
