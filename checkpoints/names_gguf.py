"""GGUF tensor names to canonical names, for the architectures that jaxinfer runs.

llama.cpp names tensors alike in all of them; what differs is how rows are stored (`conversion/` in its
repository): interleaved query and key rows, and fused projections.
"""

from collections.abc import Collection

import numpy as np

from checkpoints.names import TensorSource

ARCHITECTURES = (
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "llama",
    "mistral3",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Values of `general.architecture`. `llama` is also Mistral, TinyLlama, SmolLM2 and DeepSeek-Coder."""

# ggml rotates neighbouring dimensions in these, so the converter moves row i + head_dim / 2 of each head
# next to row i. (glm4 rotates neighbours in the original too: its rows are as they were.)
_INTERLEAVED_QK = frozenset({"granite", "llama", "mistral3", "smollm3"})

_FUSED_GATE_UP = frozenset({"glm4", "phi3"})
"""Architectures whose `ffn_up` holds the gate's rows, then those of the up projection."""

_TOP_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "attn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o_proj": "attn_output",
    "down_proj": "ffn_down",
}
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def gguf_sources(
    arch: str,
    *,
    num_layers: int,
    q_rows: int,
    kv_rows: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    available: Collection[str],
    include_absent: bool = False,
) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """Says where each canonical tensor is in a GGUF file, and which tensors are skipped, with the reason.

    Only tensors in `available` are named, so what a model lacks is absent from the first result (unless
    `include_absent`: it has the name then that the file would give it), and a tensor of the file that is in
    neither result is one that this architecture should not have. Without
    `output.weight` there is no `lm_head.weight`: such files tie it to the embedding. Raises ValueError for
    an architecture not in `ARCHITECTURES`.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    available = frozenset(available)
    sources: dict[str, TensorSource] = {}

    def add(canonical: str, name: str, rows: tuple[int, int] | None = None, heads: int | None = None) -> None:
        if include_absent or name in available:
            sources[canonical] = TensorSource(name=name, rows=rows, unpermute_heads=heads)

    for canonical, name in _TOP_NAMES.items():
        add(canonical, name)
    q_heads, k_heads = (num_heads, num_kv_heads) if arch in _INTERLEAVED_QK else (None, None)
    kv_end = q_rows + kv_rows
    halves = (0, intermediate_size), (intermediate_size, 2 * intermediate_size)
    for layer, block in ((f"layers.{i}", f"blk.{i}") for i in range(num_layers)):
        for kind in ("weight", "bias"):
            for canonical, name in _BLOCK_NAMES.items():
                add(f"{layer}.{canonical}.{kind}", f"{block}.{name}.{kind}")
            fused = f"{block}.attn_qkv.{kind}"
            if fused in available:
                add(f"{layer}.q_proj.{kind}", fused, (0, q_rows), q_heads)
                add(f"{layer}.k_proj.{kind}", fused, (q_rows, kv_end), k_heads)
                add(f"{layer}.v_proj.{kind}", fused, (kv_end, kv_end + kv_rows))
            else:
                add(f"{layer}.q_proj.{kind}", f"{block}.attn_q.{kind}", None, q_heads)
                add(f"{layer}.k_proj.{kind}", f"{block}.attn_k.{kind}", None, k_heads)
                add(f"{layer}.v_proj.{kind}", f"{block}.attn_v.{kind}")
            if arch in _FUSED_GATE_UP:
                add(f"{layer}.gate_proj.{kind}", f"{block}.ffn_up.{kind}", halves[0])
                add(f"{layer}.up_proj.{kind}", f"{block}.ffn_up.{kind}", halves[1])
            else:
                add(f"{layer}.gate_proj.{kind}", f"{block}.ffn_gate.{kind}")
                add(f"{layer}.up_proj.{kind}", f"{block}.ffn_up.{kind}")

    skipped: dict[str, str] = dict.fromkeys(_ROPE_TABLES, "RoPE factors, which are part of the configuration")
    for i in range(num_layers):
        skipped[f"blk.{i}.attn_rot_embd.weight"] = "RoPE frequencies, which are computed"
    return sources, {name: reason for name, reason in skipped.items() if name in available}


def unpermute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order of interleaved RoPE in a query or key projection; returns a new array.

    In each of the `heads` equal runs of rows, row 2i + j goes to row j * head_dim / 2 + i. Whole rows move,
    so this is exact for weights [heads * head_dim, in], biases [heads * head_dim] and packed rows alike.
    Raises ValueError if the rows are not `heads` runs of even length.
    """
    if heads < 1 or array.ndim == 0 or array.shape[0] % (2 * heads):
        raise ValueError(f"{heads} heads of an even number of rows do not make up an array of shape {array.shape}")
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
