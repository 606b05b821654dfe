"""Prompts by the original weights, decoding by their codes: `load(..., prefill_dtype=...)`."""

import logging

import engine_cases as cases
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer import kv_cache, prefill_copy, steps
from jaxinfer.layers.weights import ScaledCodes
from jaxinfer.memory import shown_bytes
from jaxinfer.quantization.plan import PRESETS

FOLDER = families.BY_NAME["llama"].folder
PROMPT = [5, 9, 2, 7, 11, 3, 8, 40, 31, 22] * 2
"""More than a page."""


def expected_logits(original: ji.Model, packed: ji.Model) -> list[jax.Array]:
    """After the prompt by the original weights, and after one token more by the codes, over the same cache."""
    cache = kv_cache.create(original.config, 5, 16, jnp.float32)
    table, tokens = jnp.array([[1, 2, 3, 4]], jnp.int32), np.zeros((1, 64), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    length, start = jnp.array([len(PROMPT)], jnp.int32), jnp.zeros(1, jnp.int32)
    options = {"config": original.config}
    first, cache = steps.prefill(original.params, cache, tokens, length, start, table, **options)
    best = jnp.argmax(first, axis=1).astype(jnp.int32)
    second, _ = steps.decode(packed.params, cache, best, length, table, **options)
    return [first[0], second[0]]


def test_prompts_by_the_copy_and_decoding_by_the_codes(caplog: pytest.LogCaptureFixture) -> None:
    original = ji.load(FOLDER, dtype="float32")
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        both = ji.load(FOLDER, quantize="int4", prefill_dtype="float32")
    layer, copy = both.params.layers[0], both.prompt_params.layers[0]
    assert [not isinstance(field, jax.Array) for field in (layer.qkv, copy.qkv)] == [True, False]
    assert copy.attn_norm is layer.attn_norm and both.prompt_params.embed_tokens is both.params.embed_tokens
    weights = jax.tree.leaves((copy.qkv, copy.o, copy.gate_up, copy.down))
    linear = sum(leaf.nbytes for leaf in weights) * len(both.params.layers)
    assert f"keeps a second copy of the packed weights, {shown_bytes(linear)}\n" in caplog.text
    params = ji.SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, ignore_eos=True)
    wanted = [jax.nn.log_softmax(logits[: both.config.num_tokens]) for logits in expected_logits(original, both)]
    tables = ji.generate(both, PROMPT, params)[0].completions[0].logprobs
    assert tables is not None
    for table, logprobs in zip(tables, wanted, strict=True):
        for token, found in table.items():
            assert found.logprob == pytest.approx(float(logprobs[token]), abs=2e-5)


def test_an_engine_computes_prompts_by_the_copy_and_output_by_the_codes() -> None:
    """With preemptions, and with a prompt that begins with another's prompt and answer: the tokens of `generate`."""
    both = ji.load(FOLDER, dtype="float32", quantize="int4", prefill_dtype="float32")
    params = cases.params(max_tokens=30)
    prompts = [cases.prompt(length, row) for row, length in enumerate((9, 14, 21, 30))]
    answers = [output.completions[0].token_ids for output in ji.generate(both, prompts, params)]
    longer, few = [prompts[0] + list(answers[0])], cases.params(max_tokens=9)
    with cases.engine(both, sampling=(params,), prefill_rows=(1,)) as engine:
        assert engine.settings.rereads
        engine.warmup(progress=False)
        (cold,) = engine.generate(longer, few)
        for _ in range(2):
            assert [output.completions[0].token_ids for output in engine.generate(prompts, params)] == answers
            assert engine.generate(longer, few)[0].completions[0].token_ids == cold.completions[0].token_ids
        metrics = engine.metrics()
        assert metrics.preemptions > 0 and metrics.prefix_hit_rate > 0
        assert metrics.compilations_after_warmup == 0


def test_a_packed_head_of_a_tied_model_is_the_embedding_again_and_random_weights_too() -> None:
    model = ji.load(
        families.BY_NAME["gemma2"].folder, quantize="int4-int8-head", prefill_dtype="float32", random_weights=0
    )
    assert isinstance(model.params.lm_head, ScaledCodes) and model.prompt_params.lm_head is None
    planned = ji.memory_plan(
        families.BY_NAME["gemma2"].folder,
        quantize=PRESETS["int4-int8-head"],
        prefill_dtype="float32",
        random_weights=True,
    )
    leaves = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves((model.params, model.prefill_params))}
    assert planned.total_weights == sum(leaves.values())
    assert planned.weights["float32, a copy for prompts"] > 0


def test_what_makes_no_sense_is_refused_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="prefill_dtype='bfloat16' and dtype='float32': they have to agree"):
        ji.load(FOLDER, dtype="float32", quantize="int4", prefill_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"^prefill_dtype='int8': weights can be float32"):
        ji.load(FOLDER, quantize="int4", prefill_dtype="int8")
    assert ji.load(FOLDER, prefill_dtype="float32").prefill_params is None
    assert "no weight is packed: prefill_dtype=float32 is the dtype of all, and no copy is kept" in caplog.text
    packed = ji.load(FOLDER, quantize="int4")
    monkeypatch.setattr("jaxinfer.checkpoint_weights.free_device_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"second copy for prefill_dtype=float32 takes .* leave prefill_dtype out"):
        prefill_copy.announce(packed.params, packed.config, jnp.dtype(jnp.float32), "tiny")
