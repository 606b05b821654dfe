"""The memory planner: byte for byte what is loaded and allocated, XLA's own figures for programs, and what fits."""

import dataclasses
import inspect
import json
import pathlib

import families
import gguf_conversion
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_checkpoints

import jaxinfer as ji
import jaxinfer.cli
from checkpoints.safetensors import SafetensorsFolder
from jaxinfer import decoder, kv_cache, steps
from jaxinfer.batch import Batch, Limits
from jaxinfer.generation import requests_for
from jaxinfer.planning.chart import text_bars
from jaxinfer.planning.target import Target, parse_bytes, target_for
from jaxinfer.planning.temporaries import Work, compiled, estimate, representative_layers
from jaxinfer.planning.weights import Storage, abstract_params, bytes_by_precision, num_bytes
from jaxinfer.quantization.plan import PRESETS, Plan, Precision, Rule
from jaxinfer.tiered_batch import TieredBatch
from pallas_kernels.int4_matmul import PackedInt4, to_mosaic

SHAPES = pathlib.Path(__file__).parent.parent / "benchmarks" / "shapes"
FAMILIES = {case.name: case for case in families.CASES}
GIB = 2**30


def outline(leaf: jax.Array) -> tuple[tuple[int, ...], np.dtype]:
    return leaf.shape, np.dtype(leaf.dtype)


def assert_same(planned: object, loaded: object) -> None:
    """The same pytree with the same shapes and types, and so the same bytes."""
    assert jax.tree.map(outline, planned) == jax.tree.map(outline, loaded)
    assert num_bytes(planned) == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))


# --- Weights


@pytest.mark.parametrize("name", sorted(set(quantized_checkpoints.FORMATS) - {"gptq v2", "awq gemv", "nvfp4 modelopt"}))
@pytest.mark.filterwarnings("ignore")
def test_packed_checkpoints_are_planned_as_they_are_loaded(name: str, tmp_path: pathlib.Path):
    folder = quantized_checkpoints.make(name, tmp_path).quantized
    loaded = ji.load(folder, packed=True, progress=False)
    planned = abstract_params(folder, loaded.config, Storage(loaded.dtype, packed=True), target_for(None))
    assert_same(planned, loaded.params)


@pytest.mark.parametrize("case", [case for case in families.CASES if "_rope_" not in case.name], ids=str)
def test_plain_checkpoints_are_planned_as_they_are_loaded(case: families.FamilyCase):
    loaded = ji.load(case.folder, dtype="bfloat16", progress=False)
    planned = ji.memory_plan(case.folder, dtype="bfloat16")
    assert planned.total_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))


MIXED = Plan(
    (
        Rule(("lm_head",), Precision(8)),
        Rule(("*.v_proj",), Precision(16)),
        Rule(("*.k_proj",), Precision(8, 16)),
        Rule(("layers.0.*",), Precision(4, 32, symmetric=True)),
        Rule(("*.down_proj",), Precision(8, method="fp8")),
        Rule(("*",), Precision(3, 16)),
    ),
    "mixed",
)


@pytest.mark.parametrize("plan", ["int4-int8-head", MIXED], ids=["int4-int8-head", "mixed"])
def test_plans_are_planned_as_they_are_loaded(plan: str | Plan):
    """The tied head of gemma 3 becomes a weight of its own where the plan names it."""
    folder = FAMILIES["gemma3_text"].folder
    loaded = ji.load(folder, quantize=plan, progress=False)
    plan = PRESETS[plan] if isinstance(plan, str) else plan
    planned = abstract_params(folder, loaded.config, Storage(loaded.dtype, plan), target_for(None))
    assert_same(planned, loaded.params)
    parts = bytes_by_precision(planned)
    assert sum(parts.values()) == num_bytes(planned)
    assert all(size > 0 for size in parts.values())


def test_calibrated_methods_take_the_room_of_the_others():
    """AWQ's scales go into other weights, and GPTQ's order of the inputs is theirs."""
    sizes = {
        plan: ji.memory_plan(FAMILIES["llama"].folder, quantize=plan).weights
        for plan in ("int4", "int4-gptq", "int4-awq")
    }
    assert sizes["int4-gptq"] == sizes["int4-awq"] == sizes["int4"]


def test_gguf_files_are_planned_as_they_are_loaded(tmp_path: pathlib.Path):
    path = gguf_conversion.convert(FAMILIES["llama"], tmp_path / "llama.gguf")
    loaded = ji.load(path, dtype="float32", progress=False)
    assert_same(abstract_params(path, loaded.config, Storage(loaded.dtype), target_for(None)), loaded.params)


