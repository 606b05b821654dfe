"""Acceptance on tiny distributions: the law of what comes out, and the sampler's own tokens where they are promised."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference
from scipy import stats

from jaxinfer.sampling import draw_logits, processed_logits, sample
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import SamplerVariant, SamplingState, build_sampling_state
from jaxinfer.speculative import acceptance as rules
from jaxinfer.speculative.acceptance import DRAFT_STREAM, Acceptance, Drafted, Exact, Proposal, Verdict, stream_keys
from jaxinfer.speculative.lossy import LossyKL, LossyTopK, LossyTypical, SyntheticAcceptance

VOCAB = 6
ROWS = 8192
EXACT = Exact()
TARGET = np.log(
    [[0.4, 0.3, 0.15, 0.1, 0.04, 0.01], [0.05, 0.5, 0.05, 0.3, 0.05, 0.05], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]]
)
DRAFT = np.log([[0.1, 0.3, 0.05, 0.4, 0.05, 0.1], [0.3, 0.1, 0.3, 0.1, 0.1, 0.1], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
"""Row c: logits of what follows token c; tokens from 3 on are followed as token 2 is."""
WIDE = SamplerVariant(
    VOCAB, greedy=False, top_k=True, top_p=True, min_p=True, penalties=True, logit_bias=True, min_tokens=True
)
SIMPLE = SamplerVariant(VOCAB, greedy=False)
GREEDY = SamplerVariant(VOCAB, min_tokens=True)
"""Few programs for all tests: compiling is what they spend their time on."""
judge = jax.jit(rules.judge, static_argnames=("variant", "acceptance"))
plain_sample = jax.jit(sample, static_argnames="variant")


def after(table: np.ndarray, tokens: jax.Array) -> jax.Array:
    return jnp.asarray(table, jnp.float32)[jnp.minimum(tokens, 2)]


def build(
    params: list[SamplingParams], prompt: tuple[int, ...] = (0,), variant: SamplerVariant = WIDE
) -> SamplingState:
    state, _ = build_sampling_state(
        params,
        [prompt] * len(params),
        vocab_size=VOCAB,
        num_tokens=VOCAB,
        eos_token_ids=[1],
        seeds=[7] * len(params),
        sample_indices=list(range(len(params))),
        variant=variant,
    )
    return state


@functools.partial(jax.jit, static_argnames=("acceptance", "with_logits"))
def step(
    state: SamplingState, start: jax.Array, coupled: jax.Array, *, with_logits: bool, acceptance: Acceptance
) -> Verdict:
    """One step of Markov models: two tokens are drawn from DRAFT, the target's logits are TARGET's."""
    keys = state.keys
    if with_logits and keys is not None:
        keys = jnp.where(coupled[:, None], keys, stream_keys(keys, DRAFT_STREAM))
    own, token, tokens, drawn = dataclasses.replace(state, keys=keys), start, [], []
    for place in range(2):
        logits, steps = after(DRAFT, token), jnp.full(start.shape, place, jnp.int32)
        drawn.append(draw_logits(processed_logits(logits, own, WIDE, steps), own, WIDE))
        output, own = sample(logits, own, WIDE, steps)
        token = output.tokens
        tokens.append(token)
    proposed = jnp.stack(tokens, axis=1)
    logits = after(TARGET, jnp.concatenate([start[:, None], proposed], axis=1))
    zeros = jnp.zeros_like(start)
    proposal = Proposal(proposed, zeros + 2, jnp.stack(drawn, axis=1) if with_logits else None)
    return rules.judge(logits, proposal, state, WIDE, zeros, zeros + 1000, coupled, acceptance)


def run(
    params: SamplingParams | list[SamplingParams],
    *,
    with_logits: bool = True,
    coupled: bool | np.ndarray = False,
    acceptance: Acceptance = EXACT,
    prompt: tuple[int, ...] = (0,),
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [ROWS, 3] and number accepted, of rows that start from token 0."""
    listed = params if isinstance(params, list) else [params] * ROWS
    verdict = step(
        build(listed, prompt),
        jnp.zeros(ROWS, jnp.int32),
        jnp.broadcast_to(jnp.asarray(coupled), ROWS),
        with_logits=with_logits,
        acceptance=acceptance,
    )
    assert np.asarray(verdict.valid).all()
    return np.asarray(verdict.tokens), np.asarray(verdict.num_accepted)


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """A chi-square test at 1e-4; tokens without probability must not occur at all."""
    counts = np.bincount(tokens, minlength=VOCAB)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        expected = probabilities[possible] / probabilities[possible].sum() * counts.sum()
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-4, (counts, expected)


OPTIONS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.5},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.3},
    "all": {"temperature": 1.5, "top_k": 4, "top_p": 0.95, "min_p": 0.05},
}


