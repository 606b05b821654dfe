"""Canonical names of every family against the names transformers gives, and the check that nothing is left over."""

import re

import families
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.names import TensorSource, check_complete, hugging_face_sources
from checkpoints.safetensors import SafetensorsFolder
from checkpoints.tensors import TensorInfo
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.params import canonical_shapes

SIZES = {"num_layers": 1, "q_rows": 64, "kv_rows": 32, "intermediate_size": 96}

TOP = {"embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
ATTENTION = {f"{p}.weight": f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj")}
MLP = {f"{p}.weight": f"mlp.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")}
QK_NORMS = {f"{p}.weight": f"self_attn.{p}.weight" for p in ("q_norm", "k_norm")}
QKV_BIASES = {f"{p}.bias": f"self_attn.{p}.bias" for p in ("q_proj", "k_proj", "v_proj")}
OTHER_BIASES = {
    "o_proj.bias": "self_attn.o_proj.bias",
    **{f"{p}.bias": f"mlp.{p}.bias" for p in ("gate_proj", "up_proj", "down_proj")},
}
LLAMA_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
GEMMA_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
OLMO2_NORMS = {
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
LLAMA = ATTENTION | MLP | LLAMA_NORMS

# One layer of each family: canonical name -> the name in `state_dict()` of transformers 5.17.
LAYERS = {
    "llama": LLAMA | QKV_BIASES | OTHER_BIASES,
    "mistral": LLAMA,
    "qwen2": LLAMA | QKV_BIASES,
    "qwen3": LLAMA | QK_NORMS,
    "smollm3": LLAMA | QKV_BIASES | OTHER_BIASES,
    "granite": LLAMA | QKV_BIASES | OTHER_BIASES,
    "gemma2": ATTENTION | MLP | GEMMA_NORMS,
    "gemma3": ATTENTION | MLP | GEMMA_NORMS | QK_NORMS,
    "gemma3_text": ATTENTION | MLP | GEMMA_NORMS | QK_NORMS,
    "olmo2": ATTENTION | MLP | OLMO2_NORMS | QK_NORMS,
}


def in_layer(names: dict[str, str]) -> dict[str, str]:
    return {f"layers.0.{canonical}": f"model.layers.0.{name}" for canonical, name in names.items()}


@pytest.mark.parametrize("model_type", LAYERS)
def test_families_without_fused_tensors(model_type):
    names = TOP | in_layer(LAYERS[model_type])
    sources, skipped = hugging_face_sources(model_type, **SIZES, available=list(names.values()))
    assert sources == {canonical: TensorSource(name) for canonical, name in names.items()}
    assert skipped == {}


def test_phi3_splits_its_fused_tensors():
    fused = ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj", "mlp.down_proj")
    norms = ("input_layernorm", "post_attention_layernorm")
    available = [*TOP.values(), *(f"model.layers.0.{name}.weight" for name in (*fused, *norms))]
    sources, _ = hugging_face_sources("phi3", **SIZES, available=available)
    qkv, gate_up = (f"model.layers.0.{name}.weight" for name in fused[:2])
    assert sources == {canonical: TensorSource(name) for canonical, name in TOP.items()} | {
        "layers.0.q_proj.weight": TensorSource(qkv, (0, 64)),
        "layers.0.k_proj.weight": TensorSource(qkv, (64, 96)),
        "layers.0.v_proj.weight": TensorSource(qkv, (96, 128)),
        "layers.0.o_proj.weight": TensorSource("model.layers.0.self_attn.o_proj.weight"),
        "layers.0.gate_proj.weight": TensorSource(gate_up, (0, 96)),
        "layers.0.up_proj.weight": TensorSource(gate_up, (96, 192)),
        "layers.0.down_proj.weight": TensorSource("model.layers.0.mlp.down_proj.weight"),
        "layers.0.attn_norm.weight": TensorSource("model.layers.0.input_layernorm.weight"),
        "layers.0.mlp_norm.weight": TensorSource("model.layers.0.post_attention_layernorm.weight"),
    }


def test_glm4_has_four_norms_and_a_fused_gate_up():
    names = in_layer(
        ATTENTION
        | QKV_BIASES
        | {
            "attn_norm.weight": "input_layernorm.weight",
            "attn_post_norm.weight": "post_self_attn_layernorm.weight",
            "mlp_norm.weight": "post_attention_layernorm.weight",
            "mlp_post_norm.weight": "post_mlp_layernorm.weight",
            "down_proj.weight": "mlp.down_proj.weight",
        }
    )
    gate_up = "model.layers.0.mlp.gate_up_proj.weight"
    sources, _ = hugging_face_sources("glm4", **SIZES, available=[*TOP.values(), *names.values(), gate_up])
    assert sources == {canonical: TensorSource(name) for canonical, name in (TOP | names).items()} | {
        "layers.0.gate_proj.weight": TensorSource(gate_up, (0, 96)),
        "layers.0.up_proj.weight": TensorSource(gate_up, (96, 192)),
    }


@pytest.mark.parametrize("case", families.CASES, ids=str)
def test_checkpoints_that_transformers_wrote_are_complete(case):
    config = from_hugging_face(case.config)
    tensors = SafetensorsFolder(case.folder).tensors
    sources, skipped = hugging_face_sources(
        config.model_type,
        num_layers=config.num_layers,
        q_rows=config.num_heads * config.head_dim,
        kv_rows=config.num_kv_heads * config.head_dim,
        intermediate_size=config.intermediate_size,
        available=tensors,
    )
    check_complete(canonical_shapes(config), sources, tensors, skipped)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.", "model.language_model.lm_head.weight"),
    ],
)
def test_prefixes_and_towers(prefix, head):
    text = [name.replace("model.", prefix, 1) for name in (TOP | in_layer(LAYERS["gemma3"])).values()]
    towers = [
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.vision_tower.embeddings.patch_embedding.weight",
        "visual.blocks.0.attn.qkv.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "model.multi_modal_projector.mm_soft_emb_norm.weight",
        "audio_tower.layers.0.fc1.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
    ]
    sources, skipped = hugging_face_sources("gemma3", **SIZES, available=[*towers, head, *text])
    assert sorted(source.name for source in sources.values()) == sorted([head, *text])
    assert sources["lm_head.weight"] == TensorSource(head)
    assert sources["layers.0.q_proj.weight"].name == f"{prefix}layers.0.self_attn.q_proj.weight"
    assert set(skipped) == set(towers)
    assert skipped["visual.blocks.0.attn.qkv.weight"] == "vision tower"


