"""The jitted programs: pure, compiled once a bucket, free of cache-sized copies, blind to padding and neighbours."""

import collections
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import families
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import kv_cache, steps
from jaxinfer.batch import Limits
from jaxinfer.generation import generate
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.loop import DecodedChunk, DecodeState, decode_chunk
from jaxinfer.model import Model, load
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import build_sampling_state

PAGE = 16
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def load_case(name: str, dtype: str = "float32") -> Model:
    return load(families.BY_NAME[name].folder, dtype=dtype, progress=False)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def poisoned_cache(model: Model, num_pages: int) -> PagedKVCache:
    """A cache full of NaN, scratch page included: whatever is read without having been written shows."""
    cache = kv_cache.create(model.config, num_pages, PAGE, model.dtype)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache)


def pages_in_order(rows: int, width: int) -> jax.Array:
    return jnp.asarray(1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width))


def decode_state(params: list[SamplingParams], model: Model, **fields: jax.Array) -> tuple[DecodeState, Any]:
    """A state of rows that go on for ever from position 0, but for what `fields` says."""
    rows = len(params)
    sampling, variant = build_sampling_state(
        params,
        [[1]] * rows,
        vocab_size=model.config.vocab_size,
        num_tokens=model.config.num_tokens,
        eos_token_ids=model.config.eos_token_ids,
    )
    state = DecodeState(
        tokens=jnp.zeros(rows, jnp.int32),
        positions=jnp.zeros(rows, jnp.int32),
        num_generated=jnp.ones(rows, jnp.int32),
        max_tokens=jnp.full(rows, 1000, jnp.int32),
        stop_ids=jnp.full((rows, 1), -1, jnp.int32),
        context_lengths=jnp.full(rows, 64, jnp.int32),
        done=jnp.zeros(rows, bool),
        sampling=sampling,
    )
    return dataclasses.replace(state, **fields), variant


# --- No copy of the cache


def shape(*dimensions: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


ROWS, TOKENS, WIDTH = 4, 64, 16
BIG_POOL = 1 << 16
"""Pages of a cache that is only described, never allocated: 16 million floats a pool, against activations of 10^5."""

SAMPLED = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, logprobs=2, presence_penalty=0.5)


def lowered_chunk(model: Model, cache: Any, params: SamplingParams) -> Any:
    state, variant = decode_state([params] * ROWS, model)
    arguments = (model.params, cache, state, shape(ROWS, dtype=jnp.bool), shape(ROWS, WIDTH))
    return decode_chunk.lower(*arguments, config=model.config, variant=variant, num_steps=4)


def lowered_prefill(model: Model, cache: Any, from_empty: bool) -> Any:
    arguments = (model.params, cache, shape(ROWS, TOKENS), shape(ROWS), shape(ROWS), shape(ROWS, WIDTH))
    return steps.prefill.lower(*arguments, config=model.config, from_empty=from_empty, context_lengths=shape(ROWS))


def lowered_scored(model: Model, cache: Any) -> Any:
    arguments = (model.params, cache, shape(ROWS, TOKENS), shape(ROWS), shape(ROWS), shape(ROWS, WIDTH))
    targets = shape(ROWS, TOKENS)
    return steps.prefill_scored.lower(*arguments, targets, num_logprobs=2, config=model.config)


def lowered_decode(model: Model, cache: Any) -> Any:
    arguments = (model.params, cache, shape(ROWS), shape(ROWS), shape(ROWS, WIDTH))
    return steps.decode.lower(*arguments, config=model.config, context_lengths=shape(ROWS))


def lowered_verify(model: Model, cache: Any) -> Any:
    arguments = (model.params, cache, shape(ROWS, 5), shape(ROWS), shape(ROWS, WIDTH))
    return steps.verify.lower(*arguments, config=model.config, context_lengths=shape(ROWS))


PROGRAMS: dict[str, Callable[[Model, Any], Any]] = {
    "first prefill": functools.partial(lowered_prefill, from_empty=True),
    "later prefill": functools.partial(lowered_prefill, from_empty=False),
    "scored prefill": lowered_scored,
    "decode": lowered_decode,
    "verify": lowered_verify,
    "greedy chunk": functools.partial(lowered_chunk, params=GREEDY),
    "sampled chunk": functools.partial(lowered_chunk, params=SAMPLED),
}


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def analysed(lowered: Any, cache: Any) -> tuple[int, int, collections.Counter[str]]:
    """Bytes of temporaries, bytes updated in place, and the pool-sized arrays of the compiled program."""
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes, memory.alias_size_in_bytes, pool_sized(compiled.as_text(), cache.keys[0].shape)


