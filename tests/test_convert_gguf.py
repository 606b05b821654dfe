"""GGUF files as folders for other engines: config.json, tokenizer and weights say what the file says."""

import dataclasses
import json
import pathlib
from typing import Any

import families
import gguf_conversion
import gguf_files
import gguf_models
import jax
import numpy as np
import pytest
import test_config_gguf
import test_tokenizer_sentencepiece as sentencepiece
import tokenizer_training

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.config_export import to_hugging_face
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.model import load
from jaxinfer.quantization.plan import Plan, Precision, uniform
from jaxinfer.store.create import create
from jaxinfer.store.export import export
from jaxinfer.tokenization import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from jaxinfer.tokenization.export import hugging_face_files

RELEASED = sorted((pathlib.Path(__file__).parent / "fixtures" / "configs").glob("*.json"))
NO_FORM = {
    "llama_rope_dynamic": "dynamic RoPE does not occur in GGUF files",
    "llama_rope_dynamic_below": "dynamic RoPE does not occur in GGUF files",
    "qwen2_sliding": r"a config\.json of qwen2 has no form for layers",
}


def read_back(config: ModelConfig) -> ModelConfig:
    return from_hugging_face(to_hugging_face(config), num_tokens=config.num_tokens)


def same(first: Any, second: Any) -> bool:
    """Whether two pytrees are equal to the bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    equal = all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return equal and jax.tree.structure(first) == jax.tree.structure(second)


# --- Configurations


@pytest.mark.parametrize("path", [*RELEASED, *(case.folder / "config.json" for case in families.CASES)], ids=str)
def test_a_configuration_is_read_back_as_it_was(path: pathlib.Path) -> None:
    config = from_hugging_face(json.loads(path.read_text()))
    message = NO_FORM.get(path.parent.name)
    if message is None:
        assert read_back(config) == config
    else:
        with pytest.raises(ValueError, match=message):
            to_hugging_face(config)


def test_llama_3s_scaling_is_found_again() -> None:
    """GGUF has it as one divisor for each frequency."""
    written = to_hugging_face(test_config_gguf.llama_3_2_1b().config())
    assert written["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    bent = test_config_gguf.llama3_divisors()
    bent[16] *= 1.01
    for divisors, message in ((bent, "llama has no form for layers"), (np.linspace(1, 9, 32), "expected Llama 3's")):
        other = test_config_gguf.llama_3_2_1b(rope_tensors={"rope_freqs.weight": divisors.astype(np.float32)})
        with pytest.raises(ValueError, match=message):
            to_hugging_face(other.config())


@pytest.mark.parametrize("model", ["qwen2_5_0_5b", "gemma2", "gemma3", "phi3", "olmo2", "granite"])
def test_released_models_as_their_gguf_files_describe_them(model: str) -> None:
    """Everything but Gemma's norms, which GGUF has with their offset."""
    config = getattr(test_config_gguf, model)().config()
    config = dataclasses.replace(config, eos_token_ids=tuple(sorted(config.eos_token_ids)) or (2,))
    expected = dataclasses.replace(config, norm_offset=1.0 if model.startswith("gemma") else 0.0)
    assert read_back(config) == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"qkv_bias": True}, "llama has no form for output_bias False"),
        ("llama", {"attention_scale": 0.5}, "llama has no form for attention_scale 0.5"),
        ("llama", {"logits_divisor": 2.0}, "llama has no form for logits_divisor 2.0"),
        ("qwen2", {"qkv_bias": False}, "qwen2 has no form for qkv_bias False"),
        ("granite", {"layers": (LayerConfig(None),) * 2}, r"without any positions \(NoPE\)"),
        ("llama", {"eos_token_ids": ()}, r"llama has no form for eos_token_ids \(\)"),
    ],
)
def test_what_a_family_has_no_form_for_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    config = from_hugging_face(families.BY_NAME[family].config)
    with pytest.raises(ValueError, match=message):
        to_hugging_face(dataclasses.replace(config, **changes))


# --- Weights


@pytest.mark.parametrize(
    "name", ["llama_rope_llama3", "mistral_sliding", "gemma3_text", "phi3_longrope", "qwen3_rope_yarn", "smollm3"]
)
def test_decoded_it_is_the_folder_it_came_from(name: str, tmp_path: pathlib.Path) -> None:
    """Rows of q and k in Hugging Face's order, Gemma's norms without their offset; by way of a store too."""
    case = families.BY_NAME[name]
    source = gguf_conversion.convert(case, tmp_path / "m.gguf")
    expected = load(case.folder, dtype="float32", progress=False)
    store = create(source, tmp_path / "store", dtype="float32")
    for way, origin in {"direct": source, "by store": store}.items():
        out = load(export(origin, tmp_path / way, dtype="float32", progress=False), dtype="float32", progress=False)
        assert same(out.params, expected.params)
        assert out.config.norm_offset == expected.config.norm_offset
    assert not (tmp_path / "by store" / "gguf.json").exists()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_codes_of_a_gguf_file_are_kept(kind: str, tmp_path: pathlib.Path) -> None:
    """Those that compressed-tensors has a form for, q and k in the model's order."""
    model = gguf_models.gguf_model(
        "llama", layers=1, hidden=64, ff=64, heads=4, kv_heads=2, context=64, vocab=64, output=True,
        tokenizer__ggml__eos_token_id=3,
    )  # fmt: skip
    source = gguf_models.write_packed(tmp_path / "m.gguf", model, kind)
    out = export(source, tmp_path / "out", format="compressed-tensors", progress=False)
    packed, expected = (load(path, dtype="bfloat16", packed=True, progress=False).params for path in (out, source))
    assert same(packed.layers, expected.layers)


