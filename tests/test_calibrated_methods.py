"""AWQ and GPTQ on small random matrices, against the definitions written out in NumPy, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.weights import PermutedInputs, StackedOutputs
from jaxinfer.quantization.awq import STEPS, clip_and_round, scale_candidates, scaled_losses
from jaxinfer.quantization.gptq import Grid, codes_in_order, compensated_int8, compensated_rounding, error_propagation
from jaxinfer.quantization.moments import output_errors, values_of
from jaxinfer.quantization.rtn import CLIP_RATIOS, round_to_nearest
from jaxinfer.quantization.scaled import scale_outputs
from pallas_kernels.int4_matmul import PackedInt4, dequantize, from_codes, from_int8_codes, unpack_codes

OUT, IN, GROUP, SAMPLES = 12, 72, 32, 200
"""The last group has 8 inputs."""

KIND = {"bits": 4, "group_size": GROUP, "symmetric": False}


def inputs(seed: int = 0, width: int = IN) -> np.ndarray:
    """Correlated inputs, a few of them ten times as large as the others, as in language models."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, width)) @ (np.eye(width) + 0.3 * rng.normal(size=(width, width)) / np.sqrt(width))
    x[:, ::17] *= 10
    return x.astype(np.float32)


X = inputs()
MOMENTS = (X.T @ X / SAMPLES).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_t(4, (OUT, IN)).astype(np.float32) * np.float32(0.05)


def errors_of(packed: PackedInt4, weight: np.ndarray = WEIGHT) -> np.ndarray:
    """Mean square of each output's error, from the inputs themselves."""
    error = np.asarray(dequantize(packed), np.float64) - weight
    return ((X.astype(np.float64) @ error.T) ** 2).mean(axis=0)


def rounded(weight: np.ndarray, ratio: float = 1.0) -> np.ndarray:
    """Values of one group rounded to zero-point codes, its range cut to `ratio`."""
    low, high = min(weight.min(), 0.0), max(weight.max(), 0.0)
    scale = float(np.float16((high - low) * ratio / 15))
    zero = np.clip(np.round(-low * ratio / scale), 0, 15)
    return scale * (np.clip(np.round(weight / scale) + zero, 0, 15) - zero)


def groups(width: int) -> list[slice]:
    return [slice(start, min(start + GROUP, width)) for start in range(0, width, GROUP)]


def test_moments_give_the_error_of_the_outputs() -> None:
    error = np.random.default_rng(2).normal(size=(OUT, IN)).astype(np.float32)
    expected = ((X.astype(np.float64) @ error.T.astype(np.float64)) ** 2).mean(axis=0)
    np.testing.assert_allclose(output_errors(jnp.asarray(error), jnp.asarray(MOMENTS)), expected, rtol=1e-4)


def test_values_of_every_kind() -> None:
    scaled = scale_outputs(jnp.asarray(WEIGHT), dtype="int8")
    np.testing.assert_allclose(values_of(scaled), WEIGHT, atol=np.abs(WEIGHT).max() / 200)
    np.testing.assert_array_equal(values_of(WEIGHT), WEIGHT)
    rows = np.arange(12, dtype=np.uint8).reshape(2, 6)
    scales = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    four = from_codes(rows, scales, group_size=3)
    np.testing.assert_array_equal(values_of(four)[1], [-6.0, -3.0, 0.0, 4.0, 8.0, 12.0])
    order = np.array([5, 0, 1, 2, 3, 4], np.int32)
    np.testing.assert_array_equal(values_of(PermutedInputs(four, order))[1], [-3.0, 0.0, 4.0, 8.0, 12.0, -6.0])
    eight = from_int8_codes(rows, scales, group_size=3)
    np.testing.assert_array_equal(values_of(eight)[1], [-366.0, -363.0, -360.0, -476.0, -472.0, -468.0])
    np.testing.assert_array_equal(
        values_of(StackedOutputs((four, eight)))[1:4:2], [values_of(w)[1] for w in (four, eight)]
    )


# --- AWQ


