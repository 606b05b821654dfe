"""The target and the draft that `train_pair` trains: their text, their tokens, their shapes, their folders."""

import json
import lzma
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers

from checkpoints.export import write_file
from checkpoints.export_formats import Scheme, configuration, pack_fields
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.decoder import Params
from jaxinfer.quantization import calibration

TEXTS = pathlib.Path(calibration.__file__).with_name("texts")
VOCABULARY, WINDOW, HELD_OUT = 1024, 256, 0.05
END = "<|end|>"
WIDTHS = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
# At this size a step costs what its kernels cost to launch: speed goes by the number of layers.
SHAPES = {
    "target": WIDTHS | {"num_hidden_layers": 16, "intermediate_size": 192},
    "draft": WIDTHS | {"num_hidden_layers": 1, "intermediate_size": 384},
}


def read_texts() -> tuple[str, str]:
    """What is trained on, and what is held out: the end of each text."""
    train, held_out = [], []
    for path in sorted(TEXTS.glob("*.txt.xz")):
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
        cut = int(len(text) * (1 - HELD_OUT))
        train.append(text[:cut])
        held_out.append(text[cut:])
    return "\n".join(train), "\n".join(held_out)


def train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: no text is out of vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def hugging_face_config(shape: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4 * WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        **shape,
    }


def save(
    folder: pathlib.Path,
    config: dict[str, object],
    params: Params,
    tokenizer: tokenizers.Tokenizer,
    *,
    int8: bool = False,
) -> None:
    """A Hugging Face folder in bfloat16, or with the projections in 8 bits, a scale an output (compressed-tensors)."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    parsed = from_hugging_face(config)
    q_size, kv_size = parsed.num_heads * parsed.head_dim, parsed.num_kv_heads * parsed.head_dim
    named: dict[str, jax.Array] = {"model.embed_tokens.weight": params.embed_tokens, "model.norm.weight": params.norm}
    projections: dict[str, jax.Array] = {}
    for index, layer in enumerate(params.layers):
        prefix = f"model.layers.{index}"
        q, k, v = jnp.split(jnp.asarray(layer.qkv), [q_size, q_size + kv_size])
        gate, up = jnp.split(jnp.asarray(layer.gate_up), 2)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.o}
        projections |= {f"{prefix}.self_attn.{name}": jnp.asarray(value) for name, value in attention.items()}
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": layer.down}
        projections |= {f"{prefix}.mlp.{name}": jnp.asarray(value) for name, value in mlp.items()}
        assert layer.attn_norm is not None and layer.mlp_norm is not None
        named[f"{prefix}.input_layernorm.weight"] = layer.attn_norm
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
    if not int8:
        named |= {f"{name}.weight": value for name, value in projections.items()}
    tensors = {name: np.asarray(value, np.float32).astype(ml_dtypes.bfloat16) for name, value in named.items()}
    if int8:
        for name, value in projections.items():
            tensors |= {f"{name}.{part}": array for part, array in eight_bits(np.asarray(value, np.float32)).items()}
        scheme = Scheme(bits=8, is_float=False, group_size=None, symmetric=True)
        settings = configuration("compressed-tensors", dict.fromkeys(projections, scheme), ["lm_head"])
        config = config | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_file(folder / "model.safetensors", tensors)


def eight_bits(weight: np.ndarray) -> dict[str, np.ndarray]:
    """A float32 weight [out, in] as compressed-tensors has it: codes about zero, a scale an output."""
    scales = (np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-8) / 127.0).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.round(weight / scales.astype(np.float32)), -128, 127) + 128
    return {
        "weight_packed": pack_fields(codes.astype(np.uint8), 8),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }
