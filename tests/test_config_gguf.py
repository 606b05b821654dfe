"""ModelConfig from the GGUF metadata of real models, as llama.cpp's converters write it."""

import math
from typing import Any

import numpy as np
import pytest
from gguf_models import GGUFModel, gguf_model

from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.layers.rope import inverse_frequencies


def llama_3_2_1b(**changes: Any) -> GGUFModel:
    """Llama-3.2-1B-Instruct, with `rope_freqs.weight` as its converter computes it."""
    settings: dict[str, Any] = {
        "layers": 16,
        "hidden": 2048,
        "ff": 8192,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "context": 131072,
        "vocab": 128256,
        "tokens": {128001: "<|end_of_text|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>"},
        "rope_tensors": {"rope_freqs.weight": llama3_divisors()},
        "rope__freq_base": 500000.0,
        "rope__dimension_count": 64,
        "vocab_size": 128256,
        "tokenizer__ggml__bos_token_id": 128000,
        "tokenizer__ggml__eos_token_id": 128009,
    }
    return gguf_model("llama", **(settings | changes))


def llama3_divisors() -> np.ndarray:
    """Llama 3.2's scaling (factor 32, low 1, high 4, original context 8192) as one divisor for each
    frequency."""
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(32) / 32)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)


def test_llama_3_2_1b() -> None:
    config = llama_3_2_1b().config()
    divisors = config.layers[0].rope.frequency_divisors if config.layers[0].rope else ()
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=128256,
        num_tokens=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layers=(LayerConfig(RopeConfig("default", 500000.0, 64, frequency_divisors=divisors)),) * 16,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        attention_scale=0.125,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128009, 128001, 128008),
    )
    # traps.md J1: pairs 0-14 unchanged, 15-17 blended, 18-31 divided by 32.
    assert divisors[:15] == (1.0,) * 15
    assert all(1 < divisor < 32 for divisor in divisors[15:18])
    assert divisors[18:] == (32.0,) * 14


def test_stored_divisors_are_llama3_scaling() -> None:
    rope = llama_3_2_1b().config().layers[0].rope
    assert rope is not None
    by_parameters = RopeConfig(
        "llama3",
        theta=500000.0,
        rotary_dim=64,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    np.testing.assert_allclose(inverse_frequencies(rope, 131072), inverse_frequencies(by_parameters, 131072), rtol=1e-6)


def test_mistral_nemo_head_dim() -> None:
    """Mistral-Nemo: 32 heads of 128 on a hidden size of 5120, its own head."""
    file = gguf_model(
        "llama",
        layers=40,
        hidden=5120,
        ff=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        context=1024000,
        vocab=131072,
        output=True,
        rope__freq_base=1e6,
        rope__dimension_count=128,
    )
    config = file.config()
    assert (config.head_dim, config.attention_scale) == (128, 128**-0.5)
    assert not config.tie_word_embeddings
    assert config.layers == (LayerConfig(RopeConfig("default", 1e6, 128)),) * 40
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
    ],
    ids=["type and factor", "factor", "old key"],
)
def test_deepseek_coder_linear_scaling(keys: dict[str, Any]) -> None:
    file = gguf_model(
        "llama",
        layers=2,
        hidden=2048,
        ff=5504,
        heads=16,
        kv_heads=16,
        context=16384,
        vocab=32256,
        num_tokens=32022,
        tokens={32014: "<|end▁of▁sentence|>", 32021: "<|EOT|>"},
        output=True,
        rope__freq_base=100000.0,
        tokenizer__ggml__eos_token_id=32021,
        **keys,
    )
    config = file.config()
    assert config.layers[0].rope == RopeConfig("linear", 100000.0, 128, factor=4.0)
    assert (config.vocab_size, config.num_tokens, config.eos_token_ids) == (32256, 32022, (32021,))


def qwen2_5_0_5b(**changes: Any) -> GGUFModel:
    settings: dict[str, Any] = {
        "layers": 24,
        "hidden": 896,
        "ff": 4864,
        "heads": 14,
        "kv_heads": 2,
        "context": 32768,
        "vocab": 151936,
        "eps": 1e-6,
        "bias": True,
        "num_tokens": 151665,
        "tokens": {151643: "<|endoftext|>", 151645: "<|im_end|>"},
        "rope__freq_base": 1e6,
        "tokenizer__ggml__bos_token_id": 151643,
        "tokenizer__ggml__eos_token_id": 151645,
        "tokenizer__ggml__padding_token_id": 151643,
    }
    return gguf_model("qwen2", **(settings | changes))


