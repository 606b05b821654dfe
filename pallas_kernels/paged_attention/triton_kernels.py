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
def numbers(words, PART: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """One code of every 16-bit word, of its two bytes or four halves of bytes the PART-th, as a number: exact."""
    SHIFT: tl.constexpr = PART * (4 if FORMAT == "int4" else 8)
    if ASM and dtype == tl.bfloat16:
        # Two words a register, t * factor + m. The last seven bits of 0x4300, which is 128, are units.
        if FORMAT == "int8":
            # 128 + the lower seven bits, less 128 (0xC300) or, with the sign bit, 256 (0xC380).
            CODE: tl.constexpr = (
                f"shr.u32 t, $1, {SHIFT}; lop3.b32 m, t, 0x00800080, 0xC300C300, 0xEA; "
                "lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; mov.b32 factor, 0x3F803F80;"
            )
        elif FORMAT == "int4":
            CODE: tl.constexpr = (
                f"shr.u32 t, $1, {SHIFT}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; "
                "mov.b32 m, 0xC308C308; mov.b32 factor, 0x3F803F80;"
            )
        else:
            # Exponent and mantissa where a bfloat16 has its own are 2^120 too small. m is -0, or NaN for NaN, of which
            # all bits are set: with 0x7790 added only that one becomes infinity, 0x7F80.
            PLACE: tl.constexpr = "shr.u32 t, $1, 4; mov.b32 m, $1;" if PART else "shl.b32 t, $1, 4; shl.b32 m, $1, 8;"
            CODE: tl.constexpr = (
                f"{PLACE} and.b32 factor, t, 0x07F007F0; lop3.b32 t, m, 0x80008000, factor, 0xEA; "
                "add.u32 factor, factor, 0x77907790; mov.b32 m, 0x80008000; fma.rn.bf16x2 m, factor, m, m; "
                "mov.b32 factor, 0x7B807B80;"
            )
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, m, factor; {CODE} fma.rn.bf16x2 $0, t, factor, m; }}",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        codes = words.to(tl.int32) >> SHIFT
        if FORMAT == "float8_e4m3fn":
            bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
            number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, as above
            return tl.where((codes & 0x7F) == 0x7F, float("nan"), number).to(dtype)
        # As the last bits of a float32 near 2^23, which costs a quarter of a conversion.
        elif FORMAT == "int8":
            return ((((codes & 255) ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
        else:
            return (((codes & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(dtype)


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
    FORMAT: tl.constexpr,
    LARGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention of BLOCK_R query rows that share a KV head over one split of their sequence's keys.

    Query row r of a sequence and KV head is head r % group of token r // group. A warp owns 16 query rows, so maxima
    and sums stay inside it. Pages hold numbers of q's dtype or, with a FORMAT, codes, whose scales multiply logits and
    weights. Codes are read as words of 16 bits, WIDTH a row: a matrix of 16 bits an element can be transposed on its
    way from shared memory to a product. Each of a word's codes has its own product, with the elements of q that it
    belongs to. Where a pool has 2^31 words it is LARGE. The splits share the keys that a sequence can see, whose number
    is only known here. Writes the weighted values, not normalised, and the logits' maximum (times log2 e) and sum; a
    split without keys writes no values.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    ROWS: tl.constexpr = TOKENS * GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_W)
    length = tl.load(lengths_ptr + sequence)
    position = length - TOKENS + row // GROUP  # the last key that a query row sees

    # Word w has elements 2w and 2w + 1; of int4 also, in the upper half of each byte, those half a head further on.
    STRIDE: tl.constexpr = 1 if FORMAT is None else 2
    SECOND: tl.constexpr = HEAD_DIM // 2 if FORMAT == "int4" else 1
    query = ((sequence * TOKENS + row // GROUP) * Q_HEADS + kv_head * GROUP + row % GROUP).to(tl.int64)
    inside = (row < ROWS)[:, None] & (d < WIDTH)[None, :]
    queries = q_ptr + query[:, None] * HEAD_DIM + (d * STRIDE)[None, :]
    q0 = tl.load(queries, mask=inside, other=0.0)
    acc0 = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    q1, q2, q3 = q0, q0, q0
    acc1, acc2, acc3 = acc0, acc0, acc0
    if FORMAT is not None:
        q1 = tl.load(queries + SECOND, mask=inside, other=0.0)
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16))
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    if FORMAT == "int4":
        q2 = tl.load(queries + 1, mask=inside, other=0.0)
        q3 = tl.load(queries + SECOND + 1, mask=inside, other=0.0)

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
        if LARGE:
            page = page.to(tl.int64)
        slot = (page * KV_HEADS + kv_head) * PAGE + stored % PAGE
        place = slot * WIDTH
        if BLOCK_W == WIDTH:
            k = tl.load(k_ptr + place[None, :] + d[:, None])
            v = tl.load(v_ptr + place[:, None] + d[None, :])
        else:
            k = tl.load(k_ptr + place[None, :] + d[:, None], mask=(d < WIDTH)[:, None], other=0)
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=(d < WIDTH)[None, :], other=0)
        logits = tl.zeros((BLOCK_R, KEYS), tl.float32)
        if FORMAT is None:
            logits = product(q0, k, logits)
        else:
            logits = product(q0, numbers(k, 0, FORMAT, dtype, ASM), logits)
            logits = product(q1, numbers(k, 1, FORMAT, dtype, ASM), logits)
            if FORMAT == "int4":
                logits = product(q2, numbers(k, 2, FORMAT, dtype, ASM), logits)
                logits = product(q3, numbers(k, 3, FORMAT, dtype, ASM), logits)
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
        if FORMAT is None:
            acc0 = product(weights.to(dtype), v, acc0 * decay[:, None])
        else:
            weights = (weights * tl.load(v_scales_ptr + slot)[None, :]).to(dtype)
            acc0 = product(weights, numbers(v, 0, FORMAT, dtype, ASM), acc0 * decay[:, None])
            acc1 = product(weights, numbers(v, 1, FORMAT, dtype, ASM), acc1 * decay[:, None])
            if FORMAT == "int4":
                acc2 = product(weights, numbers(v, 2, FORMAT, dtype, ASM), acc2 * decay[:, None])
                acc3 = product(weights, numbers(v, 3, FORMAT, dtype, ASM), acc3 * decay[:, None])

    part = ((tl.program_id(0) * SPLITS + split) * ROWS + row).to(tl.int64)
    tl.store(maximum_ptr + part, maximum, mask=row < ROWS)
    tl.store(total_ptr + part, total, mask=row < ROWS)
    inside = inside & (first < last)
    values = partial_ptr + part[:, None] * HEAD_DIM + (d * STRIDE)[None, :]
    tl.store(values, acc0, mask=inside)
    if FORMAT is not None:
        tl.store(values + SECOND, acc1, mask=inside)
    if FORMAT == "int4":
        tl.store(values + 1, acc2, mask=inside)
        tl.store(values + SECOND + 1, acc3, mask=inside)


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
    # A split that saw no key has written no values; what is there is read without waiting to know. A sum may be NaN.
    mask = (split < SPLITS)[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    values = tl.where((total == 0.0)[:, None], 0.0, values)
    out = tl.sum(values * weight[:, None], 0)
    whole = tl.sum(total * weight, 0)
    if SINKS:
        whole += tl.exp2(sink - peak)
    out = out / tl.where(whole == 0.0, 1.0, whole)
    token = (pair // KV_HEADS * TOKENS + row // GROUP) * Q_HEADS + head
    tl.store(out_ptr + token.to(tl.int64) * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + token, tl.where(whole == 0.0, float("-inf"), (peak + tl.log2(whole)) / LOG2_E))
