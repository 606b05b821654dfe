"""Every family against transformers: float32 logits and greedy tokens, by every route through the programs."""

import dataclasses
import functools
import inspect
from collections.abc import Sequence

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import attention_routes, kv_cache, steps
from jaxinfer.generation import generate, logits
from jaxinfer.model import Model, load
from jaxinfer.sampling_params import SamplingParams

PAGE_SIZE = 4  # small, so that short prompts cross pages
PADDED = 64  # tokens of a row in every prefill: two programs, from empty pages and behind others, serve all of a family

LLAMA_AGAIN = ("llama_sharded", "llama_rope_linear", "llama_rope_llama3")
BY_EVERY_ROUTE = [case for case in families.CASES if case.name not in LLAMA_AGAIN]
"""The others are llama in shards and with other frequencies, constants that prefill and decoding show to be right."""


@functools.cache
def load_case(name: str) -> Model:
    """The case's model, its padding ids known as they would be from a tokenizer."""
    case = families.BY_NAME[name]
    model = load(case.folder, dtype=jnp.float32, progress=False)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, num_tokens=case.num_tokens))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """2e-4 of the norm and 2e-3 at every element, the bounds of the issue that asked for these families."""
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= 2e-4 * np.linalg.norm(expected)
    np.testing.assert_allclose(actual, expected, atol=2e-3, rtol=0)


def context_of(case: families.FamilyCase, length: int, rows: int) -> jax.Array:
    return jnp.full(rows, length, jnp.int32)