def test_skipping_takes_no_text_tensor_along():
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq_scale",
        "model.layers.1.visual.weight",
        "model.mtp_norm.weight",
    ]
    assert hugging_face_sources("llama", **SIZES, available=names) == ({}, {})


def test_unknown_family():
    with pytest.raises(CheckpointError, match=r"model_type 'gpt2' is not supported; supported are llama, mistral"):
        hugging_face_sources("gpt2", **SIZES, available=[])


# --- check_complete

EXPECTED = {
    "norm.weight": (8,),
    **{f"layers.{i}.q_proj.weight": (16, 8) for i in range(4)},
    **{f"layers.{i}.k_proj.weight": (4, 8) for i in range(4)},
}
SOURCES = {
    "norm.weight": TensorSource("norm"),
    **{f"layers.{i}.q_proj.weight": TensorSource(f"layers.{i}.qk", (0, 16)) for i in range(4)},
    **{f"layers.{i}.k_proj.weight": TensorSource(f"layers.{i}.qk", (16, 20)) for i in range(4)},
}


def tensors(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    all_shapes: dict[str, tuple[int, ...]] = {"norm": (8,)}
    all_shapes |= {f"layers.{i}.qk": (20, 8) for i in range(4)}
    all_shapes |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: TensorInfo(name, shape, "F32", 0) for name, shape in all_shapes.items()}


def complaint(table, expected=EXPECTED, sources=SOURCES, skipped=()) -> str:
    with pytest.raises(CheckpointError) as error:
        check_complete(expected, sources, table, skipped, where="folder")
    message = str(error.value)
    assert message.startswith("folder: the tensors do not fit the configuration; ")
    assert "\n" not in message
    return re.sub(r"^.*?; |; the configuration belongs to.*$", "", message)


def test_complete():
    check_complete(EXPECTED, SOURCES, tensors(), {})
    check_complete(EXPECTED, SOURCES, tensors(extra=(3,)), {"extra": "not needed"})


def test_missing():
    table = tensors()
    del table["norm"], table["layers.2.qk"]
    assert complaint(table) == (
        "3 missing: norm.weight (norm in the file), layers.2.q_proj.weight (layers.2.qk in the file), "
        "layers.2.k_proj.weight (layers.2.qk in the file)"
    )
    without = {name: source for name, source in SOURCES.items() if "layers.1.k_proj" not in name}
    # The rows of k are then also without an owner.
    assert complaint(tensors(), sources=without) == (
        "1 missing: layers.1.k_proj.weight; wrong shapes: layers.1.qk has 20 rows, its parts take [[0, 16]]"
    )