@pytest.mark.parametrize("packed", [None, False])
def test_stores_are_planned_as_they_are_loaded(packed: bool | None, tmp_path: pathlib.Path):
    path = tmp_path / "store"
    plan = Plan((Rule(("*.q_proj",), Precision(4, 16)), Rule(("*.down_proj",), Precision(8))))
    ji.quantize(FAMILIES["llama"].folder, plan, out=path, progress=False)
    loaded = ji.load(path, packed=packed, progress=False)
    assert_same(
        abstract_params(path, loaded.config, Storage(loaded.dtype, None, packed), target_for(None)), loaded.params
    )
    assert ji.memory_plan(path, packed=packed).total_weights == num_bytes(loaded.params)


def test_random_weights_are_planned_as_they_are_made(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"].config))
    loaded = ji.load(tmp_path, random_weights=0, quantize="seed-mixed", progress=False)
    planned = ji.memory_plan(tmp_path, random_weights=True, quantize="seed-mixed")
    assert planned.total_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))


def test_matrices_are_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Only vectors are, such as GPTQ's order of the inputs."""
    folder = quantized_checkpoints.make("gptq act-order", tmp_path).quantized
    expected = ji.memory_plan(folder, packed=True).weights
    read, asked = SafetensorsFolder.read, []

    def watched(self: SafetensorsFolder, name: str, rows: slice | None = None) -> np.ndarray:
        asked.append(name)
        return read(self, name, rows)

    def refused(self: SafetensorsFolder, name: str, out: np.ndarray, rows: slice | None = None) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsFolder, "read", watched)
    monkeypatch.setattr(SafetensorsFolder, "read_into", refused)
    assert ji.memory_plan(folder, packed=True).weights == expected
    assert asked
    assert all(name.endswith("g_idx") for name in asked)


def test_a_gpu_that_is_not_here_has_the_layout_and_defaults_of_one(tmp_path: pathlib.Path):
    """The Hopper kernel's codes are padded to 64 inputs and 16 outputs; formats of 4 bits stay packed in bfloat16."""
    folder = quantized_checkpoints.make("awq gemm", tmp_path).quantized
    here, there = ji.memory_plan(folder), ji.memory_plan(folder, gpu_memory="24GiB")
    assert set(here.weights) == {"float32", "norms and biases"}
    assert set(there.weights) == {"bfloat16", "int4, groups of 32", "norms and biases"}
    assert (there.kv_dtype, there.capacity) == ("bfloat16", 18 * GIB)
    assert here.kv_bytes_per_token == 2 * there.kv_bytes_per_token
    weight = PackedInt4(jnp.zeros((8, 16), jnp.uint8), jnp.zeros((8, 2), jnp.bfloat16), None, None, (8, 32), 16)
    target = Target("a GPU", "gpu", GIB, is_here=False)
    assert_same(jax.eval_shape(target.kernel_layout, weight), to_mosaic(weight))
    assert target.kernel_layout(weight).codes.shape == (1, 1, 128)


# --- Cache


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn", "int4"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 5), (3, 40)])
def test_the_cache_is_that_which_generate_allocates(kv_dtype: str | None, rows: int, tokens: int):
    folder = FAMILIES["llama"].folder
    model = ji.load(folder, kv_dtype=kv_dtype, progress=False)
    requests = requests_for(model, [[1] * (tokens - 3)] * rows, ji.SamplingParams(max_tokens=4))
    cache = Batch(model, requests, Limits.default()).cache
    plan = ji.memory_plan(folder, context=tokens, batch=rows, kv_dtype=kv_dtype)
    assert plan.kv_cache == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert plan.kv_bytes_per_token == kv_cache.bytes_per_token(model.config, model.cache_dtype)


