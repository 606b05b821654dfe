"""A cache in tiers on the device: moves are the pages' quantisation, attention is that over what the tiers hold.

Nothing stale is read, no program copies a pool, and `generate` is the model over pages that were rounded in place.

The reference is a plain float32 cache. Before each program its pages that have aged are quantised and dequantised where
they are, by NumPy; everything else is the programs that other tests compare with other implementations.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_steps import num_bytes, pool_sized, shape

from jaxinfer import kv_cache, steps, tiers
from jaxinfer.batch import Limits
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.generation import generate, requests_for
from jaxinfer.loop import decode_chunk
from jaxinfer.model import Model, load
from jaxinfer.params import random_params
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import score
from jaxinfer.speculative.ngram import NgramDraft
from jaxinfer.tier_pages import TierPages, TierRules
from jaxinfer.tiered_batch import TieredBatch
from jaxinfer.tiers import MOVED_AT_ONCE, TieredKV, TieredKVCache, TierPools, TierTables, move_pages
from tests import paged_attention_cases as cases

PAGE, CHUNK, LONGEST = 16, 64, 256
KV = TieredKV(recent=20, int8=40)
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@functools.cache
def load_case(name: str) -> Model:
    """A tiny float32 model with a longer context than its fixture's."""
    model = load(families.BY_NAME[name].folder, dtype="float32", kv_dtype=KV, progress=False)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=LONGEST))


def poisoned(cache: TieredKVCache) -> TieredKVCache:
    """NaN in pools of floats and in all scales, and in codes what no code is."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0x7F), cache)


class Tiered:
    """Rows of a model over a tiered cache, which is poison where nothing was written."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rules = model, TierRules.of(model.config, KV, PAGE)
        self.room = self.rules.room(LONGEST, CHUNK)
        pools = TierPools(*(rows * pages for pages in dataclasses.astuple(self.room)))
        self.pages = TierPages(self.rules, pools, rows)
        self.cache = poisoned(tiers.create(model.config, pools, PAGE, model.dtype))

    def tables(self, counts: np.ndarray) -> TierTables:
        for moves in self.pages.settle():
            pages = jnp.asarray(moves.pages)
            self.cache = move_pages(self.cache, pages, source=moves.source, target=moves.target)
        for row, count in enumerate(counts.tolist()):
            self.pages.append(row, count)
        return jax.tree.map(jnp.asarray, self.pages.tables(range(len(counts)), self.room))


