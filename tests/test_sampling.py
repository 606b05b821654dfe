"""The sampler: distributions, seeds, masks, penalties and failures, against NumPy and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_reference import kept_tokens, penalised, probabilities
from scipy import stats

from jaxinfer.sampling import BLOCK, draw_logits, gumbel, largest_of, processed_logits, sample
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import SamplerVariant, SamplingState, build_sampling_state, request_seed

step = jax.jit(sample, static_argnums=2)


def build(params, vocab=16, num_tokens=None, eos=(), **options) -> tuple[SamplingState, SamplerVariant]:
    prompts = options.pop("prompts", [[1]] * len(params))
    return build_sampling_state(
        params, prompts, vocab_size=vocab, num_tokens=num_tokens or vocab, eos_token_ids=list(eos), **options
    )


def draws(logits, num_draws=4000, **options) -> np.ndarray:
    """Tokens of one row of logits under `num_draws` seeds, in one batch."""
    logits = np.asarray(logits, np.float32)
    params = [SamplingParams(**options)] * num_draws
    state, variant = build(params, vocab=len(logits), seeds=range(num_draws))
    output, _ = step(np.tile(logits, (num_draws, 1)), state, variant, np.zeros(num_draws, np.int32))
    assert bool(np.all(output.valid))
    return np.asarray(output.tokens)


def assert_distributed(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any(), "a token that was filtered out has been drawn"
    support = expected > 0
    if support.sum() > 1:
        assert stats.chisquare(counts[support], expected[support] * counts.sum()).pvalue > 1e-3


# Chains of tokens: `decode` plays the model, whose logits depend on the last token only.


@functools.partial(jax.jit, static_argnames=("variant", "num_steps"))
def chunk(table, tokens, state, generated, *, variant, num_steps):
    batch = tokens.shape[0]

    def body(index, carry):
        tokens, state, generated, out = carry
        output, state = sample(table[tokens], state, variant, generated)
        return output.tokens, state, generated + 1, out.at[index].set(output.tokens)

    out = jnp.zeros((num_steps, batch), jnp.int32)
    return jax.lax.fori_loop(0, num_steps, body, (tokens, state, generated, out))


def decode(table, params, num_steps=16, chunks=None, **options) -> np.ndarray:
    """int32[rows, num_steps] tokens of rows that start at token 1; `chunks` are the lengths of the programs."""
    state, variant = build(params, vocab=table.shape[1], **options)
    batch = options.get("batch_size", len(params))
    tokens, generated = jnp.ones(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
    pieces = []
    for length in chunks or (num_steps,):
        tokens, state, generated, out = chunk(
            jnp.asarray(table), tokens, state, generated, variant=variant, num_steps=length
        )
        pieces.append(np.asarray(out))
    return np.concatenate(pieces).T[: len(params)]


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return (np.random.default_rng(5).normal(size=(64, 64)) * 2).astype(np.float32)


def markov(chain: list[int], vocab: int = 64, scale: float = 4.0) -> np.ndarray:
    """Logits under which greedy decoding from token 1 gives `chain`."""
    logits = np.zeros((vocab, vocab), np.float32)
    for current, following in zip([1, *chain], chain, strict=False):
        logits[current, following] = scale
    return logits


# Distributions.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 50.0, "top_p": 0.5},
    ],
    ids=str,
)
def test_draws_follow_the_reference_distribution(options):
    logits = (np.random.default_rng(7).normal(size=16) * 2).astype(np.float32)
    assert_distributed(draws(logits, **options), probabilities(logits, **options))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"top_p": 0.74}, 2),
        ({"top_p": 0.76}, 3),
        ({"top_p": 1.0}, 4),
        ({"top_p": 1e-8}, 1),
        ({"temperature": 0.5, "top_p": 0.7}, 1),
        ({"min_p": 0.3}, 2),
        ({"temperature": 0.5, "min_p": 0.3}, 1),
        ({"temperature": 3.0, "min_p": 1.0}, 1),
    ],
    ids=str,
)
def test_c1_c3_tokens_seen_and_their_frequencies(options, count):
    logits = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)
    tokens = draws(logits, **options)
    assert set(tokens.tolist()) == set(range(count)) == set(kept_tokens(logits, **options))
    assert_distributed(tokens, probabilities(logits, **options))


def test_draw_logits_are_the_distribution_that_is_drawn():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]]).astype(np.float32)
    state, variant = build([SamplingParams(top_k=3, top_p=0.75)], vocab=4)
    got = jax.nn.softmax(draw_logits(jnp.asarray(logits), state, variant), axis=1)
    np.testing.assert_allclose(got, [[4 / 7, 3 / 7, 0, 0]], rtol=1e-6)


def test_extreme_temperatures_and_logits():
    logits = np.array([3.0, 3.5, -1e30, 3e38, -np.inf], np.float32)
    assert set(draws(logits, 50, temperature=1.0).tolist()) == {3}
    assert set(draws(logits, 50, temperature=1e-3).tolist()) == {3}
    assert set(draws(logits[:2], 50, temperature=1e-5).tolist()) == {1}
    assert_distributed(draws(logits[:3], temperature=1e6), np.array([0.5, 0.5, 0.0]))


def test_c5_top_k_1_is_argmax_for_10000_seeds():
    logits = np.random.default_rng(8).normal(size=64).astype(np.float32)
    assert set(draws(logits, 10_000, top_k=1).tolist()) == {int(np.argmax(logits))}


def test_c5_noise_is_not_coarse():
    # 10,000 equal tokens, 2,000 draws: 10000 * (1 - (1 - 1e-4) ** 2000) = 1813 distinct ids, deviation 17.
    tokens = draws(np.zeros(10_000), 2000)
    assert 1750 < len(set(tokens.tolist())) < 1875
    assert stats.kstest(tokens / 10_000, "uniform").pvalue > 1e-3


def test_c5_rare_tokens_are_drawn_as_often_as_they_should():
    # p = 2 ** -8 for token 0: 10,000 draws hold 39 of it; 8-bit uniforms would miss or double it.
    rare = np.log([2.0**-8, 1 - 2.0**-8])
    count = int(np.sum(draws(rare, 10_000) == 0))
    assert stats.binomtest(count, 10_000, 2.0**-8).pvalue > 1e-3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_p": 0.97}], ids=str)
def test_draws_from_many_blocks_follow_the_reference_distribution(options):
    """Blocks of very different weight, the last of them half padding: first a block is drawn, then a token in it."""
    rng = np.random.default_rng(9)
    logits = rng.normal(size=300).astype(np.float32) + np.repeat([0.0, 2.0, -1.0], [BLOCK, BLOCK, 300 - 2 * BLOCK])
    expected = probabilities(logits, **options)
    tokens = draws(logits, 20_000, **options)
    counts = np.bincount(tokens, minlength=300)
    assert not counts[expected == 0].any()
    common = expected * len(tokens) >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    held = np.array(wanted) > 0
    assert stats.chisquare(np.array(observed)[held], np.array(wanted)[held] * len(tokens)).pvalue > 1e-3


def test_a_token_far_below_the_others_of_its_block_is_drawn_with_its_share():
    """A block's weight is a sum, and its place within the block is as likely as its own weight says."""
    logits = np.full(2 * BLOCK, -np.inf, np.float32)
    logits[[3, BLOCK, BLOCK + 7]] = np.log([0.5, 0.48, 0.02])
    counts = np.bincount(draws(logits, 10_000), minlength=len(logits))[[3, BLOCK, BLOCK + 7]]
    assert counts.sum() == 10_000
    assert stats.chisquare(counts, np.array([0.5, 0.48, 0.02]) * 10_000).pvalue > 1e-3