def pool_sized(hlo: str, pool: tuple[int, ...]) -> collections.Counter[str]:
    """How many instructions of each kind make a new array of the pool's shape, whatever its dtype or layout."""
    dimensions = ",".join(map(str, pool))
    instructions = re.findall(rf"= \w+\[{dimensions}\](?:\{{[^}}]*\}})? ([\w-]+)\(", hlo)
    views = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion", "dynamic-update-slice", "while", "call"}
    return collections.Counter(kind for kind in instructions if kind not in views)


@pytest.mark.parametrize(
    ("program", "case", "dtype"),
    [(program, "llama", "float32") for program in PROGRAMS]
    + [(program, "gemma2", "bfloat16") for program in ("later prefill", "greedy chunk")],
)
def test_no_program_copies_the_cache(program: str, case: str, dtype: str):
    model = load_case(case, dtype)
    cache = jax.eval_shape(lambda: kv_cache.create(model.config, BIG_POOL, PAGE, model.dtype))
    temporary, aliased, copies = analysed(PROGRAMS[program](model, cache), cache)
    assert num_bytes(cache) > 10**8
    assert temporary < num_bytes(cache) // 50
    assert 0 <= aliased - num_bytes(cache) < 10_000  # the chunk's state is donated too: a few kilobytes
    assert not copies


def test_a_copy_of_the_cache_would_be_found():
    """The same program without donation has one copy for each of the two layers' pools, and nothing aliased."""
    model = load_case("llama")
    cache = jax.eval_shape(lambda: kv_cache.create(model.config, BIG_POOL, PAGE, model.dtype))
    arguments = (model.params, cache, shape(ROWS), shape(ROWS), shape(ROWS, WIDTH))
    undonated = jax.jit(inspect.unwrap(steps.decode), static_argnames="config")
    lowered = undonated.lower(*arguments, config=model.config, context_lengths=shape(ROWS))
    _, aliased, copies = analysed(lowered, cache)
    assert (aliased, copies["copy"]) == (0, 4)


# --- Purity


def test_only_the_cache_is_consumed():
    model = load_case("llama")
    table = pages_in_order(2, 4)
    tokens = jnp.asarray(families.BY_NAME["llama"].tokens[:2, :8])
    lengths, starts = ints(8, 5), ints(0, 0)
    inputs = (model.params, tokens, lengths, starts, table)
    before = [np.array(leaf) for leaf in jax.tree.leaves(inputs)]
    results = []
    for _ in range(2):
        cache = kv_cache.create(model.config, 9, PAGE, jnp.float32)
        logits, after = steps.prefill(model.params, cache, tokens, lengths, starts, table, config=model.config)
        assert all(pool.is_deleted() for pool in jax.tree.leaves(cache))
        results.append((np.asarray(logits), jax.tree.map(np.asarray, after)))
    for old, new in zip(before, jax.tree.leaves(inputs), strict=True):
        np.testing.assert_array_equal(new, old)
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])


# --- One compilation a bucket


