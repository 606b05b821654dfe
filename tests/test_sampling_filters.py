"""Top-k, top-p and min-p against a sort in float64, on random and on adversarial rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import kept_tokens

from jaxinfer import sampling_filters
from jaxinfer.sampling_filters import keep_mask, largest_threshold, ordered_bits

VOCAB = 24
TOLERANCE = 1e-5  # of the mass: float32 sums of 24 terms are far better, decisions on the border aside

AWKWARD = [
    -np.inf,
    -3e38,
    -1e30,
    -5.0,
    -1e-30,
    -0.0,
    0.0,
    1e-30,
    1.0,
    float(np.nextafter(np.float32(1), np.float32(2))),
    5.0,
    1e30,
    3e38,
]
logit = st.one_of(
    st.sampled_from(AWKWARD),
    st.integers(-3, 3).map(float),
    st.floats(-20, 20, width=32, allow_subnormal=False),
)
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -np.inf)


@jax.jit
def device_mask(logits, temperature, top_k, top_p, min_p):
    weights = jnp.exp((logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None])
    return keep_mask(logits, weights, top_k, top_p, min_p)


def device_kept(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """Finite tokens that the device keeps of one row."""
    logits = np.asarray([row], np.float32)
    mask = device_mask(
        logits,
        np.array([temperature], np.float32),
        np.array([top_k or len(row)], np.int32),
        np.array([top_p], np.float32),
        np.array([min_p], np.float32),
    )
    return {int(token) for token in np.flatnonzero(np.asarray(mask)[0] & np.isfinite(logits[0]))}


@settings(max_examples=300, deadline=None)
@given(
    row=rows,
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(1e-8, 1.0)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1.0)),
)
def test_kept_tokens_equal_the_sorted_reference(row, temperature, top_k, top_p, min_p):
    row = np.asarray(row, np.float32)
    kept = device_kept(row, temperature, top_k, top_p, min_p)
    fewest = kept_tokens(row, temperature, top_k, top_p * (1 - TOLERANCE), min(1.0, min_p * (1 + TOLERANCE)))
    most = kept_tokens(row, temperature, top_k, min(1.0, top_p * (1 + TOLERANCE)), min_p * (1 - TOLERANCE))
    assert set(fewest) <= kept <= set(most)
    assert kept == set(most[: len(kept)]), "not the most probable tokens, or equal ones not by id"


@settings(max_examples=200, deadline=None)
@given(row=rows, top_k=st.integers(1, VOCAB))
def test_top_k_is_exact(row, top_k):
    row = np.asarray(row, np.float32)
    assert device_kept(row, top_k=top_k) == set(kept_tokens(row, top_k=top_k))
    assert device_kept(row, top_k=1) == {int(np.argmax(row))}


@settings(max_examples=100, deadline=None)
@given(row=rows, temperature=st.sampled_from([0.01, 1.0, 100.0]))
def test_filters_that_are_off_keep_everything_and_tiny_top_p_is_argmax(row, temperature):
    finite = {token for token, value in enumerate(row) if value > -np.inf}
    assert device_kept(row, temperature) == finite
    assert device_kept(row, temperature, top_p=1e-8) == {int(np.argmax(np.asarray(row, np.float32)))}


@pytest.mark.parametrize(("top_p", "count"), [(0.74, 2), (0.75, 2), (0.76, 3), (1.0, 4), (1e-8, 1)])
def test_c1_top_p_at_its_edges(top_p, count):
    assert len(device_kept(np.log([0.5, 0.25, 0.125, 0.125]), top_p=top_p)) == count


@pytest.mark.parametrize(("top_p", "count"), [(0.8, 2), (1.0, 4), (1e-8, 1)])
def test_c1_top_p_of_decimal_fractions(top_p, count):
    assert len(device_kept(np.log([0.5, 0.3, 0.1, 0.1]), top_p=top_p)) == count


def test_c1_sums_that_reach_top_p_exactly_suffice():
    # Whole weights of sum s, and top_p = (their first i) / s: float32 rounds logarithms, sums and quotients.
    rng = np.random.default_rng(4)
    for _ in range(300):
        weights = np.sort(rng.choice(np.arange(1, 40), size=8, replace=False))[::-1]
        count = int(rng.integers(1, 8))
        kept = device_kept(np.log(weights / weights.sum()), top_p=float(weights[:count].sum() / weights.sum()))
        assert kept == set(range(count)), (weights, count)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"temperature": 0.5, "top_p": 0.7}, 1),  # p becomes [.7273, .1818, .0455, .0455]
        ({"temperature": 1.0, "top_p": 0.7}, 2),
        ({"temperature": 1.0, "min_p": 0.3}, 2),
        ({"temperature": 0.5, "min_p": 0.3}, 1),
        ({"temperature": 0.1, "min_p": 1.0}, 1),
        ({"temperature": 10.0, "min_p": 1.0}, 1),
    ],
)
def test_c3_temperature_comes_before_the_filters_and_min_p_is_of_probabilities(options, count):
    assert len(device_kept(np.log([0.5, 0.25, 0.125, 0.125]), **options)) == count


def test_top_p_is_of_the_mass_that_top_k_left():
    # Of [.4, .3, .2, .1] top_k=3 leaves [.444, .333, .222]: two reach 0.75, while of the whole they hold 0.7.
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert device_kept(row, top_p=0.75) == {0, 1, 2}
    assert device_kept(row, top_k=3, top_p=0.75) == {0, 1}


def test_ties_go_to_the_lower_ids():
    flat = np.zeros(10)
    assert device_kept(flat, top_k=4) == {0, 1, 2, 3}
    assert device_kept(flat, top_p=0.5) == {0, 1, 2, 3, 4}
    assert device_kept(flat, top_k=4, top_p=0.5) == {0, 1}
    assert device_kept([1.0, 0.0, 2.0, 0.0, -0.0, 0.0], top_k=4) == {0, 1, 2, 3}


def test_a_vocabulary_of_real_size():
    # Several temperatures' worth of spread, 151,936 logits, a few of them equal.
    rng = np.random.default_rng(1)
    row = (rng.normal(size=151_936) * 3).astype(np.float32)
    row[rng.integers(0, row.size, 500)] = np.float32(7.5)
    for options in ({"top_k": 50}, {"top_k": 700}, {"top_p": 0.9}, {"top_k": 1000, "top_p": 0.6}):
        kept, expected = device_kept(row, **options), set(kept_tokens(row, **options))
        # Top-p decides on float32 sums of 151,936 terms: a border may move by a few tokens of equal weight.
        assert len(kept ^ expected) <= (0 if "top_p" not in options else 3), options


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_the_search_for_gpus_finds_the_thresholds_of_the_search_for_cpus(dtype):
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(size=(8, 300)) * 4, 1).astype(np.float32)
    weights = rng.integers(0, 5, logits.shape).astype(dtype)  # whole numbers: any order of summing is exact
    target = (weights.sum(axis=1) * rng.uniform(0.1, 1.0, 8)).astype(dtype).clip(1)
    keys = ordered_bits(jnp.asarray(logits))
    expected = []
    for row in range(8):
        values = np.sort(np.unique(logits[row]))
        masses = np.array([weights[row][logits[row] >= value].sum() for value in values])
        expected.append(values[np.flatnonzero(masses >= target[row])[-1]])
    expected_keys = ordered_bits(jnp.asarray(expected))
    for digit_bits in (1, 4):
        search = jax.jit(functools.partial(sampling_filters._search, digit_bits=digit_bits))
        np.testing.assert_array_equal(search(keys, jnp.asarray(weights), jnp.asarray(target)), expected_keys)
    np.testing.assert_array_equal(largest_threshold(keys, jnp.asarray(weights), jnp.asarray(target)), expected_keys)


def test_ordered_bits_keep_the_order_of_floats():
    values = np.array([-np.inf, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, np.inf], np.float32)
    keys = np.asarray(ordered_bits(jnp.asarray(values))).astype(np.int64)
    np.testing.assert_array_equal(np.sign(np.diff(keys)), np.sign(np.diff(values.astype(np.float64))))
    assert keys[4] == keys[5]