def test_scales_are_those_of_the_paper() -> None:
    """x^r and x^r / w^(1 - r), each divided by the root of its smallest times its largest; ones first."""
    magnitudes = np.sqrt(np.diagonal(MOMENTS))
    found = np.asarray(scale_candidates(jnp.asarray(WEIGHT), jnp.asarray(magnitudes), group_size=GROUP))
    shares = np.concatenate(
        [np.abs(WEIGHT[:, g]) / (np.abs(WEIGHT[:, g]).max(axis=1, keepdims=True) + 1e-6) for g in groups(IN)], axis=1
    ).mean(axis=0)
    expected = [magnitudes ** (i / STEPS) for i in range(STEPS)]
    expected += [magnitudes ** (i / STEPS) / (shares ** (1 - i / STEPS) + 1e-4) for i in range(STEPS)]
    assert found.shape == (2 * STEPS, IN)
    np.testing.assert_array_equal(found[0], np.ones(IN))
    for candidate, scales in zip(found, expected, strict=True):
        np.testing.assert_allclose(candidate, scales / np.sqrt(scales.max() * scales.min()), rtol=1e-4)


def test_losses_of_scales() -> None:
    candidates = np.asarray(
        scale_candidates(jnp.asarray(WEIGHT), jnp.asarray(np.sqrt(np.diagonal(MOMENTS))), group_size=GROUP)
    )
    importance = np.linspace(0.5, 2, OUT).astype(np.float32)
    arrays = map(jnp.asarray, (WEIGHT, MOMENTS, candidates, importance))
    losses = np.asarray(scaled_losses(*arrays, **KIND))
    for scales, loss in list(zip(candidates, losses, strict=True))[::7]:
        scaled = (WEIGHT * scales).astype(np.float32)
        values = np.stack([np.concatenate([rounded(row[g]) for g in groups(IN)]) for row in scaled]) / scales
        expected = ((X.astype(np.float64) @ (values - WEIGHT).T) ** 2).mean(axis=0) @ importance
        np.testing.assert_allclose(loss, expected, rtol=0.02)  # a few codes lie on a tie that float32 sees otherwise
    assert losses.min() < 0.8 * losses[0]


def test_clipping_minimises_what_a_group_adds_to_the_output() -> None:
    packed = round_to_nearest(jnp.asarray(WEIGHT), moments=jnp.asarray(MOMENTS), **KIND)
    values = np.asarray(dequantize(packed))
    for row, g in itertools.product(range(OUT), groups(IN)):
        x = X[:, g].astype(np.float64)

        def added(values: np.ndarray, x: np.ndarray = x, row: int = row, g: slice = g) -> float:
            return float(((x @ (values - WEIGHT[row, g])) ** 2).mean())

        least = min(added(rounded(WEIGHT[row, g].astype(np.float64), ratio)) for ratio in CLIP_RATIOS)
        assert added(values[row, g]) <= least * 1.01 + 1e-12


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (4, False)])
def test_no_output_is_worse_than_by_rounding(bits: int, symmetric: bool) -> None:
    """Traps I5 and I7: zero points stay codes, also 0 and 15, and inputs need not be a multiple of the group."""
    kind = {"bits": bits, "group_size": GROUP, "symmetric": symmetric}
    rtn = round_to_nearest(jnp.asarray(WEIGHT), **kind)
    awq = clip_and_round(jnp.asarray(WEIGHT), jnp.asarray(MOMENTS), **kind)
    gptq = compensated_rounding(jnp.asarray(WEIGHT), jnp.asarray(MOMENTS), **kind)
    assert (errors_of(awq) <= errors_of(rtn) * 1.001).all()
    assert (errors_of(gptq) <= errors_of(awq) * 1.001).all()
    assert errors_of(gptq).sum() < 0.7 * errors_of(rtn).sum()
    for packed in (awq, gptq):
        assert packed.kind == ("symmetric" if symmetric else "zero_point")
        codes = np.asarray(unpack_codes(packed))
        low, high = (8 - 2 ** (bits - 1), 7 + 2 ** (bits - 1)) if symmetric else (0, 2**bits - 1)
        assert low <= codes.min() and codes.max() <= high
        assert packed.offsets is None or int(packed.offsets.max()) <= high


# --- GPTQ