def test_unexpected():
    assert complaint(tensors(lm_head=(9, 8), layers__4__qk=(20, 8), layers__5__qk=(20, 8), layers__7__qk=(1,))) == (
        "4 unexpected: lm_head, layers.{4-5,7}.qk"
    )
    # A source alone does not use a tensor: the configuration has to ask for it (a bias it does not have, a tied head).
    sources = SOURCES | {"lm_head.weight": TensorSource("lm_head")}
    assert complaint(tensors(lm_head=(9, 8)), sources=sources) == "1 unexpected: lm_head"
    check_complete(EXPECTED, sources, tensors(lm_head=(9, 8)), {"lm_head"})


def test_wrong_shapes():
    assert complaint(tensors(norm=(7,))) == "wrong shapes: norm.weight (norm in the file) is [7], expected [8]"
    assert complaint(tensors(norm=())) == "wrong shapes: norm.weight (norm in the file) is [], expected [8]"
    assert complaint(tensors(norm=(8, 1))) == "wrong shapes: norm.weight (norm in the file) is [8, 1], expected [8]"
    assert complaint(tensors(layers__1__qk=(20, 9))) == (
        "wrong shapes: layers.1.q_proj.weight (layers.1.qk in the file) is rows 0:16 of [20, 9], expected [16, 8], "
        "layers.1.k_proj.weight (layers.1.qk in the file) is rows 16:20 of [20, 9], expected [4, 8]"
    )


def test_a_fused_tensor_of_another_size():
    assert complaint(tensors(**{f"layers__{i}__qk": (24, 8) for i in range(4)})) == (
        "wrong shapes: layers.{0-3}.qk has 24 rows, its parts take [[0, 16], [16, 20]]"
    )
    assert complaint(tensors(layers__0__qk=(18, 8))) == (
        "wrong shapes: layers.0.k_proj.weight (layers.0.qk in the file) is rows 16:20 of [18, 8], expected [4, 8]"
    )
    overlapping = SOURCES | {"layers.0.k_proj.weight": TensorSource("layers.0.qk", (12, 16))}
    assert "layers.0.qk has 20 rows, its parts take [[0, 16], [12, 16]]" in complaint(tensors(), sources=overlapping)


def test_everything_is_in_one_message():
    table = tensors(norm=(9,), extra=(1,))
    del table["layers.3.qk"]
    assert complaint(table) == (
        "2 missing: layers.3.q_proj.weight (layers.3.qk in the file), "
        "layers.3.k_proj.weight (layers.3.qk in the file); 1 unexpected: extra; "
        "wrong shapes: norm.weight (norm in the file) is [9], expected [8]"
    )


def test_what_is_missing_has_the_name_that_the_file_would_give_it():
    """Nobody finds `layers.2.down_proj.weight` in a file that calls it `model.layers.2.mlp.down_proj.weight`."""
    available = ["model.embed_tokens.weight"]
    sources, _ = hugging_face_sources("llama", **(SIZES | {"num_layers": 2}), available=available, include_absent=True)
    expected = {f"layers.{i}.down_proj.weight": (8, 8) for i in range(2)} | {"lm_head.weight": (9, 8)}
    assert complaint({}, expected=expected, sources=sources) == (
        "3 missing: layers.{0-1}.down_proj.weight (model.layers.{0-1}.mlp.down_proj.weight in the file), lm_head.weight"
    )


def test_integers_are_no_weights():
    table = tensors()
    table["layers.1.qk"] = TensorInfo("layers.1.qk", (20, 8), "I8", 160)
    with pytest.raises(CheckpointError) as error:
        check_complete(EXPECTED, SOURCES, table, {}, where="folder")
    assert str(error.value) == (
        "folder: the tensors do not fit the configuration; integers in place of weights: layers.1.q_proj.weight "
        "(layers.1.qk in the file), layers.1.k_proj.weight (layers.1.qk in the file); they are codes of a quantisation "
        "that is not read: use the original model"
    )


def test_names_from_anywhere_stay_on_one_short_line():
    table = tensors() | {name: TensorInfo(name, (1,), "F32", 0) for name in ("a\nb", "c" * 100_000)}
    table |= {f"n{i}": TensorInfo(f"n{i}", (1,), "F32", 0) for i in range(1000)}
    message = complaint(table)
    assert message.startswith(r"1002 unexpected: 'a\nb', 'ccc")
    assert message.endswith("n97 and 902 more")
    assert len(message) < 2000