def test_noise_is_made_for_blocks_and_not_for_every_token():
    state, variant = build([SamplingParams()] * 2, vocab=64 * BLOCK)
    arguments = (jnp.zeros((2, 64 * BLOCK)), state, jnp.zeros(2, jnp.int32))
    traced = jax.make_jaxpr(lambda logits, state, generated: sample(logits, state, variant, generated))(*arguments)
    assert sizes_of(traced.jaxpr, "random_bits") == [2 * (64 + BLOCK)]


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_noise_is_finite_for_the_extreme_random_bits(bits, monkeypatch):
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, bits, dtype))
    noise = gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), 3)
    # u = 2**-33 gives 33 ln 2; u = 1 - 2**-24 gives -ln(24 ln 2).
    np.testing.assert_allclose(
        noise, np.full((1, 3), 33 * np.log(2) if bits == 0 else -np.log(24 * np.log(2))), rtol=1e-6
    )


# Seeds.


def test_c7_a_seeded_row_is_the_same_in_any_company(table):
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    alone = decode(table, [seeded])[0]
    padded = functools.partial(decode, table, batch_size=4, variant=WIDEST)  # few programs, so a quick test
    unseeded, greedy = SamplingParams(temperature=1.3), SamplingParams(temperature=0.0)
    other, filtered = SamplingParams(seed=7), SamplingParams(seed=9, top_p=0.5, repetition_penalty=1.3)
    for companions in ([unseeded], [greedy], [other], [other, greedy, unseeded], [filtered, unseeded]):
        np.testing.assert_array_equal(padded([seeded, *companions])[0], alone)
        np.testing.assert_array_equal(padded([*companions, seeded])[-1], alone)
    np.testing.assert_array_equal(decode(table, [seeded, unseeded])[0], alone)
    for chunks in ((1,) * 16, (3, 13)):
        np.testing.assert_array_equal(decode(table, [seeded], chunks=chunks)[0], alone)