@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_what_we_quantised_of_a_gguf_file(format: Any, tmp_path: pathlib.Path) -> None:
    source = gguf_conversion.convert(families.BY_NAME["llama"], tmp_path / "m.gguf")
    plan: Plan = uniform("int4", Precision(4, 16))
    store = create(source, tmp_path / "store", plan=plan)
    out = export(store, tmp_path / "out", format=format, progress=False)
    packed, expected = (load(path, dtype="bfloat16", packed=True, progress=False).params for path in (out, store))
    assert same(packed, expected)


# --- Tokenizers

CHAT = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
TEXTS = (
    "", " ", "The quick  brown\tfox", "def add(a, b):\n    return a + b  # 12345\r\n", "Größe Tiếng Việt e\u0301 ½",
    "敏捷的狐狸 한국어 👍🏽\u200b\u3000…",
    "<|im_start|>user\n Hi <|im_end|> <tool> x", "</s>the</s></s> <s>\n the <unk>",
    "▁ Ġ \x00 <|user|>\n\n the<|end|> <|user|> x",
)  # fmt: skip


def llama_sentencepiece() -> dict[str, Any]:
    """Llama 2's kind, with a token of fine-tuning and one of Phi-3's control tokens."""
    model = sentencepiece.model("llama")
    return sentencepiece.metadata(
        "llama",
        tokens=[*model.pieces, "<|user|>", "<|end|>"],
        token_type=[*(1 if kind == 4 else kind for kind in model.types), 4, 3],
        scores=[*model.scores, -1000.0, -1000.0],
    )


TOKENIZERS = {
    **{name: tokenizer_training.gguf_metadata(name) for name in ("smollm", "qwen2", "gpt-2")},
    "llama-bpe": tokenizer_training.gguf_metadata("llama-bpe", add_bos_token=True, eot_token_id=0),
    "gemma": sentencepiece.metadata("gemma"),
    "llama": llama_sentencepiece(),
    "phi3": llama_sentencepiece() | {"general.architecture": "phi3"},
}


def assert_alike(actual: Tokenizer | None, expected: Tokenizer) -> None:
    assert actual is not None
    for text in TEXTS:
        ids = expected.encode(text)
        assert actual.encode(text) == ids, text
        for skip in (False, True):
            assert actual.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "Größe?\n<tool>"}, {"role": "assistant", "content": " 1 <s>"}]
    for name in expected.chat_templates:
        ids = expected.apply_chat_template(messages, chat_template=name)
        assert actual.apply_chat_template(messages, chat_template=name) == ids
    names = ("bos_token_id", "num_tokens", "special_ids", "special_tokens", "chat_templates")
    assert all(getattr(actual, name) == getattr(expected, name) for name in names)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_read_back_as_it_was(name: str, tmp_path: pathlib.Path) -> None:
    templates = {"tokenizer.chat_template": CHAT} | ({"tokenizer.chat_template.rag": "rag"} if name == "gemma" else {})
    tokenizer = tokenizer_from_gguf(TOKENIZERS[name] | templates)
    assert tokenizer is not None
    for file, content in hugging_face_files(tokenizer, max_length=64).items():
        (tmp_path / file).write_bytes(content)
    assert_alike(tokenizer_from_folder(tmp_path), tokenizer)


def test_what_tokenizer_json_cannot_do_is_refused() -> None:
    """Pieces that a space must not follow, and SentencePiece's own normalisation."""
    for name in ("llama", "rules"):
        with pytest.raises(ValueError, match="normalises text as SentencePiece does"):
            hugging_face_files(sentencepiece.built(name), max_length=64)


def test_a_folder_has_the_tokenizer_and_every_id_that_ends_a_text(tmp_path: pathlib.Path) -> None:
    """The embedding's padding is no token there, by way of a store too."""
    described = tokenizer_training.gguf_metadata("smollm", eot_token_id=0, padding_token_id=2)
    real = len(described["tokenizer.ggml.tokens"])
    described["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(real, real + 3)]
    described["tokenizer.ggml.token_type"] += [5] * 3
    model = gguf_models.gguf_model("llama", layers=1, hidden=32, ff=32, heads=2, kv_heads=1, context=64, vocab=real + 3)
    tensors = {name: np.ones(info.shape, np.float32) for name, info in model.tensors.items()}
    source = gguf_files.write(
        tmp_path / "m.gguf", model.metadata | described | {"tokenizer.chat_template": CHAT}, tensors
    )
    expected = load(source, progress=False)
    assert expected.tokenizer is not None and expected.config.num_tokens == real
    for way, origin in {"direct": source, "by store": create(source, tmp_path / "store")}.items():
        out = export(origin, tmp_path / way, progress=False)
        actual = load(out, progress=False)
        assert actual.config == expected.config
        assert_alike(actual.tokenizer, expected.tokenizer)
        generation = json.loads((out / "generation_config.json").read_text())
        assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
        assert actual.tokenizer is not None and actual.tokenizer.eos_token_ids == expected.tokenizer.eos_token_ids
