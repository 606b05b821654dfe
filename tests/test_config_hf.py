"""config.json of public models, in both spellings, against the models transformers builds from them; and bad ones."""

import copy
import dataclasses
import json
import math
import pathlib
import pickle
from typing import Any

import pytest
from families import BY_NAME, CASES, FamilyCase
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import ModelConfig
from jaxinfer.config_hf import SUPPORTED, from_hugging_face
from jaxinfer.config_hf_defaults import DEFAULTS

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FACTS = json.loads((FIXTURES / "config_facts.json").read_text())
CLASS_DEFAULTS = json.loads((FIXTURES / "config_defaults.json").read_text())


def public(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((FIXTURES / "configs" / f"{name}.json").read_text()) | changes


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """Only the required keys."""
    return {
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    } | changes


def num_parameters(config: ModelConfig) -> int:
    """Weights that a model of this shape has, counted from the configuration alone."""
    hidden, q = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size
    layer += (q + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    layer += (2 * config.intermediate_size + hidden) * config.mlp_bias
    layer += 2 * hidden * (config.pre_norms + config.post_norms)
    layer += {"none": 0, "head": 2 * config.head_dim, "full": q + kv}[config.qk_norm]
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return embeddings + hidden + config.num_layers * layer


def window(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def rope_of(config: ModelConfig, layer: int = 0) -> Any:
    rope = config.layers[layer].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("name", FACTS)
def test_public_models_are_what_transformers_builds(name: str) -> None:
    config, facts = from_hugging_face(public(name)), FACTS[name]
    assert num_parameters(config) == facts["num_parameters"]
    assert config.num_layers == facts["num_layers"]
    assert config.head_dim == facts["head_dim"]
    assert config.num_kv_heads == facts["num_kv_heads"]
    assert config.attention_scale == pytest.approx(facts["attention_scale"], rel=1e-12)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (
        facts["qkv_bias"],
        facts["output_bias"],
        facts["mlp_bias"],
    )
    assert config.norm_eps == facts["norm_eps"]
    assert config.tie_word_embeddings == facts["tie_word_embeddings"]
    reached = facts["window"] is not None and facts["window"] < config.max_position_embeddings
    expected = [None] * config.num_layers
    for layer in facts["sliding_layers"]:
        expected[layer] = facts["window"] if reached else None
    assert window(config) == expected
    assert [i for i, layer in enumerate(config.layers) if layer.rope is None] == facts["layers_without_rope"]
    assert hash(config) == hash(from_hugging_face(public(name)))


def test_known_values_of_public_models() -> None:
    llama = from_hugging_face(public("llama-3.2-1b"))
    assert (rope_of(llama).kind, rope_of(llama).factor, rope_of(llama).theta) == ("llama3", 32.0, 500000.0)
    assert llama.eos_token_ids == (128001, 128008, 128009)
    gemma2 = from_hugging_face(public("gemma-2-2b"))
    assert (gemma2.attention_softcap, gemma2.logits_softcap, gemma2.norm_offset) == (50.0, 30.0, 1.0)
    assert (gemma2.embedding_multiplier, gemma2.activation) == (48.0, "gelu_tanh")
    gemma3 = from_hugging_face(public("gemma-3-4b"))
    assert (gemma3.model_type, gemma3.vocab_size, gemma3.num_heads) == ("gemma3", 262208, 8)
    assert (rope_of(gemma3, 0).kind, rope_of(gemma3, 0).theta) == ("default", 10000.0)
    assert (rope_of(gemma3, 5).kind, rope_of(gemma3, 5).theta, rope_of(gemma3, 5).factor) == ("linear", 1e6, 8.0)
    assert (gemma3.attention_softcap, gemma3.logits_softcap, gemma3.eos_token_ids) == (None, None, (1, 106))
    granite = from_hugging_face(public("granite-3.1-2b"))
    assert (granite.embedding_multiplier, granite.residual_multiplier, granite.logits_divisor) == (12.0, 0.22, 8.0)
    glm = from_hugging_face(public("glm-4-9b-0414"))
    assert (rope_of(glm).rotary_dim, rope_of(glm).interleaved, glm.post_norms) == (64, True, True)
    olmo = from_hugging_face(public("olmo-2-7b"))
    assert (olmo.pre_norms, olmo.post_norms, olmo.qk_norm) == (False, True, "full")
    phi4 = from_hugging_face(public("phi-4-mini"))
    assert (rope_of(phi4).rotary_dim, len(rope_of(phi4).long_factor)) == (96, 48)
    assert rope_of(phi4).attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    deepseek = from_hugging_face(public("deepseek-coder-1.3b"))
    assert (rope_of(deepseek).kind, rope_of(deepseek).factor, rope_of(deepseek).theta) == ("linear", 4.0, 100000.0)


@pytest.mark.parametrize("family", CLASS_DEFAULTS)
def test_defaults_are_those_of_the_configuration_classes(family: str) -> None:
    expected = CLASS_DEFAULTS[family]
    assert {key: value for key, value in DEFAULTS[family].items() if key in expected} == {
        key: value for key, value in expected.items() if key in DEFAULTS[family]
    }
    required = set(expected) - set(DEFAULTS[family])
    assert required <= {"vocab_size", "num_attention_heads"}


@pytest.mark.parametrize("family", DEFAULTS)
def test_required_keys_alone_make_a_configuration(family: str) -> None:
    config = from_hugging_face(tiny(family))
    assert config.num_layers == 4
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers"):
        with pytest.raises(ValueError, match=f"config.json: {key} is missing"):
            from_hugging_face(without(tiny(family), key))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fixture_configurations(case: FamilyCase) -> None:
    config = from_hugging_face(case.config, num_tokens=case.num_tokens)
    assert config.num_tokens == case.num_tokens
    assert config.vocab_size == case.logits.shape[-1]
    assert config.eos_token_ids == (2,)
    assert config.max_position_embeddings >= case.tokens.shape[1]


def to_v5(config: dict[str, Any]) -> dict[str, Any]:
    """A version 4 configuration in the spelling of version 5, for families with one RoPE."""
    config = copy.deepcopy(config)
    parameters = config.pop("rope_scaling", None) or {"rope_type": "default"}
    parameters["rope_theta"] = config.pop("rope_theta")
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    if "partial_rotary_factor" in config:
        parameters["partial_rotary_factor"] = config["partial_rotary_factor"]
    return config | {"rope_parameters": parameters, "dtype": config.pop("torch_dtype")}


@pytest.mark.parametrize("name", [name for name in FACTS if not name.startswith("gemma-3")])
def test_both_spellings_mean_the_same(name: str) -> None:
    assert from_hugging_face(to_v5(public(name))) == from_hugging_face(public(name))


def test_gemma3_spellings_mean_the_same() -> None:
    old = public("gemma-3-1b")
    new = without(old, "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern") | {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
    }
    assert from_hugging_face(new) == from_hugging_face(old)
    assert from_hugging_face(BY_NAME["gemma3_text"].config) == from_hugging_face(BY_NAME["gemma3_multimodal"].config)


class TestRope:
    def test_rope_parameters_come_before_rope_scaling_and_both_before_the_top_level(self) -> None:
        config = tiny("llama", rope_theta=5.0, rope_scaling={"type": "linear", "factor": 2.0, "rope_theta": 2.0})
        assert rope_of(from_hugging_face(config)).theta == 2.0
        config["rope_parameters"] = {"rope_type": "linear", "factor": 3.0}
        rope = rope_of(from_hugging_face(config))
        assert (rope.factor, rope.theta) == (3.0, 5.0)

    @pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
    def test_old_names_of_longrope_in_phi3(self, name: str) -> None:
        config = public("phi-3-mini-128k")
        config["rope_scaling"]["type"] = name
        assert from_hugging_face(config) == from_hugging_face(public("phi-3-mini-128k"))
        assert rope_of(from_hugging_face(config)).original_max_position_embeddings == 4096

    def test_yarn_declares_the_context_it_stretches_to(self) -> None:
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        config = from_hugging_face(public("qwen2.5-7b", rope_scaling=yarn))
        assert config.max_position_embeddings == 131072
        assert rope_of(config).attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
        assert (rope_of(config).beta_fast, rope_of(config).beta_slow, rope_of(config).truncate) == (32, 1, True)

    def test_dynamic_grows_from_max_position_embeddings(self) -> None:
        dynamic = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 7}
        config = from_hugging_face(public("tinyllama-1.1b", rope_scaling=dynamic))
        assert rope_of(config).original_max_position_embeddings == 2048
        assert config.max_position_embeddings == 8192

    def test_one_rope_for_each_layer_type_in_other_families(self) -> None:
        config = tiny(
            "qwen3",
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            rope_parameters={
                "full_attention": {"rope_theta": 5e6},
                "sliding_attention": {"rope_theta": 1e4},
            },
        )
        layers = from_hugging_face(config).layers
        assert [(layer.window, layer.rope.theta if layer.rope else None) for layer in layers] == [
            (None, 5e6),
            (None, 5e6),
            (16, 1e4),
            (16, 1e4),
        ]

    @pytest.mark.parametrize(
        ("rope_scaling", "message"),
        [
            ({"rope_type": "mrope"}, r"rope_scaling: rope_type 'mrope' is not supported; supported are default, "),
            ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is not supported"),
            ({"type": "su"}, "short_factor is missing"),
            ({"type": "linear"}, "config.json: rope_scaling: factor is missing"),
            ({"type": "yarn"}, "rope_scaling: factor is missing"),
            ({"type": "linear", "factor": 0}, "rope_scaling: factor is 0; expected a positive number"),
            ({"type": "linear", "factor": "4"}, "factor is '4'; expected a positive number"),
            ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
            (
                {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
                "low_freq_factor 4.0 must be below high_freq_factor 4.0",
            ),
            ({"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8}, "short_factor has 3 entries"),
            ({"type": "longrope", "short_factor": ["a"] * 8, "long_factor": [1.0] * 8}, "8 positive numbers"),
            ({"full_attention": None}, "rope_scaling has no dictionary for full_attention"),
            ("linear", "rope_scaling 'linear' must be a dictionary"),
            ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 rotates 3 of 16"),
        ],
    )
    def test_errors(self, rope_scaling: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            from_hugging_face(tiny("llama", rope_scaling=rope_scaling))
        assert "\n" not in str(error.value)


class TestLayers:
    def test_mistral_window_is_4096_where_it_is_omitted_and_none_where_it_is_null(self) -> None:
        config = without(public("mistral-7b-v0.1"), "sliding_window")
        assert set(window(from_hugging_face(config))) == {4096}
        assert set(window(from_hugging_face(config | {"sliding_window": None}))) == {None}

    def test_qwen_windows_start_at_max_window_layers(self) -> None:
        config = tiny("qwen2", sliding_window=16, max_window_layers=1)
        assert window(from_hugging_face(config)) == [None] * 4
        assert window(from_hugging_face(config | {"use_sliding_window": True})) == [None, 16, 16, 16]

    def test_layer_types_decide_where_they_are_given(self) -> None:
        types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
        expected = [None, 32, None, 32]
        for family in ("gemma2", "gemma3_text", "mistral"):
            config = tiny(family, sliding_window=32, layer_types=types)
            assert window(from_hugging_face(config)) == expected

    def test_smollm3_layers_without_rope(self) -> None:
        config = tiny("smollm3")
        assert [layer.rope is None for layer in from_hugging_face(config).layers] == [False, False, False, True]
        config = tiny("smollm3", no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8)
        layers = from_hugging_face(config).layers
        assert [layer.rope is None for layer in layers] == [False, True, False, True]
        assert [layer.window for layer in layers] == [None, 8, None, 8]
        config = tiny("smollm3", no_rope_layers=[0, 1, 1, 1])
        assert [layer.rope is None for layer in from_hugging_face(config).layers] == [True, False, False, False]

    def test_a_window_that_no_context_reaches_is_dropped(self) -> None:
        config = tiny("mistral", max_position_embeddings=64)
        assert window(from_hugging_face(config | {"sliding_window": 63})) == [63] * 4
        assert window(from_hugging_face(config | {"sliding_window": 64})) == [None] * 4


class TestEndOfSequence:
    def test_union_of_every_source(self) -> None:
        config = from_hugging_face(public("qwen2.5-7b"), {"eos_token_id": [151645, 151643]}, extra_eos=[151644])
        assert config.eos_token_ids == (151643, 151644, 151645)

    def test_default_only_where_nothing_is_named(self) -> None:
        config = tiny("llama")
        assert from_hugging_face(config).eos_token_ids == (2,)
        assert from_hugging_face(config, {"eos_token_id": 7}).eos_token_ids == (7,)
        assert from_hugging_face(config, extra_eos=[5]).eos_token_ids == (5,)

    def test_ids_outside_the_vocabulary_are_left_out(self) -> None:
        assert from_hugging_face(tiny("llama", eos_token_id=[2, 96, 128001])).eos_token_ids == (2,)

    def test_wrong_type(self) -> None:
        with pytest.raises(ValueError, match=r"eos_token_id is '</s>'; expected an integer"):
            from_hugging_face(tiny("llama", eos_token_id="</s>"))


def test_padding_starts_at_the_size_of_the_tokenizer() -> None:
    assert from_hugging_face(public("qwen2.5-7b"), num_tokens=151665).num_tokens == 151665
    assert from_hugging_face(public("qwen2.5-7b")).num_tokens == 152064
    # Gemma 3's text-only tokenizer has one more id, for images, than the model has rows.
    assert from_hugging_face(public("gemma-3-1b"), num_tokens=262145).num_tokens == 262144


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "qwen2_moe", "num_experts": 60}, r"'qwen2_moe' is not supported \(mixture-of-experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"'mixtral' is not supported \(mixture-of-experts"),
        ({"model_type": "gpt_oss", "num_local_experts": 32}, "mixture-of-experts"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "is multimodal"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "rwkv"}, "'rwkv' is not supported; supported are gemma2, gemma3, gemma3_text, glm4, "),
        ({"model_type": "gemma3"}, "text_config is missing"),
        (tiny("llama", num_key_value_heads=3), "num_key_value_heads 3 does not divide num_attention_heads 4"),
        (tiny("llama", hidden_size=66), "num_attention_heads 4 does not divide hidden_size 66"),
        (tiny("llama", hidden_act="relu2"), "hidden_act 'relu2' is not supported; supported are gelu, "),
        (tiny("gemma2", hidden_activation="quick"), "hidden_activation 'quick' is not supported"),
        (tiny("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention True is for embedding"),
        (tiny("qwen3", layer_types=["full_attention"]), "layer_types has 1 entries; expected 4"),
        (tiny("qwen3", layer_types=["full_attention"] * 3 + ["conv"]), "layer_types has 'conv'; known are"),
        (tiny("qwen3", layer_types=["sliding_attention"] * 4), "layer_types has sliding_attention layers, but"),
        (tiny("qwen3", layer_types="full"), "layer_types is 'full'; expected a list"),
        (tiny("smollm3", no_rope_layers=[1, 0]), "no_rope_layers has 2 entries; expected 4"),
        (tiny("llama", num_hidden_layers=0), "num_hidden_layers is 0; expected an integer from 1 to 10000"),
        (tiny("llama", num_hidden_layers=10**12), "num_hidden_layers is 1000000000000; expected an integer from"),
        (tiny("llama", rope_theta=1.0), "rope_theta 1.0 is not above 1"),
        (tiny("llama", hidden_size=None), "hidden_size is None; expected an integer"),
        (tiny("llama", hidden_size="64"), "hidden_size is '64'; expected an integer"),
        (tiny("llama", vocab_size=True), "vocab_size is True; expected an integer"),
        (tiny("llama", tie_word_embeddings="no"), "tie_word_embeddings is 'no'; expected true or false"),
        (tiny("llama", rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected a positive number"),
        (tiny("llama", hidden_act=None), "hidden_act is None; expected a string"),
        (without(tiny("llama"), "vocab_size"), "vocab_size is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_line_errors_that_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_hugging_face(config)
    assert "\n" not in str(error.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_files_give_a_configuration_or_a_one_line_error(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from([public(name) for name in FACTS])))
    place = data.draw(st.sampled_from([config, *(value for value in config.values() if isinstance(value, dict))]))
    key = data.draw(st.sampled_from(sorted(place)))
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(JUNK)
    message = "config.json: "
    try:
        hash(from_hugging_face(config))
    except ValueError as error:
        message = str(error)
    assert message.startswith("config.json: ")
    assert "\n" not in message


def test_every_supported_family_has_a_fixture() -> None:
    assert {case.model_type for case in CASES} == set(SUPPORTED)


def test_a_hash_is_computed_once_and_not_taken_along() -> None:
    """Another process hashes strings differently."""
    config = from_hugging_face(public("llama-3.2-1b"))
    assert hash(config) == hash(from_hugging_face(public("llama-3.2-1b"))) == vars(config)["_hash"]
    copy = pickle.loads(pickle.dumps(config))
    assert "_hash" not in vars(copy)
    assert (copy, hash(copy)) == (config, hash(config))
    assert hash(dataclasses.replace(config, vocab_size=7)) != hash(config)