class Plain:
    """The same rows over a plain cache, whose aged pages are rounded to codes where they are."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rules = model, TierRules.of(model.config, KV, PAGE)
        self.cache = kv_cache.create(model.config, 1 + rows * LONGEST // PAGE, PAGE, model.dtype)
        self.table = 1 + np.arange(rows * LONGEST // PAGE, dtype=np.int32).reshape(rows, -1)
        self.lengths, self.rounded = np.zeros(rows, int), {"int8": np.zeros(rows, int), "int4": np.zeros(rows, int)}

    def tables(self, counts: np.ndarray) -> jax.Array:
        for row, length in enumerate(self.lengths.tolist()):
            recent, int8, _ = self.rules.first_pages(length)
            for form, last in (("int8", recent), ("int4", int8)):
                pages = self.table[row, self.rounded[form][row] : last]
                self.cache = dataclasses.replace(
                    self.cache,
                    keys=[self.round(layer, pool, pages, form) for layer, pool in enumerate(self.cache.keys)],
                    values=[self.round(layer, pool, pages, form) for layer, pool in enumerate(self.cache.values)],
                )
                self.rounded[form][row] = last
        self.lengths += counts
        return jnp.asarray(self.table)

    def round(self, layer: int, pool: jax.Array, pages: np.ndarray, form: str) -> jax.Array:
        if self.model.config.layers[layer].window is not None or not pages.size:
            return pool
        whole = np.array(pool.astype(jnp.float32))
        codes, scales = cases.quantise(whole[pages], form)
        whole[pages] = cases.elements(codes, scales, whole.shape[-1]).astype(np.float32)
        return jnp.asarray(whole).astype(pool.dtype)


def run(rows: "Tiered | Plain", tokens: np.ndarray, start: np.ndarray, counts: np.ndarray, verify: bool) -> np.ndarray:
    """Logits of the next `counts` tokens of each row: of the last of a prefill, of one decoded, of all verified."""
    table = rows.tables(counts)
    starts = jnp.asarray(start.astype(np.int32))
    options = {"config": rows.model.config, "context_lengths": jnp.full(len(counts), LONGEST, jnp.int32)}
    picked = np.zeros((len(counts), CHUNK), np.int32)
    for row, count in enumerate(counts.tolist()):
        picked[row, :count] = tokens[row, start[row] : start[row] + count]
    idle = jnp.asarray(counts) == 0
    arguments = (rows.model.params, rows.cache)
    if verify or counts.max() == 1:
        width = int(counts.max())
        positions = jnp.where(idle, -1, starts)
        if verify:
            out, rows.cache = steps.verify(*arguments, jnp.asarray(picked[:, :width]), positions, table, **options)
        else:
            out, rows.cache = steps.decode(*arguments, jnp.asarray(picked[:, 0]), positions, table, **options)
    else:
        lengths = jnp.asarray(counts.astype(np.int32))
        out, rows.cache = steps.prefill(*arguments, jnp.asarray(picked), lengths, starts, table, **options)
    return np.asarray(out)


@pytest.mark.parametrize("case", ["llama", "gemma2", "mistral_sliding"])
def test_logits_are_those_over_what_the_tiers_hold(case: str):
    """Prefill in chunks, decoding and verification of three rows of different length, one of them idle at times.

    llama sees everything; gemma2 has windows in every other layer, and a soft-cap; every layer of Mistral has one.
    """
    plan = [([64, 64, 10], False), ([64, 7, 0], False), ([30, 0, 0], False)]
    plan += [([1, 1, 1], False)] * 18 + [([1, 0, 1], False)] * 2 + [([64, 64, 64], False)]
    if case == "llama":
        plan += [([4, 4, 4], True), ([4, 0, 4], True)]
    model = load_case(case)
    tiered = Tiered(model, 3)
    for got, want in logits_of_both(tiered, Plain(model, 3), plan):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    held = tiered.pages.rows[0]
    assert bool(held.int4) == bool(held.int8) == tiered.rules.has_full_layers


type Both = Iterator[tuple[np.ndarray, np.ndarray]]


def logits_of_both(tiered: Tiered, plain: Plain, plan: list[tuple[list[int], bool]]) -> Both:
    """Logits of the rows that are not idle, after each call of a plan: tokens of each row, whether to verify them."""
    rows = len(plan[0][0])
    tokens = np.random.default_rng(0).integers(3, tiered.model.config.num_tokens, (rows, LONGEST)).astype(np.int32)
    start = np.zeros(rows, int)
    for listed, verify in plan:
        counts = np.array(listed)
        got, want = (run(one, tokens, start, counts, verify)[counts > 0] for one in (tiered, plain))
        yield got, want
        start += counts


@pytest.mark.gpu
def test_gpu():
    """The kernels in bfloat16, each tier with its own: prefill in chunks, decoding, verification."""
    rope = RopeConfig("default", 1e4, 64)
    layers = (LayerConfig(rope), LayerConfig(rope, window=40), LayerConfig(rope))
    config = ModelConfig("llama", 512, 500, 256, 512, 8, 2, 64, layers, LONGEST, 1e-5, attention_scale=0.5)
    model = Model(config, random_params(config, jnp.bfloat16, 0), None, jnp.dtype(jnp.bfloat16), "random", KV)
    plan = [([64, 64], False), ([64, 0], False), *[([1, 1], False)] * 20, ([1, 0], False), ([4, 4], True)]
    for got, want in logits_of_both(Tiered(model, 2), Plain(model, 2), plan):
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize(("source", "target"), [("recent", "int8"), ("int8", "int4"), ("recent", "int4")])
def test_a_move_is_the_quantisation_of_pages(source: str, target: str):
    """Bits by NumPy; nothing else changes; the scratch page takes nothing; the source keeps what it had."""
    model, rng = load_case("gemma2"), np.random.default_rng(1)
    cache = poisoned(tiers.create(model.config, TierPools(9, 9, 9, 9), PAGE, model.dtype))
    assert num_bytes(cache) == tiers.num_bytes(model.config, TierPools(9, 9, 9, 9), PAGE, model.dtype)

    def page(pool: jax.Array) -> jax.Array:
        if jnp.issubdtype(pool.dtype, jnp.floating):
            return jnp.asarray(np.exp(rng.standard_normal(pool.shape)).astype(np.float32))
        return jnp.asarray(rng.integers(-127, 128, pool.shape).astype(np.int8))

    cache = dataclasses.replace(cache, **{source: jax.tree.map(page, getattr(cache, source))})
    before = jax.tree.map(np.array, cache)
    pairs = np.zeros((MOVED_AT_ONCE[0], 2), np.int32)
    pairs[:3] = [(4, 2), (1, 9), (9, 1)]
    after = jax.tree.map(np.asarray, move_pages(cache, jnp.asarray(pairs), source=source, target=target))
    head_dim = model.config.head_dim
    for kind in ("keys", "values"):
        pools = zip(*(getattr(getattr(x, target), kind) for x in (before, after)), strict=True)
        scales = zip(*(getattr(getattr(x, target), f"{kind[:-1]}_scales") for x in (before, after)), strict=True)
        sources = getattr(getattr(before, source), kind)
        source_scales = getattr(getattr(before, source), f"{kind[:-1]}_scales") or [None] * len(sources)
        for (old, new), (old_scales, new_scales), held, its in zip(pools, scales, sources, source_scales, strict=True):
            held = held[[4, 1, 9]]
            if its is not None:
                held = cases.elements(held, its[[4, 1, 9]], head_dim).astype(np.float32)
            if (source, target) == ("recent", "int4"):
                held = cases.elements(*cases.quantise(held, "int8"), head_dim).astype(np.float32)
            codes, of_them = cases.quantise(held, target)
            np.testing.assert_array_equal(new[[2, 9, 1]], codes)
            np.testing.assert_array_equal(new_scales[[2, 9, 1]], of_them)
            others = [0, 3, 4, 5, 6, 7, 8]
            np.testing.assert_array_equal(new[others], old[others])
            np.testing.assert_array_equal(new_scales[others], old_scales[others])
    for name in ("recent", "int8", "int4", "window"):
        if name != target:
            jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))


# --- No copy of a pool

BIG = TierPools(recent=1 << 14, int8=1 << 15, int4=1 << 16, window=1 << 14)
WIDTHS = TierPools(8, 4, 16, 8)


@pytest.mark.parametrize("program", ["prefill", "decode_chunk", "recent to int4", "int8 to int4"])
def test_no_program_copies_a_tier(program: str):
    model = load_case("gemma2")
    cache = jax.eval_shape(lambda: tiers.create(model.config, BIG, PAGE, model.dtype))
    rules = TierRules.of(model.config, KV, PAGE)
    table = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TierPages(rules, BIG, 4).tables(range(4), WIDTHS)))
    if program == "prefill":
        arguments = (model.params, cache, shape(4, CHUNK), shape(4), shape(4), table)
        lowered = steps.prefill.lower(*arguments, config=model.config, context_lengths=shape(4))
    elif program == "decode_chunk":
        batch = TieredBatch(model, requests_for(model, [[5, 6, 7]] * 4, GREEDY), Limits.default())
        state, variant = batch._initial_state()
        arguments = (model.params, cache, state, shape(4, dtype=jnp.bool), table)
        lowered = decode_chunk.lower(*arguments, config=model.config, variant=variant, num_steps=4)
    else:
        source, target = program.split(" to ")
        lowered = move_pages.lower(cache, shape(MOVED_AT_ONCE[-1], 2), source=source, target=target)
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    assert memory.temp_size_in_bytes < num_bytes(cache) // 50
    assert 0 <= memory.alias_size_in_bytes - num_bytes(cache) < 10_000
    for pool in {leaf.shape for leaf in jax.tree.leaves(cache)}:
        assert not pool_sized(text, pool)
        assert not re.findall(rf"= \w+\[{','.join(map(str, pool))}\]\S* copy\(", text)


# --- generate


def by_hand(model: Model, prompt: list[int], limits: Limits) -> list[int]:
    """Greedy tokens over `Plain`, with its pages rounded when `generate` moves them: before each chunk."""
    rows, tokens, logits = Plain(model, 1), [*prompt], np.zeros((1, 1))
    array = np.zeros((1, LONGEST), np.int32)
    array[0, : len(prompt)] = prompt
    for start in range(0, len(prompt), limits.prefill_chunk):
        count = min(limits.prefill_chunk, len(prompt) - start)
        logits = run(rows, array, np.array([start]), np.array([count]), False)
    tokens.append(int(logits[0].argmax()))
    table = None
    while len(tokens) < len(prompt) + NUM_TOKENS:
        place = len(tokens) - 1
        if (place - len(prompt)) % limits.decode_chunk == 0:
            table = rows.tables(np.array([limits.decode_chunk]))
        assert table is not None
        at = (jnp.array(tokens[-1:], jnp.int32), jnp.array([place], jnp.int32))
        logits, rows.cache = steps.decode(model.params, rows.cache, *at, table, config=model.config)
        tokens.append(int(np.asarray(logits)[0].argmax()))
    return tokens[len(prompt) :]


def test_generate_equals_the_model_over_rounded_pages(monkeypatch: pytest.MonkeyPatch):
    """Two groups of prefill; the longer prompt comes in three chunks, and its pages reach all tiers.

    Trap K3: the same request gives the same tokens again.
    """
    limits = Limits(prefill_chunk=CHUNK, prefill_tokens=CHUNK, decode_chunk=4)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: limits))
    model, rng = load_case("llama"), np.random.default_rng(3)
    prompts = [rng.integers(3, 90, length).tolist() for length in (150, 20)]
    outputs = generate(model, prompts, GREEDY)
    assert [list(output.token_ids) for output in outputs] == [by_hand(model, prompt, limits) for prompt in prompts]
    assert [output.token_ids for output in generate(model, prompts, GREEDY)] == [output.token_ids for output in outputs]


def test_what_does_not_know_of_tiers_refuses():
    model = load_case("llama")
    assert "cache tiered:20,40" in repr(model)
    with pytest.raises(ValueError, match="only generate and stream work with a tiered cache, and those of an engine"):
        score(model, [[5, 6]], [[7]])
    with pytest.raises(ValueError, match="speculative decoding does not work with a tiered cache"):
        generate(model, [[5, 6]], GREEDY, draft=NgramDraft())
