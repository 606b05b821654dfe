"""GGUF metadata that is missing, malformed or asks for what is not supported: one line that names the key."""

import math
from typing import Any

import numpy as np
import pytest
from gguf_models import GGUFModel, gguf_model

from checkpoints.names_gguf import ARCHITECTURES
from jaxinfer.config_gguf import from_gguf


def test_every_architecture_has_names_and_a_configuration() -> None:
    with pytest.raises(ValueError, match=f"supported are {', '.join(ARCHITECTURES)}$"):
        from_gguf({"general.architecture": "mamba"}, {}, lambda name: np.zeros(1))


def tiny(**changes: Any) -> GGUFModel:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "ff": 96,
        "heads": 4,
        "kv_heads": 2,
        "context": 512,
        "vocab": 20,
    }
    return gguf_model("llama", **(sizes | changes))


def tiny_granite() -> GGUFModel:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 64, "ff": 96, "heads": 4, "kv_heads": 2}
    return gguf_model("granite", **sizes, context=512, vocab=20, logit_scale=8.0)


def without(file: GGUFModel, key: str) -> GGUFModel:
    del file.metadata[key]
    return file


BAD = {
    "no architecture": (lambda: without(tiny(), "general.architecture"), "GGUF architecture None is not supported"),
    "no layers": (lambda: without(tiny(), "llama.block_count"), r"llama\.block_count is missing from the GGUF"),
    "fewer layers": (lambda: tiny(block_count=1), "block_count is 1 but the GGUF file has tensors of 2 blocks"),
    "many layers": (lambda: tiny(block_count=2**31 - 1), "block_count is 2147483647 but"),
    "too many layers": (lambda: tiny(block_count=2**32 - 1), "is 4294967295 in the GGUF metadata; expected an int"),
    "no context": (lambda: without(tiny(), "llama.context_length"), r"llama\.context_length is missing"),
    "no eps": (lambda: without(tiny(), "llama.attention.layer_norm_rms_epsilon"), "rms_epsilon is missing"),
    "eps": (lambda: tiny(attention__layer_norm_rms_epsilon=math.nan), "rms_epsilon is nan in the GGUF metadata"),
    "theta": (lambda: tiny(rope__freq_base="big"), r"llama\.rope\.freq_base is 'big'.*; expected a number >= 0"),
    "large theta": (lambda: tiny(rope__freq_base=math.inf), r"llama\.rope\.freq_base is inf"),
    "heads": (lambda: tiny(attention__head_count=True), "head_count is True in the GGUF metadata; expected an int"),
    "kv heads": (lambda: tiny(attention__head_count_kv=3), "head_count 4 is not a multiple of head_count_kv 3"),
    "layer heads": (lambda: tiny(attention__head_count_kv=[2, 1]), "head_count_kv differs from layer to layer"),
    "value length": (
        lambda: tiny(attention__key_length=16, attention__value_length=8),
        r"llama\.attention\.value_length 8 differs from key_length 16",
    ),
    "embedding": (lambda: tiny(embedding_length=32), r"token_embd.weight .* has shape \(20, 64\); expected .*32"),
    "tokens": (
        lambda: tiny(tokenizer__ggml__tokens=1, vocab=20),
        r"tokenizer\.ggml\.tokens and \.token_type .* must be arrays of one length",
    ),
    "eos": (lambda: tiny(tokenizer__ggml__eos_token_id=20), "eos_token_id is 20; expected an id below 20"),
    "bos": (lambda: tiny(tokenizer__ggml__bos_token_id=-1), "bos_token_id is -1; expected an id below 20"),
    "experts": (lambda: tiny(expert_count=8), r"llama\.expert_count is 8 .* not supported"),
    "not causal": (lambda: tiny(attention__causal=False), r"llama\.attention\.causal is False .* not supported"),
    "vision": (lambda: tiny(rope__dimension_sections=[8, 4, 4, 0]), "multimodal RoPE is not supported"),
    "vision number": (lambda: tiny(rope__dimension_sections=3), "multimodal RoPE is not supported"),
    "odd rotation": (lambda: tiny(rope__dimension_count=15), "dimension_count is 15; expected an even number <= 16"),
    "wide rotation": (lambda: tiny(rope__dimension_count=32), "dimension_count is 32; expected an even number <= 16"),
    "scaling": (
        lambda: tiny(rope__scaling__type="ntk"),
        r"rope\.scaling\.type is 'ntk' .*; supported are none, linear, yarn, longrope",
    ),
    "yarn": (lambda: tiny(rope__scaling__type="yarn"), r"rope\.scaling\.factor is 0\.0 .*; yarn needs one >= 1"),
    "yarn context": (
        lambda: tiny(rope__scaling__type="yarn", rope__scaling__factor=2.0),
        r"original_context_length is missing",
    ),
    "longrope": (lambda: tiny(rope__scaling__type="longrope"), r"longrope needs rope_factors_short\.weight and"),
    "divisor count": (
        lambda: tiny(rope_tensors={"rope_freqs.weight": np.ones(4, np.float32)}),
        r"rope_freqs\.weight has shape \(4,\) in the GGUF file; expected \(8,\)",
    ),
    "divisors": (
        lambda: tiny(rope_tensors={"rope_freqs.weight": np.zeros(8, np.float32)}),
        r"rope_freqs\.weight in the GGUF file must hold finite numbers > 0",
    ),
    "pattern": (
        lambda: tiny(attention__sliding_window=8, attention__sliding_window_pattern=[True]),
        "sliding_window_pattern .* must be a period >= 0 or an array for 2 layers",
    ),
    "granite scale": (lambda: without(tiny_granite(), "granite.logit_scale"), r"granite\.logit_scale is missing"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_metadata_is_refused(case: str) -> None:
    make, message = BAD[case]
    file = make()
    if case == "tokens":
        file.metadata["tokenizer.ggml.tokens"] = 1
    with pytest.raises(ValueError, match=message) as caught:
        file.config()
    assert "\n" not in str(caught.value)


def test_more_tokens_than_rows() -> None:
    file = tiny()
    file.metadata["tokenizer.ggml.tokens"] += ["more"]
    file.metadata["tokenizer.ggml.token_type"] += [1]
    with pytest.raises(ValueError, match=r"the GGUF tokenizer has 21 tokens, token_embd\.weight only 20 rows"):
        file.config()


def test_a_file_without_a_tokenizer() -> None:
    file = without(without(tiny(), "tokenizer.ggml.tokens"), "tokenizer.ggml.token_type")
    config = file.config()
    assert (config.num_tokens, config.bos_token_id, config.eos_token_ids) == (20, None, ())


def test_values_repeated_for_each_layer() -> None:
    assert tiny(attention__head_count_kv=[2, 2], feed_forward_length=[96, 96]).config() == tiny().config()
