"""GGUF models without weights: metadata and tensor tables, as llama.cpp's converters would write them."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf_files
import numpy as np

from checkpoints.names import check_complete
from checkpoints.names_gguf import gguf_sources
from checkpoints.tensors import TensorInfo
from jaxinfer.config import ModelConfig
from jaxinfer.config_gguf import from_gguf
from jaxinfer.params import canonical_shapes


@dataclasses.dataclass
class GGUFModel:
    """What a GGUF file of a model would hold: metadata, tensor table, and the values of its RoPE tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    values: dict[str, np.ndarray]

    def config(self) -> ModelConfig:
        """The configuration, after checking that it fits the tensors one to one."""
        config = from_gguf(self.metadata, self.tensors, self.values.__getitem__)
        sources, skipped = gguf_sources(
            self.metadata["general.architecture"],
            num_layers=config.num_layers,
            q_rows=config.num_heads * config.head_dim,
            kv_rows=config.num_kv_heads * config.head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            available=self.tensors,
        )
        check_complete(canonical_shapes(config), sources, self.tensors, skipped)
        return config


def gguf_model(
    arch: str,
    *,
    layers: int,
    hidden: int,
    ff: int,
    heads: int,
    kv_heads: int,
    context: int,
    vocab: int,
    eps: float = 1e-5,
    head_dim: int | None = None,
    output: bool = False,
    bias: bool = False,
    tokens: Mapping[int, str] | None = None,
    num_tokens: int | None = None,
    rope_tensors: Mapping[str, np.ndarray] | None = None,
    **keys: Any,
) -> GGUFModel:
    """`keys` go into the metadata under the architecture, `__` standing for a dot; `tokenizer__` ones do
    not."""
    dim = head_dim or hidden // heads
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": ff,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(np.float32(eps)),
    }
    if head_dim is not None:
        metadata |= {f"{arch}.attention.key_length": dim, f"{arch}.attention.value_length": dim}
    for key, value in keys.items():
        dotted = key.replace("__", ".")
        value = float(np.float32(value)) if isinstance(value, float) else value
        metadata[dotted if dotted.startswith("tokenizer.") else f"{arch}.{dotted}"] = value
    real = vocab if num_tokens is None else num_tokens
    names = {i: f"[PAD{i}]" for i in range(real, vocab)} | dict(tokens or {})
    metadata["tokenizer.ggml.tokens"] = [names.get(i, f"t{i}") for i in range(vocab)]
    metadata["tokenizer.ggml.token_type"] = [5 if i >= real else 3 if i in names else 1 for i in range(vocab)]

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if output:
        shapes["output.weight"] = (vocab, hidden)
    for name, array in (rope_tensors or {}).items():
        shapes[name] = array.shape
    for i in range(layers):
        block = block_shapes(arch, hidden, ff, heads * dim, kv_heads * dim, dim, bias)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    tensors = {name: TensorInfo(name, shape, "F32", 4 * math.prod(shape)) for name, shape in shapes.items()}
    return GGUFModel(metadata, tensors, dict(rope_tensors or {}))


def write_packed(path: pathlib.Path, model: GGUFModel, kind: str) -> pathlib.Path:
    """A file of the model whose matrices are random codes of one kind; its vectors are ones."""
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(info.shape, np.float32) if len(info.shape) == 1 else gguf_files.packed(rng, kind, *info.shape)
        for name, info in model.tensors.items()
    }
    return gguf_files.write(path, model.metadata, tensors)


def block_shapes(arch: str, hidden: int, ff: int, q: int, kv: int, dim: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of one block, as `gguf.constants.MODEL_TENSORS` lists them for the architecture."""
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }
    if arch in ("phi3", "glm4"):
        del shapes["ffn_gate.weight"]
        shapes["ffn_up.weight"] = (2 * ff, hidden)
    if arch == "phi3":
        for name in ("attn_q.weight", "attn_k.weight", "attn_v.weight"):
            del shapes[name]
        shapes["attn_qkv.weight"] = (q + 2 * kv, hidden)
    if arch != "olmo2":
        shapes |= {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    if arch in ("gemma2", "gemma3", "olmo2", "glm4"):
        shapes |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    if arch in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    if arch == "olmo2":
        shapes |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
    if bias:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    return shapes