def test_qwen2_5_0_5b() -> None:
    config = qwen2_5_0_5b().config()
    assert config.model_type == "qwen2"
    assert config.head_dim == 64
    assert config.qkv_bias
    assert not config.output_bias
    assert not config.mlp_bias
    assert config.norm_eps == 1e-6
    assert (config.vocab_size, config.num_tokens) == (151936, 151665)
    assert config.eos_token_ids == (151645, 151643)
    assert config.tie_word_embeddings
    assert config.layers == (LayerConfig(RopeConfig("default", 1e6, 64)),) * 24


def test_qwen2_5_with_yarn() -> None:
    keys = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32768,
    }
    rope = qwen2_5_0_5b(**keys).config().layers[0].rope
    assert rope == RopeConfig(
        "yarn",
        1e6,
        64,
        factor=4.0,
        attention_factor=0.1 * math.log(4) + 1,
        original_max_position_embeddings=32768,
    )
    more = {
        "rope__scaling__yarn_attn_factor": 1.25,
        "rope__scaling__yarn_beta_fast": 16.0,
        "rope__scaling__yarn_beta_slow": 2.0,
    }
    rope = qwen2_5_0_5b(**keys, **more).config().layers[0].rope
    assert rope is not None
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow) == (1.25, 16.0, 2.0)
    # mscale_all_dim 1: the two magnitude corrections cancel.
    rope = qwen2_5_0_5b(**keys, rope__scaling__yarn_log_multiplier=1.0).config().layers[0].rope
    assert rope is not None
    assert rope.attention_factor == 1.0


def test_qwen3_0_6b() -> None:
    file = gguf_model(
        "qwen3",
        layers=28,
        hidden=1024,
        ff=3072,
        heads=16,
        kv_heads=8,
        head_dim=128,
        context=40960,
        vocab=151936,
        eps=1e-6,
        rope__freq_base=1e6,
    )
    config = file.config()
    assert config.qk_norm == "head"
    assert not config.qkv_bias
    assert (config.head_dim, config.attention_scale) == (128, 128**-0.5)
    assert config.layers[0].rope == RopeConfig("default", 1e6, 128)


def gemma2(**changes: Any) -> GGUFModel:
    """gemma-2-2b-it."""
    settings: dict[str, Any] = {
        "layers": 26,
        "hidden": 2304,
        "ff": 9216,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 256,
        "context": 8192,
        "vocab": 256000,
        "eps": 1e-6,
        "tokens": {1: "<eos>", 2: "<bos>", 107: "<end_of_turn>"},
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention__sliding_window": 4096,
        "tokenizer__ggml__bos_token_id": 2,
        "tokenizer__ggml__eos_token_id": 1,
    }
    return gguf_model("gemma2", **(settings | changes))


def test_gemma_2_2b() -> None:
    config = gemma2().config()
    rope = RopeConfig("default", 10000.0, 256)
    assert config.layers == (LayerConfig(rope, 4096), LayerConfig(rope)) * 13
    assert config.norm_offset == 0.0  # the file's norm weights are 1 + w already
    assert config.pre_norms
    assert config.post_norms
    assert config.activation == "gelu_tanh"
    assert (config.embedding_multiplier, config.embedding_multiplier_rounded) == (48.0, True)
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert config.attention_scale == 256**-0.5
    assert config.eos_token_ids == (1, 107)
    assert config.tie_word_embeddings


def test_gemma_2_27b_scales_by_its_width() -> None:
    config = gemma2(layers=46, hidden=4608, ff=36864, heads=32, kv_heads=16, head_dim=128).config()
    assert config.attention_scale == 144**-0.5


def test_early_gemma_2_files_lack_the_keys_of_its_defaults() -> None:
    file = gemma2()
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del file.metadata[f"gemma2.{key}"]
    assert file.config() == gemma2().config()


def gemma3(**changes: Any) -> GGUFModel:
    """gemma-3-1b-it."""
    settings: dict[str, Any] = {
        "layers": 26,
        "hidden": 1152,
        "ff": 6912,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 256,
        "context": 32768,
        "vocab": 262144,
        "eps": 1e-6,
        "tokens": {1: "<eos>", 106: "<end_of_turn>"},
        "rope__freq_base": 1e6,
        "attention__sliding_window": 512,
        "tokenizer__ggml__eos_token_id": 106,
    }
    return gguf_model("gemma3", **(settings | changes))


