"""The Triton kernels of the product with weights of 4 or 8 bits. Imported only where triton is installed.

Every size is a compile-time constant: jax-triton compiles a kernel for each shape anyway, and divisions and masks that
are known to be superfluous disappear.
"""
# Triton is an optional extra, which the type checker need not see:
# pyright: reportMissingImports=false

import triton.language as tl

from pallas_kernels.int4_matmul.triton_codes import looked_up, numbers, pair_of, planes, unit_of, zero_of
from pallas_kernels.triton_backend import kernel

LEAST_SCALE, LEAST_SHARE = tl.constexpr(2.0**-120), tl.constexpr(2.0**-60)
"""What a group's scale counts as at least where sums are measured in it, and as a share of the largest one so far: 0
has no inverse, and sums in a unit that is far too small would overflow."""


@kernel
def tile_pointers(codes_ptr, n, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the words of tile 0 of output features n."""
    rows = (n // 16).to(tl.int64) * (TILES * 16 * WIDTH) + (n % 16) * WIDTH
    return codes_ptr + rows[:, None] + tl.arange(0, WIDTH)[None, :]


@kernel
def scale_and_offset(
    scales_ptr, offsets_ptr, n, k, PADDED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr
):
    """Scale and offset (zero point or minimum, else the scale again) of output features n at input k, as stored.

    Past the last input they are those of the last group: numbers that are multiplied by an x of zero.
    """
    row = tl.minimum(k // GROUP, GROUPS - 1) * PADDED + n
    scale = tl.load(scales_ptr + row)
    if KIND == "zero_point" or KIND == "minimum":
        return scale, tl.load(offsets_ptr + row)
    else:
        return scale, scale


@kernel
def offsets_at(offsets_ptr, n, k, PADDED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """Offsets of output features n at input k, [rows, 1]; those of the group after next are fetched into L2."""
    if ASM:
        ahead = offsets_ptr + tl.minimum(k // GROUP + 2, GROUPS - 1) * PADDED + n
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [ahead.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return tl.load(offsets_ptr + tl.minimum(k // GROUP, GROUPS - 1) * PADDED + n[:, None])


@kernel
def int4_matmul_dot(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    book_ptr,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    RESCALED: tl.constexpr,
    OFFSETS_HERE: tl.constexpr,
    ASM: tl.constexpr,
):
    """out^T = W x^T on tensor cores, for BLOCK_N output features, BLOCK_M rows of x and a share of the inputs.

    The words go through shared memory straight into the layout of tl.dot's large operand, where their codes
    are unpacked, set by set. Scales enter once a segment (the part of a tile that shares a group), on the float32 sums.
    RESCALED: sums are kept in units of the scale of the segment at hand, one set of them instead of two. OFFSETS_HERE:
    zero points are loaded where they are used. Carried over from the tile before, they would keep the unpacked weights
    out of the product's layout where threads are more than features, and these would go through shared memory again.
    Writes [SPLITS, M, N].
    """
    CODES: tl.constexpr = 16 // BITS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # first: blocks that share weights run together
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * TILES // SPLITS
    last = (split + 1) * TILES // SPLITS
    inputs = tl.arange(0, WIDTH)
    n_stored = tl.minimum(n, PADDED - 1)
    codes = tile_pointers(codes_ptr, n_stored, TILES, WIDTH)
    rows = x_ptr + m.to(tl.int64)[None, :] * K + inputs[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    LOOK_UP: tl.constexpr = KIND == "code_book" and ASM and dtype != tl.float32
    unit = unit_of(book_ptr, KIND, dtype)
    book = planes(book_ptr, unit, n, dtype) if LOOK_UP else unit
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    before = tl.full((BLOCK_N,), 1.0, tl.float32)  # RESCALED: what the sums are measured in
    largest = tl.zeros((BLOCK_N,), tl.float32)
    scale, offset = scale_and_offset(
        scales_ptr, offsets_ptr, n_stored, first * CODES * WIDTH, PADDED, GROUP, GROUPS, KIND
    )
    for tile in tl.range(first, last, num_stages=STAGES):
        if OFFSETS_HERE:  # ahead of what waits for words
            first_offset = offsets_at(offsets_ptr, n_stored, tile * (CODES * WIDTH), PADDED, GROUP, GROUPS, ASM)
            zero = zero_of(first_offset, BITS, KIND)
        else:
            zero = zero_of(offset, BITS, KIND)[:, None]
        words = tl.load(codes + tile * (16 * WIDTH), eviction_policy="evict_first")
        found = looked_up(words, book, dtype) if LOOK_UP else words
        for segment in tl.static_range(SEGMENTS):
            k = tile * (CODES * WIDTH) + segment * (CODES * WIDTH // SEGMENTS)
            # Those of the next segment are asked for now: they are too small for asynchronous copies.
            next_scale, next_offset = scale_and_offset(
                scales_ptr, offsets_ptr, n_stored, k + CODES * WIDTH // SEGMENTS, PADDED, GROUP, GROUPS, KIND
            )
            if segment > 0:
                if OFFSETS_HERE:
                    zero = zero_of(offsets_at(offsets_ptr, n_stored, k, PADDED, GROUP, GROUPS, ASM), BITS, KIND)
                else:
                    zero = zero_of(offset, BITS, KIND)[:, None]
            now = scale.to(tl.float32) * unit
            if RESCALED:
                largest = tl.maximum(largest, tl.abs(now))
                least = tl.maximum(largest * LEAST_SHARE, LEAST_SCALE)
                now = tl.where(tl.abs(now) < least, least, now)
                product = acc * (before / now)[:, None]
                before = now
            else:
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            sums = tl.zeros((BLOCK_M,), tl.float32)
            for part in tl.static_range(CODES // SEGMENTS):
                column = k + part * WIDTH
                if K % (CODES * WIDTH) == 0:
                    if M % BLOCK_M == 0:
                        x = tl.load(rows + column)
                    else:
                        x = tl.load(rows + column, mask=(m < M)[None, :], other=0.0)
                else:
                    inside = (m < M)[None, :] & (column + inputs < K)[:, None]
                    x = tl.load(rows + column, mask=inside, other=0.0)
                if LOOK_UP:
                    w = found[segment * (CODES // SEGMENTS) + part]
                else:
                    w = numbers(
                        words, zero, book_ptr, unit, segment * (CODES // SEGMENTS) + part, BITS, KIND, dtype, ASM
                    )
                if dtype == tl.float32:
                    product = tl.dot(w, x, product, input_precision="tf32x3")
                else:
                    product = tl.dot(w, x, product)
                if KIND == "minimum":
                    sums += tl.sum(x.to(tl.float32), 0)
            if RESCALED:
                acc = product
                if KIND == "minimum":
                    acc += (offset.to(tl.float32) / now)[:, None] * sums[None, :]
            else:
                acc += product * now[:, None]
                if KIND == "minimum":
                    acc += offset.to(tl.float32)[:, None] * sums[None, :]
            scale, offset = next_scale, next_offset
    if RESCALED:
        acc *= before[:, None]
    place = (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@kernel
def int4_matmul_gemv(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    book_ptr,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """out = W x without tensor cores for M rows of x, up to 4: float32 multiply and add, one sum over lanes at the end.

    Reads words by twos. Each thread keeps its own sums of BLOCK_N output features for its inputs; zero points and
    minima enter once a segment, with the sums of x over the same inputs. Writes [SPLITS, M, N].
    """
    CODES: tl.constexpr = 16 // BITS
    MORE: tl.constexpr = 128.0 if BITS == 4 else 0.0  # see `pair_of`
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    first = split * TILES // SPLITS
    last = (split + 1) * TILES // SPLITS
    PAIRS: tl.constexpr = WIDTH // 2
    pairs = tl.arange(0, PAIRS)
    n_stored = tl.minimum(n, PADDED - 1)
    strips = (n_stored // 16).to(tl.int64) * (TILES * 16 * PAIRS) + (n_stored % 16) * PAIRS
    codes = codes_ptr.to(tl.pointer_type(tl.int32)) + strips[:, None] + pairs[None, :]

    acc0 = tl.zeros((BLOCK_N, PAIRS), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for tile in tl.range(first, last, num_stages=STAGES):
        words = tl.load(codes + tile * (16 * PAIRS), eviction_policy="evict_first")
        for segment in tl.static_range(SEGMENTS):
            k = tile * (CODES * WIDTH) + segment * (CODES * WIDTH // SEGMENTS)
            scale, offset = scale_and_offset(scales_ptr, offsets_ptr, n_stored, k, PADDED, GROUP, GROUPS, KIND)
            product0 = tl.zeros((BLOCK_N, PAIRS), tl.float32)
            product1 = product0
            product2 = product0
            product3 = product0
            sums0 = tl.zeros((PAIRS,), tl.float32)
            sums1 = sums0
            sums2 = sums0
            sums3 = sums0
            for part in tl.static_range(CODES // SEGMENTS):
                low, high = pair_of(words, book_ptr, segment * (CODES // SEGMENTS) + part, BITS, KIND, ASM)
                column = k + part * WIDTH
                product0, sums0 = add_row(product0, sums0, x_ptr, column, low, high, K, CODES, WIDTH)
                if M > 1:
                    product1, sums1 = add_row(product1, sums1, x_ptr + K, column, low, high, K, CODES, WIDTH)
                if M > 2:
                    product2, sums2 = add_row(product2, sums2, x_ptr + 2 * K, column, low, high, K, CODES, WIDTH)
                if M > 3:
                    product3, sums3 = add_row(product3, sums3, x_ptr + 3 * K, column, low, high, K, CODES, WIDTH)
            scale32 = scale.to(tl.float32)
            if KIND == "zero_point":
                bias = scale32 * (-MORE - zero_of(offset, BITS, KIND))
            elif KIND == "symmetric":
                bias = scale32 * (-136.0 if BITS == 4 else -128.0)
            elif KIND == "minimum":
                bias = offset.to(tl.float32) - MORE * scale32
            else:
                bias = tl.zeros((BLOCK_N,), tl.float32)
            acc0 += scale32[:, None] * product0 + bias[:, None] * sums0[None, :]
            if M > 1:
                acc1 += scale32[:, None] * product1 + bias[:, None] * sums1[None, :]
            if M > 2:
                acc2 += scale32[:, None] * product2 + bias[:, None] * sums2[None, :]
            if M > 3:
                acc3 += scale32[:, None] * product3 + bias[:, None] * sums3[None, :]
    out = out_ptr + split.to(tl.int64) * (M * N) + n
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out, tl.sum(acc0, 1).to(dtype), mask=n < N)
    if M > 1:
        tl.store(out + N, tl.sum(acc1, 1).to(dtype), mask=n < N)
    if M > 2:
        tl.store(out + 2 * N, tl.sum(acc2, 1).to(dtype), mask=n < N)
    if M > 3:
        tl.store(out + 3 * N, tl.sum(acc3, 1).to(dtype), mask=n < N)


@kernel
def add_row(product, sums, row_ptr, column, low, high, K: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr):
    """Adds a row of x, WIDTH inputs from `column` on, times the pairs of codes; and these inputs themselves."""
    if K % (CODES * WIDTH) == 0:
        x = tl.load(row_ptr + column + tl.arange(0, WIDTH))
    else:
        x = tl.load(row_ptr + column + tl.arange(0, WIDTH), mask=column + tl.arange(0, WIDTH) < K, other=0.0)
    x_low, x_high = tl.split(tl.reshape(x.to(tl.float32), (WIDTH // 2, 2)))
    product += x_low[None, :] * low
    product += x_high[None, :] * high
    return product, sums + (x_low + x_high)


@kernel
def int4_dequantize(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    book_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    """Writes the values of one tile of one strip to out [N, K], computed in float32 and rounded once."""
    CODES: tl.constexpr = 16 // BITS
    tile = tl.program_id(0)
    n = tl.program_id(1) * 16 + tl.arange(0, 16)
    words = tl.load(tile_pointers(codes_ptr, n, TILES, WIDTH) + tile * (16 * WIDTH))
    for part in tl.static_range(CODES):
        k = tile * (CODES * WIDTH) + part * WIDTH
        scale, offset = scale_and_offset(scales_ptr, offsets_ptr, n, k, PADDED, GROUP, GROUPS, KIND)
        zero = zero_of(offset, BITS, KIND)[:, None]
        values = numbers(words, zero, book_ptr, 1.0, part, BITS, KIND, tl.float32, ASM) * scale.to(tl.float32)[:, None]
        if KIND == "minimum":
            values += offset.to(tl.float32)[:, None]
        column = k + tl.arange(0, WIDTH)
        place = n.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (column < K)[None, :])
