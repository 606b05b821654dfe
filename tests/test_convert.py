"""Folders for other engines: codes in their layouts, bit by bit, for our readers and by the formats' own documents."""

import functools
import json
import pathlib
from typing import Any

import families
import jax
import numpy as np
import pytest
import quantized_checkpoints
import safetensors.numpy

import jaxinfer.cli
from checkpoints.export import ShardWriter, write_file
from checkpoints.export_formats import awq_parts, compressed_parts
from checkpoints.formats import awq, compressed_tensors, fp8
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.safetensors import SafetensorsFolder
from checkpoints.safetensors_file import SafetensorsFile
from jaxinfer.model import load
from jaxinfer.quantization.plan import Plan, Precision, Rule, uniform
from jaxinfer.store.create import create
from jaxinfer.store.export import export
from jaxinfer.store.reader import Store
from jaxinfer.store.tensors import StoredTensors

LLAMA = families.BY_NAME["llama"].folder
ASYMMETRIC, SYMMETRIC = Precision(4, 16), Precision(4, 16, symmetric=True)


def same(first: Any, second: Any) -> bool:
    """Whether two pytrees are equal to the bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    equal = all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return equal and jax.tree.structure(first) == jax.tree.structure(second)


def packed(path: pathlib.Path) -> Any:
    return load(path, dtype="bfloat16", packed=True, progress=False).params


# --- Parts, against a plain reading of the formats' documents


def random_codes(rows: int, inputs: int, bits: int, group: int, zeros: bool) -> QuantizedTensor:
    rng = np.random.default_rng(rows + inputs + bits)
    codes = rng.integers(0, 2**bits, (rows, inputs)).astype(np.uint8)
    scales = rng.uniform(0.5, 2.0, (rows, inputs // group)).astype(np.float16)
    offsets = rng.integers(0, 2**bits, scales.shape).astype(np.uint8) if zeros else None
    if offsets is not None:
        offsets[0], offsets[-1] = 0, 2**bits - 1

    def some(start: int, stop: int) -> Codes:
        return Codes(
            codes[start:stop], scales[start:stop], None if offsets is None else offsets[start:stop], None,
            4 if bits == 4 else 8, group,
        )  # fmt: skip

    return QuantizedTensor((rows, inputs), some)


@pytest.mark.parametrize("zeros", [False, True])
def test_awq_words_by_the_format(zeros: bool) -> None:
    """Trap I5: column 8 c + ORDER[j] of input i is nibble j of word [i, c], AutoAWQ's order being 0, 2, 4, 6, 1, 3, 5,
    7; zeros are stored as they are, 0 and 15 among them.
    """
    tensor = random_codes(24, 64, 4, 32, zeros)
    parts, scheme = awq_parts([(tensor, 0, 24)], "w")
    assert (scheme.group_size, {name: part.shape for name, part in parts.items()}) == (
        32,
        {"qweight": (64, 3), "qzeros": (2, 3), "scales": (2, 24)},
    )
    codes = tensor.rows(0, 24)
    words, zero_words = parts["qweight"].view(np.uint32), parts["qzeros"].view(np.uint32)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        np.testing.assert_array_equal((words >> (4 * nibble)) & 15, codes.codes[column::8].T)
        expected = np.full((2, 3), 8) if codes.offsets is None else codes.offsets[column::8].T
        np.testing.assert_array_equal((zero_words >> (4 * nibble)) & 15, expected)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_packed_integers_by_the_format(bits: int, zeros: bool) -> None:
    """Codes along the inputs and zeros along the outputs, both plus 2**(bits - 1), lowest bits first."""
    tensor = random_codes(20, 64, bits, 32, zeros)
    parts, _ = compressed_parts([(tensor, 4, 20)], "w")  # rows of a larger tensor
    codes = tensor.rows(4, 20)
    per_word = 32 // bits
    words = parts["weight_packed"].view(np.uint32)
    for field in range(per_word):
        np.testing.assert_array_equal((words >> (bits * field)) & (2**bits - 1), codes.codes[:, field::per_word])
    np.testing.assert_array_equal(parts["weight_shape"], [16, 64])
    np.testing.assert_array_equal(parts["weight_scale"], codes.scales)
    assert ("weight_zero_point" in parts) == zeros
    if codes.offsets is not None:
        stored = parts["weight_zero_point"].view(np.uint32)
        assert stored.shape == (16 // per_word, 2)
        for field in range(per_word):
            np.testing.assert_array_equal((stored >> (bits * field)) & (2**bits - 1), codes.offsets[field::per_word])


@functools.cache
def library_cases() -> dict[str, dict[str, np.ndarray]]:
    """Weights as AutoAWQ and compressed-tensors packed them: tests/oracle/make_quantized.py."""
    file = SafetensorsFile(pathlib.Path(__file__).parent / "fixtures" / "quantized.safetensors")
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name in file.tensors:
        case, part = name.split("|")
        cases.setdefault(case, {})[part] = file.read(name)
    return cases


@pytest.mark.parametrize(
    "name", ["ct_int4_sym", "ct_int4_asym", "ct_int8_sym", "ct_channel", "ct_fp8_channel", "ct_fp8_block"]
)
def test_compressed_tensors_own_packing_is_written_again(name: str) -> None:
    stored = dict(library_cases()[name])
    options = json.loads(stored.pop("options").tobytes())
    stored.pop("values")
    if "weight" in stored:
        block = tuple(options["block"]) if "block" in options else None
        tensor = fp8.decode(stored, "weight_scale", block, name)
    else:
        tensor = compressed_tensors.decode_packed(stored, options.get("bits"), options.get("group_size"), name)
    parts, scheme = compressed_parts([(tensor, 0, tensor.shape[0])], name)
    assert same(parts, stored)
    assert scheme.symmetric == ("weight_zero_point" not in stored)


@pytest.mark.parametrize("name", ["awq_gemm_64", "awq_gemm_128"])
def test_autoawqs_own_packing_is_written_again(name: str) -> None:
    stored = dict(library_cases()[name])
    options = json.loads(stored.pop("options").tobytes())
    stored.pop("values")
    tensor = awq.decode(stored, options["group_size"], name)
    parts, scheme = awq_parts([(tensor, 0, tensor.shape[0])], name)
    assert same(parts, stored)
    assert scheme.group_size == options["group_size"]


# --- Models


@pytest.mark.parametrize(
    ("format", "plan"),
    [
        ("awq", uniform("int4", ASYMMETRIC)),
        ("compressed-tensors", uniform("int4", ASYMMETRIC)),
        ("compressed-tensors", uniform("int4", SYMMETRIC)),
        ("compressed-tensors", uniform("fp8", Precision(8, method="fp8"))),
        ("compressed-tensors", uniform("int8 in groups", Precision(8, 16, symmetric=False))),
        (
            "compressed-tensors",
            Plan(
                (
                    Rule(("lm_head", "*.v_proj"), Precision(8)),
                    Rule(("*.o_proj",), Precision(16)),
                    Rule(("*.down_proj",), Precision(8, method="fp8")),
                    Rule(("*",), SYMMETRIC),
                ),
                "mixed",
            ),
        ),
    ],
    ids=["awq", "asymmetric", "symmetric", "fp8", "int8 in groups", "mixed"],
)
def test_what_we_quantised_comes_back_bit_by_bit(format: Any, plan: Plan, tmp_path: pathlib.Path) -> None:
    store = create(LLAMA, tmp_path / "store", plan=plan)
    out = export(store, tmp_path / "out", format=format, progress=False)
    assert same(packed(out), packed(store))
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == format
    report = json.loads((out / "quantization_report.json").read_text())
    assert report == {"plan": {"name": plan.name, **plan.to_mapping()}, "quality": None}
    if plan.name == "mixed":
        assert settings["format"] == "mixed-precision"
        assert settings["ignore"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
        by_format = {group["format"]: group for group in settings["config_groups"].values()}
        assert by_format["float-quantized"]["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]


@pytest.mark.parametrize(
    "kind", ["packed int4 order", "packed int4 asymmetric", "packed int8", "fp8 channel", "fp8 whole blocks"]
)
def test_checkpoints_of_compressed_tensors_are_written_as_they_were(kind: str, tmp_path: pathlib.Path) -> None:
    """The parts of each weight to the bit, from the folder itself and by way of a store where it can stay packed."""
    case = quantized_checkpoints.make(kind, tmp_path)
    original = safetensors_of(case.quantized)
    sources = {"direct": case.quantized, "by store": create(case.quantized, tmp_path / "store")}
    for name, source in sources.items():
        written = safetensors_of(export(source, tmp_path / name, format="compressed-tensors", progress=False))
        for tensor, array in original.items():
            if "_proj." in tensor and "shape" not in tensor:
                mine = written[tensor].reshape(array.shape)
                assert mine.astype(array.dtype).tobytes() == array.tobytes(), tensor


def safetensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    opened = SafetensorsFolder(folder)
    return {name: opened.read(name) for name in opened.tensors}


def test_awq_and_gptq_as_compressed_tensors(tmp_path: pathlib.Path) -> None:
    for kind in ("awq gemm", "gptq act-order"):
        case = quantized_checkpoints.make(kind, tmp_path / kind)
        out = export(case.quantized, tmp_path / kind / "out", format="compressed-tensors", progress=False)
        assert same(packed(out), packed(case.quantized))


@pytest.mark.parametrize("family", ["gemma2", "phi3", "glm4", "qwen3"])
def test_decoded_it_is_a_folder_of_the_family(family: str, tmp_path: pathlib.Path) -> None:
    """Under the family's names, fused where it fuses, norms without its offset; by way of a store too."""
    folder = families.BY_NAME[family].folder
    expected = load(folder, dtype="float32", progress=False).params
    store = create(folder, tmp_path / "store", dtype="float32")
    for name, source in {"direct": folder, "by store": store}.items():
        out = export(source, tmp_path / name, dtype="float32", progress=False)
        assert same(load(out, dtype="float32", progress=False).params, expected)
        assert set(SafetensorsFolder(out).tensors) == set(SafetensorsFolder(folder).tensors)


