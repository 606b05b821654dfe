"""The Triton kernels of the product with weights of 4 or 8 bits. Imported only where triton is installed.

Every size is a compile-time constant: jax-triton compiles a kernel for each shape anyway, and divisions and masks that
are known to be superfluous disappear.
"""
# Triton is an optional extra, which the type checker need not see:
# pyright: reportMissingImports=false

import triton.language as tl

from pallas_kernels.triton_backend import kernel


@kernel
def entries(book_ptr, codes, ASM: tl.constexpr):
    """Entries of the float32 code book, which the L1 cache holds."""
    if ASM:
        # In assembly, because Triton would copy what a tl.load gathers through shared memory, ahead of its use.
        addresses = (book_ptr + codes.to(tl.int32)).to(tl.int64)
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [addresses], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(book_ptr + codes.to(tl.int32))


@kernel
def unit_of(book_ptr, KIND: tl.constexpr, dtype: tl.constexpr):
    """What a code book is measured in, so that 16 bits lose less: its smallest entry that is not zero, else 1.

    In that unit the entries of FP4 are integers whatever a file has multiplied them by, as IQ4_NL's are.
    """
    if KIND == "code_book" and dtype != tl.float32:
        sizes = tl.abs(tl.load(book_ptr + tl.arange(0, 16)))
        smallest = tl.min(tl.where(sizes > 0.0, sizes, float("inf")), 0)
        return tl.where(smallest < float("inf"), smallest, 1.0)
    else:
        return 1.0


@kernel
def plane(book_ptr, unit, n, FIRST: tl.constexpr, SHIFT: tl.constexpr, dtype: tl.constexpr):
    """A byte of each of four entries of a code book, as 16-bit numbers in its unit: a word, once for each of n.

    Once for all, it would be what Triton calls a splat, which it does not carry over into the layout of a product.
    """
    word = tl.zeros(n.shape, tl.int32)
    for i in tl.static_range(4):
        number = (tl.load(book_ptr + FIRST + i + n * 0) / unit).to(dtype)
        bits = number.to(tl.int16, bitcast=True).to(tl.int32)
        word |= ((bits >> SHIFT) & 255) << (8 * i)
    return word[:, None]


@kernel
def planes(book_ptr, unit, n, dtype: tl.constexpr):
    """A code book as `looked_up` takes it: the lower bytes of its 16 entries in 4 words, and the upper ones."""
    return (
        plane(book_ptr, unit, n, 0, 0, dtype),
        plane(book_ptr, unit, n, 4, 0, dtype),
        plane(book_ptr, unit, n, 8, 0, dtype),
        plane(book_ptr, unit, n, 12, 0, dtype),
        plane(book_ptr, unit, n, 0, 8, dtype),
        plane(book_ptr, unit, n, 4, 8, dtype),
        plane(book_ptr, unit, n, 8, 8, dtype),
        plane(book_ptr, unit, n, 12, 8, dtype),
    )


