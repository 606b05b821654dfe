"""The most probable token and what the next pass over it begins with, on Hopper in one kernel.

As XLA's kernels these are two for the token and one each for its embedding, its position and its angles: six that take
as long as a launch takes. Here a cluster of eight blocks looks through the logits, a share each; the first block gets
what the others found, and copies the token's embedding. The last block, which needs no logit for that, copies the
angles of the next place.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.next_token.plan import BLOCKS, FOUR, WARPS, NextPlan


class Arguments(NamedTuple):
    """The kernel's arrays in global memory, see `choose_next`."""

    logits: Any
    table: Any
    places: Any
    start: Any
    cos: Any
    sin: Any
    token: Any
    x: Any
    next_places: Any
    next_cos: Any
    next_sin: Any


def choose(w: Any, plan: NextPlan, a: Arguments, block: Any) -> None:
    """One warp's work: the instructions are emitted through `w`, a ClusterWarp (or its NumPy twin in the tests)."""
    w.expect_sent(plan.barrier, 8 * BLOCKS)
    w.cluster_arrive()
    best = _of_lane(w, plan, a.logits, block)
    w.shared_store_words(w.warp * 8, _of_lanes(w, *best))  # all lanes write the same
    w.block_barrier()
    w.cluster_wait()

    def send() -> None:
        found = _of_lanes(w, *w.shared_words(w.lane % WARPS * 8, 0, 2))
        w.send_words(block * 8 + plan.inbox, found, w.integer(0), plan.barrier, w.lane < 1)

    w.when(w.warp < 1, send)
    w.when(w.integer(BLOCKS - 2) < block, functools.partial(_copy_place, w, plan, a))
    pieces = plan.hidden // 8

    def embed() -> None:
        w.wait_sent(plan.barrier)
        _, token = _of_lanes(w, *w.shared_words(w.lane % BLOCKS * 8, plan.inbox, 2))
        inside, piece = w.thread < pieces, w.select(w.thread < pieces, w.thread, w.integer(0))
        words = w.load_words(a.table, token * plan.hidden + piece * 8, 4, None)
        _, newest = w.load_integers(a.places)
        words = [w.select(newest < 0, w.integer(0), word) for word in words]
        w.store_words(a.x, piece * 8, words, inside)
        w.store_integers(a.token, [token], w.thread < 1)

    w.when((block < 1) & (w.warp < -(-pieces // 32)), embed)


def _of_lane(w: Any, plan: NextPlan, logits: Any, block: Any) -> tuple[Any, Any]:
    """The order and the place of the best of the lane's logits, the first of equals."""
    lanes = BLOCKS * WARPS * 32
    first = (block * (WARPS * 32) + w.thread) * FOUR
    fours = []
    for turn in range(plan.turns):
        place, inside = first + turn * lanes * FOUR, None
        if (turn + 1) * lanes * FOUR > plan.vocab:
            inside = place < plan.vocab
            place = w.select(inside, place, w.integer(0))
        fours.append(w.load_four(logits, place, inside))
    w.warp_barrier()  # ptxas keeps to this order: all are asked for before one is looked at
    best, at = w.number(float("-inf")), first
    for turn, four in enumerate(fours):
        for i, number in enumerate(four):
            place = first + (turn * lanes * FOUR + i)
            better = best < number
            if (turn + 1) * lanes * FOUR > plan.num_tokens:
                better = better & (place < plan.num_tokens)
            best, at = w.select(better, number, best), w.select(better, place, at)
    # Lanes that have none are behind all others, and name a place that exists.
    return w.order_of(best + 0.0), w.select(at < plan.num_tokens, at, w.integer(plan.num_tokens - 1))


def _of_lanes(w: Any, order: Any, place: Any) -> tuple[Any, Any]:
    """The best of all lanes', the first of equals, for all lanes."""
    best = w.largest_integer(order)
    return best, w.smallest_integer(w.select(order < best, w.integer(0x7FFFFFFF), place))


def _copy_place(w: Any, plan: NextPlan, a: Arguments) -> None:
    """The next token's position and angles: two warps do it."""
    pieces = plan.half // FOUR

    def copy(source: Any, target: Any) -> None:
        first, newest = w.load_integers(a.start)[0], w.load_integers(a.places)[1]
        following = newest + 1
        row = w.select(newest < 0, w.integer(0), following - first)
        row = w.select(row < plan.rows, row, w.integer(plan.rows - 1))
        inside = w.lane < pieces
        piece = w.select(inside, w.lane, w.integer(0)) * FOUR
        # Counted in elements of 16 bits.
        words = w.load_words(source, (row * plan.half + piece) * 2, 4, None)
        w.store_words(target, piece * 2, words, inside)
        following = w.select(newest < 0, newest, following)
        w.store_integers(a.next_places, [following, following], w.thread < 1)

    w.when(w.warp < 1, functools.partial(copy, a.cos, a.next_cos))
    w.when((w.integer(0) < w.warp) & (w.warp < 2), functools.partial(copy, a.sin, a.next_sin))


@functools.partial(jax.jit, static_argnames=("num_tokens",))
def choose_next(
    logits: jax.Array,
    table: jax.Array,
    places: jax.Array,
    start: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_tokens: int,
) -> tuple[jax.Array, ...]:
    """token [1] int32, x [hidden] bf16, its places [2] int32, cos and sin [half].

    logits [vocab] float32, table [>= num_tokens, hidden] bf16, places and start [2] int32, cos and sin [rows, half]
    float32.

    It does not bring the next kernel's weights into the L2 cache: the embedding would wait behind them.
    """
    plan = NextPlan(logits.shape[0], num_tokens, table.shape[1], *cos.shape)

    def emit(w: Any, references: Any, block: Any) -> None:
        choose(w, plan, Arguments(*references), block)

    integers = [jax.ShapeDtypeStruct((count,), jnp.int32) for count in (1, 2)]
    angles = jax.ShapeDtypeStruct((plan.half,), jnp.float32)
    return tuple(
        run_blocks(
            emit,
            [logits, table, places, start, cos, sin],
            [integers[0], jax.ShapeDtypeStruct((plan.hidden,), table.dtype), integers[1], angles, angles],
            blocks=BLOCKS,
            cluster=BLOCKS,
            warps=WARPS,
            name="next_token",
            shared_floats=plan.shared_bytes // 4,
        )
    )