def test_gemma_3_1b() -> None:
    config = gemma3().config()
    local = LayerConfig(RopeConfig("default", 10000.0, 256), 512)
    full = LayerConfig(RopeConfig("default", 1e6, 256))
    assert config.layers == (*((local,) * 5 + (full,)) * 4, local, local)
    assert config.qk_norm == "head"
    assert config.post_norms
    assert (config.attention_softcap, config.logits_softcap) == (None, None)
    assert config.norm_offset == 0.0
    assert config.attention_scale == 1 / 16
    assert config.embedding_multiplier == 1152**0.5
    assert config.eos_token_ids == (106,)


def test_gemma_3_4b_scales_only_full_layers() -> None:
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 20000.0}
    file = gemma3(layers=34, hidden=2560, ff=10240, heads=8, kv_heads=4, context=131072, **scaling)
    config = file.config()
    assert config.layers[4].rope == RopeConfig("default", 20000.0, 256)
    assert config.layers[5].rope == RopeConfig("linear", 1e6, 256, factor=8.0)
    wide = gemma3(layers=62, hidden=5376, ff=21504, heads=32, kv_heads=16, head_dim=128).config()
    assert wide.attention_scale == 168**-0.5


def phi3(**changes: Any) -> GGUFModel:
    """Phi-3-mini-4k-instruct."""
    settings: dict[str, Any] = {
        "layers": 32,
        "hidden": 3072,
        "ff": 8192,
        "heads": 32,
        "kv_heads": 32,
        "context": 4096,
        "vocab": 32064,
        "num_tokens": 32011,
        "tokens": {2: "</s>", 32000: "<|endoftext|>", 32007: "<|end|>"},
        "output": True,
        "rope__dimension_count": 96,
        "rope__freq_base": 10000.0,
        "rope__scaling__original_context_length": 4096,
        "attention__sliding_window": 2047,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 32000,
    }
    return gguf_model("phi3", **(settings | changes))


def test_phi_3_mini_4k() -> None:
    config = phi3().config()
    assert config.layers == (LayerConfig(RopeConfig("default", 10000.0, 96), 2047),) * 32
    assert config.head_dim == 96
    assert (config.vocab_size, config.num_tokens) == (32064, 32011)
    assert config.eos_token_ids == (32000, 32007)
    assert not config.tie_word_embeddings


def longrope_factors() -> dict[str, np.ndarray]:
    return {
        "rope_factors_short.weight": np.linspace(1, 1.25, 48, dtype=np.float32),
        "rope_factors_long.weight": np.linspace(1, 64, 48, dtype=np.float32),
    }


def test_phi_3_mini_128k() -> None:
    attention_factor = math.sqrt(1 + math.log(32) / math.log(4096))
    long = {"context": 131072, "attention__sliding_window": 262144, "rope_tensors": longrope_factors()}
    rope = phi3(**long, rope__scaling__attn_factor=attention_factor).config().layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("longrope", 32.0, 4096)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-6)
    assert rope.short_factor == tuple(longrope_factors()["rope_factors_short.weight"].tolist())
    assert rope.long_factor == tuple(longrope_factors()["rope_factors_long.weight"].tolist())
    without_key = phi3(**long).config().layers[0].rope
    assert without_key is not None
    assert without_key.attention_factor == attention_factor


def test_phi_4_has_no_window() -> None:
    """Its converter writes a window of 0."""
    assert {layer.window for layer in phi3(attention__sliding_window=0).config().layers} == {None}


def test_smollm3_3b() -> None:
    file = gguf_model(
        "smollm3",
        layers=36,
        hidden=2048,
        ff=11008,
        heads=16,
        kv_heads=4,
        context=65536,
        vocab=128256,
        eps=1e-6,
        rope__freq_base=5e6,
        rope__dimension_count=128,
    )
    rope = LayerConfig(RopeConfig("default", 5e6, 128))
    assert file.config().layers == (rope, rope, rope, LayerConfig(None)) * 9


def olmo2(**changes: Any) -> GGUFModel:
    """OLMo-2-0425-1B-Instruct."""
    settings: dict[str, Any] = {
        "layers": 16,
        "hidden": 2048,
        "ff": 8192,
        "heads": 16,
        "kv_heads": 16,
        "context": 4096,
        "vocab": 100352,
        "eps": 1e-6,
        "output": True,
        "rope__freq_base": 500000.0,
    }
    return gguf_model("olmo2", **(settings | changes))