@dataclasses.dataclass
class Compilations:
    names: list[str]

    def take(self) -> collections.Counter[str]:
        """What was compiled since the last call."""
        counts = collections.Counter(self.names)
        self.names.clear()
        return counts


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    seen = Compilations([])

    def listen(event: str, duration_secs: float, **fields: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.names.append(str(fields["fun_name"]).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_mixed_workload_compiles_once_a_bucket(compilations: Compilations, monkeypatch: pytest.MonkeyPatch):
    """Every program is named by hand. A second workload in the same buckets compiles nothing, not even a scalar."""
    limits = Limits(prefill_chunk=64, prefill_tokens=512, decode_chunk=4)
    monkeypatch.setattr(Limits, "default", classmethod(lambda cls: limits))
    model = load_case("llama")
    # A configuration that no other test has, so that nothing is compiled yet.
    fields = {"max_position_embeddings": 1021, "num_tokens": model.config.num_tokens - 1}
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **fields))

    def run(*lengths_and_tokens: tuple[int, int]) -> collections.Counter[str]:
        prompts = [[3 + place % 80 for place in range(length)] for length, _ in lengths_and_tokens]
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in lengths_and_tokens]
        outputs = generate(model, prompts, params)
        assert [len(output.token_ids) for output in outputs] == [count for _, count in lengths_and_tokens]
        counts = compilations.take()
        return collections.Counter(
            {name: counts[name] for name in ("_begin", "prefill", "first_token", "decode_chunk")}
        )

    none = dict.fromkeys(("_begin", "prefill", "first_token", "decode_chunk"), 0)
    # One row of up to 64 tokens, a table of 16 pages. Prefill is one program with the making of the cache.
    assert run((5, 3)) == none | {"_begin": 1, "first_token": 1, "decode_chunk": 1}
    assert run((64, 30)) == none
    assert run((3, 9), (40, 2), (64, 7)) == none | {"_begin": 1, "first_token": 1, "decode_chunk": 1}  # four rows
    assert run((1, 5), (2, 50), (3, 5), (64, 1)) == none
    assert run((65, 2)) == none | {"prefill": 2}  # a first and a later chunk of prefill
    assert run((200, 40)) == none  # four chunks, 15 pages
    # A cache of 32 pages a row is another shape; decoding grows from a table of 16 into one of 32 pages.
    assert run((250, 20)) == none | {"prefill": 2, "decode_chunk": 2}
    assert run((300, 9)) == none | {"prefill": 1}  # prefill with a table of 32

    run((255, 30))
    run((310, 5))
    run((17, 4), (18, 20), (19, 1))
    compilations.take()
    generate(model, [[4] * 63, [5] * 2, [6] * 33], SamplingParams(temperature=0.0, max_tokens=11))
    generate(model, [[7] * 299], SamplingParams(temperature=0.0, max_tokens=2))
    assert compilations.take() == {}


# --- Padding