def test_fused_tensors_keep_their_codes(tmp_path: pathlib.Path) -> None:
    """phi3 has q, k and v in one tensor: one plan for the three, or a refusal."""
    folder = families.BY_NAME["phi3"].folder
    store = create(folder, tmp_path / "store", plan=uniform("int4", SYMMETRIC))
    out = export(store, tmp_path / "out", format="compressed-tensors", progress=False)
    assert same(packed(out), packed(store))
    plan = Plan((Rule(("*.v_proj",), Precision(8)), Rule(("*",), SYMMETRIC)))
    store = create(folder, tmp_path / "other", plan=plan)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight is one tensor in this family, and its parts have several"):
        export(store, tmp_path / "none", format="compressed-tensors", progress=False)
    assert not (tmp_path / "none").exists()


LAST = "layers.1.down_proj"


@pytest.mark.parametrize(
    ("format", "rules", "message"),
    [
        ("awq", [Rule((LAST,), Precision(8))], f"model.{LAST}".replace("down", "mlp.down") + ".weight has 8 bits"),
        ("awq", [Rule(("layers.1.o_proj",), Precision(4, 32))], "groups are of all and of 16 inputs, AWQ has one size"),
        ("compressed-tensors", [Rule((LAST,), Precision(4, 16, method="hqq"))], "has minima in place of zero points"),
        ("awq", [Rule(("*",), Precision(16))], "has no codes to write as awq; quantise it first"),
    ],
)
def test_what_a_format_has_no_form_for_is_refused_before_anything_is_written(
    format: Any,
    rules: list[Rule],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where it is the last weight."""
    store = create(LLAMA, tmp_path / "store", plan=Plan((*rules, Rule(("*",), ASYMMETRIC))))
    monkeypatch.setattr(ShardWriter, "write", lambda *given: pytest.fail("a file is written"))
    assert jaxinfer.cli.main(["convert", str(store), str(tmp_path / "out"), "--format", format]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gptq act-order", "fp8 blocks", "gptq 8 bits", "nvfp4", "fp8 channel"])
def test_an_outline_is_of_the_same_kind_as_the_store(kind: str, tmp_path: pathlib.Path) -> None:
    """What the check before writing sees, for every tensor: of codes everything but their values."""
    store = Store(create(quantized_checkpoints.make(kind, tmp_path).quantized, tmp_path / "store"))
    real, outline = StoredTensors(store), StoredTensors(store).without_data()
    quantised = [name for name in real.tensors if real.code_bits(name) is not None]
    assert quantised
    for name in quantised:
        a, b = real.quantized(name), outline.quantized(name)
        assert a is not None and b is not None
        assert (a.shape, a.block_rows, a.permutation is None) == (b.shape, b.block_rows, b.permutation is None)
        for first, second in zip(vars(a.rows(1, 3)).values(), vars(b.rows(1, 3)).values(), strict=True):
            if isinstance(first, np.ndarray):
                assert (first.shape, first.dtype) == (second.shape, second.dtype)
            else:
                assert first == second


def test_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, again, out = (str(tmp_path / name) for name in ("store", "again", "out"))
    plan = tmp_path / "plan.toml"
    plan.write_text('[[rules]]\nweights = "*"\nbits = 4\ngroup_size = 16\n')
    assert jaxinfer.cli.main(["quantize", str(LLAMA), "--plan", str(plan), "--out", store]) == 0
    assert jaxinfer.cli.main(["convert", store, again]) == 0
    assert jaxinfer.cli.main(["convert", again, out, "--format", "awq"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{store}\n{again}\n{out}\n"
    assert "quality: not measured\n" in printed.err
    assert same(packed(pathlib.Path(out)), packed(pathlib.Path(store)))
    for arguments, message in {
        ("quantize", str(LLAMA), "--plan", "int5", "--out", str(tmp_path / "x")): "expected int4, ",
        ("quantize", str(LLAMA), "--plan", "int4", "--out", store): "exists already; remove it",
        ("quantize", str(LLAMA), "--plan", "int4", "--judge", "--out", str(tmp_path / "x")): "has no tokenizer to read",
        ("quantize", str(LLAMA), "--plan", "int4", "--evaluation", "a", "--out", "x"): "--evaluation goes with --cal",
        ("convert", str(tmp_path / "nowhere.gguf"), str(tmp_path / "x")): "no such file or folder",
        ("convert", store, out): "exists already; remove it",
    }.items():
        assert jaxinfer.cli.main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_the_tensors_of_a_store_are_those_of_the_checkpoint(tmp_path: pathlib.Path) -> None:
    store = StoredTensors(Store(create(LLAMA, tmp_path / "store", plan=uniform("int4", ASYMMETRIC))))
    tensor = store.quantized("layers.0.k_proj.weight")
    assert tensor is not None and store.code_bits("layers.0.k_proj.weight") == 4
    values = np.empty(tensor.shape, np.float32)
    store.read_into("layers.0.k_proj.weight", values)
    np.testing.assert_array_equal(values, tensor.rows(0, tensor.shape[0]).values())
    part = np.empty((3, tensor.shape[1]), np.float32)
    store.read_into("layers.0.k_proj.weight", part, slice(2, 5))
    np.testing.assert_array_equal(part, values[2:5])


# --- The writer of shards


def test_shards_are_read_by_the_formats_own_library(tmp_path: pathlib.Path) -> None:
    first, second = {"a": np.arange(6, dtype=np.float16).reshape(2, 3)}, {"b": np.zeros((0,), np.int64)}
    writer = ShardWriter(tmp_path, 2)
    writer.write(first)
    with pytest.raises(ValueError, match="1 of 2 shards are written"):
        writer.finish()
    writer.write(second)
    writer.finish()
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(tmp_path / "model-00001-of-00002.safetensors")["a"], first["a"]
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["b"] == "model-00002-of-00002.safetensors"
    assert index["metadata"]["total_size"] == writer.nbytes == 12
    with pytest.raises(ValueError, match="more than 2 shards"):
        writer.write({"c": np.zeros(1, np.int8)})
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "model-00001-of-00002.safetensors", first)
