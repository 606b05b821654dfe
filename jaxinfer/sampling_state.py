"""What the sampler needs to know of each row: arrays built on the host, carried through the decode loop."""

import dataclasses
import secrets
import typing
from collections.abc import Iterable, Sequence

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxinfer.sampling_params import SamplingParams

_SMALLEST_TOP_P = 1e-30  # smaller ones are denormal or zero in float32, and keep one token all the same


@dataclasses.dataclass(frozen=True)
class SamplerVariant:
    """Which parts of the sampler a program contains; static under jit, so a batch pays for its needs only.

    A wider variant gives the same tokens. `a | b` serves both batches: an engine that unites with what it has
    compiled already trades a little work for fewer compilations.
    """

    num_tokens: int
    """Ids below this may be drawn; `ModelConfig.num_tokens`."""
    greedy: bool = True
    """Every row takes its most probable token: no temperature, no filters, no noise."""
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    logit_bias: bool = False
    min_tokens: bool = False
    num_logprobs: int | None = None
    """Most probable tokens to report; None reports nothing, not even the sampled token's own score."""

    @classmethod
    def required(cls, params: Iterable[SamplingParams], num_tokens: int) -> "SamplerVariant":
        """The narrowest variant that serves a batch."""
        variant = cls(num_tokens)
        for row in params:
            drawn = not row.greedy
            variant |= cls(
                num_tokens,
                greedy=row.greedy,
                top_k=drawn and 0 < row.top_k < num_tokens,
                top_p=drawn and row.top_p < 1.0,
                min_p=drawn and row.min_p > 0.0,
                penalties=(row.presence_penalty, row.frequency_penalty, row.repetition_penalty) != (0, 0, 1),
                logit_bias=bool(row.logit_bias),
                min_tokens=row.min_tokens > 0,
                num_logprobs=row.logprobs,
            )
        return variant

    def __or__(self, other: "SamplerVariant") -> "SamplerVariant":
        if self.num_tokens != other.num_tokens:
            raise ValueError(
                f"sampler variants for {self.num_tokens} and {other.num_tokens} tokens; "
                "only variants of one model unite"
            )
        counts = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
        return SamplerVariant(
            self.num_tokens,
            greedy=self.greedy and other.greedy,
            top_k=self.top_k or other.top_k,
            top_p=self.top_p or other.top_p,
            min_p=self.min_p or other.min_p,
            penalties=self.penalties or other.penalties,
            logit_bias=self.logit_bias or other.logit_bias,
            min_tokens=self.min_tokens or other.min_tokens,
            num_logprobs=max(counts, default=None),
        )


# The pytrees here are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `eval_shape`.


@typing.no_type_check
@flax.struct.dataclass
class Penalties:
    """Penalties of each row and what they count: five bytes for each row and vocabulary entry."""

    presence: Float32[Array, " batch"]
    frequency: Float32[Array, " batch"]
    repetition: Float32[Array, " batch"]
    prompt_mask: Bool[Array, "batch vocab"]
    output_counts: Int32[Array, "batch vocab"]


@typing.no_type_check
@flax.struct.dataclass
class LogitBias:
    """Additions to single logits. Unused places hold the vocabulary size as id, which scatters drop."""

    ids: Int32[Array, "batch places"]
    values: Float32[Array, "batch places"]


@typing.no_type_check
@flax.struct.dataclass
class MinTokens:
    """Ids that may not be drawn before a row has `count` tokens. Unused places hold the vocabulary size."""

    count: Int32[Array, " batch"]
    ids: Int32[Array, "batch places"]


@typing.no_type_check
@flax.struct.dataclass
class SamplingState:
    """Options of each row; None where the variant has no use for them.

    Every array is indexed by row first, so `jax.tree.map(lambda array: array[rows], state)` reorders or
    compacts a batch. Only `penalties.output_counts` changes from step to step.
    """

    temperature: Float32[Array, " batch"] | None = None
    """Below `GREEDY_BELOW`: the row is greedy."""
    keys: UInt32[Array, "batch 2"] | None = None
    """Threefry key of each row; the number of tokens generated so far is folded in at each step."""
    top_k: Int32[Array, " batch"] | None = None
    top_p: Float32[Array, " batch"] | None = None
    min_p: Float32[Array, " batch"] | None = None
    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    min_tokens: MinTokens | None = None

    def with_output_counts(self, counts: Array) -> "SamplingState":
        """The state with other counts of generated tokens, int32 [batch, vocab]. It must have penalties."""
        assert self.penalties is not None
        return dataclasses.replace(self, penalties=dataclasses.replace(self.penalties, output_counts=counts))


_PADDING = SamplingParams(temperature=0.0)


def request_seed(params: SamplingParams) -> int:
    """The request's own seed, or one from the system's entropy; ask once a request and keep the answer."""
    return secrets.randbits(64) if params.seed is None else params.seed