@pytest.mark.parametrize("rule", ["rejection", "coupled", "one-hot"])
def test_tokens_have_the_target_s_distribution(rule: str):
    """At each position, given the token before it: accepted, replaced and added tokens together; options are mixed."""
    kinds = list(OPTIONS.values())
    params = [SamplingParams.from_dict({"temperature": 1.0} | kinds[row % len(kinds)]) for row in range(ROWS)]
    tokens, num_accepted = run(params, with_logits=rule != "one-hot", coupled=rule == "coupled")
    tested = 0
    for kind, options in enumerate(kinds):
        for place, token in itertools.product(range(3), range(VOCAB)):
            before = tokens[:, place - 1] if place else np.zeros(ROWS, int)
            given = (np.arange(ROWS) % len(kinds) == kind) & (num_accepted >= place) & (before == token)
            if given.sum() > 100:
                tested += 1
                assert_follows(tokens[given, place], sampling_reference.probabilities(TARGET[min(token, 2)], **options))
    assert tested > 20


def test_acceptance_is_the_overlap_of_the_distributions():
    """The share accepted is sum(min(p, q)) = 0.1 + 0.3 + 0.05 + 0.1 + 0.04 + 0.01 = 0.6 at the first place."""
    coupled = np.arange(ROWS) % 2 == 0
    _, accepted = run(SamplingParams(temperature=1.0), coupled=coupled)
    share = (accepted[~coupled] > 0).mean()
    assert abs(share - 0.6) < 4 * np.sqrt(0.6 * 0.4 / (ROWS / 2))
    # Coupled draws meet less often, but at least at (1 - TV) / (1 + TV) = 0.6 / 1.4.
    assert 0.6 / 1.4 < (accepted[coupled] > 0).mean() < 0.6


def test_one_hot_proposals_are_accepted_with_the_target_s_probability():
    """Greedy drafts propose token 3, whose probability is 0.1: accepting by the draft's softmax would take 0.25."""
    state = build([SamplingParams(temperature=1.0)] * ROWS, variant=SIMPLE)
    zeros = jnp.zeros(ROWS, jnp.int32)
    proposal = Proposal(jnp.full((ROWS, 1), 3, jnp.int32), zeros + 1)
    logits = after(TARGET, jnp.concatenate([zeros[:, None], proposal.tokens], axis=1))
    verdict = judge(logits, proposal, state, SIMPLE, zeros, zeros + 9, zeros > 0, EXACT)
    share = np.asarray(verdict.num_accepted).mean()
    assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / ROWS)
    assert_follows(np.asarray(verdict.tokens)[:, 0], np.exp(TARGET[0]))


def test_coupled_rows_have_the_sampler_s_own_tokens():
    """What plain decoding gives with the same keys, under every option at once and penalties that count."""
    params = SamplingParams(
        temperature=1.3,
        top_k=5,
        top_p=0.97,
        min_p=0.01,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={4: 1.5},
    )
    for with_logits in (True, False):
        tokens, accepted = run(params, with_logits=with_logits, coupled=True)
        state, previous = build([params] * ROWS), jnp.zeros(ROWS, jnp.int32)
        for place in range(3):
            output, state = plain_sample(after(TARGET, previous), state, WIDE, jnp.full(ROWS, place, jnp.int32))
            previous = output.tokens
            reached = accepted >= place
            assert (tokens[reached, place] == np.asarray(previous)[reached]).all()
        assert 0.1 < (accepted == 2).mean() < 0.9


def test_penalties_count_accepted_tokens_within_a_step():
    """A presence penalty of 2 after token 0 was drafted: p(0 | 0) falls from 0.4 to 0.4 e^-2 / (0.6 + 0.4 e^-2)."""
    tokens, accepted = run(SamplingParams(temperature=1.0, presence_penalty=2.0), prompt=(5,))
    twice = (accepted >= 1) & (tokens[:, 0] == 0)
    logits = sampling_reference.penalised(TARGET[0], [5], [0], presence=2.0)
    assert_follows(tokens[twice, 1], sampling_reference.probabilities(logits))