def test_a_tiered_cache_is_that_which_generate_allocates(tmp_path: pathlib.Path):
    """Gemma 3 has layers with a window, which keep nothing behind it, and layers that see everything, in tiers."""
    config = FAMILIES["gemma3_text"].config | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ji.load(tmp_path, random_weights=0, progress=False)
    for kv_dtype, kv, tokens in (("tiered", ji.TieredKV(), 40), ("tiered:32,64", ji.TieredKV(32, 64), 300)):
        tiered = dataclasses.replace(model, kv_dtype=kv)
        requests = requests_for(tiered, [[1] * (tokens - 3)] * 3, ji.SamplingParams(max_tokens=4))
        cache = TieredBatch(tiered, requests, Limits.default()).cache
        plan = ji.memory_plan(tmp_path, context=tokens, batch=3, kv_dtype=kv_dtype)
        assert plan.kv_cache == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert plan.kv_dtype == str(kv)
        assert plan.kv_bytes_per_token == -(-plan.kv_cache // (plan.rounded[0] * plan.rounded[1]))


def test_what_is_rounded_up_is_said():
    """Three rows take the room of four, 40 tokens that of the narrowest page table: 16 pages of 16."""
    plan = ji.memory_plan(FAMILIES["llama"].folder, context=40, batch=3)
    assert plan.rounded == (4, 256)
    assert plan.kv_cache == ji.memory_plan(FAMILIES["llama"].folder, context=64, batch=4).kv_cache
    assert "rounded up     4 x 256 tokens: cache and programs are made for powers of two" in str(plan)
    large = ji.memory_plan(SHAPES / "llama-3-8b", batch=4, context=4096)
    assert large.rounded == (4, 4096)
    assert "rounded up" not in str(large)


def test_a_draft_adds_its_weights_and_its_cache():
    target, draft = FAMILIES["llama"].folder, FAMILIES["qwen3"].folder
    alone, other = (ji.memory_plan(folder, context=60, batch=2) for folder in (target, draft))
    both = ji.memory_plan(target, context=60, batch=2, draft=draft)
    assert both.draft_weights == other.weights
    assert both.total_weights == alone.total_weights + other.total_weights
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token + other.kv_bytes_per_token
    # Page 0 and two rows of 16 pages; with a draft a page more for each row's drafted tokens.
    assert both.kv_cache * (1 + 2 * 16) == (alone.kv_cache + other.kv_cache) * (1 + 2 * 17)


# --- Programs


@pytest.mark.parametrize(("name", "rows", "tokens"), [("llama", 4, 200), ("gemma2", 2, 700)])
def test_temporaries_are_those_that_xla_says(name: str, rows: int, tokens: int):
    """The formula is within 12 % of `memory_analysis()` of the whole programs, the programs of few layers exact."""
    folder = FAMILIES[name].folder
    config = ji.inspect(folder).config
    params = abstract_params(folder, config, Storage(jnp.dtype(jnp.float32)), target_for(None))
    work = Work.of(rows, tokens, Limits.default("cpu"))
    whole = compiled(config, params, work, jnp.dtype(jnp.float32), num_layers=config.num_layers)
    formula = estimate(config, params, jnp.dtype(jnp.float32), work, "cpu")
    assert formula.prefill == pytest.approx(whole.prefill, rel=0.12)
    assert formula.decode == pytest.approx(whole.decode, rel=0.12)
    assert formula.logits == whole.logits


def test_programs_of_few_layers_stand_for_those_of_many():
    """Two layers of a kind, of four."""
    config = ji.inspect(FAMILIES["llama"].folder).config
    params = abstract_params(FAMILIES["llama"].folder, config, Storage(jnp.dtype(jnp.float32)), target_for(None))
    params = dataclasses.replace(params, layers=params.layers * 2)
    config = dataclasses.replace(config, layers=config.layers * 2)
    assert representative_layers(config, params) == [0, 1]
    assert config.num_layers == 4
    work = Work.of(1, 60, Limits.default("cpu"))
    few = compiled(config, params, work, jnp.dtype(jnp.float32))
    all_of_them = compiled(config, params, work, jnp.dtype(jnp.float32), num_layers=config.num_layers)
    assert few.prefill == pytest.approx(all_of_them.prefill, rel=0.02)
    assert few.decode == pytest.approx(all_of_them.decode, rel=0.02)


def test_the_formula_is_that_of_programs_compiled_for_an_h200(tmp_path: pathlib.Path):
    """`memory_analysis()` of XLA for an H200 (CUDA 13, cuDNN 9.12), of the first prefill of 8 x 2048 tokens.

    Where gate, up and down are 4-bit codes, kernels write half as much between the products; where only gate and up
    are, or one of them, they are products like others; sums of 8-bit codes are float32 first.
    """
    (tmp_path / "gate_up.toml").write_text('[[rules]]\nweights = ["*.gate_proj", "*.up_proj"]\nbits = 4\n')
    gate, up = (f'[[rules]]\nweights = "*.{name}_proj"\nbits = {bits}\n' for name, bits in (("gate", 4), ("up", 8)))
    (tmp_path / "gate.toml").write_text(gate)
    (tmp_path / "both.toml").write_text(gate + up)
    for shape, quantize, megabytes, tolerance in (
        ("llama-3.2-1b", None, 874.6, 0.01),
        ("llama-3.2-1b", "int4", 480.3, 0.04),
        ("llama-3-8b", None, 1552.0, 0.01),
        ("llama-3-8b", "int4", 914.5, 0.06),
        ("llama-3-8b", "int8", 2751.5, 0.01),
        ("llama-3-8b", "seed-mixed", 1811.9, 0.01),
        ("llama-3-8b", tmp_path / "gate_up.toml", 1552.0, 0.03),
        ("llama-3-8b", tmp_path / "gate.toml", 1552.0, 0.01),
        ("llama-3-8b", tmp_path / "both.toml", 1820.5, 0.01),
        ("qwen3-0.6b", None, 339.9, 0.12),
        ("qwen3-0.6b", "int4", 453.1, 0.02),
        ("qwen3-8b", "int4", 977.4, 0.06),
    ):
        plan = ji.memory_plan(SHAPES / shape, batch=8, context=2048, gpu_memory="141GB", quantize=quantize)
        assert plan.prefill / 1e6 == pytest.approx(megabytes, rel=tolerance)


@pytest.mark.parametrize(("quantize", "gigabytes"), [(None, 21.165), ("int4", 10.4597)])
def test_the_formula_is_what_an_h200_took(quantize: str | None, gigabytes: float):
    """The allocator's peak in `benchmarks.decode` of 64 prompts of 128 tokens, 257 new ones each (commits 7890add,
    98639d3)."""
    shape, dtype, limits = SHAPES / "llama-3-8b", jnp.dtype(jnp.bfloat16), Limits.default("gpu")
    plan = ji.memory_plan(
        shape, batch=64, context=128 + 257, gpu_memory="141GB", quantize=quantize, random_weights=True
    )
    config = ji.inspect(shape).config
    storage = Storage(dtype, None if quantize is None else PRESETS[quantize])
    params = abstract_params(shape, config, storage, target_for("141GB"))
    prompts = estimate(config, params, dtype, Work.of(64, 128, limits), "gpu")
    taken = plan.total_weights + plan.kv_cache + prompts.most
    assert taken / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_the_plan_is_what_an_h200_took():
    """The peak of `benchmarks.memory_plan` (commit 69649ef), which came while kernels were tried for the head."""
    plan = ji.memory_plan(
        SHAPES / "llama-3-8b", batch=16, context=4096, gpu_memory="141GB", quantize="int4", random_weights=True
    )
    assert plan.peak / 1e9 == pytest.approx(15.524, rel=0.01)
    assert plan.peak == plan.total_weights + plan.kv_cache + plan.compiling


def test_kernels_are_tried_only_where_xla_chooses_them():
    """For a decode step of few rows, the head in 16 bits: 128,256 x 4096. cuBLAS is not tried, one row is a sum."""

    def compiling(batch: int, quantize: str | None) -> int:
        shape = SHAPES / "llama-3-8b"
        return ji.memory_plan(shape, batch=batch, context=128, gpu_memory="141GB", quantize=quantize).compiling

    assert compiling(16, "int4") == compiling(16, None) == 2 * (128_256 * 4096 + 16 * (4096 + 2 * 128_256))
    assert [compiling(rows, quantize) for rows in (1, 64) for quantize in (None, "int4")] == [0, 0, 0, 0]
    assert compiling(64, "int8") == 2 * (8192 * 4096 + 28_672 * 4096 + 2 * 8192 * 28_672)


def test_random_weights_of_a_gpu_that_is_not_here_have_its_layout():
    """And its kernels then: the plan `int4-g128` has the groups that random codes have."""
    random = ji.memory_plan(SHAPES / "llama-3-8b", gpu_memory="141GB", quantize="int4", random_weights=True)
    read = ji.memory_plan(SHAPES / "llama-3-8b", gpu_memory="141GB", quantize="int4-g128")
    assert (random.weights, random.prefill) == (read.weights, read.prefill)


def test_layers_of_a_long_prefill_take_turns():
    """A barrier before each: else XLA decodes all packed weights first, or writes all keys and values last."""
    folder = FAMILIES["llama"].folder
    config = ji.inspect(folder).config
    params = abstract_params(folder, config, Storage(jnp.dtype(jnp.float32)), target_for(None))
    for length, barriers in ((decoder.MANY_TOKENS, config.num_layers), (decoder.MANY_TOKENS - 64, 0)):
        ids, lengths = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        text = steps.full_logits.lower(params, ids, lengths, config=config).as_text()
        assert text.count("optimization_barrier") == barriers


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2: norms behind both branches
def test_taking_turns_changes_no_result(family: str, monkeypatch: pytest.MonkeyPatch):
    """Neither does leaving out what the last layer would compute for tokens that nobody asks for."""
    model = ji.load(FAMILIES[family].folder, dtype="float32", progress=False)
    lengths = jnp.array([70, 3], jnp.int32)
    ids = jnp.ones((2, 70), jnp.int32).at[0].set(jnp.arange(70, dtype=jnp.int32) % 50)
    results = []
    for many in (decoder.MANY_TOKENS, 1):
        monkeypatch.setattr(decoder, "MANY_TOKENS", many)
        jax.clear_caches()
        cache = kv_cache.create(model.config, 33, 16, model.dtype)
        table = jnp.arange(1, 33, dtype=jnp.int32).reshape(2, 16)
        starts = jnp.zeros(2, jnp.int32)
        logits, cache = steps.prefill(model.params, cache, ids, lengths, starts, table, config=model.config)
        results.append((logits, *cache.keys, *cache.values))
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many", [decoder.MANY_TOKENS, 1])
def test_padding_that_is_left_out_changes_no_result(many: int, monkeypatch: pytest.MonkeyPatch):
    """Rows as short as a kernel likes them: 4 tokens of 8 of a prompt, a row without tokens, and what follows the 4."""
    model = ji.load(FAMILIES["llama"].folder, dtype="float32", progress=False)
    monkeypatch.setattr(decoder, "MANY_TOKENS", many)
    lengths, starts = jnp.array([4, 0, 3, 1], jnp.int32), jnp.array([0, 0, 0, 4], jnp.int32)
    ids = jnp.full((4, 4), 7, jnp.int32).at[0].set(jnp.arange(4, dtype=jnp.int32)).at[3, 0].set(9)
    table = jnp.array([[1, 2], [5, 6], [3, 4], [1, 2]], jnp.int32)
    results = []
    # All real tokens, and two places of padding.
    for order in (None, jnp.array([0, 1, 2, 3, 8, 9, 10, 12, 11, 5], jnp.int32)):
        jax.clear_caches()
        cache = kv_cache.create(model.config, 7, 16, model.dtype)
        found, cache = steps.prefill(model.params, cache, ids, lengths, starts, table, config=model.config, order=order)
        written = [pool[1:] for pool in (*cache.keys, *cache.values)]
        results.append((found[jnp.array([0, 2, 3])], *written))
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=1e-5, atol=1e-5)