def build_sampling_state(
    params: Sequence[SamplingParams],
    prompt_token_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    num_tokens: int,
    eos_token_ids: Sequence[int],
    batch_size: int | None = None,
    seeds: Sequence[int] | None = None,
    sample_indices: Sequence[int] | None = None,
    output_token_ids: Sequence[Sequence[int]] | None = None,
    variant: SamplerVariant | None = None,
    places: int = 4,
) -> tuple[SamplingState, SamplerVariant]:
    """Builds the arrays of a batch: one row for each of `params`, then greedy rows up to `batch_size`.

    `vocab_size` is the width of the logits and `num_tokens` how many ids are not padding. `seeds` are the
    rows' seeds (default: `request_seed` of each), `sample_indices` which of its request's n completions a row
    is (default: the first), `output_token_ids` what rows have generated already (default: nothing). `variant`
    may be wider than the batch needs. Lists of biases and stop ids are padded to powers of two of at least
    `places`, to keep the number of shapes small. Nothing is compiled: the arrays are made on the host.

    Raises:
        ValueError: lists of different lengths, a token id outside the vocabulary, or a variant that lacks
            something that a row needs.
    """
    num_rows = len(params)
    batch_size = num_rows if batch_size is None else batch_size
    seeds = [request_seed(row) for row in params] if seeds is None else seeds
    sample_indices = [0] * num_rows if sample_indices is None else sample_indices
    output_token_ids = [()] * num_rows if output_token_ids is None else output_token_ids
    for name, values in (
        ("prompt_token_ids", prompt_token_ids),
        ("seeds", seeds),
        ("sample_indices", sample_indices),
        ("output_token_ids", output_token_ids),
    ):
        if len(values) != num_rows:
            raise ValueError(f"{name} has {len(values)} entries for {num_rows} sampling parameters; give one each")
    if batch_size < num_rows:
        raise ValueError(f"batch_size is {batch_size}, less than the {num_rows} rows given")
    for row in params:
        row.validate_for(num_tokens)
    needed = SamplerVariant.required(params, num_tokens)
    variant = needed if variant is None else variant
    if variant | needed != variant:
        raise ValueError(f"{variant} does not serve this batch, which needs {needed}; unite them with |")

    rows = [*params, *[_PADDING] * (batch_size - num_rows)]

    def column(name: str, dtype: type[np.generic]) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    temperature = keys = top_k = top_p = min_p = penalties = logit_bias = min_tokens = None
    if not variant.greedy:
        temperature = _put(column("temperature", np.float32))
        streams = [*zip(seeds, sample_indices, strict=True), *[(0, 0)] * (batch_size - num_rows)]
        keys = _put(np.array([_key(seed, index) for seed, index in streams]).reshape(-1, 2))
    if variant.top_k:
        top_k = column("top_k", np.int32)
        top_k = _put(np.where(top_k == 0, np.int32(vocab_size), np.minimum(top_k, np.int32(vocab_size))))
    if variant.top_p:
        top_p = _put(np.maximum(column("top_p", np.float32), np.float32(_SMALLEST_TOP_P)))
    if variant.min_p:
        min_p = _put(column("min_p", np.float32))
    if variant.penalties:
        prompt_mask = np.zeros((batch_size, vocab_size), bool)
        output_counts = np.zeros((batch_size, vocab_size), np.int32)
        for row, (prompt, output) in enumerate(zip(prompt_token_ids, output_token_ids, strict=True)):
            prompt_mask[row, _checked_ids("prompt", prompt, vocab_size)] = True
            np.add.at(output_counts[row], _checked_ids("output", output, vocab_size), 1)
        penalties = Penalties(
            presence=_put(column("presence_penalty", np.float32)),
            frequency=_put(column("frequency_penalty", np.float32)),
            repetition=_put(column("repetition_penalty", np.float32)),
            prompt_mask=_put(prompt_mask),
            output_counts=_put(output_counts),
        )
    if variant.logit_bias:
        biases = [dict(row.logit_bias) for row in rows]
        logit_bias = LogitBias(
            ids=_ragged([list(bias.keys()) for bias in biases], vocab_size, np.int32, places),
            values=_ragged([list(bias.values()) for bias in biases], 0.0, np.float32, places),
        )
    if variant.min_tokens:
        stops = [list(dict.fromkeys((*eos_token_ids, *row.stop_token_ids))) for row in rows]
        min_tokens = MinTokens(
            count=_put(column("min_tokens", np.int32)), ids=_ragged(stops, vocab_size, np.int32, places)
        )
    state = SamplingState(temperature, keys, top_k, top_p, min_p, penalties, logit_bias, min_tokens)
    return state, variant


def _put(array: np.ndarray) -> Array:
    """On the device, as a copy (the state is donated); `jnp.asarray` would compile a program for each shape."""
    return jax.device_put(array, may_alias=False)


def _key(seed: int, sample_index: int) -> np.ndarray:
    """Two words from a hash whose values NumPy promises to keep."""
    seed %= 2**64
    words = (seed % 2**32, seed // 2**32, sample_index)  # always three: the hash takes [5] and [5, 0] for one
    return np.random.SeedSequence(words).generate_state(2, np.uint32)


def _checked_ids(kind: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(f"{kind} has token id {outside[0]}; expected 0 to {vocab_size - 1}")
    return array


def _ragged(rows: Sequence[Sequence[int | float]], fill: int | float, dtype: type[np.generic], places: int) -> Array:
    """Rows of different lengths in one array, as wide as a power of two of at least `places`."""
    longest = max((len(row) for row in rows), default=0)
    array = np.full((len(rows), max(places, 1 << (longest - 1).bit_length())), fill, dtype)
    for row, values in enumerate(rows):
        array[row, : len(values)] = values
    return _put(array)
