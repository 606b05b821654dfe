"""The Triton kernels of paged attention: flash decoding over pages, and the merge of its splits.

Imported only where triton is installed. Every size is a compile-time constant.
"""
# Triton is an optional extra, which the type checker need not see:
# pyright: reportMissingImports=false

import triton.language as tl

from pallas_kernels.triton_backend import kernel


@kernel
def product(a, b, acc):
    """acc + a b with float32 sums; float32 operands count in full."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@kernel
def int4(codes, dtype: tl.constexpr):
    """Codes from 0 to 15 less 8: as the last bits of a float32 near 2^23, which costs a quarter of a conversion."""
    return ((codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(dtype)


@kernel
def paged_attention_split(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,
    maximum_ptr,
    total_ptr,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of BLOCK_R query rows that share a KV head over one split of their sequence's keys.

    Query row r of a sequence and KV head is head r % group of token r // group. A warp owns 16 query rows, so maxima
    and sums stay inside it. Pages hold numbers of q's dtype or CODES, whose scales multiply logits and weights; where a
    row's WIDTH is half its HEAD_DIM, a byte has the codes of elements d and WIDTH + d. The splits share the keys that a
    sequence can see, whose number is only known here. Writes the weighted values, not normalised, and the logits'
    maximum (times log2 e) and sum; a split without keys writes no values.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    ROWS: tl.constexpr = TOKENS * GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    HALVES: tl.constexpr = WIDTH < HEAD_DIM
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_W)
    length = tl.load(lengths_ptr + sequence)
    position = length - TOKENS + row // GROUP  # the last key that a query row sees

    query = ((sequence * TOKENS + row // GROUP) * Q_HEADS + kv_head * GROUP + row % GROUP).to(tl.int64)
    inside = (row < ROWS)[:, None] & (d < WIDTH)[None, :]
    queries = q_ptr + query[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(queries, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    high_q, high_acc = q, acc
    if HALVES:
        high_q = tl.load(queries + WIDTH, mask=inside, other=0.0)

    start = 0
    if WINDOW is not None:
        start = tl.maximum(length - TOKENS - WINDOW + 1, 0) // KEYS * KEYS
    tiles = tl.cdiv(tl.maximum(length - start, 0), KEYS)
    first = start + split * tiles // SPLITS * KEYS
    last = start + (split + 1) * tiles // SPLITS * KEYS

    maximum = tl.full((BLOCK_R,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for begin in tl.range(first, last, KEYS, num_stages=STAGES):
        key = begin + tl.arange(0, KEYS)
        # What lies past the length may be NaN, and 0 * NaN is NaN: the last key is read again instead.
        stored = tl.minimum(key, length - 1)
        page = tl.load(table_ptr + sequence * PAGES + stored // PAGE)
        slot = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + stored % PAGE
        place = slot * WIDTH
        if BLOCK_W == WIDTH:
            k = tl.load(k_ptr + place[None, :] + d[:, None])
            v = tl.load(v_ptr + place[:, None] + d[None, :])
        else:
            k = tl.load(k_ptr + place[None, :] + d[:, None], mask=(d < WIDTH)[:, None], other=0)
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=(d < WIDTH)[None, :], other=0)
        logits = tl.zeros((BLOCK_R, KEYS), tl.float32)
        if HALVES:
            logits = product(q, int4(k & 15, dtype), logits)
            logits = product(high_q, int4(k >> 4, dtype), logits)
        else:
            logits = product(q, k.to(dtype), logits)
        if CODES:
            logits = logits * tl.load(k_scales_ptr + slot)[None, :]
        if SOFTCAP is not None:
            # tanh x = 1 - 2 / (e^2x + 1), which neither overflows nor gives inf / inf.
            wide = logits * (2.0 * SCALE / SOFTCAP)
            logits = (1.0 - 2.0 / (tl.exp2(wide * LOG2_E) + 1.0)) * (SOFTCAP * LOG2_E)
        else:
            logits = logits * (SCALE * LOG2_E)
        visible = key[None, :] <= position[:, None]
        if WINDOW is not None:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        logits = tl.where(visible, logits, float("-inf"))
        peak = tl.maximum(maximum, tl.max(logits, 1))
        decay = tl.exp2(maximum - peak)
        weights = tl.exp2(logits - peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        maximum = peak
        if CODES:
            weights = weights * tl.load(v_scales_ptr + slot)[None, :]
        weights = weights.to(dtype)
        if HALVES:
            acc = product(weights, int4(v & 15, dtype), acc * decay[:, None])
            high_acc = product(weights, int4(v >> 4, dtype), high_acc * decay[:, None])
        else:
            acc = product(weights, v.to(dtype), acc * decay[:, None])

    part = ((tl.program_id(0) * SPLITS + split) * ROWS + row).to(tl.int64)
    tl.store(maximum_ptr + part, maximum, mask=row < ROWS)
    tl.store(total_ptr + part, total, mask=row < ROWS)
    values = partial_ptr + part[:, None] * HEAD_DIM + d[None, :]
    tl.store(values, acc, mask=inside & (first < last))
    if HALVES:
        tl.store(values + WIDTH, high_acc, mask=inside & (first < last))


@kernel
def paged_attention_merge(
    partial_ptr,
    maximum_ptr,
    total_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merges the splits of one query row, normalises, and writes output and log-sum-exp."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    ROWS: tl.constexpr = TOKENS * GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    pair = tl.program_id(0)  # sequence and KV head
    row = tl.program_id(1)
    head = pair % KV_HEADS * GROUP + row % GROUP
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = ((pair * SPLITS + split) * ROWS + row).to(tl.int64)
    maximum = tl.load(maximum_ptr + part, mask=split < SPLITS, other=-1e30)
    total = tl.load(total_ptr + part, mask=split < SPLITS, other=0.0)
    sink = -1e30
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2_E
    peak = tl.maximum(tl.max(maximum, 0), sink)
    weight = tl.exp2(maximum - peak)
    # A split that saw no key has written no values.
    mask = (total > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    out = tl.sum(values * weight[:, None], 0)
    whole = tl.sum(total * weight, 0)
    if SINKS:
        whole += tl.exp2(sink - peak)
    out = out / tl.where(whole > 0.0, whole, 1.0)
    token = (pair // KV_HEADS * TOKENS + row // GROUP) * Q_HEADS + head
    tl.store(out_ptr + token.to(tl.int64) * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + token, tl.where(whole > 0.0, (peak + tl.log2(whole)) / LOG2_E, float("-inf")))
