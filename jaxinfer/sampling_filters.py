"""Top-k, top-p and min-p on the device without sorting the vocabulary.

Both filters keep an upper set of the logits: everything above a threshold, plus the lowest ids among the
tokens that equal it. The threshold is searched digit by digit over the bits of the float32 logits seen as
integers of the same order, for all rows at once, so it is exact and ties are known to be ties. A digit costs
one reduction over the vocabulary; a sort of 151,936 logits took 30 ms a row on a CPU core, a search 1 ms.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

TOP_P_SLACK = 2.0**-21
"""Relative slack on the mass that top-p asks for, four units in the last place of float32: without it the sum
of 0.5 and 0.3 may miss 0.8 by rounding, and a third token would be kept."""


def keep_mask(
    logits: Float32[Array, "batch vocab"],
    weights: Float32[Array, "batch vocab"],
    top_k: Int32[Array, " batch"] | None = None,
    top_p: Float32[Array, " batch"] | None = None,
    min_p: Float32[Array, " batch"] | None = None,
) -> Bool[Array, "batch vocab"]:
    """Tokens that survive min-p, then top-k, then top-p; None leaves that filter out of the program.

    `logits` give the order of the tokens, `weights` their probabilities up to a factor for each row, as
    `exp((logits - max) / temperature)`, so the most probable token weighs 1. `top_k` is at least 1 (the
    vocabulary size turns it off for a row), `top_p` in (0, 1], `min_p` in [0, 1]. Exactly k tokens survive
    top-k; top-p keeps the fewest most probable of them whose share of their mass reaches p, so at least one.
    Of equal tokens the lower ids survive. A token of logit -inf may be marked as kept; it has no probability.
    """
    vocab = logits.shape[1]
    likely = None
    if min_p is not None:
        likely = weights >= min_p[:, None]
        weights = jnp.where(likely, weights, 0.0)
    if top_k is None and top_p is None:
        return jnp.ones_like(logits, bool) if likely is None else likely

    keys = ordered_bits(logits)
    threshold = jnp.zeros(logits.shape[0], jnp.uint32)
    allowed_ties = jnp.full(logits.shape[0], vocab, jnp.int32)
    if top_k is not None:
        threshold = largest_threshold(keys, jnp.ones_like(logits, jnp.int32), top_k)
        num_above = jnp.sum(keys > threshold[:, None], axis=1, dtype=jnp.int32)
        allowed_ties = top_k - num_above
    if top_p is not None:
        if top_k is None:
            mass = jnp.sum(weights, axis=1)
        else:
            mass_above, tie_weight = _mass_at(keys, weights, threshold)
            mass = mass_above + tie_weight * allowed_ties.astype(jnp.float32)
        target = top_p * mass * (1.0 - TOP_P_SLACK)
        nucleus = jnp.maximum(largest_threshold(keys, weights, target), threshold)
        mass_above, tie_weight = _mass_at(keys, weights, nucleus)
        needed = jnp.ceil((target - mass_above) / jnp.where(tie_weight > 0.0, tie_weight, 1.0))
        # Where both thresholds are one, the target is below the mass of the ties that top-k left: needed <= allowed.
        needed = jnp.clip(needed, 1.0, float(vocab)).astype(jnp.int32)
        active = top_p < 1.0  # a mass rounded down must not cost p=1 its last tokens
        threshold = jnp.where(active, nucleus, threshold)
        allowed_ties = jnp.where(active, needed, allowed_ties)

    ties = keys == threshold[:, None]
    lower_ids = jnp.cumsum(ties, axis=1, dtype=jnp.int32) <= allowed_ties[:, None]
    keep = (keys > threshold[:, None]) | (ties & lower_ids)
    return keep if likely is None else keep & likely


def ordered_bits(values: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Integers in the order of `values`, equal where they are equal: both zeros map to one integer."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def largest_threshold(
    keys: UInt32[Array, "batch vocab"],
    weights: Float32[Array, "batch vocab"] | Int32[Array, "batch vocab"],
    target: Float32[Array, " batch"] | Int32[Array, " batch"],
) -> UInt32[Array, " batch"]:
    """For each row the largest t whose `sum(weights[keys >= t])` reaches a positive `target`; 0 if none does.

    A GPU is bound by launches: four bits a pass, 15 sums in one kernel, make about 30 kernels of what one bit a
    pass makes 96. A CPU is bound by arithmetic and takes one bit a pass.
    """
    return lax.platform_dependent(
        keys,
        weights,
        target,
        cpu=functools.partial(_search, digit_bits=1),
        default=functools.partial(_search, digit_bits=4),
    )


def _search(keys: Array, weights: Array, target: Array, digit_bits: int) -> Array:
    digits = range(1, 1 << digit_bits)
    zero = np.zeros((), weights.dtype)

    def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def refine(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The barrier makes all passes one kernel to compile, a third of the time, by hiding the shift from
        # constant folding; and by naming the target it keeps the passes of top-k and top-p apart, which would
        # else share their first comparisons through memory.
        threshold, shift, goal = lax.optimization_barrier((*carry, target))
        candidates = [threshold | (jnp.uint32(digit) << shift) for digit in digits]
        masses = lax.reduce(
            tuple(jnp.where(keys >= candidate[:, None], weights, zero) for candidate in candidates),
            (zero,) * len(digits),
            add,
            (1,),
        )
        # Masses fall as the digit grows, so the number of them that reach the target is the digit.
        digit = sum((mass >= goal).astype(jnp.uint32) for mass in masses)
        return threshold | (digit << shift), shift - jnp.uint32(digit_bits)

    threshold = jnp.zeros(keys.shape[0], jnp.uint32)
    shift = jnp.full(keys.shape[0], 32 - digit_bits, jnp.uint32)
    unroll = digit_bits > 1  # in a loop the GPU compiler would write each pass's 15 terms to memory
    return lax.fori_loop(0, 32 // digit_bits, refine, (threshold, shift), unroll=unroll)[0]


def _mass_at(keys: Array, weights: Array, threshold: Array) -> tuple[Array, Array]:
    """Mass of the keys above the threshold, and the weight of one key that equals it."""
    above = jnp.sum(jnp.where(keys > threshold[:, None], weights, 0.0), axis=1)
    tie_weight = jnp.max(jnp.where(keys == threshold[:, None], weights, 0.0), axis=1)
    return above, tie_weight