@pytest.mark.parametrize("case", ["llama", "mistral_sliding"])
def test_f5_the_bucket_does_not_show(case: str):
    """5 and 20 tokens padded to 64, 128 and 256, and with tables of 4 and 16 pages: equal to 1e-5."""
    model = load_case(case)
    tokens = families.BY_NAME[case].tokens[:2]
    lengths = ints(5, 20)
    expected = families.BY_NAME[case].logits[[0, 1], [4, 19]]
    results = []
    for bucket, width, from_empty in [
        (64, 16, True),
        (128, 16, True),
        (256, 16, True),
        (64, 4, False),
        (64, 16, False),
    ]:
        padded = np.full((2, bucket), 7, np.int32)
        padded[0, :5], padded[1, :20] = tokens[0, :5], tokens[1, :20]
        logits, _ = steps.prefill(
            model.params,
            poisoned_cache(model, 2 * width + 1),
            jnp.asarray(padded),
            lengths,
            ints(0, 0),
            pages_in_order(2, width),
            config=model.config,
            from_empty=from_empty,
        )
        results.append(np.asarray(logits))
    for result in results:
        np.testing.assert_allclose(result, results[0], atol=1e-5, rtol=0)
        np.testing.assert_allclose(result, expected, atol=2e-3, rtol=0)
        assert (result.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("case", ["llama", "mistral_sliding"])
def test_f5_lengths_around_a_page_and_the_bucket(case: str, rng: np.random.Generator):
    """Lengths 1, page - 1, page, page + 1 and the whole bucket in one batch, then a decode step; against no cache."""
    model = load_case(case)
    lengths = np.array([1, PAGE - 1, PAGE, PAGE + 1, 64], np.int32)
    tokens = rng.integers(0, 96, (5, 66)).astype(np.int32)
    dense = np.asarray(
        steps.full_logits(model.params, jnp.asarray(tokens), jnp.full(5, 66, jnp.int32), config=model.config)
    )
    table = pages_in_order(5, 5)
    for from_empty in (True, False):
        logits, cache = steps.prefill(
            model.params,
            poisoned_cache(model, 26),
            jnp.asarray(tokens[:, :64]),
            jnp.asarray(lengths),
            jnp.zeros(5, jnp.int32),
            table,
            config=model.config,
            from_empty=from_empty,
        )
        np.testing.assert_allclose(logits, dense[np.arange(5), lengths - 1], atol=1e-5, rtol=0)
    for step in range(2):
        positions = lengths + step
        logits, cache = steps.decode(
            model.params,
            cache,
            jnp.asarray(tokens[np.arange(5), positions]),
            jnp.asarray(positions),
            table,
            config=model.config,
        )
        np.testing.assert_allclose(logits, dense[np.arange(5), positions], atol=1e-5, rtol=0)


def test_neither_prefill_nor_decode_sees_the_neighbours(rng: np.random.Generator):
    """Row 1's logits are equal bit for bit in one program, whether the others are short, long, idle or NaN."""
    model = load_case("llama")
    embedding = model.params.embed_tokens.at[90].set(jnp.nan)
    params = dataclasses.replace(model.params, embed_tokens=embedding)
    table = pages_in_order(4, 5)
    own = rng.integers(0, 90, 20).astype(np.int32)
    company = {
        "short": ([3, 20, 5, 1], rng.integers(0, 90, (4, 64))),
        "long": ([64, 20, 64, 63], rng.integers(0, 90, (4, 64))),
        "idle": ([0, 20, 0, 0], np.zeros((4, 64), int)),
        "NaN": ([30, 20, 30, 64], np.full((4, 64), 90)),
    }
    prefilled, decoded = [], []
    for lengths, tokens in company.values():
        tokens = tokens.astype(np.int32)
        tokens[1, :20] = own
        filled = ints(*lengths)
        logits, cache = steps.prefill(
            params, poisoned_cache(model, 21), jnp.asarray(tokens), filled, ints(0, 0, 0, 0), table, config=model.config
        )
        prefilled.append(np.asarray(logits)[1])
        positions = jnp.where(filled > 0, filled, -1)
        next_tokens = jnp.asarray(tokens[:, 0]).at[1].set(3)
        logits, cache = steps.decode(params, cache, next_tokens, positions, table, config=model.config)
        decoded.append(np.asarray(logits)[1])
    for logits in (prefilled, decoded):
        assert np.isfinite(logits[0]).all()
        for other in logits[1:]:
            np.testing.assert_array_equal(other, logits[0])


# --- The chunk


def start_chunk(model: Model, rng: np.random.Generator) -> tuple[PagedKVCache, jax.Array, np.ndarray]:
    """Four rows of 13 to 16 tokens in a poisoned cache: the cache, the page table, each row's next greedy token."""
    table = pages_in_order(4, 4)
    logits, cache = steps.prefill(
        model.params,
        poisoned_cache(model, 17),
        jnp.asarray(rng.integers(0, 96, (4, 64)).astype(np.int32)),
        ints(13, 14, 15, 16),
        ints(0, 0, 0, 0),
        table,
        config=model.config,
    )
    return cache, table, np.asarray(logits).argmax(-1).astype(np.int32)


def run_chunk(
    model: Model, cache: PagedKVCache, table: jax.Array, active: list[bool], **fields: jax.Array
) -> tuple[PagedKVCache, DecodeState, DecodedChunk]:
    state, variant = decode_state([GREEDY] * 4, model, **fields)
    return decode_chunk(
        model.params, cache, state, jnp.array(active), table, config=model.config, variant=variant, num_steps=6
    )


def test_a_chunk_is_decode_steps_one_after_the_other(rng: np.random.Generator):
    model = load_case("llama")
    cache, table, tokens = start_chunk(model, rng)
    copy = jax.tree.map(jnp.copy, cache)
    positions = np.array([13, 14, 15, 16], np.int32)
    _, state, chunk = run_chunk(
        model, copy, table, [True] * 4, tokens=jnp.asarray(tokens), positions=ints(13, 14, 15, 16)
    )
    expected = []
    for step in range(6):
        logits, cache = steps.decode(
            model.params, cache, jnp.asarray(tokens), jnp.asarray(positions + step), table, config=model.config
        )
        tokens = np.asarray(logits).argmax(-1).astype(np.int32)
        expected.append(tokens)
    np.testing.assert_array_equal(chunk.tokens, np.stack(expected))
    np.testing.assert_array_equal(chunk.counts, [6] * 4)
    np.testing.assert_array_equal(state.positions, positions + 6)
    np.testing.assert_array_equal(state.num_generated, [7] * 4)


def test_rows_that_have_finished_write_nothing(rng: np.random.Generator):
    """Row 0 is done, row 1 was ended by the host, row 2 reaches its limit after two steps; row 3 goes on."""
    model = load_case("llama")
    cache, table, tokens = start_chunk(model, rng)
    before = jax.tree.map(np.array, cache)
    after, state, chunk = run_chunk(
        model,
        cache,
        table,
        [True, False, True, True],
        tokens=jnp.asarray(tokens),
        positions=ints(13, 14, 15, 16),
        done=jnp.array([True, False, False, False]),
        max_tokens=ints(9, 9, 3, 99),
    )
    np.testing.assert_array_equal(chunk.counts, [0, 0, 2, 6])
    np.testing.assert_array_equal(state.done, [True, True, True, False])
    np.testing.assert_array_equal(state.num_generated, [1, 1, 3, 7])
    np.testing.assert_array_equal(state.positions, [13, 14, 17, 22])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        rows = np.asarray(new)[1:].reshape(4, 4, 2, PAGE, 8).swapaxes(1, 2).reshape(4, 2, 64, 8)
        old_rows = old[1:].reshape(4, 4, 2, PAGE, 8).swapaxes(1, 2).reshape(4, 2, 64, 8)
        changed = ~(np.isclose(rows, old_rows, rtol=0, atol=0, equal_nan=True)).all((1, 3))
        assert [np.flatnonzero(row).tolist() for row in changed] == [[], [], [15, 16], [16, 17, 18, 19, 20, 21]]


def test_a_stop_id_ends_its_row_inside_the_chunk(rng: np.random.Generator):
    model = load_case("llama")
    cache, table, tokens = start_chunk(model, rng)
    copy = jax.tree.map(jnp.copy, cache)

    def run(cache: PagedKVCache, **fields: jax.Array) -> tuple[DecodeState, DecodedChunk]:
        fields |= {"tokens": jnp.asarray(tokens), "positions": ints(13, 14, 15, 16)}
        return run_chunk(model, cache, table, [True] * 4, **fields)[1:]

    _, free = run(copy)
    column = np.asarray(free.tokens)[:, 2].tolist()
    stop = column[3]
    stops = jnp.full((4, 1), -1, jnp.int32).at[2, 0].set(stop)
    state, chunk = run(cache, stop_ids=stops)
    assert np.asarray(chunk.counts).tolist() == [6, 6, column.index(stop) + 1, 6]
    assert np.asarray(state.done).tolist() == [False, False, True, False]
    assert np.asarray(chunk.tokens)[:, [0, 1, 3]].tolist() == np.asarray(free.tokens)[:, [0, 1, 3]].tolist()


# --- Scores and verification


def test_prompt_scores_in_chunks_of_odd_sizes():
    """20 tokens a call, in rows that end in the second, in the first, or never began; against transformers' logits."""
    case = families.BY_NAME["llama"]
    model = load_case("llama")
    table = pages_in_order(3, 4)
    cache = poisoned_cache(model, 13)
    lengths = np.array([40, 17, 0])
    expected = jax.nn.log_softmax(jnp.asarray(case.logits), axis=-1)
    for start in (0, 20):
        here = np.clip(lengths - start, 0, 20)
        chunk = np.zeros((3, 21), np.int32)
        chunk[:2, : 40 - start] = case.tokens[:2, start : start + 21]
        _, scores, cache = steps.prefill_scored(
            model.params,
            cache,
            jnp.asarray(chunk[:, :20]),
            jnp.asarray(here.astype(np.int32)),
            jnp.where(jnp.asarray(here) > 0, start, 0).astype(jnp.int32),
            table,
            jnp.asarray(chunk[:, 1:]),
            num_logprobs=3,
            config=model.config,
        )
        for row in range(2):
            scored = min(here[row], lengths[row] - start - 1)  # the last token's successor is not known yet
            for place in range(max(0, scored)):
                reference = expected[row, start + place]
                target = case.tokens[row, start + place + 1]
                assert scores.logprob[row, place] == pytest.approx(float(reference[target]), abs=1e-4)
                assert int(scores.rank[row, place]) == 1 + int((reference > reference[target]).sum())
                top = np.sort(np.asarray(reference))[::-1][:3]
                np.testing.assert_allclose(scores.top_logprobs[row, place], top, atol=1e-4)


def test_verify_leaves_idle_rows_alone(rng: np.random.Generator):
    model = load_case("llama")
    cache, table, tokens = start_chunk(model, rng)
    before = jax.tree.map(np.array, cache)
    drafts = jnp.asarray(np.tile(tokens[:, None], (1, 3)))
    logits, after = steps.verify(model.params, cache, drafts, ints(-1, 14, -1, 16), table, config=model.config)
    assert np.isfinite(np.asarray(logits)[[1, 3]]).all()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        for row in (0, 2):
            np.testing.assert_array_equal(np.asarray(new)[1 + 4 * row : 5 + 4 * row], old[1 + 4 * row : 5 + 4 * row])