def test_c7_seeds_and_steps_differ():
    flat = np.zeros((64, 64), np.float32)
    tokens = decode(flat, [SamplingParams(seed=seed) for seed in range(20)])
    assert len({tuple(row) for row in tokens.tolist()}) == 20
    assert all(len(set(row)) > 8 for row in tokens.tolist()), "the noise of a row is frozen"


def test_all_64_bits_of_a_seed_count():
    flat = np.zeros((64, 64), np.float32)
    seeds = [0, 5, 5 + 2**32, 5 + 7 * 2**32, -5, 2**63 - 1, -(2**63), 2**64 - 2]
    tokens = decode(flat, [SamplingParams(seed=seed) for seed in seeds])
    assert len({tuple(row) for row in tokens.tolist()}) == len(seeds)


def test_completions_of_one_request_differ_and_the_first_is_that_of_n_1():
    flat = np.zeros((64, 64), np.float32)
    params = SamplingParams(n=4, seed=3)
    tokens = decode(flat, [params] * 4, sample_indices=[0, 1, 2, 3])
    assert len({tuple(row) for row in tokens.tolist()}) == 4
    np.testing.assert_array_equal(tokens[0], decode(flat, [SamplingParams(seed=3)])[0])


def test_unseeded_rows_draw_fresh_seeds_that_can_be_kept():
    params = SamplingParams()
    assert request_seed(params) != request_seed(params)
    assert request_seed(SamplingParams(seed=11)) == 11
    flat = np.zeros((64, 64), np.float32)
    assert not np.array_equal(decode(flat, [params]), decode(flat, [params]))
    kept = [request_seed(params)]
    np.testing.assert_array_equal(decode(flat, [params], seeds=kept), decode(flat, [params], seeds=kept))


def test_a_row_resumes_with_the_noise_and_the_counts_it_had(table):
    params = SamplingParams(seed=6, frequency_penalty=1.0, repetition_penalty=1.2)
    whole = decode(table, [params])[0]
    first = whole[:7].tolist()
    state, variant = build([params], vocab=64, output_token_ids=[first])
    _, _, _, rest = chunk(
        jnp.asarray(table), jnp.array(first[-1:]), state, jnp.array([7]), variant=variant, num_steps=9
    )
    np.testing.assert_array_equal(rest[:, 0], whole[7:])