def slow_codes(weight: np.ndarray, grid: PackedInt4, moments: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The definition: round one input, spread its error by the inverse of the moments that remain, take it out."""
    scales = np.repeat(np.asarray(grid.scales, np.float64), GROUP, axis=1)[:, : weight.shape[1]]
    zeros = np.repeat(np.asarray(grid.offsets, np.float64), GROUP, axis=1)[:, : weight.shape[1]]
    weight, codes = weight.astype(np.float64), np.zeros(weight.shape, np.uint8)
    left = list(order)
    while left:
        inverse = np.linalg.inv(moments[np.ix_(left, left)])
        here = left[0]
        code = np.clip(np.round(weight[:, here] / scales[:, here] + zeros[:, here]), 0, 15)
        error = weight[:, here] - scales[:, here] * (code - zeros[:, here])
        weight[:, left] -= np.outer(error, inverse[0] / inverse[0, 0])
        codes[:, here] = code
        left.pop(0)
    return codes


@pytest.mark.parametrize("width", [72, 160], ids=["less than a block", "a block and a part of one"])
def test_gptq_is_the_slow_definition(width: int) -> None:
    x = inputs(3, width).astype(np.float64)
    moments = (x.T @ x / SAMPLES).astype(np.float32)
    weight = np.random.default_rng(4).normal(0, 0.05, (6, width)).astype(np.float32)
    grid = round_to_nearest(jnp.asarray(weight), **KIND)
    order = np.argsort(-np.diagonal(moments), kind="stable").astype(np.int32)
    propagation = error_propagation(jnp.asarray(moments), jnp.asarray(order), 0.01)
    assert grid.offsets is not None
    scales, zeros = grid.scales.astype(jnp.float32), grid.offsets.astype(jnp.float32)
    found = codes_in_order(jnp.asarray(weight), Grid(scales, zeros, GROUP, 0, 15), jnp.asarray(moments), 0.01)
    damped = moments.astype(np.float64) + 0.01 * np.diagonal(moments).mean() * np.eye(width)
    expected = slow_codes(weight, grid, damped, order)
    assert (np.asarray(found) == expected).mean() > 0.995
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    np.testing.assert_allclose(np.asarray(propagation).T @ propagation, inverse, rtol=1e-2, atol=1e-3 * inverse.max())


def test_int8_on_the_same_scales() -> None:
    """No output errs more than by rounding, all together clearly less."""
    found, plain = (
        compensated_int8(jnp.asarray(WEIGHT), jnp.asarray(MOMENTS)),
        scale_outputs(jnp.asarray(WEIGHT), dtype="int8"),
    )
    errors, by_rounding = (output_errors(values_of(w) - WEIGHT, jnp.asarray(MOMENTS)) for w in (found, plain))
    assert (errors <= by_rounding * 1.001).all() and errors.sum() < 0.7 * by_rounding.sum()
    assert found.codes.dtype == jnp.int8 and int(jnp.abs(found.codes.astype(jnp.int32)).max()) == 127
    np.testing.assert_array_equal(found.scales, plain.scales)


def test_int8_in_groups() -> None:
    """GPTQ on the grid of clipped rounding: no output errs more than there, all together clearly less."""
    kind = {"bits": 8, "group_size": GROUP, "symmetric": True}
    found, start = (
        method(jnp.asarray(WEIGHT), jnp.asarray(MOMENTS), **kind) for method in (compensated_rounding, clip_and_round)
    )
    errors, by_rounding = (errors_of(packed) for packed in (found, start))
    assert (errors <= by_rounding * 1.001).all() and errors.sum() < 0.8 * by_rounding.sum()
    assert found.bits == 8 and found.group_size == GROUP
    np.testing.assert_array_equal(found.scales, start.scales)


def test_inputs_that_are_always_zero() -> None:
    """Their column may be anything, the others are as good as without them."""
    moments = MOMENTS.copy()
    moments[5], moments[:, 5] = 0.0, 0.0
    packed = compensated_rounding(jnp.asarray(WEIGHT), jnp.asarray(moments), **KIND)
    assert np.isfinite(np.asarray(dequantize(packed))).all()
    assert (
        float(output_errors(dequantize(packed) - WEIGHT, jnp.asarray(moments)).sum())
        < errors_of(round_to_nearest(jnp.asarray(WEIGHT), **KIND)).sum()
    )


def test_more_inputs_than_samples() -> None:
    """Moments of 8 samples have no inverse: damping gives them one."""
    x = X[:8].astype(np.float64)
    moments = (x.T @ x / 8).astype(np.float32)
    packed = compensated_rounding(jnp.asarray(WEIGHT), jnp.asarray(moments), **KIND)
    rtn = round_to_nearest(jnp.asarray(WEIGHT), **KIND)
    found, plain = (float(output_errors(dequantize(p) - WEIGHT, jnp.asarray(moments)).sum()) for p in (packed, rtn))
    assert found < 0.3 * plain


def test_methods_are_deterministic() -> None:
    for method in (clip_and_round, compensated_rounding):
        first, second = (method(jnp.asarray(WEIGHT), jnp.asarray(MOMENTS), **KIND) for _ in range(2))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(a, b)
