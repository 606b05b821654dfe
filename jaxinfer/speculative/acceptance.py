"""Which drafted tokens stay: exact acceptance on the device, for a whole batch, each row its own number of tokens.

Everything is judged under the distribution that `jaxinfer.sampling` defines (masks, bias, penalties, temperature,
min-p, top-k, top-p), by its own code: verification flattens the positions of a batch into rows of the sampler, each
with the counts that it would have if the drafted tokens before it had been generated.

Two rules, both exact:

- A row that is greedy or seeded, and any row whose proposal has no distribution (one-hot): the sampler chooses its
  token at every position, with the noise that belongs to that output position, and a proposal stays if it is that
  token. The output is then, token for token, that of the plain sampler. A one-hot proposal x is accepted with
  probability p(x), as in rejection sampling. A draft model that draws with the same noise (Gumbel coupling,
  https://arxiv.org/abs/2408.07978) is accepted nearly as often as by the second rule.
- Otherwise rejection sampling (https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318): x drawn from q
  stays with probability min(1, p(x) / q(x)); in place of the first that does not, a token is drawn from
  max(p - q, 0), normalised.
"""

import dataclasses
import typing
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxinfer.sampling import draw_logits, gumbel, processed_logits, sample
from jaxinfer.sampling_logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling_params import GREEDY_BELOW
from jaxinfer.sampling_state import SamplerVariant, SamplingState

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Folded into a row's key for noise that is independent of the sampler's own."""

# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@flax.struct.dataclass
class Proposal:
    """What a draft proposes to each row: its tokens in order, of which the first `lengths` count."""

    tokens: Int32[Array, "batch drafted"]
    lengths: Int32[Array, " batch"]
    logits: Float32[Array, "batch drafted vocab"] | None = None
    """Logits of the distributions that tokens were drawn from, after the sampler's processing (-inf: impossible). None
    if tokens are one-hot or drawn with the sampler's own noise."""


@typing.no_type_check
@flax.struct.dataclass
class Verdict:
    """Row b gains `tokens[b, :num_accepted[b]]`, all drafted, and one token of the target after them if `valid[b]`."""

    tokens: Int32[Array, "batch width"]
    num_accepted: Int32[Array, " batch"]
    valid: Bool[Array, " batch"]
    """False: the target's logits after the accepted tokens are not finite."""
    logprobs: TokenLogprobs | None
    """Of `tokens`, [batch, width]: the target's, as without a draft."""


@typing.no_type_check
@flax.struct.dataclass
class Drafted:
    """Drafted tokens to be judged, and what they are judged by."""

    proposal: Proposal
    exact: Bool[Array, "batch drafted"]
    """What exact acceptance says of each."""
    target_logprobs: Float32[Array, "batch drafted vocab"]
    num_generated: Int32[Array, " batch"]
    max_tokens: Int32[Array, " batch"]

    @property
    def own_logprobs(self) -> Float32[Array, "batch drafted"]:
        """The target's of the drafted tokens themselves."""
        return jnp.take_along_axis(self.target_logprobs, self.proposal.tokens[:, :, None], axis=2)[:, :, 0]


@typing.runtime_checkable
class Acceptance(Protocol):
    """How proposals are judged; hashable, as it is part of the program."""

    needs_logits: bool
    """Whether it needs the draft's distributions even of greedy and seeded rows."""
    lossless: bool

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        """Which proposals stay if all before them do."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """The output has the target's distribution; greedy and seeded rows have the tokens of plain decoding."""

    needs_logits = False
    lossless = True

    def accepts(self, drafted: Drafted) -> Bool[Array, "batch drafted"]:
        return drafted.exact


def judge(
    logits: Float32[Array, "batch width vocab"],
    proposal: Proposal,
    sampling: SamplingState,
    variant: SamplerVariant,
    num_generated: Int32[Array, " batch"],
    max_tokens: Int32[Array, " batch"],
    coupled: Bool[Array, " batch"],
    acceptance: Acceptance,
) -> Verdict:
    """Judges a proposal of width - 1 tokens. `logits[b, j]` are the target's after its newest token and j drafted ones.

    Rows that are `coupled` keep to the first of the rules above although the proposal has logits: their draft drew with
    the sampler's own noise.
    """
    batch, width, vocab = logits.shape
    drafted = width - 1
    flat = logits.reshape(batch * width, vocab)
    rows = expanded(sampling, proposal.tokens)
    steps = (num_generated[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]).reshape(-1)
    output, _ = sample(flat, rows, dataclasses.replace(variant, num_logprobs=None), steps)
    emitted = output.tokens.reshape(batch, width)
    valid = output.valid.reshape(batch, width)
    if drafted == 0:
        num_accepted = jnp.zeros(batch, jnp.int32)
    else:
        exact = emitted[:, :drafted] == proposal.tokens
        places = jnp.arange(drafted, dtype=jnp.int32)[None, :]
        proposed = places < proposal.lengths[:, None]
        logprobs = target_logprobs(flat, rows, variant, steps).reshape(batch, width, vocab)[:, :drafted]
        drawn = jnp.zeros(batch, bool)
        if proposal.logits is not None and not variant.greedy:
            assert sampling.temperature is not None and sampling.keys is not None
            drawn = ~coupled & (sampling.temperature >= GREEDY_BELOW)
            exact = jnp.where(drawn[:, None], _passes(logprobs, proposal, sampling.keys, num_generated), exact)
        accepted = acceptance.accepts(Drafted(proposal, exact, logprobs, num_generated, max_tokens))
        accepted &= proposed & valid[:, :drafted]
        # Not as a sum over an axis, which of a single row is a kernel of its own.
        num_accepted, kept = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
        for place in range(drafted):
            kept &= accepted[:, place]
            num_accepted += kept.astype(jnp.int32)
        if proposal.logits is not None and not variant.greedy:
            assert sampling.keys is not None
            replaced = _from_residual(logprobs, proposal.logits, num_accepted, sampling.keys, num_generated)
            at_rejection = (places == num_accepted[:, None]) & proposed & drawn[:, None]
            emitted = emitted.at[:, :drafted].set(jnp.where(at_rejection, replaced[:, None], emitted[:, :drafted]))
        stays = places < num_accepted[:, None]
        emitted = emitted.at[:, :drafted].set(jnp.where(stays, proposal.tokens, emitted[:, :drafted]))
    scores = None
    if variant.num_logprobs is not None:
        scores = token_logprobs(flat, emitted.reshape(-1), variant.num_logprobs, variant.num_tokens)
        scores = jax.tree.map(lambda leaf: leaf.reshape(batch, width, *leaf.shape[1:]), scores)
    after = jnp.take_along_axis(valid, num_accepted[:, None], axis=1)[:, 0]
    return Verdict(emitted, num_accepted, after, scores)