def page_table_for(rows: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Shuffled pages, page 0 left out, and the number of pages of the pool."""
    width = -(-length // PAGE_SIZE)
    pages = 1 + rng.permutation(rows * width + 3)[: rows * width]
    return pages.reshape(rows, width).astype(np.int32), rows * width + 4


def poisoned_cache(model: Model, num_pages: int) -> kv_cache.PagedKVCache:
    """A cache full of NaN: whatever is read without having been written shows."""
    cache = kv_cache.create(model.config, num_pages, PAGE_SIZE, jnp.float32)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache)


def prefill(
    case: families.FamilyCase, cache: kv_cache.PagedKVCache, table: np.ndarray, start: int, stops: Sequence[int]
) -> tuple[np.ndarray, kv_cache.PagedKVCache]:
    """Tokens from `start` to before `stops[row]` of each row; behind them are others, and below is an empty row."""
    model = load_case(case.name)
    rows, length = case.tokens.shape
    tokens = np.random.default_rng(1).integers(0, case.num_tokens, (rows + 1, PADDED)).astype(np.int32)
    for row, stop in enumerate(stops):
        tokens[row, : stop - start] = case.tokens[row, start:stop]
    out, cache = steps.prefill(
        model.params,
        cache,
        jnp.asarray(tokens),
        jnp.asarray([*(stop - start for stop in stops), 0], jnp.int32),
        jnp.asarray([start] * rows + [0], jnp.int32),
        jnp.asarray(table),
        config=model.config,
        context_lengths=context_of(case, length, rows + 1),
        from_empty=start == 0,
    )
    return np.asarray(out)[:rows], cache


@pytest.mark.parametrize("case", families.CASES, ids=str)
def test_full_prefill(case: families.FamilyCase) -> None:
    actual = np.asarray(logits(load_case(case.name), case.tokens))
    assert_close(actual, case.logits)
    if case.length_dependent:
        short = case.short_logits.shape[1]
        assert_close(np.asarray(logits(load_case(case.name), case.tokens[:, :short])), case.short_logits)


@pytest.mark.parametrize("case", families.CASES, ids=str)
def test_paged_decode_from_the_first_token(case: families.FamilyCase, rng: np.random.Generator) -> None:
    """One token of prefill, then every further token through `steps.decode`."""
    model = load_case(case.name)
    rows, length = case.tokens.shape
    table, num_pages = page_table_for(rows + 1, PADDED, rng)
    out, cache = prefill(case, poisoned_cache(model, num_pages), table, 0, [1] * rows)
    collected = [out]
    for position in range(1, length):
        out, cache = steps.decode(
            model.params,
            cache,
            jnp.asarray(case.tokens[:, position]),
            jnp.full(rows, position, jnp.int32),
            jnp.asarray(table[:rows]),
            config=model.config,
            context_lengths=context_of(case, length, rows),
        )
        collected.append(np.asarray(out))
    assert_close(np.stack(collected, axis=1), case.logits)


@pytest.mark.parametrize("case", BY_EVERY_ROUTE, ids=str)
def test_chunked_prefill_at_every_split(case: families.FamilyCase, rng: np.random.Generator) -> None:
    """Two chunks, cut at every point; all padded to one length."""
    model = load_case(case.name)
    rows, length = case.tokens.shape
    table, num_pages = page_table_for(rows + 1, PADDED, rng)
    for split in range(1, length):
        first, cache = prefill(case, poisoned_cache(model, num_pages), table, 0, [split] * rows)
        second, _ = prefill(case, cache, table, split, [length] * rows)
        assert_close(first, case.logits[:, split - 1])
        assert_close(second, case.logits[:, length - 1])


@pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="the reference stands in for the kernel, which takes no float32"
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompts_beginning_by_the_kernel_over_pages(name: str, rng: np.random.Generator, monkeypatch) -> None:
    monkeypatch.setattr(attention_routes, "kernel_refusal", lambda *_: None)
    monkeypatch.setattr(attention_routes, "self_attention", None)
    prefill = jax.jit(inspect.unwrap(steps.prefill), static_argnames=("config", "from_empty"))
    case, model = families.BY_NAME[name], load_case(name)
    rows, length = case.tokens.shape
    table, num_pages = page_table_for(rows, length, rng)
    zeros, lengths = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    arguments = (jnp.asarray(case.tokens), lengths, zeros, jnp.asarray(table))
    out, _ = prefill(model.params, poisoned_cache(model, num_pages), *arguments, config=model.config, from_empty=True)
    assert_close(np.asarray(out), case.logits[:, -1])


@pytest.mark.parametrize("case", families.CASES, ids=str)
def test_padded_batch_of_different_lengths(case: families.FamilyCase, rng: np.random.Generator) -> None:
    """Rows of different lengths in one call, plus an empty row: each row's logits are its own."""
    rows, length = case.tokens.shape
    lengths = [length] * rows if case.length_dependent else [length, 1, PAGE_SIZE + 1][:rows]
    table, num_pages = page_table_for(rows + 1, PADDED, rng)
    out, _ = prefill(case, poisoned_cache(load_case(case.name), num_pages), table, 0, lengths)
    expected = np.stack([case.logits[row, used - 1] for row, used in enumerate(lengths)])
    assert_close(out, expected)


# What `generate` looks at itself is here: windows, lengths, padding ids. The rest it sees through prefill and decoding.
SEEN_BY_LOGITS = ("llama_biases", "llama_rope_yarn_mscale", "mistral_full", "phi3", "qwen3_rope_yarn")


@pytest.mark.parametrize("case", [case for case in BY_EVERY_ROUTE if case.name not in SEEN_BY_LOGITS], ids=str)
def test_greedy_continuation(case: families.FamilyCase) -> None:
    """The tokens transformers generates, beside longer and shorter neighbours and, where the length matters, alone.

    A batch of one with a draft is compared with the same tokens in `test_speculative_generate.py`, for every family.
    """
    model = load_case(case.name)
    steps_wanted = len(case.continuation)
    params = SamplingParams(max_tokens=steps_wanted, temperature=0.0, ignore_eos=True)
    prompt = case.prompt.tolist()
    if case.length_dependent or case.name == "llama":
        alone = generate(model, [prompt], params)[0]
        assert list(alone.token_ids) == case.continuation.tolist()
    neighbours = [case.tokens[0].tolist()[:30], prompt, case.tokens[1].tolist()[:3]]
    together = generate(model, neighbours, params)[1]
    assert list(together.token_ids) == case.continuation.tolist()
    assert together.finish_reason == "length"


@pytest.mark.parametrize("case", BY_EVERY_ROUTE, ids=str)
def test_verify_equals_decode(case: families.FamilyCase, rng: np.random.Generator) -> None:
    """Several tokens at once give the logits of the same tokens one by one."""
    model = load_case(case.name)
    rows, length = case.tokens.shape
    drafted = 5
    start = length - drafted
    table, num_pages = page_table_for(rows + 1, PADDED, rng)
    _, cache = prefill(case, poisoned_cache(model, num_pages), table, 0, [start] * rows)
    out, _ = steps.verify(
        model.params,
        cache,
        jnp.asarray(case.tokens[:, start:]),
        jnp.full(rows, start, jnp.int32),
        jnp.asarray(table[:rows]),
        config=model.config,
        context_lengths=context_of(case, length, rows),
    )
    assert_close(np.asarray(out), case.logits[:, start:])
