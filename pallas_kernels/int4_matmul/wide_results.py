"""How the INT4 kernel for many rows writes its sums: each thread its own, as whole lines, or for the next product."""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.int4_matmul.mosaic import Arguments
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.wide_plan import LINE, Part, WidePlan
from pallas_kernels.token_order import STAGE


def store(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """Writes sums of one strip: [token block of 8][row r, token; the next token; row r + 8, ...]."""
    tokens = plan.schedule.tokens
    feature = (part.first_strip + strip) * STRIP + w.lane // 4
    token = part.first_token + w.lane % 4 * 2
    offset = (part.slice * plan.rows + token) * plan.results + feature
    for i, value in enumerate(sums):
        next_token, next_feature = 8 * (i // 4) + i % 2, 8 * (i // 2 % 2)
        inside = feature + next_feature < plan.results
        if plan.rows % tokens:
            inside = inside & (token + next_token < plan.rows)
        w.store_at(a.out, offset, next_token * plan.results + next_feature, value, a.out_dtype, inside)


def store_lines(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """The same through shared memory, where a warpgroup's 64 features of a token become 128 neighbouring bytes."""
    thread = w.thread % 128
    buffer = w.warp // 4 * plan.lines_bytes + plan.lines_start
    feature = (part.first_strip + strip - w.warp % 4) * STRIP + thread % 8 * 8

    def write(first: int, count: int) -> None:
        for piece in range(0, count * 8, 128):
            within = thread // 8 + piece // 8
            token = part.first_token + first + within
            inside = (feature < plan.results) & (token < plan.rows) & (within < count)
            # Past the last token there are lines of other tokens, or of none: read, but not written.
            words = w.shared_words(buffer + thread // 8 * LINE + thread % 8 * 16, piece // 8 * LINE)
            w.store_words(a.out, token * plan.results + feature, words, inside)

    through_lines(w, plan, a.out_dtype, sums, buffer, write)


def store_ordered(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """The same in the order of the next product's x: what `wide_arrange` makes of rows, but for tokens past the last.

    A thread has a piece of 16 bytes, which are four words of 64 neighbouring bytes of a token; eight threads with
    neighbouring tokens write a line.
    """
    assert plan.result_order is not None
    tokens, run = plan.result_order.tokens, plan.result_order.run
    thread = w.thread % 128
    buffer = w.warp // 4 * plan.lines_bytes + plan.lines_start
    pieces = 4 if plan.halves else 8  # of a token
    together = min(16 // pieces, plan.lines // 8)  # blocks of 8 tokens
    piece, later = thread // 8 % pieces, thread // (8 * pieces)
    idle = together * pieces < 16  # some threads have no token
    if idle:
        later = later % together
    feature = (part.first_strip + strip - w.warp % 4) * STRIP
    first_word, stride = (piece % 4, 4) if run == 2 else (piece % 4 // 2 * 8 + piece % 2, 2)
    source = buffer + (later * 8 + thread % 8) * LINE + piece // 4 * 64 + first_word * 4
    place = feature // 8 + piece

    def write(first: int, count: int) -> None:
        for block in range(0, count // 8, together):
            within = later * 8 + thread % 8 + 8 * block
            token = part.first_token + first + within
            inside = (feature < plan.results) & (token < plan.rows) & (within < count)
            if idle:
                inside = inside & (thread < 8 * together * pieces)
            words = [w.shared_word(source, 8 * block * LINE + 4 * stride * q) for q in range(4)]
            tile, in_tile = token // tokens, token % tokens
            start = tile * (plan.results // STAGE * 16) + place
            w.store_words(a.out, (start * tokens + in_tile) * 8, words, inside)

    through_lines(w, plan, "bfloat16", sums, buffer, write)


def through_lines(
    w: Any, plan: WidePlan, dtype: str, sums: Any, buffer: Any, write: Callable[[int, int], None]
) -> None:
    """Puts sums into shared memory as lines, some tokens at a time, and has them written: `write(first, count)`."""
    tokens = 2 * len(sums)
    # Rows of 8 x 8 matrices are tokens: lanes 0-7 point to those of the strip's first 8 features, 8-15 to the others.
    mine = buffer + w.lane % 8 * LINE + w.lane // 8 % 2 * 16
    mine = mine + (w.warp % 2 * (2 * STRIP) + w.warp % 4 // 2 * (8 * LINE) if plan.halves else w.warp % 4 * (2 * STRIP))
    for first in range(0, tokens, plan.lines):
        count = min(plan.lines, tokens - first)
        blocks = [sums[(first + 8 * block) // 2 :][:4] for block in range(count // 8)]
        if plan.halves:
            blocks = combined(w, plan, blocks, buffer)
        for i, values in enumerate(blocks):
            words = [w.pack(values[j], values[j + 1], dtype) for j in (0, 2)]
            w.store_transposed(mine, i * (16 if plan.halves else 8) * LINE, words)
        w.warpgroup_barrier()
        write(first, count)
        w.warpgroup_barrier()


def combined(w: Any, plan: WidePlan, blocks: Sequence[Any], buffer: Any) -> list[Any]:
    """silu(gate) * other where one warp has a strip's gates and another its others, both of all blocks of 8 tokens.

    The gates' warp does every second block, from the first one on, and the other warp those between: each gives the
    other what it needs through the lines' place in shared memory.
    """
    is_gate = w.warp % 4 < 2
    if len(blocks) % 2:
        blocks = [*blocks, blocks[-1]]  # nobody reads the results of what there is twice
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    room = plan.lines // 16 * 4 * 128
    here, there = (buffer + warp % 4 * room + w.lane * 4 for warp in (w.warp, w.warp + 2))
    for i, (even, odd) in enumerate(pairs):
        for j in range(4):
            w.shared_store(here, w.select(is_gate, odd[j], even[j]), None, (4 * i + j) * 128)
    w.warpgroup_barrier()
    results = []
    for i, (even, odd) in enumerate(pairs):
        own = [w.select(is_gate, even[j], odd[j]) for j in range(4)]
        given = [w.shared_number(there, (4 * i + j) * 128) for j in range(4)]
        both = [(w.select(is_gate, a, b), w.select(is_gate, b, a)) for a, b in zip(own, given, strict=True)]
        results.append([gated(w, *pair) for pair in both])
    w.warpgroup_barrier()
    return results


def gated(w: Any, gate: Any, other: Any) -> Any:
    return gate * w.sigmoid(gate) * other