def test_h3_min_tokens_holds_at_drafted_positions():
    """Trap H3: the end-of-text id is impossible at output positions below min_tokens and possible at it."""
    state = build(
        [SamplingParams(temperature=0.0, min_tokens=count, max_tokens=9) for count in (0, 1, 2, 3)], variant=GREEDY
    )
    # The target wants the end at every place, and the draft proposes it.
    logits = jnp.broadcast_to(jnp.array([0.0, 5.0, 1.0, 0.0, 0.0, 0.0]), (4, 4, VOCAB))
    zeros = jnp.zeros(4, jnp.int32)
    proposal = Proposal(jnp.ones((4, 3), jnp.int32), zeros + 3)
    verdict = judge(logits, proposal, state, GREEDY, zeros, zeros + 9, zeros == 0, EXACT)
    assert np.asarray(verdict.num_accepted).tolist() == [3, 0, 0, 0]
    assert np.asarray(verdict.tokens)[:, 0].tolist() == [1, 2, 2, 2]
    # With the token that may come proposed at the places where it must, the end is accepted exactly at min_tokens.
    tokens = jnp.array([[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]], jnp.int32)
    verdict = judge(logits, Proposal(tokens, zeros + 3), state, GREEDY, zeros, zeros + 9, zeros == 0, EXACT)
    assert np.asarray(verdict.num_accepted).tolist() == [3, 3, 3, 3]
    assert np.asarray(verdict.tokens).tolist() == [[1, 1, 1, 1], [2, 1, 1, 1], [2, 2, 1, 1], [2, 2, 2, 1]]
    # Trap K1: NaN after one accepted token leaves that token and nothing else. Nor is more accepted than proposed.
    state = build([SamplingParams(temperature=0.0)] * 4, variant=GREEDY)
    logits = logits.at[0, 1, 3].set(jnp.nan)
    proposal = Proposal(jnp.ones((4, 3), jnp.int32), jnp.array([3, 3, 1, 0], jnp.int32))
    verdict = judge(logits, proposal, state, GREEDY, zeros, zeros + 9, zeros == 0, EXACT)
    assert np.asarray(verdict.num_accepted).tolist() == [1, 3, 1, 0]
    assert np.asarray(verdict.valid).tolist() == [False, True, True, True]


def test_greedy_seeded_and_drawn_rows_share_a_batch():
    """Rows of three kinds in turn: greedy rows take the argmax, seeded ones the sampler's tokens, others the law."""
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=1.0)]
    params = [kinds[row % 3] for row in range(ROWS)]
    greedy, seeded, drawn = (np.arange(ROWS) % 3 == kind for kind in range(3))
    tokens, accepted = run(params, coupled=seeded)
    assert (tokens[greedy, 0] == 0).all()
    assert (accepted[greedy] == 0).all()  # the draft's argmax is 3
    zeros = jnp.zeros(ROWS, jnp.int32)
    plain, _ = plain_sample(after(TARGET, zeros), build(params), WIDE, zeros)
    assert (tokens[seeded, 0] == np.asarray(plain.tokens)[seeded]).all()
    assert_follows(tokens[drawn, 0], np.exp(TARGET[0]))
    assert_follows(tokens[drawn & (accepted >= 1) & (tokens[:, 0] == 1), 1], np.exp(TARGET[1]))


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    state = build([SamplingParams(temperature=1.0)] * ROWS, variant=SIMPLE)
    zeros = jnp.zeros(ROWS, jnp.int32)
    logits = after(TARGET, jnp.zeros((ROWS, 2), jnp.int32))
    chosen, _ = plain_sample(logits[:, 0], state, SIMPLE, zeros)
    proposal = Proposal(chosen.tokens[:, None], zeros + 1, logits[:, :1])
    verdict = judge(logits, proposal, state, SIMPLE, zeros, zeros + 9, zeros > 0, EXACT)
    assert (np.asarray(verdict.num_accepted) == 1).all()
    last = jnp.broadcast_to(jnp.arange(VOCAB) == 5, (ROWS, 2, VOCAB))
    proposal = Proposal(zeros[:, None] + 5, zeros + 1, jnp.where(last, 0.0, -jnp.inf)[:, :1])
    verdict = judge(jnp.where(last, -jnp.inf, logits), proposal, state, SIMPLE, zeros, zeros + 9, zeros > 0, EXACT)
    assert (np.asarray(verdict.num_accepted) == 0).all()
    assert (np.asarray(verdict.tokens)[:, 0] != 5).all()
    # A draft whose distribution is NaN is never accepted, and leaves the target's law as it is.
    proposal = Proposal(zeros[:, None], zeros + 1, jnp.full((ROWS, 1, VOCAB), jnp.nan))
    verdict = judge(logits, proposal, state, SIMPLE, zeros, zeros + 9, zeros > 0, EXACT)
    assert (np.asarray(verdict.num_accepted) == 0).all()
    assert_follows(np.asarray(verdict.tokens)[:, 0], np.exp(TARGET[0]))


def lossy(mode: Acceptance, places: int = 0) -> list[int]:
    """Tokens of TARGET[0] that the mode accepts at an output position of 100, none being accepted exactly."""
    tokens, ones = jnp.arange(VOCAB, dtype=jnp.int32)[:, None], jnp.ones(VOCAB, jnp.int32)
    target = jax.nn.log_softmax(after(TARGET, jnp.zeros_like(tokens)), axis=-1)
    nothing = jnp.zeros((VOCAB, 1), bool)
    accepted = mode.accepts(Drafted(Proposal(tokens, ones), nothing, target, places * ones, 100 * ones))
    return np.flatnonzero(np.asarray(accepted)).tolist()