# Every row under its own options.

WIDEST = SamplerVariant(64, False, True, True, True, True, True, True, 5)
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=1),
    SamplingParams(seed=3, temperature=0.6, top_p=0.7),
    SamplingParams(seed=4, min_p=0.2, logit_bias={9: 3.0, 11: -100.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(seed=5, top_k=7, top_p=0.9, frequency_penalty=0.8),
    SamplingParams(seed=6, min_tokens=12, stop_token_ids=[3, 4, 5, 6, 7, 8]),
]


def test_c9_eight_rows_with_eight_options_equal_their_solo_runs(table):
    solo = np.concatenate([decode(table, [params], eos=[2], variant=WIDEST) for params in MIXED])
    np.testing.assert_array_equal(decode(table, MIXED, eos=[2]), solo)
    np.testing.assert_array_equal(decode(table, MIXED[::-1], eos=[2]), solo[::-1])
    np.testing.assert_array_equal(solo[2], decode(table, [SamplingParams(temperature=0.0)])[0])


def test_c9_rows_keep_their_options_when_the_batch_is_compacted(table):
    whole = decode(table, MIXED, eos=[2])
    state, variant = build(MIXED, vocab=64, eos=[2])
    tokens, state, generated, _ = chunk(
        jnp.asarray(table), jnp.ones(8, jnp.int32), state, jnp.zeros(8, jnp.int32), variant=variant, num_steps=6
    )
    rows = np.array([6, 1, 4, 7])
    state, tokens, generated = jax.tree.map(lambda array: array[rows], (state, tokens, generated))
    _, _, _, rest = chunk(jnp.asarray(table), tokens, state, generated, variant=variant, num_steps=10)
    np.testing.assert_array_equal(rest.T, whole[rows, 6:])


def test_c9_bias_forces_and_bans_on_every_step(table):
    params = [SamplingParams(seed=1, logit_bias={40: 100.0}), SamplingParams(temperature=0.0, logit_bias={40: 100})]
    assert set(decode(table, params).ravel().tolist()) == {40}
    banned = dict.fromkeys(range(0, 64, 2), -100.0)
    params = [SamplingParams(seed=seed, logit_bias=banned, temperature=2.0) for seed in range(10)]
    assert not np.any(decode(table, params) % 2 == 0)


def test_c9_a_bad_bias_is_refused_and_the_next_batch_works(table):
    for bias in ({191222: 1.0}, {64: 1.0}):
        with pytest.raises(ValueError, match="logit_bias has token id"):
            build([SamplingParams(), SamplingParams(logit_bias=bias)], vocab=64)
    with pytest.raises(ValueError, match="logit_bias is 'AI'"):
        SamplingParams.from_dict({"logit_bias": {"AI": 1.0}})
    assert decode(table, [SamplingParams(temperature=0.0)]).shape == (1, 16)


# Masks.


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 100.0}, {"top_k": 8}, {"top_p": 0.99}])
def test_padding_ids_are_never_drawn(options):
    logits = np.zeros((500, 16), np.float32)
    logits[:, 12:] = 50.0  # padding, and the model prefers it
    state, variant = build([SamplingParams(**options)] * 500, num_tokens=12, seeds=range(500))
    output, _ = step(logits, state, variant, np.zeros(500, np.int32))
    assert int(jnp.max(output.tokens)) < 12
    assert bool(jnp.all(output.valid))


