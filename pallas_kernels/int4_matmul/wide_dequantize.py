"""A packed weight as a bfloat16 array, at the speed of memory: for so many rows that cuBLAS earns the pass.

A lane's two words of 32 inputs are eight neighbouring weights of two rows, 16 bytes each: four lanes write 64 bytes of
a row, and a warp, which has a tile of 16 x 64 at a time, whole lines.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul.blocks import run_blocks
from pallas_kernels.int4_matmul.book import Book
from pallas_kernels.int4_matmul.mosaic import Arguments, arguments_of
from pallas_kernels.int4_matmul.packing import COLUMNS, STRIP, steps_per_run
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PIECE_BYTES
from pallas_kernels.int4_matmul.stream import Weights, arrays_of
from pallas_kernels.int4_matmul.wide_plan import WidePlan, WideSchedule
from pallas_kernels.int4_matmul.wide_weights import RowPair

WARPS, TILES = 8, 4
"""Warps of a block, and tiles that each of them unpacks."""


def blocks(plan: WidePlan) -> int:
    return -(-plan.strips * chunks(plan) // WARPS)


def chunks(plan: WidePlan) -> int:
    """Warps that share a strip."""
    return -(-plan.column_tiles // TILES)


def unpack(w: Any, plan: WidePlan, a: Arguments, block: Any) -> None:
    """One warp's work, emitted through `w`, a WideWarp (or its NumPy twin in the tests); `a.out` is [out, in]."""
    unit = block * WARPS + w.warp
    strip, first_tile = unit // chunks(plan), unit % chunks(plan) * TILES
    there = strip < plan.strips
    strip = w.select(there, strip, w.integer(0))
    group, quad, run = w.lane // 4, w.lane % 4, steps_per_run(plan.group_size)
    pieces = []
    for t in range(TILES):
        tile = w.select(first_tile + t < plan.column_tiles, first_tile + t, w.integer(0))
        offset = (strip * plan.column_tiles + tile) * plan.tile_bytes + w.lane * 16
        places = range(0, plan.tile_bytes, PIECE_BYTES)
        words = [word for place in places for word in w.global_words(a.weights.words, offset + place, 4)]
        # For each 16 inputs one word, or two of codes of 8 bits.
        pieces.append([words[i : i + len(places)] for i in range(0, len(words), len(places))])
    book = None if a.weights.book is None else Book(w, a.weights.book)

    def rows(column: Any) -> RowPair:
        """Of the group in which a column lies, or the last one."""
        index = column // plan.group_size
        index = w.select(index < plan.groups, index, w.integer(plan.groups - 1))
        row = (strip * plan.groups + index) * STRIP + group * 2

        def scale(place: int) -> Any:
            return w.global_words(a.weights.scales, row * plan.scale_bytes + place, 1)[0]

        def offset(place: int) -> Any:
            if plan.offset_bytes == 1:
                return w.global_half(a.weights.offsets, row)
            return w.global_words(a.weights.offsets, row * plan.offset_bytes + place, 1)[0]

        return RowPair(w, a, scale, offset, book, None if book is None else book.unit)

    for t in range(TILES):
        for first_step in range(0, COLUMNS // 16, run):
            column = (first_tile + t) * COLUMNS + 16 * first_step
            pair = rows(column)
            words = [pair.weights(step) for step in pieces[t][first_step : first_step + run]]
            column = column + quad * (4 * run)
            for half in range(2):
                row = strip * STRIP + group + 8 * half
                inside = there & (row < plan.out_features) & (column < plan.in_features)
                values = [word[half + 2 * i] for word in words for i in range(2)]
                w.store_words(a.out, row * plan.in_features + column, values, inside)


# Jitted, so that a model's equal weights share one kernel.
@jax.jit
def dequantize(weight: Packed) -> jax.Array:
    """A weight of the mosaic layout as bfloat16 [out_features, in_features]."""
    plan = WidePlan.of(1, weight, WideSchedule())

    def program(w: Any, references: Any, block: Any) -> None:
        *arrays, out = references
        weights = Weights.of(weight, arrays)
        unpack(w, plan, arguments_of(weight, weights=weights, x=None, out=out, out_dtype="bfloat16"), block)

    out_type = jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16)
    arrays = arrays_of(weight)
    return run_blocks(program, arrays, out_type, blocks=blocks(plan), warps=WARPS, name="int4_dequantize")


@functools.partial(jax.jit, static_argnames="out_dtype")
def int4_matmul(x: jax.Array, weight: Packed, *, out_dtype: jnp.dtype) -> jax.Array:
    """x [rows, in_features] bf16 times a weight of the mosaic layout -> [rows, out_features], through cuBLAS."""
    return lax.dot_general(x, dequantize(weight), (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