def test_lossy_modes_accept_what_their_names_say():
    """TARGET[0] is 0.4, 0.3, 0.15, 0.1, 0.04, 0.01 with entropy 1.42: typical acceptance asks for 0.072."""
    schedule = LossyTopK(start=1, middle=3, end=2, start_tokens=4, end_tokens=4)
    assert lossy(schedule, 3) == [0]
    assert lossy(schedule, 4) == [0, 1, 2]
    assert lossy(schedule, 96) == [0, 1]
    assert lossy(LossyTypical()) == [0, 1, 2, 3]
    assert lossy(LossyTypical(epsilon=0.005)) == [0, 1, 2, 3, 4, 5]
    assert lossy(LossyKL(threshold=1.5)) == [0, 1]  # of a one-hot proposal: -log 0.3 = 1.2, -log 0.15 = 1.9


def test_a_lossy_row_takes_the_target_s_token_where_it_rejects():
    """A greedy row: top-2 acceptance keeps token 1, and in place of token 5 comes the argmax, 0."""
    state = build([SamplingParams(temperature=0.0)] * 4, variant=GREEDY)
    logits = after(TARGET, jnp.zeros((4, 4), jnp.int32))
    zeros = jnp.zeros(4, jnp.int32)
    proposal = Proposal(jnp.broadcast_to(jnp.array([1, 5, 0]), (4, 3)).astype(jnp.int32), zeros + 3)
    verdict = judge(logits, proposal, state, GREEDY, zeros, zeros + 99, zeros == 0, LossyTopK(2, 2, 2))
    assert np.asarray(verdict.num_accepted).tolist() == [1] * 4
    assert np.asarray(verdict.tokens)[:, :2].tolist() == [[1, 0]] * 4


def test_lossy_modes_accept_what_exact_acceptance_accepts_of_drawn_rows_too():
    """Exactly 0.6 of what DRAFT draws after token 0; with the target's four most probable tokens whoever draws them,
    0.1 + 0.3 + 0.05 + 0.4, and of the other two min(p, q) = 0.04 + 0.01."""
    for mode, expected in ((LossyTopK(1, 1, 1), 0.6), (LossyTopK(4, 4, 4), 0.9)):
        tokens, accepted = run(SamplingParams(temperature=1.0), acceptance=mode)
        share = (accepted > 0).mean()
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / ROWS)
        # What was refused was more probable in the draft, so that what comes in its place is not it.
        assert not np.isin(tokens[accepted == 0, 0], [3, 4, 5]).any()


def test_lossy_kl_compares_whole_distributions():
    """KL(q || p) is 0.602 nats after token 0, and larger after the others."""
    assert np.sum(np.exp(DRAFT[0]) * (DRAFT[0] - TARGET[0])) == pytest.approx(0.6024, abs=1e-4)
    tokens = jnp.zeros((2, 1), jnp.int32)
    proposal = Proposal(tokens, jnp.ones(2, jnp.int32), after(DRAFT, jnp.array([[0], [1]])))
    target = jax.nn.log_softmax(after(TARGET, jnp.array([[0], [1]])), axis=-1)
    zeros = jnp.zeros(2, jnp.int32)
    drafted = Drafted(proposal, jnp.zeros((2, 1), bool), target, zeros, zeros)
    assert LossyKL(threshold=0.61).accepts(drafted).tolist() == [[True], [False]]
    assert LossyKL(threshold=0.59).accepts(drafted).tolist() == [[False], [False]]


def test_synthetic_acceptance_has_the_probability_asked_for():
    zeros = jnp.zeros(ROWS, jnp.int32)
    proposal = Proposal(jnp.zeros((ROWS, 2), jnp.int32), zeros + 2)
    logprobs = jnp.zeros((ROWS, 2, VOCAB))
    drafted = Drafted(proposal, jnp.zeros((ROWS, 2), bool), logprobs, zeros, zeros)
    accepted = SyntheticAcceptance(0.8).accepts(drafted)
    counts = np.bincount(np.asarray(accepted) @ [1, 2], minlength=4)
    assert stats.chisquare(counts, ROWS * np.array([0.04, 0.16, 0.16, 0.64])).pvalue > 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossyTopK(middle=0), "middle=0; expected at least 1"),
        (lambda: LossyTypical(epsilon=0.0), r"epsilon=0.0; expected a number in \(0, 1\]"),
        (lambda: LossyKL(threshold=-1.0), "threshold=-1.0; expected a positive number of nats"),
        (lambda: SyntheticAcceptance(1.5), r"probability=1.5; expected a number in \[0, 1\]"),
    ],
)
def test_modes_refuse_impossible_numbers(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
