"""load: precision, tied heads, strictness, peak memory, random weights, and errors that name the remedy."""

import functools
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import families
import gguf_files
import gguf_models
import jax
import jax.numpy as jnp
import markov
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import checkpoints.formats.codes
from checkpoints.errors import CheckpointError
from jaxinfer.generation import generate, logits
from jaxinfer.layers.linear import linear
from jaxinfer.model import _shown_count, inspect, load
from jaxinfer.params import canonical_shapes, num_parameters
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8

CASE = families.BY_NAME["llama"]


@functools.cache
def stored() -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(CASE.folder / "model.safetensors")


def write(folder: pathlib.Path, tensors: dict[str, np.ndarray], **config: Any) -> pathlib.Path:
    """A folder with the llama fixture's configuration, changed where asked."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASE.config | config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_of(folder: pathlib.Path) -> np.ndarray:
    return np.asarray(logits(load(folder, dtype="float32", progress=False), CASE.tokens[:1, :8]))


# --- I1: the tied flag and lm_head


def test_i1_untied_with_a_head_uses_the_head(tmp_path: pathlib.Path):
    actual = logits_of(write(tmp_path / "m", stored(), tie_word_embeddings=False))
    np.testing.assert_allclose(actual, CASE.logits[:1, :8], atol=2e-3, rtol=0)


def test_i1_untied_without_a_head_is_refused(tmp_path: pathlib.Path):
    tensors = {name: array for name, array in stored().items() if name != "lm_head.weight"}
    folder = write(tmp_path / "m", tensors, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(folder, progress=False)


def test_i1_tied_uses_the_embedding_whether_or_not_there_is_a_head(tmp_path: pathlib.Path, caplog):
    embedding = stored()["model.embed_tokens.weight"]
    without = {name: array for name, array in stored().items() if name != "lm_head.weight"}
    # What a tied model has to give: an untied one whose head is a copy of the embedding.
    expected = logits_of(write(tmp_path / "copy", without | {"lm_head.weight": embedding}, tie_word_embeddings=False))
    assert not np.allclose(expected, CASE.logits[:1, :8], atol=2e-3)
    cases = {"absent": without, "equal": without | {"lm_head.weight": embedding}, "different": stored()}
    for name, tensors in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxinfer"):
            actual = logits_of(write(tmp_path / name, tensors, tie_word_embeddings=True))
        np.testing.assert_array_equal(actual, expected)
        warned = [record.getMessage() for record in caplog.records if "lm_head.weight" in record.getMessage()]
        assert len(warned) == (1 if name == "different" else 0)


# --- Strictness


def test_tensors_missing_surplus_and_misshapen_are_all_listed(tmp_path: pathlib.Path):
    tensors = dict(stored())
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.strange.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 47), np.float32)
    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path / "m", tensors), progress=False)
    message = str(caught.value)
    for part in (
        "2 missing",
        "norm.weight",
        "layers.1.up_proj.weight (model.layers.1.mlp.up_proj.weight in the file)",
        "1 unexpected: model.layers.0.self_attn.strange.weight",
        "layers.0.down_proj.weight (model.layers.0.mlp.down_proj.weight in the file) is [32, 47], expected [32, 48]",
        "download",
    ):
        assert part in message
    assert "\n" not in message


def test_a_configuration_of_another_size_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(CheckpointError, match=r"is \[96, 32\], expected \[95, 32\]"):
        load(write(tmp_path / "m", stored(), vocab_size=95), progress=False)
    with pytest.raises(CheckpointError, match=r"missing: .*layers\.2\."):
        load(write(tmp_path / "m", stored(), num_hidden_layers=3), progress=False)
    with pytest.raises(CheckpointError, match=r"unexpected: .*layers\.1\."):
        load(write(tmp_path / "m", stored(), num_hidden_layers=1), progress=False)


# --- Precision


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_weights_are_rounded_once_to_the_dtype_asked_for(tmp_path: pathlib.Path, source: type, target: str):
    tensors = {name: array.astype(source) for name, array in stored().items()}
    model = load(write(tmp_path / "m", tensors), dtype=target, progress=False)
    assert model.dtype == jnp.dtype(target)
    pairs = {
        "model.embed_tokens.weight": model.params.embed_tokens,
        "lm_head.weight": model.params.lm_head,
        "model.layers.1.mlp.down_proj.weight": model.params.layers[1].down,
    }
    for name, array in pairs.items():
        expected = tensors[name].astype(target)
        assert isinstance(array, jax.Array) and array.dtype == expected.dtype
        assert np.asarray(array).tobytes() == expected.tobytes()
    assert model.params.norm.dtype == jnp.float32
    np.testing.assert_array_equal(model.params.norm, tensors["model.norm.weight"].astype(np.float32))


def test_values_beyond_float16_are_refused(tmp_path: pathlib.Path):
    tensors = stored() | {"lm_head.weight": np.full((96, 32), 7e4, np.float32)}
    folder = write(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* has values beyond float16's 65504; use bfloat16"):
        load(folder, dtype="float16", progress=False)
    load(folder, dtype="bfloat16", progress=False)


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype: str):
    with pytest.raises(ValueError, match=f"dtype='{dtype}': weights can be float32, bfloat16 or float16"):
        load(CASE.folder, dtype=dtype, progress=False)


def test_the_default_dtype_is_that_of_the_device():
    model = load(str(CASE.folder), progress=False)
    assert model.dtype == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    assert model.num_parameters == num_parameters(model.config) == sum(array.size for array in stored().values())


# --- Random weights


def test_random_weights_need_nothing_but_the_configuration(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(CASE.config))
    model, again, other = (load(tmp_path, random_weights=seed, progress=False) for seed in (3, 3, 4))
    assert model.tokenizer is None
    np.testing.assert_array_equal(model.params.embed_tokens, again.params.embed_tokens)
    assert not np.array_equal(model.params.embed_tokens, other.params.embed_tokens)
    options = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert generate(model, [[1, 2]], options)[0].token_ids == generate(again, [[1, 2]], options)[0].token_ids


def test_random_weights_do_not_read_the_real_ones(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(CASE.config))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    load(tmp_path, random_weights=0, progress=False)
    with pytest.raises(CheckpointError):
        load(tmp_path, progress=False)


# --- Paths and configurations


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nothing", "./nothing: no such file or folder; a model to fetch is written name or owner/name"),
        ("model.gguf", "model.gguf: no such file or folder"),
        ("a/b/c", "a/b/c: no such file or folder"),
        ("/nowhere/model", "/nowhere/model: no such file or folder"),
    ],
)
def test_a_missing_path_is_named(path: str, message: str):
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        load(path, progress=False)


def test_a_folder_without_a_configuration(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in this folder \(no \.gguf file either\); give a"):
        load(tmp_path, progress=False)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"no config\.json in this folder \(a\.gguf, b\.gguf\); give .* one \.gguf"
    ):
        load(tmp_path, progress=False)


def test_a_file_that_is_no_gguf(tmp_path: pathlib.Path):
    path = tmp_path / "model.safetensors"
    shutil.copy(CASE.folder / "model.safetensors", path)
    with pytest.raises(
        ValueError, match=r"not a \.gguf file; give a \.gguf file or the folder that holds config\.json"
    ):
        load(path, progress=False)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: pathlib.Path):
    model = gguf_models.gguf_model("llama", layers=1, hidden=32, ff=32, heads=2, kv_heads=1, context=64, vocab=32)
    arrays = {name: np.zeros(info.shape, np.float32) for name, info in model.tensors.items()}
    gguf_files.write(tmp_path / "tiny.gguf", model.metadata, arrays)
    assert load(tmp_path, progress=False).config == load(tmp_path / "tiny.gguf", progress=False).config


def test_a_folder_with_the_parts_of_one_gguf_model_is_that_model(tmp_path: pathlib.Path):
    model = gguf_models.gguf_model("llama", layers=1, hidden=32, ff=32, heads=2, kv_heads=1, context=64, vocab=32)
    arrays = [(name, np.zeros(info.shape, np.float32)) for name, info in model.tensors.items()]
    gguf_files.write_split(tmp_path, model.metadata, [dict(arrays[:5]), dict(arrays[5:])])
    assert load(tmp_path, progress=False).config.num_layers == 1
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"\(model-00001-of-00002\.gguf, other\.gguf\); .* any part"):
        load(tmp_path, progress=False)


def test_a_missing_key_is_named_with_its_folder_and_what_to_do(tmp_path: pathlib.Path):
    folder = write(tmp_path / "m", stored())
    config = {key: value for key, value in CASE.config.items() if key != "hidden_size"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"m: config\.json: hidden_size is missing; .* download the file again"
    ) as caught:
        load(folder, progress=False)
    assert str(caught.value).startswith(str(folder))


def test_integers_in_place_of_weights_are_refused_before_anything_is_read(tmp_path: pathlib.Path):
    tensors = dict(stored())
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)
    folder = write(tmp_path / "m", tensors)
    message = r"the tensors do not fit .* integers in place of weights: layers\.1\.up_proj\.weight \(model\.layers"
    with pytest.raises(CheckpointError, match=message):
        load(folder, progress=False)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_pipes_do_not_block(tmp_path: pathlib.Path, name: str):
    """Opening a pipe that nobody writes to never ends."""
    folder = markov.save(tmp_path / "m", {})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=re.escape(f"{folder / name} is not a ")):
        load(folder, progress=False)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json",
        "chat_template.jinja", "additional_chat_templates/rag.jinja", "model.safetensors",
        "model.safetensors.index.json", "model-00001-of-00001.safetensors",
    ],
)  # fmt: skip
def test_a_link_to_nothing_is_not_an_absent_file(tmp_path: pathlib.Path, name: str):
    """A Hugging Face snapshot holds links into ../../blobs, which a plain copy leaves behind."""
    folder = markov.save(tmp_path / "m", {})
    link = folder / name
    if link.name.startswith("model-"):
        index = {"weight_map": {"lm_head.weight": link.name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("../../blobs/0a1b")
    message = f"{link} is a link to ../../blobs/0a1b, which is not there; copy the snapshot with its files (cp -L), or"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(folder, progress=False)


def test_a_gguf_file_that_is_a_pipe_or_a_device_is_refused(tmp_path: pathlib.Path):
    os.mkfifo(tmp_path / "m.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for path in (tmp_path / "m.gguf", tmp_path / "zero.gguf", pathlib.Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=re.escape(f"{path} is not a regular file; give a file on a disk")):
            load(path, progress=False)


def test_an_unknown_model_type_is_refused_with_those_that_are_known(tmp_path: pathlib.Path):
    folder = write(tmp_path / "m", stored(), model_type="mamba")
    with pytest.raises(ValueError, match="mamba") as caught:
        load(folder, progress=False)
    for known in ("llama", "qwen3", "gemma3_text", "glm4"):
        assert known in str(caught.value)


def test_nothing_is_printed_when_progress_is_off(capsys: pytest.CaptureFixture[str]):
    load(CASE.folder, progress=False)
    assert capsys.readouterr() == ("", "")


def test_code_in_the_folder_is_never_run(tmp_path: pathlib.Path):
    """Files that would leave a mark if imported or unpickled, named by the configuration as remote code is."""
    mark = tmp_path / "mark"
    classes = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    folder = write(tmp_path / "m", stored(), auto_map=classes)
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    # A pickle that opens a file when loaded: GLOBAL "builtins open", its arguments, REDUCE.
    pickled = b"cbuiltins\nopen\n(V" + str(mark).encode() + b"\nVw\ntR."
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickled)
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": "generate.py", "eos_token_id": 5}))
    model = load(folder, dtype="float32", progress=False)
    assert model.config.eos_token_ids == (2, 5)
    np.testing.assert_allclose(np.asarray(logits(model, CASE.tokens[:1, :8])), CASE.logits[:1, :8], atol=2e-3, rtol=0)
    assert not mark.exists()


# --- Weights of GGUF files that stay packed

EIGHT_BITS = ("Q8_0", "Q5_1", "Q5_K", "Q6_K")
"""Types whose codes need more than 4 bits."""


@pytest.mark.parametrize(
    ("arch", "kind"),
    [("llama", kind) for kind in ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", *EIGHT_BITS)]
    + [("phi3", "Q4_1"), ("phi3", "Q8_0")],
)
def test_packed_weights_are_the_decoded_ones(tmp_path: pathlib.Path, monkeypatch, arch: str, kind: str):
    """Row order undone (llama's q and k), rows of fused tensors (phi3), pieces of a few rows at a time: exactly."""
    monkeypatch.setattr(checkpoints.formats.codes, "ELEMENTS_AT_ONCE", 5 * 256)
    model = gguf_models.gguf_model(
        arch, layers=1, hidden=256, ff=256, heads=4, kv_heads=2, context=64, vocab=64, output=True,
        rope__dimension_count=64,
    )  # fmt: skip
    path = gguf_models.write_packed(tmp_path / "m.gguf", model, kind)
    decoded = load(path, dtype="float32", packed=False, progress=False).params
    packed = load(path, dtype="float32", packed=True, progress=False).params
    identity = jnp.eye(256, dtype=jnp.float32)
    for field in ("qkv", "o", "gate_up", "down"):
        weight = getattr(packed.layers[0], field)
        assert isinstance(weight, PackedInt8 if kind in EIGHT_BITS else PackedInt4)
        expected = getattr(decoded.layers[0], field)
        np.testing.assert_allclose(linear(identity, weight), np.asarray(expected).T, rtol=1e-6, atol=1e-8)
        assert weight.scales.dtype == (np.float16 if kind in ("Q4_0", "Q4_1", "IQ4_NL", "Q8_0", "Q5_1") else np.float32)
    np.testing.assert_array_equal(packed.embed_tokens, decoded.embed_tokens)


def test_mixed_types_are_stacked(tmp_path: pathlib.Path):
    """As in a Q4_K_M file: v and down in Q6_K, the rest in Q4_K."""
    model = gguf_models.gguf_model(
        "llama", layers=1, hidden=256, ff=256, heads=4, kv_heads=2, context=64, vocab=64, rope__dimension_count=64
    )
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray | gguf_files.Packed] = {}
    for name, info in model.tensors.items():
        kind = "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"
        tensors[name] = np.ones(info.shape, np.float32)
        if len(info.shape) == 2:
            tensors[name] = gguf_files.packed(rng, kind, *info.shape)
    path = gguf_files.write(tmp_path / "m.gguf", model.metadata, tensors)
    decoded = load(path, dtype="float32", packed=False, progress=False).params.layers[0]
    packed = load(path, dtype="float32", packed=True, progress=False).params.layers[0]
    assert [type(part) for part in packed.qkv.parts] == [PackedInt4, PackedInt8]
    for field in ("qkv", "down"):
        product = linear(jnp.eye(256, dtype=jnp.float32), getattr(packed, field))
        np.testing.assert_allclose(product, np.asarray(getattr(decoded, field)).T, rtol=1e-6, atol=1e-8)