def test_olmo_2_1b() -> None:
    config = olmo2().config()
    assert not config.pre_norms
    assert config.post_norms
    assert config.qk_norm == "full"
    assert config.layers == (LayerConfig(RopeConfig("default", 500000.0, 128)),) * 16


def test_olmo_3_keeps_plain_rope_where_it_slides() -> None:
    """OLMo-3 has the same architecture name; llama.cpp scales only its full layers."""
    config = olmo2(
        attention__sliding_window=4096,
        attention__sliding_window_pattern=([True] * 3 + [False]) * 4,
        rope__scaling__type="yarn",
        rope__scaling__factor=8.0,
        rope__scaling__original_context_length=8192,
        rope__scaling__yarn_attn_factor=1.2079441541679836,
    ).config()
    assert config.layers[2] == LayerConfig(RopeConfig("default", 500000.0, 128), 4096)
    assert config.layers[3].window is None
    rope = config.layers[3].rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("yarn", 8.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(8) + 1, rel=1e-6)


def granite(**changes: Any) -> GGUFModel:
    """granite-3.1-2b-instruct."""
    settings: dict[str, Any] = {
        "layers": 40,
        "hidden": 2048,
        "ff": 8192,
        "heads": 32,
        "kv_heads": 8,
        "context": 131072,
        "vocab": 49155,
        "rope__freq_base": 5e6,
        "rope__dimension_count": 64,
        "attention__scale": 0.015625,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 8.0,
    }
    return gguf_model("granite", **(settings | changes))


def test_granite_3_1_2b() -> None:
    config = granite().config()
    assert config.attention_scale == 1 / 64
    assert config.embedding_multiplier == 12.0
    assert not config.embedding_multiplier_rounded
    assert config.residual_multiplier == 0.22
    assert config.logits_divisor == 8.0
    assert config.layers == (LayerConfig(RopeConfig("default", 5e6, 64)),) * 40


def test_granite_without_positions() -> None:
    assert granite(rope__scaling__finetuned=False).config().layers == (LayerConfig(None),) * 40
    assert granite(rope__scaling__finetuned=True).config() == granite().config()


def test_glm_4_9b() -> None:
    """GLM-4-9B-0414: half of each head rotates, in neighbouring pairs; biases on q, k and v."""
    file = gguf_model(
        "glm4",
        layers=40,
        hidden=4096,
        ff=13696,
        heads=32,
        kv_heads=2,
        context=32768,
        vocab=151552,
        output=True,
        bias=True,
        tokens={151329: "<|endoftext|>", 151336: "<|user|>"},
        rope__freq_base=10000.0,
        rope__dimension_count=64,
        tokenizer__ggml__eos_token_id=151329,
        tokenizer__ggml__eot_token_id=151336,
    )
    config = file.config()
    assert config.layers == (LayerConfig(RopeConfig("default", 10000.0, 64, interleaved=True)),) * 40
    assert config.pre_norms
    assert config.post_norms
    assert config.qkv_bias
    assert config.eos_token_ids == (151329, 151336)


def test_mistral3() -> None:
    """The architecture of Mistral Small 3; Ministral 3 scales its queries by position, which is refused."""
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 256,
        "ff": 512,
        "heads": 4,
        "kv_heads": 2,
        "context": 4096,
        "vocab": 100,
    }
    config = gguf_model("mistral3", **sizes, head_dim=128, rope__freq_base=1e9, output=True).config()
    assert config.layers == (LayerConfig(RopeConfig("default", 1e9, 128)),) * 2
    with pytest.raises(ValueError, match=r"mistral3\.attention\.temperature_scale is 0\.1.* not supported"):
        gguf_model("mistral3", **sizes, attention__temperature_scale=0.1).config()


def mistral_7b(**keys: Any) -> GGUFModel:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 4096, "ff": 14336, "heads": 32, "kv_heads": 8}
    return gguf_model("llama", **sizes, context=32768, vocab=32000, output=True, **keys)


def test_llama_windows() -> None:
    """Mistral 7B v0.1: where a file names a window, every layer slides."""
    assert {layer.window for layer in mistral_7b(attention__sliding_window=128).config().layers} == {128}
    alternating = mistral_7b(attention__sliding_window=128, attention__sliding_window_pattern=2).config()
    assert [layer.window for layer in alternating.layers] == [128, None]
