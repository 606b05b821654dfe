"""From packed codes to numbers, for the Triton kernels of the product. Imported only where triton is installed."""
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
def zero_of(offset, BITS: tl.constexpr, KIND: tl.constexpr):
    """The code that stands for zero, float32."""
    if KIND == "zero_point":
        return (offset.to(tl.int32) & 255).to(tl.float32)  # the interpreter takes bytes to be signed
    elif KIND == "symmetric":
        return tl.full(offset.shape, 8.0 if BITS == 4 else 128.0, tl.float32)
    else:
        return tl.full(offset.shape, 0.0, tl.float32)


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