# --- What fits


def test_the_largest_that_fits_fits_and_twice_that_does_not():
    shape = SHAPES / "llama-3-8b"
    plan = ji.memory_plan(shape, gpu_memory="24GiB", quantize="int4", batch=8, context=4096)
    assert plan.fits
    assert (plan.largest_batch, plan.longest_context) == (16, 8192)
    assert ji.memory_plan(shape, gpu_memory="24GiB", quantize="int4", batch=16, context=4096).fits
    assert not ji.memory_plan(shape, gpu_memory="24GiB", quantize="int4", batch=17, context=4096).fits
    small = ji.memory_plan(shape, gpu_memory="12GiB", batch=1, context=128)
    assert not small.fits
    assert small.largest_batch is None
    assert small.longest_context is None
    assert "does not fit" in str(small)


def test_the_peak_is_the_sum_of_what_is_there_at_once():
    plan = ji.memory_plan(SHAPES / "llama-3-8b", gpu_memory="80GiB", batch=4, context=4096)
    running = plan.logits + max(plan.prefill, plan.decode)
    assert plan.peak == plan.total_weights + plan.kv_cache + max(running, plan.compiling)
    assert sum(size for _, size in plan.items()) == plan.peak
    # 8.03 billion weights in bfloat16, of which the norms, in float32, are 266,240.
    assert plan.total_weights == 2 * 8_030_261_248 + 2 * 266_240
    # 4 rows of 256 pages and the scratch page, 16 tokens each, 128 KiB a token.
    assert plan.kv_cache == (1 + 4 * 256) * 16 * 131_072


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("80 GB", 80 * 10**9), (1000, 1000), ("1.5gib", 3 * GIB // 2)]
)
def test_amounts_of_memory(text: str | int, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory": "much"}, "'much' is no amount of memory; write it as 24GiB"),
        ({"gpu_memory": 0}, "is no amount of memory"),
        ({"gpu_memory": "8GiB", "compile": True}, "compile asks the compiler for this process's device"),
        ({"context": 10**9}, "context=1000000000; expected 1 to"),
        ({"batch": 0}, "batch=0; expected 1 to"),
        ({"quantize": "int4", "packed": True}, "pass one of them"),
        ({"kv_dtype": "int3"}, "kv_dtype='int3'"),
        (
            {"kv_dtype": "tiered", "compile": True},
            "kv_dtype='tiered:1024,4096': tiers are planned without draft",
        ),
        ({"kv_dtype": "tiered", "draft": FAMILIES["llama"].folder}, "tiers are planned without draft"),
        ({"context": "8k"}, "context='8k'; expected 1 to"),
        ({"context": 60.0}, "context=60.0; expected 1 to"),
        ({"batch": True}, "batch=True; expected 1 to 65536"),
        ({"num_drafted": 2.5, "draft": FAMILIES["llama"].folder}, "num_drafted is 2.5; a draft proposes 1 to 15"),
        ({"gpu_memory": 24}, "gpu_memory=24 is a GPU of 24 bytes; write a size with its unit: 24GiB"),
    ],
)
def test_bad_requests_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        # Without the tests' own checks of types, which would be first.
        inspect.unwrap(ji.memory_plan)(FAMILIES["llama"].folder, **arguments)


