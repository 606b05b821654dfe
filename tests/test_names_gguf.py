"""GGUF tensor names: which rows of which tensor fill each parameter, and the row order of interleaved
RoPE."""

import gguf_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.formats import ggml
from checkpoints.names import TensorSource
from checkpoints.names_gguf import ARCHITECTURES, gguf_sources, unpermute_rows

BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
SIZES = {
    "num_layers": 2,
    "q_rows": 96,
    "kv_rows": 32,
    "num_heads": 6,
    "num_kv_heads": 2,
    "intermediate_size": 100,
}


def names(*block: str, layers: int = 2) -> list[str]:
    return [
        "token_embd.weight",
        "output_norm.weight",
        *(f"blk.{i}.{part}.weight" for i in range(layers) for part in block),
    ]


def test_llama() -> None:
    available = [*names(*BLOCK), "output.weight", "rope_freqs.weight", "blk.1.attn_rot_embd.weight", "extra"]
    sources, skipped = gguf_sources("llama", available=available, **SIZES)
    assert sources.keys() == {
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
        *(
            f"layers.{i}.{part}.weight"
            for i in range(2)
            for part in ("attn_norm", "q_proj", "k_proj", "v_proj", "o_proj", "mlp_norm")
        ),
        *(f"layers.{i}.{part}.weight" for i in range(2) for part in ("gate_proj", "up_proj", "down_proj")),
    }
    assert sources["embed_tokens.weight"] == TensorSource("token_embd.weight")
    assert sources["layers.1.q_proj.weight"] == TensorSource("blk.1.attn_q.weight", None, 6)
    assert sources["layers.1.k_proj.weight"] == TensorSource("blk.1.attn_k.weight", None, 2)
    assert sources["layers.1.v_proj.weight"] == TensorSource("blk.1.attn_v.weight")
    assert sources["layers.0.mlp_norm.weight"] == TensorSource("blk.0.ffn_norm.weight")
    assert skipped.keys() == {"rope_freqs.weight", "blk.1.attn_rot_embd.weight"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_are_permuted_where_llama_cpp_permutes_them(arch: str) -> None:
    """Its converters for these four derive from the llama one; the others keep the rows of the original."""
    biases = [f"blk.{i}.attn_{x}.bias" for i in range(2) for x in "qkv"]
    sources, _ = gguf_sources(arch, available=[*names(*BLOCK), *biases], **SIZES)
    permuted = arch in ("llama", "mistral3", "granite", "smollm3")
    for kind in ("weight", "bias"):
        assert sources[f"layers.0.q_proj.{kind}"].unpermute_heads == (6 if permuted else None)
        assert sources[f"layers.0.k_proj.{kind}"].unpermute_heads == (2 if permuted else None)
        assert sources[f"layers.0.v_proj.{kind}"].unpermute_heads is None


def test_fused_projections_of_phi3() -> None:
    block = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
    factors = ["rope_factors_long.weight", "rope_factors_short.weight"]
    sources, skipped = gguf_sources("phi3", available=[*names(*block), *factors], **SIZES)
    assert sources["layers.0.q_proj.weight"] == TensorSource("blk.0.attn_qkv.weight", (0, 96))
    assert sources["layers.0.k_proj.weight"] == TensorSource("blk.0.attn_qkv.weight", (96, 128))
    assert sources["layers.0.v_proj.weight"] == TensorSource("blk.0.attn_qkv.weight", (128, 160))
    assert sources["layers.1.gate_proj.weight"] == TensorSource("blk.1.ffn_up.weight", (0, 100))
    assert sources["layers.1.up_proj.weight"] == TensorSource("blk.1.ffn_up.weight", (100, 200))
    assert "lm_head.weight" not in sources
    assert skipped.keys() == set(factors)


def test_glm4_and_post_norms() -> None:
    block = ("attn_q", "attn_k", "attn_v", "post_attention_norm", "ffn_norm", "ffn_up", "post_ffw_norm")
    sources, _ = gguf_sources("glm4", available=names(*block), **SIZES)
    assert sources["layers.0.q_proj.weight"] == TensorSource("blk.0.attn_q.weight")
    assert sources["layers.0.up_proj.weight"] == TensorSource("blk.0.ffn_up.weight", (100, 200))
    assert sources["layers.0.attn_post_norm.weight"] == TensorSource("blk.0.post_attention_norm.weight")
    assert sources["layers.0.mlp_norm.weight"] == TensorSource("blk.0.ffn_norm.weight")
    assert sources["layers.0.mlp_post_norm.weight"] == TensorSource("blk.0.post_ffw_norm.weight")


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match=r"'mamba' is not supported; supported are gemma2, .*llama"):
        gguf_sources("mamba", available=[], **SIZES)


def test_unpermute_by_hand() -> None:
    # Two heads of 4 rows: rows i and i + 2 of each were put side by side.
    stored = np.array([0, 2, 1, 3, 10, 12, 11, 13], np.float32)
    assert unpermute_rows(stored, 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert unpermute_rows(stored[:, None], 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def permute_as_converters_do(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


@given(heads=st.integers(1, 5), pairs=st.integers(1, 9), columns=st.integers(0, 3))
def test_unpermute_undoes_the_converters(heads: int, pairs: int, columns: int) -> None:
    shape = (heads * pairs * 2, columns) if columns else (heads * pairs * 2,)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    np.testing.assert_array_equal(unpermute_rows(permute_as_converters_do(array, heads), heads), array)


def test_unpermute_moves_packed_rows(rng: np.random.Generator) -> None:
    blocks = gguf_files.random_blocks(rng, "Q4_K", 48, 256)
    moved = ggml.dequantize(unpermute_rows(blocks, 3), "Q4_K")
    np.testing.assert_array_equal(moved, unpermute_rows(ggml.dequantize(blocks, "Q4_K"), 3))


def test_scores_are_those_of_interleaved_rope(rng: np.random.Generator) -> None:
    """q.k with ggml's rotation of stored rows is q.k with the half-split rotation of unpermuted ones
    (GQA)."""
    heads, kv_heads, dim, hidden = 4, 2, 8, 16
    query = rng.normal(size=(heads * dim, hidden))
    key = rng.normal(size=(kv_heads * dim, hidden))
    x, y = rng.normal(size=(2, hidden))
    angle = 10000.0 ** (-np.arange(dim // 2) / (dim // 2))

    def rotate(vector: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
        half = vector.reshape(-1, dim // 2, 2) if interleaved else vector.reshape(-1, 2, dim // 2).swapaxes(1, 2)
        turned = (half[..., 0] + 1j * half[..., 1]) * np.exp(1j * position * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def scores(query: np.ndarray, key: np.ndarray, interleaved: bool) -> np.ndarray:
        rotated_query = rotate(query @ x, 7, interleaved)
        rotated_key = np.repeat(rotate(key @ y, 3, interleaved), heads // kv_heads, axis=0)
        return np.sum(rotated_query * rotated_key, axis=-1)

    stored = scores(query, key, interleaved=True)
    loaded = scores(unpermute_rows(query, heads), unpermute_rows(key, kv_heads), interleaved=False)
    np.testing.assert_allclose(loaded, stored, rtol=1e-12)


def test_unpermute_refuses_rows_that_are_not_heads() -> None:
    with pytest.raises(ValueError, match=r"5 heads of an even number of rows .* shape \(12, 2\)"):
        unpermute_rows(np.zeros((12, 2)), 5)
    with pytest.raises(ValueError, match="4 heads"):
        unpermute_rows(np.zeros((12, 2)), 4)
