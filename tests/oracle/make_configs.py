"""Writes what transformers makes of configurations: three JSON files in `tests/fixtures`.

    config_defaults.json  for each family, the defaults of its configuration class
    config_facts.json     for each file of `fixtures/configs`, the facts of the model that transformers builds from it
    rope.json             inverse frequencies and attention factors, for those files and for `ROPE_CASES`

Run it in an environment with torch and transformers 5.17: `python tests/oracle/make_configs.py`.
"""

import dataclasses
import json
import pathlib
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3", "olmo2", "granite", "glm4",
)  # fmt: skip
DEFAULT_KEYS = (
    "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation",
    "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "bos_token_id", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "use_bidirectional_attention", "no_rope_layers", "no_rope_layer_interval", "attention_multiplier",
    "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip
SHAPE = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def scaled(family: str, parameters: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {"model_type": family, **SHAPE, **config, "rope_parameters": parameters}


QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
ROPE_CASES = {
    "llama-3.1-8b": (
        scaled(
            "llama",
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            max_position_embeddings=131072,
        ),
        (100,),
    ),
    "dynamic": (
        scaled("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_position_embeddings=2048),
        (1, 2048, 2049, 3000, 8192),
    ),
    "yarn": (scaled("qwen2", QWEN_YARN, max_position_embeddings=32768), (100,)),
    "yarn-untruncated": (
        scaled("qwen2", QWEN_YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
        (100,),
    ),
    "yarn-mscale": (
        scaled("qwen2", QWEN_YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
        (100,),
    ),
    "yarn-attention-factor": (scaled("qwen3", QWEN_YARN | {"attention_factor": 0.75}), (100,)),
    "yarn-null-factor": (
        scaled("qwen3", QWEN_YARN | {"factor": None}, max_position_embeddings=98304),
        (100,),
    ),
    "yarn-narrow": (
        scaled("qwen3", QWEN_YARN | {"beta_fast": 1.001, "beta_slow": 1.0, "truncate": False}, head_dim=8),
        (100,),
    ),
    "longrope-attention-factor": (
        scaled(
            "llama",
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 8.0,
                "attention_factor": 1.5,
                "original_max_position_embeddings": 1024,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 4.0, 8.0, 16.0],
            },
            head_dim=8,
        ),
        (1024, 1025),
    ),
    "linear-gemma3": (
        scaled(
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            num_hidden_layers=6,
        ),
        (100,),
    ),
}  # fmt: skip


def class_defaults(family: str) -> dict[str, Any]:
    config_class = type(transformers.AutoConfig.for_model(family))
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    defaults = {key: fields[key] for key in DEFAULT_KEYS if key in fields}
    instance = config_class()
    defaults["eos_token_id"] = instance.eos_token_id
    if family == "gemma3_text":
        defaults["sliding_window_pattern"] = instance._sliding_window_pattern
        defaults["rope_theta"] = instance.rope_parameters["full_attention"]["rope_theta"]
        defaults["rope_local_base_freq"] = instance.rope_parameters["sliding_attention"]["rope_theta"]
    else:
        defaults["rope_theta"] = instance.rope_parameters["rope_theta"]
        defaults["partial_rotary_factor"] = instance.rope_parameters.get("partial_rotary_factor", 1.0)
    return defaults


def model_facts(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """Read from the modules that transformers builds, without memory for their weights."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    q_proj = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
    if text.model_type in ("mistral", "phi3"):
        sliding_layers = list(range(text.num_hidden_layers)) if text.sliding_window else []
    elif "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        sliding_layers = [i for i, kind in enumerate(text.layer_types) if kind == "sliding_attention"]
    else:
        sliding_layers = []
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "head_dim": attention.head_dim,
        "num_kv_heads": text.num_key_value_heads,
        "attention_scale": attention.scaling,
        "qkv_bias": q_proj.bias is not None,
        "output_bias": attention.o_proj.bias is not None,
        "mlp_bias": mlp.down_proj.bias is not None,
        "norm_eps": text.rms_norm_eps,
        "tie_word_embeddings": text.tie_word_embeddings,
        "num_layers": text.num_hidden_layers,
        "window": text.sliding_window if sliding_layers else None,
        "sliding_layers": sliding_layers,
        "layers_without_rope": [
            i for i, layer in enumerate(model.model.layers) if not getattr(layer.self_attn, "use_rope", True)
        ],
    }


def rope_records(name: str, source: dict, config: transformers.PreTrainedConfig, lengths: tuple[int, ...]):
    text = config.get_text_config()
    parameters = text.rope_parameters
    layer_types = ("full_attention", "sliding_attention") if "full_attention" in parameters else (None,)
    with torch.device("meta"):
        decoder = transformers.AutoModelForCausalLM.from_config(text).model
    for layer_type in layer_types:
        kind = (parameters[layer_type] if layer_type else parameters)["rope_type"]
        function = ROPE_INIT_FUNCTIONS.get(kind, decoder.rotary_emb.compute_default_rope_parameters)
        arguments = {"layer_type": layer_type} if layer_type else {}
        for length in lengths:
            frequencies, attention_factor = function(text, torch.device("cpu"), seq_len=length, **arguments)
            yield {
                "name": name,
                "layer_type": layer_type or "full_attention",
                "context_length": length,
                "attention_factor": attention_factor,
                "inverse_frequencies": frequencies.tolist(),
                **source,
            }


def main() -> None:
    transformers.logging.set_verbosity_error()
    facts, ropes = {}, []
    for path in sorted((FIXTURES / "configs").glob("*.json")):
        config = transformers.AutoConfig.from_pretrained(path)
        facts[path.stem] = model_facts(config)
        is_long = "128k" in path.stem or "phi-4" in path.stem
        ropes += rope_records(path.stem, {}, config, (4096, 4097) if is_long else (100,))
    for name, (source, lengths) in ROPE_CASES.items():
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(source)))
        ropes += rope_records(name, {"config": source}, config, lengths)
    defaults = {family: class_defaults(family) for family in FAMILIES}
    for name, content in (("config_facts", facts), ("config_defaults", defaults), ("rope", ropes)):
        # One record a line: a changed value shows up as a changed line.
        items = content.items() if isinstance(content, dict) else enumerate(content)
        lines = [
            (f"{json.dumps(key)}: " if isinstance(content, dict) else "") + json.dumps(value) for key, value in items
        ]
        brackets = "{}" if isinstance(content, dict) else "[]"
        text = brackets[0] + "\n" + ",\n".join(lines) + "\n" + brackets[1] + "\n"
        (FIXTURES / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
