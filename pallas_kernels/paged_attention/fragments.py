"""Which elements of a head the words of a key or a value hold, and how they become tensor-core fragments.

A lane reads `size` consecutive bytes of a row for each chunk (`Plan.key_chunks`, `Plan.value_chunks`). What is in them
depends on the format:

    bfloat16   a word is two elements
    8 bits     a word is four elements, which become four float16
    int4       a word is four elements of the lower half of the head and the four that are head_dim / 2 further on

A k-step of S = Q K^T takes four elements from each of a key's four lanes (two words of bfloat16, one of 8 bits, half
a word of int4); queries are laid out in the same order. An m-tile of O = V^T P^T takes two elements of four keys.
"""

from collections.abc import Iterator
from typing import Any

from pallas_kernels.paged_attention.plan import Plan


def element_of(w: Any, plan: Plan, step: Any, quad: Any) -> Any:
    """First of the four elements that lane `quad` of a key holds in k-step `step`."""
    element = None
    for run in reversed(plan.key_runs):
        local = step - run.first_step
        chunk, part = local // run.steps, local % run.steps
        here = chunk * (4 * run.elements) + quad * run.elements
        inside = (part // 2) * 4 + (part % 2) * (plan.head_dim // 2) if plan.kv == "int4" else part * 4
        here = here + inside + run.start
        element = here if element is None else w.select(step < run.end_step, here, element)
    return element


def step_of(w: Any, plan: Plan, element: Any) -> tuple[Any, Any]:
    """Inverse of `element_of`: the k-step and the lane of a key that hold elements `element` to `element` + 3."""
    upper = None
    if plan.kv == "int4":
        upper = w.select(element < plan.head_dim // 2, w.const(0, "i32"), w.const(1, "i32"))
        element = element - upper * (plan.head_dim // 2)
    step = quad = None
    for run in reversed(plan.key_runs):
        local = element - run.start
        chunk, inside = local // (4 * run.elements), local % (4 * run.elements)
        part = (inside % run.elements) // 4
        part = part if upper is None else part * 2 + upper
        here = chunk * run.steps + part + run.first_step, inside // run.elements
        if step is None:
            step, quad = here
        else:
            step, quad = (w.select(element < run.end, a, b) for a, b in zip(here, (step, quad), strict=True))
    return step, quad


def key_fragments(w: Any, plan: Plan, chunks: list[Any]) -> Iterator[tuple[Any, Any]]:
    """B's two words for each k-step, from the words of one key by chunk."""
    for words in chunks:
        if plan.kv == "bfloat16":
            yield from ((words[i], words[i + 1]) for i in range(0, len(words), 2))
        else:
            for word in words:
                yield from code_pairs(w, plan, word)


def code_pairs(w: Any, plan: Plan, word: Any) -> list[tuple[Any, Any]]:
    """The codes of a word as float16: for each four of them two words, elements (0, 1) and (2, 3)."""
    if plan.kv == "int8":
        return [w.int8_to_f16(word)]
    if plan.kv == "float8_e4m3fn":
        return [w.e4m3_to_f16(word)]
    return [w.uint8_to_f16(x, 8) for x in w.nibbles(word)]


def value_fragments(w: Any, plan: Plan, values: list[Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(m-tile, A's four words) from the words of four keys by chunk, [key][chunk][word]."""
    first = 0
    for chunk, (_, size) in enumerate(plan.value_chunks):
        for i in range(len(values[0][chunk])):
            a, b, c, d = (values[key][chunk][i] for key in range(4))
            if plan.kv == "bfloat16":
                yield first + i, (w.low_halves(a, b), w.high_halves(a, b), w.low_halves(c, d), w.high_halves(c, d))
                continue
            # Elements 2t and 2t + 1 of two keys side by side, so that a conversion gives a pair along the keys.
            for pair in range(min(2, size // 2)):
                sides = zip(*(code_pairs(w, plan, w.interleave(x, y, pair)) for x, y in ((a, b), (c, d))), strict=True)
                for upper, ((even, odd), (far_even, far_odd)) in enumerate(sides):
                    yield first + upper * (size // 2) + 2 * i + pair, (even, odd, far_even, far_odd)
        first += plan.chunk_tiles(size)