@pytest.mark.parametrize("minimum", [0, 3, 4, 5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_h3_min_tokens_forbids_end_of_text_before_it_and_not_at_it(minimum, ignore_eos):
    eos = 2
    chain = [10, 11, 12, eos]  # greedy: end-of-text is the token at position 3
    logits = markov(chain)
    logits[12, 13] = 3.0  # what comes when it is forbidden, and then end-of-text again, at every position
    logits[13, eos], logits[13, 13] = 4.0, 3.0
    tokens = decode(
        logits,
        [SamplingParams(temperature=0.0, min_tokens=minimum, ignore_eos=ignore_eos, max_tokens=8)],
        num_steps=8,
        eos=[eos],
    )[0].tolist()
    first = tokens.index(eos)
    assert first == max(3, minimum)
    assert tokens[:first] == ([10, 11, 12] + [13] * 5)[:first]


def test_min_tokens_forbids_stop_ids_too_in_its_own_row_only():
    flat = np.zeros((64, 64), np.float32)
    stops = list(range(3, 64))
    params = [SamplingParams(seed=1, min_tokens=16, stop_token_ids=stops), SamplingParams(seed=1, stop_token_ids=stops)]
    tokens = decode(flat, params, num_steps=17, eos=[2])
    assert set(tokens[0, :16].tolist()) <= {0, 1}
    assert len(set(tokens[1].tolist()) - {0, 1, 2}) > 5
    reached = decode(flat, params[:1], num_steps=40, eos=[2])[0, 16:]
    assert len(set(reached.tolist()) - {0, 1, 2}) > 5


# Penalties.


def test_penalties_equal_the_reference_over_several_steps(table):
    prompts = [[1, 5, 5, 9], [1], [30, 31]]
    options = [
        {"repetition": 1.4},
        {"frequency": 0.7, "presence": -0.3},
        {"repetition": 0.8, "frequency": -0.2, "presence": 1.1},
    ]
    params = [
        SamplingParams(temperature=0.0, **{f"{name}_penalty": value for name, value in row.items()}) for row in options
    ]
    state, variant = build(params, vocab=64, prompts=prompts)
    tokens, outputs = np.array([1, 1, 1]), [[], [], []]
    for index in range(12):
        logits = table[tokens]
        expected = np.stack([penalised(logits[row], prompts[row], outputs[row], **options[row]) for row in range(3)])
        generated = jnp.full(3, index, jnp.int32)
        got = processed_logits(jnp.asarray(logits), state, variant, generated)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        output, state = step(jnp.asarray(logits), state, variant, generated)
        tokens = np.asarray(output.tokens)
        np.testing.assert_array_equal(tokens, expected.argmax(axis=1))
        for row in range(3):
            outputs[row].append(int(tokens[row]))


def test_penalties_by_hand():
    # Prompt holds token 0; tokens 1, 1, 2 were generated. Repetition halves 0, 1, 2 (doubles them where negative),
    # frequency takes .5 an occurrence and presence .25 once, from generated tokens only.
    logits = np.array([[4.0, 4.0, -4.0, 4.0]], np.float32)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    state, variant = build([params], vocab=4, prompts=[[0]], output_token_ids=[[1, 1, 2]])
    got = processed_logits(jnp.asarray(logits), state, variant, jnp.array([3]))
    np.testing.assert_array_equal(got, [[2.0, 2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 4.0]])


def test_bias_comes_before_the_penalties_and_masks_before_the_bias():
    logits = np.array([[1.0, 1.0, 0.0, 0.0]], np.float32)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 2: 100.0}, min_tokens=1, temperature=0.0)
    state, variant = build([params], vocab=4, prompts=[[0, 1]], eos=[2])
    got = processed_logits(jnp.asarray(logits), state, variant, jnp.array([0]))
    np.testing.assert_array_equal(got, [[2.0, 0.5, -np.inf, 0.0]])