@kernel
def looked_up(words, book, dtype: tl.constexpr):
    """What the four codes of every word of [rows, width] stand for in a code book's `planes`: four sets of numbers."""
    l0, l1, l2, l3, h0, h1, h2, h3 = book
    # A word's nibbles without their upper bits are what prmt wants: which of eight bytes. The upper bit chooses between
    # entries 0 to 7 and 8 to 15, byte i of the one or of the other. $4 has two words, every other operand comes twice.
    CODE: tl.constexpr = """{
        .reg .b32 s, t, which, a, b, low0, high0, low1, high1;
        and.b32 s, $4, 0x7777;
        shr.u32 t, $4, 1;
        lop3.b32 which, t, 0x4444, 0x3210, 0xEA;
        prmt.b32 a, $5, $7, s;
        prmt.b32 b, $9, $11, s;
        prmt.b32 low0, a, b, which;
        prmt.b32 a, $13, $15, s;
        prmt.b32 b, $17, $19, s;
        prmt.b32 high0, a, b, which;
        shr.u32 t, $4, 16;
        and.b32 s, t, 0x7777;
        shr.u32 t, $4, 17;
        lop3.b32 which, t, 0x4444, 0x3210, 0xEA;
        prmt.b32 a, $5, $7, s;
        prmt.b32 b, $9, $11, s;
        prmt.b32 low1, a, b, which;
        prmt.b32 a, $13, $15, s;
        prmt.b32 b, $17, $19, s;
        prmt.b32 high1, a, b, which;
        prmt.b32 a, low0, high0, 0x5140;
        prmt.b32 b, low1, high1, 0x5140;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        prmt.b32 a, low0, high0, 0x7362;
        prmt.b32 b, low1, high1, 0x7362;
        prmt.b32 $2, a, b, 0x5410;
        prmt.b32 $3, a, b, 0x7632;
    }"""
    OPERANDS: tl.constexpr = "=r,=r,=r,=r" + ",r" * 17
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            CODE,
            OPERANDS,
            [words, l0, l1, l2, l3, h0, h1, h2, h3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            CODE,
            OPERANDS,
            [words, l0, l1, l2, l3, h0, h1, h2, h3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@kernel
def numbers(
    words,
    zero,
    book_ptr,
    unit,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    dtype: tl.constexpr,
    ASM: tl.constexpr,
):
    """Every word's PART-th code as a number of a dtype: code - zero, or the code book's entry in its unit.

    `zero` is float32 [rows, 1], a number that a code can be, so that the difference is exact in every dtype.
    """
    SHIFT: tl.constexpr = BITS * PART
    if KIND == "code_book":
        found = entries(book_ptr, (words >> SHIFT) & 15, ASM)
        if dtype != tl.float32:
            found *= 1.0 / unit
        return found.to(dtype)
    elif ASM and dtype == tl.bfloat16:
        # Two codes a register: 0x4300 | code is 128 + code. One lop3 for mask and exponent: ptxas may keep two.
        if BITS == 4:
            minus = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), words.shape)
            CODE: tl.constexpr = "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;"
        else:
            # Of 8 bits seven, less 128 where the eighth is set and 256 where not: code - 128.
            minus = tl.broadcast_to((128.0 - zero).to(tl.bfloat16), words.shape)
            CODE: tl.constexpr = (
                "lop3.b32 m, t, 0x00800080, 0xC380C380, 0x6A; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; "
                "fma.rn.bf16x2 t, t, one, m;"
            )
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, m, one; shr.u32 t, $1, {SHIFT}; mov.b32 one, 0x3F803F80; {CODE} "
            "fma.rn.bf16x2 $0, t, one, $2; }",
            "=r,r,r",
            [words, minus],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif ASM and dtype == tl.float16:
        # The same, 0x6400 | code being 1024 + code.
        MASK: tl.constexpr = "0x000F000F" if BITS == 4 else "0x00FF00FF"
        minus = tl.broadcast_to((-1024.0 - zero).to(tl.float16), words.shape)
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.u32 t, $1, {SHIFT}; "
            f"lop3.b32 t, t, {MASK}, 0x64006400, 0xEA; add.rn.f16x2 $0, t, $2; }}",
            "=r,r,r",
            [words, minus],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        codes = (words >> SHIFT) & (15 if BITS == 4 else 255)
        return (codes.to(tl.float32) - zero).to(dtype)


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
def zero_of(offset, BITS: tl.constexpr, KIND: tl.constexpr):
    """The code that stands for zero, float32."""
    if KIND == "zero_point":
        return (offset.to(tl.int32) & 255).to(tl.float32)  # the interpreter takes bytes to be signed
    elif KIND == "symmetric":
        return tl.full(offset.shape, 8.0 if BITS == 4 else 128.0, tl.float32)
    else:
        return tl.full(offset.shape, 0.0, tl.float32)


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
    ASM: tl.constexpr,
):
    """out^T = W x^T on tensor cores, for BLOCK_N output features, BLOCK_M rows of x and a share of the inputs.

    The words go through shared memory straight into the layout of tl.dot's large operand, where their codes
    are unpacked, set by set. Scales enter once a segment (the part of a tile that shares a group), on the float32 sums.
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
    if LOOK_UP:
        book = planes(book_ptr, unit, n, dtype)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale, offset = scale_and_offset(
        scales_ptr, offsets_ptr, n_stored, first * CODES * WIDTH, PADDED, GROUP, GROUPS, KIND
    )
    for tile in tl.range(first, last, num_stages=STAGES):
        words = tl.load(codes + tile * (16 * WIDTH), eviction_policy="evict_first")
        if LOOK_UP:
            found = looked_up(words, book, dtype)
        for segment in tl.static_range(SEGMENTS):
            k = tile * (CODES * WIDTH) + segment * (CODES * WIDTH // SEGMENTS)
            # Those of the next segment are asked for now: they are too small for asynchronous copies.
            next_scale, next_offset = scale_and_offset(
                scales_ptr, offsets_ptr, n_stored, k + CODES * WIDTH // SEGMENTS, PADDED, GROUP, GROUPS, KIND
            )
            zero = zero_of(offset, BITS, KIND)[:, None]
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
            acc += product * (scale.to(tl.float32) * unit)[:, None]
            if KIND == "minimum":
                acc += offset.to(tl.float32)[:, None] * sums[None, :]
            scale, offset = next_scale, next_offset
    place = (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@kernel
def pair_of(words, book_ptr, PART: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Of words of two, the PART-th code of each as float32: the book's entry, the code or, of 4 bits, 128 + code."""
    SHIFT: tl.constexpr = BITS * PART
    if KIND == "code_book":
        low = entries(book_ptr, (words >> SHIFT) & 15, ASM)
        return low, entries(book_ptr, (words >> (16 + SHIFT)) & 15, ASM)
    elif BITS == 8:
        # As the last bits of a float32 near 2^23, which costs a quarter of a conversion.
        low = (((words >> SHIFT) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return low, (((words >> (16 + SHIFT)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        # 0x4300 | code is 128 + code in bfloat16, whose bits are the upper half of a float32's.
        if ASM:
            both = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.u32 t, $1, {SHIFT}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}",
                "=r,r",
                [words],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            both = ((words >> SHIFT) & 0x000F000F) | 0x43004300
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


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
