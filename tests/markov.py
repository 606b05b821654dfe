"""A llama that says what it is told: after token c it is all but certain of `successors[c]`, whatever came before.

The hidden size is the vocabulary size, the embedding is the identity, `o_proj` and `down_proj` are zero: what reaches
the head is the current token alone, times sqrt(VOCAB) = 8 by the norm, and column c of the head decides what follows c.
Attention and MLP are computed all the same, and cached. All models share one configuration, so also their programs.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from checkpoints.names import hugging_face_sources
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.model import Model
from jaxinfer.params import assemble, from_pieces
from jaxinfer.tokenization import Tokenizer
from jaxinfer.tokenization.token_bytes import BYTE_LEVEL_ALPHABET

VOCAB = 64
CONTEXT = 64
EOS = 63
END = 62
"""What follows a token that was given no successor; followed by itself."""
WORDS = ("A", "BC", "DEF", "G", *(f" w{i}" for i in range(4, 62)), " end", "<eos>")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": VOCAB,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-12,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def tensors(successors: Mapping[int, int], scale: float = 4.0) -> dict[str, np.ndarray]:
    """The checkpoint in float32. A successor has probability e^8 / (e^8 + 63) = 0.979 with scale 1, and 1.0 with 4."""
    rng = np.random.default_rng(0)
    head = np.zeros((VOCAB, VOCAB), np.float32)
    for token in range(VOCAB):
        head[successors.get(token, END), token] = scale
    shapes = {"q_proj": (16, VOCAB), "k_proj": (8, VOCAB), "v_proj": (8, VOCAB)}
    attention = {f"self_attn.{name}": rng.normal(0, 0.1, shape) for name, shape in shapes.items()}
    layer = attention | {
        "self_attn.o_proj": np.zeros((VOCAB, 16)),
        "mlp.gate_proj": rng.normal(0, 0.1, (32, VOCAB)),
        "mlp.up_proj": rng.normal(0, 0.1, (32, VOCAB)),
        "mlp.down_proj": np.zeros((VOCAB, 32)),
        "input_layernorm": np.ones(VOCAB),
        "post_attention_layernorm": np.ones(VOCAB),
    }
    everything = {f"model.layers.0.{name}.weight": array for name, array in layer.items()}
    everything |= {"model.embed_tokens.weight": np.eye(VOCAB), "model.norm.weight": np.ones(VOCAB)}
    return {name: array.astype(np.float32) for name, array in everything.items()} | {"lm_head.weight": head}


def chain(*tokens: int) -> dict[int, int]:
    """Successors that lead from each token to the next. A token can have one successor only."""
    assert len(set(tokens[:-1])) == len(tokens) - 1
    return dict(itertools.pairwise(tokens))


def word_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """Token i is words[i]; text is the words joined."""
    return Tokenizer(backend(words), eos_token_ids=[EOS], special_tokens={"eos_token": words[EOS]})


def byte_tokenizer(texts: Sequence[bytes]) -> Tokenizer:
    """Token i is the bytes texts[i], which may be part of a character."""
    spell = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}
    words = ["".join(spell[byte] for byte in text) for text in texts]
    made = backend([*words, *(f"unused{i}" for i in range(len(words), VOCAB))])
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made, eos_token_ids=[EOS])


def backend(words: Sequence[str]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    made.pre_tokenizer = pre_tokenizers.Split("|", "removed")  # "A|BC" is the tokens 0 and 1
    return made


def model(
    successors: Mapping[int, int], *, scale: float = 4.0, tokenizer: Tokenizer | None = None, text: bool = True
) -> Model:
    """The model in memory, with `tokenizer`, else `word_tokenizer()`, else (`text=False`) none."""
    config = from_hugging_face(CONFIG, {}, num_tokens=VOCAB, extra_eos=())
    arrays = tensors(successors, scale)
    sources, _ = hugging_face_sources(
        "llama", num_layers=1, q_rows=16, kv_rows=8, intermediate_size=32, available=arrays
    )

    def read_into(name: str, out: np.ndarray) -> None:
        out[...] = arrays[sources[name].name]

    if tokenizer is None and text:
        tokenizer = word_tokenizer()
    params = from_pieces(assemble(config, jnp.float32, read_into))
    return Model(config, params, tokenizer, jnp.dtype(jnp.float32), "markov")


def with_nan_token(model: Model, token: int) -> Model:
    """The model with NaN as the embedding of one token: only rows that hold this token can be hurt."""
    params = dataclasses.replace(model.params, embed_tokens=model.params.embed_tokens.at[token].set(jnp.nan))
    return dataclasses.replace(model, params=params)


def with_nan_logit(model: Model, token: int) -> Model:
    """The model with NaN in the head's row of one token: every row's logits hold NaN there."""
    assert isinstance(model.params.lm_head, jax.Array)
    params = dataclasses.replace(model.params, lm_head=model.params.lm_head.at[token].set(jnp.nan))
    return dataclasses.replace(model, params=params)


def save(folder: pathlib.Path, successors: Mapping[int, int], *, scale: float = 4.0) -> pathlib.Path:
    """Writes the model as a Hugging Face folder with config.json, model.safetensors, tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(tensors(successors, scale), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = backend(WORDS)
    tokenizer.add_special_tokens([tokenizers.AddedToken(WORDS[EOS], special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": WORDS[EOS]}))
    return folder