def expanded(sampling: SamplingState, tokens: Int32[Array, "batch drafted"]) -> SamplingState:
    """The sampler's state for drafted + 1 positions of each row; position j has counted j drafted tokens."""
    batch, drafted = tokens.shape
    wide = jax.tree.map(lambda leaf: jnp.repeat(leaf, drafted + 1, axis=0), sampling)
    if sampling.penalties is None or drafted == 0:
        return wide
    rows = jnp.arange(batch, dtype=jnp.int32)
    counts = [sampling.penalties.output_counts]
    for place in range(drafted):
        counts.append(counts[-1].at[rows, tokens[:, place]].add(1))
    stacked = jnp.stack(counts, axis=1).reshape(batch * (drafted + 1), -1)
    return wide.with_output_counts(stacked)


def target_logprobs(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingState,
    variant: SamplerVariant,
    num_generated: Int32[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    """Log-probabilities that the sampler draws with; greedy rows are at temperature 1, unfiltered if all are greedy."""
    processed = processed_logits(logits, sampling, variant, num_generated)
    return jax.nn.log_softmax(processed if variant.greedy else draw_logits(processed, sampling, variant), axis=-1)


def stream_keys(keys: UInt32[Array, "batch 2"], stream: int) -> UInt32[Array, "batch 2"]:
    """Keys of noise that is independent of what `keys` themselves give."""

    def fold(key: UInt32[Array, "2"]) -> UInt32[Array, "2"]:
        # Steps are folded in as non-negative int32: the top bit keeps the two uses of a key apart.
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(wrapped, jnp.uint32(1 << 31 | stream)))

    return jax.vmap(fold)(keys)


def _passes(
    logprobs: Float32[Array, "batch drafted vocab"],
    proposal: Proposal,
    keys: UInt32[Array, "batch 2"],
    num_generated: Int32[Array, " batch"],
) -> Bool[Array, "batch drafted"]:
    """u q(x) < p(x), u uniform. A draft whose distribution is NaN is never accepted."""
    assert proposal.logits is not None
    drafted = proposal.tokens.shape[1]
    uniform = _uniform(stream_keys(keys, ACCEPT_STREAM), num_generated, drafted)
    own = jnp.take_along_axis(logprobs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
    draft = jnp.take_along_axis(jax.nn.log_softmax(proposal.logits, axis=-1), proposal.tokens[:, :, None], axis=2)
    return jnp.log(uniform) < own - draft[:, :, 0]


def _uniform(
    keys: UInt32[Array, "batch 2"], num_generated: Int32[Array, " batch"], drafted: int
) -> Float32[Array, "batch drafted"]:
    """One number in (0, 1) for each row and output position, whichever step drafts that position."""

    def bits(key: UInt32[Array, "2"], first: Int32[Array, ""]) -> UInt32[Array, " drafted"]:
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        steps = first + jnp.arange(drafted, dtype=jnp.int32)
        return jax.vmap(lambda step: jax.random.bits(jax.random.fold_in(wrapped, step), (), jnp.uint32))(steps)

    uniform = (jax.vmap(bits)(keys, num_generated).astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.minimum(uniform, 1.0 - 2.0**-24)


def _from_residual(
    logprobs: Float32[Array, "batch drafted vocab"],
    draft_logits: Float32[Array, "batch drafted vocab"],
    place: Int32[Array, " batch"],
    keys: UInt32[Array, "batch 2"],
    num_generated: Int32[Array, " batch"],
) -> Int32[Array, " batch"]:
    """A token drawn from max(p - q, 0) at one place of each row (the last one where `place` is beyond)."""
    index = jnp.minimum(place, logprobs.shape[1] - 1)[:, None, None]
    target = jnp.exp(jnp.take_along_axis(logprobs, index, axis=1)[:, 0])
    draft = jax.nn.softmax(jnp.take_along_axis(draft_logits, index, axis=1)[:, 0], axis=-1)
    residual = jnp.maximum(target - jnp.where(jnp.isnan(draft), 0.0, draft), 0.0)
    # Nothing is left where p and q are equal up to rounding, and rejection has a probability of rounding's size.
    residual = jnp.where(jnp.sum(residual, axis=1, keepdims=True) > 0.0, residual, target)
    noise = gumbel(keys, num_generated + index[:, 0, 0], target.shape[1])
    return jnp.argmax(jnp.log(residual) + noise, axis=1).astype(jnp.int32)