@pytest.mark.parametrize(("given", "capacity"), [("", 18 * GIB), ("0.5", 12 * GIB), ("1.5", 36 * GIB)])
def test_the_share_of_a_gpu_is_that_of_jax(given: str, capacity: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given)
    assert target_for("24GiB").capacity == capacity


@pytest.mark.parametrize("given", ["abc", "nan", "inf", "0", "-1"])
def test_a_share_that_is_none_is_named(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given)
    with pytest.raises(ValueError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION='{given}': expected a number above 0, such"):
        target_for("24GiB")


# --- How it is shown


def test_bars_end_where_the_next_begin():
    lines = list(text_bars([("weights", 3 * GIB), ("cache", GIB)], 8 * GIB))
    assert lines == ["weights      3.00 GiB  " + "#" * 15, "cache        1.00 GiB  " + " " * 15 + "#" * 5]
    over = list(text_bars([("weights", 4 * GIB), ("cache", 4 * GIB)], 6 * GIB))
    assert over[0] == "weights      4.00 GiB  " + "#" * 20 + " " * 10 + "|"


def test_sizes_are_shown_in_units_of_their_own():
    """A toy's weights on a large card are not 0.00 GiB."""
    lines = list(text_bars([("weights", 3 * GIB), ("logits", 1536), ("cache", 5 * GIB >> 8), ("rest", 12)], 8 * GIB))
    sizes = ["3.00 GiB", "1.50 KiB", "20.00 MiB", "12 B"]
    assert [line[:21].split(maxsplit=1)[1].strip() for line in lines] == sizes
    shown = str(ji.memory_plan(FAMILIES["llama"].folder, context=64, gpu_memory="24GiB"))
    assert " 0.00 " not in shown
    assert "KiB" in shown


def test_plan_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    folder, picture = str(FAMILIES["llama"].folder), tmp_path / "plan.png"
    assert jaxinfer.cli.main(["plan", folder, "--context", "64", "--batch", "2", "--chart", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "KV cache, float32" in shown
    assert "largest batch" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert jaxinfer.cli.main(["plan", folder, "--context", "64", "--json", "--quantize", "int4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = ji.memory_plan(folder, context=64, quantize="int4")
    assert (facts["peak"], facts["weights"], facts["fits"]) == (expected.peak, dict(expected.weights), True)
    picture_in_a_notebook = expected._repr_png_()
    assert picture_in_a_notebook is not None
    assert picture_in_a_notebook.startswith(b"\x89PNG")
    assert facts["rounded"] == [1, 256]
    assert jaxinfer.cli.main(["plan", folder, "--batch", "0"]) == 2
    capsys.readouterr()
    assert jaxinfer.cli.main(["plan", str(SHAPES / "llama-3-8b"), "--gpu-memory", "12GiB", "--context", "128"]) == 1
    assert ": does not fit\n" in capsys.readouterr().out
