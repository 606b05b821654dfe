"""How the INT4 kernel for many rows writes its sums: each thread its own, or as whole lines."""

from typing import Any

from pallas_kernels.int4_matmul.mosaic import Arguments
from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.wide_plan import LINE, LINES, Part, WidePlan


def store(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """Writes sums of one strip: [token block of 8][row r, token; the next token; row r + 8, ...]."""
    tokens = plan.schedule.tokens
    feature = (part.first_strip + strip) * STRIP + w.lane // 4
    token = part.token_tile * tokens + w.lane % 4 * 2
    offset = (part.slice * plan.rows + token) * plan.out_features + feature
    for i, value in enumerate(sums):
        next_token, next_feature = 8 * (i // 4) + i % 2, 8 * (i // 2 % 2)
        inside = feature + next_feature < plan.out_features
        if plan.rows % tokens:
            inside = inside & (token + next_token < plan.rows)
        w.store_at(a.out, offset, next_token * plan.out_features + next_feature, value, a.out_dtype, inside)


def store_lines(w: Any, plan: WidePlan, a: Arguments, part: Part, strip: Any, sums: Any) -> None:
    """The same through shared memory, where a warpgroup's 64 features of a token become 128 neighbouring bytes."""
    tokens = plan.schedule.tokens
    buffer = w.warp // 4 * plan.lines_bytes + plan.lines_start
    # Rows of 8 x 8 matrices are tokens: lanes 0-7 point to those of the strip's first 8 features, 8-15 to the others.
    mine = buffer + w.lane % 8 * LINE + w.lane // 8 % 2 * 16 + w.warp % 4 * (2 * STRIP)
    thread = w.thread % 128
    feature = (part.first_strip + strip - w.warp % 4) * STRIP + thread % 8 * 8
    for first in range(0, tokens, LINES):
        count = min(LINES, tokens - first)
        for block in range(count // 8):
            values = sums[(first + 8 * block) // 2 :][:4]
            words = [w.pack(values[i], values[i + 1], a.out_dtype) for i in (0, 2)]
            w.store_transposed(mine, block * 8 * LINE, words)
        w.warpgroup_barrier()
        for piece in range(0, count * 8, 128):
            within = thread // 8 + piece // 8
            token = part.token_tile * tokens + first + within
            inside = (feature < plan.out_features) & (token < plan.rows) & (within < count)
            # Past the last token there are lines of other tokens, or of none: read, but not written.
            words = w.shared_words(buffer + thread // 8 * LINE + thread % 8 * 16, piece // 8 * LINE)
            w.store_words(a.out, token * plan.out_features + feature, words, inside)
        w.warpgroup_barrier()