# --- Peak memory

BIG = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""48 million weights, 191 MB in float32; the largest tensor, a projection of the MLP, is 25 MB, and gate and up, which
are joined, 50."""

MEASURE = """
import json, sys, jax, numpy
from jaxinfer.model import _shown_count, inspect, load
from jaxinfer.params import canonical_shapes

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field + ":"))

jax.block_until_ready(jax.device_put(numpy.zeros(1)))
before = status("VmRSS")
model = load(sys.argv[1], dtype=sys.argv[2], packed=sys.argv[3] == "packed", progress=False)
peak = status("VmHWM") - before
final = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps({"peak": peak, "final": final, "after": status("VmRSS") - before}))
"""


def big_tensors(dtype: type) -> dict[str, np.ndarray]:
    """Constant arrays: what matters is their size."""
    hidden, ff = BIG["hidden_size"], BIG["intermediate_size"]
    layer = {
        "self_attn.q_proj": (1024, hidden),
        "self_attn.k_proj": (256, hidden),
        "self_attn.v_proj": (256, hidden),
        "self_attn.o_proj": (hidden, 1024),
        "mlp.gate_proj": (ff, hidden),
        "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (BIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    return {name: np.full(shape, 0.5, dtype) for name, shape in shapes.items()}


def big_folder(path: pathlib.Path, dtype: type, shards: int) -> pathlib.Path:
    tensors = big_tensors(dtype)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CASE.config | BIG))
    if shards == 1:
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        return path
    places = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def big_gguf(path: pathlib.Path) -> pathlib.Path:
    """Embedding in Q8_0, projections in Q4_0, norms in float32."""
    model = gguf_models.gguf_model(
        "llama", layers=2, hidden=1024, ff=6144, heads=16, kv_heads=4, head_dim=64, context=128, vocab=4096
    )
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray | gguf_files.Packed] = {}
    for name, info in model.tensors.items():
        if len(info.shape) == 1:
            tensors[name] = np.ones(info.shape, np.float32)
        else:
            tensors[name] = gguf_files.packed(rng, "Q8_0" if name == "token_embd.weight" else "Q4_0", *info.shape)
    return gguf_files.write(path, model.metadata, tensors)


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads peak memory from Linux's /proc")
@pytest.mark.parametrize("kind", ["float32", "bfloat16 shards", "gguf", "gguf packed"])
def test_peak_memory_is_the_model_and_the_largest_tensor(tmp_path: pathlib.Path, kind: str):
    """In a process of its own, loaded to float32: resident memory over that before loading."""
    if kind == "float32":
        path = big_folder(tmp_path / "m", np.float32, 1)
    elif kind == "bfloat16 shards":
        path = big_folder(tmp_path / "m", ml_dtypes.bfloat16, 3)
    else:
        path = big_gguf(tmp_path / "m.gguf")
    packed = "packed" if kind == "gguf packed" else "decoded"
    command = [sys.executable, "-c", MEASURE, str(path), "float32", packed]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    config = load(path, random_weights=0, progress=False).config
    largest = 4 * max(int(np.prod(shape)) for shape in canonical_shapes(config).values())
    assert largest == 4 * 6144 * 1024
    if packed == "decoded":
        assert measured["final"] == 4 * num_parameters(config)
    else:
        assert measured["final"] < num_parameters(config)
    assert measured["after"] > 0.8 * measured["final"]  # the figures see the weights
    assert measured["peak"] <= measured["final"] + largest


# --- Said in one line


def test_a_model_shows_itself_in_one_line():
    folder = families.BY_NAME["llama"].folder
    model = load(folder, dtype="float32", progress=False)
    assert re.fullmatch(r"Model\('.*llama', llama, [\d,]+ parameters in [\d.]+ kB, float32\)", repr(model))
    packed = load(folder, dtype="float32", quantize="int4", progress=False)
    assert re.fullmatch(r"Model\('.*llama', llama, [\d,]+ parameters in [\d.]+ kB, float32 and int4\)", repr(packed))
    assert _shown_count(134_515_008) == "134.5 million"
    assert _shown_count(8_030_261_248) == "8.03 billion"


def test_repr_of_a_description_is_one_line(tmp_path: pathlib.Path):
    path = str(CASE.folder)
    assert repr(inspect(CASE.folder, progress=False)) == (
        f"Description({path!r}, llama, 21,664 parameters in 2 layers, context 128, no tokenizer, "
        "21 tensors in 43.3 kB, BF16)"
    )
    tensors = stored() | {"model.norm.weight": np.zeros(3, np.float32)}
    assert repr(inspect(write(tmp_path / "other", tensors), progress=False)).endswith("BF16 and F32, which do not fit)")
    (tmp_path / "other" / "model.safetensors").unlink()
    assert repr(inspect(tmp_path / "other", progress=False)).endswith("no tokenizer, no tensors)")