# Failures.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", ["one nan", "all nan", "all -inf", "+inf", "nan in padding"])
def test_k1_non_finite_logits_flag_their_row_and_no_other(bad, temperature, table):
    logits = table[:4].copy()
    match bad:
        case "one nan":
            logits[2, 7] = np.nan
        case "all nan":
            logits[2] = np.nan
        case "all -inf":
            logits[2] = -np.inf
        case "+inf":
            logits[2, 7] = np.inf
        case "nan in padding":  # the normaliser of the logprobs is NaN
            logits[2, 63] = np.nan
    params = [SamplingParams(seed=row, temperature=temperature, top_p=0.9, logprobs=2) for row in range(4)]
    state, variant = build(params, vocab=64, num_tokens=60)
    generated = np.zeros(4, np.int32)
    output, _ = step(logits, state, variant, generated)
    clean, _ = step(table[:4], state, variant, generated)
    np.testing.assert_array_equal(output.valid, [True, True, False, True])
    assert 0 <= int(output.tokens[2]) < 64
    neighbours = np.array([0, 1, 3])
    for got, expected in zip(jax.tree.leaves(output), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(got[neighbours], expected[neighbours])


def test_k1_a_row_with_nothing_left_to_draw_is_flagged():
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[0, 1])
    state, variant = build([params, SamplingParams(temperature=0.0)], vocab=4, num_tokens=2)
    output, _ = step(np.zeros((2, 4), np.float32), state, variant, np.zeros(2, np.int32))
    np.testing.assert_array_equal(output.valid, [False, True])


def test_minus_infinity_in_some_places_is_no_failure():
    logits = np.full((1, 8), -np.inf, np.float32)
    logits[0, 5] = -3e38
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)):
        state, variant = build([params], vocab=8)
        output, _ = step(logits, state, variant, np.zeros(1, np.int32))
        assert (bool(output.valid[0]), int(output.tokens[0])) == (True, 5)


# Variants.


def test_a_batch_gets_the_narrowest_variant():
    def variant(*params):
        return build(params)[1]

    assert variant(SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=0.1)) == SamplerVariant(16)
    assert variant(SamplingParams(top_k=16)) == SamplerVariant(16, greedy=False)
    assert variant(SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)) == SamplerVariant(
        16, greedy=False, top_p=True
    )
    assert variant(*MIXED, SamplingParams(logprobs=0), SamplingParams(logprobs=3)) == SamplerVariant(
        16,
        greedy=False,
        top_k=True,
        top_p=True,
        min_p=True,
        penalties=True,
        logit_bias=True,
        min_tokens=True,
        num_logprobs=3,
    )


@pytest.mark.parametrize("params", MIXED, ids=range(8))
def test_a_wider_variant_gives_the_same_tokens(params, table):
    np.testing.assert_array_equal(decode(table, [params], eos=[2], variant=WIDEST), decode(table, [params], eos=[2]))


def test_variants_unite_and_a_narrower_one_is_refused():
    greedy, filtered = SamplerVariant(64), SamplerVariant(64, greedy=False, top_k=True, num_logprobs=2)
    assert greedy | filtered == filtered
    assert filtered | WIDEST == WIDEST
    with pytest.raises(ValueError, match="only variants of one model unite"):
        greedy | SamplerVariant(63)
    with pytest.raises(ValueError, match="does not serve this batch"):
        build([SamplingParams(top_p=0.5)], vocab=64, variant=filtered)
    state, _ = build([SamplingParams(temperature=0.0)], vocab=64)
    with pytest.raises(ValueError, match="build both with build_sampling_state"):
        sample(jnp.zeros((1, 64)), state, filtered, jnp.zeros(1, jnp.int32))


def equations(jaxpr):
    """Those of a jaxpr and of all within it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def primitives(jaxpr) -> set[str]:
    return {equation.primitive.name for equation in equations(jaxpr)}


def sizes_of(jaxpr, primitive: str) -> list[int]:
    """Elements that each use of a primitive makes."""
    return [equation.outvars[0].aval.size for equation in equations(jaxpr) if equation.primitive.name == primitive]


@pytest.mark.parametrize(
    ("params", "absent"),
    [
        (
            SamplingParams(temperature=0.0),
            {"sort", "cumsum", "top_k", "exp", "while", "random_bits", "threefry2x32", "scatter"},
        ),
        (SamplingParams(), {"sort", "cumsum", "top_k", "while", "scatter"}),
        (SamplingParams(min_p=0.1), {"sort", "cumsum", "top_k"}),
        (SamplingParams(top_k=5, top_p=0.9, min_p=0.1), {"sort", "top_k"}),
    ],
    ids=["greedy", "plain", "min_p", "filters"],
)
def test_a_variant_contains_only_what_it_needs(params, absent):
    state, variant = build([params] * 2, vocab=512, num_tokens=500)
    arguments = (jnp.zeros((2, 512)), state, jnp.zeros(2, jnp.int32))
    function = functools.partial(lambda logits, state, generated: sample(logits, state, variant, generated))
    names = primitives(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert "reduce" in names  # of the largest logit and its place
    assert not names & absent
    compiled = jax.jit(function).lower(*arguments).compile().as_text()
    assert " sort(" not in compiled
    assert "TopK" not in compiled
    on_gpu = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.sort" not in on_gpu
    assert ("cumsum" in on_gpu) == ("cumsum" not in absent)


def test_the_primitives_of_a_sort_would_be_found():
    jaxpr = jax.make_jaxpr(jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.sort(y), x)))(jnp.zeros(4))
    assert "sort" in primitives(jaxpr.jaxpr)


def test_only_counts_are_kept_for_each_vocabulary_entry():
    plain, _ = build([SamplingParams(top_k=3, logit_bias={1: 1.0}, min_tokens=1)], vocab=4096)
    assert max(leaf.size for leaf in jax.tree.leaves(plain)) < 4096
    penalties, _ = build([SamplingParams(presence_penalty=1.0)], vocab=4096)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(penalties) if leaf.size >= 4096) == 5 * 4096


# Building.


def test_lists_of_different_lengths_are_refused_not_cut():
    params = [SamplingParams(), SamplingParams()]
    for name in ("seeds", "sample_indices"):
        with pytest.raises(ValueError, match=f"{name} has 1 entries for 2 sampling parameters"):
            build(params, **{name: [1]})
    with pytest.raises(ValueError, match="prompt_token_ids has 1 entries"):
        build(params, prompts=[[1]])
    with pytest.raises(ValueError, match="batch_size is 1, less than the 2 rows"):
        build(params, batch_size=1)


def test_ids_outside_the_vocabulary_are_refused():
    params = [SamplingParams(repetition_penalty=1.1)]
    with pytest.raises(ValueError, match="prompt has token id 16; expected 0 to 15"):
        build(params, prompts=[[3, 16]])
    with pytest.raises(ValueError, match="output has token id -1"):
        build(params, output_token_ids=[[-1]])


def test_lists_grow_in_powers_of_two():
    widths = []
    for count in (1, 4, 5, 9):
        state, _ = build([SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))])
        assert state.logit_bias is not None
        widths.append(state.logit_bias.ids.shape[1])
    assert widths == [4, 4, 8, 16]


def test_logits_must_be_float32():
    state, variant = build([SamplingParams()])
    with pytest.raises(Exception, match="logits"):
        sample(jnp.zeros((1, 16), jnp.bfloat16), state, variant, jnp.zeros(1, jnp.int32))


def test_the_largest_logit_and_its_place_are_those_of_argmax(rng: np.random.Generator) -> None:
    """With ties, zeros of both signs, infinities and NaN anywhere."""
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    rows = [rng.integers(-2, 3, 700).astype(np.float32) for _ in range(64)]
    for count, row in enumerate(rows):
        row[rng.integers(0, 700, count % 8)] = rng.choice(special, count % 8)
    rows += [np.full(700, number, np.float32) for number in special]
    logits = jnp.asarray(np.stack(rows))
    largest, places = largest_of(logits)
    expected = jnp.argmax(logits, axis=1)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(largest, logits[jnp.arange(len(rows)), expected])
